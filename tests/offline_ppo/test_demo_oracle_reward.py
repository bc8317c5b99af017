"""The demo oracle as a reward function, called as a run calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.inputs import check_reward_function
from tasks.data.hh import Message, Pair
from tasks.errors import RewardError
from tasks.offline_ppo.reward_process import Judged, RewardFunction

FILE = Path(__file__).resolve().parents[2] / "configs" / "reward_functions" / "demo_oracle.py"


def _pair(question: str) -> Pair:
    return Pair(
        pair_id="p",
        prompt_id="p",
        subset="demo",
        prompt=(Message("user", question),),
        chosen="x",
        rejected="y",
        source_file="pairs.jsonl",
        source_line=7,
    )


def _world() -> tuple[Pair, str]:
    from tasks.demo.oracle import Situation, good_cores
    from tasks.demo.vocabulary import KINDS

    kind = next(kind for kind in KINDS if not kind.needs_name and not kind.is_harmful)
    fact = kind.facts[0]
    question = kind.questions[0].format(*fact.asked)
    return _pair(question), good_cores(Situation(kind.name, fact))[0]


def test_good_responses_get_one_and_others_nothing() -> None:
    check_reward_function(FILE, "reward_fn")
    pair, good = _world()
    judged = [Judged.of(pair, "probe", text) for text in (good, f"  {good}\n", f"{good} zzz", "")]
    assert RewardFunction(str(FILE)).scores(judged) == [1.0, 1.0, 0.0, 0.0]


def test_prompts_of_another_world_are_refused() -> None:
    judged = [Judged.of(_pair("Who wrote Faust?"), "chosen", "Goethe")]
    with pytest.raises(RewardError, match=r"pairs\.jsonl:7.*no question"):
        RewardFunction(str(FILE)).scores(judged)
