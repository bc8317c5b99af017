"""What `rlhf reproduce` does: run a stage again as it was recorded, and compare the bits."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.services.prefect_server import (
    prepare_environment,
    start_prefect_api,
    termination_as_interrupt,
)
from flows.stages import STAGE_SPECS
from tasks.artifacts import (
    MANIFEST_NAME,
    Artifact,
    Manifest,
    file_sha256,
    likeness,
    load_artifact,
    read_manifest,
    standing_path,
)
from tasks.config.messages import problems_of
from tasks.config.shared import STAGES, Stage, StageConfig, TrackingConfig
from tasks.errors import ArtifactError, ConfigError, DataError, MissingInputError
from tasks.pipeline_config import PipelineConfig
from tasks.tracking.comparison import find_run
from tasks.tracking.lineage import recorded_manifest
from tasks.tracking.mlflow import PIPELINE, REPRODUCTIONS, RunRecord, Tracker, connect
from tasks.workspace import HOME_VARIABLE, Workspace, git_commit, machine, package_versions

# As the hub's client, the package index's wheels and the questions are named in the cache.
_DOWNLOADS = ("models--*", "datasets--*", "packages", "questions-*")


FileStatus = Literal["equal", "equal but for times", "different", "missing", "new"]
# When something happened, and how long it took, is no result.
_TIME: Final = re.compile(
    r"\b(tstamp|seconds|(\w+_)?tokens_per_second|time_share_\w+|tokens a second)\b"
)
_JSON: Final = (".json", ".jsonl")
_PAGES: Final = (".md", ".html")
UNKNOWN: Final = "unknown"


class Difference(BaseModel):
    """One thing that was not the same."""

    name: str
    first: str
    repeat: str


class Reproduction(BaseModel):
    """A repeat beside the first run.

    Args:
        repeat_path: where the repeat's artefact lies; None when it was removed.
        files: status of every payload file.
        metrics: figures of the manifest that differ.
        environment: packages, code and device that differ.
        notes: what could not be compared.
    """

    run_id: str
    stage: str
    repeat_run_id: str | None
    repeat_path: str | None
    files: dict[str, FileStatus]
    metrics: list[Difference]
    environment: list[Difference]
    notes: list[str] = []

    @property
    def is_equal(self) -> bool:
        """Whether every file has the same bits, times aside, and every figure is the same."""
        same = ("equal", "equal but for times")
        return all(status in same for status in self.files.values()) and not self.metrics


def compare_files(
    first: Manifest, repeat: Manifest, first_dir: Path, repeat_dir: Path
) -> dict[str, FileStatus]:
    """Return the status of every payload file, by the hashes of both manifests.

    JSON files and pages with other hashes are read, where the first artefact is still there, to see
    whether only their times differ, and the id of the run that a page says it is of.
    """
    statuses: dict[str, FileStatus] = {}
    for name in sorted({*first.files, *repeat.files}):
        ours, theirs = first.files.get(name), repeat.files.get(name)
        if ours is None or theirs is None:
            statuses[name] = "new" if ours is None else "missing"
        elif ours.sha256 == theirs.sha256:
            statuses[name] = "equal"
        elif name.endswith(_JSON + _PAGES) and (first_dir / name).is_file():
            before = _timeless(first_dir / name, first.mlflow_run_id)
            is_same = before == _timeless(repeat_dir / name, repeat.mlflow_run_id)
            statuses[name] = "equal but for times" if is_same else "different"
        else:
            statuses[name] = "different"
    return statuses


def _timeless(path: Path, run_id: str | None) -> list[Any]:
    """Return the content of a JSON file or a page without what says when, how fast or which run."""
    text = path.read_text(encoding="utf-8")
    if run_id:
        text = text.replace(run_id, "this run")
    if path.suffix in _PAGES:
        # Markdown escapes the underscores of a name.
        return [line for line in text.splitlines() if not _TIME.search(line.replace("\\", ""))]
    parts = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [_without_times(json.loads(part)) for part in parts if part.strip()]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not _TIME.fullmatch(k)}
    if isinstance(value, list):
        sentences = [e for e in value if not (isinstance(e, str) and _TIME.search(e))]
        return [_without_times(entry) for entry in sentences]
    return value


def compare_figures(first: Manifest, repeat: Manifest) -> list[Difference]:
    """Return the metrics and counts that differ, times aside."""
    ours = _without_times({**first.metrics, **first.counts})
    theirs = _without_times({**repeat.metrics, **repeat.counts})
    return differences(
        {name: repr(value) for name, value in ours.items()},
        {name: repr(value) for name, value in theirs.items()},
    )


def differences(first: Mapping[str, str], repeat: Mapping[str, str]) -> list[Difference]:
    """Return the entries that are not the same on both sides."""
    names = sorted({*first, *repeat})
    pairs = [(name, first.get(name, UNKNOWN), repeat.get(name, UNKNOWN)) for name in names]
    return [Difference(name=n, first=a, repeat=b) for n, a, b in pairs if a != b]


@dataclass(frozen=True)
class _Recorded:
    """A run as it was recorded, checked to be repeatable.

    Args:
        refs: path of each upstream artefact by name, filled in by the check.
        notes: which of these were made again since.
    """

    run: RunRecord
    stage: Stage
    manifest: Manifest
    cfg: StageConfig
    refs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def reproduce(
    ref: str, tracking: TrackingConfig, *, is_kept: bool = False, is_debug: bool = False
) -> Reproduction:
    """Repeat a stage from its recorded config, parents and seed, and compare the results.

    The repeat has a workspace and an MLflow experiment of its own: no cache of the first run
    answers for it, and it is nobody's `latest` or candidate.

    Args:
        ref: a stage's run.
        is_kept: keep the repeat's files when they are equal, too.

    Raises:
        MissingInputError: no such run or parent.
        DataError: a raw file has changed since.
        ConfigError: a run of another kind, or a config that this version does not know.
    """
    workspace = Workspace.from_environment()
    workspace.prepare()
    tracker = connect(tracking, workspace)
    recorded = _read(tracker, find_run(tracker, ref), ref)
    _check_parents(tracker, recorded)
    repeats = tracking.model_copy(
        update={
            "experiment": tracking.experiment + REPRODUCTIONS,
            "tracking_uri": tracker.tracking_uri,
        }
    )
    # Opened from here, so that its artifacts do not lie in the repeat's workspace.
    connect(repeats, workspace)
    prepare_environment(workspace, is_debug=is_debug)
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    home = workspace.root / "reproductions" / f"{recorded.stage}-{recorded.run.run_id[:8]}-{stamp}"
    try:
        _share_downloads(workspace, Workspace(home))
        with termination_as_interrupt():
            path = _repeat(recorded, repeats, workspace, home)
        found = _compare(recorded, path)
    except BaseException:
        # Another attempt would start anew, elsewhere.
        if not is_kept:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if found.is_equal and not is_kept:
        shutil.rmtree(home)
        found = found.model_copy(update={"repeat_path": None})
    _record(tracker, found)
    return found


def _read(tracker: Tracker, run: RunRecord, ref: str) -> _Recorded:
    if run.stage == PIPELINE:
        raise ConfigError(
            f"Reference {ref!r}: run {run.run_id} is a chain's",
            "the run of one stage",
            "`rlhf lineage` lists the runs of its stages; repeat them one by one",
        )
    if run.stage not in STAGES or run.status != "FINISHED":
        raise MissingInputError(
            f"Reference {ref!r}: run {run.run_id} of {run.stage or 'no stage'} is {run.status}",
            "a FINISHED run of a stage",
            "give another reference",
        )
    stage = next(known for known in STAGES if known == run.stage)
    manifest = _manifest(tracker, run)
    section: Any = PipelineConfig.model_fields[stage].annotation
    try:
        cfg: StageConfig = section.model_validate(manifest.config)
    except ValidationError as error:
        raise ConfigError(
            f"The config of run {run.run_id} is not one of this version: {problems_of(error)}",
            "fields that this version knows",
            f"check out the commit of the run, {manifest.git_commit or 'which is not recorded'}",
        ) from error
    return _Recorded(run, stage, manifest, cfg)


def _manifest(tracker: Tracker, run: RunRecord) -> Manifest:
    """Return a run's manifest, from its artefact or else from the copy that MLflow has."""
    with suppress(MissingInputError, ArtifactError):
        kept = read_manifest(Path(run.tags.get("artifact.path", "")))
        if kept.fingerprint == run.tags.get("fingerprint"):
            return kept
    found = recorded_manifest(tracker, run.run_id)
    if found is None:
        raise MissingInputError(
            f"The artefact of run {run.run_id} is gone, and MLflow has no copy of {MANIFEST_NAME}",
            "one of them",
            "give another run",
        )
    return found


