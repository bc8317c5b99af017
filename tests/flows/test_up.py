"""`rlhf up` as a user has it: servers, a worker, runs from the API, schedules, kills.

Everything is real and in processes of its own. The tests share one workspace and run in order.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_client import CHAIN, FINAL, ROOT, SERVICES, Services, wait_for

from tasks.config.shared import STAGES

pytestmark = pytest.mark.endurance

# Long enough to be killed in the middle of sft; checkpoints come every second or so.
CONFIG = """\
extends: {small_chain}
name: services
sft:
  max_steps: 300
  checkpoint: {{save_every_steps: 20}}
"""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A workspace in which everything runs."""
    directory = tmp_path_factory.mktemp("up")
    config = directory / "config.yaml"
    config.write_text(CONFIG.format(small_chain=ROOT / "tests" / "small_chain.yaml"))
    with Services(directory / "home", config).running() as made:
        yield made


def _deep(run: dict[str, Any]) -> tuple[str, str]:
    return run["tags"]["stage"], run["status"]


def test_everything_runs_and_a_second_up_changes_nothing(services: Services) -> None:
    pids = {name: services.pid(name) for name in SERVICES}
    text = services.up()
    assert {name: services.pid(name) for name in pids} == pids
    assert services.api.removesuffix("/api") in text and services.mlflow in text
    assert "rlhf-pipeline/nightly" in text and "evaluate/champion-weekly" in text
    status = services.rlhf("status")
    assert status.count("running") == 3
    assert "nothing" not in status


