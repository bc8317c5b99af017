"""Parses one chunk of a source: usable pairs and left-out rows, each put aside as an Arrow file.

Runs in worker processes, so it imports nothing that takes long. What it writes depends on the chunk
and the options alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from tasks.artifacts import PreferenceDataset
from tasks.config.shared import RenderingConfig
from tasks.data.hh import (
    ID_DIGITS,
    SPLITS,
    Message,
    Refusal,
    first_user_turn,
    has_control,
    is_taken,
    normalized,
    pair_digest,
    prompt_id_of,
    prompt_key_of,
    split_codes_of,
    transcript_of,
    unordered_key,
)
from tasks.data.quarantine import QuarantineReason
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.data.schemas import PAIR_SCHEMA, TOKEN_FIELDS, open_parquet, renderer_of
from tasks.data.source import InputFile
from tasks.errors import DataError, RendererMismatchError
from tasks.ingest.chunks import (
    KEY_RECORD,
    Block,
    ChunkResult,
    LeftOut,
    LineReader,
    PairBatch,
    ParseJob,
    ParseOptions,
    RowGroup,
    Rows,
    Span,
    complete_columns,
    keep_payload,
    pairs_file,
    raw_bytes,
    write_left_out,
    write_pairs,
)
from tasks.ingest.plain_rows import PlainPairs, parse_plain, two_columns, two_texts
from tasks.ingest.rows import Judge, Row, check_characters, decode_object, read_row, storable

_ALTERNATING: Final = [["user", "assistant"] * (n // 2) + ["user"] * (n % 2) for n in range(200)]
Array = np.ndarray[Any, Any]
_NUMBERS: Final = KEY_RECORD.names or ()
_SPLIT_CODES: Final = {name: code for code, name in enumerate(SPLITS)}


class ChunkParser:
    """Parses chunks with the same options, one after another."""

    def __init__(self, options: ParseOptions) -> None:
        self._options = options
        self._renderer = _load_renderer(options)
        has_limits = bool(options.max_prompt_chars or options.max_response_chars)
        self._is_strict = has_limits or self._renderer is not None
        by_conversation = options.group_by == "conversation"
        self._is_usual = not self._is_strict and options.normalize and by_conversation

    def parse(self, job: ParseJob) -> ChunkResult:
        """Parse one chunk and write its spill files.

        Raises:
            DataError: a line too long to be a row.
        """
        reader = LineReader(job.file, job.payload)
        chunk = _Chunk(job)
        plain = self._is_usual and chunk.may_be_plain
        text = reader.text() if plain else None
        whole = two_columns(text) if text is not None else None
        if whole is not None and text is not None:
            chunk.n_rows = n_lines = len(whole.chosen)
            places = np.arange(n_lines)
            others = self._take_plain(chunk, whole.chosen, whole.rejected, places, places)
            rows = {number: (number, whole.line(text, number)) for number in others}
        else:
            rows = dict(enumerate(reader.rows()))
            n_lines, chunk.n_rows = reader.n_lines, len(rows)
            others = self._parse_plain(chunk, list(rows.values())) if plain else list(rows)
        for position in others:
            self._parse_row(chunk, position, *rows[position])
        return chunk.finish(n_lines)

    def _parse_plain(self, chunk: _Chunk, rows: list[tuple[int, Any]]) -> list[int]:
        """Parse those rows that are two texts at once; return which are not as they should be."""
        texts = [two_texts(raw) for _, raw in rows]
        places = np.flatnonzero([found is not None for found in texts])
        chosen, rejected = (
            pa.array([found[side] for found in texts if found], pa.large_string())
            for side in (0, 1)
        )
        lines = np.array([line for line, _ in rows])
        return self._take_plain(chunk, chosen, rejected, places, lines)

    def _take_plain(
        self, chunk: _Chunk, chosen: pa.Array, rejected: pa.Array, places: Array, lines: Array
    ) -> list[int]:
        pairs = parse_plain(chosen, rejected, lambda ids: self._splits_of(chunk.job.file, ids))
        is_open = np.ones(chunk.n_rows, bool)
        if pairs is not None:
            positions = places[pairs.index]
            chunk.take(pairs, positions, lines[positions])
            is_open[positions] = False
        found: list[int] = np.flatnonzero(is_open).tolist()
        return found

    def _parse_row(self, chunk: _Chunk, position: int, line: int, raw: Any) -> None:
        try:
            row = (
                self._row_of(chunk, raw)
                if not isinstance(raw, bytes)
                else (self._row_of_line(chunk, raw))
            )
            self._accept(chunk, (position, line), row)
        except Refusal as refusal:
            chunk.refuse(
                (position, line), raw, refusal, self._options.actions[refusal.reason.value]
            )

    def _row_of_line(self, chunk: _Chunk, raw: bytes) -> Row:
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError:
            # The standard library's parser takes more (NaN, huge integers) and says what is wrong.
            row = decode_object(raw)
        if not isinstance(row, dict):
            detail = f"the line holds a {type(row).__name__}, not an object"
            raise Refusal(QuarantineReason.WRONG_TYPE, detail)
        return self._row_of(chunk, row)

    def _row_of(self, chunk: _Chunk, row: Mapping[str, Any]) -> Row:
        judge = Judge(self._options.actions)
        found = read_row(row, chunk.form, judge)
        found.flags = judge.flags
        column = chunk.job.file.subset_column
        if column is not None:
            if column not in row:
                detail = f"no field {column!r}, which should name the subset"
                raise Refusal(QuarantineReason.MISSING_FIELD, detail)
            found.subset = storable(column, row[column])
        return found

    def _accept(self, chunk: _Chunk, place: tuple[int, int], row: Row) -> None:
        """Check a row that has two responses, and add it."""
        keys = self._keys_of(row)
        n = len(row.roles)
        alternating = n % 2 == 1 and n < len(_ALTERNATING) and row.roles == _ALTERNATING[n]
        alternating = alternating or row.alternating
        tokens = None
        if not alternating or keys.has_controls or self._is_strict:
            judge = Judge(self._options.actions)
            judge.flags = row.flags
            if not alternating:
                detail = "two turns in a row have the same role"
                judge.find(QuarantineReason.NON_ALTERNATING, detail)
            if keys.has_controls:
                check_characters(row, judge)
            tokens = self._check_lengths(row, judge)
        self._add(chunk, place, row, keys, (alternating, tokens))

    def _keys_of(self, row: Row) -> _Keys:
        """Return what the row is compared by."""
        prompt_id = prompt_id_of(row.roles, row.contents)
        exact = pair_digest(prompt_id, row.chosen, row.rejected)
        prompt = prompt_key_of(len(row.roles), transcript_of(row.roles, row.contents))
        first, second = normalized(row.chosen), normalized(row.rejected)
        has_controls = has_control(prompt) or has_control(first) or has_control(second)
        root = normalized(first_user_turn(row.roles, row.contents))
        root_digest = hashlib.sha256(root).digest()
        group = root_digest
        if self._options.group_by != "conversation":
            group = bytes.fromhex(prompt_id).ljust(16, b"\0")
        if not self._options.normalize:
            prompt = prompt_id.encode()
            first, second = row.chosen.encode(), row.rejected.encode()
        direction = first < second if first != second else row.chosen < row.rejected
        pair = unordered_key(prompt, first, second) + exact[:8]
        return _Keys(prompt_id, exact, pair, group, root_digest, direction, has_controls)

    def _check_lengths(self, row: Row, judge: Judge) -> tuple[Any, Any, Any] | None:
        limit = self._options.max_response_chars
        if limit is not None:
            if row.chosen != row.rejected and row.chosen[:limit] == row.rejected[:limit]:
                detail = f"the first {limit} characters of the responses are the same"
                judge.find(QuarantineReason.IDENTICAL_AFTER_TRUNCATION, detail)
            longest = max(len(row.chosen), len(row.rejected))
            if longest > limit:
                detail = f"a response has {longest} characters, the limit is {limit}"
                judge.find(QuarantineReason.TOO_LONG, detail)
        limit = self._options.max_prompt_chars
        if limit is not None and sum(map(len, row.contents)) > limit:
            detail = f"the prompt has more than {limit} characters"
            judge.find(QuarantineReason.TOO_LONG, detail)
        return self._tokens_of(row, judge) if self._renderer is not None else None

    def _tokens_of(self, row: Row, judge: Judge) -> tuple[Any, Any, Any] | None:

        found = token_ids_of(self._renderer, row.roles, row.contents, (row.chosen, row.rejected))
        if isinstance(found, str):
            judge.find(QuarantineReason.TOO_LONG, found)
            return None
        if found[1] == found[2] and row.chosen != row.rejected:
            detail = "the token ids of both responses are the same within the limit"
            judge.find(QuarantineReason.IDENTICAL_AFTER_TRUNCATION, detail)
        return found

    def _add(
        self,
        chunk: _Chunk,
        place: tuple[int, int],
        row: Row,
        keys: _Keys,
        found: tuple[bool, Any],
    ) -> None:
        file = chunk.job.file
        group_id = keys.group.hex()[:ID_DIGITS]
        if file.weight < 1.0 and not is_taken(group_id, self._options.seed, file.weight):
            detail = f"not in the sample of {file.weight:g} of source {file.source}"
            raise Refusal(QuarantineReason.NOT_SAMPLED, detail)
        split = self._split_of(file, group_id)
        chunk.keys.append(keys.pair + keys.group[:16] + keys.root[:16])
        chunk.codes.append((*place, keys.direction, split))
        alternating, tokens = found
        plain = (
            keys.exact.hex()[:ID_DIGITS],
            keys.prompt_id,
            group_id,
            row.subset or file.subset,
            row.chosen,
            row.rejected,
            len(row.roles) + 1,
            sum(map(len, row.contents)),
            len(row.chosen),
            len(row.rejected),
            alternating,
        )
        chunk.batch.add(plain, row, tokens)

    def _split_of(self, file: InputFile, group_id: str) -> int:
        return self._splits_of(file, [group_id])[0]

    def _splits_of(self, file: InputFile, group_ids: list[str]) -> list[int]:
        options = self._options
        shares = options.validation_share, options.test_share
        if options.assign == "file" and file.split is not None:
            if file.split != "train":
                return [_SPLIT_CODES[file.split]] * len(group_ids)
            shares = options.validation_share, 0.0
        return split_codes_of(group_ids, options.seed, *shares)


class _Keys(NamedTuple):
    """What a row is compared by.

    Args:
        pair: 16 bytes for both labels of the pair, 8 for its exact text.
        group, root: digests of what stays in one split, and of the first user turn.
        direction: which of the two labels it is.
    """

    prompt_id: str
    exact: bytes
    pair: bytes
    group: bytes
    root: bytes
    direction: bool
    has_controls: bool


class _Chunk:
    """What has been read of one chunk."""

    def __init__(self, job: ParseJob) -> None:
        self.job = job
        self.form = job.file.form
        is_hh = self.form in ("auto", "hh") and isinstance(job.payload, Span | Block | Rows)
        self.may_be_plain = is_hh and job.file.subset_column is None and job.file.weight >= 1.0
        self.n_rows = 0
        self.keys: list[bytes] = []
        self.codes: list[tuple[int, int, bool, int]] = []
        self.batch = PairBatch()
        self.left_out: list[LeftOut] = []
        self.failure: tuple[str, str, int] | None = None
        self.plain: PlainPairs | None = None
        self.records = np.zeros(0, KEY_RECORD)

    def take(self, pairs: PlainPairs, positions: Array, lines: Array) -> None:
        """Take pairs that were parsed at once."""
        self.plain = pairs
        self.records = np.zeros(len(positions), KEY_RECORD)
        _fill(self.records, np.hstack([pairs.keys, pairs.roots, pairs.roots]))
        self.records["row"], self.records["line"] = positions, lines
        self.records["direction"], self.records["split"] = pairs.directions, pairs.splits

    def refuse(self, place: tuple[int, int], raw: Any, refusal: Refusal, action: str) -> None:
        reason, (position, line) = refusal.reason.value, place
        if action == "fail" and (self.failure is None or line < self.failure[2]):
            self.failure = (reason, refusal.detail, line)
        self.left_out.append(LeftOut(position, line, reason, refusal.detail, raw_bytes(raw)))

    def finish(self, n_lines: int) -> ChunkResult:
        job = self.job
        records = np.concatenate([self.records, self._other_records()])
        records["file"] = job.file_index
        # Pairs that were parsed at once come first here.
        order = np.argsort(records["row"], kind="stable")
        if len(records):
            self._write_pairs(records, order)
            keep_payload(job.spill_dir, job.index, job.payload)
        if self.left_out:
            self.left_out.sort()
            write_left_out(job.spill_dir, job.index, self.left_out)
        reasons: dict[str, int] = {}
        for row in self.left_out:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
        return ChunkResult(
            index=job.index,
            file_index=job.file_index,
            n_lines=n_lines,
            n_rows=self.n_rows,
            n_pairs=len(records),
            n_left_out=len(self.left_out),
            bytes_read=job.bytes_read,
            records=records[order],
            failure=self.failure,
            reasons=reasons,
            payload=job.payload if isinstance(job.payload, Span | RowGroup) else None,
        )

    def _write_pairs(self, records: Array, order: Array) -> None:
        columns = []
        if self.plain is not None:
            columns.append(complete_columns(self.plain.columns, self.job.file.subset))
        if len(self.batch):
            columns.append(self.batch.arrays())
        write_pairs(pairs_file(self.job.spill_dir, self.job.index), columns, records, order)

    def _other_records(self) -> Array:
        records = np.zeros(len(self.keys), KEY_RECORD)
        if self.keys:
            _fill(records, np.frombuffer(b"".join(self.keys), "<u8").reshape(len(records), -1))
            position, line, direction, split = zip(*self.codes, strict=True)
            records["row"], records["line"] = position, line
            records["direction"], records["split"] = direction, split
        return records


def _fill(records: Array, numbers: Array) -> None:
    for column, name in enumerate(_NUMBERS[: numbers.shape[1]]):
        records[name] = numbers[:, column]


def _load_renderer(options: ParseOptions) -> Any:
    if options.tokenizer_dir is None:
        return None

    return load_renderer(options.tokenizer_dir, options.rendering or {})


# Token ids of pairs, by the one renderer, for the optional columns of a dataset.

Ids = tuple[int, ...]


def load_renderer(model_dir: str, rendering: Mapping[str, Any]) -> Renderer:
    """Return the renderer of a model directory; errors as in `Renderer.load`."""
    return Renderer.load(Path(model_dir).expanduser(), RenderingConfig(**rendering))


def token_ids_of(
    renderer: Renderer, roles: Sequence[str], contents: Sequence[str], answers: tuple[str, str]
) -> tuple[Ids, Ids, Ids] | str:
    """Return the ids of prompt, chosen and rejected, or why there are none."""
    turns = [Message(role, content) for role, content in zip(roles, contents, strict=True)]
    try:
        prompt, _ = renderer.prompt_ids(turns)
        chosen, rejected = (renderer.response_ids(answer)[0] for answer in answers)
    except ResponseTooLong as error:
        return error.found
    except DataError as error:
        return f"it cannot be rendered: {error.found}"
    return prompt, chosen, rejected


def read_token_ids(
    dataset: PreferenceDataset, split: str, renderer: Renderer
) -> list[tuple[list[int], list[int], list[int]] | None]:
    """Return the ids of prompt, chosen and rejected of each pair; None where a pair has none.

    Raises:
        RendererMismatchError: the dataset has no token columns, or those of another renderer.
        ArtifactError: the file is torn or of another schema version.
    """
    with open_parquet(dataset.split_path(split), PAIR_SCHEMA) as file:
        found = renderer_of(file.schema_arrow)
        if found is None:
            raise RendererMismatchError(
                f"{dataset.path} has no token columns",
                f"those of renderer {renderer.fingerprint[:12]}",
                "set ingest.tokens.model_dir and run ingest again",
            )
        renderer.check_same(found, f"{dataset.path}, split {split},")
        names = [field.name for field in TOKEN_FIELDS]
        rows = file.read(columns=names).to_pylist()
    return [
        None if row[names[0]] is None else (row[names[0]], row[names[1]], row[names[2]])
        for row in rows
    ]
