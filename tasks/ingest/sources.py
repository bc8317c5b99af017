"""Cuts sources into chunks: spans of plain files, blocks of unpacked lines, row groups, rows.

Where a chunk ends depends on the source alone, never on the number of workers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final

from tasks.data.source import (
    GZIP_ERRORS,
    MAX_LINE_BYTES,
    InputFile,
    check_source,
    corrupt_gzip,
    is_parquet,
    open_parquet_source,
    open_text,
    stream_rows,
    unreadable,
)
from tasks.errors import DataError
from tasks.ingest.chunks import Block, ParseJob, Payload, RowGroup, Rows, Span, too_long_line

CHUNK_BYTES: Final = 4 * 2**20
_ROWS_PER_CHUNK: Final = 4096
_ARRAY_SUFFIXES: Final = (".json", ".json.gz")

Chunk = tuple[Payload, int]


def size_of(file: InputFile) -> int:
    """Return the size of a file in bytes; 0 for a hub data set, whose size is not known.

    Raises:
        MissingInputError: no such file.
        DataError: the file is empty.
    """
    return 0 if file.hub is not None else check_source(Path(file.path))


def check_file(file: InputFile) -> None:
    """Check that a file is there and of a known format; its rows are judged later.

    Raises:
        MissingInputError, DataError: it is not.
    """
    if file.hub is not None:
        return
    path = Path(file.path)
    check_source(path)
    try:
        if is_parquet(path):
            open_parquet_source(path).close()
            return
        with ExitStack() as stack:
            open_text(path, stack.enter_context(path.open("rb")), stack)
    except GZIP_ERRORS as error:
        raise corrupt_gzip(path, 0, error) from error
    except PermissionError as error:
        raise unreadable(path, error) from error


def cut_into_jobs(files: Iterable[InputFile], spill_dir: Path) -> Iterator[ParseJob]:
    """Yield the chunks of all files in order.

    Raises:
        MissingInputError, DataError: a file that is not there or cannot be used.
    """
    numbers = count()
    for file_index, file in enumerate(files):
        for payload, bytes_read in _chunks_of(file):
            yield ParseJob(next(numbers), file_index, file, payload, spill_dir, bytes_read)


def _chunks_of(file: InputFile) -> Iterator[Chunk]:
    if file.hub is not None:
        return _of_rows(enumerate(map(_as_json, stream_rows(file.hub)), start=1))
    path = Path(file.path)
    check_source(path)
    try:
        if is_parquet(path):
            return _of_parquet(path)
    except PermissionError as error:
        raise unreadable(path, error) from error
    return _of_text(path)


def _as_json(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")


def _of_rows(rows: Iterable[tuple[int, bytes]], path: Path | None = None) -> Iterator[Chunk]:
    """Gather rows into chunks; progress follows the text, which is near enough."""
    gathered: list[tuple[int, bytes]] = []
    size = done = 0
    for number, row in rows:
        gathered.append((number, row))
        size += len(row)
        if size >= CHUNK_BYTES or len(gathered) >= _ROWS_PER_CHUNK:
            done += size
            yield Rows(gathered), done
            gathered, size = [], 0
    if gathered:
        yield Rows(gathered), path.stat().st_size if path is not None else done + size


def _of_parquet(path: Path) -> Iterator[Chunk]:
    file = open_parquet_source(path)
    with file:
        meta = file.metadata
        done_rows = 0
        total = path.stat().st_size
        for index in range(meta.num_row_groups):
            group = meta.row_group(index)
            row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
            step = max(1, min(_ROWS_PER_CHUNK, CHUNK_BYTES // row_bytes))
            for offset in range(0, group.num_rows, step):
                n_rows = min(step, group.num_rows - offset)
                part = RowGroup(index, offset, n_rows, done_rows + 1)
                done_rows += n_rows
                yield part, total * done_rows // meta.num_rows


def _of_text(path: Path) -> Iterator[Chunk]:
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            handle = open_text(path, raw, stack)
            head = handle.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()
            if path.name.endswith(_ARRAY_SUFFIXES) and head.startswith(b"["):
                yield from _of_rows(array_elements(path, handle), path)
            elif handle is raw:
                size = path.stat().st_size
                for start in range(0, size, CHUNK_BYTES):
                    end = min(start + CHUNK_BYTES, size)
                    yield Span(start, end), end
            else:
                yield from _blocks(path, handle, raw)
    except GZIP_ERRORS as error:
        raise corrupt_gzip(path, 0, error) from error
    except PermissionError as error:
        raise unreadable(path, error) from error


def _blocks(path: Path, handle: Any, raw: Any) -> Iterator[Chunk]:
    lines = 0
    rest = b""
    is_first = True
    while True:
        try:
            read = handle.read(CHUNK_BYTES)
        except GZIP_ERRORS as error:
            raise corrupt_gzip(path, lines, error, raw.tell()) from error
        text = rest + read
        cut = text.rfind(b"\n") + 1 if read else len(text)
        if not cut and len(text) > MAX_LINE_BYTES:
            raise too_long_line(str(path), f"after line {lines}")
        rest = text[cut:]
        if cut:
            block = text[:cut]
            _check_lines(path, block, lines)
            lines += block.count(b"\n")
            yield Block(block, is_first), raw.tell()
            is_first = False
        if not read:
            return


def _check_lines(path: Path, block: bytes, lines: int) -> None:
    if len(block) > MAX_LINE_BYTES:
        for number, line in enumerate(block.split(b"\n"), start=lines + 1):
            if len(line) > MAX_LINE_BYTES:
                raise too_long_line(str(path), f"line {number}")


def array_elements(path: Path, handle: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of a JSON array with the lines they start in, a few in memory at a time.

    Raises:
        DataError: the array is broken; nothing after the break can be told apart.
    """
    reader = _ArrayReader(path, handle)
    reader.expect("[")
    if reader.peek() == "]":
        reader.finish()
        return
    while True:
        yield reader.element()
        separator = reader.peek()
        if separator == "]":
            reader.finish()
            return
        reader.expect(",")


