"""What a stored response is worth: the reward model, the label, a function of the user's, or a
mixture."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.rewards import center_by_group, combine_components, normalize_scores
from tasks.config import RewardConfig
from tasks.data.hh import Pair
from tasks.errors import MissingInputError, RewardError

RewardFunction = Callable[[str, str, str, dict[str, Any]], float]
PAIRS_PER_TASK = 2000
_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Load ``name`` from a Python file; its signature is verl's.

    ``reward_fn(data_source, solution_str, ground_truth, extra_info) -> float``: subset, response,
    the chosen response, and ``{"prompt", "pair_id", "side"}``.

    Raises:
        MissingInputError: no such file.
        RewardError: no such function, or one that takes other arguments.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingInputError(
            f"No reward function file {file}",
            "a Python file",
            "correct offline_ppo.reward.function_path",
        )
    spec = importlib.util.spec_from_file_location(f"rlhf_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(
            f"{file} does not import: {error}", "a module that imports", "mend the file"
        ) from error
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        raise RewardError(
            f"{file} has no function {name!r}", name, "correct offline_ppo.reward.function_name"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(_PARAMETERS))
    except TypeError as error:
        raise RewardError(
            f"{name} in {file} cannot be called: {error}",
            f"parameters {', '.join(_PARAMETERS)}",
            "rename them",
        ) from error
    return function


def function_scores(function: RewardFunction, pairs: Sequence[Pair]) -> Tensor:
    """Score both responses of each pair, chosen first, with a function of the user's.

    Returns:
        (2P,) fp32.

    Raises:
        RewardError: it raised or returned something that is not a finite number; names row and
            value.
    """
    scores = []
    for pair in pairs:
        prompt = [{"role": m.role, "content": m.content} for m in pair.prompt]
        for side, response in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            extra = {"prompt": prompt, "pair_id": pair.pair_id, "side": side}
            where = (
                f"reward function on the {side} response of {pair.source_file}:{pair.source_line}"
            )
            try:
                value = float(
                    function(  # by name, as verl calls it
                        data_source=pair.subset,  # type: ignore[call-arg]
                        solution_str=response,
                        ground_truth=pair.chosen,
                        extra_info=extra,
                    )
                )
            except Exception as error:
                raise RewardError(
                    f"{where} raised {error!r}", "a number", "mend the function"
                ) from error
            if not math.isfinite(value):
                raise RewardError(
                    f"{where} returned {value}", "a finite number", "mend the function"
                )
            scores.append(value)
    return torch.tensor(scores)


def function_scores_on_cluster(
    path: str, name: str, pairs: Sequence[Pair], pairs_per_task: int = PAIRS_PER_TASK
) -> Tensor:
    """Score both responses of each pair with a function of the user's, in Ray tasks.

    The file must be there on every node. Few pairs are scored here: a task needs seconds to start.

    Args:
        path: Python file.
        name: function in it.
        pairs: P pairs.
        pairs_per_task: pairs that one task scores.

    Returns:
        (2P,) fp32, chosen first.

    Raises:
        RewardError: as in `function_scores`.
    """
    if len(pairs) <= pairs_per_task:
        return function_scores(load_reward_function(path, name), pairs)
    import ray

    # The ranks hold the CPUs of a small machine for as long as they live.
    score = ray.remote(num_cpus=0)(_score_part)
    starts = range(0, len(pairs), pairs_per_task)
    parts = [
        score.remote(path, name, list(pairs[start : start + pairs_per_task])) for start in starts
    ]
    try:
        return torch.cat(ray.get(parts))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RewardError):
            raise error.cause from None
        raise


def _score_part(path: str, name: str, pairs: Sequence[Pair]) -> Tensor:
    return function_scores(load_reward_function(path, name), pairs)


def normalize_component(cfg: RewardConfig, raw: Tensor, mean: float, std: float) -> Tensor:
    """Bring raw scores of a reward model, (N,), to the configured scale with the statistics of its
    training scores."""
    return normalize_scores(raw, mean=mean, std=std, mode=cfg.normalize, clip=cfg.clip)


def rewards_of(
    cfg: RewardConfig, values: Mapping[str, Tensor], weights: Mapping[str, float], groups: Tensor
) -> Tensor:
    """Add normalised components up.

    Args:
        cfg: says whether rewards are centred per prompt.
        values: by component, (N,) each.
        weights: by the same names.
        groups: (N,) int64, the prompt of each response.

    Returns:
        (N,) fp32.
    """
    rewards = combine_components(values, weights)
    return center_by_group(rewards, groups) if cfg.center == "prompt" else rewards
