"""Artefacts whose upstream has a newer version."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.promote import StaleArtifact, stale_artifacts
from tasks.config.shared import STAGES
from tasks.tracking.mlflow import Tracker

Start = Callable[..., str]


@pytest.fixture
def finish(tracker: Tracker) -> Start:
    """A function that records a finished run of a stage with these upstream fingerprints."""
    count = iter(range(1000))

    def run(stage: str, fingerprint: str, status: str = "FINISHED", **upstreams: str) -> str:
        tags = {f"upstream.{name}.fingerprint": value for name, value in upstreams.items()}
        place = f"/w/{stage}/{next(count)}"
        tags |= {"stage": stage, "fingerprint": fingerprint, "artifact.path": place}
        run_id = tracker.start_run(stage, tags, {})
        tracker.finish(run_id, status)  # type: ignore[arg-type]
        return run_id

    return run


def _chain(finish: Start, data: str = "data", base: str = "base") -> None:
    finish("ingest", data)
    finish("sft", base, preferences=data)
    finish("reward_model", f"rm-{base}", preferences=data, base=base)


def _names(found: list[StaleArtifact]) -> list[str]:
    return [artifact.name for artifact in found]


def test_fresh_chain_has_nothing_stale(finish: Start, tracker: Tracker) -> None:
    assert stale_artifacts(tracker) == []
    _chain(finish)
    assert stale_artifacts(tracker) == []
    finish("ingest", "data")  # the same once more
    assert stale_artifacts(tracker) == []


def test_newer_upstream_makes_all_below_it_stale(finish: Start, tracker: Tracker) -> None:
    _chain(finish)
    newer = finish("ingest", "other-data")
    found = {artifact.name: artifact for artifact in stale_artifacts(tracker)}
    assert list(found) == ["sft", "reward_model"]
    (reason,) = found["sft"].reasons
    assert reason == (f"preferences: stands on data, the newest ingest is other-data (run {newer})")
    assert found["reward_model"].reasons[1] == "base: sft is not up to date itself"
    assert found["sft"].path.startswith("/w/sft/")


def test_rerun_of_the_stage_makes_it_fresh(finish: Start, tracker: Tracker) -> None:
    _chain(finish)
    finish("ingest", "other-data")
    finish("sft", "new-base", preferences="other-data")
    assert _names(stale_artifacts(tracker)) == ["reward_model"]
    finish("reward_model", "new-rm", preferences="other-data", base="new-base")
    assert stale_artifacts(tracker) == []


def test_failed_run_is_no_version(finish: Start, tracker: Tracker) -> None:
    _chain(finish)
    finish("ingest", "other-data", status="FAILED")
    assert stale_artifacts(tracker) == []
    assert all(tracker.find_runs({"stage": stage}) for stage in STAGES[:3])
