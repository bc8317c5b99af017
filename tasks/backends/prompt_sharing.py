"""Decides whether a model's rows may share their prompts, and with which attention."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

from tasks.algorithms.prefix_rows import MergeLimit
from tasks.config import RuntimeConfig

FLEX_ATTENTION: Final = "flex_attention"
TREE_ATTENTION: Final = "tree_attention"
# Tokens of a packed micro-batch: below this the fixed cost shows, and above it a model of a hundred
# million parameters is no faster but needs more memory.
PACKED_TOKENS: Final = 2048
# Decoders of transformers whose layers all take a given 4D mask and positions as they are, and pass
# unknown keywords on to the attention that is registered under the config's name.
MERGEABLE_MODEL_TYPES = frozenset(
    {"gemma", "granite", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"}
)
_SMALLEST_FLEX_HEAD = 16


def plain_rows_reason(config: Any, runtime: RuntimeConfig) -> str | None:
    """Say why rows of this model are computed one by one though prompts should be shared.

    Args:
        config: the model's config as transformers reads it.
        runtime: how it is run.

    Returns:
        None where prompts are shared or need not be.
    """
    if not runtime.share_prompts:
        return None
    if runtime.remove_padding:
        return "runtime.remove_padding packs rows, which takes no mask"
    if runtime.attention != "sdpa":
        return f"runtime.attention {runtime.attention} takes no mask"
    if config.model_type not in MERGEABLE_MODEL_TYPES:
        return f"model type {config.model_type} is not known to keep to a given mask"
    if _has_window(config):
        return "the model's attention has a sliding window"
    if getattr(config, "attention_dropout", 0.0):
        return "the model has attention dropout, which rows would share"
    return None


def _has_window(config: Any) -> bool:
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return True
    used = getattr(config, "use_sliding_window", True)
    return bool(used) and getattr(config, "sliding_window", None) is not None


def shares_prompts(config: Any, runtime: RuntimeConfig) -> bool:
    """Return whether rows of the same prompt are merged."""
    return runtime.share_prompts and plain_rows_reason(config, runtime) is None


def attention_implementation(
    config: Any, runtime: RuntimeConfig, device: Literal["cpu", "cuda"]
) -> str:
    """Return the attention to load a model with.

    Merged rows are computed piece by piece on CPU. On CUDA, where many small kernels are slow, they
    take block-sparse attention, which skips the blocks between siblings; its kernels want heads
    whose width is a power of two.
    """
    if not shares_prompts(config, runtime):
        return runtime.attention
    if device == "cpu":
        return TREE_ATTENTION
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fits = width >= _SMALLEST_FLEX_HEAD and width & (width - 1) == 0
    return FLEX_ATTENTION if fits else runtime.attention


def merge_limit(config: Any, max_tokens: int) -> MergeLimit:
    """Return how far rows are merged.

    With width h and a feed-forward layer of about 3 h, the matrices of a layer take about 12 h^2
    multiplications per token and attention over n tokens 2 n h, so that with a dense mask attention
    costs as much as the rest at n = 6 h. The others do not work on what the mask hides, however
    long the row.

    Args:
        config: the model's, with the attention that it was loaded with.
        max_tokens: of a micro-batch.
    """
    attention = config._attn_implementation
    if attention == TREE_ATTENTION:
        return MergeLimit(min(max_tokens, PACKED_TOKENS), math.inf, packed=True)
    if attention == FLEX_ATTENTION:
        return MergeLimit(max_tokens, math.inf)
    return MergeLimit(max_tokens, 6.0 * float(config.hidden_size))
