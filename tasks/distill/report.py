"""The student beside its teacher and its base: how alike, how good, how large, how fast."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from tasks.algorithms.statistics import Bootstrap, ClusteredMean, PlainWinRate, clustered_mean
from tasks.artifacts import Manifest, ParentRef, RewardModelCheckpoint, read_manifest, standing_path
from tasks.config.shared import GenerationConfig
from tasks.data.hh import Pair
from tasks.data.history import FILE_NAME, History, write_history
from tasks.data.rendering import Renderer
from tasks.distill.config import ModelCardConfig
from tasks.distill.student import adapter_parameters, n_parameters
from tasks.errors import ArtifactError, MissingInputError
from tasks.models.loading import list_weight_files
from tasks.report import plots
from tasks.report.page import cell, interval, join, table, with_error, write_report
from tasks.report.pairs import (
    HeldOut,
    ResponsePair,
    compare_pairs,
    prompt_text,
    write_response_pairs,
)
from tasks.runtime.generation import Reply, Speaker
from tasks.runtime.logits_hooks import TEACHER_IDS, TEACHER_LOGPROBS, AgreementReader, TopKReader
from tasks.runtime.rows import Responses, RoleSpec, Row, one_pair_per_prompt
from tasks.runtime.scoring import RewardScorer
from tasks.runtime.session import Session

SCHEMA_VERSION: Final = 1
STUDENT: Final = "student"
TEACHER: Final = "teacher"
BASE: Final = "base"
_COLOURS: Final = {STUDENT: plots.BLUE, TEACHER: plots.ORANGE, BASE: plots.GREY}


@dataclass(frozen=True)
class ModelFigures:
    """One model on held-out prompts.

    Args:
        parameters: weights of the model, tied ones once.
        size_bytes: its weight files.
        scores: of the reward model, one per prompt, in standard deviations of its training scores.
        response_tokens: mean length of its responses.
        seconds: generating them took.
        tokens: generated in all.
        perplexity: of the dataset's chosen responses of the test split.
    """

    parameters: int
    size_bytes: int
    scores: Sequence[float]
    response_tokens: float
    seconds: float
    tokens: int
    perplexity: float

    @property
    def score(self) -> float:
        """Mean score."""
        return sum(self.scores) / len(self.scores)

    @property
    def tokens_per_second(self) -> float:
        """Generation speed, all prompts of a batch at once."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Agreement:
    """Student against teacher, on the teacher's own held-out responses.

    Args:
        kl: of the teacher from the student per token, nats at temperature 1, clustered by response.
        labels: tokens per position that are told apart; a KL over fewer than the vocabulary is a
            lower bound.
        same_top: share of tokens at which both prefer the same.
    """

    kl: ClusteredMean
    labels: int
    is_exact: bool
    same_top: float


@dataclass(frozen=True)
class StudentReport:
    """A distilled student.

    Args:
        models: student, teacher and base.
        against: base and teacher: win rates by reward model, in which "policy" is the student and
            "base" the other one.
        adapter_parameters, adapter_bytes: of the adapter alone.
        history: metrics of the training by step.
    """

    models: Mapping[str, ModelFigures]
    agreement: Agreement
    against: Mapping[str, HeldOut]
    adapter_parameters: int
    adapter_bytes: int
    history: History

    @property
    def win_rates(self) -> dict[str, PlainWinRate]:
        """Of the student, by whom it is compared with."""
        return {name: held_out.comparison.plain for name, held_out in self.against.items()}

    def metrics(self) -> dict[str, float]:
        """Return flat figures with stable names."""
        flat = {
            "teacher_kl_per_token": self.agreement.kl.value,
            "teacher_same_top": self.agreement.same_top,
        }
        for name, rate in self.win_rates.items():
            flat[f"win_rate_against_{name}"] = rate.value
            flat[f"win_rate_against_{name}_low"] = rate.interval.low
            flat[f"win_rate_against_{name}_high"] = rate.interval.high
        for name, figures in self.models.items():
            flat[f"{name}_score"] = figures.score
            flat[f"{name}_perplexity"] = figures.perplexity
            flat[f"{name}_tokens_per_second"] = figures.tokens_per_second
        return flat

    def as_json(self) -> dict[str, Any]:
        """Return what ``report.json`` holds."""
        models = {}
        for name, figures in self.models.items():
            models[name] = asdict(figures)
            del models[name]["scores"]
            models[name]["score"] = figures.score
            models[name]["tokens_per_second"] = figures.tokens_per_second
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": summarize(self),
            "n_prompts": len(self.models[STUDENT].scores),
            "judge": self.against[BASE].judge,
            "models": models,
            "adapter_parameters": self.adapter_parameters,
            "adapter_bytes": self.adapter_bytes,
            "agreement": asdict(self.agreement),
            "win_rates": {name: asdict(rate) for name, rate in self.win_rates.items()},
        }


