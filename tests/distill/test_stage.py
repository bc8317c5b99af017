"""Stage distill on real components: labels, adapter, merged model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model_helpers import response_logprobs
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from flows.distill import distill
from flows.reward_model import train_reward_model
from flows.sft import sft
from flows.stages import RunOptions
from tasks.artifacts import StudentAdapter, load_artifact
from tasks.config.loading import load_config, merge
from tasks.config.shared import ModelConfig, TinyModelConfig
from tasks.distill.config import DistillConfig
from tasks.distill.student import check_findings, checked_rows
from tasks.errors import ConfigError, DataError, ModelError, RendererMismatchError
from tasks.models.loading import load_causal_lm, load_student, merge_adapter
from tasks.models.tiny import build_tiny_model
from tasks.runtime.rows import Row
from tasks.sft.config import SftConfig

CHAIN = load_config(Path(__file__).parents[1] / "small_chain.yaml")
REUSE = RunOptions(reuse=True)
SharedCases = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def policy(preferences: str, base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher other than the base: surer of its words."""
    source = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(Path(base) / "model", source)
    teacher = load_causal_lm(source)
    with torch.no_grad():
        teacher.model.norm.weight.mul_(1.3)
    teacher.save_pretrained(source)
    cfg = SftConfig(
        enabled=False, model=ModelConfig(source=str(source)), rendering=CHAIN.sft.rendering
    )
    return sft(cfg, preferences, REUSE)


@pytest.fixture(scope="module")
def reward_model(preferences: str, base: str) -> str:
    return train_reward_model(CHAIN.reward_model, preferences, base, REUSE)


@pytest.fixture(scope="module")
def train(preferences: str, policy: str, base: str, reward_model: str) -> Any:
    """A function that runs the stage with some changes and returns the student."""

    def run(**changes: Any) -> StudentAdapter:
        small = {"report": {"prompts": 0}}
        cfg = DistillConfig.model_validate(merge(merge(CHAIN.distill.model_dump(), small), changes))
        path = distill(cfg, preferences, policy, base, reward_model)
        return load_artifact(Path(path), StudentAdapter)

    return run


@pytest.fixture(scope="module")
def student(train: Any) -> StudentAdapter:
    """The student of the unchanged config, which learns on what its teacher writes."""
    found: StudentAdapter = train(report={"prompts": 12, "max_new_tokens": 16})
    return found


def _put(matrix: torch.Tensor, block: list[list[float]]) -> None:
    values = torch.tensor(block)
    matrix.zero_()
    matrix[: values.shape[0], : values.shape[1]] = values


def _merged_block(
    directory: Path, weights: dict[str, list[list[float]]], dtype: torch.dtype, **lora: Any
) -> torch.Tensor:
    """Put W, A and B into a model's first query projection, merge, and return the block of W."""
    name = "model.layers.0.self_attn.q_proj"
    spec = TinyModelConfig(hidden_size=8, n_layers=1, n_heads=2, vocab_size=262)
    base_dir = build_tiny_model(directory / "base", ["some text"], spec)
    base = load_causal_lm(base_dir)
    with torch.no_grad():
        _put(base.get_submodule(name).weight, weights["W"])
    base.to(dtype).save_pretrained(base_dir)
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **lora)
    adapter = get_peft_model(load_causal_lm(base_dir), config)
    projection = adapter.base_model.model.get_submodule(name)
    with torch.no_grad():
        _put(projection.lora_A["default"].weight, weights["A"])
        _put(projection.lora_B["default"].weight, weights["B"])
    adapter.save_pretrained(directory / "adapter")
    merge_adapter(base_dir, directory / "adapter", directory / "merged")
    merged = load_file(directory / "merged" / "model.safetensors")[f"{name}.weight"]
    n = len(weights["W"])
    assert merged.dtype == torch.float32
    assert float(merged.abs().sum()) == pytest.approx(float(merged[:n, :n].abs().sum()))
    return merged[:n, :n]


