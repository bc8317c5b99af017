"""Which files a source is: one, those of a glob or a directory, or a data set of the hub."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tasks.artifacts import file_sha256
from tasks.config import IngestConfig, SourceConfig
from tasks.data.chunk_jobs import InputFile
from tasks.data.chunk_sources import is_parquet, open_parquet_source
from tasks.data.hub import is_hub_id
from tasks.errors import DataError, MissingInputError

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
UNNAMED: Final = "source"
_SPLIT_NAMES: Final = {
    "train": "train",
    "test": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}
_FIX: Final = (
    "give a file, a glob in quotes, a directory, or a hub data set as owner/name, for instance "
    "with -o ingest.source=..."
)


def source_configs(cfg: IngestConfig) -> tuple[SourceConfig, ...]:
    """Return the sources; a single one is named after its subset."""
    if cfg.sources:
        return cfg.sources
    return (SourceConfig(name=UNNAMED, path=cfg.source, format=cfg.format),)


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
    return MissingInputError(f"{field}: {found}", "readable files of preference pairs", _FIX)


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
