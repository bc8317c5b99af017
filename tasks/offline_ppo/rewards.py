"""All that responses are worth by each component, and the weights of the components."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.rewards import (
    WeightTrial,
    best_trial,
    center_by_group,
    combine_components,
    judge_weights,
    normalize_scores,
    simplex_grid,
)
from tasks.artifacts import RewardModelCheckpoint
from tasks.context import RunLog
from tasks.data.columns import cached_scores
from tasks.data.hh import Pair
from tasks.errors import ConfigError, MissingInputError, RewardError
from tasks.offline_ppo.config import RewardConfig
from tasks.runtime.rows import NUMERIC_FIELDS, ComponentValues, Row, hash_rows
from tasks.runtime.scoring import ComponentScores, RewardScorer, RewardScores
from tasks.runtime.session import Session

# What a stored response is worth: the reward model, the label, a function of the user's, or a
# mixture.

RewardFunction = Callable[[str, str, str, dict[str, Any]], float]
RESPONSES_PER_TASK = 4000
_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class Judged:
    """A response as a reward function sees it.

    Args:
        data_source: subset.
        solution_str: the response.
        ground_truth: the dataset's chosen response to the same prompt.
        extra_info: ``prompt`` as messages, ``pair_id``, ``side``.
        where: file and line, for messages.
    """

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any]
    where: str

    @classmethod
    def of(cls, pair: Pair, side: str, response: str) -> Judged:
        """Build it for a response to the prompt of a pair.

        Args:
            pair: gives prompt, subset and chosen response.
            side: ``chosen``, ``rejected``, or where else the response comes from.
            response: its text.
        """
        prompt = [{"role": turn.role, "content": turn.content} for turn in pair.prompt]
        extra = {"prompt": prompt, "pair_id": pair.pair_id, "side": side}
        where = f"{side} response of {pair.source_file}:{pair.source_line}"
        return cls(pair.subset, response, pair.chosen, extra, where)


def both_sides(pairs: Sequence[Pair]) -> list[Judged]:
    """Return the stored responses of each pair, chosen first."""
    return [
        Judged.of(pair, side, text)
        for pair in pairs
        for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected))
    ]


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


def function_scores(function: RewardFunction, responses: Sequence[Judged]) -> Tensor:
    """Score N responses with a function of the user's.

    Returns:
        (N,) fp32.

    Raises:
        RewardError: it raised or returned something that is not a finite number; names row and
            value.
    """
    scores = []
    for response in responses:
        where = f"reward function on the {response.where}"
        try:
            value = float(
                function(  # by name, as verl calls it
                    data_source=response.data_source,  # type: ignore[call-arg]
                    solution_str=response.solution_str,
                    ground_truth=response.ground_truth,
                    extra_info=response.extra_info,
                )
            )
        except Exception as error:
            raise RewardError(
                f"{where} raised {error!r}", "a number", "mend the function"
            ) from error
        if not math.isfinite(value):
            raise RewardError(f"{where} returned {value}", "a finite number", "mend the function")
        scores.append(value)
    return torch.tensor(scores)


def function_scores_on_cluster(
    path: str, name: str, responses: Sequence[Judged], per_task: int = RESPONSES_PER_TASK
) -> Tensor:
    """Score N responses with a function of the user's, in Ray tasks.

    The file must be there on every node. Few responses are scored here: a task needs seconds to
    start.

    Args:
        path: Python file.
        name: function in it.
        responses: N of them.
        per_task: responses that one task scores.

    Returns:
        (N,) fp32.

    Raises:
        RewardError: as in `function_scores`.
    """
    if len(responses) <= per_task:
        return function_scores(load_reward_function(path, name), responses)
    import ray

    # The ranks hold the CPUs of a small machine for as long as they live.
    score = ray.remote(num_cpus=0)(_score_part)
    starts = range(0, len(responses), per_task)
    parts = [
        score.remote(path, name, list(responses[start : start + per_task])) for start in starts
    ]
    try:
        return torch.cat(ray.get(parts))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RewardError):
            raise error.cause from None
        raise


def _score_part(path: str, name: str, responses: Sequence[Judged]) -> Tensor:
    return function_scores(load_reward_function(path, name), responses)


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


REWARD_MODEL = "reward_model"


def check_components(cfg: RewardConfig, reward_model: RewardModelCheckpoint) -> None:
    """Refuse what cannot work before anything is computed.

    Raises:
        ConfigError: a component that the reward model lacks; names those that it has.
        RlhfError: a reward function that cannot be used.
    """
    known = list(reward_model.components)
    for name in cfg.components:
        wanted = name.removeprefix(f"{REWARD_MODEL}.")
        if wanted != name and wanted not in known:
            raise ConfigError(
                f"offline_ppo.reward.components names {name!r}, but the reward model "
                f"{reward_model.path} has {known}",
                f"one of {[f'{REWARD_MODEL}.{component}' for component in known]}",
                "correct the name, or train the reward model with that component",
            )
    if "function" in cfg.components:
        load_reward_function(str(cfg.function_path), cfg.function_name)


@dataclass(frozen=True)
class ComponentScorer:
    """Computes the components that the configuration names.

    Args:
        cfg: which components, and how reward-model scores are normalised.
        session: workers.
        reward_model: whose scores are components.
        cache_dir: where scores of stored responses are kept as Parquet columns; None keeps none.
    """

    cfg: RewardConfig
    session: Session
    reward_model: RewardModelCheckpoint
    cache_dir: Path | None = None

    def score(self, pairs: Sequence[Pair], rows: Sequence[Row]) -> ComponentValues:
        """Return the components of all stored responses.

        Args:
            pairs: P pairs.
            rows: their 2P responses, chosen first.
        """
        found = self.score_responses(rows, both_sides(pairs), keep=True)
        values = dict(found.values)
        if "labels" in self.cfg.components:
            values["labels"] = torch.tensor([1.0, -1.0]).repeat(len(pairs))
        return ComponentValues(values, found.disagreement)

    def score_responses(
        self, rows: Sequence[Row], responses: Sequence[Judged], *, keep: bool = False
    ) -> ComponentValues:
        """Return the components of any responses: all but ``labels``, which only stored ones have.

        Args:
            rows: N responses as token ids.
            responses: the same as text.
            keep: the same responses will be asked about again, by this run or another one.
        """
        wanted = self.cfg.components
        values: dict[str, Tensor] = {}
        disagreement = None
        if any(name.split(".")[0] == REWARD_MODEL for name in wanted):
            scores = self._kept_scores(rows) if keep else self._scores(rows)
            disagreement = scores.disagreement
            for name in wanted:
                if name.split(".")[0] == REWARD_MODEL:
                    values[name] = self._normalized(scores, name)
        if "function" in wanted:
            path, name = str(self.cfg.function_path), self.cfg.function_name
            values["function"] = function_scores_on_cluster(path, name, responses)
        return ComponentValues(values, disagreement)

    def _scores(self, rows: Sequence[Row]) -> RewardScores:
        return RewardScorer.load(self.session, self.reward_model).score(rows)

    def _kept_scores(self, rows: Sequence[Row]) -> RewardScores:
        """Return the scores from their columns, computed once per reward model and responses."""
        if self.cache_dir is None:
            return self._scores(rows)
        identity = [
            self.reward_model.content_hash,
            hash_rows(rows),
            self.session.runtime.model_dump_json(include=NUMERIC_FIELDS),
        ]
        members = cached_scores(
            self.cache_dir,
            identity,
            lambda: {name: part.members for name, part in self._scores(rows).components.items()},
        )
        known = self.reward_model.components
        return RewardScores(
            {name: ComponentScores.of(known[name], values) for name, values in members.items()}
        )

    def _normalized(self, scores: RewardScores, name: str) -> Tensor:
        """Return one component, or the mean of all of them for the reward model as a whole."""
        known = self.reward_model.components
        names = list(known) if name == REWARD_MODEL else [name.removeprefix(f"{REWARD_MODEL}.")]
        normal = [
            normalize_component(self.cfg, scores.components[n].raw, known[n].mean, known[n].std)
            for n in names
        ]
        return torch.stack(normal).mean(dim=0)


def find_weights(
    cfg: RewardConfig, values: Mapping[str, Tensor], log: RunLog
) -> tuple[dict[str, float], WeightTrial]:
    """Search the weights whose sum of components predicts the labels of held-out pairs best.

    Args:
        cfg: the grid.
        values: normalised components of the validation responses, chosen first.
        log: gets one nested run per grid point.

    Returns:
        the weights and how they did.
    """
    assert cfg.search is not None
    trials = [
        judge_weights(values, weights)
        for weights in simplex_grid(sorted(values), cfg.search.resolution)
    ]
    best = best_trial(trials)
    for index, trial in enumerate(trials):
        log.trial(
            f"weights-{index}",
            trial.weights,
            {"validation_log_loss": trial.log_loss, "validation_accuracy": trial.accuracy},
        )
        log.progress(index + 1, len(trials), "reward weights")
    shown = ", ".join(f"{name} {weight:g}" for name, weight in best.weights.items())
    log.event("reward_weights", f"found on the validation split: {shown}")
    return dict(best.weights), best
