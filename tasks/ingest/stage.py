"""Ingestion: files of preference pairs in, a validated dataset out."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import PreferenceDataset, build_artifact, newest_artifact
from tasks.context import RunLog, StageContext
from tasks.data.hh import SPLITS
from tasks.data.quarantine import Action, QuarantineReason, default_actions
from tasks.data.schemas import PAIR_SCHEMA, renderer_of, with_tokens
from tasks.data.source import InputFile, check_same_columns
from tasks.errors import ArtifactError, ConfigError, DataError
from tasks.ingest.card import Summary, draw_plots, render_card
from tasks.ingest.chunks import ChunkResult, ParseOptions
from tasks.ingest.config import IngestConfig
from tasks.ingest.dataset import (
    Assembly,
    DecisionFile,
    KeyFiles,
    Place,
    count_shared,
    find_leaks,
    find_repeated,
    must_not_be,
)
from tasks.ingest.pool import parse_chunks
from tasks.ingest.sources import check_file, cut_into_jobs, size_of

# Below this a process takes longer to start than the rows take to parse.
_SMALL_SOURCE_BYTES: Final = 2 * 2**20
_MOST_WORKERS: Final = 16
_SCRATCH: Final = "spill-"
# How much of the work parsing is, for the progress bar.
_PARSING_SHARE: Final = 0.7
_SECONDS_BETWEEN_REPORTS: Final = 0.2
_SOURCE_FIX: Final = (
    "give HH-RLHF pairs (an object with chosen and rejected on each line), prompt with chosen and "
    "rejected, scored pairs or verl rows; ingest.format names the format"
)


def ingest_pairs(
    ctx: StageContext, cfg: IngestConfig, files: Sequence[InputFile]
) -> PreferenceDataset:
    """Validate sources, split them by conversation and write them as Parquet with a data card.

    Each row is either kept or in quarantine with its text and one reason. Rows are parsed by
    several processes and put aside in the checkpoint directory; the result does not depend on how
    many they are, and memory does not grow with the number of rows.

    Args:
        files: in the order in which their rows are numbered; see `tasks.data.source.find_files`.

    Raises:
        MissingInputError: no such file.
        DataError: a file is empty, corrupt or of another format; too many rows are quarantined; a
            row of a reason that must not be there; a split is empty.
        ConfigError: the split shares leave nothing to train on.
        ClusterError: a parsing process ended.
    """
    _check_shares(cfg)
    for file in files:
        check_file(file)
    check_same_columns(files)
    with _scratch_dir(ctx) as scratch:
        parsed = _parse(ctx.log, cfg, files, scratch)
        assembly, shared_rows = _decide(cfg, files, parsed, scratch)
        _check_accounts(cfg, parsed, assembly)
        summary = Summary(scratch, has_many_files=len(files) > 1, shared_rows=shared_rows)
        with build_artifact(ctx.artifacts_dir, ctx.draft) as directory:
            _write(ctx, parsed, assembly, directory, summary)
            _check_splits(cfg, summary)
            card = render_card(_name_of(files), [file.label for file in files], summary)
            (directory / "card.md").write_text(card, encoding="utf-8")
            ctx.draft.renderer_fingerprint = renderer_of(assembly.schema)
            ctx.draft.counts.update(summary.counts())
            ctx.draft.metrics["longer_wins_share"] = summary.longer_wins_share
            ctx.draft.metrics["duplicate_share"] = summary.duplicate_share
        if summary.left_out:
            ctx.log.event("quarantined", summary.name_left_out())
        for path in draw_plots(summary, scratch):
            ctx.log.file(path, "card")
    return _reload(ctx)


ingest_pairs_task = task(name="ingest-pairs", cache_policy=NO_CACHE)(ingest_pairs)


@dataclass
class _Parsed:
    """All rows of all sources, put aside.

    Args:
        rows_of, left_out_of, lines_of: all rows, left-out rows and lines by file.
    """

    scratch: Path
    places: list[Place] = field(default_factory=list)
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    rows_of: Counter[int] = field(default_factory=Counter)
    left_out_of: Counter[int] = field(default_factory=Counter)
    lines_of: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.pairs, self.groups, self.roots = (
            KeyFiles(self.scratch, name) for name in ("pair", "group", "root")
        )

    def add(self, result: ChunkResult) -> Place:
        """Take the next chunk."""
        # Rows of text are counted from the start of their chunk, others have their numbers.
        base = self.lines_of[result.file_index] + 1 if result.n_lines else 0
        place = Place(
            result.index,
            result.file_index,
            self.rows,
            base,
            result.n_rows,
            result.n_pairs,
            result.n_left_out,
            result.payload,
        )
        self.places.append(place)
        self.rows += result.n_rows
        self.reasons.update(result.reasons)
        self.rows_of[result.file_index] += result.n_rows
        self.left_out_of[result.file_index] += result.n_left_out
        self.lines_of[result.file_index] += result.n_lines
        return place


class _Progress:
    """Reports how much is done, how fast, and how long the rest takes."""

    def __init__(self, log: RunLog, total_bytes: int) -> None:
        self._log = log
        self._total = total_bytes
        self._started = time.monotonic()
        self._reported = 0.0

    def update(self, share: float, rows: int) -> None:
        """Report a share of the whole work."""
        now = time.monotonic()
        if now - self._reported < _SECONDS_BETWEEN_REPORTS:
            return
        self._reported = now
        seconds = now - self._started
        left = seconds * (1 - share) / share if share else 0.0
        rate = rows / seconds if seconds else 0.0
        text = f"{rows:,} rows, {rate:,.0f} rows/s, {left:.0f} s left"
        self._log.progress(share * self._total, self._total, text)

    def finish(self, rows: int) -> None:
        """Report the end."""
        self._log.progress(self._total, self._total, f"{rows:,} rows")


def _check_shares(cfg: IngestConfig) -> None:
    if cfg.validation_share + cfg.test_share >= 1.0:
        raise ConfigError(
            f"validation_share {cfg.validation_share} and test_share {cfg.test_share} add up to "
            f"{cfg.validation_share + cfg.test_share:g}",
            "less than 1",
            "lower ingest.validation_share or ingest.test_share",
        )


@contextmanager
def _scratch_dir(ctx: StageContext) -> Iterator[Path]:
    """Yield an empty directory; what a killed run left of this dataset is removed first."""
    for stale in ctx.artifacts_dir.glob(f".tmp-{ctx.fingerprint[:16]}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    _sweep(ctx.checkpoint_dir)
    ctx.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    # A name of its own: a worker of a run that was just killed may still be writing.
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=ctx.checkpoint_dir))
    try:
        yield scratch
    finally:
        _sweep(ctx.checkpoint_dir)


def _sweep(directory: Path) -> None:
    for scratch in directory.glob(f"{_SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _actions(cfg: IngestConfig) -> dict[str, Action]:
    return {**default_actions(), **cfg.reasons}


def _options(cfg: IngestConfig) -> ParseOptions:
    tokens = cfg.tokens
    return ParseOptions(
        actions=_actions(cfg),
        seed=cfg.seed,
        validation_share=cfg.validation_share,
        test_share=cfg.test_share,
        group_by=cfg.splits.group_by,
        assign=cfg.splits.assign,
        normalize=cfg.deduplicate == "normalized",
        max_prompt_chars=cfg.limits.max_prompt_chars,
        max_response_chars=cfg.limits.max_response_chars,
        tokenizer_dir=tokens.model_dir if tokens is not None else None,
        rendering=tokens.rendering.model_dump() if tokens is not None else None,
    )


def _worker_count(cfg: IngestConfig, total_bytes: int) -> int:
    if total_bytes < _SMALL_SOURCE_BYTES:
        return 1
    return cfg.workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def _parse(log: RunLog, cfg: IngestConfig, files: Sequence[InputFile], scratch: Path) -> _Parsed:
    sizes = [size_of(file) for file in files]
    total = sum(sizes)
    progress = _Progress(log, total)
    parsed = _Parsed(scratch)
    jobs = cut_into_jobs(files, scratch)
    for result in parse_chunks(jobs, _options(cfg), _worker_count(cfg, total)):
        place = parsed.add(result)
        if result.failure is not None:
            reason, detail, line = result.failure
            row = {"reason": reason, "detail": detail}
            raise must_not_be(files[place.file_index], line + place.line_base, row)
        _add_keys(parsed, cfg, place, result)
        done = sum(sizes[: place.file_index]) + result.bytes_read
        progress.update(_PARSING_SHARE * done / total if total else 0.0, parsed.rows)
    return parsed


def _add_keys(parsed: _Parsed, cfg: IngestConfig, place: Place, result: ChunkResult) -> None:
    records = result.records
    records["row"] += place.first_row
    records["line"] += place.line_base
    if cfg.deduplicate != "none":
        parsed.pairs.add(records)
    if cfg.splits.assign == "file":
        parsed.groups.add(records)
    parsed.roots.add(records)


def _decide(
    cfg: IngestConfig, files: Sequence[InputFile], parsed: _Parsed, scratch: Path
) -> tuple[Assembly, int]:
    """Find leaks, then repeated rows among the others; count what the splits share."""
    actions = _actions(cfg)
    found = []
    leaks = None
    if cfg.splits.assign == "file":
        leaks = DecisionFile(scratch / "leaks", parsed.rows)
        find_leaks(parsed.groups, leaks)
        found.append(leaks)
    repeated = DecisionFile(scratch / "repeated", parsed.rows)
    drops_leaks = actions[QuarantineReason.LEAKED_FROM_OTHER_SPLIT.value] != "keep"
    find_repeated(parsed.pairs, repeated, leaks if drops_leaks else None)
    found.append(repeated)
    assembly = Assembly(
        files, parsed.places, scratch, actions, found, cfg.rows_per_group, _schema(cfg)
    )
    return assembly, count_shared(parsed.roots, leaks if drops_leaks else None)


def _schema(cfg: IngestConfig) -> Any:
    if cfg.tokens is None:
        return PAIR_SCHEMA
    from tasks.ingest.parser import load_renderer

    renderer = load_renderer(cfg.tokens.model_dir, cfg.tokens.rendering.model_dump())
    return with_tokens(renderer.fingerprint)


def _check_accounts(cfg: IngestConfig, parsed: _Parsed, assembly: Assembly) -> None:
    """Refuse sources without rows, files without a usable row, and too many unusable rows."""
    names = ", ".join(file.path for file in assembly.files[:3])
    if not parsed.rows:
        raise DataError(f"{names} holds only blank lines", "at least one row", _SOURCE_FIX)
    for index, file in enumerate(assembly.files):
        rows = parsed.rows_of[index]
        if rows and rows == parsed.left_out_of[index] and len(assembly.files) > 1:
            places = [place for place in parsed.places if place.file_index == index]
            raise _unusable(
                cfg, file.path, f"{rows} of {rows} rows cannot be used", places, assembly
            )
    reasons = _reasons_of(parsed, assembly)
    sampled = reasons.pop(QuarantineReason.NOT_SAMPLED.value, 0)
    left_out, rows = sum(reasons.values()), parsed.rows - sampled
    if left_out >= rows or left_out / rows > cfg.max_quarantine_share:
        listed = ", ".join(f"{name} {count}" for name, count in reasons.most_common())
        lost = f"{left_out} of {rows} rows cannot be used ({listed})"
        raise _unusable(cfg, names, lost, parsed.places, assembly)


def _reasons_of(parsed: _Parsed, assembly: Assembly) -> Counter[str]:
    reasons = Counter(parsed.reasons)
    for found in assembly.found:
        for reason, count in found.counts.items():
            if assembly.actions[reason.value] != "keep":
                reasons[reason.value] += count
    return reasons


def _unusable(
    cfg: IngestConfig, name: str, lost: str, places: Sequence[Place], assembly: Assembly
) -> DataError:
    """Return the error about files, with the first row that is lost.

    Args:
        lost: how many rows are, and for which reasons.
    """
    entries = (entry for place in places for entry in assembly.prepare(place).left_out)
    not_sampled = QuarantineReason.NOT_SAMPLED.value
    first = next((e for e in entries if e["reason"] != not_sampled), None)
    if first is None:
        return DataError(f"{name}: no row is in the sample", "at least one", "raise the weight")
    return DataError(
        f"{name}: {lost}; the first is line {first['source_line']} of {first['source_file']}: "
        f"{first['reason']}, {first['detail']}",
        f"at most {cfg.max_quarantine_share:.0%} unusable rows (ingest.max_quarantine_share), and "
        "one usable in each file",
        _SOURCE_FIX,
    )


def _write(
    ctx: StageContext, parsed: _Parsed, assembly: Assembly, directory: Path, summary: Summary
) -> None:
    total = sum(size_of(file) for file in assembly.files)
    progress = _Progress(ctx.log, total)
    for rows in assembly.write(directory, summary):
        share = _PARSING_SHARE + (1 - _PARSING_SHARE) * rows / parsed.rows
        progress.update(share, rows)
    progress.finish(parsed.rows)
    if summary.rows != parsed.rows:
        raise ArtifactError(
            f"{parsed.rows} rows were read, but {summary.kept} kept and {summary.left_out} "
            "quarantined",
            "each row in exactly one place",
            "report this as a defect",
        )


def _check_splits(cfg: IngestConfig, summary: Summary) -> None:
    for name in SPLITS:
        if not summary.splits[name]:
            raise DataError(
                f"The {name} split is empty: {summary.kept} pairs, validation_share "
                f"{cfg.validation_share}, test_share {cfg.test_share}",
                "at least one pair in each split",
                "raise the share in the ingest section, or give more pairs",
            )


def _name_of(files: Sequence[InputFile]) -> str:
    return ", ".join(dict.fromkeys(file.source for file in files))


def _reload(ctx: StageContext) -> PreferenceDataset:
    dataset = newest_artifact(ctx.artifacts_dir, PreferenceDataset, ctx.fingerprint)
    if dataset is None:
        raise ArtifactError(
            f"{ctx.artifacts_dir} has no dataset {ctx.fingerprint[:16]} after writing it",
            "the dataset that was just written",
            "let nothing clean the workspace meanwhile, and run ingest again",
        )
    return dataset
