"""Stage evaluate: two-turn answers, judged by the reward model or by a language model, and
held-out prompts, scored by the reward model; what the reward model gives is named so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import (
    Artifact,
    EvalReport,
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.context import StageContext
from tasks.data.history import LineStore
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer, render_pairs
from tasks.demo.oracle import clean_accuracy, good_rate
from tasks.errors import DataError
from tasks.evaluate.answers import (
    Answered,
    Answerer,
    Count,
    EndpointAnswerer,
    LocalAnswerer,
    Response,
    ResponseCount,
    answer_prompts,
    answer_questions,
    held_out_scores,
    reward_judgments,
)
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.endpoint import ChatEndpoint, Usage
from tasks.evaluate.gate import BASELINE, decide
from tasks.evaluate.judges import EndpointJudge, Judge, LocalJudge, grade
from tasks.evaluate.judgments import (
    PairJudgment,
    Score,
    write_model_outputs,
    write_pairs,
    write_scores,
)
from tasks.evaluate.prompts import OWN, load_judge_prompts
from tasks.evaluate.questions import (
    ModelAnswer,
    Question,
    answers_to,
    read_questions,
    read_references,
    with_references,
    write_answers,
)
from tasks.evaluate.report import (
    HeldOut,
    differences_section,
    failure_counts,
    flat_metrics,
    held_out_section,
    pairwise_section,
    plot_radar,
    plot_scores,
    questions_section,
    render_page,
    render_report,
)
from tasks.evaluate.vllm import served
from tasks.runtime.generation import Prompt, Speaker
from tasks.runtime.rows import response_rows
from tasks.runtime.scoring import RewardScorer
from tasks.runtime.session import open_session

_REWARD_SCALE: Final = (
    "standard deviations of the reward model's training scores; not an MT-Bench score"
)


@dataclass(frozen=True)
class Models:
    """The three that are compared."""

    base: PolicyCheckpoint
    policy: PolicyCheckpoint
    student: StudentAdapter

    @property
    def by_name(self) -> dict[str, PolicyCheckpoint | StudentAdapter]:
        """Each by the name that the report gives it."""
        return {"base": self.base, "policy": self.policy, "student": self.student}


@task(name="evaluate-models", cache_policy=NO_CACHE)
def evaluate_models(
    ctx: StageContext,
    cfg: EvaluateConfig,
    preferences: PreferenceDataset,
    models: Models,
    reward_model: RewardModelCheckpoint,
) -> EvalReport:
    """Let base, policy and student answer, have the answers judged, and compare.

    Answers and judgments are stored as they arrive: a run that was killed asks only for what is
    missing.

    Raises:
        RlhfError: inputs that do not fit together (before anything is generated), or a judge or
            server that cannot go on.
    """
    renderer = _one_renderer(cfg, models.base, {**models.by_name, "reward": reward_model})
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    questions = _questions(ctx, cfg)
    from_files = _given_answers(ctx, cfg, questions)
    judge = _language_judge(ctx, cfg)
    prompts = _held_out_prompts(preferences, cfg.held_out_prompts)
    scorer = RewardScorer.load(open_session(cfg.runtime, ctx.log), reward_model)

    directories = {name: model.model_dir for name, model in models.by_name.items()}
    answered, responses = collect_answers(ctx, cfg, renderer, questions, list(prompts), directories)
    answered |= from_files
    answers = {name: [one.as_answer(name) for one in given] for name, given in answered.items()}

    judged_by, scale = "reward_model", _REWARD_SCALE
    pairs: list[PairJudgment] = []
    judging: dict[str, Any] = {}
    if judge is None:
        scores = [
            score
            for name, given in answered.items()
            for score in reward_judgments(name, given, scorer, renderer)
        ]
    else:
        judged_by, scale = judge.name, f"1 to 10, by {judge.name}"
        scores, pairs, judging = _judge(ctx, cfg, judge, questions, answers)
    held_out = {
        name: held_out_scores(prompts, said, scorer, renderer) for name, said in responses.items()
    }

    report: dict[str, Any] = {
        "judge": judged_by,
        "scale": scale,
        "n_questions": len(questions),
        "n_held_out_prompts": len(prompts),
        "questions": questions_section(questions, answers, scores),
        "differences": differences_section(list(answers), scores),
        "held_out": held_out_section(held_out),
    }
    if cfg.judging.pairwise:
        report["pairwise"] = pairwise_section(list(answers), pairs)
    if judging:
        report["judging"] = judging
    report["gate"] = decide(cfg.gate, report)
    if preferences.manifest.config.get("source") == "demo":
        report["demo"] = _demo(scorer, preferences, renderer, list(prompts), held_out)
    ctx.draft.counts |= {"questions": len(questions), "held_out_prompts": len(prompts)}
    ctx.draft.metrics |= flat_metrics(report)

    def write(directory: Path) -> None:
        (directory / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        _write_files(directory, answers, scores, pairs, list(prompts), held_out)
        _write_pages(directory, report, questions, answers, scores, pairs)

    return ctx.publish(EvalReport, write)


# What an evaluation reads besides the models: questions, given answers, held-out prompts.


def _one_renderer(
    cfg: EvaluateConfig, base: PolicyCheckpoint, artifacts: Mapping[str, Artifact]
) -> Renderer:
    renderer = Renderer.load(base.model_dir, cfg.rendering)
    for name, artifact in artifacts.items():
        if artifact.manifest.renderer_fingerprint is not None:
            renderer.check_same(artifact.manifest.renderer_fingerprint, f"the {name} model")
    return renderer


def _questions(ctx: StageContext, cfg: EvaluateConfig) -> list[Question]:
    """Return the questions, with a separate file's references where they have none."""
    if cfg.questions == "demo":
        from tasks.demo.world import write_questions

        path = write_questions(ctx.workspace.cache_dir / "demo-questions.jsonl")
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


