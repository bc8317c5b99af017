"""Labels on disk: precision, size told in advance, resumption, files of something else."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tasks.data.teacher_labels import LabelLayout, LabelStore
from tasks.errors import ArtifactError, ConfigError

IDENTITY = {"teacher": "aa", "dataset": "bb", "renderer": "cc", "tau": "2.0"}
VOCABULARY = 300


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows to a part."""
    monkeypatch.setattr("tasks.data.teacher_labels.ROWS_PER_PART", 4)


def _responses(n: int = 10) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, VOCABULARY, (1 + i % 5,), generator=generator).tolist() for i in range(n)
    ]


class _Teacher:
    """A random teacher of fixed rows that counts what it is asked."""

    def __init__(self, layout: LabelLayout, responses: list[list[int]]) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = [4 * torch.randn(len(r), VOCABULARY, generator=generator) for r in responses]
        self.exact = [row.log_softmax(-1) for row in rows]
        self.layout = layout
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
        self.asked.append((start, end))
        rows = self.exact[start:end]
        if self.layout.kind == "full":
            return rows, []
        top = [row.topk(self.layout.k, -1) for row in rows]
        values = [t.values for t in top]
        if self.layout.has_tail:
            tails = [torch.log1p(-v.exp().sum(-1, keepdim=True)) for v in values]
            values = [torch.cat(pair, -1) for pair in zip(values, tails, strict=True)]
        return values, [t.indices for t in top]


def _store(directory: Path, layout: LabelLayout, **changes: str) -> LabelStore:
    responses = _responses()
    prompts = [[7, 8]] * len(responses)
    return LabelStore.at(directory, layout, IDENTITY | changes, prompts, responses)


