"""Ten runs of the chain in a row through `rlhf up`, two of them started at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import SMALL_CHAIN
from ray.cluster_utils import Cluster
from service_client import CHAIN, SERVICES, Services, wait_for

from flows.outcomes import StageOutcome
from flows.stages import STAGE_SPECS
from tasks.config.loading import load_config
from tasks.config.shared import STAGES, TrackingConfig
from tasks.pipeline_config import PipelineConfig
from tasks.tracking.lineage import lineage_tree
from tasks.tracking.mlflow import PIPELINE, connect
from tasks.workspace import Workspace

pytestmark = pytest.mark.endurance

# Seeds that differ from the config's 0. Some chains go back to what an older chain made: the newest
# artefact of a stage would be a wrong upstream for them.
SEEDS: tuple[dict[str, int], ...] = (
    {},
    {"distill": 1},
    {"distill": 2},
    {"evaluate": 3},
    {"reward_model": 4},
    {"sft": 5},
    {"evaluate": 6},
    {"distill": 1, "evaluate": 7},
    {"offline_ppo": 8},
    {"reward_model": 4, "evaluate": 9},
)
AT_ONCE = (1, 2)
ON_LASTING_CLUSTER = range(5, 10)


def _upstream(stage: str) -> set[str]:
    """Return a stage and all stages that it depends on."""
    found = {stage}
    for spec in STAGE_SPECS[stage].inputs.values():
        found |= _upstream(spec.name)
    return found


def _maker(chain: int, stage: str) -> int:
    """Return the first chain that makes this stage's artefact with these seeds."""
    line = _upstream(stage)

    def seeds(number: int) -> dict[str, int]:
        return {name: seed for name, seed in SEEDS[number].items() if name in line}

    return next(number for number in range(len(SEEDS)) if seeds(number) == seeds(chain))


def test_the_plan_has_wrong_upstreams_to_choose() -> None:
    # Chain 3 judges the student of chain 0, though 1 and 2 have made newer ones since.
    assert [_maker(3, stage) for stage in STAGES] == [0, 0, 0, 0, 0, 3]
    # All from sft on is new, and chain 6 goes back.
    assert [_maker(5, stage) for stage in STAGES] == [0, 5, 5, 5, 5, 5]
    assert [_maker(6, stage) for stage in STAGES] == [0, 0, 0, 0, 0, 6]
    assert [_maker(7, stage) for stage in STAGES] == [0, 0, 0, 0, 1, 7]
    assert [_maker(9, stage) for stage in STAGES] == [0, 0, 4, 4, 4, 9]


@dataclass(frozen=True)
class Footprint:
    """What the services hold while nothing runs."""

    processes: dict[str, int]
    open_files: dict[str, int]


def _footprint(services: Services) -> Footprint:
    from flows.services.records import family

    families = {name: family(services.home / "services", name) for name in SERVICES}
    return Footprint(
        {name: len(found) for name, found in families.items()},
        {name: sum(one.num_fds() for one in found) for name, found in families.items()},
    )


def _busy_workers() -> list[str]:
    """Return the actors and tasks of the lasting cluster."""
    names = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline()))
    return [name for name in names if re.match(r"ray::(?!IDLE|\w*Agent)", name)]


@pytest.fixture
def lasting_cluster() -> Iterator[Cluster]:
    """A Ray cluster that outlives the chains."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    config = tmp_path / "config.yaml"
    config.write_text(f"extends: {SMALL_CHAIN}\nname: ten\n")
    with Services(tmp_path / "home", config).running() as made:
        yield made


def _parameters(chain: int, address: str) -> dict[str, Any]:
    """Return the fields that a chain's caller gives; the preset has the rest."""
    cfg: dict[str, Any] = {stage: {"seed": seed} for stage, seed in SEEDS[chain].items()}
    if chain in ON_LASTING_CLUSTER:
        config: PipelineConfig = load_config(SMALL_CHAIN)
        for stage in STAGES:
            if hasattr(getattr(config, stage), "runtime"):
                cfg.setdefault(stage, {})["runtime"] = {"ray_address": address}
    return cfg


