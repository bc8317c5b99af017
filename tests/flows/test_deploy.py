"""The deployments on a fresh Prefect server: what is created, and whether the forms hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import yaml
from conftest import SMALL_CHAIN
from prefect.utilities.schema_tools import validate

from flows.services.deploy import AUTOMATIONS, DEPLOYMENTS, deploy, rendered
from flows.services.records import HEARTBEAT_SECONDS, POOL
from flows.stages import completed
from tasks.config.loading import load_config
from tasks.config.shared import STAGES
from tasks.errors import ClusterError
from tasks.pipeline_config import PipelineConfig
from tasks.reward_model.config import RewardModelConfig
from tasks.workspace import Workspace

SharedCases = Callable[[str], list[dict[str, Any]]]
NAMES = {
    "rlhf-pipeline/nightly",
    "evaluate/champion-weekly",
    *(f"{stage.replace('_', '-')}/{stage.replace('_', '-')}" for stage in STAGES),
}


@pytest.fixture(scope="module")
def api(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The API of a server that everything was deployed to, twice."""
    from prefect.settings import PREFECT_API_URL

    url = str(PREFECT_API_URL.value())
    workspace = Workspace(tmp_path_factory.mktemp("deploy") / "home")
    workspace.prepare()
    with httpx.Client(base_url=url, timeout=30) as client:
        assert set(deploy(str(SMALL_CHAIN), url, workspace)) == NAMES
        nightly = _deployment(client, "rlhf-pipeline/nightly")
        schedule = f"/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
        client.patch(schedule, json={"active": False}).raise_for_status()
        assert set(deploy(str(SMALL_CHAIN), url, workspace)) == NAMES
        yield client


def _deployment(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/deployments/name/{name}").raise_for_status().json()
    return found


@pytest.mark.slow
def test_pool_schedules_and_automation(api: httpx.Client) -> None:
    pool = api.get(f"/work_pools/{POOL}").raise_for_status().json()
    assert (pool["type"], pool["concurrency_limit"]) == ("process", 1)
    nightly = _deployment(api, "rlhf-pipeline/nightly")
    weekly = _deployment(api, "evaluate/champion-weekly")
    for deployment, slug in ((nightly, "nightly"), (weekly, "weekly")):
        (schedule,) = deployment["schedules"]
        assert (schedule["slug"], schedule["schedule"]["timezone"]) == (slug, "UTC")
    # It was paused by hand, and deployed again.
    assert [one["schedules"][0]["active"] for one in (nightly, weekly)] == [False, True]
    (wanted,) = yaml.safe_load(AUTOMATIONS.read_text())["automations"]
    body = {"automations": {"name": {"any_": [wanted["name"]]}}}
    (automation,) = api.post("/automations/filter", json=body).raise_for_status().json()
    assert automation["enabled"]
    assert automation["trigger"]["within"] == 3 * HEARTBEAT_SECONDS
    assert automation["actions"][0]["state"] == "CRASHED"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_form_validates_its_defaults_and_explains_itself(api: httpx.Client, name: str) -> None:
    deployment = _deployment(api, name)
    assert deployment["description"] and "rlhf" in deployment["tags"]
    assert deployment["work_pool_name"] == POOL
    schema = deployment["parameter_openapi_schema"]
    validate(deployment["parameters"], schema, raise_on_error=True, preprocess=True)
    defaults = {
        field: form["default"] for field, form in schema["properties"].items() if "default" in form
    }
    assert {"cfg", "preset"} <= set(defaults)
    validate(defaults, schema, raise_on_error=True, preprocess=True)
    assert [
        field for field, form in schema["properties"].items() if "description" not in form
    ] == []
    text = str(schema)
    assert "discriminator" not in text  # the old UI shows an empty box
    assert "exclusiveMinimum" in text and "enum" in text


@pytest.mark.slow
def test_server_refuses_what_the_form_would(api: httpx.Client, shared_cases: SharedCases) -> None:
    large = next(case for case in shared_cases("prefect") if case["id"] == "PF-05")["input"]
    deployment = _deployment(api, "reward-model/reward-model")
    url = f"/deployments/{deployment['id']}/create_flow_run"

    def start(cfg: dict[str, Any]) -> httpx.Response:
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
        return api.post(url, json={"parameters": {"cfg": cfg}, "state": state})

    assert start({"epochs": 2}).status_code == 201
    for wrong, named in (
        ({"epochs": -1}, "epochs"),
        ({"epoch": 1}, "epoch"),
        (large, "seed"),
        ({"optimizer": {"schedule": "linear"}}, "schedule"),
    ):
        answer = start(wrong)
        assert answer.status_code in (409, 422), wrong
        assert named in answer.text


@pytest.mark.slow
def test_partial_parameters_of_a_run_are_completed(api: httpx.Client) -> None:
    """What the flow gets for ``cfg`` of one field: the server's merge, then the preset."""
    deployment = _deployment(api, "reward-model/reward-model")
    merged = {**deployment["parameters"], "cfg": {"epochs": 2}}
    cfg = completed(RewardModelConfig, merged["cfg"], merged["preset"])
    chain = load_config(SMALL_CHAIN)
    assert cfg == chain.reward_model.model_copy(update={"epochs": 2.0})


def test_forms_show_the_config_that_was_deployed() -> None:
    chain = load_config(SMALL_CHAIN)
    for deployment in rendered(str(SMALL_CHAIN))["deployments"]:
        parameters = deployment["parameters"]
        assert parameters["preset"] == str(SMALL_CHAIN)
        cfg = parameters["cfg"]
        if deployment["name"] == "nightly":
            assert PipelineConfig.model_validate(cfg) == chain
        elif deployment["name"] == "reward-model":
            assert RewardModelConfig.model_validate(cfg) == chain.reward_model
    assert {one["parameters"]["preset"] for one in rendered("demo")["deployments"]} == {"demo"}


def test_champion_is_that_of_the_configs_experiment(tmp_path: Any) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("tracking: {experiment: other}\n")
    by_name = {one["name"]: one["parameters"] for one in rendered(str(config))["deployments"]}
    weekly = by_name["champion-weekly"]
    assert weekly["student"] == "models:/other-student@champion"
    assert weekly["base"] == "upstream:models:/other-student@champion"
    assert weekly["options"]["tracking"]["experiment"] == "other"


def test_file_suits_prefects_own_command() -> None:
    definition = yaml.safe_load(DEPLOYMENTS.read_text())
    for deployment in definition["deployments"]:
        assert deployment["parameters"]["preset"] == "demo"
        (step,) = deployment["pull"]
        assert step["prefect.deployments.steps.set_working_directory"]["directory"] == (
            "{{ $RLHF_PROJECT }}"
        )


def test_server_that_is_down_is_named(tmp_path: Any) -> None:
    workspace = Workspace(tmp_path)
    with pytest.raises(ClusterError, match=r"Prefect server at http://127\.0\.0\.1:9/api failed"):
        deploy("demo", "http://127.0.0.1:9/api", workspace)


def test_laptop_serves_the_same_deployments() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("serve_all", DEPLOYMENTS.parent / "serve.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made = [module.served(one) for one in rendered(str(SMALL_CHAIN))["deployments"]]
    assert {f"{one.flow_name}/{one.name}" for one in made} == NAMES
    assert all(one.parameters["preset"] == str(SMALL_CHAIN) for one in made)
    slugs = {schedule.slug for one in made for schedule in one.schedules or []}
    assert slugs == {"nightly", "weekly"}
