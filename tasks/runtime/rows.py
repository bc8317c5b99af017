"""What a worker is told: plain values, so that they pickle small and need no verl to be built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tasks.artifacts import PreferenceDataset
from tasks.config.shared import LoraConfig, OptimizerConfig, RuntimeConfig
from tasks.data.columns import (
    TokenColumns,
    hash_responses,
    keyed_file,
    read_token_columns,
    write_token_columns,
)
from tasks.data.hh import Pair
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.errors import DataError, RewardError

REFERENCE = "reference"


def one_pair_per_prompt(pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """Return the first pair of each prompt, at most ``limit`` of them."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.prompt_id, pair)
    return list(first.values())[:limit]


ACTOR = "actor"


CRITIC = "critic"


# Runtime settings on which the last digits of what a model says depend.
NUMERIC_FIELDS = {"device", "dtype", "attention", "ranks", "remove_padding", "share_prompts"}


@dataclass(frozen=True)
class RoleSpec:
    """One model inside the worker group.

    Args:
        name: role, for instance ``actor`` or ``critic``; unique in the group.
        kind: ``language_model`` has a vocabulary head, ``value_model`` one score per token.
        model_dir: directory in transformers format.
        seed: seeds whatever is newly initialised (value head, adapter).
        total_steps: optimizer steps of the schedule.
        lora: train an adapter instead of all weights.
        trained_head: the value head must be in the directory; a fresh one would score at random.
    """

    name: str
    kind: Literal["language_model", "value_model"]
    model_dir: str
    seed: int = 0
    total_steps: int = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig | None = None
    trained_head: bool = False


