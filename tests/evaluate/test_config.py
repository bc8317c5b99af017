"""What an evaluation's config refuses, and what stays out of its fingerprint."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.config.shared import identity_fields
from tasks.evaluate.config import AnswersConfig, EndpointConfig, EvaluateConfig

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
        ({"gate": {"min_coverage": 1.1}}, "min_coverage"),
        *(
            ({"answers": {"files": {name: "x.jsonl"}}}, r"cannot be the name of a file")
            for name in ("", ".", "..", "a/b", "../a", "a\\b", "a\n", "a\0", " ", "a" * 201)
        ),
        (
            {"answers": {"backend": "openai", "served": {**SERVED, "../x": "m"}}},
            r"'\.\./x' cannot be the name of a file",
        ),
        (
            {
                "answers": {"files": {"pair": "x.jsonl"}},
                "judge": "openai",
                "judging": {"pairwise": True, "endpoint": {"model": "m"}},
            },
            "named 'pair', which is the file of comparisons",
        ),
        ({"answers": {"vllm": {"command": []}}}, "names no program"),
        (
            {"answers": {"vllm": {"arguments": ["--port=1", "--served_model_name", "x"]}}},
            r"\['--port', '--served-model-name'\] would change how the stage",
        ),
        ({"judging": {"endpoint": {"api_key_env": ""}}}, "names no variable; null is for"),
        ({"answers": {"endpoint": {"api_key_env": " "}}}, "names no variable; null is for"),
        ({"category_temperatures": {"math": -1}}, "category_temperatures.math"),
    ],
)
def test_what_cannot_work_is_refused(section: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        EvaluateConfig.model_validate(section)


def test_names_of_models_may_be_any_names_of_files() -> None:
    names = ("gpt-4", "llama3:8b", "größer", "...", "-a", "my model (2)")
    assert set(AnswersConfig(files=dict.fromkeys(names, "x")).files) == set(names)


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


def test_address_with_a_password_or_without_a_host_is_refused() -> None:
    for url in ("http://user:secret@host/v1", "host/v1", "ftp://host", "http://", "http://h:x/v1"):
        with pytest.raises(ValueError, match="base_url") as caught:
            EndpointConfig(base_url=url)
        assert "secret" not in str(caught.value).partition("input_value")[0]
    assert EndpointConfig(base_url="https://host/v1/").base_url == "https://host/v1"
