"""Rows that survive a kill."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tasks.data.history import LineStore
from tasks.errors import DataError, WorkspaceError


def test_rows_are_there_after_opening_again(tmp_path: Path) -> None:
    store = LineStore(tmp_path / "deep" / "s.jsonl")
    rows = [{"a": 1}, {"text": "ü \u2028\n \ud800"}]
    for row in rows:
        store.append(row)
    store.close()
    assert LineStore(store.path).rows == store.rows == rows


def test_every_cut_of_the_file_leaves_whole_rows(tmp_path: Path) -> None:
    store = LineStore(tmp_path / "s.jsonl")
    for number in range(3):
        store.append({"number": number, "text": "x" * number})
    content = store.path.read_bytes()
    for length in range(len(content) + 1):
        store.path.write_bytes(content[:length])
        again = LineStore(store.path)
        whole = content[:length].count(b"\n")
        assert [row["number"] for row in again.rows] == list(range(whole))
        again.append({"number": 9})
        again.close()
        assert [row["number"] for row in LineStore(store.path).rows] == [*range(whole), 9]


def test_threads_do_not_mix_their_rows(tmp_path: Path) -> None:
    store = LineStore(tmp_path / "s.jsonl")

    def write(thread: int) -> None:
        for number in range(10):
            store.append({"thread": thread, "number": number, "text": "y" * 5000})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = LineStore(store.path).rows
    assert sorted((row["thread"], row["number"]) for row in rows) == [
        (thread, number) for thread in range(4) for number in range(10)
    ]


def test_bad_values_and_foreign_files(tmp_path: Path) -> None:
    store = LineStore(tmp_path / "s.jsonl")
    with pytest.raises(DataError, match="cannot hold a row"):
        store.append({"x": float("nan")})
    assert store.path.read_bytes() == b""
    store.path.write_text("no json\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        LineStore(store.path)
    store.close()
    with pytest.raises(WorkspaceError, match="cannot be written"):
        store.append({"x": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="cannot be written"):
        LineStore(tmp_path / "file" / "s.jsonl")
    assert os.path.isfile(tmp_path / "file")