def test_other_port_and_taken_port_are_told(services: Services, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        text = services.rlhf("up", "--prefect-port", port, code=2)
        assert f"prefect runs already on port {services.prefect_port}" in text
        other = Services(tmp_path / "other", services.config)
        text = other.rlhf("up", "--prefect-port", port, code=1)
        assert f"Port {port} for prefect cannot be used" in text and "--prefect-port" in text
        assert "did not run" in other.rlhf("down")
        assert "stopped" in other.rlhf("status")


def test_stage_with_changed_parameters_stands_beside_the_first(services: Services) -> None:
    """Two runs of one stage from the API; the second gives one field, the preset has the rest."""
    services.completed(services.run("ingest/ingest"))
    services.completed(services.run("ingest/ingest", cfg={"demo": {"n_pairs": 120}}))
    runs = services.mlflow_runs("tags.stage = 'ingest'")
    assert [run["status"] for run in runs] == ["FINISHED", "FINISHED"]
    assert [run["params"]["demo.n_pairs"] for run in runs] == ["120", "200"]
    # The preset's, not the default 0.1.
    assert {run["params"]["test_share"] for run in runs} == {"0.2"}
    assert {run["tags"]["stage"] for run in services.mlflow_runs("")} == {"ingest"}
    # Back to Prefect, and from there to MLflow.
    flow_run = runs[0]["tags"]["prefect.flow_run_id"]
    assert f"/runs/flow-run/{flow_run})" in runs[0]["tags"]["mlflow.note.content"]
    kept = services.post("artifacts/filter", {"artifacts": {"key": {"any_": ["ingest-mlflow"]}}})
    assert any(runs[0]["id"] in str(one["data"]) for one in kept)


def test_command_uses_the_servers_that_run(services: Services) -> None:
    text = services.rlhf("run", str(services.config), "--only", "ingest")
    assert f"Prefect UI: {services.api.removesuffix('/api')}" in text
    newest = services.mlflow_runs("tags.stage = 'ingest'")[0]
    run = services.flow_run(newest["tags"]["prefect.flow_run_id"])
    assert run["state"]["type"] == "COMPLETED"


def test_schedule_fires(services: Services) -> None:
    deployment = services.deployment("ingest/ingest")["id"]
    schedule = {"schedule": {"interval": 20}, "active": True, "slug": "test"}
    (made,) = services.post(f"deployments/{deployment}/schedules", [schedule])
    scheduled = {
        "flow_runs": {
            "deployment_id": {"any_": [deployment]},
            "state": {"type": {"any_": ["COMPLETED"]}},
            "tags": {"all_": ["auto-scheduled"]},
        }
    }
    try:
        wait_for(lambda: bool(services.post("flow_runs/filter", scheduled)), 180)
    finally:
        import httpx

        httpx.delete(f"{services.api}/deployments/{deployment}/schedules/{made['id']}")
    first = services.post("flow_runs/filter", scheduled)[0]
    assert first["auto_scheduled"]
    runs = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{first['id']}'")
    assert [_deep(run) for run in runs] == [("ingest", "FINISHED")]


def _reference(services: Services) -> dict[str, dict[str, float]]:
    """Run the chain without any harm; return its last metrics by stage."""
    run_id = services.run(CHAIN, cfg={"reuse": False})
    services.completed(run_id)
    return _results(services, run_id)


@pytest.fixture(scope="module")
def reference(services: Services) -> dict[str, dict[str, float]]:
    return _reference(services)


def _pipeline(services: Services, run_id: str) -> dict[str, Any]:
    chains = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{run_id}'")
    (chain,) = [run for run in chains if run["tags"]["stage"] == "pipeline"]
    return chain


def _members(services: Services, run_id: str) -> list[dict[str, Any]]:
    chain = _pipeline(services, run_id)
    return services.mlflow_runs(f"tags.`pipeline.run_id` = '{chain['id']}'")


def _results(services: Services, run_id: str) -> dict[str, dict[str, float]]:
    """Return of each stage's finished run in a chain what it says about the result."""
    assert _pipeline(services, run_id)["status"] == "FINISHED"
    finished = [run for run in _members(services, run_id) if run["status"] == "FINISHED"]
    assert sorted(run["tags"]["stage"] for run in finished) == sorted(STAGES)
    return {
        run["tags"]["stage"]: {
            name: value
            for name, value in run["metrics"].items()
            if name.startswith("summary/") and "second" not in name and "time_share" not in name
        }
        for run in finished
    }


def test_chain_shows_its_summary_and_its_workers_lines(
    services: Services, reference: dict[str, dict[str, float]]
) -> None:
    assert sorted(reference) == sorted(STAGES)
    keys = {"artifacts": {"key": {"any_": ["rlhf-pipeline-summary"]}}}
    (page,) = services.post("artifacts/filter", keys)
    assert "No student has the alias `champion` yet." in page["data"]
    wait_for(lambda: any("role actor is" in line for line in services.log_lines("sft")), 30)
    progress = {"artifacts": {"type": {"any_": ["progress"]}}}
    keys_seen = {one["key"] for one in services.post("artifacts/filter", progress)}
    assert keys_seen == {f"{stage.replace('_', '-')}-progress" for stage in STAGES}


def _champion(services: Services) -> dict[str, Any]:
    """Point the alias at the candidate, as MLflow's registry page does; return its version."""
    import httpx

    url = f"{services.mlflow}/api/2.0/mlflow/registered-models/alias"
    name = {"name": "rlhf-flows-student"}
    found = httpx.get(url, params={**name, "alias": "candidate"}, timeout=30)
    version: dict[str, Any] = found.raise_for_status().json()["model_version"]
    body = {**name, "alias": "champion", "version": version["version"]}
    httpx.post(url, json=body, timeout=30).raise_for_status()
    return version


def test_champion_is_evaluated_with_what_it_was_made_from(
    services: Services, reference: dict[str, dict[str, float]]
) -> None:
    weekly = "evaluate/champion-weekly"
    run_id = services.run(weekly)
    assert services.wait(run_id) == "FAILED"
    assert "champion" in services.flow_run(run_id)["state"]["message"]
    champion = _champion(services)
    run_id = services.run(weekly)
    services.completed(run_id)
    (run,) = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{run_id}'")
    assert run["tags"]["upstream.student.run_id"] == champion["run_id"]
    scores = {name: float(value) for name, value in reference["evaluate"].items()}
    assert {name: run["metrics"][name] for name in scores} == scores


def _checkpoints(services: Services) -> set[Path]:
    """Return what sft has written and not needed yet."""
    return set((services.home / "checkpoints" / "sft").glob("*/step*"))


def _need_dataset(services: Services) -> None:
    if not services.mlflow_runs("tags.stage = 'ingest' and attributes.status = 'FINISHED'"):
        services.completed(services.run("ingest/ingest"))


def _start_training(services: Services, deployment: str = CHAIN, **cfg: Any) -> str:
    services.wait_idle()
    if deployment != CHAIN:
        _need_dataset(services)
    earlier = _checkpoints(services)
    run_id = services.run(deployment, cfg={"reuse": False, **cfg} if deployment == CHAIN else cfg)

    def state() -> str:
        return str(services.flow_run(run_id)["state"]["type"])

    wait_for(lambda: bool(_checkpoints(services) - earlier) or state() in FINAL, 240, state)
    assert _checkpoints(services) - earlier, state()
    return run_id


def _no_ray_left(services: Services) -> None:
    wait_for(
        lambda: not services.processes("raylet") and not services.processes("gcs_server"),
        60,
        lambda: str(services.processes("ray")),
    )


def _kill_flow(services: Services) -> None:
    services.kill(services.flow_process().pid)


def _kill_worker(services: Services) -> None:
    services.kill(services.pid("worker"))


def _kill_mlflow(services: Services) -> None:
    services.kill(services.pid("mlflow"))


def _kill_prefect(services: Services) -> None:
    services.kill(services.pid("prefect"))


def _kill_ray_worker(services: Services) -> None:
    (actor,) = services.processes("ray::", "RoleHost")
    services.kill(actor.pid)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kill", [_kill_flow, _kill_ray_worker, _kill_worker, _kill_mlflow, _kill_prefect]
)
def test_killed_chain_completes_with_the_same_result(
    services: Services,
    reference: dict[str, dict[str, float]],
    kill: Callable[[Services], None],
) -> None:
    """SIGKILL in the middle of sft, `rlhf up`, and a retry where the run did not get through."""
    run_id = _start_training(services)
    kill(services)
    services.up()
    kind = services.wait(run_id, 300)
    if kind != "COMPLETED":
        _no_ray_left(services)
        services.retry(run_id)
        services.completed(run_id)
    assert _results(services, run_id) == reference
    assert "failure" not in _pipeline(services, run_id)["tags"]
    _nothing_twice(services, run_id)
    assert not _checkpoints(services)  # what was finished needs none


