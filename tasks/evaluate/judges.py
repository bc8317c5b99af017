"""Judges: what they are asked, how their reply becomes a rating or a verdict, and who they are.

Neither torch nor Prefect is imported here before a local model judges: `rlhf score-judgments` reads
ratings, too.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tasks.config.shared import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.hh import Message
from tasks.data.history import LineStore
from tasks.errors import ClusterError, DataError
from tasks.evaluate.config import JudgingConfig
from tasks.evaluate.endpoint import ChatEndpoint, ChatReply, ChatRequest, ask_all, run_async
from tasks.evaluate.judgments import PairJudgment, Score, Verdict, is_rating
from tasks.evaluate.prompts import JudgePrompts, Kind
from tasks.evaluate.questions import ModelAnswer, Question

if TYPE_CHECKING:
    from tasks.runtime.generation import Speaker

# From a judge's text to its decision; a text without one is a failed judgment.

_NUMBER: Final = r"([0-9]{1,3}(?:\.[0-9]{1,6})?)"
_DOUBLE: Final = re.compile(rf"\[\[\s*{_NUMBER}\s*\]\]")
# A single bracket decides only where the text ends with it: elsewhere it is an index or a citation.
_SINGLE: Final = re.compile(rf"(?<![\w\])\[]){re.escape('[')}\s*{_NUMBER}\s*\][\s.*_`\"']*\Z")
_BEFORE: Final = re.compile(
    r"(?:\A|[\n.!?:*_`\"'>)-]|\b(?:rat\w*|scor\w*|grad\w*|verdict|give\w*|deserve\w*|assign\w*)\b"
    r"[^\n.!?]*)\s*\Z",
    re.IGNORECASE,
)
_LOOKED_AT: Final = 200
_VERDICT: Final = re.compile(r"\[\[\s*([ABC])\s*\]\]")
_MEANING: Final[Mapping[str, Verdict]] = {"A": "A", "B": "B", "C": "tie"}


def parse_rating(text: str) -> float | None:
    """Return the last ``[[n]]`` with n in 1 to 10, or None.

    Without one, a single ``[n]`` counts where the text ends with it and it stands for itself or
    after a word such as rating or score.
    """
    on_scale = [value for value in map(float, _DOUBLE.findall(text)) if is_rating(value)]
    if on_scale:
        return on_scale[-1]
    single = _SINGLE.search(text)
    if single is None or not _stands_as_verdict(text[: single.start()]):
        return None
    value = float(single.group(1))
    return value if is_rating(value) else None


def _stands_as_verdict(before: str) -> bool:
    """Tell whether what precedes a closing bracket makes it a rating."""
    # The end alone: a long text in which rating words abound would take quadratic time.
    end = before if len(before) <= _LOOKED_AT else "x" + before[-_LOOKED_AT:]
    return _BEFORE.search(end) is not None


def parse_verdict(text: str) -> Verdict | None:
    """Return who won by the last ``[[A]]``, ``[[B]]`` or ``[[C]]`` (a tie), or None."""
    marks = _VERDICT.findall(text)
    return _MEANING[marks[-1]] if marks else None


@dataclass(frozen=True, slots=True)
class JudgeTask:
    """One judgment to make: of one answer, or of two in one order.

    Args:
        task_id: identity of judge, prompt and repeat: the same judgment has the same id.
        models: the one whose answer is rated, or those in places A and B.
        seed: of the sampling.
    """

    task_id: str
    question_id: int
    models: tuple[str, ...]
    turn: int
    repeat: int
    prompt_name: str
    messages: tuple[Message, ...]
    seed: int

    @property
    def is_pair(self) -> bool:
        """Whether two answers are compared, not one rated."""
        return len(self.models) == 2

    def decision(self, text: str) -> float | Verdict | None:
        """Return the rating or verdict in a judge's text."""
        return parse_verdict(text) if self.is_pair else parse_rating(text)

    @property
    def no_decision(self) -> str:
        """What failed where a text holds none."""
        wanted = "verdict" if self.is_pair else "rating from 1 to 10"
        return f"no {wanted} in the judge's text"


@dataclass(frozen=True, slots=True)
class JudgeOutcome:
    """What a judge said.

    Args:
        failure: why there is no decision, empty where there is one.
        is_lost: no text at all for reasons of the connection: asked again by the next run.
        requests, tokens: what it cost.
    """

    text: str
    failure: str = ""
    is_lost: bool = False
    requests: int = 0
    tokens: int = 0


Done = Callable[[JudgeTask, JudgeOutcome], None]


