"""Plots of the policy's report: one figure with all of them, and each as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from matplotlib.figure import Figure

from tasks.data.policy_report import PolicyReport
from tasks.data.training_course import GuardEvent, TrainingCourse, guards_fired, summarize_weights

_BLUE: Final = "#0072B2"
_ORANGE: Final = "#D55E00"
_GREY: Final = "#666666"
_EVENT_COLOURS: Final = ("#CC79A7", "#009E73", "#A6761D", "#3A7CA5", "#7F3C8D", "#8C564B")
# The name of a firing starts at one of these heights, so that close ones do not cover each other.
_EVENT_HEIGHTS: Final = (0.98, 0.74, 0.5, 0.26)
# Firings of one rule closer than this share of the axis have one name.
_EVENT_GAP: Final = 0.03
# Below this many points each is marked, for a line of one point is not seen.
_MARKED_POINTS: Final = 40
_HISTOGRAM_BINS: Final = 40
_DPI: Final = 120

Draw = Callable[[Any, TrainingCourse], None]
Line = tuple[str, str, str]


def draw_plots(report: PolicyReport, directory: Path) -> list[Path]:
    """Write ``overview.png`` and one file for each plot; return them."""
    files = [directory / "overview.png"]
    overview = Figure(figsize=(18, 11))
    places = overview.subplots(2, 3).flat
    # Fixed margins: a computed layout takes several times as long as the drawing.
    overview.subplots_adjust(left=0.05, right=0.97, top=0.95, bottom=0.09, wspace=0.25, hspace=0.35)
    for name, draw in _PLOTS.items():
        draw(next(places), report.course)
        single = Figure(figsize=(8, 5.5))
        draw(single.subplots(), report.course)
        single.subplots_adjust(left=0.13, right=0.9, top=0.9, bottom=0.2)
        files.append(directory / f"{name}.png")
        single.savefig(files[-1], dpi=_DPI)
    overview.savefig(files[0], dpi=_DPI)
    return files


def _reward(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [
        (names.reward, "batch (stored responses)", _GREY),
        (names.probe_reward, "probe (own responses)", _BLUE),
    ]
    _draw_lines(axes, course, lines)
    _finish(axes, course, "Reward", "mean reward (training s.d.)")


def _kl(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [
        (names.kl_data, "data, weighted", _GREY),
        (names.kl_probe, "probe (own responses)", _BLUE),
    ]
    _draw_lines(axes, course, lines)
    _draw_bound(axes, course, names.kl_probe)
    _finish(axes, course, "KL from the base", "nats per token")


def _effective_sample_size(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [(names.ess_raw, "raw ratios", _GREY), (names.ess, "weights used", _BLUE)]
    _draw_lines(axes, course, lines)
    _draw_bound(axes, course, names.ess)
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, course, "Effective sample size", "share of the batch")


def _drift(axes: Any, course: TrainingCourse) -> None:
    names = course.names
    lines = [
        (names.chosen_drift, "chosen", _BLUE),
        (names.rejected_drift, "rejected", _ORANGE),
    ]
    axes.axhline(0.0, color="black", linewidth=0.8)
    _draw_lines(axes, course, lines)
    _finish(axes, course, "Log-probability against the base", "nats per response")


def _schedule(axes: Any, course: TrainingCourse) -> None:
    """Draw learning rate on the left axis and batch size on the right one."""
    names = course.names
    _draw_lines(axes, course, [(names.learning_rate, "learning rate", _BLUE)])
    steps, sizes = course.curve(names.batch)
    if steps:
        right = axes.twinx()
        right.plot(steps, sizes, color=_ORANGE, linewidth=1.2, drawstyle="steps-post")
        right.set_ylim(0, 1.15 * max(sizes) or 1.0)
        right.set_ylabel("prompts per step", color=_ORANGE)
        # The left axes lie on top: theirs are the legend and the names of firings.
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot([], [], color=_ORANGE, label="batch")
    _finish(axes, course, "Learning rate and batch", "learning rate")


def _weights(axes: Any, course: TrainingCourse) -> None:
    found = summarize_weights(course.final_weights)
    axes.set_title("Importance weights at the end")
    if found is None or course.final_weights is None:
        _say_missing(axes)
        return
    # Weights that are equal but for rounding have no width to be put into bins.
    edges = torch.linspace(0.0, max(1.05 * found.maximum, 1e-6), _HISTOGRAM_BINS + 1).tolist()
    values = course.final_weights.detach().cpu().double().tolist()
    axes.hist(values, bins=edges, color=_BLUE)
    axes.axvline(found.mean, color=_ORANGE, linestyle="--", label=f"mean {found.mean:.3g}")
    axes.set_yscale("log")
    axes.set_xlabel("weight")
    axes.set_ylabel("responses (logarithmic)")
    axes.set_title(
        f"Importance weights at the end\nESS {found.ess_share:.2f} of {found.n} responses, "
        f"{found.at_maximum_share:.0%} at the largest"
    )
    axes.legend(loc="upper right")


def _draw_lines(axes: Any, course: TrainingCourse, lines: Sequence[Line]) -> None:
    for metric, label, colour in lines:
        steps, values = course.curve(metric)
        if steps:
            marker = "o" if len(steps) < _MARKED_POINTS else None
            style = {"color": colour, "marker": marker, "markersize": 3, "linewidth": 1.2}
            axes.plot(steps, values, label=label, **style)


def _draw_bound(axes: Any, course: TrainingCourse, metric: str) -> None:
    bound = course.bounds.get(metric)
    if bound is not None:
        label = f"guard at {bound:g}"
        axes.axhline(bound, color=_ORANGE, linestyle="--", linewidth=1.0, label=label)


def _finish(axes: Any, course: TrainingCourse, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        # Below the axes, where it covers no curve and no name.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize="small")
    else:
        _say_missing(axes)
    _draw_events(axes, course.events)


def _say_missing(axes: Any) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_GREY)


def _draw_events(axes: Any, events: Sequence[GuardEvent]) -> None:
    """Draw each firing as a line in the colour of its rule, with the rule's name."""
    if not events:
        return
    rules = list(guards_fired(events))
    low, high = axes.get_xlim()
    span = max(high, max(event.step for event in events)) - min(low, events[0].step)
    named: dict[str, int] = {}
    n_names = 0
    for event in events:
        colour = _EVENT_COLOURS[rules.index(event.rule) % len(_EVENT_COLOURS)]
        axes.axvline(event.step, color=colour, linestyle=":", linewidth=1.2)
        if event.rule in named and event.step - named[event.rule] < _EVENT_GAP * span:
            continue
        named[event.rule] = event.step
        height = _EVENT_HEIGHTS[n_names % len(_EVENT_HEIGHTS)]
        n_names += 1
        axes.text(
            event.step,
            height,
            event.rule,
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="top",
            fontsize="x-small",
            color=colour,
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )


_PLOTS: Final[Mapping[str, Draw]] = {
    "reward": _reward,
    "kl": _kl,
    "effective_sample_size": _effective_sample_size,
    "weights": _weights,
    "logprob_drift": _drift,
    "schedule": _schedule,
}
