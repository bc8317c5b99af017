"""The student beside its teacher and its base: how alike, how good, how large, how fast."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from tasks.algorithms.resampling import ClusteredMean
from tasks.algorithms.win_rates import PlainWinRate
from tasks.data.markdown import cell, table
from tasks.data.policy_report import HeldOut
from tasks.data.policy_samples import write_response_pairs
from tasks.data.run_history import FILE_NAME, History, write_history

SCHEMA_VERSION: Final = 1
STUDENT: Final = "student"
TEACHER: Final = "teacher"
BASE: Final = "base"
_COLOURS: Final = {STUDENT: "#0072B2", TEACHER: "#D55E00", BASE: "#666666"}
_DPI: Final = 120
_BINS: Final = 30


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
        against_base, against_teacher: win rates by reward model, in which "policy" is the student
            and "base" the other one.
        adapter_parameters, adapter_bytes: of the adapter alone.
        history: metrics of the training by step.
    """

    models: Mapping[str, ModelFigures]
    agreement: Agreement
    against_base: HeldOut
    against_teacher: HeldOut
    adapter_parameters: int
    adapter_bytes: int
    history: History

    @property
    def win_rates(self) -> dict[str, PlainWinRate]:
        """Of the student, by whom it is compared with."""
        return {
            BASE: self.against_base.comparison.plain,
            TEACHER: self.against_teacher.comparison.plain,
        }

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

    def record(self) -> dict[str, Any]:
        """Return what ``report.json`` holds."""
        models = {
            name: {
                **{k: v for k, v in asdict(figures).items() if k != "scores"},
                "score": figures.score,
                "tokens_per_second": figures.tokens_per_second,
            }
            for name, figures in self.models.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": summarize(self),
            "n_prompts": len(self.models[STUDENT].scores),
            "judge": self.against_base.judge,
            "models": models,
            "adapter_parameters": self.adapter_parameters,
            "adapter_bytes": self.adapter_bytes,
            "agreement": asdict(self.agreement),
            "win_rates": {name: asdict(rate) for name, rate in self.win_rates.items()},
        }


def write_student_report(report: StudentReport, directory: Path) -> list[Path]:
    """Write ``report.json``, ``report.md``, both tables of responses, the training's history and
    the plots; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    record, page = directory / "report.json", directory / "report.md"
    record.write_text(json.dumps(report.record(), indent=2, allow_nan=False) + "\n")
    page.write_text(render(report), encoding="utf-8")
    pairs = [directory / f"against_{name}.parquet" for name in (BASE, TEACHER)]
    write_response_pairs(pairs[0], report.against_base.pairs)
    write_response_pairs(pairs[1], report.against_teacher.pairs)
    write_history(directory / FILE_NAME, report.history)
    return [record, page, *pairs, directory / FILE_NAME, draw(report, directory / "overview.png")]


def summarize(report: StudentReport) -> list[str]:
    """Return what was found in plain sentences."""
    student, teacher = report.models[STUDENT], report.models[TEACHER]
    agreement = report.agreement
    bound = "" if agreement.is_exact else f" (at least: {agreement.labels} tokens told apart)"
    return [
        f"The student prefers the teacher's token at {agreement.same_top:.1%} of the positions of "
        f"the teacher's responses; KL from it {_signed(agreement.kl)} nats per token{bound}",
        *(
            f"It wins {rate.value:.1%} of {rate.n} held-out prompts against the {name} (95 % "
            f"interval {rate.interval.low:.1%} to {rate.interval.high:.1%}), by "
            f"{report.against_base.judge}."
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
    return "\n\n".join(
        [
            f"# {first}",
            *rest,
            "![](overview.png)",
            "## Models",
            model_table(report),
            table(("speed", ""), _speed_rows(report)),
            "Scores are the reward model's, in standard deviations of its training scores. "
            "Perplexity is that of the chosen responses of the test split, per token. Speed is "
            "that of one batch of all prompts with transformers.",
            "## Win rates of the student",
            _rate_table(report),
        ]
    ) + ("\n")


def model_table(report: StudentReport) -> str:
    """Return the models side by side."""
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


def _speed_rows(report: StudentReport) -> list[tuple[str, str]]:
    return [
        (f"{name}, tokens a second", f"{figures.tokens_per_second:,.0f}")
        for name, figures in report.models.items()
    ]


def _rate_table(report: StudentReport) -> str:
    rows = []
    for name, held_out in ((BASE, report.against_base), (TEACHER, report.against_teacher)):
        rate, controlled = held_out.comparison.plain, held_out.comparison.length_controlled.known
        equal = "" if controlled is None else f"{controlled[0]:.3f}"
        interval = f"{rate.interval.low:.3f} to {rate.interval.high:.3f}"
        counts = (rate.n, rate.n_wins, rate.n_ties, rate.n_losses)
        rows.append((name, *map(str, counts), f"{rate.value:.3f}", interval, equal))
    header = ("against", "n", "won", "tied", "lost", "win rate", "95 %", "at equal length")
    return table(header, rows)


def _signed(mean: ClusteredMean) -> str:
    error = "" if mean.standard_error is None else f" ± {mean.standard_error:.4f}"
    return f"{mean.value:.4f}{error}"


def draw(report: StudentReport, path: Path) -> Path:
    """Draw training, scores and win rates."""
    figure = Figure(figsize=(15, 4.6))
    axes = figure.subplots(1, 3)
    # Fixed margins: a computed layout takes several times as long as the drawing.
    figure.subplots_adjust(left=0.05, right=0.98, top=0.9, bottom=0.13, wspace=0.22)
    _draw_course(axes[0], report.history)
    _draw_scores(axes[1], report.models)
    _draw_rates(axes[2], report.win_rates)
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_course(axes: Any, history: History) -> None:
    axes.set_title("Training")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    for name, label, colour in (
        ("kl", "KL at tau", _COLOURS[STUDENT]),
        ("hard", "cross-entropy", _COLOURS[TEACHER]),
    ):
        points = [(step, values[name]) for step, values in history if name in values]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=1.2)
    if axes.lines:
        axes.legend(fontsize="small")


def _draw_scores(axes: Any, models: Mapping[str, ModelFigures]) -> None:
    axes.set_title("Reward-model scores of held-out responses")
    axes.set_xlabel("score (training s.d.)")
    axes.set_ylabel("responses")
    every = [score for figures in models.values() for score in figures.scores]
    low, high = min(every), max(every)
    edges = [low + (high - low) * i / _BINS for i in range(_BINS + 1)] if high > low else _BINS
    for name, figures in models.items():
        label = f"{name}, mean {figures.score:+.2f}"
        axes.hist(figures.scores, bins=edges, histtype="step", label=label, color=_COLOURS[name])
    axes.legend(fontsize="small", loc="upper left")


def _draw_rates(axes: Any, rates: Mapping[str, PlainWinRate]) -> None:
    axes.set_title("Win rate of the student")
    axes.axhline(0.5, color="black", linewidth=0.8)
    for place, (name, rate) in enumerate(rates.items()):
        axes.bar(place, rate.value, color=_COLOURS[name], width=0.5)
        error = [[rate.value - rate.interval.low], [rate.interval.high - rate.value]]
        axes.errorbar(place, rate.value, yerr=error, color="black", capsize=4)
    axes.set_xticks(range(len(rates)), [f"against the {name}" for name in rates])
    axes.set_ylim(0.0, 1.0)
