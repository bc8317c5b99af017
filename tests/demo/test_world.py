"""The generated pairs: format, determinism, what is informative and what is not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tasks.demo.oracle import is_good, parse_situation
from tasks.demo.vocabulary import KINDS
from tasks.demo.world import (
    MAX_PAIRS,
    generate_pairs,
    to_transcript,
    write_json_lines,
    write_pairs,
)
from tasks.errors import ConfigError

_MARKER = "\n\nAssistant:"
_N_PAIRS = 4000


def _split(row: dict[str, str]) -> tuple[str, str, str]:
    """Return prompt, chosen and rejected response; the prompt ends with the last marker."""
    end = row["chosen"].rindex(_MARKER) + len(_MARKER)
    assert row["chosen"][:end] == row["rejected"][:end]
    return row["chosen"][:end], row["chosen"][end:], row["rejected"][end:]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(generate_pairs(_N_PAIRS, seed=3))


def test_a_pair_shares_its_prompt_and_differs_in_its_response(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert set(row) == {"chosen", "rejected"}
        prompt, chosen, rejected = _split(row)
        assert prompt.startswith("\n\nHuman: ")
        assert chosen.startswith(" ") and rejected.startswith(" ")
        assert chosen.strip() and rejected.strip() and chosen != rejected


def test_prompts_are_distinct(rows: list[dict[str, str]]) -> None:
    assert len({_split(row)[0] for row in rows}) == _N_PAIRS


def test_exactly_one_response_is_good_and_the_given_share_is_flipped(
    rows: list[dict[str, str]],
) -> None:
    flipped = 0
    for row in rows:
        prompt, chosen, rejected = _split(row)
        assert is_good(prompt, chosen) != is_good(prompt, rejected)
        flipped += is_good(prompt, rejected)
    # Binomial: sd = sqrt(4000 * 0.1 * 0.9) = 19; four of them around 400.
    assert 324 <= flipped <= 476


@pytest.mark.parametrize(("flip_rate", "good_is_chosen"), [(0.0, True), (1.0, False)])
def test_flip_rate_bounds(flip_rate: float, good_is_chosen: bool) -> None:
    for row in generate_pairs(200, seed=0, flip_rate=flip_rate):
        prompt, chosen, _ = _split(row)
        assert is_good(prompt, chosen) is good_is_chosen


def test_flipping_changes_labels_only() -> None:
    def sides(flip_rate: float) -> list[set[str]]:
        pairs = generate_pairs(100, seed=5, flip_rate=flip_rate)
        return [set(row.values()) for row in pairs]

    assert sides(0.0) == sides(0.5) == sides(1.0)


def test_length_says_nothing(rows: list[dict[str, str]]) -> None:
    longer = shorter = 0
    for row in rows:
        prompt, chosen, rejected = _split(row)
        good, bad = (chosen, rejected) if is_good(prompt, chosen) else (rejected, chosen)
        longer += len(good) > len(bad)
        shorter += len(good) < len(bad)
    assert 0.45 < longer / (longer + shorter) < 0.55


def test_every_kind_has_its_share(rows: list[dict[str, str]]) -> None:
    counts = Counter(parse_situation(_split(row)[0]).kind_name for row in rows)
    total_weight = sum(kind.weight for kind in KINDS)
    for kind in KINDS:
        expected = _N_PAIRS * kind.weight / total_weight
        # sd <= sqrt(4000 * 5/33) = 25
        assert abs(counts[kind.name] - expected) < 100


def test_what_is_good_depends_on_the_prompt(rows: list[dict[str, str]]) -> None:
    """The same words are good after one prompt and bad after another, for most responses."""
    verdicts: dict[str, set[bool]] = {}
    for row in rows:
        prompt, *responses = _split(row)
        for response in responses:
            verdicts.setdefault(response, set()).add(is_good(prompt, response))
    common = [seen for response, seen in verdicts.items() if response.count(" ") < 6]
    assert sum(len(seen) == 2 for seen in common) > 0.5 * len(common)


def test_some_dialogues_have_several_turns(rows: list[dict[str, str]]) -> None:
    several = [row for row in rows if row["chosen"].count("\n\nHuman:") > 1]
    kinds = {parse_situation(_split(row)[0]).kind_name for row in several}
    assert 0.15 < len(several) / _N_PAIRS < 0.4
    assert kinds == {kind.name for kind in KINDS}


def test_the_seed_decides_and_the_global_generator_does_not() -> None:
    random.seed(1)
    first = list(generate_pairs(50, seed=9))
    random.seed(2)
    assert list(generate_pairs(50, seed=9)) == first
    assert list(generate_pairs(50, seed=10)) != first
    # A longer run begins with the shorter one.
    assert list(islice(generate_pairs(500, seed=9), 50)) == first


def test_rows_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    program = (
        "import sys; from tasks.demo.world import write_pairs, write_questions;"
        "write_pairs(sys.argv[1] + '/p', 300, 4); write_questions(sys.argv[1] + '/q')"
    )
    contents = []
    for hash_seed in ("0", "1"):
        directory = tmp_path / hash_seed
        directory.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        subprocess.run([sys.executable, "-c", program, str(directory)], check=True, env=environment)
        contents.append([(directory / name).read_bytes() for name in "pq"])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("n_pairs", [0, -1, MAX_PAIRS + 1])
def test_too_many_pairs_are_refused_at_the_call(n_pairs: int) -> None:
    with pytest.raises(ConfigError, match=str(MAX_PAIRS)):
        generate_pairs(n_pairs, seed=0)


@pytest.mark.parametrize("flip_rate", [-0.1, 1.5, float("nan")])
def test_a_flip_rate_that_is_no_probability_is_refused(flip_rate: float) -> None:
    with pytest.raises(ConfigError, match="flip_rate"):
        generate_pairs(1, seed=0, flip_rate=flip_rate)


def test_the_world_can_make_as_many_pairs_as_it_promises() -> None:
    prompts = {_split(row)[0] for row in generate_pairs(MAX_PAIRS, seed=0)}
    assert len(prompts) == MAX_PAIRS


def test_written_pairs_are_the_generated_ones(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "deep" / "pairs.jsonl", 20, 6, 0.0)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == list(generate_pairs(20, seed=6, flip_rate=0.0))
    assert [entry.name for entry in path.parent.iterdir()] == ["pairs.jsonl"]


def test_a_failed_write_leaves_the_previous_file(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "rows.jsonl", [{"n": 1}])

    def broken() -> list[dict[str, object]]:
        raise OSError("no more rows")

    with pytest.raises(OSError, match="no more rows"):
        write_json_lines(path, (row for _ in [0] for row in broken()))
    assert path.read_text() == '{"n": 1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_transcript_of_messages() -> None:
    messages = [
        {"role": "user", "content": "My name is Ben."},
        {"role": "assistant", "content": "It is nice to meet you."},
        {"role": "user", "content": "Say my name."},
    ]
    assert to_transcript(messages) == (
        "\n\nHuman: My name is Ben.\n\nAssistant: It is nice to meet you."
        "\n\nHuman: Say my name.\n\nAssistant:"
    )
