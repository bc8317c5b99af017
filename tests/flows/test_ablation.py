"""An ablation as a user starts it: real Prefect, MLflow, Ray and verl, on the small chain."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from rich.console import Console

from flows.ablation import ABLATION, rlhf_ablation
from flows.cli.run import RunRequest, print_ablation, run
from flows.outcomes import monitored
from tasks.ablation.config import MethodConfig
from tasks.ablation.report import AblationReport, AblationRun, Measurement, read_ablation
from tasks.config.loading import load_config
from tasks.errors import ConfigError
from tasks.pipeline_config import PipelineConfig
from tasks.tracking.lineage import lineage_tree
from tasks.tracking.mlflow import RunRecord, Tracker, connect
from tasks.workspace import Workspace

pytestmark = pytest.mark.long
CONFIG = Path(__file__).parent / "small_ablation.yaml"


@dataclass(frozen=True)
class Done:
    """A finished ablation and where it worked."""

    cfg: PipelineConfig
    workspace: Workspace
    tracker: Tracker
    report: AblationReport

    def parents(self) -> list[RunRecord]:
        """Its MLflow runs, newest first."""
        return self.tracker.find_runs({"stage": ABLATION})


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
    empty_mlflow_db: Path,
    prefect_server: None,
    cluster: None,
) -> Iterator[Done]:
    """The small ablation, run once."""
    root = tmp_path_factory.mktemp("ablation") / "home"
    root.mkdir()
    shutil.copy(empty_mlflow_db, root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(root))
        patch.chdir(CONFIG.parents[2])
        cfg = load_config(CONFIG)
        workspace = Workspace.from_environment()
        path = Path(rlhf_ablation(cfg))
        yield Done(cfg, workspace, connect(cfg.tracking, workspace), read_ablation(path.parent))


def _measurement(run: AblationRun) -> Measurement:
    assert run.measurement is not None
    return Measurement.model_validate(json.loads(Path(run.measurement).read_text())["measurement"])


def _rate(found: Measurement) -> float:
    assert found.good_rate is not None, "the demo world has an oracle"
    return found.good_rate


def _wins(policy: Measurement, base: Measurement) -> float:
    pairs = list(zip(policy.scores, base.scores, strict=True))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


def test_the_table_follows_from_the_stored_measurements(done: Done) -> None:
    ppo, oracle = done.report.methods
    assert done.report.headline == "good_rate"
    rates = {}
    for method in (ppo, oracle):
        assert [run.seed for run in method.runs] == [0, 1]
        stored = [_measurement(run) for run in method.runs]
        assert all(len(found.scores) == 24 for found in stored)
        rates[method.name] = [_rate(found) for found in stored]
        for name in ("good_rate", "kl_per_token", "entropy", "length_tokens"):
            first, second = (getattr(found, name) for found in stored)
            figure = method.figures[name]
            assert figure.mean == pytest.approx((first + second) / 2)
            # Of two values the standard deviation is |a - b| / sqrt 2, its error |a - b| / 2.
            assert figure.standard_error == pytest.approx(abs(first - second) / 2)
    gaps = [b - a for a, b in zip(rates["ppo"], rates["oracle"], strict=True)]
    assert ppo.difference is None and oracle.difference is not None
    assert oracle.difference.mean == pytest.approx(sum(gaps) / 2)
    assert oracle.difference.standard_error == pytest.approx(abs(gaps[0] - gaps[1]) / 2)
    bases = [_measurement(run) for run in done.report.base_runs]
    for method in (ppo, oracle):
        wins = [
            _wins(_measurement(run), base) for run, base in zip(method.runs, bases, strict=True)
        ]
        assert min(wins) > 0.0 and method.figures["win_rate"].mean == pytest.approx(sum(wins) / 2)
    assert done.report.base["kl_per_token"].mean == 0.0
    assert done.report.base["win_rate"].mean == 0.5


def test_the_best_setting_on_validation_prompts_is_chosen(done: Done) -> None:
    for method in done.report.methods:
        assert [(run.setting, run.seed) for run in method.tuning] == [(0, 0), (1, 0)]
        stored = [_measurement(run) for run in method.tuning]
        assert {found.split for found in stored} == {"validation"}
        ranks = [(found.good_rate, -found.kl_per_token) for found in stored]
        assert method.setting == ranks.index(max(ranks))
        assert all(run.setting == method.setting and run.split == "test" for run in method.runs)
        assert all(math.isfinite(value) for run in method.runs for value in run.figures.values())
    # The larger learning rate moves the policy further.
    near, far = (run.figures["kl_per_token"] for run in done.report.methods[0].tuning)
    assert abs(near) < abs(far)


def test_policies_are_runs_of_the_stage_that_tags_find(done: Done) -> None:
    parent = done.parents()[0]
    assert parent.status == "FINISHED"
    mine = {"ablation.run_id": parent.run_id}
    children = done.tracker.find_runs(mine, "FINISHED")
    # Four settings on seed 0, of which the chosen two are measured again, and two on seed 1.
    assert len(children) == 6
    assert {run.stage for run in children} == {"offline_ppo"}
    assert {run.tags["mlflow.parentRunId"] for run in children} == {parent.run_id}
    label = "optimizer.learning_rate=0.01"
    wanted = mine | {"ablation.method": "oracle", "ablation.seed": "0", "ablation.setting": label}
    found = done.tracker.find_runs(wanted)
    assert [run.run_id for run in found] == [done.report.methods[1].tuning[1].mlflow_run_id]
    tree = lineage_tree(done.tracker, found[0].tags["artifact.path"])
    assert tree.broken == []
    assert any(node.path.endswith("demo_oracle.py") for node in tree.walk())


def test_the_result_is_in_mlflow_and_prefect_and_printed(done: Done) -> None:
    client_files = {path.name for path in (done.workspace.root / ABLATION).iterdir()}
    assert client_files == {"ablation.json", "ablation.md", "ablation.png"}
    logged = done.workspace.mlflow_artifacts_dir / done.parents()[-1].run_id / "artifacts"
    assert client_files <= {path.name for path in logged.iterdir()}
    with get_client(sync_client=True) as client:
        for key in ("ablation-result", "ablation-page"):
            named = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
            assert client.read_artifacts(artifact_filter=named)
    console = Console(record=True, width=200)
    with monitored() as monitor:
        print_ablation(console, done.workspace, monitor)
    text = console.export_text()
    rate = done.report.methods[0].figures["good_rate"]
    assert f"{rate.mean:.3f} +- {rate.standard_error:.3f}" in text
    assert "share of good answers by the demo's oracle" in text


def test_the_same_command_trains_and_measures_nothing(done: Done) -> None:
    stages = ("ingest", "sft", "reward_model", "offline_ppo")
    runs_before = {stage: len(done.tracker.find_runs({"stage": stage})) for stage in stages}
    measured_before = _files(done.workspace.cache_dir / ABLATION)
    again = read_ablation(Path(rlhf_ablation(done.cfg)).parent)
    assert again == done.report
    assert _files(done.workspace.cache_dir / ABLATION) == measured_before
    assert {s: len(done.tracker.find_runs({"stage": s})) for s in stages} == runs_before
    # The finished runs belong to the newest attempt.
    newest, first = done.parents()
    assert len(done.tracker.find_runs({"ablation.run_id": newest.run_id})) == 6
    assert done.tracker.find_runs({"ablation.run_id": first.run_id}) == []


def test_training_that_goes_wrong_is_a_result(done: Done, tmp_path: Path) -> None:
    file = tmp_path / "flat.py"
    file.write_text(
        "def reward_fn(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    )
    section = done.cfg.ablation
    assert section is not None
    grid = section.methods["ppo"].grid[:1]
    reward = {"reward.components": {"function": 1.0}, "reward.function_path": str(file)}
    methods = {"ppo": MethodConfig(grid=grid), "flat": MethodConfig(overrides=reward, grid=grid)}
    changed = section.model_copy(update={"methods": methods, "seeds": (0,)})
    path = rlhf_ablation(done.cfg.model_copy(update={"ablation": changed}))
    ppo, flat = read_ablation(Path(path).parent).methods
    assert ppo.tuning == done.report.methods[0].tuning[:1]
    assert (flat.setting, flat.runs, flat.figures, flat.difference) == (None, [], {}, None)
    assert ["rewards are equal" in (run.failure or "") for run in flat.failures] == [True]
    assert done.parents()[0].status == "FINISHED"


def _files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.mark.parametrize("option", [{"only": "sft"}, {"rerun_from": "sft"}])
def test_single_stages_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="an ablation runs the stages that it needs"):
        run(RunRequest(load_config(CONFIG), **option))  # type: ignore[arg-type]
