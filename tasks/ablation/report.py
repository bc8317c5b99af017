"""What an ablation found: measurements, the choice of settings, figures over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from tasks.ablation.config import BASE, TEACHER, AblationConfig, label_of
from tasks.algorithms.statistics import SeedMean, paired_difference, seed_mean, win_credit
from tasks.errors import TrainingError
from tasks.report import plots
from tasks.report.page import cell, join, table, with_error

GOOD_RATE = "good_rate"
WIN_RATE = "win_rate"
KL = "kl_per_token"
ENTROPY = "entropy"
LENGTH = "length_tokens"
SHARE = "share_of_teacher"

Split = Literal["validation", "test"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Measurement(_Record):
    """A policy's sampled answers to fixed prompts.

    ``good_rate`` is the oracle's, None outside the demo world. ``scores`` are the reward model's,
    in standard deviations of its training scores, one per prompt. ``kl_per_token`` (k1) and
    ``kl_k3_per_token`` estimate the KL from the policy to the base in nats; ``entropy`` is in nats
    per token.
    """

    split: Split
    good_rate: float | None
    scores: list[float]
    kl_per_token: float
    kl_k3_per_token: float
    entropy: float
    length_tokens: float
    ended_share: float

    def figures(self, base: Measurement) -> dict[str, float]:
        """Return the figures of a table; the win rate is by reward model, against the base's
        answers to the same prompts, ties half."""
        credit = win_credit(self.scores, base.scores)
        found = {} if self.good_rate is None else {GOOD_RATE: self.good_rate}
        return found | {
            WIN_RATE: float(credit.mean()),
            KL: self.kl_per_token,
            ENTROPY: self.entropy,
            LENGTH: self.length_tokens,
        }


class AblationRun(_Record):
    """One policy, measured; or why there is none.

    Args:
        setting: index in the method's grid, from 0.
        policy: path of the artefact.
        measurement: file that the figures come from.
    """

    method: str
    setting: int
    seed: int
    split: Split
    figures: dict[str, float] = {}
    policy: str | None = None
    measurement: str | None = None
    mlflow_run_id: str | None = None
    failure: str | None = None


class MethodResult(_Record):
    """One method.

    Args:
        setting: index of the chosen setting; None where none of them trained.
        figures: of the chosen setting over the seeds, by name.
        difference: of the headline to the first method, paired by seed.
        tuning: every setting on the tuning seeds.
        runs: the chosen setting on the seeds.
    """

    name: str
    overrides: dict[str, JsonValue]
    grid: list[dict[str, JsonValue]]
    setting: int | None
    figures: dict[str, SeedMean]
    difference: SeedMean | None
    tuning: list[AblationRun]
    runs: list[AblationRun]

    @property
    def failures(self) -> list[AblationRun]:
        """Runs without a policy."""
        return [run for run in (*self.tuning, *self.runs) if run.failure is not None]


class AblationReport(_Record):
    """The comparison.

    Args:
        headline: `GOOD_RATE` where the data are the demo world's, else `WIN_RATE`.
        base: figures of the model that every method starts from, over the same seeds and prompts.
        base_runs: where they come from; nothing was trained there.
        teacher, teacher_runs: likewise of the policy that taught, where students are compared.
    """

    name: str
    headline: str
    config: AblationConfig
    base: dict[str, SeedMean]
    base_runs: list[AblationRun]
    methods: list[MethodResult]
    teacher: dict[str, SeedMean] = {}
    teacher_runs: list[AblationRun] = []

    @property
    def judge(self) -> str:
        """Say what the headline is."""
        if self.headline == GOOD_RATE:
            return "share of good answers by the demo's oracle"
        return "win rate against the base by the reward model"


def headline_of(runs: Sequence[AblationRun]) -> str:
    """Return which figure methods are compared by.

    Raises:
        TrainingError: no run has any.
    """
    measured = [run for run in runs if run.failure is None]
    if not measured:
        raise TrainingError(
            f"None of {len(runs)} runs of the ablation trained: "
            f"{runs[0].failure if runs else 'there was none'}",
            "one at least",
            "look at their MLflow runs",
        )
    return GOOD_RATE if GOOD_RATE in measured[0].figures else WIN_RATE


def choose_setting(tuning: Sequence[AblationRun], headline: str) -> int | None:
    """Return the setting with the best mean headline over the tuning seeds, of equals the one with
    the lowest KL; a setting that failed on a seed does not count."""
    by_setting: dict[int, list[AblationRun]] = {}
    for run in tuning:
        by_setting.setdefault(run.setting, []).append(run)
    ranks = {
        setting: (_mean(runs, headline), -_mean(runs, KL))
        for setting, runs in by_setting.items()
        if all(run.failure is None for run in runs)
    }
    return max(ranks, key=ranks.__getitem__) if ranks else None


def choose_settings(
    cfg: AblationConfig, tuning: Sequence[AblationRun], headline: str
) -> dict[str, int | None]:
    """Return the chosen setting of each method."""
    return {
        name: choose_setting([run for run in tuning if run.method == name], headline)
        for name in cfg.compared
    }


def _mean(runs: Sequence[AblationRun], figure: str) -> float:
    return seed_mean([run.figures[figure] for run in runs]).mean


def report_of(
    name: str,
    cfg: AblationConfig,
    tuning: Sequence[AblationRun],
    final: Sequence[AblationRun],
    base: Sequence[AblationRun],
    teacher: Sequence[AblationRun] = (),
) -> AblationReport:
    """Return the comparison.

    Args:
        tuning: all settings on the tuning seeds.
        final: the chosen settings on the seeds.
        base: the model that all start from, one run per seed.
        teacher: the students' teacher, one run per seed.
    """
    headline = headline_of(tuning)
    chosen = choose_settings(cfg, tuning, headline)
    reference = _by_seed(final, next(iter(cfg.compared)), headline)
    methods: list[MethodResult] = []
    for method, section in cfg.compared.items():
        runs = [run for run in final if run.method == method]
        mine = _by_seed(final, method, headline)
        methods.append(
            MethodResult(
                name=method,
                overrides=section.overrides,
                grid=list(section.grid),
                setting=chosen[method],
                figures=_over_seeds(runs),
                difference=paired_difference(mine, reference) if methods else None,
                tuning=[run for run in tuning if run.method == method],
                runs=runs,
            )
        )
    return AblationReport(
        name=name,
        headline=headline,
        config=cfg,
        base=_over_seeds(base),
        base_runs=list(base),
        methods=methods,
        teacher=_over_seeds(teacher),
        teacher_runs=list(teacher),
    )


def share_of(figures: Mapping[str, float], teacher: Mapping[str, float]) -> dict[str, float]:
    """Return what share of its teacher's headline a student reaches; nothing where that is 0."""
    name = GOOD_RATE if GOOD_RATE in figures else WIN_RATE
    return {SHARE: figures[name] / teacher[name]} if teacher[name] else {}


