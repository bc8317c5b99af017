"""From a clean copy of the project to pages in a browser: Prefect's run forms, MLflow's comparison.

Screenshots stay in `browser.OUTPUT`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from browser import NEEDS_CHROMIUM, Browser, browser
from conftest import SMALL_CHAIN
from service_client import ROOT, Services, wait_for

pytestmark = [pytest.mark.endurance, NEEDS_CHROMIUM]
FORM_SIZE = (1400, 2800)
PAIRS = {"v1": "130", "v2": "140"}


def _clean_copy(target: Path) -> Path:
    """Copy what git has of the project, or would have with the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A workspace in which everything runs, and a dataset is there."""
    directory = tmp_path_factory.mktemp("pages")
    project = _clean_copy(directory / "project")
    config = project / SMALL_CHAIN.relative_to(ROOT)
    made = Services(directory / "home", config, project)
    try:
        made.up()
        made.pause_schedules()
        made.completed(made.run("ingest/ingest"))
        yield made
    finally:
        made.rlhf("down", code=None)


def _form(services: Services, ui: str, deployment: str) -> str:
    """Return the address of a deployment's run form in one of Prefect's UIs."""
    server = services.api.removesuffix("/api")
    settings = httpx.get(f"{server}/ui-settings", timeout=30).raise_for_status().json()
    if ui not in settings["available_uis"]:
        pytest.skip(f"this version of Prefect has no UI {ui}")
    base = settings[f"{ui}_base_url"].rstrip("/")
    return f"{server}{base}/deployments/deployment/{services.deployment(deployment)['id']}/run"


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


@pytest.mark.parametrize("ui", ["v1", "v2"])
def test_form_of_a_training_stage_explains_every_field(
    services: Services, ui: str, tmp_path: Path
) -> None:
    schema = services.deployment("sft/sft")["parameter_openapi_schema"]
    sections = [schema, *schema["definitions"].values()]
    fields = [field for section in sections for field in section["properties"].values()]
    titles = {field["title"] for field in fields}
    descriptions = {_plain(field["description"]) for field in fields if "description" in field}
    assert len(descriptions) > 30
    with browser(tmp_path / "profile", FORM_SIZE) as tab:
        tab.open(_form(services, ui, "sft/sft"))
        tab.wait_for_text("Submit", *(f"{title} (Optional)" for title in titles), *descriptions)
        # The small chain's numbers, not the defaults: the learning rate and the steps.
        tab.wait_for_text(" 0.01 ", " 60 ")
        assert tab.screenshot(f"prefect-{ui}-form-sft.png").stat().st_size > 50_000


def _submit(tab: Browser) -> None:
    """Press Submit; the form stays where the server's database was locked, so press again."""
    for _ in range(3):
        tab.press("Submit")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if tab.evaluate("!location.pathname.endsWith('/run')"):
                return
            time.sleep(0.2)
    pytest.fail(f"Submit was pressed three times, and the form stays:\n{tab.text}")


@pytest.mark.parametrize("ui", ["v1", "v2"])
def test_run_started_from_the_form_has_the_changed_value(
    services: Services, ui: str, tmp_path: Path
) -> None:
    with browser(tmp_path / "profile", FORM_SIZE) as tab:
        tab.open(_form(services, ui, "ingest/ingest"))
        tab.wait_for_text("Submit", "Pairs of the demo world.")
        tab.fill("N pairs", PAIRS[ui])
        tab.screenshot(f"prefect-{ui}-form-ingest.png")
        _submit(tab)
    chosen = f"tags.stage = 'ingest' and params.`demo.n_pairs` = '{PAIRS[ui]}'"
    wait_for(lambda: bool(services.mlflow_runs(chosen)), 180)
    (run,) = services.mlflow_runs(chosen)
    services.completed(run["tags"]["prefect.flow_run_id"])
    # The form sends all fields; those that nobody touched are the small chain's.
    assert run["params"]["test_share"] == "0.2"


def test_changed_run_stands_beside_the_first_in_mlflow(services: Services, tmp_path: Path) -> None:
    services.completed(services.run("sft/sft"))
    services.completed(services.run("sft/sft", cfg={"max_steps": 20}))
    second, first = services.mlflow_runs("tags.stage = 'sft'")
    assert [run["status"] for run in (first, second)] == ["FINISHED", "FINISHED"]
    with browser(tmp_path / "profile", (1800, 2400)) as tab:
        runs = quote(json.dumps([first["id"], second["id"]]))
        experiments = quote(json.dumps(["1"]))
        page = f"/#/compare-runs?runs={runs}&experiments={experiments}"
        tab.open(f"{services.mlflow}{page}&workflowType=machine_learning")
        tab.wait_for_text("Comparing 2 Runs", first["id"], second["id"])
        # Name, first value, second value: a row of the table of parameters.
        tab.wait_for_text(" max_steps 60 20 ", " seed 0 0 ", " summary/")
        assert tab.screenshot("mlflow-compare-sft.png").stat().st_size > 50_000