def test_top_k_keeps_a_distribution(tmp_path: Path) -> None:
    layout = LabelLayout("top_k", 5, VOCABULARY)
    store = _store(tmp_path, layout)
    teacher = _Teacher(layout, _responses())
    assert store.fill(teacher) == 3 and teacher.asked == [(0, 4), (4, 8), (8, 10)]
    labels = store.read()
    for logprobs, ids, exact in zip(labels.logprobs, labels.ids, teacher.exact, strict=True):
        top = exact.topk(5, -1)
        assert torch.equal(ids, top.indices) and ids.dtype == torch.int64
        # fp16 has 11 bits: a log-probability of -20 is off by 0.008 at most.
        torch.testing.assert_close(logprobs, top.values, atol=2e-3, rtol=1e-3)
        # The mass of the others is what is missing to 1, to three digits where it is not tiny.
        tail, true_tail = 1 - logprobs.exp().sum(-1), 1 - top.values.exp().sum(-1)
        torch.testing.assert_close(tail, true_tail, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_other_kinds_come_back(kind: str, tmp_path: Path) -> None:
    layout = LabelLayout(kind, VOCABULARY if kind == "full" else 3, VOCABULARY)
    store, teacher = _store(tmp_path, layout), _Teacher(layout, _responses())
    store.fill(teacher)
    labels = store.read()
    expected = teacher(0, 10)
    for found, given in zip(labels.logprobs, expected[0], strict=True):
        torch.testing.assert_close(found, given, atol=2e-2, rtol=1e-3)
    if kind == "full":
        assert labels.ids == []
        sums = torch.cat(labels.logprobs).exp().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    else:
        assert all(torch.equal(a, b) for a, b in zip(labels.ids, expected[1], strict=True))


def test_forbidden_tokens_stay_finite(tmp_path: Path) -> None:
    layout = LabelLayout("full", 3, 3)
    store = LabelStore.at(tmp_path, layout, IDENTITY, [[1]], [[2]])
    store.fill(lambda start, end: ([torch.tensor([[0.0, -math.inf, -1e6]])], []))
    (row,) = store.read().logprobs
    assert torch.isfinite(row).all() and row[0, 0].item() == 0.0


def test_a_killed_pass_goes_on(tmp_path: Path) -> None:
    layout = LabelLayout("top_k", 5, VOCABULARY)
    store, teacher = _store(tmp_path, layout), _Teacher(layout, _responses())

    def dies(start: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
        if start == 8:
            raise KeyboardInterrupt
        return teacher(start, end)

    with pytest.raises(KeyboardInterrupt):
        store.fill(dies)
    assert sorted(file.name for file in store.directory.iterdir()) == [
        "000000.parquet",
        "000001.parquet",
    ]
    teacher.asked.clear()
    assert store.fill(teacher) == 1 and teacher.asked == [(8, 10)]
    assert store.fill(teacher) == 0


@pytest.mark.parametrize(("vocabulary", "id_bytes"), [(300, 2), (100_000, 4)])
def test_size_is_known_in_advance(vocabulary: int, id_bytes: int, tmp_path: Path) -> None:
    layout = LabelLayout("top_k", 16, vocabulary)
    # Sixteen log-probabilities and the tail's at 2 bytes, sixteen ids and the token's own.
    assert layout.bytes_on_disk(1000) == 1000 * (17 * 2 + 17 * id_bytes)
    limit = layout.bytes_on_disk(1000) / 2**30
    assert layout.check_size(1000, limit) == layout.bytes_on_disk(1000)
    with pytest.raises(ConfigError, match=r"of 1,001 tokens \(top_k, 16 a token\).*max_cache_gib"):
        layout.check_size(1001, limit)


def test_the_files_are_no_larger_than_told(tmp_path: Path) -> None:
    layout = LabelLayout("top_k", 16, VOCABULARY)
    responses = [[5] * 200 for _ in range(8)]
    store = LabelStore.at(tmp_path, layout, IDENTITY, [[1]] * 8, responses)
    store.fill(_Teacher(layout, responses))
    told = layout.bytes_on_disk(8 * 200)
    # Two files with a schema of about 2 KiB each.
    assert 0.3 * told < store.bytes_on_disk() < told + 2 * 4096
    table = pq.read_table(store.directory / "000000.parquet")
    assert str(table.schema.field("logprobs").type) == "list<element: halffloat>"
    assert str(table.schema.field("ids").type) == "list<element: uint16>"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tau", "1.0", r"made with tau 2\.0.*Expected: tau 1\.0"),
        ("dataset", "dd", r"made with dataset bb.*Expected: dataset dd"),
        ("teacher", "ee", r"made with teacher aa.*Expected: teacher ee"),
        ("renderer", "ff", r"made with renderer cc.*Expected: renderer ff"),
    ],
)
def test_labels_of_something_else_are_named(
    name: str, value: str, message: str, tmp_path: Path
) -> None:
    layout = LabelLayout("top_k", 5, VOCABULARY)
    store = _store(tmp_path, layout)
    store.fill(_Teacher(layout, _responses()))
    other = _store(tmp_path, layout, **{name: value})
    assert other.directory != store.directory
    shutil.copytree(store.directory, other.directory)
    with pytest.raises(ArtifactError, match=message):
        other.read()
    store.read()


def test_labels_of_other_rows_are_refused(tmp_path: Path) -> None:
    layout = LabelLayout("top_k", 5, VOCABULARY)
    store = _store(tmp_path, layout)
    store.fill(_Teacher(layout, _responses()))
    changed = [row[::-1] for row in _responses()]
    same_place = LabelStore(store.directory, layout, store.identity, changed)
    with pytest.raises(ArtifactError, match="belong to other responses"):
        same_place.read()
    other = LabelStore.at(tmp_path, layout, IDENTITY, [[7, 8]] * 10, changed)
    assert other.directory != store.directory


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_file_is_named(share: float, tmp_path: Path) -> None:
    layout = LabelLayout("top_k", 5, VOCABULARY)
    store = _store(tmp_path, layout)
    store.fill(_Teacher(layout, _responses()))
    file = store.directory / "000001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ArtifactError, match=r"000001\.parquet are torn.*remove"):
        store.read()
    file.unlink()
    assert store.fill(_Teacher(layout, _responses())) == 1
    assert len(store.read().logprobs) == 10
