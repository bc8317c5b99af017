"""The ingest stage at work: many processes, and files that nobody wrote."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tasks.artifacts import PreferenceDataset
from tasks.data.quarantine import REASONS, default_actions
from tasks.data.source import InputFile
from tasks.errors import ClusterError, DataError, RlhfError
from tasks.ingest import chunks as chunk_jobs
from tasks.ingest import sources as chunk_sources
from tasks.ingest.chunks import ChunkResult, ParseJob, ParseOptions, Span
from tasks.ingest.config import IngestConfig
from tasks.ingest.dataset import Assembly, DecisionFile, KeyFiles, Place, find_repeated
from tasks.ingest.parser import ChunkParser
from tasks.ingest.pool import parse_chunks

Ingest = Callable[..., PreferenceDataset]
H, A = "\n\nHuman: ", "\n\nAssistant: "


def line_of(number: int) -> bytes:
    head = f"{H}question {number}\u2028 {'x' * (number % 700)}{A}"
    rejected = "" if number % 97 == 0 else f"no {number}"
    row = {"chosen": f"{head}yes", "rejected": head + rejected}
    return json.dumps(row, ensure_ascii=number % 2 == 0).encode() + b"\n"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that is worth several processes: above 2 MiB, with repeated rows far apart."""
    path = tmp_path / "s.jsonl"
    lines = [line_of(number) for number in range(6000)]
    path.write_bytes(b"".join([*lines, *lines[:50]]))
    return path


def test_the_number_of_processes_changes_no_byte(
    ingest: Ingest, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sources, "CHUNK_BYTES", 2**18)
    one, two, three = (ingest(large, workers=n, rows_per_group=700) for n in (1, 2, 3))
    assert one.manifest.files == two.manifest.files == three.manifest.files
    counts = one.manifest.counts
    assert counts["rows"] == 6050
    # 0, 97, ... 5917 are empty, and the first of them in the repeated rows is 0.
    assert counts["quarantined_empty_response"] == 62 + 1
    assert counts["quarantined_duplicate"] == 49
    raw = large.read_bytes().splitlines()
    for entry in pq.read_table(two.path / "quarantine.parquet").to_pylist():
        assert entry["raw"].encode() == raw[entry["source_line"] - 1]


def test_chunk_size_and_packing_change_nothing_but_the_file_name(
    ingest: Ingest, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = large.with_name("s.jsonl.gz")
    packed.write_bytes(gzip.compress(large.read_bytes(), 1))
    found = []
    for path, size in ((large, 2**20), (large, 50_001), (packed, 2**18)):
        monkeypatch.setattr(chunk_sources, "CHUNK_BYTES", size)
        dataset = ingest(path, workers=2)
        table = pq.read_table(dataset.split_path("train")).drop_columns(["source_file"])
        left_out = pq.read_table(dataset.path / "quarantine.parquet").drop_columns(["source_file"])
        found.append((table, left_out))
    assert found[0][0].equals(found[1][0]) and found[0][0].equals(found[2][0])
    assert found[0][1].equals(found[1][1]) and found[0][1].equals(found[2][1])


def _jobs(path: Path, directory: Path, n: int) -> Iterator[ParseJob]:
    file = InputFile(str(path), path.name, "s", "s")
    for index in range(n):
        yield ParseJob(index, 0, file, Span(0, path.stat().st_size), directory, 0)


def test_a_dead_worker_is_an_error(large: Path, tmp_path: Path) -> None:
    options = ParseOptions(default_actions())
    results = parse_chunks(_jobs(large, tmp_path, 50), options, 2)
    next(results)
    children = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "tasks.ingest.worker"],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"ended with exit code -9"):
        list(results)


