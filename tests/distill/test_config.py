"""The distillation's settings: what contradicts itself is refused, with both fields named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tasks.ablation.config import AblationConfig
from tasks.config.shared import LoraConfig, identity_fields
from tasks.distill.config import DistillConfig, SoftLabelConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"soft_labels": {"kind": "sampled", "loss": "jsd"}}, "sampled estimates the forward KL"),
        ({"soft_labels": {"kind": "sampled", "loss": "reverse_kl"}}, "not reverse_kl"),
        ({"soft_labels": {"loss": "sequence"}, "data": "chosen"}, "data is 'chosen'"),
        ({"soft_labels": {"loss": "sequence"}, "data": "mixture"}, "set data: teacher"),
        ({"min_reward_quantile": 0.2, "data": "all"}, "of which data 'all' has none"),
        ({"min_reward_quantile": 1.0}, "min_reward_quantile"),
        ({"lora": {"dropout": 1.0}}, "dropout"),
        ({"soft_labels": {"alpha": 1.5}}, "alpha"),
        ({"soft_labels": {"tau": 0.0}}, "tau"),
        ({"student": "model"}, "give `model` exactly when"),
        ({"batch_rows": 9, "runtime": {"ranks": 2}}, "batch_rows 9"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DistillConfig.model_validate(changes)


def test_labels_are_used_unless_nothing_reads_them() -> None:
    assert SoftLabelConfig().is_used
    assert not SoftLabelConfig(alpha=0.0).is_used
    assert not SoftLabelConfig(loss="sequence").is_used


def test_what_changes_no_student_is_not_in_its_identity() -> None:
    fields = identity_fields(DistillConfig())
    assert "max_cache_gib" not in fields["soft_labels"]
    # The card is part of what is published, and the size of a batch decides what is drawn.
    assert "card" in fields and "batch_size" in fields["generation"]
    assert {"data", "min_reward_quantile", "reward_weighting"} <= set(fields)
    # The reward model's adapter has none of the student's options.
    assert set(identity_fields(LoraConfig())) == {"rank", "alpha", "target_modules"}


def test_ablations_of_students() -> None:
    section = AblationConfig.model_validate(
        {"stage": "distill", "methods": {"hard": {"overrides": {"soft_labels.alpha": 0.0}}}}
    )
    found = section.resolve(DistillConfig())
    assert found["hard", 0].soft_labels.alpha == 0.0
    wrong = AblationConfig.model_validate(
        {"stage": "distill", "methods": {"hard": {"overrides": {"soft_label.alpha": 0.0}}}}
    )
    with pytest.raises(ValidationError, match=r"unknown key 'soft_label' of distill.*soft_labels"):
        wrong.resolve(DistillConfig())
    for name in ("base", "teacher"):
        with pytest.raises(ValidationError, match=f"a method is named '{name}'"):
            AblationConfig.model_validate({"methods": {name: {}}})
