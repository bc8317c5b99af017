"""An ablation of stage distill: students beside their teacher, on the small chain."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flows.ablation import rlhf_ablation
from tasks.ablation.report import SHARE, read_ablation
from tasks.artifacts import PolicyCheckpoint, StudentAdapter, load_artifact
from tasks.config.loading import load_config, merge
from tasks.pipeline_config import PipelineConfig
from tasks.tracking.mlflow import connect
from tasks.tracking.registry import Registry
from tasks.workspace import Workspace

pytestmark = pytest.mark.endurance
CONFIG = Path(__file__).parent / "small_ablation.yaml"


@pytest.fixture
def cfg() -> PipelineConfig:
    """Two methods of stage distill on one seed."""
    methods = {
        "soft": {"overrides": {"soft_labels.alpha": 1.0}},
        "hard": {"overrides": {"data": "chosen", "soft_labels.alpha": 0.0}},
    }
    shape = {"tuning_prompts": 16, "test_prompts": 64, "max_new_tokens": 32}
    section = {"stage": "distill", "methods": methods, "seeds": [0], "tuning_seeds": [0], **shape}
    chain = load_config(CONFIG).model_dump()
    report = {"distill": {"report": {"prompts": 0}}}
    return PipelineConfig.model_validate(merge(chain, report) | {"ablation": section})


def test_students_are_compared_with_their_teacher(
    cfg: PipelineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    empty_mlflow_db: Path,
    prefect_server: None,
    cluster: None,
) -> None:
    shutil.copy(empty_mlflow_db, tmp_path / "mlflow.db")
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.chdir(CONFIG.parents[2])
    report = read_ablation(Path(rlhf_ablation(cfg)).parent)
    assert [method.name for method in report.methods] == ["soft", "hard"]
    (teacher,), (base,) = report.teacher_runs, report.base_runs
    policy = load_artifact(Path(str(teacher.policy)), PolicyCheckpoint)
    assert policy.manifest.stage == "offline_ppo"
    rate = teacher.figures["good_rate"]
    for method in report.methods:
        (run,) = method.runs
        student = load_artifact(Path(str(run.policy)), StudentAdapter)
        assert student.manifest.parents["policy"].fingerprint == policy.fingerprint
        expected = pytest.approx(run.figures["good_rate"] / rate) if rate else None
        assert run.figures.get(SHARE) == expected
    assert base.figures["win_rate"] == 0.5 and teacher.figures["kl_per_token"] > 0.0
    # Neither candidate nor `latest`: they are trials.
    tracker = connect(cfg.tracking, Workspace.from_environment())
    assert Registry(tracker).versions() == []
    assert tracker.latest_finished("distill") is None
    page = (tmp_path / "ablation" / "ablation.md").read_text()
    assert "of the teacher's" in page and "| teacher |" in page
