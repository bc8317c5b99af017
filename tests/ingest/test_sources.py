"""Sources of the ingest stage: files of all kinds, several of them, and what is done with rows."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from tasks.artifacts import PreferenceDataset
from tasks.config.shared import SourceConfig
from tasks.data.hh import SPLITS
from tasks.data.pairs import read_pairs
from tasks.data.quarantine import default_actions
from tasks.data.source import InputFile, find_files, is_hub_id, resolve_revision, stream_rows
from tasks.errors import DataError, MissingInputError
from tasks.ingest import sources as chunk_sources
from tasks.ingest.chunks import ParseJob, ParseOptions, Span, pairs_file, read_spill
from tasks.ingest.config import IngestConfig
from tasks.ingest.parser import ChunkParser
from tasks.ingest.stage import ingest_pairs

Ingest = Callable[..., PreferenceDataset]
H, A = "\n\nHuman: ", "\n\nAssistant: "


def row(prompt: str, chosen: str = "yes", rejected: str = "no", **more: Any) -> dict[str, Any]:
    return {"chosen": f"{H}{prompt}{A}{chosen}", "rejected": f"{H}{prompt}{A}{rejected}", **more}


def rows_of(name: str, n: int = 60) -> list[dict[str, Any]]:
    return [row(f"{name} {number}") for number in range(n)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in rows).encode()
    match "".join(path.suffixes):
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=17)
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case _:
            path.write_bytes(lines)
    return path


def kept(dataset: PreferenceDataset) -> list[dict[str, Any]]:
    tables = [pq.read_table(dataset.split_path(split)) for split in SPLITS]
    found: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
    return sorted(found, key=lambda entry: int(entry["row_number"]))


def left_out(dataset: PreferenceDataset) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(dataset.path / "quarantine.parquet").to_pylist()
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same_pairs(
    ingest: Ingest, tmp_path: Path, suffix: str
) -> None:
    rows = [*rows_of("q"), {"chosen": "torn", "rejected": "torn"}]
    dataset = ingest(write(tmp_path / f"s{suffix}", rows))
    found = kept(dataset)
    assert [entry["prompt"][0]["content"] for entry in found] == [f"q {n}" for n in range(60)]
    assert [entry["row_number"] for entry in found] == list(range(1, 61))
    (odd,) = left_out(dataset)
    assert (odd["reason"], odd["row_number"]) == ("no_turns", 61)
    assert json.loads(odd["raw"]) == rows[-1]
    # A pretty-printed array has a line for each of a row's two fields and braces.
    lines = [entry["source_line"] for entry in found]
    assert lines == ([2 + 4 * n for n in range(60)] if suffix == ".json" else list(range(1, 61)))


def test_json_array_is_read_piece_by_piece(
    ingest: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sources, "CHUNK_BYTES", 64)
    dataset = ingest(write(tmp_path / "s.json", rows_of("é\u2028", 50)))
    assert len(kept(dataset)) == 50
    for text, problem in (
        ('[{"chosen": 1}, {"a": ]', "line 1: the JSON array is broken"),
        ('[{"chosen": 1}\n{"a": 2}]', "line 2: .*where ',' should be"),
        ('[{"chosen": 1}', "it does not end"),
    ):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(DataError, match=problem) as caught:
            ingest(tmp_path / "broken.json")
        assert "broken.json" in str(caught.value)


def test_a_directory_of_subsets_a_glob_and_several_sources(ingest: Ingest, tmp_path: Path) -> None:
    for subset in ("harmless-base", "helpful-base"):
        write(tmp_path / "hh" / subset / "train.jsonl.gz", rows_of(f"{subset} train"))
        write(tmp_path / "hh" / subset / "test.jsonl.gz", rows_of(f"{subset} test", 20))
    write(tmp_path / "hh" / ".cache" / "x.jsonl", [row("no")])
    found = kept(ingest(source=str(tmp_path / "hh")))
    assert Counter(entry["subset"] for entry in found) == dict.fromkeys(
        ("harmless-base", "helpful-base"), 80
    )
    assert {entry["source"] for entry in found} == {"hh"}
    assert found[0]["source_file"] == "harmless-base/test.jsonl.gz"
    assert [entry["row_number"] for entry in found] == list(range(1, 161))
    some = kept(ingest(source=str(tmp_path / "hh" / "h*ful-base" / "train*")))
    assert Counter(entry["source_file"] for entry in some) == {"helpful-base/train.jsonl.gz": 60}
    named = [
        SourceConfig(name="a", path=str(tmp_path / "hh" / "harmless-base")),
        SourceConfig(name="b", path=str(tmp_path / "hh" / "helpful-base"), weight=0.5),
    ]
    dataset = ingest(sources=tuple(named))
    counted = Counter(entry["source"] for entry in kept(dataset))
    assert counted["a"] == 80
    # Binomial: mean 40, deviation sqrt(80 * 0.25) = 4.5.
    assert abs(counted["b"] - 40) < 23
    assert {entry["reason"] for entry in left_out(dataset)} == {"not_sampled"}
    assert dataset.manifest.counts["rows"] == 160


def test_subset_column_names_the_subset(ingest: Ingest, tmp_path: Path) -> None:
    rows = [entry | {"kind": f"k{n % 2}"} for n, entry in enumerate(rows_of("q"))]
    path = str(write(tmp_path / "s.jsonl", [*rows, row("without")]))
    source = SourceConfig(name="mine", path=path, subset_column="kind")
    dataset = ingest(sources=(source,))
    assert Counter(entry["subset"] for entry in kept(dataset)) == {"k0": 30, "k1": 30}
    assert [entry["reason"] for entry in left_out(dataset)] == ["missing_field"]


def test_files_that_do_not_fit_are_named(ingest: Ingest, tmp_path: Path) -> None:
    write(tmp_path / "a" / "one.parquet", rows_of("q"))
    write(tmp_path / "a" / "two.parquet", [{"chosen": "x", "other": 1}])
    with pytest.raises(DataError, match=r"two\.parquet has other columns .*other") as caught:
        ingest(source=str(tmp_path / "a"))
    assert "rejected" in str(caught.value)
    write(tmp_path / "b" / "one.jsonl", rows_of("q"))
    write(tmp_path / "b" / "two.jsonl", [{"chosen": "x"}, {"chosen": "y"}])
    with pytest.raises(DataError, match=r"two\.jsonl: 2 of 2 rows .*line 1 .*'rejected'"):
        ingest(source=str(tmp_path / "b"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"torn\.parquet is a broken Parquet file"):
        ingest(tmp_path / "torn.parquet")
    with pytest.raises(MissingInputError, match=r"ingest\.source: no .*file in .*empty"):
        (tmp_path / "empty").mkdir()
        ingest(source=str(tmp_path / "empty"))
    with pytest.raises(MissingInputError, match=r"ingest\.source: no file"):
        ingest(source=str(tmp_path / "absent.jsonl"))


def test_corrupt_gzip_names_file_line_and_byte(ingest: Ingest, tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in rows_of("q", 900)))
    path = tmp_path / "s.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"s\.jsonl\.gz is corrupt gzip .*near byte \d+"):
        ingest(path)


def test_a_failed_run_leaves_the_previous_dataset(
    ingest_context: Callable[..., Any], tmp_path: Path
) -> None:
    ctx = ingest_context(tmp_path / "home")
    good = InputFile(str(write(tmp_path / "s.jsonl", rows_of("q"))), "s", "s", "s")
    before = ingest_pairs(ctx, IngestConfig(), [good])
    bad = InputFile(str(write(tmp_path / "bad.jsonl", [{"a": 1}])), "bad", "s", "s")
    with pytest.raises(DataError):
        ingest_pairs(ctx, IngestConfig(), [bad])
    assert [path.name for path in ctx.artifacts_dir.iterdir()] == [before.path.name]
    assert not list(ctx.checkpoint_dir.iterdir())


def test_repeats_of_a_conflict_are_no_mere_duplicates(ingest: Ingest, tmp_path: Path) -> None:
    rows = [*rows_of("q"), row("q 3"), row("q 3"), row("q 3", "no", "yes")]
    dataset = ingest(write(tmp_path / "s.jsonl", rows), reasons={"duplicate": "keep"})
    # Lines 4, 61 and 62 say one thing, line 63 the other.
    assert [(e["source_line"], e["reason"]) for e in left_out(dataset)] == [
        (line, "label_conflict") for line in (4, 61, 62, 63)
    ]


def test_reasons_are_dropped_kept_or_refused(ingest: Ingest, tmp_path: Path) -> None:
    rows = [
        *rows_of("q"),
        row("q 3"),  # 61: again
        row("q 5", "no", "yes"),  # 62: the other way round
        row("Q  7"),  # 63: again, but for case and white space
        row("r", "", "no"),  # 64
        row("s", "a\x07"),  # 65: kept with a flag
    ]
    source = write(tmp_path / "s.jsonl", rows)
    dataset = ingest(source)
    assert [(e["source_line"], e["reason"]) for e in left_out(dataset)] == [
        (6, "label_conflict"),
        (61, "duplicate"),
        (62, "label_conflict"),
        (63, "normalized_duplicate"),
        (64, "empty_response"),
    ]
    assert kept(dataset)[-1]["flags"] == ["control_characters"]
    assert dataset.manifest.counts["flagged_control_characters"] == 1
    # Six places are taken by rows that repeat: 61 and 63 of 65 rows.
    assert dataset.manifest.metrics["duplicate_share"] == pytest.approx(2 / 65)
    names = ("duplicate", "normalized_duplicate", "label_conflict", "empty_response")
    lenient = ingest(source, reasons=dict.fromkeys(names, "keep"))
    flags = {e["source_line"]: e["flags"] for e in kept(lenient) if e["flags"]}
    assert flags == {
        6: ["label_conflict"],
        61: ["duplicate"],
        62: ["label_conflict"],
        63: ["normalized_duplicate"],
        64: ["empty_response"],
        65: ["control_characters"],
    }
    assert left_out(lenient) == []
    exact = ingest(source, deduplicate="exact")
    assert [e["source_line"] for e in left_out(exact)] == [6, 61, 62, 64]
    none = ingest(source, deduplicate="none")
    assert [e["source_line"] for e in left_out(none)] == [64]
    for reason, line in (("duplicate", 61), ("empty_response", 64), ("control_characters", 65)):
        with pytest.raises(DataError, match=rf"s\.jsonl, line {line}: {reason}"):
            ingest(source, reasons={reason: "fail"})


def test_limits_in_characters(ingest: Ingest, tmp_path: Path) -> None:
    rows = [
        *rows_of("q"),
        row("r", "a" * 20, "b"),  # 61
        row("s", "a" * 12 + "b", "a" * 12 + "c"),  # 62: the same as far as it would be read
        row("t" * 40),  # 63
    ]
    source = write(tmp_path / "s.jsonl", rows)
    limits = {"max_prompt_chars": 30, "max_response_chars": 10}
    found = [(e["source_line"], e["reason"]) for e in left_out(ingest(source, limits=limits))]
    assert found == [(61, "too_long"), (62, "identical_after_truncation"), (63, "too_long")]
    long = {"too_long": "keep", "identical_after_truncation": "keep"}
    assert kept(ingest(source, limits=limits, reasons=long))[61]["flags"] == [
        "identical_after_truncation",
        "too_long",
    ]


def test_splits_as_the_files_are_named(ingest: Ingest, tmp_path: Path) -> None:
    follow_up = {side: f"{H}test 1{A}so?{H}more{A}{side}" for side in ("chosen", "rejected")}
    train = [*rows_of("train", 200), row("test 0"), follow_up]
    write(tmp_path / "d" / "train.jsonl", train)
    write(tmp_path / "d" / "test.jsonl", rows_of("test", 50))
    dataset = ingest(source=str(tmp_path / "d"), splits={"assign": "file"})
    counts = dataset.manifest.counts
    assert counts["test"] == 50
    assert counts["train"] + counts["validation"] == 200
    # Binomial: mean 20, deviation 4.2.
    assert 0 < counts["validation"] < 42
    # A prompt of the test file, and one that goes on from there, are no training data.
    assert [(e["source_line"], e["reason"], e["detail"]) for e in left_out(dataset)] == [
        (201, "leaked_from_other_split",
         "test.jsonl, line 1 of a more held-out split begins the same"),
        (202, "leaked_from_other_split",
         "test.jsonl, line 2 of a more held-out split begins the same"),
    ]  # fmt: skip
    by_prompt = ingest(source=str(tmp_path / "d"), splits={"assign": "file", "group_by": "prompt"})
    assert [e["source_line"] for e in left_out(by_prompt)] == [201]
    assert by_prompt.manifest.counts["held_out_sharing_a_first_turn_with_train"] == 1


def test_conversations_that_extend_one_another_stay_together(
    ingest: Ingest, shared_data: Path
) -> None:
    source = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    for group_by, shares in (("conversation", False), ("prompt", True)):
        dataset = ingest(source, splits={"group_by": group_by})
        counts = dataset.manifest.counts
        assert counts["kept"] == 2303
        assert bool(counts["held_out_sharing_a_first_turn_with_train"]) == shares
        assert _extensions(dataset) == (39 if shares else 0)


def _extensions(dataset: PreferenceDataset) -> int:
    """Count prompts that go on from a prompt of another split."""
    split_of: dict[tuple[Any, ...], str] = {}
    for split in SPLITS:
        for pair in read_pairs(dataset, split):
            split_of[pair.prompt] = split
    heads = {prompt: [prompt[:end] for end in range(1, len(prompt))] for prompt in split_of}
    return sum(
        any(split_of.get(head, split) != split for head in heads[prompt])
        for prompt, split in split_of.items()
    )


def test_splits_are_stable_when_rows_are_added(ingest: Ingest, tmp_path: Path) -> None:
    few = kept(ingest(write(tmp_path / "a.jsonl", rows_of("q"))))
    more = kept(ingest(write(tmp_path / "b.jsonl", [*rows_of("new"), *rows_of("q")])))
    splits = {entry["pair_id"]: entry["split"] for entry in more}
    assert all(splits[entry["pair_id"]] == entry["split"] for entry in few)


def test_hub_ids_are_told_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Anthropic/hh-rlhf")
    for path in ("data/pairs.jsonl", "/data/hh", "hh", "a/b/c", "demo"):
        assert not is_hub_id(path)
    (tmp_path / "mine" / "data").mkdir(parents=True)
    assert not is_hub_id("mine/data")
    source = SourceConfig(
        name="hh", path="Anthropic/hh-rlhf", hub_dir="harmless-base", hub_split="test"
    )
    (file,) = find_files(source)
    assert (file.subset, file.source, file.split) == ("harmless-base", "hh", "test")
    assert file.hub == {
        "path": "Anthropic/hh-rlhf",
        "data_dir": "harmless-base",
        "split": "test",
    }


def test_rows_are_streamed_through_datasets(ingest_context: Any, tmp_path: Path) -> None:
    write(tmp_path / "hub" / "train.jsonl", [*rows_of("q"), row("r", "")])
    hub = {"path": str(tmp_path / "hub"), "split": "train"}
    assert next(stream_rows(hub)) == rows_of("q")[0]
    file = InputFile("org/name", "org/name/train", "name", "name", hub=hub)
    dataset = ingest_pairs(ingest_context(), IngestConfig(), [file])
    assert len(kept(dataset)) == 60
    (odd,) = left_out(dataset)
    assert (odd["source_line"], json.loads(odd["raw"])) == (61, row("r", ""))
    broken = {"path": str(tmp_path / "nowhere"), "split": "train"}
    with pytest.raises(MissingInputError, match="cannot be read"):
        next(stream_rows(broken))


def test_settings_that_cannot_work_are_refused() -> None:
    for given, problem in (
        ({"reasons": {"typo": "drop"}}, "unknown .*typo"),
        ({"reasons": {"invalid_json": "keep"}}, "invalid_json hold no pair to keep"),
        ({"source": "a", "sources": [{"name": "b", "path": "c"}]}, "not both"),
        ({"sources": [{"name": "b", "path": "c"}, {"name": "b", "path": "d"}]}, "must differ"),
        ({"sources": [{"name": "b", "path": "c", "weight": 0}]}, "greater than 0"),
    ):
        with pytest.raises(ValidationError, match=problem):
            IngestConfig.model_validate(given)


def test_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingInputError, match=r"Hub data set no/such .* cannot be read"):
        resolve_revision("no/such", None)


def test_plain_rows_are_read_the_same_either_way(tmp_path: Path) -> None:
    """The fast way through the parser gives what the general one gives."""
    rows = [
        *rows_of("q", 30),
        {side: f"{H}a \u2019 Ω \ufb01{A}b{H} c \n{A} {side}" for side in ("chosen", "rejected")},
        row("twice", f"a{A}b"),
        row("late", f"a{H}b{A}c"),
        {side: f"{H}q{H}r{A}{side}" for side in ("chosen", "rejected")},
        {side: f"{H}q{A}r{A}s{H}t{A}{side}" for side in ("chosen", "rejected")},
        row("tabs\t and \x07"),
    ]
    path = write(tmp_path / "s.jsonl", rows)
    found = []
    for name, is_usual in (("fast", True), ("general", False)):
        directory = tmp_path / name
        directory.mkdir()
        parser = ChunkParser(ParseOptions(default_actions()))
        assert parser._is_usual
        parser._is_usual = is_usual
        file = InputFile(str(path), "s", "s", "s")
        span = Span(0, path.stat().st_size)
        result = parser.parse(ParseJob(0, 0, file, span, directory, 0))
        found.append((result.records, read_spill(pairs_file(directory, 0)), result.n_left_out))
    assert (found[0][0] == found[1][0]).all()
    assert found[0][1].equals(found[1][1])
    assert found[0][2] == found[1][2] > 0
