"""The demo world's own verdict: 1 for a good response, 0 for a bad one.

A reward without error, which no real data set has. With it in place of the reward model a run tells
which of the two holds the policy back, the reward model or the optimisation. Prompts of other data
sets are refused.
"""

from __future__ import annotations

from typing import Any

from tasks.demo.oracle import is_good


def reward_fn(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Return whether a response is good for ``extra_info["prompt"]``, a list of messages."""
    return float(is_good(extra_info["prompt"], solution_str))
