"""Where rows of preference data come from: JSON-Lines files, Parquet files, the hub."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.artifacts import file_sha256
from tasks.config.shared import UNNAMED, SourceConfig
from tasks.errors import DataError, MissingInputError


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source, or one data set of the hub.

    Args:
        path: where it is; the id of a hub data set.
        label: how the rows name it.
        source: name of the source that it belongs to.
        subset: part of the corpus, unless a row says so itself.
        form: row format, or ``auto``.
        subset_column: field of a row that names its subset.
        weight: share of the source's groups that is taken.
        split: the split that the file is, where its name says so.
        hub: keyword arguments of ``datasets.load_dataset``; None for a file.
    """

    path: str
    label: str
    source: str
    subset: str
    form: str = "auto"
    subset_column: str | None = None
    weight: float = 1.0
    split: str | None = None
    hub: Mapping[str, Any] | None = None


_PARQUET_MAGIC: Final = b"PAR1"


def is_parquet(path: Path) -> bool:
    """Tell by its content whether a file is Parquet."""
    with path.open("rb") as handle:
        return handle.read(4) == _PARQUET_MAGIC


def open_parquet_source(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of a source.

    Raises:
        DataError: it is torn.
    """
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is a broken Parquet file: {error}",
            "a complete Parquet file",
            "download or copy the file again",
        ) from error


MAX_LINE_BYTES: Final = 16 * 2**20
GZIP_ERRORS: Final = (EOFError, zlib.error, gzip.BadGzipFile)
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_OTHER_FORMATS: Final = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a Git LFS pointer, not the data",
}
_FIX: Final = "give a .jsonl or .jsonl.gz file with one JSON object per line"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of a source.

    Args:
        number: 1-based.
        text: without the line end.
        bytes_read: position in the file on disk, compressed where it is.
    """

    number: int
    text: bytes
    bytes_read: int


def check_source(path: Path) -> int:
    """Return the size of a source in bytes.

    Raises:
        MissingInputError: not there, or not a file.
        DataError: the file is empty.
    """
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "does not exist"
        raise MissingInputError(f"Source {path} {state}", "a file of JSON Lines", _FIX)
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"Source {path} is empty", "at least one row", _FIX)
    return size


