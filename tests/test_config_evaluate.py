"""What an evaluation's config refuses, and what stays out of its fingerprint."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.config import AnswersConfig, EvaluateConfig, identity_fields

SERVED = {"base": "b", "policy": "p", "student": "s"}


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({"judge": "openai"}, "needs judging.endpoint.model"),
        ({"judge": "transformers"}, "needs judging.model"),
        ({"judging": {"pairwise": True}}, "pairwise needs the judge"),
        ({"answers": {"backend": "openai"}}, r"answers.served for \['base', 'policy', 'student'\]"),
        ({"answers": {"served": SERVED}}, "needs answers.backend 'openai'"),
        ({"answers": {"files": {"base": "x"}}}, r"names \['base'\], which answer for themselves"),
        (
            {"answers": {"backend": "openai", "served": SERVED, "addresses": {"x": "http://h"}}},
            r"addresses names \['x'\]",
        ),
        ({"answers": {"addresses": {"base": "http://user:secret@h"}}}, "user name or password"),
        ({"gate": {"min_win_rate": 1.5}}, "min_win_rate"),
        ({"gate": {"max_regression": -1}}, "max_regression"),
    ],
)
def test_what_cannot_work_is_refused(section: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        EvaluateConfig.model_validate(section)


def test_each_name_may_have_a_server_of_its_own() -> None:
    answers = AnswersConfig.model_validate(
        {
            "backend": "openai",
            "served": SERVED,
            "endpoint": {"base_url": "http://one/v1"},
            "addresses": {"policy": "http://two/v1/"},
        }
    )
    found = {name: answers.endpoint_of(name) for name in SERVED}
    assert {name: (e.base_url, e.model) for name, e in found.items()} == {
        "base": ("http://one/v1", "b"),
        "policy": ("http://two/v1", "p"),
        "student": ("http://one/v1", "s"),
    }


def test_address_budget_and_patience_do_not_change_the_result() -> None:
    fields = identity_fields(EvaluateConfig())
    assert set(fields["judging"]["endpoint"]) == {"model"}
    assert "addresses" not in fields["answers"]
    assert {"repeats", "pairwise", "rating_attempts"} <= set(fields["judging"])
