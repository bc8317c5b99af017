"""Runs of stage offline_ppo that a test disturbs, and what they leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasks.artifacts import PolicyCheckpoint
from tasks.config.shared import TrackingConfig
from tasks.offline_ppo.loop import PPOLoop
from tasks.tracking.mlflow import connect
from tasks.workspace import Workspace


def tags_of(policy: PolicyCheckpoint) -> dict[str, str]:
    """Return the tags of the MLflow run that made a policy."""
    tracker = connect(TrackingConfig(), Workspace.from_environment())
    assert policy.manifest.mlflow_run_id is not None
    return dict(tracker.read_run(policy.manifest.mlflow_run_id).tags)


def weights_of(policy: PolicyCheckpoint) -> bytes:
    """Return the file of a policy's weights."""
    return (policy.model_dir / "model.safetensors").read_bytes()


def before_windows(monkeypatch: pytest.MonkeyPatch, action: Callable[[PPOLoop], None]) -> None:
    """Do something before each window of steps."""
    window = PPOLoop._window

    def disturbed(loop: PPOLoop) -> None:
        action(loop)
        window(loop)

    monkeypatch.setattr(PPOLoop, "_window", disturbed)


def fail_at(step: int, loop: PPOLoop) -> None:
    """Fail at a step as nothing that the loop knows does."""
    if loop.state.step == step:
        raise RuntimeError("the power went")
