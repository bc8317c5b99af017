"""From log-probabilities and rewards to the loss and its gradient: against plain fp64 loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.algorithms.masking import Totals
from tasks.algorithms.policy_losses import decoupled_ppo_loss, kl_loss
from tasks.offline_ppo.batches import Drawn, Minibatch
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.offline_ppo.step import prepare_step
from tasks.runtime.rows import Row, Trajectories, pad

KL_IN_REWARD, KL_LOSS, CAP, CLIP, DUAL = 0.05, 0.3, 1.7, 0.2, 3.0


def _batch(seed: int) -> tuple[Trajectories, Minibatch, Tensor]:
    """Return a dataset, a step over all of it, and the current policy's (B, T) log-probabilities;
    what lies under the mask is not a number."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (12,), generator=generator).tolist()
    rows = [Row((1, 2), tuple(range(n))) for n in lengths]

    def noisy(centre: list[Tensor], scale: float) -> list[Tensor]:
        return [c + scale * torch.randn(len(c), generator=generator) for c in centre]

    mu = [-3.0 * torch.rand(n, generator=generator) - 0.1 for n in lengths]
    proximal = noisy(mu, 0.4)
    data = Trajectories(
        rows=rows,
        groups=[[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10], [11]],
        rewards=torch.randn(12, generator=generator),
        behavior_logprobs=mu,
        ref_logprobs=noisy(mu, 0.3),
    )
    batch = Minibatch.of(data, Drawn(list(range(12)), [1.0] * 12), proximal, None)
    torn = _torn(batch.proximal_logprobs, batch.mask)
    now = _torn(pad(noisy(proximal, 0.5)), batch.mask)
    return data, dataclasses.replace(batch, proximal_logprobs=torn), now


def _torn(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, math.nan)


def _config(level: str, estimator: str) -> OfflinePPOConfig:
    return OfflinePPOConfig.model_validate(
        {
            "importance": {"level": level, "cap": CAP},
            "advantage": {"estimator": estimator},
            "reward": {"kl_coef": KL_IN_REWARD},
        }
    )


def _prepared(cfg: OfflinePPOConfig, batch: Minibatch) -> tuple[Tensor, Tensor]:
    """Return the advantages and weights of a step."""
    found, _, _ = prepare_step(cfg, batch, KL_IN_REWARD, None)
    assert found.advantages is not None and found.weights is not None
    return found.advantages, found.weights


def _project(cfg: OfflinePPOConfig, seed: int) -> tuple[float, Tensor]:
    """Return loss and gradient as the stage computes them."""
    data, batch, now = _batch(seed)
    logprobs = now.clone().requires_grad_(True)
    advantages, weights = _prepared(cfg, batch)
    totals = Totals(float(batch.mask.sum()), float(len(batch.rows)))
    loss, _ = decoupled_ppo_loss(
        logprobs,
        batch.proximal_logprobs,
        advantages,
        weights,
        batch.mask,
        clip_low=CLIP,
        clip_high=CLIP,
        dual_clip=DUAL,
        totals=totals,
    )
    ref = pad(data.ref_logprobs)
    term, _ = kl_loss(logprobs, ref, batch.mask, kind="k2", coef=KL_LOSS, totals=totals)
    (loss + term).backward()
    assert logprobs.grad is not None
    return float((loss + term).detach()), logprobs.grad


def _baseline(estimator: str, group: list[float], index: int) -> tuple[float, float]:
    """Return what is subtracted from a response's score, and what the rest is divided by."""
    mean = sum(group) / len(group)
    if len(group) == 1:
        return group[0], 1.0
    if estimator == "rloo":
        return (sum(group) - group[index]) / (len(group) - 1), 1.0
    deviation = math.sqrt(sum((s - mean) ** 2 for s in group) / (len(group) - 1))
    return mean, deviation + 1e-6


def _plain(level: str, estimator: str, seed: int) -> tuple[float, Tensor]:
    """Compute the same in fp64, response by response and token by token."""
    data, batch, now = _batch(seed)
    prox = [
        batch.proximal_logprobs[i, : len(r.response_ids)].double() for i, r in enumerate(data.rows)
    ]
    leaves = [
        now[i, : len(r.response_ids)].double().requires_grad_(True) for i, r in enumerate(data.rows)
    ]
    mu, ref = (
        [x.double() for x in column] for column in (data.behavior_logprobs, data.ref_logprobs)
    )
    scores = [
        float(data.rewards[i]) - KL_IN_REWARD * float((prox[i] - ref[i]).sum()) for i in range(12)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for group in data.groups:
        members = [scores[i] for i in group]
        for place, i in enumerate(group):
            subtracted, divisor = _baseline(estimator, members, place)
            advantage = (scores[i] - subtracted) / divisor
            cap = CAP if advantage >= 0 else 1.0
            for t in range(len(leaves[i])):
                apart = {
                    "sequence": float((prox[i] - mu[i]).sum()),
                    "geometric": float((prox[i] - mu[i]).mean()),
                    "token": float(prox[i][t] - mu[i][t]),
                }[level]
                rho = torch.exp(leaves[i][t] - prox[i][t])
                gain = torch.minimum(rho * advantage, rho.clamp(1 - CLIP, 1 + CLIP) * advantage)
                if advantage < 0:
                    gain = gain.clamp(min=DUAL * advantage)
                total = total - min(math.exp(apart), cap) * gain
                total = total + KL_LOSS * 0.5 * (leaves[i][t] - ref[i][t]) ** 2
    loss = total / sum(len(leaf) for leaf in leaves)
    loss.backward()
    grads: list[Any] = [leaf.grad for leaf in leaves]
    return float(loss.detach()), pad(grads)


@pytest.mark.parametrize("estimator", ["group", "rloo"])
@pytest.mark.parametrize("level", ["sequence", "geometric", "token"])
@pytest.mark.parametrize("seed", range(4))
def test_the_whole_path_equals_plain_fp64(level: str, estimator: str, seed: int) -> None:
    loss, grad = _project(_config(level, estimator), seed)
    expected_loss, expected_grad = _plain(level, estimator, seed)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert not bool(torch.isnan(grad).any())
    torch.testing.assert_close(grad.double(), expected_grad, atol=1e-5, rtol=1e-5)


def test_the_parts_of_the_path_that_clip_are_met() -> None:
    """Guard the test above: its batches must reach the caps and both clips."""
    _, batch, now = _batch(0)
    weights = _prepared(_config("sequence", "group"), batch)[1][batch.mask]
    assert bool((weights == 1.0).any()) and float(weights.max()) == pytest.approx(CAP)
    rho = torch.exp(now - batch.proximal_logprobs)[batch.mask]
    assert float(rho.min()) < 1 - CLIP and float(rho.max()) > 1 + CLIP


def test_numbers_under_the_mask_never_matter() -> None:
    cfg = _config("sequence", "group")
    _, batch, _ = _batch(1)
    other = dataclasses.replace(
        batch, proximal_logprobs=torch.where(batch.mask, batch.proximal_logprobs, 77.0)
    )
    (first, report, _), (second, same, _) = (
        prepare_step(cfg, b, KL_IN_REWARD, None) for b in (batch, other)
    )
    assert first.advantages is not None and second.advantages is not None
    assert first.weights is not None and second.weights is not None
    assert torch.equal(first.advantages, second.advantages)
    assert torch.equal(first.weights, second.weights)
    assert report == same