def write_student_report(report: StudentReport, directory: Path) -> list[Path]:
    """Write ``report.json``, ``report.md``, both tables of responses, the training's history and
    the plots; return the files."""
    files = write_report(directory, report.as_json(), render(report))
    for name, held_out in report.against.items():
        files.append(directory / f"against_{name}.parquet")
        write_response_pairs(files[-1], held_out.pairs)
    files.append(directory / FILE_NAME)
    write_history(files[-1], report.history)
    return [*files, draw(report, directory / "overview.png")]


def summarize(report: StudentReport) -> list[str]:
    """Return what was found in plain sentences."""
    student, teacher = report.models[STUDENT], report.models[TEACHER]
    agreement = report.agreement
    kl = with_error(agreement.kl.value, agreement.kl.standard_error, ".4f")
    bound = "" if agreement.is_exact else f" (at least: {agreement.labels} tokens told apart)"
    return [
        f"The student prefers the teacher's token at {agreement.same_top:.1%} of the positions of "
        f"the teacher's responses; KL from it {kl} nats per token{bound}",
        *(
            f"It wins {rate.value:.1%} of {rate.n} held-out prompts against the {name} (95 % "
            f"interval {interval(rate.interval.low, rate.interval.high, '.1%')}), by "
            f"{report.against[BASE].judge}."
            for name, rate in report.win_rates.items()
        ),
        f"It has {student.parameters:,} weights, {report.adapter_parameters:,} of them in the "
        f"adapter, against {teacher.parameters:,} of the teacher.",
        # A sentence of its own: no repeat of a run has the same speed.
        f"It writes {student.tokens_per_second:,.0f} tokens a second against the teacher's "
        f"{teacher.tokens_per_second:,.0f}.",
    ]


def render(report: StudentReport) -> str:
    """Return the report as a page."""
    first, *rest = map(cell, summarize(report))
    speeds = [
        (f"{name}, tokens a second", f"{figures.tokens_per_second:,.0f}")
        for name, figures in report.models.items()
    ]
    return join(
        [
            f"# {first}",
            *rest,
            "![](overview.png)",
            "## Models",
            _model_table(report),
            table(("speed", ""), speeds),
            "Scores are the reward model's, in standard deviations of its training scores. "
            "Perplexity is that of the chosen responses of the test split, per token. Speed is "
            "that of one batch of all prompts with transformers.",
            "## Win rates of the student",
            _rate_table(report),
        ]
    )


def _model_table(report: StudentReport) -> str:
    rows = [
        (
            name,
            f"{figures.parameters:,}",
            f"{figures.size_bytes / 2**20:.1f}",
            f"{figures.score:+.3f}",
            f"{figures.perplexity:.3f}",
            f"{figures.response_tokens:.1f}",
        )
        for name, figures in report.models.items()
    ]
    adapter = (f"{report.adapter_parameters:,}", f"{report.adapter_bytes / 2**20:.1f}")
    rows.append(("adapter alone", *adapter, "", "", ""))
    return table(("model", "weights", "MiB", "score", "perplexity", "tokens a response"), rows)


def _rate_table(report: StudentReport) -> str:
    rows = []
    for name, held_out in report.against.items():
        rate, controlled = held_out.comparison.plain, held_out.comparison.length_controlled.known
        equal = "" if controlled is None else f"{controlled[0]:.3f}"
        ends = interval(rate.interval.low, rate.interval.high)
        counts = (rate.n, rate.n_wins, rate.n_ties, rate.n_losses)
        rows.append((name, *counts, f"{rate.value:.3f}", ends, equal))
    header = ("against", "n", "won", "tied", "lost", "win rate", "95 %", "at equal length")
    return table(header, rows)


