"""Both servers as deployments/compose.yaml starts them, on a real PostgreSQL and, where its program
is installed, on the real object store; a small chain is recorded in both."""

from __future__ import annotations

import base64
import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compose_file import DEPLOYMENTS, read_compose
from service_client import free_port

from tasks.config.shared import STAGES

pytestmark = pytest.mark.endurance

ROOT = DEPLOYMENTS.parent
SMALL_CHAIN = ROOT / "tests" / "small_chain.yaml"
START_SECONDS = 180
LOGIN = "admin:a word"
# Signs of an address must not matter in a password.
ENVIRONMENT = {
    "POSTGRES_PASSWORD": "p/o@s:t#1",
    "PREFECT_DB_PASSWORD": "p/r@e:f#2",
    "MLFLOW_DB_PASSWORD": "m/l@f:l#3",
    "S3_SECRET_ACCESS_KEY": "0123456789abcdef0123456789abcdef",
    "PREFECT_AUTH_STRING": LOGIN,
}


@dataclass(frozen=True)
class Servers:
    """Running servers.

    Args:
        prefect, mlflow: addresses.
        database_port: of PostgreSQL on this machine.
        store: address of the object store, if there is one.
    """

    prefect: str
    mlflow: str
    database_port: int
    store: str | None


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """PostgreSQL, the object store and the two servers, on loopback."""
    programs = _postgres_programs()
    pytest.importorskip("psycopg2", reason="psycopg2-binary is not installed")
    work = tmp_path_factory.mktemp("servers")
    ports = [free_port() for _ in range(3)]
    names = {"postgres:5432": f"127.0.0.1:{ports[0]}", "0.0.0.0": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_postgres(programs, ports[0]))
        _make_databases(programs, ports[0])
        store = stack.enter_context(_object_store(work))
        if store is not None:
            names["http://objects:8333"] = store
            _make_bucket(names, work)
        else:
            names["s3://mlflow"] = str(work / "artifacts")
        for name, inside, port in (("mlflow", 5000, ports[1]), ("prefect", 4200, ports[2])):
            command, environment = _service(name, names | {str(inside): str(port)})
            own = {"PREFECT_HOME": str(work / "prefect"), "RLHF_HOME": str(work)}
            log = work / f"{name}.log"
            stack.enter_context(_running(command, environment | own, log))
            health = "health" if name == "mlflow" else "api/health"
            _wait_for(lambda url=f"http://127.0.0.1:{port}/{health}": _answers(url), log)
        yield Servers(
            f"http://127.0.0.1:{ports[2]}/api", f"http://127.0.0.1:{ports[1]}", ports[0], store
        )


def _postgres_programs() -> Path:
    """Return the directory with PostgreSQL's programs; Debian keeps them out of the path."""
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found is None and not debian:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    # What lies in the path may be one link.
    return (Path(found).resolve() if found is not None else debian[-1]).parent