class Judge(Protocol):
    """Something that judges."""

    @property
    def name(self) -> str:
        """How judgments name it."""

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Make judgments in any order; ``done`` is called for each as it is there, from any thread
        but one at a time.

        Raises:
            RlhfError: it cannot go on; what ``done`` was called for stays.
        """


class EndpointJudge:
    """A model behind an endpoint, asked concurrently."""

    def __init__(self, endpoint: ChatEndpoint, cfg: JudgingConfig) -> None:
        self.endpoint = endpoint
        self.cfg = cfg
        self.name = endpoint.cfg.model

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Ask for each judgment, with as many requests at a time as the endpoint allows.

        Raises:
            ConfigError: a refused key, or an unknown model.
            ClusterError: a spent budget, or a server that answers nothing.
        """
        run_async(ask_all(self.endpoint, tasks, self._ask, done))

    async def _ask(self, task: JudgeTask) -> JudgeOutcome:
        requests, tokens = 0, 0
        reply, is_decided = ChatReply(), False
        for attempt in range(self.cfg.rating_attempts):
            reply = await self.endpoint.ask(
                ChatRequest(
                    task.messages,
                    self.cfg.temperature,
                    self.cfg.max_new_tokens,
                    task.seed + attempt,
                )
            )
            requests, tokens = requests + reply.attempts, tokens + reply.tokens
            is_decided = task.decision(reply.text) is not None
            if reply.failure or is_decided:
                break
        failure = reply.failure
        if not failure and not is_decided:
            cut = ", which ends at the length limit" if reply.truncated else ""
            failure = task.no_decision + cut
        is_lost = bool(reply.failure) and not reply.is_final
        return JudgeOutcome(reply.text, failure, is_lost, requests, tokens)


class LocalJudge:
    """A model directory as judge, with transformers, in this process.

    A prompt that does not fit is a failed judgment: half an answer is not judged.
    """

    def __init__(
        self, name: str, directory: Path, cfg: JudgingConfig, runtime: RuntimeConfig
    ) -> None:
        from tasks.data.rendering import Renderer

        self.name = name
        self.directory = directory
        self.cfg = cfg
        self.runtime = runtime
        self._renderer = Renderer.load(
            directory,
            RenderingConfig(
                max_prompt_tokens=cfg.max_prompt_tokens, max_response_tokens=cfg.max_new_tokens
            ),
        )

    def judge(self, tasks: Sequence[JudgeTask], done: Done) -> None:
        """Judge in batches; what has no rating is asked again with another seed."""
        from tasks.runtime.generation import Speaker

        speaker = Speaker(self.directory, self._renderer, self.runtime)
        for start in range(0, len(tasks), self.cfg.batch_size):
            batch = tasks[start : start + self.cfg.batch_size]
            for task, outcome in zip(batch, self._judge_batch(speaker, batch), strict=True):
                done(task, outcome)

    def _judge_batch(self, speaker: Speaker, tasks: Sequence[JudgeTask]) -> list[JudgeOutcome]:
        cfg = self.cfg
        generation = GenerationConfig(
            temperature=cfg.temperature,
            max_new_tokens=cfg.max_new_tokens,
            batch_size=cfg.batch_size,
        )
        too_long = JudgeOutcome("", f"the prompt exceeds {cfg.max_prompt_tokens} tokens")
        outcomes = [too_long] * len(tasks)
        prompts = {index: self._prompt(task.messages) for index, task in enumerate(tasks)}
        waiting = {index: prompt for index, prompt in prompts.items() if prompt is not None}
        # Greedy, asked again it would say the same.
        n_attempts = cfg.rating_attempts if cfg.temperature > 0 else 1
        for attempt in range(n_attempts):
            if not waiting:
                break
            seed = tasks[0].seed + attempt
            replies = speaker.reply(list(waiting.values()), generation, seed)
            for index, reply in zip(list(waiting), replies, strict=True):
                is_decided = tasks[index].decision(reply.text) is not None
                outcomes[index] = JudgeOutcome(
                    reply.text,
                    "" if is_decided else tasks[index].no_decision,
                    requests=outcomes[index].requests + 1,
                    tokens=outcomes[index].tokens + len(reply.row),
                )
                if is_decided:
                    del waiting[index]
        return outcomes

    def _prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
        """Return a prompt that the template takes and that fits, or None."""
        try:
            _, shortened = self._renderer.prompt_ids(messages)
        except DataError:
            # Templates without a system turn refuse one.
            messages = (Message("user", "\n\n".join(m.content for m in messages)),)
            _, shortened = self._renderer.prompt_ids(messages)
        return None if shortened else messages


# All judgments of an evaluation: those that are stored already, and the rest.


