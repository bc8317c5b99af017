"""Defaults that keep a shared machine safe: nothing unpickled, no remote code, no keys kept."""

from __future__ import annotations

import ast
import http.client
import json
import logging
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app
from flows.stage_run import describe
from tasks.config.loading import _UniqueKeyLoader
from tasks.config.shared import TrackingConfig
from tasks.errors import (
    ArtifactError,
    ClusterError,
    guard_logs,
    redact,
    redact_config,
    without_credentials,
)
from tasks.evaluate.config import EvaluateConfig
from tasks.tracking.lineage import locate
from tasks.tracking.mlflow import Tracker, connect, flat_params
from tasks.tracking.run_log import ProgressDisplay, StageLog
from tasks.workspace import Workspace

Make = Callable[..., Any]
ROOT = Path(__file__).resolve().parent.parent
SECRET = "correct-horse-battery-staple"
# What a process writes for itself and for its own children on a pipe or in a scratch file.
OWN_PICKLES = {"tasks/ingest/pool.py", "tasks/ingest/chunks.py"}


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield file, dotted name and node of each call in the project."""
    for folder in ("tasks", "flows", "deployments", "configs"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield str(file.relative_to(ROOT)), ast.unparse(node.func), node


def _keyword(node: ast.Call, name: str) -> str | None:
    found = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == name]
    return found[0] if found else None


def test_nothing_that_unpickles_is_called() -> None:
    names = re.compile(r"(pickle|cloudpickle|dill|joblib|shelve|marshal)\.(load|loads|open)$")
    odd = {file for file, name, _ in _calls() if names.search(name)}
    assert odd == OWN_PICKLES
    for file, name, node in _calls():
        if name == "torch.load":
            assert _keyword(node, "weights_only") == "True", file
        if name in ("np.load", "numpy.load"):
            assert _keyword(node, "allow_pickle") in (None, "False"), file
        if name == "yaml.load":
            assert ast.unparse(node.args[1]) == "_UniqueKeyLoader", file
        assert not name.startswith(("mlflow.pyfunc.", "mlflow.pytorch.")), file
    assert issubclass(_UniqueKeyLoader, yaml.SafeLoader)


def test_nothing_runs_code_of_a_model_or_of_a_text() -> None:
    trusting = {
        (file, _keyword(node, "trust_remote_code"))
        for file, _, node in _calls()
        if _keyword(node, "trust_remote_code") is not None
    }
    # verl hands its own setting on, which is off.
    assert trusting == {
        ("tasks/models/loading.py", "False"),
        ("tasks/runtime/verl_host.py", "trust_remote_code"),
    }
    source = metadata.distribution("verl").locate_file("verl/workers/config/model.py")
    assert "trust_remote_code: bool = False" in Path(str(source)).read_text()
    for file, name, node in _calls():
        assert name not in ("eval", "exec", "os.system", "os.popen"), file
        assert _keyword(node, "shell") in (None, "False"), file


def test_file_that_was_put_into_an_artefact_is_refused(make_artifact: Make) -> None:
    from tasks.artifacts import load_any_artifact

    artifact = make_artifact("sft")
    (artifact.path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin is not in the manifest"):
        load_any_artifact(artifact.path)


ORDINARY_NAMES = (
    "hf-internal-testing/tiny-random-LlamaForCausalLM",
    "/data/hf-experiments-2026-11/artifacts/sft/0123456789abcdef",
    "/data/hf_experiments_with_long_names/models",
    "/data/sk-learn-experiments-2026-11-30/run",
    "/data/ghp-pages-of-the-experiment-1/x",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:secret@db:5432/x", "postgresql://[redacted]@db:5432/x"),
        ("http://token@host/v1", "http://[redacted]@host/v1"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer [redacted]"),
        ("key sk-abcdefghijklmnop1234 was refused", "key [redacted] was refused"),
        ("hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh", "[redacted]"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "[redacted]"),
        ("glpat-abcdefghijklmnopqrst", "[redacted]"),
        ("xoxb-123456789012-abcdefghijkl", "[redacted]"),
        (f"sk-proj-{'aB3_' * 4}{'x9Y8' * 5}", "[redacted]"),
        ("https://h/p?api_key=abc&x=1", "https://h/p?[redacted]&x=1"),
        ("AKIAABCDEFGHIJKLMNOP", "[redacted]"),
        ("models:/rlhf-flows-student@champion", "models:/rlhf-flows-student@champion"),
        ("Anthropic/hh-rlhf@0123abc", "Anthropic/hh-rlhf@0123abc"),
        ("https://host/a@b", "https://host/a@b"),
        ("max_tokens: 3000000", "max_tokens: 3000000"),
        *((name, name) for name in ORDINARY_NAMES),
    ],
)
def test_secrets_of_known_forms(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_value_of_a_secret_variable_is_named_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    assert redact(f"sent {SECRET} with abc") == "sent [JUDGE_API_KEY] with abc"


@given(st.text(max_size=60))
def test_text_is_redacted_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


def test_address_without_its_credentials() -> None:
    assert without_credentials("http://me:secret@host:5000/x") == "http://host:5000/x"
    assert without_credentials("sqlite:////a/b@c.db") == "sqlite:////a/b@c.db"


def test_secret_fields_of_a_config() -> None:
    config = {
        "endpoint": {"api_key": "x", "api_key_env": "OPENAI_API_KEY", "max_tokens": 5},
        "urls": ["http://a:b@c"],
        "password": "",
        "hub_token": "t",
    }
    assert redact_config(config) == {
        "endpoint": {"api_key": "[redacted]", "api_key_env": "OPENAI_API_KEY", "max_tokens": 5},
        "urls": ["http://[redacted]@c"],
        "password": "",
        "hub_token": "[redacted]",
    }


def test_ordinary_config_is_kept_as_it_is() -> None:
    plain = EvaluateConfig().model_dump(mode="json")
    assert json.dumps(redact_config(plain)) == json.dumps(plain)
    assert flat_params(redact_config(plain)) == flat_params(plain)


def test_hub_id_that_looks_like_a_key_stays_a_parameter(tracker: Tracker) -> None:
    source = "hf-internal-testing/tiny-random-LlamaForCausalLM"
    run_id = tracker.start_run("sft", {"stage": "sft"}, {"model": {"source": source}})
    assert tracker.read_run(run_id).params["model.source"] == source


def test_paths_that_hold_a_secret_word_still_lead_to_the_artefact(
    tracker: Tracker, make_artifact: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The user of a database and the directory of its data are often called the same.
    root = "/srv/postgres-data/hf-experiments-2026-11/artifacts"
    monkeypatch.setenv("DB_PASSWORD", "postgres-data")
    outcome = json.dumps({"artifact": f"{root}/sft/x"})
    places = {"artifact.path": f"{root}/sft/x", "workspace": f"host:{root}"}
    upstream = {"upstream.preferences.path": f"{root}/ingest/x"}
    run_id = tracker.start_run("sft", {"stage": "sft", **places, "note": root}, {})
    tracker.set_tags(run_id, {"outcome.sft": outcome, **upstream, "failure": f"in {root}"})
    tracker.finish(run_id, "FINISHED")
    assert locate(tracker, "latest", "sft") == Path(f"{root}/sft/x")
    tags = tracker.read_run(run_id).tags
    assert {name: tags[name] for name in places} == places
    assert tags["outcome.sft"] == outcome
    assert tags["upstream.preferences.path"] == upstream["upstream.preferences.path"]
    # What people read is redacted as before.
    assert "postgres-data" not in tags["failure"] + tags["note"]


def test_address_in_a_path_tag_has_no_password(tracker: Tracker) -> None:
    tag = "upstream.source.path"
    run_id = tracker.start_run("ingest", {tag: "https://me:pass@host/data.jsonl"}, {})
    assert tracker.read_run(run_id).tags[tag] == "https://[redacted]@host/data.jsonl"


def _everything_of(tracker: Tracker, run_id: str, directory: Path) -> str:
    """Return all that MLflow has of a run, as one text."""
    client = MlflowClient(tracker.tracking_uri)
    run = client.get_run(run_id)
    directory.mkdir()
    files = Path(client.download_artifacts(run_id, "", str(directory)))
    texts = [file.read_text() for file in files.rglob("*") if file.is_file()]
    return "\n".join([str(run.to_dictionary()), *texts])


def test_run_holds_no_secret(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    config = {"tracking_uri": f"http://me:{SECRET}@host", "key": SECRET, "steps": 3}
    run_id = tracker.start_run("sft", {"note": f"with {SECRET}"}, config)
    log = StageLog(tracker, run_id, "sft", ProgressDisplay("sft"))
    log.event("request", f"the server said {SECRET} is wrong")
    log.close()
    tracker.finish(run_id, "FAILED", failure=describe(RuntimeError(f"401 for {SECRET}")))
    kept = _everything_of(tracker, run_id, tmp_path / "downloaded")
    assert SECRET not in kept
    assert "'failure': 'RuntimeError: 401 for [JUDGE_API_KEY]'" in kept
    assert tracker.read_run(run_id).params["steps"] == "3"


@pytest.mark.filterwarnings("ignore:Logger 'prefect.flow_runs' attempted to send logs")
def test_log_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    guard_logs()
    guard_logs()
    logger = logging.getLogger("prefect.flow_runs")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("prefect"), "propagate", True)
    logger.addHandler(caplog.handler)
    try:
        logger.error("sent %s", SECRET)
        try:
            raise ValueError(f"401 for {SECRET}")
        except ValueError:
            logger.exception("Encountered exception during execution:")
    finally:
        logger.removeHandler(caplog.handler)
    assert "sent [JUDGE_API_KEY]" in caplog.text
    assert "ValueError: 401 for [JUDGE_API_KEY]" in caplog.text
    assert SECRET not in caplog.text


def test_error_message_holds_no_password(workspace: Workspace) -> None:
    tracking = TrackingConfig(tracking_uri=f"http://me:{SECRET}@127.0.0.1:9")
    with pytest.raises(ClusterError) as caught:
        connect(tracking, workspace)
    assert "http://[redacted]@127.0.0.1:9" in str(caught.value)
    assert SECRET not in str(caught.value)
    arguments = ["compare", "a", "b", "--tracking-uri", f"http://me:{SECRET}@127.0.0.1:9"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert SECRET not in result.stderr + result.stdout


def test_link_to_a_run_holds_no_password() -> None:
    tracker = Tracker(f"http://me:{SECRET}@host:5000", "x", "1")
    assert tracker.run_url("r") == (
        "http://host:5000/#/experiments/1/runs/r?workflowType=machine_learning"
    )


@pytest.mark.slow
def test_mlflow_answers_only_to_its_own_name(mlflow_server: str) -> None:
    address = urlsplit(mlflow_server)
    assert address.hostname == "127.0.0.1" and address.port is not None
    path = "/api/2.0/mlflow/experiments/get?experiment_id=0"
    statuses = {}
    for host in (f"127.0.0.1:{address.port}", f"localhost:{address.port}", "evil.example"):
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
        connection.request("GET", path, headers={"Host": host})
        statuses[host.partition(":")[0]] = connection.getresponse().status
        connection.close()
    assert statuses == {"127.0.0.1": 200, "localhost": 200, "evil.example": 403}
