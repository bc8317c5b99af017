"""Fixtures of all tests: shared files, a workspace, Prefect and MLflow servers, artefacts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
SMALL_CHAIN = ROOT / "tests" / "small_chain.yaml"
_PREFECT_HOME = tempfile.mkdtemp(prefix="rlhf-tests-prefect-")

# Prefect reads these when it is imported, which is later than this file.
os.environ.update(
    PREFECT_HOME=_PREFECT_HOME,
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="CRITICAL",
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
)
os.environ.pop("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", None)
os.environ.pop("PREFECT_API_URL", None)

# As Hypothesis does in CI: 200 ms an example would test the machine. The first mask or model of a
# process takes longer, and so does any example beside a program that is busy.
settings.register_profile("unhurried", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("unhurried")

SharedCases = Callable[[str], list[dict[str, Any]]]


def pytest_unconfigure() -> None:
    """Remove Prefect's state."""
    shutil.rmtree(_PREFECT_HOME, ignore_errors=True)


def _require(path: Path) -> Path:
    """Return a shared path; without it a user's tests are skipped and CI's fail."""
    if path.exists():
        return path
    reason = f"{path} is not there: this test reads real files that are not part of the project"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data files."""
    return _require(SHARED / "data")


@pytest.fixture(scope="session")
def shared_cases() -> SharedCases:
    """A function that returns the known cases of one stage."""

    def read(stage: str) -> list[dict[str, Any]]:
        path = _require(SHARED / "cases" / "cases.jsonl")
        cases = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        found = [case for case in cases if case["stage"] == stage]
        assert found, f"no case has the stage {stage}"
        return found

    return read


@pytest.fixture(scope="session")
def empty_mlflow_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow-template") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_mlflow_db: Path) -> Any:
    """A fresh workspace that RLHF_HOME names."""
    from tasks.workspace import Workspace

    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    made = Workspace.from_environment()
    made.prepare()
    shutil.copy(empty_mlflow_db, made.root / "mlflow.db")
    return made


@pytest.fixture
def tracker(workspace: Any) -> Any:
    """The workspace's own MLflow database."""
    from tasks.config.shared import TrackingConfig
    from tasks.tracking.mlflow import connect

    return connect(TrackingConfig(), workspace)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server for the whole session."""
    from prefect.settings import temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    no_heartbeat: Any = {"flows.heartbeat_frequency": None}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(no_heartbeat):
        yield


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"{url} did not answer:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real `mlflow server` with SQLite behind it."""
    from service_client import free_port

    directory = tmp_path_factory.mktemp("mlflow-server")
    port = free_port()
    log = directory / "server.log"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(directory / "artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.fixture
def make_artifact(workspace: Any) -> Callable[..., Any]:
    """A function that writes a small real artefact of a stage and returns its handle.

    Its payload is one file; ``parents`` are handles or `ParentRef`s by input name.
    """
    from tasks.artifacts import KINDS, Artifact, Draft, build_artifact, fingerprint, newest_artifact

    kinds = {
        "ingest": "preference_dataset",
        "sft": "policy_checkpoint",
        "reward_model": "reward_model_checkpoint",
        "offline_ppo": "policy_checkpoint",
        "distill": "student_adapter",
        "evaluate": "eval_report",
    }

    def make(
        stage: str,
        parents: dict[str, Any] | None = None,
        run_id: str | None = None,
        report: dict[str, Any] | None = None,
        **config: Any,
    ) -> Artifact:
        refs = {
            name: parent.as_parent() if isinstance(parent, Artifact) else parent
            for name, parent in (parents or {}).items()
        }
        hashes = {name: ref.fingerprint for name, ref in refs.items()}
        draft = Draft(
            kind=kinds[stage],
            stage=stage,
            fingerprint=fingerprint(stage, 1, config, hashes),
            config=config,
            parents=refs,
            mlflow_run_id=run_id,
        )
        directory = workspace.artifacts_dir(stage)
        with build_artifact(directory, draft) as temporary:
            (temporary / "payload.bin").write_bytes(b"payload")
            (temporary / "report.json").write_text(json.dumps(report or {}))
        made = newest_artifact(directory, KINDS[draft.kind], draft.fingerprint)
        assert made is not None
        return made

    return make


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of one small layer."""
    from tasks.config.shared import TinyModelConfig
    from tasks.demo.oracle import parse_transcript
    from tasks.demo.world import generate_pairs
    from tasks.models.tiny import build_tiny_model

    rows = generate_pairs(60, seed=0)
    texts = [turn["content"] for row in rows for turn in parse_transcript(row["chosen"])]
    spec = TinyModelConfig(hidden_size=32, n_layers=1, n_heads=2, vocab_size=300)
    return build_tiny_model(tmp_path_factory.mktemp("workers") / "tiny", texts, spec, seed=1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, which the stage tests share and the session's end closes."""
    from tasks.runtime.session import cluster_session

    with cluster_session():
        yield


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory,
    empty_mlflow_db: Path,
    prefect_server: None,
    cluster: None,
) -> Iterator[Path]:
    """The workspace that all stage tests share: an upstream is trained once."""
    root = tmp_path_factory.getbasetemp() / "stages"
    if not root.exists():
        root.mkdir()
        shutil.copy(empty_mlflow_db, root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(root))
        yield root