def _case(shared_cases: SharedCases, case_id: str) -> dict[str, Any]:
    return next(case for case in shared_cases("lora") if case["id"] == case_id)


@pytest.mark.parametrize(("scaling", "field"), [(False, "merged"), (True, "merged_rslora")])
def test_known_merge(shared_cases: SharedCases, tmp_path: Path, scaling: bool, field: str) -> None:
    case = _case(shared_cases, "LORA-01")
    given = case["input"]
    found = _merged_block(
        tmp_path, given, torch.float32, r=given["r"], lora_alpha=given["alpha"], use_rslora=scaling
    )
    expected = torch.tensor(case["expected"][field])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_merge_of_a_bf16_model_keeps_small_changes(
    shared_cases: SharedCases, tmp_path: Path
) -> None:
    case = _case(shared_cases, "LORA-03")
    weights = {"W": [[case["input"]["W"]]], "A": [[1.0]], "B": [[case["input"]["delta"]]]}
    found = _merged_block(tmp_path, weights, torch.bfloat16, r=1, lora_alpha=1)
    assert float(found) == case["expected"]["fp32_merged"]


def _findings(**changes: Any) -> dict[str, Any]:
    same = {"is_tied": True, "is_tied_in_base": True, "same_embeddings": True}
    return {"adapter": 9e-5, "merged": 9e-4, "largest_logit": 20.0, **same, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": 2e-4},
            r"adapter differs .* 2\.00e-04 in a logit; the largest logit is 20\..*1\.0e-04",
        ),
        ({"merged": 0.25}, r"exported merged differs .* 2\.50e-01 in a logit.*1\.0e-03"),
        # 320 is ten times an ordinary logit, and so is the limit.
        ({"adapter": 1.1e-3, "largest_logit": 320.0}, r"logit is 320\..*at most 1\.0e-03"),
        ({"adapter": 2e-4, "largest_logit": math.nan}, r"logit is nan\..*at most 1\.0e-04"),
        ({"merged": math.nan}, "differs from the trained student by nan"),
        ({"is_tied": False}, "embeddings are apart in the merged model and tied in its base"),
        ({"same_embeddings": False}, "other input embeddings than its base"),
    ],
)
def test_export_that_differs_is_refused(changes: dict[str, Any], message: str) -> None:
    assert check_findings(_findings()) == {
        "adapter_reload_difference": 9e-5,
        "merged_reload_difference": 9e-4,
    }
    with pytest.raises(ModelError, match=message):
        check_findings(_findings(**changes))


def test_larger_logits_may_differ_in_proportion() -> None:
    # 4e-4 is above 1e-4, and below 1e-4 * 160 / 32 = 5e-4; 4e-3 below 1e-3 * 160 / 32.
    large = _findings(adapter=4e-4, merged=4e-3, largest_logit=160.0)
    assert check_findings(large)["adapter_reload_difference"] == 4e-4


def test_embeddings_that_were_adapted_may_change() -> None:
    assert check_findings(_findings(same_embeddings=False), may_change_embeddings=True)