@contextlib.contextmanager
def _postgres(programs: Path, port: int) -> Iterator[None]:
    """Run PostgreSQL in a directory of its own."""
    # Not below pytest's directory: root's is closed to the user that the server needs.
    directory = Path(tempfile.mkdtemp(prefix="rlhf-postgres-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(directory, "nobody", "nogroup")
    password = directory / "password"
    password.write_text(ENVIRONMENT["POSTGRES_PASSWORD"])
    if user:
        shutil.chown(password, "nobody", "nogroup")
    data = directory / "data"
    make = [str(programs / "initdb"), "--pgdata", str(data), "--username", "postgres"]
    make += ["--auth", "scram-sha-256", "--pwfile", str(password), "--no-sync", "--no-locale"]
    try:
        subprocess.run([*make, "--encoding", "UTF8"], check=True, capture_output=True, **user)
        serve = [str(programs / "postgres"), "-D", str(data), "-p", str(port)]
        serve += ["-c", "listen_addresses=127.0.0.1", "-k", str(directory), "-F"]
        log = directory / "server.log"
        # SIGINT is PostgreSQL's fast shutdown.
        with _running(serve, dict(os.environ), log, stop=signal.SIGINT, **user):
            ready = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
            _wait_for(lambda: subprocess.run(ready, capture_output=True).returncode == 0, log)
            yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make_databases(programs: Path, port: int) -> None:
    """Run the script that the container runs when its volume is empty."""
    path = f"{programs}:{os.environ['PATH']}"
    own = {"PATH": path, "POSTGRES_USER": "postgres", "PGHOST": "127.0.0.1", "PGPORT": str(port)}
    environment = {**ENVIRONMENT, **own, "PGPASSWORD": ENVIRONMENT["POSTGRES_PASSWORD"]}
    subprocess.run([str(DEPLOYMENTS / "postgres-databases.sh")], env=environment, check=True)


@contextlib.contextmanager
def _object_store(work: Path) -> Iterator[str | None]:
    """Run the object store; None where its program or boto3 is missing."""
    program = shutil.which("weed")
    if program is None:
        yield None
        return
    pytest.importorskip("boto3")
    port, data, log = free_port(), work / "objects", work / "objects.log"
    data.mkdir()
    names = {"8333": str(port), "/data": str(data), "0.0.0.0": "127.0.0.1"}
    command, environment = _service("objects", names)
    # In a container of its own the store has all ports for itself.
    inner = [f"-{kind}.port={free_port()}" for kind in ("master", "volume", "filer")]
    inner += [f"-{kind}.port.grpc={free_port()}" for kind in ("master", "volume", "filer", "s3")]
    environment["TMPDIR"] = str(work)  # for its own logs
    with _running([program, *command, "-ip=127.0.0.1", *inner], environment, log, cwd=work):
        _wait_for(lambda: _answers(f"http://127.0.0.1:{port}/healthz"), log)
        yield f"http://127.0.0.1:{port}"


def _make_bucket(names: dict[str, str], work: Path) -> None:
    command, environment = _service("bucket", names)
    for _ in range(2):  # the second time it is there already
        subprocess.run(command, env=environment, cwd=work, check=True, timeout=60)


def _service(name: str, replaced: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a service of the file, for this machine.

    Args:
        replaced: texts that differ outside of containers.
    """
    service = read_compose(ENVIRONMENT)["services"][name]

    def here(text: str) -> str:
        for old, new in replaced.items():
            text = text.replace(old, new)
        return text

    command = [here(word) for word in service["command"]]
    if command[0] in ("python", "mlflow", "prefect"):
        module = [] if command[0] == "python" else ["-m", command[0]]
        command = [sys.executable, *module, *command[1:]]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    own = {key: here(value) for key, value in service.get("environment", {}).items()}
    return command, {**kept, **own}


@contextlib.contextmanager
def _running(
    command: Sequence[str],
    environment: dict[str, str],
    log: Path,
    stop: signal.Signals = signal.SIGTERM,
    **how: Any,
) -> Iterator[None]:
    """Run a server and all that it starts until the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True, **how
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            if stop is signal.SIGTERM:
                os.killpg(process.pid, stop)
            else:
                process.send_signal(stop)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_ready():
        if time.monotonic() > deadline:
            pytest.fail(f"not ready after {START_SECONDS} s:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _count(servers: Servers, database: str, query: str) -> int:
    import psycopg2

    password = ENVIRONMENT[f"{database.upper()}_DB_PASSWORD"]
    with contextlib.closing(
        psycopg2.connect(
            host="127.0.0.1",
            port=servers.database_port,
            user=database,
            dbname=database,
            password=password,
        )
    ) as connection:
        cursor = connection.cursor()
        cursor.execute(query)
        return int(cursor.fetchone()[0])


def _prefect(servers: Servers, path: str, body: dict[str, Any], login: str = LOGIN) -> Any:
    token = base64.b64encode(login.encode()).decode()
    request = urllib.request.Request(
        f"{servers.prefect}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Basic {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_a_chain_is_recorded_in_both_servers(servers: Servers, tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = {
        **os.environ,
        "RLHF_HOME": str(home),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": servers.prefect,
        "PREFECT_API_AUTH_STRING": LOGIN,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "flows.cli.main", "run", str(SMALL_CHAIN)]
    command += ["-o", f"tracking.tracking_uri={servers.mlflow}"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

    flow_runs = _prefect(servers, "flow_runs/filter", {"limit": 50})
    assert len(flow_runs) == len(STAGES) + 1  # the chain's own
    assert {run["state"]["type"] for run in flow_runs} == {"COMPLETED"}
    assert _count(servers, "prefect", "select count(*) from flow_run") == len(STAGES) + 1

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=servers.mlflow)
    (experiment,) = [e for e in client.search_experiments() if e.name == "rlhf-flows"]
    runs = client.search_runs([experiment.experiment_id])
    by_stage = {run.data.tags.get("stage"): run for run in runs}
    assert set(STAGES) <= set(by_stage)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert _count(servers, "mlflow", "select count(*) from runs") == len(runs)
    flow_run_ids = {run["id"] for run in flow_runs}
    assert {by_stage[s].data.tags["prefect.flow_run_id"] for s in STAGES} <= flow_run_ids

    # Artifacts went to the server, not to a directory or a store that this process knows.
    run = by_stage["evaluate"].info
    assert run.artifact_uri.startswith("mlflow-artifacts:")
    (kept,) = [f.path for f in client.list_artifacts(run.run_id) if f.path.startswith("report.")][
        :1
    ]
    assert Path(client.download_artifacts(run.run_id, kept, str(tmp_path))).stat().st_size
    if servers.store is not None:
        assert _stored_objects(servers.store)


def _stored_objects(store: str) -> list[str]:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=store,
        region_name="us-east-1",
        aws_access_key_id="mlflow",
        aws_secret_access_key=ENVIRONMENT["S3_SECRET_ACCESS_KEY"],
    )
    return [found["Key"] for found in client.list_objects_v2(Bucket="mlflow").get("Contents", ())]


def test_the_store_wants_its_key(servers: Servers) -> None:
    if servers.store is None:
        pytest.skip("the object store (weed) is not installed")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{servers.store}/mlflow", timeout=10)
    assert caught.value.code == 403


def test_strangers_are_refused(servers: Servers) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        _prefect(servers, "flow_runs/filter", {}, login="admin:another word")
    assert caught.value.code == 401
    request = urllib.request.Request(
        f"{servers.mlflow}/api/2.0/mlflow/experiments/search",
        b'{"max_results": 1}',
        {"Host": "evil.example", "Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 403


def test_a_browser_is_told_where_the_api_is(servers: Servers) -> None:
    address = servers.prefect.removesuffix("/api")
    with urllib.request.urlopen(f"{address}/ui-settings", timeout=10) as answer:
        assert json.load(answer)["api_url"] == servers.prefect