@pytest.fixture(scope="module")
def preferences(home: Path) -> str:
    """The small chain's dataset."""
    from flows.ingest import ingest
    from flows.stages import RunOptions
    from tasks.config.loading import load_config

    return ingest(load_config(SMALL_CHAIN).ingest, RunOptions(reuse=True))


@pytest.fixture(scope="module")
def base(preferences: str) -> str:
    """The small chain's base model."""
    from flows.sft import sft
    from flows.stages import RunOptions
    from tasks.config.loading import load_config

    return sft(load_config(SMALL_CHAIN).sft, preferences, RunOptions(reuse=True))


class RecordingLog:
    """Keeps what a stage reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        self.notes: list[str] = []
        self.events: list[str] = []
        self.files: list[str] = []

    def metrics(self, values: Any, step: int) -> None: ...

    def progress(self, done: float, total: float, message: str = "") -> None:
        self.seen.append((done, total))
        self.notes.append(message)

    def event(self, name: str, message: str) -> None:
        self.events.append(f"{name}: {message}")

    def trial(self, name: str, params: Any, metrics: Any) -> None: ...

    def file(self, path: Path, directory: str = "") -> None:
        assert path.stat().st_size
        self.files.append(f"{directory}/{path.name}")


@pytest.fixture
def ingest_context(tmp_path: Path) -> Callable[[], Any]:
    """A function that returns a context of stage ingest, each time in a workspace of its own."""
    from tasks.artifacts import Draft
    from tasks.context import StageContext
    from tasks.workspace import Workspace

    made: list[Path] = []

    def make(root: Path | None = None) -> StageContext:
        home = root or tmp_path / "var" / str(len(made))
        made.append(home)
        fingerprint = "f" * 64
        return StageContext(
            stage="ingest",
            fingerprint=fingerprint,
            workspace=Workspace(home),
            checkpoint_dir=home / "checkpoints",
            artifacts_dir=home / "data" / "ingest",
            draft=Draft("preference_dataset", "ingest", fingerprint, config={}),
            log=RecordingLog(),
        )

    return make


@pytest.fixture
def ingest(ingest_context: Callable[[], Any]) -> Callable[..., Any]:
    """A function that ingests a file, or whatever the config names, and returns the dataset."""
    from tasks.data.source import InputFile, find_files
    from tasks.ingest.config import IngestConfig
    from tasks.ingest.stage import ingest_pairs

    def run(file: Path | None = None, **settings_: Any) -> Any:
        cfg = IngestConfig(**settings_)
        if file is not None:
            files = [InputFile(str(file), file.name, "demo", "demo", cfg.format)]
        else:
            files = [found for named in cfg.all_sources for found in find_files(named)]
        return ingest_pairs(ingest_context(), cfg, files)

    return run