def test_where_the_export_is_checked() -> None:
    rows = [Row((1, i // 2), tuple(range(2 + i))) for i in range(80)]
    found = checked_rows(rows)
    assert len(found) == 32 and len({row.prompt_ids for row in found}) == 32
    # The first response to each prompt, and of it at most sixteen tokens.
    assert found[1] == Row((1, 1), (0, 1, 2, 3))
    assert {len(row.response_ids) for row in found[7:]} == {16}


@pytest.mark.slow
def test_merged_model_equals_base_with_adapter(student: StudentAdapter, base: str) -> None:
    prompt, response = (2, 4, 60, 61, 3, 5), (70, 71, 72, 3)
    with_adapter = load_student(Path(base) / "model", student.path / "adapter")
    one = response_logprobs(with_adapter, prompt, response)
    two = response_logprobs(load_causal_lm(student.path / "merged"), prompt, response)
    torch.testing.assert_close(one, two, atol=1e-4, rtol=0)
    before = response_logprobs(load_causal_lm(Path(base) / "model"), prompt, response)
    assert float((two - before).abs().max()) > 1e-3
    for name, limit in (("adapter", 1e-4), ("merged", 1e-3)):
        assert 0.0 <= student.manifest.metrics[f"{name}_reload_difference"] <= limit


@pytest.mark.slow
def test_adapter_is_what_was_asked_for(student: StudentAdapter) -> None:
    config = json.loads((student.path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    weights = load_file(student.path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any(float(t.abs().max()) > 0 for name, t in weights.items() if "lora_B" in name)


@pytest.mark.slow
def test_teacher_writes_one_response_per_prompt(
    student: StudentAdapter, train: Any, base: str
) -> None:
    counts = student.manifest.counts
    pairs = train(data="chosen").manifest.counts["rows"]
    # The world's prompts are distinct: one per pair.
    assert counts["rows"] + counts["teacher_responses_without_end"] == pairs
    assert counts["rows"] > 0 and counts["steps"] == 4


@pytest.mark.slow
def test_stored_responses_as_data(train: Any, home: Path) -> None:
    chosen, both = train(data="chosen"), train(data="all")
    assert both.manifest.counts["rows"] == 2 * chosen.manifest.counts["rows"]
    labels = set((home / "cache" / "teacher").glob("*/*.parquet"))
    assert labels
    # The labels depend on neither steps nor weights of the loss: they are read back.
    longer = train(data="all", max_steps=6, soft_labels={"alpha": 0.9})
    assert longer.manifest.counts["steps"] == 6
    assert set((home / "cache" / "teacher").glob("*/*.parquet")) == labels


@pytest.mark.slow
def test_a_single_soft_label_is_enough(train: Any) -> None:
    student = train(data="chosen", soft_labels={"top_k": 1, "tau": 1.0, "alpha": 1.0})
    assert all(math.isfinite(value) for value in student.manifest.metrics.values())


@pytest.mark.slow
def test_same_config_gives_the_same_bytes(student: StudentAdapter, train: Any) -> None:
    again = train(report={"prompts": 12, "max_new_tokens": 16})
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (again.path / name).read_bytes() == (student.path / name).read_bytes()


@pytest.mark.slow
def test_teacher_that_never_ends_is_told(train: Any) -> None:
    with pytest.raises(DataError, match=r"responses ended in 1 tokens.*max_new_tokens"):
        train(generation={"max_new_tokens": 1})


@pytest.mark.slow
def test_report_stands_beside_the_student(student: StudentAdapter) -> None:
    record = json.loads((student.path / "report" / "report.json").read_text())
    assert record["n_prompts"] == 12
    models = record["models"]
    assert set(models) == {"student", "teacher", "base"}
    for figures in models.values():
        assert figures["tokens_per_second"] > 0 and figures["perplexity"] > 1.0
    # The teacher differs from the base by a factor in its last norm; the student is its adapter.
    assert models["student"]["parameters"] == models["base"]["parameters"]
    assert 0 < record["adapter_parameters"] < models["base"]["parameters"]
    agreement = record["agreement"]
    assert 0.0 < agreement["kl"]["value"] < 1.0 and 0.5 < agreement["same_top"] <= 1.0
    assert agreement["is_exact"]
    for rate in record["win_rates"].values():
        assert rate["n_wins"] + rate["n_ties"] + rate["n_losses"] == 12
    names = {file.name for file in (student.path / "report").iterdir()}
    assert {"overview.png", "report.md", "history.jsonl", "against_base.parquet"} <= names
    assert student.manifest.metrics["teacher_same_top"] == agreement["same_top"]


@pytest.mark.slow
def test_cards_say_where_the_student_comes_from(
    student: StudentAdapter, preferences: str, policy: str
) -> None:
    for form in ("adapter", "merged"):
        card = (student.path / form / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == {"adapter": "peft", "merged": "transformers"}[form]
        assert head["license"] == "other" and head["pipeline_tag"] == "text-generation"
        for artefact in (preferences, policy):
            assert json.loads((Path(artefact) / "artifact.json").read_text())["fingerprint"][
                :16
            ] in (card)
        assert "teacher\\_same\\_top" in card and "adapter\\_reload\\_difference" in card


@pytest.mark.endurance
def test_mixture_with_everything(train: Any) -> None:
    """Sampled labels, a quantile of rewards, weights of agreement, a stabilised adapter."""
    student = train(
        data="mixture",
        min_reward_quantile=0.25,
        reward_weighting="agreement",
        soft_labels={"kind": "sampled", "samples": 6},
        lora={"dropout": 0.1, "use_rslora": True},
    )
    counts, metrics = student.manifest.counts, student.manifest.metrics
    left = counts["teacher_responses_without_end"] + counts["teacher_responses_below_quantile"]
    pairs = (counts["rows"] + left) // 2
    assert counts["rows"] + left == 2 * pairs
    ended = pairs - counts["teacher_responses_without_end"]
    # A quarter is left out, but for equal rewards at the bound.
    assert 0 < counts["teacher_responses_below_quantile"] <= 0.25 * ended + 1
    assert 0.0 < metrics["agreement_weight_min"] < 1.0 < metrics["agreement_weight_max"]
    config = json.loads((student.path / "adapter" / "adapter_config.json").read_text())
    assert config["use_rslora"] and config["lora_dropout"] == 0.1 and not config["use_dora"]


@pytest.mark.endurance
def test_whole_rows_and_a_decomposed_adapter(train: Any) -> None:
    student = train(
        data="chosen", soft_labels={"kind": "full", "loss": "jsd"}, lora={"use_dora": True}
    )
    weights = load_file(student.path / "adapter" / "adapter_model.safetensors")
    assert any("lora_magnitude_vector" in name for name in weights)
    assert student.manifest.metrics["adapter_reload_difference"] <= 1e-4


@pytest.mark.slow
def test_sequence_level_needs_no_labels(train: Any, home: Path) -> None:
    before = set((home / "cache" / "teacher").glob("*/*"))
    student = train(soft_labels={"loss": "sequence"}, seed=7)
    assert "teacher_label_bytes" not in student.manifest.counts
    assert set((home / "cache" / "teacher").glob("*/*")) == before


@pytest.mark.endurance
def test_student_trained_in_bf16_is_compared_in_fp32(train: Any) -> None:
    student = train(data="chosen", runtime={"dtype": "bf16"}, soft_labels={"loss": "reverse_kl"})
    assert student.manifest.metrics["adapter_reload_difference"] <= 1e-4
    assert student.manifest.metrics["merged_reload_difference"] <= 1e-3


@pytest.mark.slow
def test_labels_over_the_limit_are_refused_before_they_are_made(train: Any, home: Path) -> None:
    before = set((home / "cache" / "teacher").glob("*"))
    limits = {"top_k": 20, "max_cache_gib": 1e-6}
    with pytest.raises(ConfigError, match=r"top_k, 20 a token.*max_cache_gib = 1e-06"):
        train(data="chosen", soft_labels=limits)
    assert set((home / "cache" / "teacher").glob("*")) == before


@pytest.mark.slow
def test_targets_that_match_nothing_are_refused(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"target_modules names 'query'.*q_proj"):
        train(lora={"target_modules": ["q_proj", "query"]})


@pytest.mark.slow
def test_other_renderer_is_refused(train: Any) -> None:
    with pytest.raises(RendererMismatchError, match="the teacher was made with renderer"):
        train(rendering={"max_response_tokens": 63})


@pytest.mark.slow
def test_student_with_other_tokens_is_refused(train: Any, tmp_path: Path) -> None:
    spec = TinyModelConfig(hidden_size=32, n_layers=1, n_heads=2, vocab_size=262)
    other = build_tiny_model(tmp_path / "other", ["some text"], spec)
    with pytest.raises(RendererMismatchError, match="tokenize differently"):
        train(student="model", model={"source": str(other)})