def draw(report: StudentReport, path: Path) -> Path:
    """Draw training, scores and win rates."""
    margins = {"left": 0.05, "right": 0.98, "top": 0.9, "bottom": 0.13, "wspace": 0.22}
    figure = plots.new_figure(15, 4.6, **margins)
    course, scores, rates = figure.subplots(1, 3)
    course.set(title="Training", xlabel="step", ylabel="nats per token")
    for name, label, colour in (
        ("kl", "KL at tau", plots.BLUE),
        ("hard", "cross-entropy", plots.ORANGE),
    ):
        points = [(step, values[name]) for step, values in report.history if name in values]
        plots.draw_curve(course, points, label, colour)
    scores.set(
        title="Reward-model scores of held-out responses",
        xlabel="score (training s.d.)",
        ylabel="responses",
    )
    columns = {
        f"{name}, mean {figures.score:+.2f}": (figures.scores, _COLOURS[name])
        for name, figures in report.models.items()
    }
    plots.draw_histograms(scores, columns, histtype="step")
    rates.axhline(0.5, color="black", linewidth=0.8)
    for place, (name, rate) in enumerate(report.win_rates.items()):
        rates.bar(place, rate.value, color=_COLOURS[name], width=0.5)
        ends = (rate.interval.low, rate.interval.high)
        plots.draw_intervals(rates, [place], [rate.value], [ends], color="black")
    rates.set_xticks(range(len(report.against)), [f"against the {name}" for name in report.against])
    rates.set(title="Win rate of the student", ylim=(0.0, 1.0))
    for axes in (course, scores):
        plots.add_legend(axes, fontsize="small")
    return plots.save(figure, path)


# Measures a student beside its teacher and its base on held-out prompts and responses.

# Labels per token that the agreement is computed from; a small vocabulary is used whole.
AGREEMENT_LABELS = 64
_SMALL_VOCABULARY = 1024
_COMPARED = "compared"
_JUDGE = "the reward model"
_BATCH_SIZE = 512


@dataclass(frozen=True)
class _Spoken:
    replies: list[Reply]
    seconds: float
    scores: Tensor

    @property
    def tokens(self) -> list[int]:
        return [len(reply.row.response_ids) for reply in self.replies]


