"""An ablation to look at: a table, a Markdown page, a plot, and all of it as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from tasks.algorithms.seed_statistics import SeedMean
from tasks.config_ablation import BASE, TEACHER, label_of
from tasks.data.ablation_report import (
    ENTROPY,
    GOOD_RATE,
    KL,
    LENGTH,
    SHARE,
    WIN_RATE,
    AblationReport,
    AblationRun,
    MethodResult,
)
from tasks.data.markdown import cell, table

JSON_NAME: Final = "ablation.json"
_HEADLINES: Final = {GOOD_RATE: "good answers", WIN_RATE: "win rate"}
_MARKERS: Final = "osD^v<>Ph*Xdp"
_DPI: Final = 120


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
    first = report.methods[0].name
    headline = _HEADLINES[report.headline]
    rows = []
    for method in report.methods:
        rows.append(
            {
                "method": method.name,
                headline: shown(method.figures.get(report.headline)),
                f"less {first}": shown(method.difference, "+.3f"),
                **_share(report, method.figures),
                **_beside(method.figures),
                "seeds": f"{_seeds(method)} of {len(report.config.seeds)}",
                "chosen setting": _chosen(method),
            }
        )
    seeds = {"seeds": str(len(report.config.seeds)), "chosen setting": ""}
    references = {BASE: report.base} | ({TEACHER: report.teacher} if report.teacher else {})
    return rows + [
        {"method": name, headline: shown(figures.get(report.headline)), f"less {first}": ""}
        | _share(report, {})
        | _beside(figures)
        | seeds
        for name, figures in references.items()
    ]


def _share(report: AblationReport, figures: dict[str, SeedMean]) -> dict[str, str]:
    """Return the column that only students have."""
    return {"of the teacher's": shown(figures.get(SHARE))} if report.teacher else {}


def _beside(figures: dict[str, SeedMean]) -> dict[str, str]:
    return {
        "KL per token": shown(figures.get(KL)),
        "entropy": shown(figures.get(ENTROPY)),
        "tokens": shown(figures.get(LENGTH), ".1f"),
    }


def _seeds(method: MethodResult) -> int:
    return sum(run.failure is None for run in method.runs)


def _chosen(method: MethodResult) -> str:
    if method.setting is None:
        return "none trained"
    setting = method.grid[method.setting]
    short = {name.rpartition(".")[2]: value for name, value in setting.items()}
    label = label_of(short if len(short) == len(setting) else setting)
    return f"{label} ({method.setting + 1} of {len(method.grid)})"


def shown(figure: SeedMean | None, form: str = ".3f") -> str:
    """Return mean and standard error as text."""
    if figure is None:
        return ""
    error = figure.standard_error
    return f"{figure.mean:{form}}" + ("" if error is None else f" +- {error:{form.lstrip('+')}}")


def render_page(report: AblationReport) -> str:
    """Return the comparison as Markdown."""
    cfg = report.config
    rows = result_rows(report)
    parts = [
        f"# {cell(report.name)}",
        f"Measured: {report.judge}, sampled at temperature 1, mean and standard error over seeds "
        f"{_list(cfg.seeds)}, at most {cfg.test_prompts} test prompts a seed. The difference is "
        "taken within each seed. The KL is that to the base, in nats.",
        table(list(rows[0]), [[cell(value) for value in row.values()] for row in rows]),
        "## Tuning",
        f"{cfg.n_settings} settings a method on seeds {_list(cfg.tuning_seeds)}, at most "
        f"{cfg.tuning_prompts} validation prompts a seed; the best mean is chosen.",
        _tuning_table(report),
    ]
    failures = [run for method in report.methods for run in method.failures]
    if failures:
        parts += ["## Runs without a policy", *(f"- {_failure(run)}" for run in failures)]
    methods = [f"- {cell(m.name)}: {cell(label_of(m.overrides))}" for m in report.methods]
    return "\n\n".join([*parts, "## Methods", "\n".join(methods)]) + "\n"


def _list(seeds: tuple[int, ...]) -> str:
    return ", ".join(map(str, seeds))


def _failure(run: AblationRun) -> str:
    where = f"{run.method}, setting {run.setting + 1}, seed {run.seed} ({run.split})"
    return f"{where}: {cell(run.failure or '')}"


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
    figure = Figure(figsize=(10, 6))
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
    axes.set_xlabel("KL from the base, nats per token")
    axes.set_ylabel(report.judge)
    axes.set_title("Large: test prompts. Small: settings on validation prompts.", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    figure.subplots_adjust(left=0.08, right=0.78, top=0.93, bottom=0.1)
    figure.savefig(path, dpi=_DPI)


def _draw_figures(
    axes: Any, figures: dict[str, SeedMean], headline: str, label: str, style: dict[str, Any]
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