class _ArrayReader:
    """Reads a JSON array element by element."""

    def __init__(self, path: Path, handle: Any) -> None:
        self._path = path
        self._handle = handle
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0

    def peek(self) -> str:
        """Return the next character that is not white space."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise self._broken("the file ends inside the array")

    def expect(self, wanted: str) -> None:
        """Go past a character."""
        found = self.peek()
        if found != wanted:
            raise self._broken(f"{found!r} where {wanted!r} should be")
        self._at += 1

    def finish(self) -> None:
        """Go past the end of the array; only white space may follow, or rows would be lost."""
        self.expect("]")
        while True:
            if self._text[self._at :].strip():
                raise self._broken("text follows the end of the array")
            self._at = len(self._text)
            if not self._more():
                return

    def element(self) -> tuple[int, bytes]:
        """Return the next element and its line."""
        self.peek()
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._at)
                # A number may go on in the next piece of the file.
                if end < len(self._text):
                    break
                problem = "it does not end"
            except (ValueError, RecursionError) as error:
                problem = str(error) or type(error).__name__
            if len(self._text) - self._at > MAX_LINE_BYTES or not self._more():
                raise self._broken(problem)
        text = self._text[self._at : end]
        line = self._here()
        self._at = end
        return line, text.encode("utf-8", "surrogatepass")

    def _here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _more(self) -> bool:
        self._here()
        self._text, self._at, self._counted = self._text[self._at :], 0, 0
        try:
            # As much again as there is, so that a long element is not parsed too often.
            read = self._handle.read(max(CHUNK_BYTES // 4, len(self._text)))
            self._text += self._decoder.decode(read, final=not read)
        except GZIP_ERRORS as error:
            raise corrupt_gzip(self._path, self._line, error) from error
        except UnicodeDecodeError as error:
            raise self._broken(f"no UTF-8: {error.reason}") from error
        return bool(read)

    def _broken(self, problem: str) -> DataError:
        return DataError(
            f"{self._path}, line {self._here()}: the JSON array is broken: {problem}",
            "a JSON array of objects, or one JSON object per line",
            "correct the file, or give it as .jsonl",
        )
