"""Files of pairs and responses: formats, unusable rows, output, sums."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.algorithms.calibration import Accuracy
from tasks.data.hh import Message
from tasks.errors import ConfigError, DataError, MissingInputError
from tasks.reward_model.score_files import (
    Added,
    FileRow,
    ScoreTally,
    check_output,
    default_output,
    open_score_file,
    rewardbench_sections,
    write_scored,
)

WriteRows = Callable[..., Path]
ASKED = (Message("user", "Hi?"),)
HH = {
    "chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.",
    "rejected": "\n\nHuman: Hi?\n\nAssistant: No.",
}


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER, GOOD, BAD = _turn("user", "Hi?"), _turn("assistant", "Hello."), _turn("assistant", "No.")


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """A function that writes objects, or lines as they are, as JSON Lines."""

    def write(*rows: Mapping[str, Any] | str, name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        content = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


@pytest.mark.parametrize(
    "row",
    [
        HH,
        {"prompt": "Hi? ", "chosen": "Hello.\n", "rejected": " No."},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "Hello.", "rejected": "No."},
        {"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "\n\nHuman: Hi?\n\nAssistant:", "chosen": " Hello.", "rejected": " No."},
        {"prompt": "\n\nHuman: Hi?\n\nAssistant:", **HH},
    ],
)
def test_forms_of_one_pair(row: dict[str, Any], write_rows: WriteRows) -> None:
    file = open_score_file(write_rows(row))
    (found,) = file.rows()
    assert (file.kind, found.error, found.fields) == ("pairs", None, row)
    chosen, rejected = found.conversations
    assert chosen.prompt == rejected.prompt == ASKED
    assert (chosen.response, rejected.response) == ("Hello.", "No.")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi?", "response": "Hello."},
        {"prompt": [USER], "response": [GOOD]},
        {"messages": [USER, GOOD]},
    ],
)
def test_forms_of_one_response(row: dict[str, Any], write_rows: WriteRows) -> None:
    file = open_score_file(write_rows(row))
    (found,) = file.rows()
    (answer,) = found.conversations
    assert file.kind == "responses"
    assert (answer.prompt, answer.response) == (ASKED, "Hello.")


def test_system_and_earlier_turns_are_kept(write_rows: WriteRows) -> None:
    row = {"messages": [_turn("system", "Be kind."), USER, GOOD, USER, BAD]}
    (found,) = open_score_file(write_rows(row)).rows()
    roles = [turn.role for turn in found.conversations[0].prompt]
    assert roles == ["system", "user", "assistant", "user"]


def test_rewardbench_rows(write_rows: WriteRows) -> None:
    row = {"id": 1, "subset": "hep-go", "chosen_model": "a", "rejected_model": "b"}
    row |= {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}
    (found,) = open_score_file(write_rows(row)).rows()
    assert (found.subset, len(found.conversations)) == ("hep-go", 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("not json", "invalid_json"),
        ("[1]", "wrong_type: the line holds a list"),
        ('{"chosen": "\udcff"}', "invalid_encoding: byte 12"),
        ({"chosen": HH["chosen"]}, "wrong_type: rejected is a NoneType"),
        ({**HH, "rejected": 3}, "wrong_type: rejected is a int"),
        ({**HH, "rejected": "No."}, "no_turns"),
        ({**HH, "rejected": "\n\nHuman: Hi?\n\nAssistant:"}, "empty_response"),
        ({**HH, "rejected": "\n\nHuman: What?\n\nAssistant: No."}, "prompt_mismatch"),
        ({**HH, "rejected": "\n\nAssistant: No."}, "wrong_turns"),
        ({**HH, "rejected": "\n\nHuman: Hi?"}, "wrong_turns"),
        ({**HH, "rejected": [_turn("gpt", "No.")]}, "wrong_turns: rejected[0] has the role 'gpt'"),
        ({**HH, "rejected": [{"role": "user", "content": ["x"]}]}, "wrong_type: rejected[0]"),
        ({**HH, "prompt": ""}, "empty_prompt"),
        ({**HH, "prompt": [GOOD]}, "wrong_turns: the prompt"),
        ({"prompt": "Hi?", "chosen": "\ud800", "rejected": "No."}, "invalid_encoding: chosen"),
    ],
)
def test_unusable_row_keeps_its_place(row: Any, reason: str, write_rows: WriteRows) -> None:
    file = open_score_file(write_rows(HH, row, HH))
    rows = list(file.rows())
    assert [found.error is None for found in rows] == [True, False, True]
    assert file.n_rows == 3
    assert rows[1].error is not None and rows[1].error.startswith(reason)
    assert rows[1].conversations == ()
    if isinstance(row, dict):
        assert rows[1].fields == row


def test_file_that_cannot_be_scored_is_refused(write_rows: WriteRows, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"none\.jsonl does not exist"):
        open_score_file(tmp_path / "none.jsonl")
    with pytest.raises(MissingInputError, match="is a directory"):
        open_score_file(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match="is empty"):
        open_score_file(empty)
    with pytest.raises(DataError, match="holds no rows"):
        open_score_file(write_rows(""))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: invalid_json.*first line"):
        open_score_file(write_rows("Hello."))
    with pytest.raises(
        DataError, match=r"line 2 has the fields \['a', 'b'\].*prompt with response"
    ):
        open_score_file(write_rows("", {"b": 1, "a": 2}))
    with pytest.raises(DataError, match=r"No row can be scored; .*line 1: no_turns"):
        open_score_file(write_rows({"chosen": "a", "rejected": "b"}))
    with pytest.raises(DataError, match="line 2 has margin already"):
        open_score_file(write_rows(HH, {**HH, "margin": 1}))
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"torn\.parquet cannot be read"):
        open_score_file(torn)


def test_real_pairs(shared_data: Path) -> None:
    file = open_score_file(shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz")
    tally = ScoreTally()
    for row in file.rows():
        if row.error is not None:
            tally.refuse(row.error)
    # The counts of the data's description: 5 prompts that differ, 4 empty responses.
    assert file.n_rows == 2312
    assert tally.errors == {"prompt_mismatch": 5, "empty_response": 4}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "a.scored.jsonl"),
        ("a.b.jsonl.gz", "a.b.scored.jsonl"),
        ("a.parquet", "a.scored.jsonl"),
        ("a", "a.scored.jsonl"),
    ],
)
def test_name_of_the_output(name: str, expected: str) -> None:
    assert default_output(Path("d") / name) == Path("d") / expected


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match=r"suffix '\.csv'"):
        check_output(tmp_path / "a.csv", source)
    with pytest.raises(ConfigError, match="is the input"):
        check_output(tmp_path / "." / "rows.jsonl", source)
    with pytest.raises(MissingInputError, match="no directory"):
        check_output(tmp_path / "none" / "a.jsonl", source)
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        check_output(tmp_path / "d.jsonl", source)


def _scored(rows: Sequence[FileRow]) -> list[tuple[FileRow, Added]]:
    """Return rows with the scores 0, 1, 2, ..., and none where a row is unusable."""
    return [
        (row, {"score": None if row.error else float(index), "score_error": row.error})
        for index, row in enumerate(rows)
    ]


ROWS = (
    {"prompt": "Hi?", "response": "Grüße\u2028", "n": 2**60, "tags": ["a"], "meta": {"x": 1.5}},
    "oops",
    {"prompt": "Hi?", "response": "Hello.", "n": None, "tags": [], "meta": {"x": 2.0}},
)


def test_json_lines_keep_every_field(write_rows: WriteRows, tmp_path: Path) -> None:
    file = open_score_file(write_rows(*ROWS, name="rows.jsonl.gz"))
    output = tmp_path / "out.jsonl"
    write_scored(output, file, _scored(list(file.rows())))
    found = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    assert found[0] == {**ROWS[0], "score": 0.0, "score_error": None}
    assert (found[1]["unparsed_line"], found[1]["score"]) == ("oops", None)
    assert found[1]["score_error"].startswith("invalid_json")
    assert found[2] == {**ROWS[2], "score": 2.0, "score_error": None}


def test_what_utf8_cannot_hold_is_kept_as_an_escape(write_rows: WriteRows, tmp_path: Path) -> None:
    rows = [ROWS[0], {"prompt": "\ud800", "response": "x", "n": math.nan}]
    file = open_score_file(write_rows(*rows))
    output = tmp_path / "out.jsonl"
    write_scored(output, file, _scored(list(file.rows())))
    found = json.loads(output.read_text().split("\n")[1])
    assert found["prompt"] == "\ud800" and math.isnan(found["n"])


def test_parquet_from_json_lines(write_rows: WriteRows, tmp_path: Path) -> None:
    file = open_score_file(write_rows(*ROWS))
    output = tmp_path / "out.parquet"
    write_scored(output, file, _scored(list(file.rows())))
    table = pq.read_table(output)
    assert table.schema.field("score").type == pa.float64()
    rows = table.to_pylist()
    assert [row["score"] for row in rows] == [0.0, None, 2.0]
    assert rows[0]["meta"] == {"x": 1.5}
    assert rows[1]["unparsed_line"] == "oops"


def _parquet(path: Path, **columns: Any) -> Path:
    base = {"prompt": ["Hi?", "Hi?"], "response": ["Hello.", None]}
    pq.write_table(pa.table({**base, **columns}), path)
    return path


def test_parquet_keeps_the_types_of_its_columns(tmp_path: Path) -> None:
    days = pa.array([date(2024, 1, 1), None])
    codes = pa.array([1, 2], type=pa.int8())
    source = _parquet(tmp_path / "in.parquet", day=days, code=codes)
    file = open_score_file(source)
    rows = list(file.rows())
    assert [row.error for row in rows] == [
        None,
        "wrong_type: response is a NoneType, not text or messages",
    ]
    assert rows[1].where.endswith("in.parquet, row 2")
    output = tmp_path / "out.parquet"
    write_scored(output, file, _scored(rows))
    table = pq.read_table(output)
    assert table.select(["prompt", "response", "day", "code"]).equals(pq.read_table(source))
    assert table["score"].to_pylist() == [0.0, None]


def test_column_that_the_output_cannot_hold_is_refused_before_scoring(
    write_rows: WriteRows, tmp_path: Path
) -> None:
    def never() -> Any:
        pytest.fail("a row was scored")
        yield

    dated = open_score_file(_parquet(tmp_path / "in.parquet", day=[date(2024, 1, 1), None]))
    with pytest.raises(DataError, match=r"Column 'day' is of type date32.*\.parquet"):
        write_scored(tmp_path / "out.jsonl", dated, never())
    mixed = open_score_file(write_rows({**ROWS[0], "n": 1}, {**ROWS[2], "n": "two"}))
    with pytest.raises(DataError, match="Field 'n' cannot become a Parquet column"):
        write_scored(tmp_path / "out.parquet", mixed, never())
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_interrupted_output_leaves_the_old_file(
    name: str, write_rows: WriteRows, tmp_path: Path
) -> None:
    output = tmp_path / name
    output.write_text("old")
    file = open_score_file(write_rows(*ROWS))

    def torn() -> Any:
        yield from _scored(list(file.rows()))[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_scored(output, file, torn())
    assert output.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == [name]


def test_tally_counts_by_subset_with_ties_as_halves() -> None:
    tally = ScoreTally(rows=6, margins=[("a", 1.0), ("b", 0.0), ("a", -1.0), ("b", 2.0), (None, 3)])
    tally.refuse("too_long: 99 tokens")
    overall = tally.accuracy()
    assert overall is not None
    # 1 + 0.5 + 0 + 1 + 1 of 5.
    assert (overall.value, overall.n, overall.n_ties) == (0.7, 5, 1)
    assert {name: found.value for name, found in tally.subsets().items()} == {"a": 0.5, "b": 0.75}
    record = tally.as_json()
    assert (record["scored"], record["errors"]) == (5, {"too_long": 1})
    assert (record["rewardbench"], record["score"]) == ({}, None)
    # The mean of 1 and 3 is 2, the deviation sqrt((1 + 1) / 1).
    assert ScoreTally(scores=[1.0, 3.0]).score_spread() == pytest.approx((2.0, math.sqrt(2)))
    assert ScoreTally().accuracy() is None


def _accuracy(value: float, n: int) -> Accuracy:
    return Accuracy(value, 0.0, 1.0, 0, n)


def test_rewardbench_weighs_by_prompts_and_sections_alike() -> None:
    subsets = {
        "alpacaeval-easy": _accuracy(1.0, 30),
        "mt-bench-med": _accuracy(0.5, 10),
        "llmbar-natural": _accuracy(0.4, 5),
        "donotanswer": _accuracy(0.6, 5),
        "math-prm": _accuracy(1.0, 447),
        "hep-go": _accuracy(0.0, 984),
    }
    # Chat (30 * 1 + 10 * 0.5) / 40; Reasoning: 447 prompts weigh as 984, so one half.
    # Overall (0.875 + 0.4 + 0.6 + 0.5) / 4 = 0.59375.
    assert rewardbench_sections(subsets) == pytest.approx(
        {"Chat": 0.875, "Chat Hard": 0.4, "Safety": 0.6, "Reasoning": 0.5, "Overall": 0.59375}
    )
    assert rewardbench_sections({"hep-go": _accuracy(0.25, 4)}) == {"Reasoning": 0.25}
    assert rewardbench_sections({"hep-go": _accuracy(1.0, 4), "mine": _accuracy(1.0, 1)}) == {}
