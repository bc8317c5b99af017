"""Files of pairs or responses to score: which format, which conversations a row holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.algorithms.calibration import Accuracy, pair_accuracy
from tasks.artifacts import appearing
from tasks.data.hh import Message, parse_transcript
from tasks.data.source import check_source, read_lines
from tasks.errors import ConfigError, DataError, MissingInputError

Kind = Literal["pairs", "responses"]

ERROR_FIELD: Final = "score_error"
# What a line that is no JSON object is kept under.
UNPARSED_FIELD: Final = "unparsed_line"
_ADDED: Final[Mapping[Kind, tuple[str, ...]]] = {
    "pairs": (
        "chosen_score",
        "rejected_score",
        "margin",
        "chosen_score_raw",
        "rejected_score_raw",
        "chosen_disagreement",
        "rejected_disagreement",
        ERROR_FIELD,
    ),
    "responses": ("score", "score_raw", "score_disagreement", ERROR_FIELD),
}
_EXPECTED: Final = (
    "chosen and rejected (transcripts, or message lists), prompt with chosen and rejected, prompt "
    "with response, or messages"
)
_FORMATS: Final = "give a .jsonl, .jsonl.gz or .parquet file"
_FIX: Final = "rename the fields of the file to one of these sets"
_ROLES: Final = ("system", "user", "assistant")
_ROWS_PER_BATCH: Final = 1024


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the response that is scored."""

    prompt: tuple[Message, ...]
    response: str


@dataclass(frozen=True, slots=True)
class FileRow:
    """One row of a file.

    Args:
        where: file and line, or file and row.
        fields: as they were read.
        conversations: chosen and rejected, or the one response; none where the row is unusable.
        error: why it is unusable: a reason, a colon, the detail.
    """

    where: str
    fields: dict[str, Any]
    conversations: tuple[Conversation, ...] = ()
    error: str | None = None

    @property
    def subset(self) -> str | None:
        """The part of a benchmark that the row belongs to, where it says so."""
        value = self.fields.get("subset")
        return value if isinstance(value, str) else None


@dataclass(frozen=True)
class ScoreFile:
    """A file that has been read through once.

    Args:
        n_rows: all rows, the unusable ones included.
        schema: of a Parquet file, else None.
    """

    path: Path
    kind: Kind
    n_rows: int
    schema: pa.Schema | None

    def rows(self) -> Iterator[FileRow]:
        """Yield the rows in order."""
        for where, fields, error in _read(self.path):
            yield FileRow(where, fields, (), error) if error else _parse(where, fields, self.kind)


class _Unusable(Exception):
    """Carries a reason from the checks of a row to `_parse`; never leaves this module."""


def open_score_file(path: Path) -> ScoreFile:
    """Read a .jsonl, .jsonl.gz or .parquet file through once; its first row decides the format.

    Raises:
        MissingInputError: no such file.
        DataError: empty, of no known format, no row that can be scored, or a field that scoring
            would overwrite.
    """
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "does not exist"
        raise MissingInputError(f"{path} {state}", "a file of pairs or responses", _FORMATS)
    check_source(path)
    kind: Kind | None = None
    n_rows = n_usable = 0
    first_error = ""
    for where, fields, error in _read(path):
        n_rows += 1
        if kind is None:
            kind = _kind_of(where, fields, error)
        _check_free(where, fields, kind)
        error = error or _parse(where, fields, kind).error
        n_usable += error is None
        if error and not first_error:
            first_error = f"{where}: {error}"
    if kind is None:
        raise DataError(f"{path} holds no rows", "at least one", _FORMATS)
    if n_usable == 0:
        raise DataError(f"No row can be scored; {first_error}", _EXPECTED, _FIX)
    return ScoreFile(path, kind, n_rows, parquet_schema(path))