def _given_answers(
    ctx: StageContext, cfg: EvaluateConfig, questions: Sequence[Question]
) -> dict[str, list[Answered]]:
    """Return the answers of the models that are known by their answers."""
    given = {}
    for name in cfg.answers.files:
        answers = answers_to(Path(ctx.sources[f"answers.{name}"].path), questions)
        given[name] = [
            Answered(question, tuple(map(Response, a.turns, (None, None), a.truncated)), a.tstamp)
            for question, a in zip(questions, answers, strict=True)
        ]
    return given


def _held_out_prompts(preferences: PreferenceDataset, n_prompts: int) -> dict[Prompt, str]:
    """Return distinct prompts of the test split, in the dataset's order, with their subsets."""
    subset_of: dict[Prompt, str] = {}
    for pair in read_pairs(preferences, "test"):
        subset_of.setdefault(pair.prompt, pair.subset)
    if not subset_of:
        raise DataError("The test split has no prompts", "at least one", "raise ingest.test_share")
    return dict(list(subset_of.items())[:n_prompts])


def _store(ctx: StageContext, name: str) -> LineStore:
    """Open a store that outlives a run that was killed."""
    return LineStore(ctx.checkpoint_dir / f"{name}.jsonl")


# Answers.


def collect_answers(
    ctx: StageContext,
    cfg: EvaluateConfig,
    renderer: Renderer,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
    models: Mapping[str, Path],
) -> tuple[dict[str, list[Answered]], dict[str, list[Response]]]:
    """Have every model answer; return the answers to questions and to held-out prompts by name."""
    names = list(cfg.answers.served) if cfg.answers.backend == "openai" else list(models)
    answered, responses = {}, {}
    count = ResponseCount(ctx.log, 2 * len(questions) + len(prompts), len(names))
    with (
        closing(_store(ctx, "answers")) as answers,
        closing(_store(ctx, "held_out")) as held_out,
    ):
        # One budget for all models and all runs.
        usage = Usage.of(answers, held_out)
        for index, name in enumerate(names):
            count.begin(index, name)
            with _answerer(ctx, cfg, renderer, name, models, usage, count) as answerer:
                responses[name] = answer_prompts(name, answerer, prompts, cfg, held_out)
                answered[name] = answer_questions(name, answerer, questions, cfg, answers)
            _tell_limits(ctx, name, answered[name], responses[name])
    count.begin(len(names), "all")
    return answered, responses


@contextmanager
def _answerer(
    ctx: StageContext,
    cfg: EvaluateConfig,
    renderer: Renderer,
    name: str,
    models: Mapping[str, Path],
    usage: Usage,
    count: Count,
) -> Iterator[Answerer]:
    with ExitStack() as stack:

        def connect() -> ChatEndpoint:
            if cfg.answers.backend == "openai":
                return ChatEndpoint(cfg.answers.endpoint_of(name), usage)
            log_path = ctx.checkpoint_dir / f"vllm-{name}.log"
            server = stack.enter_context(served(cfg.answers.vllm, models[name], name, log_path))
            endpoint = cfg.answers.endpoint_at(server.address, name)
            return ChatEndpoint(endpoint, usage, server.failure)

        if cfg.answers.backend == "transformers":
            speaker = Speaker(models[name], renderer, cfg.runtime)
            yield LocalAnswerer(speaker, renderer, cfg.generation, count)
        else:
            yield EndpointAnswerer(connect, cfg.generation, count)


def _tell_limits(
    ctx: StageContext, name: str, answered: Sequence[Answered], held_out: Sequence[Response]
) -> None:
    to_questions = [response for one in answered for response in one.responses]
    cut = sum(response.truncated for response in to_questions)
    if cut:
        ctx.log.event(
            f"answers.{name}.truncated",
            f"{cut} of {len(to_questions)} answers of {name} end at generation.max_new_tokens",
        )
    shortened = sum(response.shortened > 0 for response in (*to_questions, *held_out))
    if shortened:
        ctx.log.event(
            f"answers.{name}.shortened",
            f"{shortened} prompts of {name} lost text to rendering.max_prompt_tokens",
        )