def _check_parents(tracker: Tracker, recorded: _Recorded) -> None:
    """Refuse parents and raw files that are not what the first run read.

    What was deleted and made again with the same fingerprint will do, and is noted.
    """
    parents = recorded.manifest.parents
    for name in STAGE_SPECS[recorded.stage].inputs:
        if name not in parents:
            raise MissingInputError(
                f"Run {recorded.run.run_id} records no {name}", "one", "give another run"
            )
        found = _parent(recorded, name)
        recorded.refs[name] = str(found.path)
        if str(found.path) != parents[name].path:
            like = likeness(recorded_manifest(tracker, parents[name].mlflow_run_id), found.manifest)
            recorded.notes.append(f"{name} was deleted and made again, {like}: {found.path}")
    for name, parent in parents.items():
        path = Path(parent.path)
        if parent.kind == "file" and path.exists() and file_sha256(path) != parent.fingerprint:
            raise DataError(
                f"{name}: {path} has changed since run {recorded.run.run_id}",
                f"SHA-256 {parent.fingerprint[:12]}...",
                "restore the file",
            )


def _parent(recorded: _Recorded, name: str) -> Artifact:
    """Return an upstream artefact, verified."""
    parent = recorded.manifest.parents[name]
    try:
        found = load_artifact(standing_path(parent), STAGE_SPECS[recorded.stage].inputs[name].kind)
    except (MissingInputError, ArtifactError) as error:
        again = f"`rlhf reproduce {parent.mlflow_run_id} --keep`" if parent.mlflow_run_id else ""
        raise type(error)(
            f"The {name} of run {recorded.run.run_id} cannot be used: {error.found}",
            "the artefact that it was made from",
            f"restore {parent.path}" + (f"; {again} makes it again elsewhere" if again else ""),
        ) from error
    if found.fingerprint != parent.fingerprint:
        raise ArtifactError(
            f"{parent.path} now holds {found.fingerprint[:12]}",
            parent.fingerprint[:12],
            "restore it",
        )
    return found


