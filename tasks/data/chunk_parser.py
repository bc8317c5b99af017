"""Parses one chunk of a source: usable pairs and left-out rows, each put aside as an Arrow file.

Runs in worker processes, so it imports nothing that takes long. What it writes depends on the chunk
and the options alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from tasks.data.chunk_jobs import (
    KEY_RECORD,
    ChunkResult,
    LineReader,
    ParseJob,
    ParseOptions,
    RowGroup,
    Span,
    raw_bytes,
)
from tasks.data.hh import ID_DIGITS, Refusal, split_shared
from tasks.data.keys import (
    SPLITS,
    group_digest,
    is_taken,
    normalized,
    pair_digest,
    prompt_id_of,
    split_of,
    unordered_key,
)
from tasks.data.rows import Judge, Row, check_characters, decode_object, read_row, storable
from tasks.data.spill import LeftOut, PairBatch, keep_payload, write_left_out, write_pairs
from tasks.quarantine import QuarantineReason

_ALTERNATING: Final = [["user", "assistant"] * (n // 2) + ["user"] * (n % 2) for n in range(200)]
_SPLIT_CODES: Final = {name: code for code, name in enumerate(SPLITS)}


class ChunkParser:
    """Parses chunks with the same options, one after another."""

    def __init__(self, options: ParseOptions) -> None:
        self._options = options
        self._has_limits = bool(options.max_prompt_chars or options.max_response_chars)
        self._renderer = _load_renderer(options)

    def parse(self, job: ParseJob) -> ChunkResult:
        """Parse one chunk and write its spill files.

        Raises:
            DataError: a line too long to be a row.
        """
        reader = LineReader(job.file, job.payload)
        chunk = _Chunk(job)
        for line, raw in reader.rows():
            self._parse_row(chunk, line, raw)
            chunk.position += 1
        return chunk.finish(reader.n_lines)

    def _parse_row(self, chunk: _Chunk, line: int, raw: Any) -> None:
        try:
            if isinstance(raw, bytes):
                row = self._row_of_line(chunk, raw)
                is_suspect = _may_have_controls(raw)
            else:
                row = self._row_of(chunk, raw)
                is_suspect = True
            self._accept(chunk, line, row, is_suspect)
        except Refusal as refusal:
            chunk.refuse(line, raw, refusal, self._options.actions[refusal.reason.value])

    def _row_of_line(self, chunk: _Chunk, raw: bytes) -> Row:
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError:
            # The standard library's parser takes more (NaN, huge integers) and says what is wrong.
            row = decode_object(raw)
        if len(row) == 2 and chunk.form in ("auto", "hh") and isinstance(row, dict):
            chosen, rejected = row.get("chosen"), row.get("rejected")
            if isinstance(chosen, str) and isinstance(rejected, str):
                shared = split_shared(chosen, rejected)
                if shared is not None:
                    return Row(*shared)
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

    def _accept(self, chunk: _Chunk, line: int, row: Row, is_suspect: bool) -> None:
        roles = row.roles
        n = len(roles)
        alternating = n % 2 == 1 and n < len(_ALTERNATING) and roles == _ALTERNATING[n]
        if not alternating:
            alternating = row.alternating
        tokens = None
        if not alternating or is_suspect or self._has_limits or self._renderer is not None:
            judge = Judge(self._options.actions)
            judge.flags = row.flags
            if not alternating:
                detail = "two turns in a row have the same role"
                judge.find(QuarantineReason.NON_ALTERNATING, detail)
            if is_suspect:
                check_characters(row, judge)
            tokens = self._check_lengths(row, judge)
        self._add(chunk, line, row, alternating, tokens)

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
        from tasks.data.pair_tokens import token_ids_of

        found = token_ids_of(self._renderer, row.roles, row.contents, (row.chosen, row.rejected))
        if isinstance(found, str):
            judge.find(QuarantineReason.TOO_LONG, found)
            return None
        if found[1] == found[2] and row.chosen != row.rejected:
            detail = "the token ids of both responses are the same within the limit"
            judge.find(QuarantineReason.IDENTICAL_AFTER_TRUNCATION, detail)
        return found

    def _add(
        self, chunk: _Chunk, line: int, row: Row, alternating: bool, tokens: Any
    ) -> None:
        options = self._options
        roles, contents, chosen, rejected = row.roles, row.contents, row.chosen, row.rejected
        prompt_id = prompt_id_of(roles, contents)
        exact = pair_digest(prompt_id, chosen, rejected)
        prompt_key = normalized("\x00".join([*roles, *contents]))
        root = group_digest(normalized(_first_user_turn(roles, contents)))
        group = root if options.group_by == "conversation" else group_digest(prompt_key)
        group_id = group.hex()[:ID_DIGITS]
        file = chunk.job.file
        if file.weight < 1.0 and not is_taken(group_id, options.seed, file.weight):
            detail = f"not in the sample of {file.weight:g} of source {file.source}"
            raise Refusal(QuarantineReason.NOT_SAMPLED, detail)
        split = self._split_of(file.split, group_id)
        if options.normalize:
            first, second = normalized(chosen), normalized(rejected)
        else:
            prompt_key, first, second = prompt_id.encode(), chosen.encode(), rejected.encode()
        direction = first < second if first != second else chosen < rejected
        chunk.keys.append(unordered_key(prompt_key, first, second) + exact[:8])
        chunk.groups.append(group[:16] + root[:16])
        chunk.codes.append((chunk.position, line, direction, split))
        chunk.batch.add(
            (
                exact.hex()[:ID_DIGITS],
                prompt_id,
                group_id,
                row.subset or file.subset,
                chosen,
                rejected,
                len(roles) + 1,
                sum(map(len, contents)),
                len(chosen),
                len(rejected),
                alternating,
            ),
            row,
            tokens,
        )

    def _split_of(self, file_split: str | None, group_id: str) -> int:
        options = self._options
        if options.assign == "hash" or file_split is None:
            name = split_of(group_id, options.seed, options.validation_share, options.test_share)
        elif file_split == "train":
            name = split_of(group_id, options.seed, options.validation_share, 0.0)
        else:
            name = file_split
        return _SPLIT_CODES[name]


class _Chunk:
    """What has been read of one chunk."""

    def __init__(self, job: ParseJob) -> None:
        self.job = job
        self.form = job.file.form
        self.position = 0
        self.keys: list[bytes] = []
        self.groups: list[bytes] = []
        self.codes: list[tuple[int, int, bool, int]] = []
        self.batch = PairBatch()
        self.left_out: list[LeftOut] = []
        self.failure: tuple[str, str, int] | None = None

    def refuse(self, line: int, raw: Any, refusal: Refusal, action: str) -> None:
        reason = refusal.reason.value
        if action == "fail" and self.failure is None:
            self.failure = (reason, refusal.detail, line)
        self.left_out.append(LeftOut(self.position, line, reason, refusal.detail, raw_bytes(raw)))

    def finish(self, n_lines: int) -> ChunkResult:
        job = self.job
        if self.keys:
            write_pairs(job.spill_dir, job.index, self.batch, self.codes)
            keep_payload(job.spill_dir, job.index, job.payload)
        if self.left_out:
            write_left_out(job.spill_dir, job.index, self.left_out)
        reasons: dict[str, int] = {}
        for row in self.left_out:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
        return ChunkResult(
            index=job.index,
            file_index=job.file_index,
            n_lines=n_lines,
            n_rows=self.position,
            n_pairs=len(self.keys),
            n_left_out=len(self.left_out),
            bytes_read=job.bytes_read,
            records=self._records(),
            failure=self.failure,
            reasons=reasons,
            payload=job.payload if isinstance(job.payload, Span | RowGroup) else None,
        )

    def _records(self) -> np.ndarray[Any, Any]:
        records = np.zeros(len(self.keys), KEY_RECORD)
        names = ("pair_low", "pair_high", "exact")
        _fill(records, names, self.keys)
        _fill(records, ("group_low", "group_high", "root_low", "root_high"), self.groups)
        if self.codes:
            position, line, direction, split = zip(*self.codes, strict=True)
            records["row"], records["line"] = position, line
            records["direction"], records["split"] = direction, split
        records["file"] = self.job.file_index
        return records


def _fill(records: np.ndarray[Any, Any], names: tuple[str, ...], digests: list[bytes]) -> None:
    values = np.frombuffer(b"".join(digests), "<u8").reshape(-1, len(names))
    for column, name in enumerate(names):
        records[name] = values[:, column]


def _may_have_controls(raw: bytes) -> bool:
    # In JSON a control character is written as an escape; DEL may stand as it is.
    return b"\\u00" in raw or b"\\b" in raw or b"\\f" in raw or b"\x7f" in raw


def _first_user_turn(roles: list[str], contents: list[str]) -> str:
    """Return what the user said first: conversations that extend one another share it."""
    for role, content in zip(roles, contents, strict=True):
        if role == "user":
            return content
    return contents[0] if contents else ""


def _load_renderer(options: ParseOptions) -> Any:
    if options.tokenizer_dir is None:
        return None
    from tasks.data.pair_tokens import load_renderer

    return load_renderer(options.tokenizer_dir, options.rendering or {})