def grade(
    judge: Judge,
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
    prompts: JudgePrompts,
    cfg: JudgingConfig,
    store: LineStore,
    *,
    baseline: str,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Score], list[PairJudgment]]:
    """Make the judgments that the store lacks, each stored as it arrives, and return all.

    Args:
        answers: of each model, to all questions.
        baseline: model that ``cfg.pairwise`` compares all others with.

    Raises:
        ClusterError: judgments were lost with the connection: a mean over the others would pass for
            the whole.
        RlhfError: the judge cannot go on.

    Whatever is raised, what arrived stays in the store.
    """
    tasks = _tasks(judge.name, questions, answers, prompts, cfg, baseline, seed)
    stored = _stored(store)
    missing = [task for task in tasks if task.task_id not in stored]
    n_done = len(tasks) - len(missing)

    def done(task: JudgeTask, outcome: JudgeOutcome) -> None:
        nonlocal n_done
        store.append(_row(task, judge.name, outcome))
        n_done += 1
        progress(n_done, len(tasks))

    progress(n_done, len(tasks))
    if missing:
        judge.judge(missing, done)
    stored = _stored(store)
    lost = {task.task_id for task in tasks} - stored.keys()
    if lost:
        failures = [row["failure"] for row in store.rows if row["task_id"] in lost]
        raise ClusterError(
            f"{len(lost)} of {len(tasks)} judgments were lost; the last failure: "
            f"{failures[-1] if failures else 'not asked'}",
            "a judgment of each answer, or a refusal of the request itself",
            "run the same command again once the judge answers: what was judged is stored, and "
            "only what is missing is asked",
        )
    scores = [_score(task, judge.name, stored[task.task_id]) for task in tasks if not task.is_pair]
    games = {(t.question_id, t.models, t.turn, t.repeat): t for t in tasks if t.is_pair}
    pairs = []
    for (question_id, models, turn, repeat), first in games.items():
        if models[1] == baseline:
            swapped = games[question_id, models[::-1], turn, repeat]
            rows = stored[first.task_id], stored[swapped.task_id]
            pairs.append(_pair(first, judge.name, *rows))
    return scores, pairs


def _tasks(
    judge: str,
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
    prompts: JudgePrompts,
    cfg: JudgingConfig,
    baseline: str,
    seed: int,
) -> list[JudgeTask]:
    """Return all judgments to make: each model alone, then each against the baseline and back."""
    turns = {(name, a.question_id): a.turns for name, given in answers.items() for a in given}
    groups: list[tuple[str, ...]] = [(name,) for name in answers]
    for name in answers if cfg.pairwise else ():
        if name != baseline:
            groups += [(name, baseline), (baseline, name)]
    tasks = []
    for models, repeat, turn, question in product(groups, range(cfg.repeats), (1, 2), questions):
        kind: Kind = "single" if len(models) == 1 else "pair"
        has_reference = question.category in cfg.reference_categories and bool(question.reference)
        prompt = prompts.select(kind, turn, has_reference)
        shown = [turns[name, question.question_id] for name in models]
        messages = prompt.messages(turn, question, shown)
        identity = [judge, prompt.name, [[m.role, m.content] for m in messages], repeat]
        # The same text by two models is still two judgments.
        identity += [list(models), question.question_id, turn]
        task_id = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        tasks.append(
            JudgeTask(
                task_id,
                question.question_id,
                models,
                turn,
                repeat,
                prompt.name,
                messages,
                seed + 1000 * repeat,
            )
        )
    return tasks


def _stored(store: LineStore) -> dict[str, dict[str, Any]]:
    """Return the judgments of a store by id, without those that the connection lost."""
    latest = {str(row["task_id"]): row for row in store.rows}
    return {key: row for key, row in latest.items() if not row.get("is_lost")}


def _row(task: JudgeTask, judge: str, outcome: JudgeOutcome) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "question_id": task.question_id,
        "models": list(task.models),
        "turn": task.turn,
        "repeat": task.repeat,
        "judge": [judge, task.prompt_name],
        **asdict(outcome),
        "tstamp": time.time(),
    }


def _score(task: JudgeTask, judge: str, row: Mapping[str, Any]) -> Score:
    rating = None if row["failure"] else parse_rating(row["text"])
    return Score(
        question_id=task.question_id,
        model_id=task.models[0],
        turn=task.turn,
        score=rating,
        judge=(judge, task.prompt_name),
        judgment=row["text"],
        tstamp=row["tstamp"],
        repeat=task.repeat,
        failure="" if rating is not None else row["failure"] or task.no_decision,
    )


def _pair(
    task: JudgeTask, judge: str, first: Mapping[str, Any], swapped: Mapping[str, Any]
) -> PairJudgment:
    """Join the two orders of a comparison; ``task`` is that of the first one."""
    verdicts = [None if row["failure"] else parse_verdict(row["text"]) for row in (first, swapped)]
    return PairJudgment(
        question_id=task.question_id,
        model_1=task.models[0],
        model_2=task.models[1],
        turn=task.turn,
        first=verdicts[0],
        swapped=verdicts[1],
        judge=(judge, task.prompt_name),
        texts=(first["text"], swapped["text"]),
        tstamp=max(first["tstamp"], swapped["tstamp"]),
        repeat=task.repeat,
    )
