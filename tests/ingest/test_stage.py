"""The ingest stage: the real file, the accounts, and refusals that say what to do."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import PreferenceDataset
from tasks.data.hh import SPLITS, split_of
from tasks.data.pairs import iter_pairs, read_pairs
from tasks.data.source import InputFile
from tasks.errors import ArtifactError, ConfigError, DataError, MissingInputError
from tasks.ingest.config import IngestConfig
from tasks.ingest.stage import ingest_pairs, ingest_pairs_task

Ingest = Callable[..., PreferenceDataset]
MakeContext = Callable[[], Any]


def row(prompt: str, chosen: str, rejected: str) -> str:
    head = f"\n\nHuman: {prompt}\n\nAssistant: "
    return json.dumps({"chosen": head + chosen, "rejected": head + rejected})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


GOOD_ROWS = [row(f"question {index}", "yes", "no") for index in range(40)]


def lines_of(dataset: PreferenceDataset, split: str) -> list[int]:
    return [pair.source_line for pair in iter_pairs(dataset, split)]


def test_real_file_is_ingested_with_the_right_counts(ingest: Ingest, shared_data: Path) -> None:
    source = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    dataset = ingest(source, rows_per_group=500)
    counts = dataset.manifest.counts
    assert (counts["rows"], counts["kept"], counts["quarantined"]) == (2312, 2303, 9)
    assert (counts["quarantined_empty_response"], counts["quarantined_prompt_mismatch"]) == (4, 5)
    assert counts["quarantined_duplicate"] == counts["quarantined_label_conflict"] == 0
    assert sum(counts[split] for split in SPLITS) == 2303
    by_line = pq.read_table(dataset.path / "quarantine.parquet").to_pylist()
    assert [entry["source_line"] for entry in by_line] == [
        87, 517, 926, 1104, 1255, 1689, 1951, 1953, 2037,
    ]  # fmt: skip
    with gzip.open(source, "rt") as handle:
        raw = handle.read().splitlines()
    assert all(entry["raw"] == raw[entry["source_line"] - 1] for entry in by_line)
    lines = {line for split in SPLITS for line in lines_of(dataset, split)}
    assert lines == set(range(1, 2313)) - {entry["source_line"] for entry in by_line}
    assert "2312 rows, 2303 kept, 9 quarantined" in (dataset.path / "card.md").read_text()


def test_splits_share_no_prompt_and_keep_source_order(ingest: Ingest, shared_data: Path) -> None:
    dataset = ingest(shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz", seed=3)
    prompts = [{pair.prompt_id for pair in read_pairs(dataset, split)} for split in SPLITS]
    assert len(set.union(*prompts)) == sum(map(len, prompts)) == 2310 - 9
    for split in SPLITS:
        lines = lines_of(dataset, split)
        assert lines == sorted(lines)
        groups = pq.read_table(dataset.split_path(split), columns=["group_id"])["group_id"]
        assert {split_of(group, 3, 0.1, 0.1) for group in groups.to_pylist()} == {split}


def test_row_groups_have_the_configured_size(ingest: Ingest, tmp_path: Path) -> None:
    dataset = ingest(write(tmp_path / "s.jsonl", GOOD_ROWS), rows_per_group=7)
    meta = pq.ParquetFile(dataset.split_path("train")).metadata
    sizes = [meta.row_group(index).num_rows for index in range(meta.num_row_groups)]
    assert set(sizes[:-1]) == {7}
    assert sum(sizes) == dataset.manifest.counts["train"]


def test_same_source_gives_the_same_files(ingest: Ingest, tmp_path: Path) -> None:
    source = write(tmp_path / "s.jsonl", GOOD_ROWS)
    first, second = ingest(source), ingest(source)
    assert first.manifest.files == second.manifest.files


def test_repeated_pairs(ingest: Ingest, tmp_path: Path) -> None:
    lines = [
        *GOOD_ROWS,
        row("question 3", "yes", "no"),  # 41: again
        row("question 5", "no", "yes"),  # 42: the other way round
        row("question 5", "yes", "no"),  # 43: again, and so as open as 6
        row("question 7", "yes", "other"),  # 44: another pair of a known prompt
    ]
    dataset = ingest(write(tmp_path / "s.jsonl", lines))
    entries = pq.read_table(dataset.path / "quarantine.parquet").to_pylist()
    assert [(entry["source_line"], entry["reason"]) for entry in entries] == [
        (6, "label_conflict"),
        (41, "duplicate"),
        (42, "label_conflict"),
        (43, "label_conflict"),
    ]
    assert [entry["detail"] for entry in entries] == [
        "line 42 has the same pair with the opposite label",
        "line 4 has the same pair",
        "line 6 has the same pair with the opposite label",
        "line 42 has the same pair with the opposite label",
    ]
    assert [entry["raw"] for entry in entries] == [lines[i - 1] for i in (6, 41, 42, 43)]
    assert dataset.manifest.counts["kept"] == 40


def test_blank_lines_are_no_rows(ingest: Ingest, tmp_path: Path) -> None:
    dataset = ingest(write(tmp_path / "s.jsonl", ["", *GOOD_ROWS, "  "]))
    assert dataset.manifest.counts["rows"] == 40
    assert min(lines_of(dataset, split)[0] for split in SPLITS) == 2


def test_progress_ends_at_the_whole_file(ingest_context: MakeContext, tmp_path: Path) -> None:
    ctx = ingest_context()
    source = write(tmp_path / "s.jsonl", GOOD_ROWS)
    ingest_pairs(ctx, IngestConfig(), [InputFile(str(source), "s.jsonl", "demo", "demo")])
    assert ctx.log.seen[-1] == (source.stat().st_size, source.stat().st_size)


def test_share_of_unusable_rows_is_limited(ingest: Ingest, tmp_path: Path) -> None:
    # 40 good and 10 bad rows: 10 / 50 = 0.2, which is at the limit but not above.
    source = write(tmp_path / "s.jsonl", [*GOOD_ROWS, *["{}"] * 10])
    assert ingest(source, max_quarantine_share=0.2).manifest.counts["quarantined"] == 10
    with pytest.raises(DataError) as caught:
        ingest(source, max_quarantine_share=0.19)
    message = str(caught.value)
    for part in (str(source), "10 of 50", "missing_field 10", "line 41", "max_quarantine_share"):
        assert part in message


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is empty"),
        (b"\n \n", "only blank lines"),
        (b"hello\nworld\n", r"2 of 2 rows cannot be used \(invalid_json 2\)"),
        (b'[\n{"chosen": 1}\n]\n', r"3 of 3 rows"),
        (b"\x00\x01\x02", "binary"),
        (gzip.compress(b"{}\n" * 50, mtime=0)[:-10], "corrupt gzip"),
    ],
)
def test_broken_sources_leave_nothing_behind(
    ingest: Ingest, tmp_path: Path, content: bytes, found: str
) -> None:
    source = tmp_path / "s.jsonl"
    source.write_bytes(content)
    with pytest.raises(DataError, match=found) as caught:
        ingest(source, max_quarantine_share=1.0)
    assert str(source) in str(caught.value) and caught.value.fix
    assert not list((tmp_path / "var").rglob("*.parquet"))


def test_missing_source(ingest: Ingest, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"absent\.jsonl does not exist"):
        ingest(tmp_path / "absent.jsonl")


def test_splits_that_cannot_be_filled(ingest: Ingest, tmp_path: Path) -> None:
    source = write(tmp_path / "s.jsonl", GOOD_ROWS)
    with pytest.raises(DataError, match="validation split is empty"):
        ingest(source, validation_share=0.0)
    with pytest.raises(DataError, match="split is empty: 1 pairs"):
        ingest(write(tmp_path / "one.jsonl", GOOD_ROWS[:1]))
    with pytest.raises(ConfigError):
        ingest(source, validation_share=0.6, test_share=0.6)


def test_edited_dataset_is_refused(ingest: Ingest, tmp_path: Path) -> None:
    dataset = ingest(write(tmp_path / "s.jsonl", GOOD_ROWS))
    with pytest.raises(ConfigError, match="Unknown split 'dev'"):
        read_pairs(dataset, "dev")
    path = dataset.split_path("train")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=r"train\.parquet"):
        read_pairs(dataset, "train")


def test_task_wraps_the_plain_function_without_a_cache() -> None:
    assert ingest_pairs_task.fn is ingest_pairs
    assert ingest_pairs_task.cache_policy is NO_CACHE


pieces = st.sampled_from(
    ["\n\nHuman: q", "\n\nHuman: r", "\n\nAssistant: a", "\n\nAssistant: b", "\n\nAssistant: ", "z"]
)
transcripts = st.lists(pieces, max_size=4).map("".join)
fuzzed_lines = st.one_of(
    st.builds(lambda a, b: json.dumps({"chosen": a, "rejected": b}), transcripts, transcripts),
    st.sampled_from(
        ["{", "[]", '{"chosen": "x"}', "", GOOD_ROWS[0], row("question 0", "no", "yes")]
    ),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(fuzzed_lines, max_size=12))
def test_accounts_close_on_any_mixture(ingest: Ingest, tmp_path: Path, lines: list[str]) -> None:
    dataset = ingest(write(tmp_path / "s.jsonl", [*GOOD_ROWS, *lines]), max_quarantine_share=1.0)
    counts = dataset.manifest.counts
    left_out = pq.read_table(dataset.path / "quarantine.parquet").to_pylist()
    assert counts["rows"] == 40 + sum(bool(line) for line in lines)
    assert counts["rows"] == counts["kept"] + counts["quarantined"]
    assert counts["kept"] == sum(len(read_pairs(dataset, split)) for split in SPLITS)
    reasons = Counter(entry["reason"] for entry in left_out)
    for name, count in counts.items():
        if name.startswith("quarantined_"):
            assert reasons[name.removeprefix("quarantined_")] == count


def test_the_left_out_rows_are_named_in_the_run(
    ingest_context: MakeContext, shared_data: Path
) -> None:
    ctx = ingest_context()
    source = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    ingest_pairs(ctx, IngestConfig(), [InputFile(str(source), source.name, "h", "h")])
    assert ctx.log.events == [
        "quarantined: 9 rows left out: empty_response (lines 87, 517, 926, 1104); "
        "prompt_mismatch (lines 1255, 1689, 1951, 1953, 2037)"
    ]
    assert ctx.log.files == ["card/lengths.svg", "card/rows.svg"]
