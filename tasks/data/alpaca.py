"""AlpacaEval: answers in its ``model_outputs`` format, and win rates of annotation files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tasks.algorithms.question_statistics import standard_error
from tasks.errors import DataError, MissingInputError

_FIX: Final = 'rows with "preference": 1 (the baseline is better) to 2 (the model is better)'
_LOWEST: Final = 1.0
_HIGHEST: Final = 2.0
_DRAW: Final = 1.5
_OLD_DRAW: Final = 0.0


@dataclass(frozen=True)
class AnnotationScore:
    """Win rate of one model over annotated comparisons.

    Args:
        model, baseline: generators of output_2 and output_1.
        win_rate: mean preference - 1, so that a draw is half a win; None without any.
        standard_error: of the win rate; None for fewer than two.
        wins, draws, losses: preferences above, at and below 1.5.
        failed: rows without a preference; they enter nothing else.
    """

    model: str
    baseline: str
    win_rate: float | None
    standard_error: float | None
    wins: int
    draws: int
    losses: int
    failed: int


def write_model_outputs(
    path: Path, instructions: Sequence[str], outputs: Sequence[str], generator: str, dataset: str
) -> None:
    """Write a JSON list of instruction, output and generator, as AlpacaEval reads it.

    Raises:
        DataError: text that UTF-8 cannot hold.
    """
    rows = [
        {"instruction": asked, "output": said, "generator": generator, "dataset": dataset}
        for asked, said in zip(instructions, outputs, strict=True)
    ]
    try:
        content = (json.dumps(rows, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path.name} cannot hold a text: {error}", "valid text", "") from error
    path.write_bytes(content)


def is_annotations(path: Path) -> bool:
    """Tell whether a file is a JSON list, as annotation files are."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def score_annotations(path: Path) -> list[AnnotationScore]:
    """Return the win rate of each model in an annotation file, the best first.

    Raises:
        MissingInputError: no such file.
        DataError: no list of annotations, or a preference that is none.
    """
    found: dict[tuple[str, str], list[float | None]] = {}
    for where, row in _rows(path):
        names = (str(row.get("generator_2", "output_2")), str(row.get("generator_1", "output_1")))
        found.setdefault(names, []).append(_preference(where, row))
    scores = [_score(model, baseline, values) for (model, baseline), values in found.items()]
    return sorted(scores, key=lambda s: -1.0 if s.win_rate is None else s.win_rate, reverse=True)


def _rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise MissingInputError(f"No file {path}", "an annotation file", _FIX) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", "a JSON list", _FIX) from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} holds no annotations", "a JSON list with rows", _FIX)
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or "preference" not in row:
            raise DataError(f"{path}, row {index + 1}: no field 'preference'", "a number", _FIX)
    return [(f"{path}, row {index + 1}", row) for index, row in enumerate(rows)]


def _preference(where: str, row: Mapping[str, Any]) -> float | None:
    value = row["preference"]
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Early files mark a draw with 0.
    if is_number and value == _OLD_DRAW:
        return _DRAW
    # NaN is how pandas writes a missing preference.
    if is_number and value != value:
        return None
    if not is_number or not _LOWEST <= value <= _HIGHEST:
        raise DataError(f"{where}: preference is {value!r}", "1 to 2, 0 or null", _FIX)
    return float(value)


def _score(model: str, baseline: str, values: Sequence[float | None]) -> AnnotationScore:
    valid = [value - 1.0 for value in values if value is not None]
    return AnnotationScore(
        model=model,
        baseline=baseline,
        win_rate=sum(valid) / len(valid) if valid else None,
        standard_error=standard_error(valid),
        wins=sum(value > 0.5 for value in valid),
        draws=sum(value == 0.5 for value in valid),
        losses=sum(value < 0.5 for value in valid),
        failed=len(values) - len(valid),
    )