def test_errors_of_workers_and_sources_reach_the_caller(large: Path, tmp_path: Path) -> None:
    options = ParseOptions(default_actions())
    lost = large.with_name("lost.jsonl")
    lost.write_bytes(b"{}\n")

    def jobs() -> Iterator[ParseJob]:
        yield from _jobs(large, tmp_path, 1)
        raise DataError("the source broke")

    with pytest.raises(DataError, match="the source broke"):
        list(parse_chunks(jobs(), options, 2))
    job = next(_jobs(lost, tmp_path, 1))
    lost.unlink()
    with pytest.raises(FileNotFoundError):
        list(parse_chunks(iter([job]), options, 2))


def test_progress_tells_rate_and_time_left(
    ingest_context: Callable[..., Any], large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tasks.ingest.stage as stage

    monkeypatch.setattr(stage, "_SECONDS_BETWEEN_REPORTS", 0.0)
    monkeypatch.setattr(chunk_sources, "CHUNK_BYTES", 2**18)
    ctx = ingest_context()
    stage.ingest_pairs(ctx, IngestConfig(workers=1), [InputFile(str(large), "s", "s", "s")])
    done = [value for value, _ in ctx.log.seen]
    assert done == sorted(done) and done[-1] == large.stat().st_size
    assert "rows/s" in ctx.log.notes[3] and "s left" in ctx.log.notes[3]


pieces = st.sampled_from(
    [
        H, A, "\n\nHuman:", "\n\nAssistant:", "q", "a", "Human: ", "\u2028", "\x00", "\x1b", "é",
        "\ud800", "😀", " ", "\n", "\r\n", "\ufeff", "\x85",
    ]
)  # fmt: skip
texts = st.lists(pieces, max_size=6).map("".join)
dialogues = st.builds(lambda q, a: f"{H}{q}{A}{a}", st.sampled_from("pqr"), st.sampled_from("abcd"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "bot"]), "content": texts}
    ),
    max_size=3,
)
sides = dialogues | texts | messages | values
objects = st.one_of(
    st.fixed_dictionaries({"chosen": dialogues, "rejected": dialogues}),
    st.fixed_dictionaries(
        {"chosen": sides, "rejected": sides},
        optional={
            "prompt": sides, "margin": values, "score_chosen": values, "score_rejected": values,
            "chosen_logprob": values, "rejected_logprob": values,
        },
    ),
    st.fixed_dictionaries({"text": st.lists(sides, max_size=3), "score": values}),
    st.fixed_dictionaries({"prompt": sides, "response": sides, "reward_model": values}),
    st.dictionaries(st.sampled_from(["chosen", "rejected", "prompt", "text"]), values),
    values,
)  # fmt: skip
lines = st.one_of(
    st.builds(lambda v, ascii_: json.dumps(v, ensure_ascii=ascii_).encode(errors="surrogatepass"),
              objects, st.booleans()),
    st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"")),
    st.sampled_from([
        b"", b"  ", b"{", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"NaN", b"null", b"\xff\xfe",
        b'{"chosen": "a", "chosen": "b", "rejected": "c"}', b'{"chosen": "\xc3"}', b"\x00" * 5,
        b'{"chosen": "' + b"x" * 70_000 + b'", "rejected": ""}', b"\xef\xbb\xbf{}",
    ]),
)  # fmt: skip
GOOD = [f'{{"chosen": "{H}{n}{A}a", "rejected": "{H}{n}{A}b"}}'.replace("\n", "\\n").encode()
        for n in range(3)]  # fmt: skip
files = st.builds(
    lambda head, some, end, bom, torn: (bom + end.join([*head, *some, b""]))[: torn or None],
    st.sampled_from([[], GOOD]),
    st.lists(lines, max_size=6),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.sampled_from([0, 0, 0, -3]),
)


