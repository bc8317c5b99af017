"""What an evaluation reads besides the models: questions, given answers, the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.context import StageContext
from tasks.data.history import LineStore
from tasks.evaluate.answers import Answered, Heard, Said
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.endpoint import ChatEndpoint, Usage
from tasks.evaluate.judges import EndpointJudge, Judge, LocalJudge, LocalModel, Sampling
from tasks.evaluate.questions import (
    ModelAnswer,
    Question,
    answers_to,
    read_questions,
    read_references,
    with_references,
)


def evaluation_questions(ctx: StageContext, cfg: EvaluateConfig) -> list[Question]:
    """Return the questions, with a separate file's references where they have none."""
    if cfg.questions == "demo":
        from tasks.demo.world import write_questions

        path = Path(write_questions(ctx.workspace.cache_dir / "demo-questions.jsonl"))
    else:
        path = Path(ctx.sources["questions"].path)
    questions = read_questions(path)[: cfg.max_questions]
    if cfg.judging.references is not None:
        separate = read_references(Path(ctx.sources["references"].path))
        questions, contradicted = with_references(questions, separate)
        if contradicted:
            ctx.log.event(
                "references.contradicted",
                f"The separate references of questions {contradicted} name other numbers than "
                "those in the question file, which are used",
            )
    return questions


def given_answers(
    ctx: StageContext, cfg: EvaluateConfig, questions: Sequence[Question]
) -> dict[str, Heard]:
    """Return the models that are known by their answers."""
    found = {}
    for name in cfg.answers.files:
        answers = answers_to(Path(ctx.sources[f"answers.{name}"].path), questions)
        answered = [_answered(q, answer) for q, answer in zip(questions, answers, strict=True)]
        found[name] = Heard(name, answered)
    return found


def _answered(question: Question, answer: ModelAnswer) -> Answered:
    first, second = (
        Said(text, truncated=is_cut)
        for text, is_cut in zip(answer.turns, answer.truncated, strict=True)
    )
    return Answered(question, (first, second), answer.tstamp)


def language_judge(ctx: StageContext, cfg: EvaluateConfig) -> Judge | None:
    """Return the judge, or None for the reward model.

    Raises:
        ConfigError: no key.
        ModelError: a local judge that does not load.
    """
    judging = cfg.judging
    sampling = Sampling(judging.temperature, judging.max_new_tokens, judging.rating_attempts)
    if cfg.judge == "openai":
        store = store_of(ctx, "judgments")
        used = usage_in(store)
        store.close()
        return EndpointJudge(ChatEndpoint(judging.endpoint, used), sampling)
    if cfg.judge == "transformers":
        assert judging.model is not None, "the config was checked"
        given = Path(judging.model).expanduser()
        model = LocalModel(
            given.name if given.is_dir() else judging.model,
            Path(ctx.sources["judge_model"].path),
            judging.max_prompt_tokens,
            judging.batch_size,
        )
        return LocalJudge(model, sampling, cfg.runtime)
    return None


def usage_in(*stores: LineStore) -> Usage:
    """Return what the requests behind the rows of stores cost: a budget is one over all runs."""
    rows = [row for store in stores for row in store.rows]
    return Usage(*(sum(int(row.get(key, 0)) for row in rows) for key in ("requests", "tokens")))


def store_of(ctx: StageContext, name: str) -> LineStore:
    """Open a store that outlives a run that was killed."""
    return LineStore(ctx.checkpoint_dir / f"{name}.jsonl")