def parquet_schema(path: Path) -> pa.Schema | None:
    """Return the schema of a Parquet file, None for another file.

    Raises:
        DataError: a torn Parquet file.
    """
    with path.open("rb") as handle:
        if handle.read(4) != b"PAR1":
            return None
    return _open_parquet(path).schema_arrow


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", "a whole Parquet file", _FORMATS
        ) from error


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield place, fields and, for a line that is no JSON object, the reason."""
    if parquet_schema(path) is None:
        yield from _read_json_lines(path)
        return
    number = 0
    with _open_parquet(path) as file:
        for batch in file.iter_batches(_ROWS_PER_BATCH):
            for fields in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", fields, None


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    for line in read_lines(path):
        where = f"{path}, line {line.number}"
        try:
            fields = json.loads(line.text.decode("utf-8"))
        except UnicodeDecodeError as error:
            problem = f"invalid_encoding: byte {error.start} is not UTF-8"
        except (ValueError, RecursionError) as error:
            problem = f"invalid_json: {error or type(error).__name__}"
        else:
            if isinstance(fields, dict):
                yield where, fields, None
                continue
            problem = f"wrong_type: the line holds a {type(fields).__name__}, not an object"
        yield where, {UNPARSED_FIELD: line.text.decode("utf-8", "backslashreplace")}, problem


def _kind_of(where: str, fields: Mapping[str, Any], error: str | None) -> Kind:
    if error is not None:
        raise DataError(f"{where}: {error}", "a JSON object in the first line", "correct the file")
    if "chosen" in fields and "rejected" in fields:
        return "pairs"
    if ("prompt" in fields and "response" in fields) or "messages" in fields:
        return "responses"
    raise DataError(f"{where} has the fields {sorted(fields)[:12]}", _EXPECTED, _FIX)


def _check_free(where: str, fields: Mapping[str, Any], kind: Kind) -> None:
    heads = ("score_",) if kind == "responses" else ("chosen_score_", "rejected_score_")
    taken = [name for name in fields if name in _ADDED[kind] or name.startswith(heads)]
    if taken:
        raise DataError(
            f"{where} has {', '.join(taken)} already",
            "a file without the fields that scoring adds",
            "rename or remove them, or score the original file",
        )


def _parse(where: str, fields: dict[str, Any], kind: Kind) -> FileRow:
    try:
        found = _pair_of(fields) if kind == "pairs" else (_answer_of(fields),)
    except _Unusable as refusal:
        return FileRow(where, fields, (), str(refusal))
    return FileRow(where, fields, found)


def _pair_of(fields: Mapping[str, Any]) -> tuple[Conversation, ...]:
    prompt = _prompt_of(fields["prompt"]) if fields.get("prompt") is not None else None
    chosen, rejected = (_side_of(side, fields.get(side), prompt) for side in ("chosen", "rejected"))
    if chosen.prompt != rejected.prompt:
        raise _Unusable("prompt_mismatch: chosen and rejected do not answer the same prompt")
    return chosen, rejected


def _answer_of(fields: Mapping[str, Any]) -> Conversation:
    if "prompt" in fields and "response" in fields:
        return _side_of("response", fields["response"], _prompt_of(fields["prompt"]))
    return _side_of("messages", fields.get("messages"), None)


def _prompt_of(value: Any) -> tuple[Message, ...]:
    """Return the turns of a prompt: an HH transcript, other text (one user turn), or messages."""
    if not isinstance(value, str):
        turns = _messages_of("prompt", value)
    elif _is_transcript(value):
        turns = parse_transcript(_text_of("prompt", value))
        # "Assistant:" at the end only says who speaks next.
        if turns[-1] == Message("assistant", ""):
            turns = turns[:-1]
    else:
        turns = (Message("user", _text_of("prompt", value).strip()),)
    if not turns or turns[-1].role != "user":
        raise _Unusable("wrong_turns: the prompt does not end with a user turn")
    if not turns[-1].content:
        raise _Unusable("empty_prompt: the prompt is empty")
    return turns


def _side_of(name: str, value: Any, prompt: tuple[Message, ...] | None) -> Conversation:
    """Return the conversation of one side: a response to the prompt, or prompt and response."""
    if isinstance(value, str):
        text = _text_of(name, value)
        turns = parse_transcript(text) if _is_transcript(text) else _reply_to(name, text, prompt)
    else:
        turns = _messages_of(name, value)
        if len(turns) == 1 and prompt is not None:
            turns = (*prompt, *turns)
    if len(turns) < 2 or turns[0].role == "assistant":
        raise _Unusable(f"wrong_turns: {name} does not start with a user turn")
    if turns[-1].role != "assistant":
        raise _Unusable(f"wrong_turns: {name} does not end with an assistant turn")
    if not turns[-1].content:
        raise _Unusable(f"empty_response: the response of {name} is empty")
    return Conversation(turns[:-1], turns[-1].content)


def _reply_to(name: str, text: str, prompt: tuple[Message, ...] | None) -> tuple[Message, ...]:
    if prompt is None:
        raise _Unusable(f"no_turns: {name} has neither Human: nor Assistant:, and no prompt")
    return (*prompt, Message("assistant", text.strip()))


def _is_transcript(text: str) -> bool:
    return text.startswith(("\n\nHuman:", "\n\nAssistant:"))


def _text_of(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        detail = f"{name} has an unpaired surrogate at character {error.start}"
        raise _Unusable(f"invalid_encoding: {detail}") from error
    return value


def _messages_of(name: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _Unusable(f"wrong_type: {name} is a {type(value).__name__}, not text or messages")
    return tuple(_message_of(f"{name}[{index}]", item) for index, item in enumerate(value))


def _message_of(name: str, value: Any) -> Message:
    is_message = isinstance(value, Mapping) and isinstance(value.get("content"), str)
    if not is_message:
        raise _Unusable(f"wrong_type: {name} has no role and text content")
    role = value.get("role")
    if role not in _ROLES:
        raise _Unusable(f"wrong_turns: {name} has the role {role!r}, not one of {_ROLES}")
    return Message(role, _text_of(name, value["content"]).strip())


# Scored rows on disk: JSON Lines or Parquet, the original fields as they were, whole or not.

JSONL: Final = ".jsonl"
PARQUET: Final = ".parquet"
_READ_SUFFIXES: Final = (".jsonl.gz", ".json.gz", ".jsonl", ".json", ".gz", ".parquet")

Added = Mapping[str, float | str | None]


def default_output(path: Path) -> Path:
    """Return ``pairs.scored.jsonl`` for ``pairs.jsonl``, ``.jsonl.gz`` and ``.parquet``."""
    for suffix in _READ_SUFFIXES:
        if path.name.endswith(suffix) and path.name != suffix:
            return path.with_name(path.name.removesuffix(suffix) + ".scored" + JSONL)
    return path.with_name(path.name + ".scored" + JSONL)


def check_output(output: Path, source: Path) -> None:
    """Refuse an output that cannot be written, before any work.

    Raises:
        ConfigError: another suffix, a directory, or the input itself.
        MissingInputError: its directory is not there.
    """
    if output.suffix not in (JSONL, PARQUET):
        raise ConfigError(
            f"--output {output} has the suffix {output.suffix!r}", ".jsonl or .parquet", "rename it"
        )
    if output.is_dir() or output.resolve() == source.resolve():
        what = "is a directory" if output.is_dir() else "is the input"
        raise ConfigError(f"--output {output} {what}", "another file", "choose another name")
    if not output.parent.is_dir():
        raise MissingInputError(
            f"--output: no directory {output.parent}", "an existing directory", "create it"
        )


def write_scored(output: Path, file: ScoreFile, scored: Iterable[tuple[FileRow, Added]]) -> None:
    """Write every row with its scores; the file appears when all are there.

    JSON Lines are written as the rows come; for Parquet they are held in memory.

    Args:
        scored: rows of the file in order with what scoring adds, made as they are taken.

    Raises:
        DataError: a field that the output format cannot hold, found before the first row is scored.
    """
    if output.suffix == PARQUET:
        table = _original_table(file)
        added = [extra for _, extra in scored]
        with appearing(output) as temporary:
            pq.write_table(_with_columns(table, added), temporary, compression="zstd")
        return
    if file.schema is not None:
        _check_json_columns(file.schema)
    with appearing(output) as temporary, temporary.open("wb") as handle:
        for row, extra in scored:
            handle.write(_json_line({**row.fields, **extra}))


def _json_line(row: Mapping[str, Any]) -> bytes:
    # A NaN or an unpaired surrogate of the source is kept: escapes carry what UTF-8 cannot.
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row) + "\n").encode()


def _check_json_columns(schema: pa.Schema) -> None:
    for column in schema:
        if not _is_json_type(column.type):
            raise DataError(
                f"Column {column.name!r} is of type {column.type}, which JSON cannot hold",
                "numbers, text, lists and structures of them",
                "give an --output that ends in .parquet",
            )


def _is_json_type(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json_type(kind.field(index).type) for index in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
        return _is_json_type(kind.value_type)
    checks = ("integer", "floating", "boolean", "string", "large_string", "null")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in checks)


def _original_table(file: ScoreFile) -> pa.Table:
    """Return the source as a table; of JSON Lines the types are inferred from all rows."""
    if file.schema is not None:
        return pq.read_table(file.path)
    rows = [row.fields for row in file.rows()]
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _inferred(name, [row.get(name) for row in rows]) for name in names})


def _inferred(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"Field {name!r} cannot become a Parquet column: {error}",
            "values of one type in all rows",
            "give an --output that ends in .jsonl",
        ) from error


def _with_columns(table: pa.Table, added: list[Added]) -> pa.Table:
    names = dict.fromkeys(name for row in added for name in row)
    for name in names:
        kind = pa.string() if name == ERROR_FIELD else pa.float64()
        table = table.append_column(name, pa.array([row.get(name) for row in added], type=kind))
    return table


# What the scores of a file come to: counts, accuracy by subset, RewardBench's sections.

# Lambert et al. 2024, RewardBench: the sections and the subsets that they are made of.
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Chat": (
        "alpacaeval-easy",
        "alpacaeval-length",
        "alpacaeval-hard",
        "mt-bench-easy",
        "mt-bench-med",
    ),
    "Chat Hard": (
        "mt-bench-hard",
        "llmbar-natural",
        "llmbar-adver-neighbor",
        "llmbar-adver-GPTInst",
        "llmbar-adver-GPTOut",
        "llmbar-adver-manual",
    ),
    "Safety": (
        "refusals-dangerous",
        "refusals-offensive",
        "xstest-should-refuse",
        "xstest-should-respond",
        "donotanswer",
    ),
    "Reasoning": (
        "math-prm",
        "hep-cpp",
        "hep-go",
        "hep-java",
        "hep-js",
        "hep-python",
        "hep-rust",
    ),
}
# The benchmark gives the 447 prompts of math-prm the weight of its 984 code prompts.
_WEIGHTS: Final = {"math-prm": 984 / 447}


@dataclass
class ScoreTally:
    """Counts up the rows of a file.

    Args:
        shortened: prompts that lost their oldest turns to the length limit.
        truncated: responses that were cut.
        errors: rows without a score by reason.
        margins: of scored pairs, in standard deviations of the training scores.
        scores: of scored responses.
    """

    rows: int = 0
    shortened: int = 0
    truncated: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    margins: list[tuple[str | None, float]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def scored(self) -> int:
        """Rows with a score."""
        return len(self.margins) + len(self.scores)

    def refuse(self, error: str) -> None:
        """Count a row without a score."""
        self.errors[error.partition(":")[0]] += 1

    def accuracy(self) -> Accuracy | None:
        """Return the accuracy of all pairs, None without any."""
        return pair_accuracy([margin for _, margin in self.margins]) if self.margins else None

    def subsets(self) -> dict[str, Accuracy]:
        """Return the accuracy of each subset that rows name, in the order of the file."""
        grouped: dict[str, list[float]] = {}
        for subset, margin in self.margins:
            if subset is not None:
                grouped.setdefault(subset, []).append(margin)
        return {name: pair_accuracy(margins) for name, margins in grouped.items()}

    def score_spread(self) -> tuple[float, float] | None:
        """Return mean and standard deviation of the responses' scores, None without any."""
        if not self.scores:
            return None
        spread = float(np.std(self.scores, ddof=1)) if len(self.scores) > 1 else 0.0
        return float(np.mean(self.scores)), spread

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        overall, spread = self.accuracy(), self.score_spread()
        subsets = self.subsets()
        return {
            "rows": self.rows,
            "scored": self.scored,
            "errors": dict(self.errors),
            "shortened_prompts": self.shortened,
            "truncated_responses": self.truncated,
            "accuracy": overall._asdict() if overall else None,
            "subsets": {name: found._asdict() for name, found in subsets.items()},
            "rewardbench": rewardbench_sections(subsets),
            "score": {"mean": spread[0], "std": spread[1]} if spread else None,
        }


def rewardbench_sections(subsets: Mapping[str, Accuracy]) -> dict[str, float]:
    """Return the accuracy of RewardBench's sections and, with all four there, their mean.

    Within a section subsets count by their scored prompts. Ties count half, and only what fits the
    length limits is scored, so the figures are those of the leaderboard only if all rows are.
    Empty where a subset is not the benchmark's.
    """
    known = {name for names in _SECTIONS.values() for name in names}
    if not subsets or not set(subsets) <= known:
        return {}
    found: dict[str, float] = {}
    for section, names in _SECTIONS.items():
        members = {name: subsets[name] for name in names if name in subsets}
        weights = {name: one.n * _WEIGHTS.get(name, 1.0) for name, one in members.items()}
        if members:
            right = sum(weights[name] * one.value for name, one in members.items())
            found[section] = right / sum(weights.values())
    if len(found) == len(_SECTIONS):
        found["Overall"] = sum(found.values()) / len(_SECTIONS)
    return found