def _ingest_in_memory(source: Path, directory: Path) -> tuple[list[Any], list[Any], int]:
    """Do what the stage does, without the accounts of shares and without syncing files."""
    file = InputFile(str(source), source.name, "s", "s")
    actions = {**default_actions(), "prompt_mismatch": "keep", "empty_response": "keep"}
    options = ParseOptions(actions)  # type: ignore[arg-type]
    parser = ChunkParser(options)
    keys = KeyFiles(directory, "pair")
    places: list[Place] = []
    rows = n_lines = 0
    for job in chunk_sources.cut_into_jobs([file], directory):
        result: ChunkResult = parser.parse(job)
        result.records["row"] += rows
        result.records["line"] += n_lines + 1
        keys.add(result.records)
        places.append(
            Place(result.index, 0, rows, n_lines + 1, result.n_rows, result.n_pairs,
                  result.n_left_out, result.payload)
        )  # fmt: skip
        rows, n_lines = rows + result.n_rows, n_lines + result.n_lines
    found = DecisionFile(directory / "found", rows)
    find_repeated(keys, found, None)
    assembly = Assembly([file], places, directory, actions, [found], 5)  # type: ignore[arg-type]
    kept, left_out = [], []
    for place in places:
        chunk = assembly.prepare(place)
        left_out += chunk.left_out
        kept += [row for table in chunk.pairs.values() for row in table.to_pylist()]
    return kept, left_out, rows


def _check_file(content: bytes, directory: Path, packed: bool) -> None:
    source = directory / ("s.jsonl.gz" if packed else "s.jsonl")
    source.write_bytes(gzip.compress(content, 1) if packed else content)
    try:
        kept, left_out, rows = _ingest_in_memory(source, directory)
    except RlhfError as error:
        assert str(source) in str(error) and error.fix
        return
    text = content.removeprefix(b"\xef\xbb\xbf")
    by_line = dict(enumerate(text.split(b"\n"), start=1))
    filled = {number for number, line in by_line.items() if line and not line.isspace()}
    assert rows == len(filled) == len(kept) + len(left_out)
    places = [row["source_line"] for row in (*kept, *left_out)]
    assert sorted(places) == sorted(filled)
    assert sorted(row["row_number"] for row in (*kept, *left_out)) == list(range(1, rows + 1))
    for row in left_out:
        assert row["reason"] in REASONS
        raw = row["raw"].encode() if row["raw_bytes"] is None else row["raw_bytes"]
        assert raw == by_line[row["source_line"]].removesuffix(b"\r")
    for row in kept:
        assert row["prompt"] and row["chosen"].encode() is not None
        assert row["rejected"] or "empty_response" in row["flags"]


@pytest.mark.slow
@settings(
    max_examples=2000,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(files, st.booleans(), st.sampled_from([100, 400, 4 * 2**20]))
def test_any_file_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, packed: bool, chunk_bytes: int
) -> None:
    directory = _scratch(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_sources, "CHUNK_BYTES", chunk_bytes)
        _check_file(content, directory, packed)


def _scratch(factory: pytest.TempPathFactory) -> Path:
    directory = factory.getbasetemp() / "fuzz"
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    return directory


def test_a_line_over_the_limit_is_refused_wherever_it_is(
    ingest: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = line_of(1) * 3 + b"x" * 3000 + b"\n" + line_of(2)
    for module in (chunk_sources, chunk_jobs):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 2000)
    for size in (100, 2**20):
        monkeypatch.setattr(chunk_sources, "CHUNK_BYTES", size)
        for name in ("s.jsonl", "s.jsonl.gz"):
            path = tmp_path / name
            path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
            with pytest.raises(DataError, match=r"is a line longer than") as caught:
                ingest(path)
            assert name in str(caught.value)


def test_quarantine_counts_are_those_of_the_file(ingest: Ingest, large: Path) -> None:
    dataset = ingest(large, workers=1)
    reasons = Counter(pq.read_table(dataset.path / "quarantine.parquet")["reason"].to_pylist())
    counts = dataset.manifest.counts
    assert {name: counts[f"quarantined_{name}"] for name in reasons} == reasons
    assert pa.types.is_large_string(
        pq.read_schema(dataset.path / "quarantine.parquet").field("raw").type
    )