def _run_all(services: Services, lasting_cluster: Cluster) -> tuple[list[str], list[Footprint]]:
    """Run the ten; return their flow runs, and the footprint after each that ran alone."""
    flow_runs: list[str] = []
    footprints: list[Footprint] = []
    for chain in range(len(SEEDS)):
        flow_runs.append(services.run(CHAIN, cfg=_parameters(chain, lasting_cluster.address)))
        if chain == AT_ONCE[0]:
            continue  # the next one starts beside it
        if chain == ON_LASTING_CLUSTER[0]:
            wait_for(lambda: bool(_busy_workers()), 900)  # it does work there
        for flow_run in flow_runs[len(footprints) :]:
            services.completed(flow_run, 1800)
        services.wait_idle()
        wait_for(lambda: not _busy_workers(), 60, lambda: str(_busy_workers()))
        assert services.processes("raylet") == services.processes("ray::") == []
        footprints += [_footprint(services)] * (len(flow_runs) - len(footprints))
    return flow_runs, footprints


@pytest.mark.timeout(7200)
def test_ten_chains_in_a_row(services: Services, lasting_cluster: Cluster) -> None:
    flow_runs, footprints = _run_all(services, lasting_cluster)
    first, second = (services.flow_run(flow_runs[chain]) for chain in AT_ONCE)
    # The pool takes one at a time.
    assert min(first["end_time"], second["end_time"]) <= max(
        first["start_time"], second["start_time"]
    )

    # As many processes as after the first, and less than one more open file a run.
    assert {str(one.processes) for one in footprints} == {str(footprints[0].processes)}
    for name in SERVICES:
        grown = footprints[-1].open_files[name] - footprints[0].open_files[name]
        assert grown < len(SEEDS) - 1, (name, footprints)

    outcomes = _outcomes(services, flow_runs)
    _right_upstreams(services, outcomes)
    # Nothing was lost, nothing ran twice: 6 + 2 + 2 + 1 + 4 + 5 + 1 + 1 + 3 + 1 stage runs.
    runs = services.mlflow_runs("")
    assert {run["status"] for run in runs} == {"FINISHED"}
    stages = [run["tags"]["stage"] for run in runs]
    assert stages.count(PIPELINE) == len(SEEDS)
    assert sum(stage in STAGES for stage in stages) == 26


def _outcomes(services: Services, flow_runs: list[str]) -> list[dict[str, StageOutcome]]:
    """Return what each stage of each chain answered with."""
    chains = {
        run["tags"]["prefect.flow_run_id"]: run["tags"]
        for run in services.mlflow_runs(f"tags.stage = '{PIPELINE}'")
    }
    return [
        {
            stage: StageOutcome.model_validate_json(chains[flow_run][f"outcome.{stage}"])
            for stage in STAGES
        }
        for flow_run in flow_runs
    ]


def _right_upstreams(services: Services, outcomes: list[dict[str, StageOutcome]]) -> None:
    """Compare what was made, what MLflow names as upstream, and what the lineage leads to."""
    tracker = connect(TrackingConfig(tracking_uri=services.mlflow), Workspace(services.home))
    for chain, outcome in enumerate(outcomes):
        makers = {stage: _maker(chain, stage) for stage in STAGES}
        expected = {stage: outcomes[maker][stage].mlflow_run_id for stage, maker in makers.items()}
        assert {stage: one.mlflow_run_id for stage, one in outcome.items()} == expected, chain
        ran = {stage for stage in STAGES if not outcome[stage].reused}
        assert ran == {stage for stage, maker in makers.items() if maker == chain}
        for stage in STAGES:
            run_id = expected[stage]
            assert run_id is not None
            tags = tracker.read_run(run_id).tags
            for name, spec in STAGE_SPECS[stage].inputs.items():
                assert tags[f"upstream.{name}.run_id"] == expected[spec.name], (chain, stage, name)
        nodes = lineage_tree(tracker, f"runs:/{expected['evaluate']}").walk()
        assert {node.stage: node.mlflow_run_id for node in nodes if node.stage} == expected