@dataclass(frozen=True)
class Row:
    """One prompt with one response, as token ids; the response includes its end-of-turn token."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Rows with what belongs to each of their response tokens.

    Args:
        rows: B rows.
        columns: name to B tensors of shape (T_i,) or (T_i, K), aligned with the response tokens of
            each row.
        group_size: consecutive rows that must stay together, 2 for the rows of a pair.
        scalars: plain values that the loss reads.
    """

    rows: Sequence[Row]
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    group_size: int = 1
    scalars: dict[str, float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class HostSpec:
    """The worker processes, which live on from stage to stage.

    Args:
        ranks: of each group.
        device: of all ranks.
        threads_per_rank: torch threads on a CPU.
        nodes: that share the ranks of a group.
        groups: of as many ranks each, in placement groups of their own.
    """

    ranks: int
    device: Literal["cpu", "cuda"]
    threads_per_rank: int
    nodes: int = 1
    groups: int = 1

    @classmethod
    def from_runtime(
        cls, runtime: RuntimeConfig, device: Literal["cpu", "cuda"], groups: int = 1
    ) -> HostSpec:
        """Share the CPU threads among the ranks of a group, wherever they run: another number of
        threads may round otherwise."""
        threads = max(1, runtime.cpu_threads // runtime.ranks)
        return cls(runtime.ranks, device, threads, runtime.nodes, groups)


# How rows travel to the workers and numbers come back.


def plan_calls(rows: Sequence[Row], rows_per_call: int) -> list[list[int]]:
    """Cut rows into calls: rows of a prompt side by side, and prompts of like length, counted with
    all their responses, in one call.

    Returns:
        Indices into ``rows``, at most ``rows_per_call`` in a call; a prompt of more rows is cut.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        prompts.setdefault(tuple(row.prompt_ids), []).append(index)

    def merged_length(group: list[int]) -> int:
        return len(rows[group[0]].prompt_ids) + sum(len(rows[i].response_ids) for i in group)

    calls: list[list[int]] = []
    for group in sorted(prompts.values(), key=merged_length):
        for start in range(0, len(group), rows_per_call):
            piece = group[start : start + rows_per_call]
            if not calls or len(calls[-1]) + len(piece) > rows_per_call:
                calls.append([])
            calls[-1] += piece
    return calls


def before_tokens(values: torch.Tensor, row: Row) -> torch.Tensor:
    """Return what was computed from the state before each response token: one position left of the
    token."""
    return values[len(row.prompt_ids) - 1 : len(row) - 1].clone()


def metrics_of(output: Any) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    metrics: dict[str, Any] = tu.get(output, "metrics")
    return metrics


def reduce_metrics(nested: dict[str, Any]) -> dict[str, float]:
    """Reduce per-rank, per-micro-batch metrics: ``*_max`` by the maximum, all others are sums."""
    reduced: dict[str, float] = {}
    for name, value in nested.items():
        if name.startswith(("perf/", "mfu")):
            continue
        flat = list(_flatten(value))
        reduced[name] = max(flat) if name.endswith("_max") else sum(flat)
    return reduced


def _flatten(value: Any) -> Iterable[float]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield float(value)


def _jagged(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return values that lie end to end as rows of these lengths."""
    offsets = torch.tensor([0, *accumulate(lengths)])
    rows: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
    return rows


def _column(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return _jagged(torch.cat(list(tensors)), [len(tensor) for tensor in tensors])


def _ids(parts: Iterable[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for part in parts for token in part])


def to_tensordict(batch: Batch, flags: dict[str, Any]) -> Any:
    """Build the jagged batch that a verl worker takes.

    Every row becomes prompt + response without padding; ``loss_mask`` is 1 on the response tokens.
    """
    from verl.utils import tensordict_utils as tu

    rows = batch.rows
    prompt_tokens = [len(row.prompt_ids) for row in rows]
    response_tokens = [len(row.response_ids) for row in rows]
    row_tokens = [len(row) for row in rows]
    positions = torch.tensor([position for n in row_tokens for position in range(n)])
    in_response = positions >= torch.tensor(prompt_tokens).repeat_interleave(
        torch.tensor(row_tokens)
    )
    ids = _ids(part for row in rows for part in (row.prompt_ids, row.response_ids))
    tensors = {
        "input_ids": _jagged(ids, row_tokens),
        "position_ids": _jagged(positions, row_tokens),
        "loss_mask": _jagged(in_response.long(), row_tokens),
        "prompts": _jagged(_ids(row.prompt_ids for row in rows), prompt_tokens),
        "responses": _jagged(_ids(row.response_ids for row in rows), response_tokens),
        **{name: _column(column) for name, column in batch.columns.items()},
    }
    plain = {
        "temperature": 1.0,
        "global_batch_size": len(rows),
        "force_group_size": batch.group_size,
    }
    return tu.get_tensordict(tensors, non_tensor_dict={**plain, **batch.scalars, **flags})


# The fixed dataset of offline PPO: stored responses with their rewards and behaviour
# log-probabilities.


@dataclass(frozen=True)
class Responses:
    """The stored responses of one split that fit the renderer.

    Args:
        pairs: P pairs.
        rendered: the same as token ids.
        left_out: pairs that do not fit, by reason.
    """

    pairs: Sequence[Pair]
    rendered: Sequence[RenderedPair]
    left_out: Mapping[str, int]

    @classmethod
    def of(cls, preferences: PreferenceDataset, split: str, renderer: Renderer) -> Responses:
        """Read and render a split.

        Raises:
            DataError: no pair fits.
        """
        pairs = read_pairs(preferences, split)
        rendered, left_out = render_pairs(pairs, renderer)
        if not rendered:
            raise DataError(
                f"No pair of the {split} split fits the renderer: {left_out}",
                "at least one",
                "raise rendering.max_prompt_tokens or max_response_tokens, or ingest more pairs",
            )
        kept = {pair.pair_id for pair in rendered}
        return cls([pair for pair in pairs if pair.pair_id in kept], rendered, left_out)

    def of_subsets(self, subsets: Sequence[str]) -> Responses:
        """Return the part of these subsets."""
        return self.select([i for i, pair in enumerate(self.pairs) if pair.subset in subsets])

    def first(self, n_pairs: int) -> Responses:
        """Return the first pairs."""
        return self.select(range(min(n_pairs, len(self.pairs))))

    def select(self, indices: Sequence[int]) -> Responses:
        """Return the pairs at these indices."""
        return Responses(
            [self.pairs[i] for i in indices], [self.rendered[i] for i in indices], self.left_out
        )

    @cached_property
    def rows(self) -> list[Row]:
        """2P rows: chosen, rejected, chosen, rejected, ..."""
        return response_rows(self.rendered)


@dataclass(frozen=True)
class ComponentValues:
    """What N responses are worth.

    Args:
        values: by component, (N,) normalised.
        disagreement: (N,) of the reward model's members; None where each component has one.
    """

    values: Mapping[str, Tensor]
    disagreement: Tensor | None = None


@dataclass(frozen=True)
class Trajectories:
    """N stored responses.

    Args:
        rows: prompt and response of each.
        groups: indices of the responses of each prompt; the sampler draws prompts.
        rewards: (N,) fp32, normalised.
        behavior_logprobs: N tensors of shape (T_i,), of the policy that wrote the responses.
        ref_logprobs: N tensors of shape (T_i,), of the model that training starts from.
        components: what the rewards are made of.
        n_stored: rows of the dataset, laid out chosen, rejected, chosen, ...; rows behind them were
            sampled as candidates. Negative = all.
        ended: (N,) bool, True = the response ends its turn. Empty = all do.
        subsets: of each group. Empty = one subset.
    """

    rows: Sequence[Row]
    groups: Sequence[Sequence[int]]
    rewards: Tensor
    behavior_logprobs: Sequence[Tensor]
    ref_logprobs: Sequence[Tensor]
    components: ComponentValues = field(default_factory=lambda: ComponentValues({}))
    n_stored: int = -1
    ended: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    subsets: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.n_stored < 0:
            object.__setattr__(self, "n_stored", len(self.rows))
        if not len(self.ended):
            object.__setattr__(self, "ended", torch.ones(len(self.rows), dtype=torch.bool))
        spread = float(self.rewards.std()) if len(self.rewards) > 1 else 0.0
        if not spread > 0.0:
            raise RewardError(
                f"All {len(self.rewards)} rewards are equal",
                "rewards that differ",
                "look at offline_ppo.reward and at the reward model's report",
            )

    @cached_property
    def group_of(self) -> Tensor:
        """(N,) int64, the prompt of each row."""
        group_of = torch.zeros(len(self.rows), dtype=torch.long)
        for group, members in enumerate(self.groups):
            group_of[list(members)] = group
        return group_of


def response_rows(pairs: Sequence[RenderedPair]) -> list[Row]:
    """Return two rows per pair: chosen, rejected."""
    return [Row(p.prompt_ids, ids) for p in pairs for ids in (p.chosen_ids, p.rejected_ids)]


def prompt_groups(pairs: Sequence[RenderedPair]) -> list[list[int]]:
    """Return the row indices of each prompt, for rows laid out as `response_rows` does."""
    groups: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair.prompt_id, []).extend((2 * index, 2 * index + 1))
    return list(groups.values())


def hash_rows(rows: Sequence[Row]) -> str:
    """Return a hash of prompts and responses."""
    return hash_responses([row.prompt_ids for row in rows], [row.response_ids for row in rows])


def cached_logprobs(
    path: Path, rows: Sequence[Row], identity: Sequence[str], compute: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Return log-probabilities of the responses from their Parquet column, computing it once.

    Args:
        path: directory of such columns.
        rows: the responses.
        identity: fingerprints of everything that the numbers depend on.
        compute: called when the column is not there.
    """
    file, key = keyed_file(path, identity)
    if not file.exists():
        columns = TokenColumns(
            [row.prompt_ids for row in rows],
            [row.response_ids for row in rows],
            {"logprobs": compute()},
        )
        write_token_columns(file, columns, key)
    return list(read_token_columns(file, key).floats["logprobs"])


def pad(tensors: Sequence[Tensor]) -> Tensor:
    """Return ragged tensors of shape (T_i,) as one of shape (B, T), zeros behind each row."""
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)


def unpad(padded: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    """Return the real response tokens of each row of a (B, T) tensor."""
    return [
        values[: len(row.response_ids)].clone() for values, row in zip(padded, rows, strict=True)
    ]


def mask_of(rows: Sequence[Row]) -> Tensor:
    """Return (B, T) bool, True = a real response token."""
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    return torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
