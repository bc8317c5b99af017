"""A tiny model, one Ray cluster for all tests here, and one training step of each kind.

Each step is known twice: as the loss function of the workers, and as plain PyTorch that runs one
row after the other through transformers, without padding, packing, micro-batches or ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.config.shared import LoraConfig, OptimizerConfig, RuntimeConfig
from tasks.data.rendering import load_tokenizer
from tasks.offline_ppo.config import OfflinePPOConfig, PolicyLossConfig
from tasks.offline_ppo.step import actor_loss
from tasks.runtime.logits_hooks import FLAG, StudentLoss
from tasks.runtime.rows import Batch, RoleSpec, Row
from tasks.runtime.session import worker_environment

# verl reads this when it is imported, which some of these tests do before workers are opened.
_VERL = {k: v for k, v in worker_environment("cpu").items() if k.startswith("VERL_")}
os.environ.update(_VERL)

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_share=0.0)
ROLE = "model"
N_ROWS = 8


@dataclass(frozen=True)
class Scenario:
    """One training step.

    Args:
        spec: the role.
        batch: what it is trained on.
        loss_fn: the workers' loss.
        plain: the same loss of a transformers model, by an independent computation.
    """

    spec: RoleSpec
    batch: Batch
    loss_fn: Callable[..., Any]
    plain: Callable[[Any], Tensor]


Scenarios = dict[str, Scenario]


def _ids(n_tokens: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(6, 262, (n_tokens,), generator=generator).tolist())


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """Rows of 5 to 32 tokens, two to a prompt."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for pair in range(N_ROWS // 2):
        prompt = _ids(3 + 5 * pair, generator)
        found += [Row(prompt, _ids(n, generator)) for n in (2 + 4 * pair, 18 - 4 * pair)]
    return found


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Ray, for all tests of this folder."""
    from tasks.runtime.session import cluster_session

    with cluster_session():
        yield


@pytest.fixture(scope="session")
def runtime() -> RuntimeConfig:
    """One rank on the CPU."""
    return RuntimeConfig(device="cpu", cpu_threads=1)


@pytest.fixture
def open_workers(cluster: None, runtime: RuntimeConfig) -> Callable[..., Any]:
    """A function that opens the worker group; keywords change the runtime."""
    from tasks.runtime.session import open_session

    return lambda **changes: open_session(runtime.model_copy(update=changes))


@pytest.fixture
def first_step(open_workers: Callable[..., Any]) -> Callable[..., dict[str, float]]:
    """A function that takes one step of a scenario on fresh workers and returns its metrics."""

    def take(scenario: Scenario, export_to: Path | None = None, **runtime: Any) -> dict[str, float]:
        session = open_workers(**runtime)
        session.load(scenario.spec)
        if export_to is not None:
            session.export(ROLE, export_to)
        session.set_loss(ROLE, scenario.loss_fn)
        metrics: dict[str, float] = session.train_step(ROLE, scenario.batch)
        return metrics

    return take


def _logits(model: Any, row: Row) -> Tensor:
    """Return what the model says before each response token, shape (T, V) or (T, 1)."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    found: Tensor = model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
    return found


def _logprobs(model: Any, row: Row) -> Tensor:
    return _logits(model, row).log_softmax(-1)[range(len(row.response_ids)), row.response_ids]


def _n_tokens(rows: list[Row]) -> int:
    return sum(len(row.response_ids) for row in rows)


def _plain_cloning(rows: list[Row], model: Any) -> Tensor:
    return -torch.cat([_logprobs(model, row) for row in rows]).sum() / _n_tokens(rows)


def _plain_pairs(rows: list[Row], center_coef: float, model: Any) -> Tensor:
    ids = [torch.tensor([[*row.prompt_ids, *row.response_ids]]) for row in rows]
    scores = torch.stack([model(row).logits[0, -1, 0] for row in ids])
    chosen, rejected = scores[0::2], scores[1::2]
    pair_loss = torch.log1p(torch.exp(rejected - chosen)) + center_coef * (chosen + rejected) ** 2
    return pair_loss.mean()


def _plain_ppo(batch: Batch, model: Any) -> Tensor:
    total = torch.zeros(())
    for i, row in enumerate(batch.rows):
        advantage, weight = (batch.columns[name][i] for name in ("advantages", "weights"))
        ratio = torch.exp(_logprobs(model, row) - batch.columns["proximal_logprobs"][i])
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        # Negative advantages: the gain never falls below dual_clip * A.
        gain = torch.where(advantage < 0, torch.maximum(gain, 3.0 * advantage), gain)
        total = total - (weight * gain).sum()
    return total / _n_tokens(list(batch.rows))


def _plain_topr(batch: Batch, kl_coef: float, model: Any) -> Tensor:
    total = torch.zeros(())
    for i, row in enumerate(batch.rows):
        advantage, mu, ref = (
            batch.columns[name][i] for name in ("advantages", "behavior_logprobs", "ref_logprobs")
        )
        logprobs = _logprobs(model, row)
        ratio = torch.exp((logprobs - mu).sum().detach())
        weight = torch.where(advantage < 0, ratio.clamp(max=1.0), torch.ones(()))
        kl = kl_coef * 0.5 * (logprobs - ref) ** 2
        total = total + (kl - weight * advantage * logprobs).sum()
    return total / _n_tokens(list(batch.rows))


def _plain_dpo(batch: Batch, beta: float, model: Any) -> Tensor:
    ratios = [
        (_logprobs(model, row) - ref).sum()
        for row, ref in zip(batch.rows, batch.columns["ref_logprobs"], strict=True)
    ]
    gaps = [beta * (a - b) for a, b in zip(ratios[0::2], ratios[1::2], strict=True)]
    return torch.stack([torch.log1p(torch.exp(-gap)) for gap in gaps]).mean()


