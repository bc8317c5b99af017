"""Policy and value losses: known values, an fp64 computation, exact splits, live gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tasks.algorithms import policy_losses as pl
from tasks.algorithms.importance import sequence_log_ratio, truncated_importance_weights
from tasks.algorithms.masking import LOSS_MODES, LossMode, Totals

NAN = math.nan


CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


def _token_losses(ratio: list[float], advantage: list[float], weight: float = 1.0) -> list[float]:
    losses = []
    for r, a in zip(ratio, advantage, strict=True):
        one = torch.ones(1, 1)
        loss, _ = pl.decoupled_ppo_loss(
            one * math.log(r),
            one * 0,
            one * a,
            one * weight,
            one.bool(),
            totals=Totals(1, 1),
            **CLIP,
        )
        losses.append(loss.item())
    return losses


RATIOS = [10.0, 10.0, 0.5, 0.5, 1.1, 5.0]
ADVANTAGES = [-1.0, 1.0, 1.0, -1.0, -2.0, -2.0]


def test_dual_clip_bounds_negative_advantages_only() -> None:
    # max(-A r, -A clip(r)), then at most -A * 3 where A < 0: 10 -> 3, and -2 * 5 = 10 -> 6
    got = _token_losses(RATIOS, ADVANTAGES)
    assert got == pytest.approx([3.0, -1.2, -0.5, 0.8, 2.2, 6.0], abs=1e-5)


def test_minimum_is_taken_after_the_advantage() -> None:
    # A = -1: max(0.5, 0.8); A = 1: max(-0.5, -0.8)
    got = _token_losses([0.5, 0.5], [-1.0, 1.0])
    assert got == pytest.approx([0.8, -0.5])


def test_a_nan_old_logprob_under_the_mask_never_matters() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    proximal, ones = torch.tensor([[0.0, NAN]]), torch.ones(1, 2)
    mask = torch.tensor([[True, False]])
    loss, _ = pl.decoupled_ppo_loss(
        logprobs, proximal, ones, ones, mask, totals=Totals(1, 1), **CLIP
    )
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_weight_comes_from_the_frozen_policy_and_ratio_from_the_current_one() -> None:
    mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1)
    current = torch.tensor([[-1.0]], requires_grad=True)
    old, behavior = torch.tensor([[-1.2]]), torch.tensor([[-2.2]])
    log_ratio = sequence_log_ratio(old, behavior, mask, level="sequence")
    weights = truncated_importance_weights(log_ratio, advantages, mask, cap=5.0)
    loss, metrics = pl.decoupled_ppo_loss(
        current, old, advantages, weights, mask, totals=Totals(1, 1), **CLIP
    )
    # w = e^(-1.2 + 2.2) = 2.718282, rho = e^0.2 = 1.221403 clipped to 1.2: -1.2 * 2.718282
    assert loss.item() == pytest.approx(-3.261938, abs=1e-5)
    assert metrics["weight_sum"].item() == pytest.approx(2.718282, abs=1e-5)
    assert metrics["ratio_sum"].item() == pytest.approx(1.221403, abs=1e-5)
    assert metrics["clip_upper_sum"].item() == 1.0


def _random_problem(seed: int, rows: int = 7, width: int = 6) -> tuple[Tensor, list[Tensor]]:
    """Return the current policy's log-probabilities, and proximal ones, advantages, weights, mask;
    what lies under the mask is not a number."""
    generator = torch.Generator().manual_seed(seed)
    current, old, behavior, advantages = torch.randn(4, rows, width, generator=generator)
    current, old, behavior = -current.abs(), -old.abs(), -behavior.abs()
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 0] = True
    for values in (current, old, behavior, advantages):
        values[~mask] = NAN
    log_ratio = sequence_log_ratio(old, behavior, mask, level="sequence")
    weights = truncated_importance_weights(log_ratio, advantages, mask, cap=2.0)
    return current, [old, advantages, weights, mask]


def _fp64_loss(current: Tensor, batch: list[Tensor], mode: LossMode) -> Tensor:
    """Compute the loss row by row and token by token, sharing no code with the package."""
    proximal, advantages, weights, mask = batch
    rows = []
    for b in range(current.shape[0]):
        tokens = []
        for t in range(current.shape[1]):
            if not mask[b, t]:
                continue
            rho = torch.exp(current[b, t] - proximal[b, t].double())
            a, w = advantages[b, t].double(), weights[b, t].double()
            clipped = torch.clamp(rho, 0.8, 1.28)
            objective = min(rho * a, clipped * a)
            if a < 0:
                objective = max(objective, 3.0 * a)
            tokens.append(-w * objective)
        rows.append(tokens)
    flat = [token for row in rows for token in row]
    if mode == "token-mean":
        return torch.stack(flat).mean()
    reduced = [sum(r) / (len(r) if mode == "seq-mean-token-mean" else 1) for r in rows]
    return sum(reduced) / len(rows)  # type: ignore[return-value]


@pytest.mark.parametrize("mode", LOSS_MODES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_equal_an_independent_fp64_computation(mode: LossMode, seed: int) -> None:
    current, batch = _random_problem(seed)
    mask = batch[-1]
    plain = current.double().requires_grad_()
    expected = _fp64_loss(plain, batch, mode)
    expected.backward()
    tested = current.clone().requires_grad_()
    totals = Totals(int(mask.sum()), mask.shape[0], mode)
    clip = CLIP | {"clip_high": 0.28}
    loss, _ = pl.decoupled_ppo_loss(tested, *batch, totals=totals, **clip)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert tested.grad is not None and plain.grad is not None
    torch.testing.assert_close(tested.grad, plain.grad.float(), atol=1e-6, rtol=1e-5)
    assert torch.equal(tested.grad[~mask], torch.zeros(int((~mask).sum())))


def test_the_weights_equal_an_independent_fp64_computation() -> None:
    _, (_, advantages, weights, mask) = _random_problem(5)
    generator = torch.Generator().manual_seed(5)
    _, old, behavior, _ = torch.randn(4, 7, 6, generator=generator)
    for b in range(7):
        kept = mask[b]
        ratio = math.exp(float((behavior.abs() - old.abs())[b][kept].double().sum()))
        for t in kept.nonzero().flatten().tolist():
            cap = 1.0 if advantages[b, t] < 0 else 2.0
            assert weights[b, t].item() == pytest.approx(min(ratio, cap), rel=1e-5)


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(mode: LossMode) -> None:
    current, batch = _random_problem(11)
    mask = batch[-1]
    totals = Totals(int(mask.sum()), mask.shape[0], mode)
    results = []
    for sizes in ([7], [1] * 7, [3, 4], [2, 0, 5]):
        tested = current.clone().requires_grad_()
        start, total, merged = 0, 0.0, torch.zeros(())
        for size in sizes:
            part = slice(start, start + size)
            start += size
            cut = [values[part] for values in batch]
            loss, metrics = pl.decoupled_ppo_loss(tested[part], *cut, totals=totals, **CLIP)
            loss.backward()
            total += loss.item()
            merged = merged + metrics["live_gradient_sum"]
        assert tested.grad is not None
        results.append((total, tested.grad, merged.item()))
    for value, grad, live in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-6)
        torch.testing.assert_close(grad, results[0][1], atol=1e-6, rtol=0)
        assert live == results[0][2]


def test_live_gradient_counts_the_tokens_that_autograd_moves() -> None:
    generator = torch.Generator().manual_seed(2)
    current = 3 * torch.randn(20, 10, generator=generator)
    current[0, :3] = torch.tensor([50.0, -50.0, 200.0])  # beyond the clamp of the ratio
    advantages = torch.randn(20, 10, generator=generator)
    advantages[1] = 0.0
    weights = torch.rand(20, 10, generator=generator)
    weights[2] = 0.0
    mask = torch.rand(20, 10, generator=generator) < 0.8
    tested = current.clone().requires_grad_()
    loss, metrics = pl.decoupled_ppo_loss(
        tested, torch.zeros(20, 10), advantages, weights, mask, totals=Totals(1, 1), **CLIP
    )
    loss.backward()
    assert tested.grad is not None
    assert torch.isfinite(tested.grad).all()
    moved = int((tested.grad != 0).sum())
    assert 0 < moved < int(mask.sum())
    assert metrics["live_gradient_sum"].item() == moved
    clipped = sum(metrics[f"clip_{side}_sum"].item() for side in ("upper", "lower", "dual"))
    idle = int(((advantages == 0) & mask).sum())
    assert clipped > 0
    assert metrics["n_tokens"].item() >= clipped + idle


def test_metrics_by_hand() -> None:
    ratio = torch.tensor([[1.5, 0.5, 4.0, 1.0, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    _, metrics = pl.decoupled_ppo_loss(
        ratio.log(),
        torch.zeros(1, 5),
        advantages,
        torch.full((1, 5), 2.0),
        mask,
        totals=Totals(4, 1),
        **CLIP,
    )
    values = {name: value.item() for name, value in metrics.items()}
    assert values["clip_upper_sum"] == values["clip_lower_sum"] == values["clip_dual_sum"] == 1.0
    assert values["live_gradient_sum"] == 1.0  # only the ratio of 1
    assert values["ratio_max"] == pytest.approx(4.0)
    assert values["ratio_sum"] == pytest.approx(7.0)
    # -(log 1.5 + log 0.5 + log 4) = -log 3; k3: 7 - 4 - log 3
    assert values["approx_kl_k1_sum"] == pytest.approx(-math.log(3), abs=1e-6)
    assert values["approx_kl_k3_sum"] == pytest.approx(3 - math.log(3), abs=1e-5)
    # 2 * (-1.2 + 0.8 + 3 - 1)
    assert values["policy_loss_sum"] == pytest.approx(3.2, abs=1e-5)
    assert (values["n_tokens"], values["n_sequences"], values["weight_sum"]) == (4.0, 1.0, 8.0)
    assert not any(value.requires_grad for value in metrics.values())


def test_weighted_likelihood_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    advantages, weights = torch.tensor([[2.0, -1.0, NAN]]), torch.tensor([[1.0, 0.5, NAN]])
    mask = torch.tensor([[True, True, False]])
    loss, metrics = pl.weighted_likelihood_loss(
        logprobs, advantages, weights, mask, totals=Totals(2, 1)
    )
    loss.backward()
    # (-2 * 1 * -1 - (-1 * 0.5 * -2)) / 2 = (2 - 1) / 2; gradient -A w / 2
    assert loss.item() == pytest.approx(0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 0.25, 0.0]]
    assert metrics["live_gradient_sum"].item() == 2.0


def test_dpo_loss_by_hand() -> None:
    loss, metrics = pl.dpo_loss(
        torch.tensor([3.0, 0.0]),
        torch.tensor([-7.0, 0.0]),
        beta=0.1,
        total_pairs=2,
        label_smoothing=0.0,
    )
    # z = 1 and 0: (0.3132617 + 0.6931472) / 2
    assert loss.item() == pytest.approx(0.5032044, abs=1e-6)
    assert metrics["correct_sum"].item() == 1.5


def test_value_loss_clips_around_old_values() -> None:
    values = torch.tensor([[2.0, 0.1, NAN]], requires_grad=True)
    old, returns = torch.tensor([[0.0, 0.0, NAN]]), torch.tensor([[3.0, 1.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    loss, metrics = pl.value_loss(values, old, returns, mask, clip_range=0.5, totals=Totals(2, 1))
    loss.backward()
    # token 0: max((2 - 3)^2, (0.5 - 3)^2) = 6.25, no gradient; token 1: 0.81, gradient 0.1 - 1
    assert loss.item() == pytest.approx(0.5 * (6.25 + 0.81) / 2)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.45, 0.0]]))
    assert metrics["value_clip_sum"].item() == 1.0
    wide, _ = pl.value_loss(
        values.detach(), old, returns, mask, clip_range=9.0, totals=Totals(2, 1)
    )
    assert wide.item() == pytest.approx(0.5 * (1.0 + 0.81) / 2)


def test_entropy_and_kl_terms() -> None:
    mask = torch.tensor([[True, True, False]])
    entropy = torch.tensor([[1.0, 2.0, NAN]])
    bonus, _ = pl.entropy_loss(entropy, mask, coef=0.1, totals=Totals(2, 1))
    assert bonus.item() == pytest.approx(-0.15)  # -0.1 * 3 / 2
    logprobs = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, NAN]])
    loss, metrics = pl.kl_loss(logprobs, ref, mask, kind="k2", coef=2.0, totals=Totals(2, 1))
    loss.backward()
    # 2 * (0.125 + 0.5) / 2; gradient 2 * d / 2 = 0.5, -1
    assert loss.item() == pytest.approx(0.625)
    assert metrics["kl_sum"].item() == pytest.approx(0.625)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.5, -1.0, 0.0]]))