@dataclass(frozen=True)
class StudentOutcome:
    """Measures.

    Args:
        session: holds the student under its own role.
        renderer: of all models.
        reward_model: judges.
        dirs: model directories by `STUDENT` (merged), `TEACHER` and `BASE`.
        adapter_dir: of the student.
        seed: of the sampling.
    """

    session: Session
    renderer: Renderer
    reward_model: RewardModelCheckpoint
    dirs: dict[str, Path]
    adapter_dir: Path
    seed: int

    def report(
        self, held_out: Responses, n_prompts: int, max_new_tokens: int, history: History
    ) -> StudentReport:
        """Return the report on prompts and chosen responses that nothing was trained on."""
        pairs = one_pair_per_prompt(held_out.pairs, n_prompts)
        scorer = RewardScorer.load(self.session, self.reward_model)
        spoken = {n: self._speak(d, pairs, scorer, max_new_tokens) for n, d in self.dirs.items()}
        chosen = held_out.first(n_prompts).rows[0::2]
        perplexity = {STUDENT: self._perplexity(STUDENT, chosen)}
        agreement = self._load_teacher_and_agree(spoken[TEACHER])
        perplexity[TEACHER] = self._perplexity(_COMPARED, chosen)
        self.session.load(RoleSpec(_COMPARED, "language_model", str(self.dirs[BASE])))
        perplexity[BASE] = self._perplexity(_COMPARED, chosen)
        models = {n: self._figures(n, spoken[n], perplexity[n]) for n in self.dirs}
        return StudentReport(
            models,
            agreement,
            {n: self._compare(pairs, spoken[STUDENT], spoken[n]) for n in (BASE, TEACHER)},
            adapter_parameters(self.adapter_dir),
            _weight_bytes(self.adapter_dir, adapter=True),
            history,
        )

    def _speak(
        self, model_dir: Path, pairs: Sequence[Pair], scorer: RewardScorer, max_new_tokens: int
    ) -> _Spoken:
        how = GenerationConfig(
            temperature=1.0, max_new_tokens=max_new_tokens, batch_size=_BATCH_SIZE
        )
        speaker = Speaker(model_dir, self.renderer, self.session.runtime)
        begin = time.perf_counter()
        replies = speaker.reply([pair.prompt for pair in pairs], how, self.seed)
        seconds = time.perf_counter() - begin
        return _Spoken(replies, seconds, scorer.score([reply.row for reply in replies]).total)

    def _perplexity(self, role: str, rows: Sequence[Row]) -> float:
        logprobs = torch.cat(self.session.logprobs(role, rows)).double()
        return math.exp(-float(logprobs.mean()))

    def _load_teacher_and_agree(self, teacher: _Spoken) -> Agreement:
        """Return how the student differs from the teacher on what the teacher said."""
        vocabulary = self.renderer.vocab_size
        k = vocabulary if vocabulary <= _SMALL_VOCABULARY else AGREEMENT_LABELS
        rows = [reply.row for reply in teacher.replies]
        self.session.load(RoleSpec(_COMPARED, "language_model", str(self.dirs[TEACHER])))
        labels = self.session.read_tokens(_COMPARED, rows, TopKReader(k, 1.0, vocabulary))
        columns = {
            # The tail follows from the others.
            TEACHER_LOGPROBS: [values[:, :-1] for values in labels[TEACHER_LOGPROBS]],
            TEACHER_IDS: labels[TEACHER_IDS],
        }
        found = self.session.read_tokens(STUDENT, rows, AgreementReader(vocabulary), columns)
        response = np.repeat(np.arange(len(rows)), [len(row.response_ids) for row in rows])
        kl = clustered_mean(torch.cat(found["kl"])[:, 0].numpy(), response)
        same = torch.cat(found["same_top"])
        return Agreement(kl, k, k == vocabulary, float(same.mean()))

    def _figures(self, name: str, spoken: _Spoken, perplexity: float) -> ModelFigures:
        return ModelFigures(
            parameters=n_parameters(self.dirs[name]),
            size_bytes=_weight_bytes(self.dirs[name]),
            scores=spoken.scores.tolist(),
            response_tokens=sum(spoken.tokens) / len(spoken.tokens),
            seconds=spoken.seconds,
            tokens=sum(spoken.tokens),
            perplexity=perplexity,
        )

    def _compare(self, pairs: Sequence[Pair], student: _Spoken, other: _Spoken) -> HeldOut:
        responses = [
            ResponsePair(
                prompt_id=pair.prompt_id,
                prompt=prompt_text(pair.prompt),
                base_response=other.replies[i].text,
                policy_response=student.replies[i].text,
                base_score=float(other.scores[i]),
                policy_score=float(student.scores[i]),
                base_tokens=other.tokens[i],
                policy_tokens=student.tokens[i],
                subset=pair.subset,
            )
            for i, pair in enumerate(pairs)
        ]
        return compare_pairs(responses, _JUDGE, Bootstrap(seed=self.seed))


def _weight_bytes(directory: Path, adapter: bool = False) -> int:
    files = [directory / "adapter_model.safetensors"] if adapter else list_weight_files(directory)
    return sum(file.stat().st_size for file in files)


# Model cards of a student: what it is made of, whom it learned from, how good it is, and under
# which licences.

CARD_NAME: Final = "README.md"
UNKNOWN: Final = "unknown"
_LICENSE_LINE: Final = re.compile(r"^license:\s*[\"']?([\w.-]+)[\"']?\s*$", re.MULTILINE)

Form = Literal["adapter", "merged"]


@dataclass(frozen=True)
class CardFacts:
    """What both cards of a student say.

    Args:
        base: name of the model that is adapted, as a hub id where there is one.
        base_license, data_license, license: as the hub names them; `UNKNOWN` where nobody says.
        data: where the preference pairs come from.
        teacher: artefact of the teacher.
        settings: of the distillation, in words.
        lineage: rows of name, kind, fingerprint and MLflow run, the student first.
        metrics: by name.
        summary: sentences about the student; empty without a report.
    """

    base: str
    base_license: str
    data: Sequence[str]
    data_license: str
    license: str
    teacher: str
    settings: Mapping[str, str]
    lineage: Sequence[tuple[str, str, str, str]]
    metrics: Mapping[str, float]
    summary: Sequence[str] = ()