# Judgments of a language model.


def _language_judge(ctx: StageContext, cfg: EvaluateConfig) -> Judge | None:
    """Return the judge, or None for the reward model.

    Raises:
        ConfigError: no key.
        ModelError: a local judge that does not load.
    """
    judging = cfg.judging
    if cfg.judge == "openai":
        with closing(_store(ctx, "judgments")) as store:
            return EndpointJudge(ChatEndpoint(judging.endpoint, Usage.of(store)), judging)
    if cfg.judge == "transformers":
        assert judging.model is not None, "the config was checked"
        given = Path(judging.model).expanduser()
        name = given.name if given.is_dir() else judging.model
        return LocalJudge(name, Path(ctx.sources["judge_model"].path), judging, cfg.runtime)
    return None


def _judge(
    ctx: StageContext,
    cfg: EvaluateConfig,
    judge: Judge,
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
) -> tuple[list[Score], list[PairJudgment], dict[str, Any]]:
    """Return all judgments, and how they were made, for the report."""
    judging = cfg.judging
    source = OWN if judging.prompts == OWN else ctx.sources["judge_prompts"].path
    prompts = load_judge_prompts(source)
    with closing(_store(ctx, "judgments")) as store:
        scores, pairs = grade(
            judge,
            questions,
            answers,
            prompts,
            judging,
            store,
            baseline=BASELINE,
            seed=cfg.seed,
            progress=lambda done, total: ctx.log.progress(done, total, "judgments"),
        )
        usage = Usage.of(store)
    failed = failure_counts(scores)
    if failed:
        ctx.log.event("judgments.failed", f"{sum(failed.values())} judgments failed: {failed}")
    how = {
        "prompts": OWN if judging.prompts == OWN else Path(source).name,
        "prompts_sha256": prompts.fingerprint,
        "repeats": judging.repeats,
        "requests": usage.requests,
        "tokens": usage.tokens,
        "failures": failed,
        "without_reference": [
            question.question_id
            for question in questions
            if question.category in judging.reference_categories and not question.reference
        ],
    }
    return scores, pairs, how


def _demo(
    scorer: RewardScorer,
    preferences: PreferenceDataset,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    scored: Mapping[str, HeldOut],
) -> dict[str, Any]:
    """Measure with the demo world's oracle, which training never sees."""
    pairs = read_pairs(preferences, "test")
    rendered, _ = render_pairs(pairs, renderer)
    kept = {pair.pair_id for pair in rendered}
    scores = scorer.score(response_rows(rendered)).total
    judged = [pair for pair in pairs if pair.pair_id in kept]
    return {
        "oracle_good_rate": {name: good_rate(prompts, one.texts) for name, one in scored.items()},
        "reward_accuracy_clean": clean_accuracy(judged, scores[0::2], scores[1::2]),
    }


# The report's directory.


def _write_files(
    directory: Path,
    answers: Mapping[str, Sequence[ModelAnswer]],
    scores: Sequence[Score],
    pairs: Sequence[PairJudgment],
    prompts: Sequence[Prompt],
    held_out: Mapping[str, HeldOut],
) -> None:
    """Write answers and judgments in FastChat's and AlpacaEval's formats."""
    for folder in ("model_answer", "model_judgment", "alpaca"):
        (directory / folder).mkdir()
    for name, given in answers.items():
        write_answers(directory / "model_answer" / f"{name}.jsonl", given)
        own = [score for score in scores if score.model_id == name]
        write_scores(directory / "model_judgment" / f"{name}.jsonl", own)
    if pairs:
        write_pairs(directory / "model_judgment" / "pair.jsonl", pairs)
    # AlpacaEval compares answers to prompts of one turn.
    single = [index for index, prompt in enumerate(prompts) if len(prompt) == 1]
    instructions = [prompts[index][0].content for index in single]
    for name, one in held_out.items():
        outputs = [one.texts[index] for index in single]
        path = directory / "alpaca" / f"{name}.json"
        write_model_outputs(path, instructions, outputs, name, "held_out")


def _write_pages(
    directory: Path,
    report: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
    scores: Sequence[Score],
    pairs: Sequence[PairJudgment],
) -> None:
    (directory / "report.md").write_text(render_report(report, questions, answers))
    images = {"Mean score by category": directory / "scores.png"}
    plot_scores(report, directory / "scores.png")
    if plot_radar(report, directory / "radar.png"):
        images["Mean score by category, around a circle"] = directory / "radar.png"
    page = render_page(report, questions, answers, scores, pairs, images)
    (directory / "report.html").write_text(page, encoding="utf-8")
