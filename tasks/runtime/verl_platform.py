"""A CPU platform for verl, which ships CUDA, ROCm and NPU platforms only.

verl loads it from the environment variable ``VERL_USE_EXTERNAL_MODULES`` and picks it by
``VERL_PLATFORM=cpu``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> types.ModuleType:
    """Return `torch.cpu` plus the calls of `torch.cuda` that verl makes without asking."""
    module = types.ModuleType("rlhf_flows_cpu_device")
    public = [name for name in dir(torch.cpu) if not name.startswith("__")]
    module.__dict__.update({name: getattr(torch.cpu, name) for name in public})
    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    nothing = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device")
    values: dict[str, Any] = {name: lambda *_a, **_k: 0 for name in memory}
    values |= {name: lambda *_a, **_k: None for name in nothing}
    values |= {
        "mem_get_info": lambda *_a, **_k: (0, 0),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "get_device_name": lambda *_a, **_k: "CPU",
        # verl reads this as "an accelerator can be used" and then takes CUDA-only paths.
        "is_available": lambda: False,
    }
    module.__dict__.update(values)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """Answers verl's questions about the device for a machine without an accelerator."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE_MODULE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU work is synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the CPU allocator has no settings."""

    def empty_cache(self) -> None:
        """Do nothing: the CPU allocator has no cache to empty."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