def render_student_card(facts: CardFacts, form: Form) -> str:
    """Return the card of the adapter or of the merged model, as the hub reads it."""
    what = "LoRA adapter" if form == "adapter" else "Merged model"
    use = (
        "Load it with `peft.PeftModel.from_pretrained(base_model, directory)`."
        if form == "adapter"
        else "Load it with `transformers.AutoModelForCausalLM.from_pretrained(directory)`."
    )
    return join(
        [
            _front_matter(facts, form),
            f"# {what} of a distilled student",
            f"Base model: {cell(facts.base)}. Teacher: {cell(facts.teacher)}. {use}",
            *map(cell, facts.summary),
            "## Training",
            table(("setting", "value"), [(cell(n), cell(v)) for n, v in facts.settings.items()]),
            "## Data",
            *[f"- {cell(name)}" for name in facts.data],
            "## Licences",
            table(
                ("of", "licence"),
                [
                    ("this model", cell(facts.license)),
                    ("base model", cell(facts.base_license)),
                    ("data", cell(facts.data_license)),
                ],
            ),
            "## Metrics",
            table(("metric", "value"), [(cell(n), f"{v:.6g}") for n, v in facts.metrics.items()]),
            "## Lineage",
            table(
                ("artefact", "kind", "fingerprint", "MLflow run"),
                [tuple(map(cell, row)) for row in facts.lineage],
            ),
        ]
    )


def _front_matter(facts: CardFacts, form: Form) -> str:
    """Return the YAML block that the hub reads; JSON values are YAML."""
    known = facts.license != UNKNOWN
    fields: dict[str, Any] = {
        "base_model": facts.base,
        "base_model_relation": "adapter" if form == "adapter" else "finetune",
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "license": facts.license if known else "other",
        **({} if known else {"license_name": UNKNOWN}),
        "datasets": [name for name in facts.data if re.fullmatch(r"[\w.-]+/[\w.-]+", name)],
        "tags": ["rlhf-flows", "distillation", *(["lora"] if form == "adapter" else [])],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value != []]
    return "\n".join(["---", *lines, "---"])


def write_cards(facts: CardFacts, directories: Mapping[Form, Path]) -> None:
    """Write a card into each directory, in place of what a library left there."""
    for form, directory in directories.items():
        (directory / CARD_NAME).write_text(render_student_card(facts, form), encoding="utf-8")


def licenses_of(cfg: ModelCardConfig, base_dir: Path) -> dict[str, str]:
    """Return the licence fields: as configured, the base's else as its own card says it."""
    return {
        "license": cfg.license or UNKNOWN,
        "base_license": cfg.base_license or _license_in(base_dir / CARD_NAME) or UNKNOWN,
        "data_license": cfg.data_license or UNKNOWN,
    }


def _license_in(card: Path) -> str | None:
    """Return the licence that a model's card names in its front matter."""
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    head = text.split("---", 2)
    found = _LICENSE_LINE.search(head[1]) if text.startswith("---") and len(head) == 3 else None
    return None if found is None else found[1]


def base_name(base: Manifest, student_source: ParentRef | None) -> str:
    """Return what the student's base is called: a hub id or package where it is one."""
    source = student_source or base.parents.get("model")
    if source is not None:
        return _short(source.path)
    return f"built by stage {base.stage} ({base.fingerprint[:12]})"


def _short(path: str) -> str:
    """Return a hub id as it is, and of a path its last part: a card travels, the path does not."""
    return Path(path).name if Path(path).is_absolute() else path


def data_names(preferences: Manifest) -> list[str]:
    """Return where the pairs come from, named as the ingestion's config and sources name them."""
    names = [
        _short(ref.path)
        for name, ref in preferences.parents.items()
        if name.split(".")[0] == "source" and ref.kind != "model"
    ]
    return names or [str(preferences.config.get("source", UNKNOWN))]


def lineage_rows(parents: Mapping[str, ParentRef]) -> list[tuple[str, str, str, str]]:
    """Return one row per artefact or raw source behind a student, each once."""
    rows: dict[str, tuple[str, str, str, str]] = {}
    waiting = list(parents.items())
    while waiting:
        name, ref = waiting.pop(0)
        if ref.fingerprint in rows:
            continue
        rows[ref.fingerprint] = (name, ref.kind, ref.fingerprint[:16], ref.mlflow_run_id or "")
        waiting += _parents_of(ref)
    return list(rows.values())


def _parents_of(ref: ParentRef) -> list[tuple[str, ParentRef]]:
    """Return what an artefact was made from; nothing for a raw source or one that is gone."""
    try:
        return list(read_manifest(standing_path(ref)).parents.items())
    except (MissingInputError, ArtifactError):
        return []
