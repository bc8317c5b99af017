"""Responses of base and policy to the same prompt, side by side, to be read and kept as tables."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tasks.algorithms.kl import ProbeKL
from tasks.algorithms.statistics import (
    Bootstrap,
    PlainWinRate,
    PolicyComparison,
    Side,
    compare_policies,
    plain_win_rate,
    win_credit,
)
from tasks.data.hh import Message
from tasks.data.schemas import make_schema, write_rows
from tasks.report.page import cell, example, join, plain


@dataclass(frozen=True)
class HeldOut:
    """The policy against the base on prompts that nothing was trained on.

    Args:
        judge: who scored, in words that follow "by".
        subsets: plain win rates by subset, where there are several.
        kl: None where it was not measured.
    """

    pairs: Sequence[ResponsePair]
    judge: str
    comparison: PolicyComparison
    subsets: Mapping[str, PlainWinRate]
    kl: ProbeKL | None = None


def compare_pairs(
    pairs: Sequence[ResponsePair], judge: str, bootstrap: Bootstrap, kl: ProbeKL | None = None
) -> HeldOut:
    """Compare the responses of the policy with those of the base.

    Raises:
        DataError: no pairs.
        TrainingError: a score that is not finite.
    """
    ours = _side([(pair.policy_score, pair.policy_tokens) for pair in pairs])
    theirs = _side([(pair.base_score, pair.base_tokens) for pair in pairs])
    index: dict[str, int] = {}
    prompts = np.array([index.setdefault(pair.prompt_id, len(index)) for pair in pairs])
    compared = compare_policies(ours, theirs, prompts, bootstrap)
    credit = win_credit(ours.scores, theirs.scores)
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair.subset, []).append(place)
    subsets = {
        name: plain_win_rate(credit[places[name]], prompts[places[name]], bootstrap)
        for name in sorted(places)
        if len(places) > 1
    }
    return HeldOut(pairs, judge, compared, subsets, kl)


def _side(rows: Sequence[tuple[float, int]]) -> Side:
    scores, lengths = np.array(rows, np.float64).reshape(-1, 2).T
    return Side(scores, lengths)


_ROWS_PER_GROUP: Final = 10_000

RESPONSE_PAIR_SCHEMA: Final = make_schema(
    "response_pairs",
    [
        ("prompt_id", pa.string(), False),
        ("subset", pa.string(), False),
        ("prompt", pa.large_string(), False),
        ("base_response", pa.large_string(), False),
        ("policy_response", pa.large_string(), False),
        ("base_score", pa.float64(), False),
        ("policy_score", pa.float64(), False),
        ("score_difference", pa.float64(), False),
        ("base_tokens", pa.int64(), False),
        ("policy_tokens", pa.int64(), False),
    ],
)


@dataclass(frozen=True, slots=True)
class ResponsePair:
    """One prompt with a response of the base and one of the policy.

    Args:
        prompt_id: equal for all pairs of one prompt.
        prompt: as people read it, see `prompt_text`.
        base_score, policy_score: by the judge, higher is better.
        base_tokens, policy_tokens: length of the responses.
    """

    prompt_id: str
    prompt: str
    base_response: str
    policy_response: str
    base_score: float
    policy_score: float
    base_tokens: int
    policy_tokens: int
    subset: str = ""

    @property
    def score_difference(self) -> float:
        """How much higher the policy scores."""
        return self.policy_score - self.base_score

    def as_row(self) -> dict[str, Any]:
        """Return a row of `RESPONSE_PAIR_SCHEMA`, without what no table can hold."""
        row = {**asdict(self), "score_difference": self.score_difference}
        row = {name: row[name] for name in RESPONSE_PAIR_SCHEMA.names}
        return {
            key: plain(value) if isinstance(value, str) else value for key, value in row.items()
        }


def prompt_text(messages: Sequence[Message]) -> str:
    """Return a conversation as lines that begin with the role; a lone turn is shown bare."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def sort_pairs(pairs: Sequence[ResponsePair]) -> list[ResponsePair]:
    """Return the pairs by score difference, the policy's best first."""
    return sorted(pairs, key=lambda pair: (-pair.score_difference, pair.prompt_id))


# Pairs that are shown, by why they are.
Samples = Mapping[str, Sequence[ResponsePair]]
_HEADINGS: Final = {
    "best": "Where the policy is furthest ahead",
    "worst": "Where the policy is furthest behind",
    "random": "At random from the others",
}


def pick_samples(pairs: Sequence[ResponsePair], n: int = 10, seed: int = 0) -> Samples:
    """Return the n ``best``, the n ``worst`` (the worst first), and n of the others at ``random``.

    No pair comes twice, so few pairs fill fewer groups. The random ones are in the order of their
    score difference.
    """
    ordered = sort_pairs(pairs)
    n_best, n_worst = min(n, (len(ordered) + 1) // 2), min(n, len(ordered) // 2)
    middle = ordered[n_best : len(ordered) - n_worst]
    places = random.Random(seed).sample(range(len(middle)), min(n, len(middle)))
    return {
        "best": ordered[:n_best],
        "worst": ordered[len(ordered) - n_worst :][::-1],
        "random": [middle[place] for place in sorted(places)],
    }


def sample_rows(samples: Samples) -> list[dict[str, Any]]:
    """Return one flat row per sample: group, rank from 1 within it, and the pair's row."""
    return [
        {"group": group, "rank": rank, **pair.as_row()}
        for group, pairs in samples.items()
        for rank, pair in enumerate(pairs, start=1)
    ]


def write_sample_table(path: Path, samples: Samples) -> None:
    """Write the samples as JSON ``{"columns": [...], "data": [[...], ...]}``.

    That is the form in which MLflow keeps a logged table.
    """
    columns = ["group", "rank", *RESPONSE_PAIR_SCHEMA.names]
    data = [[row[name] for name in columns] for row in sample_rows(samples)]
    text = json.dumps({"columns": columns, "data": data}, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def render_samples(samples: Samples) -> str:
    """Return pairs of responses to read; what people and models wrote is kept inert."""
    sections = ["# Responses of base and policy, side by side"]
    for group, pairs in samples.items():
        sections.append(f"## {_HEADINGS[group]}" if pairs else "")
        sections += [_sample_section(rank, pair) for rank, pair in enumerate(pairs, start=1)]
    return join(sections)


def _sample_section(rank: int, pair: ResponsePair) -> str:
    facts = [
        f"score of the base {pair.base_score:.3f}, of the policy {pair.policy_score:.3f}, "
        f"difference {pair.score_difference:+.3f}",
        f"{pair.base_tokens} and {pair.policy_tokens} tokens",
    ]
    if pair.subset:
        facts.append(f"subset {cell(pair.subset)}")
    texts = {"Prompt": pair.prompt, "Base": pair.base_response, "Policy": pair.policy_response}
    return example(f"{rank}. Prompt {cell(pair.prompt_id)}", facts, texts)


def write_response_pairs(path: Path, pairs: Sequence[ResponsePair]) -> None:
    """Write all pairs as Parquet, by score difference, the policy's best first."""
    rows = (pair.as_row() for pair in sort_pairs(pairs))
    write_rows(path, rows, RESPONSE_PAIR_SCHEMA, _ROWS_PER_GROUP)