def _by_seed(runs: Sequence[AblationRun], method: str, figure: str) -> dict[int, float]:
    return {
        run.seed: run.figures[figure]
        for run in runs
        if run.method == method and run.failure is None
    }


def _over_seeds(runs: Sequence[AblationRun]) -> dict[str, SeedMean]:
    figures = [run.figures for run in runs if run.failure is None]
    names = figures[0] if figures else {}
    return {name: seed_mean([found[name] for found in figures]) for name in names}


# An ablation to look at: a table, a Markdown page, a plot, and all of it as JSON.

JSON_NAME: Final = "ablation.json"
_HEADLINES: Final = {GOOD_RATE: "good answers", WIN_RATE: "win rate"}
_MARKERS: Final = "osD^v<>Ph*Xdp"


def write_ablation(report: AblationReport, directory: Path) -> list[Path]:
    """Write ``ablation.json``, ``ablation.md`` and ``ablation.png``; return them."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / name for name in (JSON_NAME, "ablation.md", "ablation.png")]
    files[0].write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    files[1].write_text(render_page(report), encoding="utf-8")
    draw_plot(report, files[2])
    return files


def read_ablation(directory: Path) -> AblationReport:
    """Read what `write_ablation` wrote."""
    return AblationReport.model_validate_json((directory / JSON_NAME).read_text(encoding="utf-8"))


def result_rows(report: AblationReport) -> list[dict[str, str]]:
    """Return one row of text per method, and one for the base."""
    n_seeds = len(report.config.seeds)
    rows = []
    for method in report.methods:
        seeds = f"{sum(run.failure is None for run in method.runs)} of {n_seeds}"
        row = _result_row(report, method.name, method.figures, method.difference)
        rows.append(row | {"seeds": seeds, "chosen setting": _chosen(method)})
    references = {BASE: report.base} | ({TEACHER: report.teacher} if report.teacher else {})
    for name, figures in references.items():
        row = _result_row(report, name, figures, None)
        rows.append(row | {"seeds": str(n_seeds), "chosen setting": ""})
    return rows


def _result_row(
    report: AblationReport, name: str, figures: dict[str, SeedMean], difference: SeedMean | None
) -> dict[str, str]:
    # A column that only students have.
    share = {"of the teacher's": shown(figures.get(SHARE))} if report.teacher else {}
    return {
        "method": name,
        _HEADLINES[report.headline]: shown(figures.get(report.headline)),
        f"less {report.methods[0].name}": shown(difference, "+.3f"),
        **share,
        "KL per token": shown(figures.get(KL)),
        "entropy": shown(figures.get(ENTROPY)),
        "tokens": shown(figures.get(LENGTH), ".1f"),
    }


def _chosen(method: MethodResult) -> str:
    if method.setting is None:
        return "none trained"
    setting = method.grid[method.setting]
    short = {name.rpartition(".")[2]: value for name, value in setting.items()}
    label = label_of(short if len(short) == len(setting) else setting)
    return f"{label} ({method.setting + 1} of {len(method.grid)})"


def shown(figure: SeedMean | None, form: str = ".3f") -> str:
    """Return mean and standard error as text."""
    return "" if figure is None else with_error(figure.mean, figure.standard_error, form, "+-")


def render_page(report: AblationReport) -> str:
    """Return the comparison as Markdown."""
    cfg = report.config
    rows = result_rows(report)
    failures = [run for method in report.methods for run in method.failures]
    return join(
        [
            f"# {cell(report.name)}",
            f"Measured: {report.judge}, sampled at temperature 1, mean and standard error over "
            f"seeds {_list(cfg.seeds)}, at most {cfg.test_prompts} test prompts a seed. The "
            "difference is taken within each seed. The KL is that to the base, in nats.",
            table(list(rows[0]), [[cell(value) for value in row.values()] for row in rows]),
            "## Tuning",
            f"{cfg.n_settings} settings a method on seeds {_list(cfg.tuning_seeds)}, at most "
            f"{cfg.tuning_prompts} validation prompts a seed; the best mean is chosen.",
            _tuning_table(report),
            "## Runs without a policy" if failures else "",
            *(
                f"- {run.method}, setting {run.setting + 1}, seed {run.seed} ({run.split}): "
                + cell(run.failure or "")
                for run in failures
            ),
            "## Methods",
            "\n".join(f"- {cell(m.name)}: {cell(label_of(m.overrides))}" for m in report.methods),
        ]
    )


def _list(seeds: tuple[int, ...]) -> str:
    return ", ".join(map(str, seeds))


def _tuning_table(report: AblationReport) -> str:
    rows = []
    for method in report.methods:
        for run in method.tuning:
            found = [run.figures.get(name) for name in (report.headline, KL)]
            figures = ["" if value is None else f"{value:.3f}" for value in found]
            mark = "chosen" if run.setting == method.setting else ""
            label = cell(label_of(method.grid[run.setting]))
            rows.append([cell(method.name), label, run.seed, *figures, mark])
    return table(
        ["method", "setting", "seed", _HEADLINES[report.headline], "KL per token", ""], rows
    )


def draw_plot(report: AblationReport, path: Path) -> None:
    """Draw the headline against the KL: means over test seeds with their standard errors, and
    small each setting of the tuning."""
    figure = plots.new_figure(10, 6, left=0.08, right=0.78, top=0.93, bottom=0.1)
    axes = figure.subplots()
    for index, method in enumerate(report.methods):
        style: dict[str, Any] = {
            "color": f"C{index % 10}",
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        _draw_figures(axes, method.figures, report.headline, method.name, style)
        tried = [run.figures for run in method.tuning if run.failure is None]
        xs, ys = [f[KL] for f in tried], [f[report.headline] for f in tried]
        axes.scatter(xs, ys, s=12, alpha=0.35, **style)
    base_style = {"color": "black", "marker": "x"}
    _draw_figures(axes, report.base, report.headline, BASE, base_style)
    _draw_figures(axes, report.teacher, report.headline, TEACHER, base_style | {"marker": "*"})
    axes.set(xlabel="KL from the base, nats per token", ylabel=report.judge)
    axes.set_title("Large: test prompts. Small: settings on validation prompts.", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    plots.save(figure, path)


def _draw_figures(
    axes: plots.Axes, figures: dict[str, SeedMean], headline: str, label: str, style: dict[str, Any]
) -> None:
    if headline not in figures:
        return
    x, y = figures[KL], figures[headline]
    axes.errorbar(
        [x.mean],
        [y.mean],
        xerr=[x.standard_error or 0.0],
        yerr=[y.standard_error or 0.0],
        label=label,
        linestyle="",
        capsize=3,
        markersize=7,
        **style,
    )
