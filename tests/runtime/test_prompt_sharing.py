"""Which models share prompts, and with which attention."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from tasks.algorithms.packed_rows import MergeLimit
from tasks.config.shared import RuntimeConfig
from tasks.runtime.micro_batches import (
    FLEX_ATTENTION,
    PACKED_TOKENS,
    TREE_ATTENTION,
    attention_implementation,
    merge_limit,
    plain_rows_reason,
    shares_prompts,
)


@pytest.mark.parametrize(
    ("changes", "runtime", "reason"),
    [
        ({}, {}, None),
        ({}, {"share_prompts": False, "remove_padding": True}, None),
        ({}, {"remove_padding": True}, "remove_padding packs rows"),
        ({}, {"attention": "flash_attention_2"}, "flash_attention_2 takes no mask"),
        ({"model_type": "gpt2"}, {}, "gpt2 is not known"),
        ({"sliding_window": 8}, {}, "sliding window"),
        ({"sliding_window": 8, "use_sliding_window": False}, {}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding window"),
        ({"attention_dropout": 0.1}, {}, "dropout"),
    ],
)
def test_models_whose_rows_stay_by_themselves(
    changes: dict[str, Any], runtime: dict[str, Any], reason: str | None
) -> None:
    config = LlamaConfig()
    for name, value in changes.items():
        setattr(config, name, value)
    settings_ = RuntimeConfig(**runtime)
    found = plain_rows_reason(config, settings_)
    assert found is None if reason is None else reason in str(found)
    assert shares_prompts(config, settings_) == (reason is None and settings_.share_prompts)


def test_attention_by_device() -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    runtime = RuntimeConfig()
    assert attention_implementation(config, runtime, "cpu") == TREE_ATTENTION
    assert attention_implementation(config, runtime, "cuda") == FLEX_ATTENTION
    off = RuntimeConfig(share_prompts=False)
    assert attention_implementation(config, off, "cuda") == "sdpa"
    assert attention_implementation(config, off, "cpu") == "sdpa"
    # 96 / 4 = 24 is no power of two.
    narrow = LlamaConfig(hidden_size=96, num_attention_heads=4)
    assert attention_implementation(narrow, runtime, "cuda") == "sdpa"


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        # Under a dense mask, attention over 6 * 256 tokens costs as much as the rest.
        ("sdpa", MergeLimit(100, 1536.0)),
        (FLEX_ATTENTION, MergeLimit(100)),
        (TREE_ATTENTION, MergeLimit(100, packed=True)),
    ],
)
def test_how_far_rows_are_merged(attention: str, expected: MergeLimit) -> None:
    config = LlamaConfig(hidden_size=256)
    config._attn_implementation = attention
    assert merge_limit(config, 100) == expected


def test_packed_micro_batches_are_no_longer_than_is_of_use() -> None:
    config = LlamaConfig()
    config._attn_implementation = TREE_ATTENTION
    assert merge_limit(config, 16384) == MergeLimit(PACKED_TOKENS, packed=True)
