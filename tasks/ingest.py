"""Ingestion: a file of preference pairs in, a validated dataset out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import PreferenceDataset, build_artifact, file_sha256, newest_artifact
from tasks.config import IngestConfig
from tasks.context import RunLog, StageContext
from tasks.data.card import longer_wins_share, render_card
from tasks.data.hh import Pair, Quarantined, QuarantineReason, parse_line
from tasks.data.pairs import SPLITS, pair_to_row, split_of
from tasks.data.schemas import PAIR_SCHEMA, QUARANTINE_SCHEMA, RowGroupWriter
from tasks.data.source import check_source, read_lines
from tasks.errors import ArtifactError, DataError

_LINES_PER_REPORT: Final = 5_000
_NAMED_LINES: Final = 20
_SOURCE_FIX: Final = (
    "give a JSON-Lines file of HH-RLHF pairs: an object with chosen and rejected on each line"
)


@dataclass(frozen=True)
class _Accounts:
    """All rows of a source: each is in exactly one of the two lists, in source order."""

    rows: int
    pairs: list[Pair]
    quarantined: list[Quarantined]


def ingest_pairs(
    ctx: StageContext, cfg: IngestConfig, source: Path, subset: str
) -> PreferenceDataset:
    """Validate a source, split it by prompt and write it as Parquet with a data card.

    Exact duplicates are quarantined but for their first row; a pair that is there with both labels
    is quarantined on both sides, because nothing says which is right.

    Args:
        source: ``.jsonl`` or ``.jsonl.gz``, one pair per line; blank lines are not rows.
        subset: name of the part of the corpus, stored with each pair.

    Raises:
        MissingInputError: no such file.
        DataError: the file is empty, corrupt or no JSON Lines; too many rows are quarantined; a
            split is empty.
        ConfigError: the split shares leave nothing to train on.
    """
    accounts = _read_source(source, subset, ctx.log)
    _check_share(accounts, source, cfg.max_quarantine_share)
    if accounts.quarantined:
        ctx.log.event("quarantined", _name_left_out(accounts.quarantined))
    splits = _assign_splits(accounts.pairs, cfg)
    ctx.draft.counts.update(_count(accounts, splits))
    ctx.draft.metrics["longer_wins_share"] = longer_wins_share(accounts.pairs)
    with build_artifact(ctx.artifacts_dir, ctx.draft) as directory:
        _write_splits(directory, splits, cfg.rows_per_group)
        _write_quarantine(directory, accounts.quarantined, cfg.rows_per_group)
        card = render_card(subset, source.name, splits, accounts.quarantined)
        (directory / "card.md").write_text(card, encoding="utf-8")
    return _reload(ctx)


ingest_pairs_task = task(name="ingest-pairs", cache_policy=NO_CACHE)(ingest_pairs)


def source_digest(path: Path) -> str:
    """Return the SHA-256 of a source file.

    Raises:
        MissingInputError: no such file.
        DataError: the file is empty.
    """
    check_source(path)
    return file_sha256(path)


def _read_source(source: Path, subset: str, log: RunLog) -> _Accounts:
    total = check_source(source)
    pairs: list[Pair] = []
    quarantined: list[Quarantined] = []
    rows = 0
    for line in read_lines(source):
        row = parse_line(line.text, subset, source.name, line.number)
        rows += 1
        if isinstance(row, Pair):
            pairs.append(row)
        else:
            quarantined.append(row)
        if rows % _LINES_PER_REPORT == 0:
            log.progress(line.bytes_read, total, f"{rows} rows read")
    log.progress(total, total, f"{rows} rows read")
    unique, repeated = _find_repeated(pairs)
    left_out = sorted(quarantined + _with_text(repeated, source), key=attrgetter("source_line"))
    return _Accounts(rows, unique, left_out)


def _find_repeated(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Quarantined]]:
    """Return the pairs to keep, and those to leave out still without their text."""
    first_lines: dict[str, int] = {}
    for pair in pairs:
        first_lines.setdefault(pair.pair_id, pair.source_line)
    kept: list[Pair] = []
    left_out: list[Quarantined] = []
    for pair in pairs:
        first = first_lines[pair.pair_id]
        opposite = first_lines.get(pair.swapped_id)
        if first != pair.source_line:
            detail = f"line {first} has the same pair"
            left_out.append(_leave_out(pair, QuarantineReason.DUPLICATE, detail))
        elif opposite is not None:
            detail = f"line {opposite} has the same pair with the opposite label"
            left_out.append(_leave_out(pair, QuarantineReason.LABEL_CONFLICT, detail))
        else:
            kept.append(pair)
    return kept, left_out


def _leave_out(pair: Pair, reason: QuarantineReason, detail: str) -> Quarantined:
    return Quarantined(reason, detail, pair.source_file, pair.source_line, raw="")


def _with_text(rows: Sequence[Quarantined], source: Path) -> list[Quarantined]:
    # Parsed pairs do not keep their line; reading the few repeated ones again costs less memory.
    if not rows:
        return []
    wanted = {row.source_line for row in rows}
    texts = {
        line.number: line.text.decode("utf-8")
        for line in read_lines(source)
        if line.number in wanted
    }
    return [replace(row, raw=texts[row.source_line]) for row in rows]


def _name_left_out(quarantined: Sequence[Quarantined]) -> str:
    """Return how many rows were left out and, by reason, their lines."""
    lines: dict[str, list[int]] = {}
    for row in quarantined:
        lines.setdefault(row.reason.value, []).append(row.source_line)
    parts = []
    for reason, found in sorted(lines.items()):
        shown = ", ".join(map(str, found[:_NAMED_LINES]))
        more = f" and {len(found) - _NAMED_LINES} more" if len(found) > _NAMED_LINES else ""
        parts.append(f"{reason} (lines {shown}{more})")
    return f"{len(quarantined)} rows left out: {'; '.join(parts)}"


def _check_share(accounts: _Accounts, source: Path, max_share: float) -> None:
    if accounts.rows != len(accounts.pairs) + len(accounts.quarantined):
        raise ArtifactError(
            f"{source}: {accounts.rows} rows, but {len(accounts.pairs)} kept and "
            f"{len(accounts.quarantined)} quarantined",
            "each row in exactly one place",
            "report this as a defect",
        )
    if not accounts.rows:
        raise DataError(f"{source} holds only blank lines", "at least one row", _SOURCE_FIX)
    share = len(accounts.quarantined) / accounts.rows
    if accounts.pairs and share <= max_share:
        return
    reasons = Counter(row.reason.value for row in accounts.quarantined).most_common()
    first = accounts.quarantined[0]
    raise DataError(
        f"{source}: {len(accounts.quarantined)} of {accounts.rows} rows cannot be used ("
        + ", ".join(f"{name} {count}" for name, count in reasons)
        + f"); the first is line {first.source_line}: {first.reason.value}, {first.detail}",
        f"at most {max_share:.0%} unusable rows (ingest.max_quarantine_share), and one usable",
        _SOURCE_FIX,
    )


def _assign_splits(pairs: Sequence[Pair], cfg: IngestConfig) -> dict[str, list[Pair]]:
    splits: dict[str, list[Pair]] = {name: [] for name in SPLITS}
    for pair in pairs:
        name = split_of(pair.prompt_id, cfg.seed, cfg.validation_share, cfg.test_share)
        splits[name].append(pair)
    for name, members in splits.items():
        if not members:
            raise DataError(
                f"The {name} split is empty: {len(pairs)} pairs, validation_share "
                f"{cfg.validation_share}, test_share {cfg.test_share}",
                "at least one pair in each split",
                "raise the share in the ingest section, or give more pairs",
            )
    return splits


def _count(accounts: _Accounts, splits: Mapping[str, Sequence[Pair]]) -> dict[str, int]:
    reasons = Counter(row.reason for row in accounts.quarantined)
    return {
        "rows": accounts.rows,
        "kept": len(accounts.pairs),
        "quarantined": len(accounts.quarantined),
        **{f"quarantined_{reason.value}": reasons[reason] for reason in QuarantineReason},
        **{name: len(members) for name, members in splits.items()},
    }


def _write_splits(
    directory: Path, splits: Mapping[str, Sequence[Pair]], rows_per_group: int
) -> None:
    for name, members in splits.items():
        path = directory / f"{name}.parquet"
        with RowGroupWriter(path, PAIR_SCHEMA, rows_per_group, sorted_by="source_line") as writer:
            writer.write(pair_to_row(pair, name) for pair in members)


def _write_quarantine(
    directory: Path, quarantined: Sequence[Quarantined], rows_per_group: int
) -> None:
    path = directory / "quarantine.parquet"
    with RowGroupWriter(path, QUARANTINE_SCHEMA, rows_per_group, sorted_by="source_line") as writer:
        writer.write({**asdict(row), "reason": row.reason.value} for row in quarantined)


def _reload(ctx: StageContext) -> PreferenceDataset:
    dataset = newest_artifact(ctx.artifacts_dir, PreferenceDataset, ctx.fingerprint)
    if dataset is None:
        raise ArtifactError(
            f"{ctx.artifacts_dir} has no dataset {ctx.fingerprint[:16]} after writing it",
            "the dataset that was just written",
            "let nothing clean the workspace meanwhile, and run ingest again",
        )
    return dataset
