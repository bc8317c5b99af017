"""The configuration of sampler, filters and control variate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tasks.algorithms.importance import adapt_tau
from tasks.algorithms.samplers import Priorities
from tasks.config.shared import Section
from tasks.offline_ppo.config import (
    ControlVariateConfig,
    FilterConfig,
    SamplerConfig,
    SequenceThresholdConfig,
)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (SamplerConfig, {"subset_weights": {"a": 2.0}}, r"names \['a'\], but stratify is off"),
        (SamplerConfig, {"stratify": True, "subset_weights": {"a": 0.0}}, "greater than 0"),
        (SamplerConfig, {"priority": "length"}, "'none', 'margin' or 'advantage'"),
        (SamplerConfig, {"priority_exponent": 0.0}, "greater than 0"),
        (SamplerConfig, {"uniform_share": 0.0}, "greater than 0"),
        (SamplerConfig, {"uniform_share": 1.0}, "less than 1"),
        (SamplerConfig, {"epoch_share": 1.0}, "less than 1"),
        (SamplerConfig, {"prioritise": "margin"}, "Extra inputs"),
        (FilterConfig, {"min_margin_quantile": 1.0}, "less than 1"),
        (FilterConfig, {"min_margin_quantile": -0.1}, "greater than or equal to 0"),
        (FilterConfig, {"max_length_quantile": 0.0}, "greater than 0"),
        (FilterConfig, {"drop_flags": ["duplicate", "duplicate"]}, "empty or repeated"),
        (FilterConfig, {"drop_flags": [""]}, "empty or repeated"),
        (FilterConfig, {"sequence": {"mode": "adaptive"}}, "adaptive with 0 targets"),
        (
            SequenceThresholdConfig,
            {"mode": "adaptive", "target_ess_share": 0.5, "target_keep_share": 0.5},
            "adaptive with 2 targets",
        ),
        (SequenceThresholdConfig, {"mode": "fixed", "target_ess_share": 0.5}, "fixed does not use"),
        (SequenceThresholdConfig, {"target_keep_share": 0.5}, "off does not use"),
        (SequenceThresholdConfig, {"tau_min": 2.0, "tau_max": 2.0}, "not below tau_max 2.0"),
        (SequenceThresholdConfig, {"tau": 0.9}, "greater than or equal to 1"),
        (SequenceThresholdConfig, {"tau": float("nan")}, "finite number"),
        (SequenceThresholdConfig, {"smoothing": 1.0}, "less than 1"),
        (ControlVariateConfig, {"kind": "fitted", "features": []}, "at least one of the features"),
        (ControlVariateConfig, {"features": ["length", "length"]}, "names one twice"),
        (ControlVariateConfig, {"features": ["reward"]}, "'length', 'prompt_mean' or 'value'"),
    ],
)
def test_values_that_cannot_work_are_refused(
    section: type[Section], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        section(**values)


def test_defaults_change_nothing() -> None:
    sampler, filters = SamplerConfig(), FilterConfig()
    assert (sampler.stratify, sampler.priority, sampler.subset_weights) == (False, "none", {})
    assert filters.sequence.mode == "off"
    assert ControlVariateConfig().kind == "none"
    assert (filters.min_margin_quantile, filters.max_length_quantile) == (0.0, 1.0)
    assert filters.drop_flags == ()


def test_what_the_configuration_allows_the_algorithms_accept() -> None:
    sampler = SamplerConfig(
        stratify=True,
        subset_weights={"a": 1e-3},
        priority="margin",
        priority_exponent=100.0,
        uniform_share=0.999,
        epoch_share=0.999,
    )
    Priorities([1.0], sampler.priority_exponent, sampler.uniform_share, sampler.epoch_share)
    threshold = SequenceThresholdConfig(
        mode="adaptive", tau_min=1.0, tau_max=1e8, target_keep_share=1.0
    )
    tau = adapt_tau(
        torch.tensor([-0.5, 0.1]),
        torch.ones(2),
        tau_min=threshold.tau_min,
        tau_max=threshold.tau_max,
        ess_share=threshold.target_ess_share,
        keep_share=threshold.target_keep_share,
    )
    assert math.log(tau) == pytest.approx(0.5)
    again = SequenceThresholdConfig.model_validate(threshold.model_dump(mode="json"))
    assert again == threshold
