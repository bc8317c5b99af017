"""Carries out what the guards ask of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tasks.algorithms.guard_actions import (
    Action,
    EnableGradientCheckpointing,
    GrowBatch,
    LowerTokenBudget,
    ResetSampler,
    Rollback,
    ScaleLearningRate,
    Stop,
)
from tasks.algorithms.guards import MemorySettings, OomLadder
from tasks.config_guards import GUARD_METRICS
from tasks.errors import MemoryLimitError

if TYPE_CHECKING:
    from tasks.backends.ppo_loop import PPOLoop

_GUARD_NAMES: Final = {"live_gradient": "live_gradient_share"}


def guarded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that rules may watch, by the names that rules use."""
    named = {_GUARD_NAMES.get(name, name): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if name in GUARD_METRICS}


def carry_out(loop: PPOLoop, actions: Sequence[Action]) -> None:
    """Do what merged actions say, in their order, and write a checkpoint of the result.

    The step goes on counting: a rollback takes weights and optimizers back, not the order of the
    data, so that the policy does not meet the very batches again that led it astray.
    """
    rebuilds = []
    for action in actions:
        match action:
            case Rollback(to=target):
                _roll_back(loop, loop.state.pointers[target])
            case ScaleLearningRate():
                loop.state.lr_scale = action.apply(loop.state.lr_scale)
                loop.set_learning_rates()
            case GrowBatch():
                _grow_batch(loop, action)
            case LowerTokenBudget() | EnableGradientCheckpointing():
                rebuilds.append(action)
            case ResetSampler():
                loop.sampler.reset(seed=loop.cfg.seed + loop.state.step)
                loop.state.pending = []
            case Stop(reason=reason):
                loop.state.stopped = reason or "a guard"
                loop.log.event("stopped", f"after step {loop.state.step}: {loop.state.stopped}")
    loop.save()
    for rebuild in rebuilds:
        _rebuild(loop, rebuild)


def lower_memory(loop: PPOLoop, error: MemoryLimitError) -> None:
    """Build the workers anew so that a step needs less memory.

    Raises:
        TrainingError: nothing is left to lower.
    """
    limits, runtime = loop.cfg.rendering, loop.session.runtime
    ladder = OomLadder(
        limits.max_prompt_tokens + limits.max_response_tokens,
        loop.cfg.guards.oom_token_budget_scale,
    )
    settings = MemorySettings(runtime.tokens_per_micro_batch, runtime.gradient_checkpointing)
    action = ladder.on_oom(settings)
    loop.log.event("out_of_memory", f"{error} {action.describe()}")
    _change_runtime(loop, ladder.after(settings, action))


def adopt_memory(loop: PPOLoop, kept: Mapping[str, Any] | None) -> bool:
    """Build the workers as small as an earlier process had to make them, before which it ran out
    of memory, so that this one need not find that out again.

    Args:
        loop: its workers are replaced; their weights have to be restored.
        kept: `MemorySettings` of a checkpoint as plain values; None when nothing was lowered.

    Returns:
        Whether the workers were built anew.
    """
    if kept is None:
        return False
    settings, runtime = MemorySettings(**kept), loop.session.runtime
    loop.lowered = settings
    if settings == MemorySettings(runtime.tokens_per_micro_batch, runtime.gradient_checkpointing):
        return False
    _change_runtime(loop, settings)
    loop.log.event(
        "memory_lowered",
        f"{settings.tokens_per_micro_batch} tokens per micro-batch, gradient checkpointing "
        f"{'on' if settings.gradient_checkpointing else 'off'}, as before the restart",
    )
    return True


def _rebuild(loop: PPOLoop, action: LowerTokenBudget | EnableGradientCheckpointing) -> None:
    runtime = loop.session.runtime
    settings = MemorySettings(runtime.tokens_per_micro_batch, runtime.gradient_checkpointing)
    _change_runtime(loop, OomLadder(1).after(settings, action))
    loop.resume()


def _change_runtime(loop: PPOLoop, settings: MemorySettings) -> None:
    changes = {
        "tokens_per_micro_batch": settings.tokens_per_micro_batch,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }
    loop.lowered = settings
    loop.session.rebuild(loop.session.runtime.model_copy(update=changes))


def _roll_back(loop: PPOLoop, step: int) -> None:
    loop.store.restore(step, loop.session, loop.roles)
    loop.set_learning_rates()
    loop.log.event("rollback", f"to the weights of step {step} at step {loop.state.step}")


def _grow_batch(loop: PPOLoop, action: GrowBatch) -> None:
    ranks = loop.session.host.ranks
    grown = action.apply(loop.state.batch_prompts)
    loop.state.batch_prompts = max(loop.state.batch_prompts, grown - grown % ranks)
    loop.sampler.set_batch_size(loop.state.batch_prompts)