def read_lines(path: Path) -> Iterator[SourceLine]:
    """Yield the lines that are not blank, one in memory at a time.

    Gzip is recognised by content, not by name.

    Raises:
        MissingInputError: as in `check_source`, or the file may not be read.
        DataError: empty, of another format, torn or corrupt gzip, or a line over 16 MiB.
    """
    check_source(path)
    number = 0
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            handle = open_text(path, raw, stack)
            lines = iter(lambda: handle.readline(MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                _check_line(path, number, line)
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip():
                    yield SourceLine(number, text.rstrip(b"\r\n"), raw.tell())
    except GZIP_ERRORS as error:
        raise corrupt_gzip(path, number, error) from error
    except PermissionError as error:
        raise unreadable(path, error) from error


def corrupt_gzip(path: Path, line: int, error: BaseException, near_byte: int = 0) -> DataError:
    """Return the error of a gzip file that does not unpack."""
    where = f", near byte {near_byte} of the file" if near_byte else ""
    return DataError(
        f"{path} is corrupt gzip after line {line}{where}: {error}",
        "a complete gzip file",
        "download or copy the file again",
    )


def unreadable(path: Path, error: OSError) -> MissingInputError:
    """Return the error of a file that may not be read."""
    return MissingInputError(
        f"{path} may not be read: {error.strerror}", "a readable file", "change its permissions"
    )


def open_text(path: Path, raw: BufferedReader, stack: ExitStack) -> BufferedReader | gzip.GzipFile:
    """Return a handle of the text, unpacked; gzip is recognised by content, not by name.

    Raises:
        DataError: another format.
    """
    head = raw.peek(32)
    handle: BufferedReader | gzip.GzipFile = raw
    if head.startswith(_GZIP_MAGIC):
        handle = gzip.GzipFile(fileobj=raw)
        stack.callback(handle.close)
        head = handle.peek(32)
    elif path.suffix == ".gz":
        raise DataError(f"{path} is named .gz but is not gzip", "a gzip file", _FIX)
    _check_head(path, head)
    return handle


def _check_head(path: Path, head: bytes) -> None:
    for magic, what in _OTHER_FORMATS.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {what}", "JSON Lines", _FIX)
    if b"\x00" in head:
        raise DataError(f"{path} is a binary file", "JSON Lines", _FIX)


def _check_line(path: Path, number: int, line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{path}, line {number} is longer than {MAX_LINE_BYTES // 2**20} MiB",
            "one JSON object per line",
            _FIX,
        )


# Which files a source is: one, those of a glob or a directory, or a data set of the hub.

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_SPLIT_NAMES: Final = {
    "train": "train",
    "test": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}
_SOURCE_FIX: Final = (
    "give a file, a glob in quotes, a directory, or a hub data set as owner/name, for instance "
    "with -o ingest.source=..."
)


def find_files(source: SourceConfig) -> list[InputFile]:
    """Return the files of a source in a fixed order.

    Raises:
        MissingInputError: there are none.
    """
    if is_hub_id(source.path):
        return [_hub_input(source)]
    root, paths = _find_paths(source)
    return [_as_input(source, root, path) for path in paths]


def _find_paths(source: SourceConfig) -> tuple[Path | None, list[Path]]:
    """Return the files, and the directory they are named from when there may be several."""
    given = Path(source.path).expanduser()
    if given.is_dir():
        root = given.absolute()
        found = _files_in(root)
    elif glob.has_magic(source.path) and not given.exists():
        root = _fixed_part(given.absolute())
        matches = [Path(p) for p in glob.glob(str(given.absolute()), recursive=True)]
        inside = [path for match in matches if match.is_dir() for path in _files_in(match)]
        found = list({*inside, *(path for path in matches if path.is_file())})
    elif given.is_file():
        return None, [given.absolute()]
    else:
        raise _missing(source, f"no file {given.absolute()}")
    if not found:
        raise _missing(source, f"no {', '.join(SUFFIXES)} file in {given.absolute()}")
    return root, sorted(found)


def _files_in(root: Path) -> list[Path]:
    """Return the files of a directory and those below, without caches and unfinished downloads."""
    paths = [path for path in root.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file()]
    return [p for p in paths if not any(x.startswith(".") for x in p.relative_to(root).parts)]


def _missing(source: SourceConfig, found: str) -> MissingInputError:
    field = "ingest.source" if source.name == UNNAMED else f"ingest.sources, {source.name}"
    return MissingInputError(f"{field}: {found}", "readable files of preference pairs", _SOURCE_FIX)


def _fixed_part(pattern: Path) -> Path:
    fixed = Path(pattern.anchor)
    for part in pattern.parts[1:-1]:
        if glob.has_magic(part):
            break
        fixed = fixed / part
    return fixed


def _as_input(source: SourceConfig, root: Path | None, path: Path) -> InputFile:
    subset = path.parent.name
    return InputFile(
        path=str(path),
        label=path.name if root is None else str(path.relative_to(root)),
        source=_name_of(source, subset if root is None else root.name),
        subset=subset,
        form=source.format,
        subset_column=source.subset_column,
        weight=source.weight,
        split=_split_named(path),
    )


def _name_of(source: SourceConfig, otherwise: str) -> str:
    return otherwise if source.name == UNNAMED else source.name


def _split_named(path: Path) -> str | None:
    """Return the split that a file's name says it is: train.jsonl.gz, test-00000-of-1.parquet."""
    word = path.name.lower().replace("_", "-").split(".")[0].split("-")[0]
    return _SPLIT_NAMES.get(word)


def _hub_input(source: SourceConfig) -> InputFile:
    arguments: dict[str, Any] = {
        "path": source.path,
        "name": source.hub_subset,
        "data_dir": source.hub_dir,
        "split": source.hub_split,
        "revision": source.revision,
    }
    name = source.path.partition("/")[2]
    return InputFile(
        path=source.path,
        label=f"{source.path}/{source.hub_split}",
        source=_name_of(source, name),
        subset=source.hub_dir or source.hub_subset or name,
        form=source.format,
        subset_column=source.subset_column,
        weight=source.weight,
        split=_SPLIT_NAMES.get(source.hub_split.split("[")[0]),
        hub={key: value for key, value in arguments.items() if value is not None},
    )


def at_revision(file: InputFile, commit: str) -> InputFile:
    """Return a hub input pinned to a commit."""
    assert file.hub is not None, "only hub data sets have commits"
    return replace(file, hub={**file.hub, "revision": commit})


def digest_of(files: Sequence[InputFile]) -> str:
    """Return the SHA-256 over the names and contents of files; of one file, that of its content."""
    if len(files) == 1:
        return file_sha256(Path(files[0].path))
    listed = [(file.label, file_sha256(Path(file.path))) for file in files]
    return hashlib.sha256(json.dumps(sorted(listed)).encode()).hexdigest()


def check_same_columns(files: Sequence[InputFile]) -> None:
    """Refuse Parquet files of one source that differ in their columns.

    Raises:
        DataError: naming the file and the columns.
    """
    for group in _by_source(files):
        tables = [f for f in group if f.hub is None and is_parquet(Path(f.path))]
        if len(tables) < 2:
            continue
        first = open_parquet_source(Path(tables[0].path)).schema_arrow
        for file in tables[1:]:
            other = open_parquet_source(Path(file.path)).schema_arrow
            if not other.equals(first, check_metadata=False):
                changed = sorted(set(map(str, first)) ^ set(map(str, other)))
                raise DataError(
                    f"{file.path} has other columns than {tables[0].path}: {', '.join(changed)}",
                    "the same columns in all Parquet files of a source",
                    "name the files as sources of their own, or correct the file",
                )


def _by_source(files: Sequence[InputFile]) -> Iterable[list[InputFile]]:
    groups: dict[str, list[InputFile]] = {}
    for file in files:
        groups.setdefault(file.source, []).append(file)
    return groups.values()


# Data sets of the Hugging Face hub: which revision, and their rows one after another.

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FIX: Final = "check the id, the network and HF_TOKEN, or download it and give the directory"


def is_hub_id(source: str) -> bool:
    """Tell whether a source names a data set of the hub: owner/name, and no such file here."""
    if _HUB_ID.fullmatch(source) is None or source.endswith(SUFFIXES):
        return False
    return not Path(source).expanduser().exists()


def _unreadable(what: str, expected: str, error: Exception) -> MissingInputError:
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return MissingInputError(f"Hub data set {what} cannot be read: {reason}", expected, _HUB_FIX)


def resolve_revision(name: str, revision: str | None) -> str:
    """Return the commit of a data set, so that a run can be repeated.

    Raises:
        MissingInputError: no such data set or revision, or the hub does not answer.
    """
    from huggingface_hub import HfApi

    try:
        found: str | None = HfApi().dataset_info(name, revision=revision, timeout=20).sha
    except Exception as error:  # the hub's client raises whatever its HTTP library does
        what = f"{name} (revision {revision or 'main'})"
        raise _unreadable(what, "a data set of the Hugging Face hub, or a file", error) from error
    assert found is not None, "the hub names the commit of every data set"
    return found


def stream_rows(hub: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set without storing it; ``hub`` goes to ``load_dataset``.

    Raises:
        MissingInputError: it cannot be read, or not to its end.
    """
    from datasets import load_dataset

    try:
        yield from load_dataset(**hub, streaming=True)
    except Exception as error:  # builders raise whatever their formats do
        raise _unreadable(hub["path"], "a readable data set", error) from error
