"""What one model said to the questions and to the held-out prompts, and its reward scores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.backends.answering import Answered, Said
from tasks.backends.reward_scoring import RewardScorer
from tasks.backends.roles import Row
from tasks.backends.speaking import Prompt
from tasks.data.eval_summary import HeldOut
from tasks.data.questions import ModelAnswer
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.data.scores import UNBOUNDED_METHOD, Score

REWARD_JUDGE = ("reward_model", UNBOUNDED_METHOD)


@dataclass
class Heard:
    """All that one model said.

    Args:
        held_out: its responses to the held-out prompts; empty for a model that is known by its
            answers only.
    """

    name: str
    answered: list[Answered]
    held_out: list[Said] = field(default_factory=list)

    @property
    def answers(self) -> list[ModelAnswer]:
        """The answers in the order of the questions."""
        return [one.as_answer(self.name) for one in self.answered]

    @property
    def shortened(self) -> int:
        """Prompts that lost text to the length limit."""
        spoken = [said for one in self.answered for said in one.said]
        return sum(said.shortened > 0 for said in (*spoken, *self.held_out))


def reward_judgments(heard: Heard, scorer: RewardScorer, renderer: Renderer) -> list[Score]:
    """Score both turns of every answer with the reward model."""
    turns = [(one, turn) for turn in (1, 2) for one in heard.answered]
    rows = [one.row(turn, renderer) for one, turn in turns]
    totals, _ = _scores(scorer, rows)
    now = time.time()
    return [
        Score(
            one.question.question_id,
            heard.name,
            turn,
            value,
            REWARD_JUDGE,
            tstamp=now,
            failure=row if isinstance(row, str) else "",
        )
        for (one, turn), row, value in zip(turns, rows, totals, strict=True)
    ]


def held_out_scores(
    heard: Heard,
    prompts: Sequence[Prompt],
    subsets: Sequence[str],
    scorer: RewardScorer,
    renderer: Renderer,
) -> HeldOut:
    """Score the responses to the held-out prompts with the reward model."""
    rows = [_row(p, said, renderer) for p, said in zip(prompts, heard.held_out, strict=True)]
    totals, components = _scores(scorer, rows)
    return HeldOut([said.text for said in heard.held_out], totals, components, subsets)


def _row(prompt: Prompt, said: Said, renderer: Renderer) -> Row | str:
    response = said.token_ids
    if response is None:
        try:
            response = renderer.response_ids(said.text)[0]
        except ResponseTooLong as error:
            return error.found
    return Row(renderer.prompt_ids(prompt)[0], response)


def _scores(
    scorer: RewardScorer, rows: Sequence[Row | str]
) -> tuple[list[float | None], Mapping[str, list[float | None]]]:
    """Return the score of each row, in all and by component; what is no row has none."""
    places = [index for index, row in enumerate(rows) if not isinstance(row, str)]
    found = scorer.score([row for row in rows if not isinstance(row, str)])

    def spread(values: list[float]) -> list[float | None]:
        by_place = dict(zip(places, values, strict=True))
        return [by_place.get(index) for index in range(len(rows))]

    components = {name: spread(c.total.tolist()) for name, c in found.components.items()}
    return spread(found.total.tolist()), components
