"""Pairwise judgments in both orders, in FastChat's ``*_pair.jsonl`` format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tasks.algorithms.ratings import Verdict, settle_orders
from tasks.data.questions import get_field, get_number, get_turn, read_objects, write_objects
from tasks.data.scores import WinRate
from tasks.errors import DataError

PAIR_FORM: Final = (
    'judgments of pairs, one object per line: {"question_id": 81, "model_1": "", "model_2": "", '
    '"g1_winner": "model_1", "g2_winner": "tie", "judge": ["gpt-4", "pair-v2"], "turn": 1}'
)
_FAILED: Final = "error"
# FastChat names the winner of the swapped game by model too, not by place.
_WINNERS: Final[dict[str, Verdict]] = {"model_1": "A", "model_2": "B", "tie": "tie"}
_NAMES: Final = {verdict: name for name, verdict in _WINNERS.items()}
_PLACES_TURNED: Final[dict[Verdict, Verdict]] = {"A": "B", "B": "A", "tie": "tie"}


@dataclass(frozen=True, slots=True)
class PairJudgment:
    """Two judgments of one turn: the answers shown in both orders.

    Args:
        model_1: in place A of the first game.
        first: verdict of the game with model_1 in place A; None when the judgment failed.
        swapped: verdict of the game with model_1 in place B.
        texts: what the judge said in both games.
    """

    question_id: int
    model_1: str
    model_2: str
    turn: int
    first: Verdict | None
    swapped: Verdict | None
    judge: tuple[str, str]
    texts: tuple[str, str] = ("", "")
    tstamp: float = 0.0
    repeat: int = 0

    @property
    def winner(self) -> Verdict | None:
        """``A`` is model_1, ``B`` is model_2; a tie when the orders disagree, None when either
        failed."""
        return settle_orders(self.first, self.swapped)

    def winner_for(self, model: str) -> Verdict | None:
        """Return the winner with ``model`` as ``A``."""
        found = self.winner
        return found if model == self.model_1 or found is None else _PLACES_TURNED[found]


@dataclass(frozen=True, slots=True)
class PairSummary:
    """One model's games.

    Args:
        rate: None when all judgments failed.
        failed: judgments without a verdict; they count nowhere else.
        consistent: share of the judgments in which both orders agree; None without any.
    """

    model: str
    rate: WinRate | None
    failed: int
    consistent: float | None

    @property
    def coverage(self) -> float:
        """Share of the judgments with a verdict."""
        valid = self.rate.n if self.rate else 0
        return valid / max(valid + self.failed, 1)


def summarize_pairs(judgments: Sequence[PairJudgment], model: str) -> PairSummary:
    """Count a model's wins, ties and losses over all its games."""
    games = [j for j in judgments if model in (j.model_1, j.model_2)]
    found = [verdict for j in games if (verdict := j.winner_for(model)) is not None]
    rate = None
    consistent = None
    if found:
        rate = WinRate(found.count("A"), found.count("tie"), found.count("B"))
        valid = [j for j in games if j.winner is not None]
        same = sum(j.winner != "tie" or (j.first, j.swapped) == ("tie", "tie") for j in valid)
        consistent = same / len(valid)
    return PairSummary(model, rate, len(games) - len(found), consistent)


def latest_pairs(judgments: Iterable[PairJudgment]) -> list[PairJudgment]:
    """Keep one judgment of each question, pair of models, turn, judge and repeat: the latest."""
    latest: dict[tuple[Any, ...], PairJudgment] = {}
    for j in judgments:
        key = (j.question_id, frozenset((j.model_1, j.model_2)), j.turn, j.judge[0], j.repeat)
        if key not in latest or j.tstamp >= latest[key].tstamp:
            latest[key] = j
    return list(latest.values())


def write_pairs(path: Path, judgments: Iterable[PairJudgment]) -> None:
    """Write judgments as FastChat's ``*_pair.jsonl``; a failed game has the winner ``error``."""
    ordered = sorted(judgments, key=lambda j: (j.question_id, j.model_1, j.turn, j.repeat))
    write_objects(path, (_row(judgment) for judgment in ordered))


def read_pair_judgments(path: Path) -> list[PairJudgment]:
    """Read FastChat's pairwise judgments in file order.

    Raises:
        MissingInputError: no such file.
        DataError: a line that is no pairwise judgment.
    """
    return [parse_pair(where, row) for where, row in read_objects(path, PAIR_FORM)]


def _row(j: PairJudgment) -> dict[str, Any]:
    swapped = None if j.swapped is None else _PLACES_TURNED[j.swapped]
    row: dict[str, Any] = {
        "question_id": j.question_id,
        "model_1": j.model_1,
        "model_2": j.model_2,
        "g1_winner": _FAILED if j.first is None else _NAMES[j.first],
        "g2_winner": _FAILED if swapped is None else _NAMES[swapped],
        "judge": list(j.judge),
        "g1_judgment": j.texts[0],
        "g2_judgment": j.texts[1],
        "turn": j.turn,
        "tstamp": j.tstamp,
    }
    return row | ({"repeat": j.repeat} if j.repeat else {})


def parse_pair(where: str, row: dict[str, Any]) -> PairJudgment:
    """Return the judgment in a row.

    Raises:
        DataError: it is none.
    """
    judge = get_field(where, row, "judge", list, PAIR_FORM)
    if len(judge) != 2:
        raise DataError(f"{where}: judge is {judge}", "[name, method]", "correct the file")
    swapped = _winner(where, row, "g2_winner")
    return PairJudgment(
        question_id=get_field(where, row, "question_id", int, PAIR_FORM),
        model_1=get_field(where, row, "model_1", str, PAIR_FORM),
        model_2=get_field(where, row, "model_2", str, PAIR_FORM),
        turn=get_turn(where, row, PAIR_FORM),
        first=_winner(where, row, "g1_winner"),
        swapped=None if swapped is None else _PLACES_TURNED[swapped],
        judge=(str(judge[0]), str(judge[1])),
        texts=(str(row.get("g1_judgment", "")), str(row.get("g2_judgment", ""))),
        tstamp=get_number(where, row, "tstamp") or 0.0,
        repeat=get_field(where, {"repeat": 0, **row}, "repeat", int, PAIR_FORM),
    )


def _winner(where: str, row: dict[str, Any], name: str) -> Verdict | None:
    value = get_field(where, row, name, str, PAIR_FORM)
    if value != _FAILED and value not in _WINNERS:
        raise DataError(
            f"{where}: {name} is {value!r}",
            f"{', '.join(_WINNERS)} or {_FAILED}",
            "correct the file",
        )
    return _WINNERS.get(value)
