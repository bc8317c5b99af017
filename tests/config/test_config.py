"""Configuration: YAML, overrides, shared sections, and messages about what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.config.loading import (
    PACKAGED_CONFIGS,
    distribute_shared,
    find_config,
    known_keys,
    load_config,
    merge,
    parse_stage,
)
from tasks.config.shared import STAGES, identity_fields
from tasks.errors import ConfigError, MissingInputError
from tasks.ingest.config import IngestConfig
from tasks.pipeline_config import PipelineConfig
from tasks.sft.config import SftConfig

SharedCases = Callable[[str], list[dict[str, Any]]]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_config(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_config


def test_empty_file_gives_the_defaults(write: Write) -> None:
    assert load_config(write("")) == PipelineConfig()


def test_shared_sections_reach_every_stage_that_has_them(write: Write) -> None:
    cfg = load_config(
        write(
            "seed: 7\nruntime: {ranks: 2, dtype: bf16}\nrendering: {max_prompt_tokens: 64}\n"
            "sft: {seed: 1, runtime: {ranks: 4}}\n"
        )
    )
    assert [getattr(cfg, stage).seed for stage in STAGES] == [7, 1, 7, 7, 7, 7]
    # sft sets only `ranks` itself, so it keeps the shared dtype.
    assert (cfg.sft.runtime.ranks, cfg.sft.runtime.dtype) == (4, "bf16")
    assert (cfg.distill.runtime.ranks, cfg.distill.runtime.dtype) == (2, "bf16")
    assert cfg.evaluate.rendering.max_prompt_tokens == 64


def test_later_overrides_win_and_reach_shared_sections(write: Write) -> None:
    path = write("sft: {epochs: 1}\nruntime: {ranks: 2}\n")
    cfg = load_config(path, ["sft.epochs=2", "sft.epochs=3", "runtime.ranks=1", "seed=5"])
    assert cfg.sft.epochs == 3
    assert cfg.offline_ppo.runtime.ranks == 1
    assert cfg.evaluate.seed == 5


def test_overrides_are_yaml(write: Write) -> None:
    cfg = load_config(
        write(""),
        [
            "offline_ppo.reward.components={labels: 1.0}",
            "sft.optimizer.betas=[0.8, 0.9]",
            "sft.max_steps=null",
            "sft.optimizer.learning_rate=1e-3",
            "ingest.source=/data/a=b.jsonl",
        ],
    )
    assert cfg.offline_ppo.reward.components == {"labels": 1.0}
    assert cfg.sft.optimizer.betas == (0.8, 0.9)
    assert cfg.sft.max_steps is None
    assert cfg.sft.optimizer.learning_rate == 1e-3
    assert cfg.ingest.source == "/data/a=b.jsonl"


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("sft:\n  epohcs: 2\n", None, ("line 2", "'sft.epohcs'", "did you mean 'epochs'?")),
        ("", "sft.epohcs=2", ("-o sft.epohcs", "did you mean 'epochs'?")),
        ("rewardmodel: {}\n", None, ("line 1", "did you mean 'reward_model'?")),
        ("runtime: {rank: 2}\n", None, ("line 1", "'runtime.rank'", "did you mean 'ranks'?")),
        ("", "distill.model.sorce=a", ("'distill.model.sorce'", "did you mean 'source'?")),
        ("zzz: 1\n", None, ("unknown key 'zzz'", "known: name, reuse, stage_timeout_seconds")),
    ],
)
def test_unknown_key_is_named_with_the_closest_known_one(
    write: Write, text: str, override: str | None, expected: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), [override] if override else [])
    for part in expected:
        assert part in str(caught.value)


def test_shared_mistake_is_reported_once(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("seed: -1\n"))
    assert str(caught.value).count("seed") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sft: {epochs: many}\n", ("line 1", "sft.epochs", "valid number", "'many'")),
        ("sft: 3\n", ("sft", "should be a mapping", "got 3")),
        ("distill: {student: model}\n", ("distill", "`model`")),
        (
            "offline_ppo: {reward: {components: {rm: 1}}}\n",
            ("offline_ppo.reward", "components", "['rm']", "reward_model"),
        ),
        ("offline_ppo: {advantage: {gae_lambda: high}}\n", ("gae_lambda", "'adaptive'")),
    ],
)
def test_wrong_value_is_named(write: Write, text: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "evaluate.answers.vllm.command=vllm",
            "Input should be a list, for instance [vllm, serve], got 'vllm'",
        ),
        # By default it is empty.
        ("ingest.sources=a.jsonl", "Input should be a list, got 'a.jsonl'"),
        ("ingest.sources={a: b}", "Input should be a list"),
        ("sft.optimizer.betas=null", "Input should be a list, for instance [0.9, 0.999], got null"),
        ("evaluate.answers.served=[a]", "a mapping, such as {key: value}, got [a]"),
        ("evaluate.answers.vllm=true", "a mapping, such as {key: value}, got true"),
        ("reuse=maybe", "Input should be true or false, got 'maybe'"),
        ("sft.model.source=3", "Input should be text; put it in quotes, got 3"),
        ("sft.model.source=[3]", "Input should be text, got [3]"),
        ("sft.epochs=2026-01-01", "Input should be a valid number, got 2026-01-01"),
        ("seed=a", "unable to parse text as an integer, got 'a'"),
        ("evaluate.answers.backend=a", "Input should be 'transformers', 'vllm' or 'openai'"),
    ],
)
def test_wrong_type_is_told_in_the_words_of_yaml(
    write: Write, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(""), [override])
    assert expected in str(caught.value)
    assert not re.search(r"\b(tuple|dict|dictionary|str|string|bool|None)\b", str(caught.value))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sft: [\n", "is not YAML"),
        ("name: 2020-99-99\n", "is not YAML: month must be"),
        ("name: !!int x\n", "is not YAML"),
        ("name: !!bool x\n", "is not YAML"),
        ("name: !!timestamp x\n", "is not YAML"),
        ("name: " + "[" * 5000, "is not YAML"),
        ("- a\n", "holds a list"),
        ("a\n", "holds text"),
        (
            "sft: {epochs: 1}\nsft: {epochs: 2}\n",
            "line 2: the key 'sft' is already given in line 1",
        ),
        ("sft:\n  1: 2\n", "line 2: the key 1 is not text"),
    ],
)
def test_broken_files_are_refused(write: Write, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
        load_config(write(text))
    assert expected in str(caught.value)


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(path)


@pytest.mark.parametrize("override", ["sft.epochs", "=1", "sft..epochs=1", "sft.epochs=["])
def test_override_that_cannot_be_read_is_named(write: Write, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(""), [override])
    assert repr(override) in str(caught.value)


def test_seed_that_json_cannot_carry_is_rejected(write: Write, shared_cases: SharedCases) -> None:
    case = next(case for case in shared_cases("prefect") if case["id"] == "PF-05")
    seed = case["input"]["seed"]
    assert seed.bit_length() == case["expected"]["bits"]
    with pytest.raises(ConfigError) as caught:
        load_config(write(""), [f"seed={seed}"])
    assert str(seed) in str(caught.value)
    with pytest.raises(ValidationError):
        SftConfig(seed=seed)


@given(st.integers(min_value=0, max_value=2**53 - 1))
def test_every_accepted_seed_survives_prefects_serialiser(seed: int) -> None:
    cfg = IngestConfig(seed=seed)
    assert orjson.loads(orjson.dumps(cfg.model_dump(mode="json")))["seed"] == seed


def test_packaged_configs_are_valid_and_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    names = sorted(file.stem for file in PACKAGED_CONFIGS.glob("*.yaml"))
    assert {"demo", "hh_cpu", "hh_gpu"} <= set(names)
    for name in names:
        assert find_config(name) == PACKAGED_CONFIGS / f"{name}.yaml"
        load_config(find_config(name))


def test_demo_needs_nothing_from_outside() -> None:
    cfg = load_config(find_config("demo"))
    assert (cfg.ingest.source, cfg.sft.model.source, cfg.evaluate.questions) == (
        "demo",
        "tiny",
        "demo",
    )
    assert cfg.tracking.tracking_uri is None
    assert cfg.sft.runtime.ray_address is None


def test_missing_config_names_the_packaged_ones() -> None:
    with pytest.raises(
        MissingInputError, match=r"demo, demo_ablation, demo_distill, hh_cpu, hh_gpu"
    ):
        find_config("dmeo")
    with pytest.raises(MissingInputError, match=r"elsewhere/demo\.yaml"):
        find_config("elsewhere/demo.yaml")


def test_stage_names() -> None:
    assert parse_stage("reward-model") == "reward_model"
    with pytest.raises(ConfigError, match="did you mean 'distill'"):
        parse_stage("distil")


def test_settings_stay_out_of_the_identity() -> None:
    plain = SftConfig()
    moved = plain.model_copy(
        update={"runtime": plain.runtime.model_copy(update={"ray_address": "host:1"})}
    )
    assert identity_fields(plain) == identity_fields(moved)
    longer = plain.model_copy(update={"epochs": 2.0})
    assert identity_fields(plain) != identity_fields(longer)


def test_known_keys_follow_the_models() -> None:
    assert known_keys(("sft", "optimizer"))[:2] == ["learning_rate", "schedule"]
    assert known_keys(("distill", "model")) == ["source", "revision", "tiny"]
    assert known_keys(("offline_ppo", "reward", "components")) == []


_TREES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.integers() | inner, max_size=3),
    max_leaves=8,
)


@given(_TREES)
def test_merging_with_itself_or_nothing_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge(tree, tree) == tree
    assert merge(tree, {}) == tree
    assert merge({}, tree) == tree


@given(_TREES, _TREES)
def test_merge_keeps_what_only_one_side_has(base: dict[str, Any], over: dict[str, Any]) -> None:
    merged = merge(base, over)
    assert set(merged) == set(base) | set(over)
    assert all(merged[key] == base[key] for key in set(base) - set(over))


def test_distribution_leaves_its_input_alone() -> None:
    tree = {"seed": 1, "sft": {"epochs": 2}}
    before = yaml.safe_dump(tree)
    distribute_shared(tree)
    assert yaml.safe_dump(tree) == before
