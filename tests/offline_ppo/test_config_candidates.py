"""Settings of candidate responses that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.config.shared import RenderingConfig
from tasks.offline_ppo.config import CandidatesConfig, check_candidates


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "(a"}, r"pattern '\(a' is not a regular expression"),
        ({"pattern": "a{99999999999}"}, "is not a regular expression"),
        ({"per_prompt": -1}, "per_prompt"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"kl_bound": 0.1}, "closer to the model only above 1"),
        ({"kl_bound": 0.1, "temperature": 1.5, "min_temperature": 0.5}, "min_temperature 0.5"),
        ({"temperature_scale": 1.0}, "temperature_scale"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CandidatesConfig(**fields)


def test_candidates_must_fit_the_renderer() -> None:
    cfg = CandidatesConfig(per_prompt=1, max_new_tokens=33)
    with pytest.raises(ValueError, match=r"max_new_tokens 33 exceeds .* 32"):
        check_candidates(cfg, RenderingConfig(max_response_tokens=32))
    check_candidates(cfg, RenderingConfig(max_response_tokens=33))
    check_candidates(CandidatesConfig(max_new_tokens=33), RenderingConfig(max_response_tokens=32))
