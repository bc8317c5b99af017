"""deployments/compose.yaml: well-formed, closed to the outside, without a secret of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest
import yaml
from compose_file import COMPOSE, DEPLOYMENTS, UnsetVariableError, read_compose
from jsonschema import Draft202012Validator

from flows.services.records import HEARTBEAT_SECONDS, POOL

SECRETS = (
    "POSTGRES_PASSWORD",
    "PREFECT_DB_PASSWORD",
    "MLFLOW_DB_PASSWORD",
    "S3_SECRET_ACCESS_KEY",
    "PREFECT_AUTH_STRING",
)
ENVIRONMENT = {name: f"secret-{number}" for number, name in enumerate(SECRETS)}


@pytest.fixture
def compose() -> dict[str, Any]:
    return read_compose(ENVIRONMENT)


def test_it_keeps_to_the_compose_specification(compose: dict[str, Any]) -> None:
    vendored = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(vendored.read_text())
    Draft202012Validator.check_schema(schema)
    errors = list(Draft202012Validator(schema).iter_errors(compose))
    assert [error.message for error in errors] == []
    compose["services"]["mlflow"]["helthcheck"] = {}
    assert not Draft202012Validator(schema).is_valid(compose)


def test_compose_itself_accepts_it() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed")
    command = [program, "-f", str(COMPOSE), "--profile", "worker", "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["services"]
    assert set(found) == set(read_compose(ENVIRONMENT)["services"])
    published = [port for service in found.values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_has_a_default(name: str) -> None:
    without = {key: value for key, value in ENVIRONMENT.items() if key != name}
    with pytest.raises(UnsetVariableError, match=name):
        read_compose(without)


def test_secrets_come_from_the_environment_alone(compose: dict[str, Any]) -> None:
    filled = json.dumps(compose)
    assert all(value in filled for value in ENVIRONMENT.values())
    plain = yaml.safe_load(COMPOSE.read_text())
    secret = re.compile(r"PASSWORD|SECRET|AUTH_STRING|API_KEY")
    for service in plain["services"].values():
        for key, value in service.get("environment", {}).items():
            assert not secret.search(key) or value.startswith("${"), key


def test_only_the_two_servers_are_published_and_only_here(compose: dict[str, Any]) -> None:
    published = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if "ports" in service
    }
    assert published == {
        "mlflow": ["127.0.0.1:5000:5000"],
        "prefect": ["127.0.0.1:4200:4200"],
    }


def test_services_wait_until_what_they_need_is_healthy(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed], (name, needed)
            else:
                assert how["condition"] == "service_completed_successfully"
                assert services[needed].get("restart", "no") == "no", needed
    for name in ("postgres", "objects", "mlflow", "prefect"):
        assert services[name]["restart"] == "unless-stopped"


def test_health_checks_are_programs_that_parse(compose: dict[str, Any]) -> None:
    for name in ("mlflow", "prefect"):
        kind, program, flag, code = compose["services"][name]["healthcheck"]["test"]
        assert (kind, program, flag) == ("CMD", "python", "-c")
        compile(code, name, "exec")
    compile(compose["services"]["bucket"]["command"][2], "bucket", "exec")


def test_files_and_image_targets_that_it_names_are_there(compose: dict[str, Any]) -> None:
    containerfile = (DEPLOYMENTS / "Containerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", containerfile, re.MULTILINE))
    for service in compose["services"].values():
        build = service.get("build")
        if build is not None:
            assert (DEPLOYMENTS / build["context"] / build["dockerfile"]).is_file()
            assert build["target"] in targets
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                file = DEPLOYMENTS / source
                assert file.is_file() and os.access(file, os.X_OK)
            else:
                assert source in compose["volumes"]


def test_the_servers_image_has_pinned_versions_of_what_it_installs() -> None:
    containerfile = (DEPLOYMENTS / "Containerfile").read_text()
    line = next(li for li in containerfile.splitlines() if "--constraint" in li)
    names = line.partition("requirements.lock")[2].split()
    locked = (DEPLOYMENTS.parent / "requirements.lock").read_text().splitlines()
    pinned = {row.partition("==")[0] for row in locked}
    assert set(names) == {"prefect", "mlflow", "psycopg2-binary", "boto3"} <= pinned


@pytest.mark.parametrize("script", ["postgres-databases.sh"])
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(DEPLOYMENTS / script)], check=True)


def test_the_worker_deploys_and_reports_where_the_servers_are(compose: dict[str, Any]) -> None:
    services = compose["services"]
    # It makes the pool and the automations, too.
    assert services["deploy"]["command"] == ["rlhf", "deploy"]
    assert services["worker"]["command"][-2:] == ["--pool", POOL]
    environment = services["worker"]["environment"]
    assert environment["RLHF_TRACKING_URI"] == "http://mlflow:5000"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)
    for name in ("deploy", "worker"):
        login = services[name]["environment"]["PREFECT_API_AUTH_STRING"]
        assert login == ENVIRONMENT["PREFECT_AUTH_STRING"]
