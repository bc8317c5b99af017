"""`rlhf status`, `down` and `up` where nothing runs, or what ran is dead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.services.prefect_server import required_api_url
from flows.services.records import SERVICES, ServiceRecord, directory_of, running_addresses
from flows.services.up import _port, read_status, states
from tasks.config.shared import TrackingConfig
from tasks.errors import ClusterError, ConfigError
from tasks.workspace import TRACKING_VARIABLE, Workspace

RUNNER = CliRunner()


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace that nothing was done in."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return Workspace.from_environment()


def _record(workspace: Workspace, name: str, pid: int, port: int | None) -> None:
    directory = directory_of(workspace)
    directory.mkdir(parents=True, exist_ok=True)
    record = ServiceRecord(name=name, pid=pid, started_at=1.0, port=port, log_path="x.log")
    (directory / f"{name}.json").write_text(record.model_dump_json())


def test_nothing_runs_and_nothing_is_made(empty: Workspace) -> None:
    status = read_status(empty, TrackingConfig())
    assert [one.state for one in status.services] == ["stopped"] * 3
    assert (status.runs, status.stale, status.is_broken) == ([], [], False)
    assert not (empty.root / "mlflow.db").exists()
    result = RUNNER.invoke(app, ["status"])
    assert result.exit_code == 0
    assert result.output.count("stopped") == 3


def test_what_died_is_told_with_its_log(empty: Workspace) -> None:
    # Process 1 is there, but it was not started at second 1.
    _record(empty, "mlflow", 1, 5000)
    (died,) = [one for one in states(empty) if one.name == "mlflow"]
    assert (died.state, died.url) == ("died", "http://127.0.0.1:5000")
    result = RUNNER.invoke(app, ["status", "--json"])
    assert result.exit_code == 1
    services = {one["name"]: one for one in json.loads(result.output)["services"]}
    assert set(services) == set(SERVICES)
    assert services["mlflow"]["log_path"].endswith("services/mlflow.log")
    result = RUNNER.invoke(app, ["down"])
    assert result.exit_code == 0
    assert "mlflow: did not run" in result.output
    assert [one.state for one in states(empty)] == ["stopped"] * 3


def test_torn_record_names_the_file_and_the_way_out(empty: Workspace) -> None:
    _record(empty, "mlflow", 1, 5001)
    file = directory_of(empty) / "mlflow.json"
    file.write_text(file.read_text()[:40])
    (torn,) = [one for one in states(empty) if one.name == "mlflow"]
    assert torn.state == "unknown"
    assert torn.note.startswith(f"{file} is torn") and "`rlhf down`" in torn.note
    result = RUNNER.invoke(app, ["status"])
    assert result.exit_code == 1 and torn.note in result.output
    # Another port than the clients' would be taken in silence.
    with pytest.raises(ConfigError, match=rf"port of mlflow is not known.*{file} is torn"):
        _port(empty, "mlflow", None)
    assert _port(empty, "mlflow", 5001) == 5001
    result = RUNNER.invoke(app, ["down"])
    assert f"{file} was torn and is removed: `rlhf up --mlflow-port PORT`" in result.output
    assert not file.exists()
    result = RUNNER.invoke(app, ["down"])
    assert "torn" not in result.output


def test_values_come_whole_in_a_pipe(empty: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    long = Workspace(empty.root / ("deep" * 30))
    monkeypatch.setenv("RLHF_HOME", str(long.root))
    _record(long, "mlflow", 1, 5000)
    lines = RUNNER.invoke(app, ["status"]).output.splitlines()
    (line,) = [line for line in lines if "mlflow" in line and "died" in line]
    assert f"{directory_of(long)}/mlflow.log" in line


def test_a_crashed_server_gets_its_port_again(empty: Workspace) -> None:
    assert _port(empty, "mlflow", None) == 5000
    _record(empty, "mlflow", 1, 5001)
    assert _port(empty, "mlflow", None) == 5001
    assert _port(empty, "mlflow", 5002) == 5002


def test_config_is_checked_before_anything_starts(empty: Workspace) -> None:
    result = RUNNER.invoke(app, ["up", "nowhere"])
    assert result.exit_code == 2
    assert "No config file nowhere" in result.output
    result = RUNNER.invoke(app, ["up", "--prefect-port", "0"])
    assert result.exit_code == 2
    assert "0 is no port" in result.output
    assert [one.state for one in states(empty)] == ["stopped"] * 3


def test_servers_are_used_only_where_they_answer(
    empty: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running_addresses(empty) is None
    _record(empty, "prefect", 1, 4200)
    assert running_addresses(empty) is None
    with pytest.raises(ClusterError, match="rlhf up"):
        required_api_url(empty)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:9"):
        required_api_url(empty)


def test_tracking_address_of_the_environment(
    empty: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert empty.tracking_uri == empty.database_uri
    monkeypatch.setenv(TRACKING_VARIABLE, "http://127.0.0.1:5000")
    assert empty.tracking_uri == "http://127.0.0.1:5000"
    assert empty.database_uri.startswith("sqlite:////")
