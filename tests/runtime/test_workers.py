"""Real verl workers on a real Ray cluster, one rank: numbers, state on disk, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import load_reward_model
from torch import Tensor

from tasks.config.shared import OptimizerConfig
from tasks.errors import ArtifactError, ClusterError, ConfigError, ModelError, TrainingError
from tasks.models.loading import load_causal_lm, load_student
from tasks.runtime.logits_hooks import RowReader, TopKReader
from tasks.runtime.placement import reserve
from tasks.runtime.rows import Batch, HostSpec, RoleSpec, Row
from tasks.runtime.supervised import CheckpointStore

pytestmark = pytest.mark.slow

ROLE = "model"
KINDS = ["cloning", "bradley-terry", "ppo", "topr", "dpo", "critic", "distillation"]
Open = Callable[..., Any]
FirstStep = Callable[..., dict[str, float]]


def _reader(scenario: Any, exported: Path, base: Path) -> Any:
    """Load an export as its readers do, ready for a gradient."""
    if scenario.spec.lora is not None:
        student = load_student(base, exported)
        for name, parameter in student.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return student
    load = load_reward_model if scenario.spec.kind == "value_model" else load_causal_lm
    return load(exported)


def _norm(model: Any) -> float:
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(grads).norm())


@pytest.mark.parametrize("kind", KINDS)
def test_step_equals_plain_pytorch(
    kind: str, scenarios: Any, first_step: FirstStep, tiny_dir: Path, tmp_path: Path
) -> None:
    scenario = scenarios[kind]
    metrics = first_step(scenario, export_to=tmp_path / "before")
    model = _reader(scenario, tmp_path / "before", tiny_dir)
    loss = scenario.plain(model)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(_norm(model), rel=1e-5)
    assert metrics["grad_norm"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_the_batch_changes_nothing(
    kind: str, scenarios: Any, first_step: FirstStep
) -> None:
    # The longest pair needs 2 * 32 tokens: with 64 every pair, and the longer rows, stand alone.
    found = [first_step(scenarios[kind], tokens_per_micro_batch=n) for n in (64, 150, 16384)]
    for name in found[0]:
        values = [metrics[name] for metrics in found]
        assert values[:2] == pytest.approx([values[2]] * 2, rel=1e-5, abs=1e-5), name


@pytest.fixture
def actor(open_workers: Open, tiny_dir: Path) -> Any:
    """Workers that hold the tiny language model."""
    session = open_workers()
    session.load(RoleSpec(ROLE, "language_model", str(tiny_dir)))
    return session


@pytest.fixture(scope="module")
def plain_logits(tiny_dir: Path, rows: list[Row]) -> list[Tensor]:
    """What transformers computes before each response token, row by row."""
    model = load_causal_lm(tiny_dir)
    found = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with torch.no_grad():
            found.append(model(ids).logits[0, len(row.prompt_ids) - 1 : -1])
    return found


def _assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-5, rtol=0)


def test_logprobs_equal_plain_transformers(
    actor: Any, rows: list[Row], plain_logits: list[Tensor]
) -> None:
    for temperature in (1.0, 0.7):
        found = actor.logprobs(ROLE, rows, temperature=temperature)
        expected = [
            (logits / temperature).log_softmax(-1)[range(len(row.response_ids)), row.response_ids]
            for logits, row in zip(plain_logits, rows, strict=True)
        ]
        _assert_close(found, expected)


def test_logprobs_do_not_depend_on_order_or_batch_mates(actor: Any, rows: list[Row]) -> None:
    together = actor.logprobs(ROLE, rows)
    _assert_close(actor.logprobs(ROLE, rows[::-1])[::-1], together)
    _assert_close(actor.logprobs(ROLE, rows[3:4]), together[3:4])


def test_more_rows_than_one_call_takes(
    actor: Any, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = actor.logprobs(ROLE, rows)
    monkeypatch.setattr("tasks.runtime.session.ROWS_PER_CALL", 3)
    _assert_close(actor.logprobs(ROLE, rows), together)


def test_top_k_equals_plain_transformers(
    actor: Any, rows: list[Row], plain_logits: list[Tensor]
) -> None:
    vocabulary = plain_logits[0].shape[-1]
    found = actor.read_tokens(ROLE, rows, TopKReader(5, 2.0, vocabulary))
    expected = [(logits / 2.0).log_softmax(-1).topk(5, -1) for logits in plain_logits]
    for logprobs, ids, top in zip(
        found["teacher_logprobs"], found["teacher_ids"], expected, strict=True
    ):
        assert torch.equal(ids, top.indices)
        tail = torch.log1p(-top.values.exp().sum(-1, keepdim=True))
        _assert_close([logprobs], [torch.cat([top.values, tail], -1)])


def test_a_padded_vocabulary_is_cut(
    actor: Any, rows: list[Row], plain_logits: list[Tensor]
) -> None:
    found = actor.read_tokens(ROLE, rows, RowReader(2.0, 100))["teacher_logprobs"]
    _assert_close(found, [(logits[:, :100] / 2.0).log_softmax(-1) for logits in plain_logits])


def test_scores_and_values_equal_plain_transformers(
    open_workers: Open, tiny_dir: Path, rows: list[Row], tmp_path: Path
) -> None:
    session = open_workers()
    session.load(RoleSpec(ROLE, "value_model", str(tiny_dir), seed=3))
    session.export(ROLE, tmp_path / "reward")
    model = load_reward_model(tmp_path / "reward")
    outputs = [
        model(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0, :, 0].detach()
        for row in rows
    ]
    states = [x[len(row.prompt_ids) - 1 :] for x, row in zip(outputs, rows, strict=True)]
    scores = session.scores(ROLE, rows)
    torch.testing.assert_close(scores, torch.stack([x[-1] for x in outputs]), atol=1e-5, rtol=0)
    torch.testing.assert_close(session.scores(ROLE, rows[::-1]).flip(0), scores, atol=1e-5, rtol=0)
    torch.testing.assert_close(session.scores(ROLE, rows[:1]), scores[:1], atol=1e-5, rtol=0)
    _assert_close(session.values(ROLE, rows), states)


def _bytes(directory: Path) -> bytes:
    return next(directory.glob("*model.safetensors")).read_bytes()


@pytest.mark.parametrize("kind", ["cloning", "critic", "distillation"])
def test_restored_training_goes_on_bit_by_bit(
    kind: str, scenarios: Any, open_workers: Open, tmp_path: Path
) -> None:
    scenario, session = scenarios[kind], open_workers()
    # A schedule that moves, so that a lost step of it would be seen.
    moving = OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_share=0.0)
    spec = replace(scenario.spec, optimizer=moving)
    store = CheckpointStore(tmp_path / "state", keep=2)

    def train(steps: int) -> list[dict[str, float]]:
        session.set_loss(ROLE, scenario.loss_fn)
        return [session.train_step(ROLE, scenario.batch) for _ in range(steps)]

    session.load(spec)
    train(2)
    store.save(2, session, [ROLE], {"sampler": {"position": 7}})
    straight = train(2)
    session.export(ROLE, tmp_path / "straight")

    session.load(replace(spec, seed=99))
    assert store.restore(store.latest_step(), session, [ROLE]) == {"sampler": {"position": 7}}
    assert train(2) == straight
    session.export(ROLE, tmp_path / "resumed")
    assert _bytes(tmp_path / "resumed") == _bytes(tmp_path / "straight")
    assert straight[0]["lr"] != straight[1]["lr"]


def test_only_complete_checkpoints_count(actor: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest_step() == 0
    for step in (1, 2, 3):
        store.save(step, actor, [ROLE], {})
    (tmp_path / ".tmp-step-00000009").mkdir()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000002",
        "step-00000003",
    ]
    assert store.latest_step() == 3


@pytest.mark.parametrize("file", ["trainer.pt", f"{ROLE}/model_*.pt"])
def test_torn_checkpoint_is_named(actor: Any, tmp_path: Path, file: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(3, actor, [ROLE], {"sampler": {}})
    (torn,) = (tmp_path / "step-00000003").glob(file)
    torn.write_bytes(torn.read_bytes()[:100])
    with pytest.raises(ArtifactError, match=r"step-00000003 cannot be read.*remove"):
        store.restore(3, actor, [ROLE])


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("language_model", "LlamaForCausalLM"), ("value_model", "LlamaForTokenClassification")],
)
def test_export_says_what_it_is(
    kind: Any, architecture: str, open_workers: Open, tiny_dir: Path, tmp_path: Path
) -> None:
    session = open_workers()
    session.load(RoleSpec(ROLE, kind, str(tiny_dir)))
    session.export(ROLE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert config["dtype"] == "float32" and "torch_dtype" not in config
    # No other program has the workers' attention.
    assert "attn_implementation" not in config and "tree_attention" not in str(config)
    load = load_causal_lm if kind == "language_model" else load_reward_model
    model, base = load(tmp_path), load_causal_lm(tiny_dir)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.embed_tokens.weight, base.model.embed_tokens.weight)


def test_adapter_is_exported_alone(scenarios: Any, open_workers: Open, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    session = open_workers()
    session.load(scenarios["distillation"].spec)
    session.export(ROLE, tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert names and all("lora_" in name for name in names)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")


def test_language_model_is_refused_as_reward_model(open_workers: Open, tiny_dir: Path) -> None:
    spec = RoleSpec(ROLE, "value_model", str(tiny_dir), trained_head=True)
    with pytest.raises(ModelError, match="has no value head"):
        open_workers().load(spec)


def test_nan_in_a_column_stops_before_the_step(
    scenarios: Any, first_step: FirstStep, open_workers: Open
) -> None:
    scenario = scenarios["ppo"]
    good = first_step(scenario)
    spoiled = [column.clone() for column in scenario.batch.columns["advantages"]]
    spoiled[5][1] = math.nan
    columns = scenario.batch.columns | {"advantages": spoiled}
    session = open_workers()
    session.load(scenario.spec)
    session.set_loss(ROLE, scenario.loss_fn)
    with pytest.raises(TrainingError, match=f"Role {ROLE}: loss is nan"):
        session.train_step(ROLE, Batch(scenario.batch.rows, columns))
    # Neither weights nor gradients of the failed step are left.
    assert session.train_step(ROLE, scenario.batch) == good


def test_gradient_that_is_not_finite_stops_and_changes_nothing(
    scenarios: Any, open_workers: Open, tmp_path: Path
) -> None:
    scenario, session = scenarios["critic"], open_workers()
    huge = [torch.full_like(column, 1e30) for column in scenario.batch.columns["returns"]]
    session.load(scenario.spec)
    session.set_loss(ROLE, scenario.loss_fn)
    session.export(ROLE, tmp_path / "before")
    with pytest.raises(TrainingError, match=f"Role {ROLE}: loss is inf"):
        session.train_step(
            ROLE, Batch(scenario.batch.rows, scenario.batch.columns | {"returns": huge})
        )
    session.export(ROLE, tmp_path / "after")
    assert _bytes(tmp_path / "after") == _bytes(tmp_path / "before")


def test_learning_rate_that_is_too_high_is_told(scenarios: Any, open_workers: Open) -> None:
    scenario, session = scenarios["cloning"], open_workers()
    wild = OptimizerConfig(learning_rate=1e30, schedule="constant", warmup_share=0.0)
    session.load(replace(scenario.spec, optimizer=wild))
    session.set_loss(ROLE, scenario.loss_fn)
    session.train_step(ROLE, scenario.batch)
    with pytest.raises(TrainingError):
        session.train_step(ROLE, scenario.batch)


def test_group_that_exceeds_a_micro_batch(scenarios: Any, first_step: FirstStep) -> None:
    with pytest.raises(ConfigError, match=r"64 tokens.*tokens_per_micro_batch=63"):
        first_step(scenarios["bradley-terry"], tokens_per_micro_batch=63)


def test_roles_come_and_go_in_the_same_processes(
    actor: Any, open_workers: Open, tiny_dir: Path, rows: list[Row]
) -> None:
    before = actor.groups[0].resources()[0]
    assert (before["device"], before["threads"]) == ("cpu", 1)
    again = open_workers(tokens_per_micro_batch=512)
    assert again.groups[0].resources()[0]["pid"] == before["pid"]
    with pytest.raises(Exception, match=ROLE):
        again.logprobs(ROLE, rows)


def test_more_ranks_than_cpus_are_refused_at_once(actor: Any) -> None:
    with pytest.raises(ClusterError, match="one for each of 1000 ranks"):
        reserve(HostSpec(1000, "cpu", 1))