def _nothing_twice(services: Services, run_id: str) -> None:
    """Every step stands once in a run, and a run that continued one starts after its checkpoint."""
    wait_for(lambda: all(r["status"] != "RUNNING" for r in _members(services, run_id)), 30)
    steps: list[list[int]] = []
    for run in reversed(_members(services, run_id)):
        if run["tags"]["stage"] == "sft":
            steps.append([step for step, _ in services.history(run["id"], "loss")])
    assert all(len(found) == len(set(found)) for found in steps)
    assert steps[-1][-1] == 300
    if len(steps) > 1:
        assert steps[-1][0] > 20, "it began anew instead of continuing from a checkpoint"
    ran = [run["tags"]["stage"] for run in _members(services, run_id)]
    assert all(ran.count(stage) == 1 for stage in STAGES if stage != "sft"), ran


def test_cancelled_run_is_killed_in_mlflow_and_frees_the_slot(services: Services) -> None:
    run_id = _start_training(services, "sft/sft", seed=5)
    services.set_state(run_id, "CANCELLING")
    assert services.wait(run_id, 120) == "CANCELLED"
    (run,) = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{run_id}'")
    assert run["status"] == "KILLED"
    assert run["tags"]["failure"]
    _no_ray_left(services)
    services.completed(services.run("ingest/ingest"), 60)


def test_timeout_ends_the_run_and_frees_the_slot(services: Services) -> None:
    _need_dataset(services)
    endless = {"seed": 6, "max_steps": 1_000_000, "epochs": 1_000_000.0}
    run_id = services.run("sft/sft", cfg=endless, options={"timeout_seconds": 40})
    assert services.wait(run_id, 180) == "FAILED"
    (run,) = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{run_id}'")
    assert run["status"] == "FAILED"
    assert "took longer than its timeout of 40 s" in run["tags"]["failure"]
    _no_ray_left(services)
    services.completed(services.run("ingest/ingest"), 60)


@pytest.mark.timeout(900)
def test_worker_that_dies_with_its_flow_is_noticed(services: Services) -> None:
    """Nobody is left to say that the run is dead: the automation does."""
    run_id = _start_training(services, "sft/sft", seed=7)
    # The first heartbeat has to have arrived; it is sent when the run starts.
    flow = services.flow_process()
    services.kill(services.pid("worker"))
    services.kill(flow.pid)
    started = time.monotonic()
    assert services.wait(run_id, 240) == "CRASHED"
    assert time.monotonic() - started < 200
    assert "No heartbeat" in services.flow_run(run_id)["state"]["message"]
    text = services.rlhf("status", code=1)
    assert "died" in text
    services.up()
    services.completed(services.run("ingest/ingest"), 60)
    # The next run of the stage says what became of the dead one.
    services.completed(services.run("sft/sft", cfg={"seed": 7}))
    (dead,) = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{run_id}'")
    assert dead["status"] == "KILLED"


def test_down_ends_a_run_and_everything_that_was_started(services: Services) -> None:
    run_id = _start_training(services, "sft/sft", seed=8)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        before = services.processes()
        assert len(before) > 5
        services.rlhf("down")
        assert services.processes() == []
        assert not [one for one in before if one.is_running()]
        assert bystander.poll() is None
        assert services.rlhf("status").count("stopped") == 3
        services.up()
        assert services.flow_run(run_id)["state"]["type"] in ("CRASHED", "FAILED", "CANCELLED")
        (run,) = services.mlflow_runs(f"tags.`prefect.flow_run_id` = '{run_id}'")
        assert run["status"] == "KILLED"
    finally:
        bystander.kill()
        bystander.wait()
