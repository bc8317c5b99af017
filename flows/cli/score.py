"""What `rlhf score` does: adds the reward model's scores to a file of pairs or responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from jinja2 import TemplateError
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from flows.cli.shared import open_tracker, plain, say
from flows.services.prefect_server import prepare_environment, termination_as_interrupt
from tasks.artifacts import RewardModelCheckpoint
from tasks.config.loading import NOT_YAML, merge
from tasks.config.messages import message_of
from tasks.config.shared import RenderingConfig, RuntimeConfig, TrackingConfig, check_budget
from tasks.errors import ConfigError, DataError
from tasks.reward_model.score_files import (
    ERROR_FIELD,
    Added,
    FileRow,
    Kind,
    ScoreFile,
    ScoreTally,
    check_output,
    default_output,
    open_score_file,
    rewardbench_sections,
    write_scored,
)
from tasks.tracking.run_log import ProgressDisplay
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.algorithms.calibration import Accuracy
    from tasks.data.rendering import Renderer
    from tasks.runtime.rows import Row
    from tasks.runtime.scoring import RewardScorer, RewardScores


_ROWS_PER_CHUNK: Final = 512
_SIDES: Final = ("chosen", "rejected")


@dataclass(frozen=True)
class Scored:
    """What was written.

    Args:
        reward_model: path of the artefact.
    """

    output: Path
    kind: Kind
    reward_model: Path
    tally: ScoreTally

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "output": str(self.output),
            "kind": self.kind,
            "reward_model": str(self.reward_model),
            **self.tally.as_json(),
        }


def score_alone(
    file: Path,
    reward_model: str,
    output: Path | None,
    overrides: Sequence[str],
    tracking: TrackingConfig,
    is_debug: bool,
) -> Scored:
    """Score a file, as `score_file` does, in a process of its own: Ray is started and ended."""
    prepare_environment(Workspace.from_environment(), is_debug=is_debug)
    with termination_as_interrupt():
        from tasks.runtime.session import cluster_session

        with cluster_session():
            return score_file(file, reward_model, output, overrides, tracking)


def score_file(
    file: Path,
    reward_model: str,
    output: Path | None,
    overrides: Sequence[str],
    tracking: TrackingConfig,
) -> Scored:
    """Write the rows of a file with their scores.

    Args:
        reward_model: ``latest``, ``runs:/<id>``, ``models:/<name>@<alias>`` or a path.
        output: a .jsonl or .parquet file; None is beside the input.
        overrides: ``runtime.key=value`` with a YAML value, over what the model was trained with.

    Raises:
        RlhfError: a file, reference or setting that cannot be used, before anything is scored; or
            scores that are not finite.
    """
    output = output or default_output(file)
    check_output(output, file)
    source = open_score_file(file)
    from tasks.tracking.lineage import resolve_reference

    tracker = open_tracker(tracking)
    checkpoint = resolve_reference(tracker, reward_model, "reward_model", RewardModelCheckpoint)
    rendering = RenderingConfig.model_validate(checkpoint.manifest.config["rendering"])
    recorded = RuntimeConfig.model_validate(checkpoint.manifest.config["runtime"])
    runtime = overridden(recorded, overrides)
    try:
        check_budget(rendering, runtime, rows=1)
    except ValueError as error:
        raise ConfigError(
            str(error), "", "raise it with -o runtime.tokens_per_micro_batch=..."
        ) from error
    renderer = _renderer(checkpoint, rendering)

    from tasks.runtime.scoring import RewardScorer
    from tasks.runtime.session import open_session

    scorer = RewardScorer.load(open_session(runtime), checkpoint)
    tally = ScoreTally()
    display = ProgressDisplay("score")
    try:
        write_scored(output, source, _scored_rows(source, renderer, scorer, tally, display))
    finally:
        display.close()
    return Scored(output, source.kind, checkpoint.path, tally)


def _renderer(checkpoint: RewardModelCheckpoint, rendering: RenderingConfig) -> Renderer:
    from tasks.data.rendering import Renderer

    renderer = Renderer.load(checkpoint.model_dir, rendering)
    if checkpoint.manifest.renderer_fingerprint is not None:
        renderer.check_same(checkpoint.manifest.renderer_fingerprint, "the reward model")
    return renderer


def overridden(recorded: RuntimeConfig, overrides: Sequence[str]) -> RuntimeConfig:
    """Return the runtime with ``runtime.key=value`` laid on top.

    Raises:
        ConfigError: another section (limits and model are the artefact's), an unknown key, or a
            value that does not fit.
    """
    tree = recorded.model_dump(mode="json")
    for override in overrides:
        name, separator, text = override.partition("=")
        section, _, key = name.strip().partition(".")
        if section != "runtime" or not key or not separator:
            raise ConfigError(
                f"-o {override} does not change the runtime",
                "-o runtime.key=value; all else is the reward model's own",
                "write for instance -o runtime.device=cpu",
            )
        try:
            tree = merge(tree, {key: yaml.safe_load(text)})
            RuntimeConfig.model_validate(tree)
        # A validation error is a ValueError, too.
        except NOT_YAML as error:
            known = ", ".join(RuntimeConfig.model_fields)
            raise ConfigError(
                f"-o {override} cannot be used: {_first_line(error)}",
                f"one of {known}",
                "correct it",
            ) from error
    return RuntimeConfig.model_validate(tree)


def _first_line(error: Exception) -> str:
    return message_of(error.errors()[0]) if isinstance(error, ValidationError) else "it is not YAML"


def _scored_rows(
    file: ScoreFile,
    renderer: Renderer,
    scorer: RewardScorer,
    tally: ScoreTally,
    display: ProgressDisplay,
) -> Iterator[tuple[FileRow, Added]]:
    """Score the rows chunk by chunk, in order, and count them."""
    rows = file.rows()
    display.update(0, file.n_rows)
    while chunk := list(itertools.islice(rows, _ROWS_PER_CHUNK)):
        rendered = [_rendered(row, renderer, tally) for row in chunk]
        flat = [one for found in rendered if not isinstance(found, str) for one in found]
        scores = scorer.score(flat)
        start = 0
        for row, found in zip(chunk, rendered, strict=True):
            tally.rows += 1
            if isinstance(found, str):
                tally.refuse(found)
                yield row, _added(file.kind, scores, None, found)
                continue
            added = _added(file.kind, scores, start, None)
            start += len(found)
            _count(row, added, tally)
            yield row, added
        display.update(tally.rows, file.n_rows, f"{tally.scored:,} scored")


def _rendered(row: FileRow, renderer: Renderer, tally: ScoreTally) -> list[Row] | str:
    """Return the token rows of a file row, or why there are none."""
    from tasks.data.rendering import ResponseTooLong
    from tasks.runtime.rows import Row

    if row.error is not None:
        return row.error
    try:
        answers = [renderer.response_ids(one.response) for one in row.conversations]
        prompt, shortened = renderer.prompt_ids(row.conversations[0].prompt)
    except ResponseTooLong as error:
        return f"too_long: {error.found}, the limit is {renderer.limits.max_response_tokens}"
    except DataError as error:
        refused = isinstance(error.__cause__, TemplateError)
        return f"{'template_refused' if refused else 'prompt_too_long'}: {error.found}"
    tally.shortened += shortened > 0
    tally.truncated += sum(cut for _, cut in answers)
    return [Row(prompt, ids) for ids, _ in answers]


def _added(kind: Kind, scores: RewardScores, place: int | None, error: str | None) -> Added:
    """Return the fields of one row; ``place`` is that of its first score, None for nulls."""
    names = ("score",) if kind == "responses" else tuple(f"{side}_score" for side in _SIDES)
    values: dict[str, float | str | None] = {}
    for offset, name in enumerate(names):
        at = None if place is None else place + offset
        values[name] = None if at is None else float(scores.total[at])
        values[f"{name}_raw"] = None if at is None else float(scores.raw[at])
        values |= _components(name, scores, at)
    if kind == "pairs":
        chosen, rejected = values["chosen_score"], values["rejected_score"]
        known = isinstance(chosen, float) and isinstance(rejected, float)
        values["margin"] = chosen - rejected if known else None  # type: ignore[operator]
    values[ERROR_FIELD] = error
    return values


def _components(name: str, scores: RewardScores, at: int | None) -> dict[str, float | None]:
    """Return the disagreement of the members, and each component where there are several."""
    values: dict[str, Tensor] = {}
    if scores.disagreement is not None:
        values[f"{name.removesuffix('_score')}_disagreement"] = scores.disagreement
    if len(scores.components) > 1:
        values |= {f"{name}_{key}": found.total for key, found in scores.components.items()}
    return {key: None if at is None else float(found[at]) for key, found in values.items()}


def _count(row: FileRow, added: Added, tally: ScoreTally) -> None:
    margin, score = added.get("margin"), added.get("score")
    if isinstance(margin, float):
        tally.margins.append((row.subset, margin))
    elif isinstance(score, float):
        tally.scores.append(score)


def print_scored(console: Console, scored: Scored) -> None:
    """Print counts, accuracy with its interval, by subset where there are subsets."""
    tally = scored.tally

    say(console, f"{scored.output}: {tally.rows:,} rows, {tally.scored:,} scored.")
    if tally.errors:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in tally.errors.most_common())
        say(console, f"Without a score (null, the reason in {ERROR_FIELD}): {reasons}.")
    if tally.shortened:
        say(console, f"{tally.shortened:,} prompts lost their oldest turns to the length limit.")
    if tally.truncated:
        say(console, f"{tally.truncated:,} responses were cut at the length limit.")
    overall, spread = tally.accuracy(), tally.score_spread()
    if overall is not None:
        console.print(_accuracy_table(overall, tally.subsets()))
    if spread is not None:
        say(console, f"Score: mean {spread[0]:.3f}, standard deviation {spread[1]:.3f}.")
    say(console, "Scores are in standard deviations of the reward model's training scores.")


def _accuracy_table(overall: Accuracy, subsets: dict[str, Accuracy]) -> Table:
    title = "Chosen scores higher (ties count half)"
    table = Table("pairs", "n", "ties", "accuracy", "95 %", title=title, title_justify="left")
    for name, found in [*subsets.items(), ("all", overall)]:
        interval = f"{found.low:.3f} to {found.high:.3f}"
        table.add_row(plain(name), str(found.n), str(found.n_ties), f"{found.value:.3f}", interval)
    for section, value in rewardbench_sections(subsets).items():
        table.add_row(f"RewardBench: {section}", "", "", f"{value:.3f}", "")
    return table