def _plain_critic(batch: Batch, model: Any) -> Tensor:
    total = torch.zeros(())
    for i, row in enumerate(batch.rows):
        old, target = batch.columns["old_values"][i], batch.columns["returns"][i]
        values = _logits(model, row)[:, 0]
        near = old + (values - old).clamp(-0.2, 0.2)
        total = total + torch.maximum((values - target) ** 2, (near - target) ** 2).sum() / 2
    return total / _n_tokens(list(batch.rows))


def _plain_distillation(batch: Batch, alpha: float, tau: float, model: Any) -> Tensor:
    total = torch.zeros(())
    for i, row in enumerate(batch.rows):
        teacher = batch.columns["teacher_logprobs"][i].exp()
        student = (
            (_logits(model, row) / tau).softmax(-1).gather(-1, batch.columns["teacher_ids"][i])
        )
        teacher = torch.cat([teacher, 1.0 - teacher.sum(-1, keepdim=True)], -1)
        student = torch.cat([student, 1.0 - student.sum(-1, keepdim=True)], -1)
        kl = (teacher * (teacher.log() - student.log())).sum()
        nll = -_logprobs(model, row).sum()
        total = total + alpha * tau**2 * kl + (1.0 - alpha) * nll
    return total / _n_tokens(list(batch.rows))


def _columns(rows: list[Row], *shape: int) -> list[Tensor]:
    """Return normally distributed numbers for each response token."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(row.response_ids), *shape, generator=generator) for row in rows]


def _ppo_batch(rows: list[Row], tiny_dir: Path) -> Batch:
    from tasks.models.loading import load_causal_lm

    model = load_causal_lm(tiny_dir)
    with torch.no_grad():
        now = [_logprobs(model, row) for row in rows]
    noise = _columns(rows)
    columns = {
        # Ratios from far below to far above the clip range, the dual clip included.
        "proximal_logprobs": [a - 0.8 * b for a, b in zip(now, noise, strict=True)],
        "advantages": [torch.roll(b, 1) for b in noise],
        "weights": [torch.full_like(b, 0.2 + 0.1 * i) for i, b in enumerate(noise)],
    }
    return Batch(rows, columns)


def _ratio_batch(rows: list[Row], tiny_dir: Path, group_size: int) -> Batch:
    """Return rows near, above and below the behaviour policy, with a reference of their own."""
    ppo = _ppo_batch(rows, tiny_dir)
    near = ppo.columns["proximal_logprobs"]
    columns = {
        "advantages": ppo.columns["advantages"],
        "behavior_logprobs": near,
        "ref_logprobs": [x - 0.3 * y for x, y in zip(near, _columns(rows), strict=True)],
    }
    return Batch(rows, columns, group_size=group_size)


def _teacher(rows: list[Row], tau: float) -> dict[str, list[Tensor]]:
    """Return the four likeliest tokens of a random teacher."""
    top = [(4 * x / tau).log_softmax(-1).topk(4, -1) for x in _columns(rows, 262)]
    return {"teacher_logprobs": [t.values for t in top], "teacher_ids": [t.indices for t in top]}


@pytest.fixture(scope="session")
def scenarios(rows: list[Row], tiny_dir: Path) -> Scenarios:
    """One step of each kind by name."""
    from tasks.runtime import verl_losses as losses

    def spec(kind: Any, lora: LoraConfig | None = None) -> RoleSpec:
        return RoleSpec(ROLE, kind, str(tiny_dir), 5, 4, OPTIMIZER, lora)

    language, value = spec("language_model"), spec("value_model")
    ppo = _ppo_batch(rows, tiny_dir)
    noise = _columns(rows)
    critic = Batch(rows, {"old_values": noise, "returns": [math.pi * x.flip(0) for x in noise]})
    topr, dpo = (_ratio_batch(rows, tiny_dir, group_size) for group_size in (1, 2))
    teacher = Batch(rows, _teacher(rows, 2.0), scalars={FLAG: True})
    return {
        "cloning": Scenario(
            language, Batch(rows), losses.cloning_loss, partial(_plain_cloning, rows)
        ),
        "bradley-terry": Scenario(
            value,
            Batch(rows, group_size=2),
            partial(losses.pairwise_loss, label_smoothing=0.0, center_coef=0.1),
            partial(_plain_pairs, rows, 0.1),
        ),
        "ppo": Scenario(
            language,
            ppo,
            actor_loss(OfflinePPOConfig()),
            partial(_plain_ppo, ppo),
        ),
        "topr": Scenario(
            language,
            topr,
            actor_loss(OfflinePPOConfig(policy_loss="topr", loss=PolicyLossConfig(kl_coef=0.2))),
            partial(_plain_topr, topr, 0.2),
        ),
        "dpo": Scenario(
            language,
            dpo,
            actor_loss(OfflinePPOConfig(policy_loss="dpo", loss=PolicyLossConfig(dpo_beta=0.4))),
            partial(_plain_dpo, dpo, 0.4),
        ),
        "critic": Scenario(
            value,
            critic,
            partial(losses.critic_loss, clip_range=0.2, mode="token-mean"),
            partial(_plain_critic, critic),
        ),
        "distillation": Scenario(
            spec("language_model", LoraConfig(rank=4, alpha=8)),
            teacher,
            StudentLoss("top_k", 0.5, 2.0, len(load_tokenizer(tiny_dir))),
            partial(_plain_distillation, teacher, 0.5, 2.0),
        ),
    }