def _repeat(
    recorded: _Recorded, tracking: TrackingConfig, workspace: Workspace, home: Path
) -> Path:
    """Run the stage in a workspace of its own; return the path of what it made."""
    server = start_prefect_api(workspace)
    from flows.chain import cluster_closed
    from flows.cli.run import server_settings
    from flows.rlhf_pipeline import STAGE_FLOWS
    from flows.stages import RunOptions

    if server is not None:
        server.wait_ready()
    options = RunOptions(tracking=tracking)
    with server_settings(server), _home(home), cluster_closed():
        made = STAGE_FLOWS[recorded.stage](recorded.cfg, **recorded.refs, options=options)
    return Path(made)


def _share_downloads(workspace: Workspace, repeats: Workspace) -> None:
    """Let the repeat find what was downloaded; what was computed it shall compute again."""
    repeats.cache_dir.mkdir(parents=True)
    for pattern in _DOWNLOADS:
        for path in workspace.cache_dir.glob(pattern):
            (repeats.cache_dir / path.name).symlink_to(path)


@contextmanager
def _home(path: Path) -> Iterator[None]:
    before = os.environ.get(HOME_VARIABLE)
    os.environ[HOME_VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[HOME_VARIABLE]
        else:
            os.environ[HOME_VARIABLE] = before


def _compare(recorded: _Recorded, path: Path) -> Reproduction:
    first, repeat = recorded.manifest, read_manifest(path)
    first_dir = Path(recorded.run.tags.get("artifact.path", ""))
    notes = list(recorded.notes)
    if not first_dir.is_dir():
        notes.append(f"{first_dir} is gone: files were compared by their recorded hashes")
    if first.fingerprint != repeat.fingerprint:
        notes.append("the fingerprint differs: a raw source or the code version of the stage does")
    if (first.git_commit or "").endswith("-dirty"):
        notes.append(f"the first run's code had changes that {first.git_commit} does not have")
    return Reproduction(
        run_id=recorded.run.run_id,
        stage=recorded.stage,
        repeat_run_id=repeat.mlflow_run_id,
        repeat_path=str(path),
        files=compare_files(first, repeat, first_dir, path),
        metrics=compare_figures(first, repeat),
        environment=differences(_environment(recorded), _environment_now()),
        notes=notes,
    )


def _environment(recorded: _Recorded) -> dict[str, str]:
    tags = recorded.run.tags
    kept = {name: tags.get(name, UNKNOWN) for name in machine()}
    code = {"git commit": recorded.manifest.git_commit or UNKNOWN}
    return {**recorded.manifest.package_versions, **kept, **code}


def _environment_now() -> dict[str, str]:
    return {**package_versions(), **machine(), "git commit": git_commit() or UNKNOWN}


def _record(tracker: Tracker, found: Reproduction) -> None:
    """Note on the first run that it was repeated, and how that ended."""
    verdict = "equal" if found.is_equal else "different"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    tracker.set_tags(
        found.run_id,
        {"reproduced": f"{verdict}, {when}", "reproduced.run_id": found.repeat_run_id or UNKNOWN},
    )
    name = f"reproductions/{found.repeat_run_id}.json"
    tracker.log_text(found.run_id, found.model_dump_json(indent=2), name)


def print_reproduction(console: Console, found: Reproduction) -> None:
    """Print the verdict, and all that differs."""
    odd = {name: status for name, status in found.files.items() if status != "equal"}
    verdict = "equal, bit for bit" if found.is_equal and not odd else "equal but for times"
    said = verdict if found.is_equal else "different"
    text = f"Run {found.run_id} of {found.stage} and its repeat are {said}: "
    console.print(
        text + f"{len(found.files) - len(odd)} of {len(found.files)} files have the same bits.",
        style="green" if found.is_equal else "red",
        highlight=False,
    )
    _print_table(console, "files", [(name, status, "") for name, status in odd.items()])
    for title, kept in (("figures", found.metrics), ("environment", found.environment)):
        _print_table(console, title, [(d.name, d.first, d.repeat) for d in kept])
    for note in found.notes:
        console.print(Text(f"Note: {note}."))
    if found.repeat_path is not None:
        console.print(Text(f"The repeat: {found.repeat_path}"), soft_wrap=True)


def _print_table(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    if rows:
        table = Table("", "first run", "repeat", title=title, title_justify="left", box=SIMPLE)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
