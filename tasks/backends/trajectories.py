"""The fixed dataset of offline PPO: stored responses with their rewards and behaviour
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tasks.artifacts import PreferenceDataset
from tasks.backends.roles import Row
from tasks.data.hh import Pair
from tasks.data.keyed_parquet import hash_responses, keyed_file
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.data.token_columns import TokenColumns, read_token_columns, write_token_columns
from tasks.errors import DataError, RewardError


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
    return read_token_columns(file, key).floats["logprobs"]


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
