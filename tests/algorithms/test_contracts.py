"""What every loss and estimator promises: padding never matters, a NaN is never hidden, and nothing
waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.algorithms import advantages, distillation_losses, importance, kl, masking, rewards
from tasks.algorithms import policy_losses as losses
from tasks.algorithms.masking import Totals
from tasks.algorithms.reward_losses import bradley_terry_loss

JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -3.0])
TOTALS = Totals(tokens=11.0, sequences=4.0)
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
# Of (B, T) tensors and a mask, each with the number of its tensors; the first has the gradient.
LOSSES: dict[str, tuple[int, Callable[..., Any]]] = {
    "ppo": (4, partial(losses.decoupled_ppo_loss, totals=TOTALS, **CLIP)),
    "likelihood": (3, partial(losses.weighted_likelihood_loss, totals=TOTALS)),
    "value": (3, partial(losses.value_loss, clip_range=0.2, totals=TOTALS)),
    "entropy": (1, partial(losses.entropy_loss, coef=0.1, totals=TOTALS)),
    **{
        kind: (2, partial(losses.kl_loss, kind=kind, coef=0.1, totals=TOTALS))
        for kind in ("k1", "k2", "k3")
    },
    **{
        mode: (1, lambda x, m, mode=mode: (masking.aggregate(x, m, Totals(11.0, 4.0, mode)), {}))
        for mode in masking.LOSS_MODES
    },
}
GAE = {"gamma": 0.9, "gae_lambda": 0.8}
ESTIMATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "gae": (2, partial(advantages.generalized_advantage_estimate, **GAE)),
    "reinforce_pp": (1, partial(advantages.reinforce_pp_advantages, gamma=0.9)),
    "explained_variance": (2, advantages.explained_variance),
    "whiten": (1, masking.masked_whiten),
    "mean": (1, masking.masked_mean),
    "kl_on_data": (3, kl.weighted_kl_on_data),
    **{
        level: (2, partial(importance.sequence_log_ratio, level=level))
        for level in ("sequence", "geometric", "token")
    },
    "weights": (2, partial(importance.truncated_importance_weights, cap=2.0)),
    "weight_metrics": (2, partial(importance.weight_metrics, cap=2.0)),
    "sequence_weights": (1, importance.sequence_weights),
    **{
        kind: (2, partial(importance.likelihood_weights, kind, clip_range=0.2))
        for kind in ("topr", "a_lol", "positives_only")
    },
    "rewards": (
        2,
        lambda x, y, m: rewards.token_level_rewards(torch.ones(len(x)), x, y, m, kl_coef=0.1),
    ),
}


def _inputs(n: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Return n random (B, T) tensors and a mask that leaves something out and empties no row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 6, generator=generator) < 0.6
    mask[:, 0], mask[0, 1:], mask[1, 1] = True, False, True
    return [torch.randn(4, 6, generator=generator) for _ in range(n)], mask


def _flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.detach()]
    parts = found.values() if isinstance(found, dict) else found
    return [tensor for part in parts for tensor in _flat(part)]


@settings(max_examples=25, deadline=None)
@given(junk=JUNK, seed=st.integers(0, 1000))
@pytest.mark.parametrize("name", [*LOSSES, *ESTIMATORS])
def test_what_lies_under_the_mask_never_matters(name: str, junk: float, seed: int) -> None:
    n, function = (LOSSES | ESTIMATORS)[name]
    inputs, mask = _inputs(n, seed)
    results = []
    for fill in (0.0, junk):
        torn = [torch.where(mask, values, fill) for values in inputs]
        if name in LOSSES:
            torn[0].requires_grad_()
        found = function(*torn, mask)
        gradient = torch.autograd.grad(found[0], torn[0]) if name in LOSSES else ()
        results.append([*_flat(found), *gradient])
    for plain, broken in zip(*results, strict=True):
        assert torch.equal(plain, broken)
    if name in LOSSES:
        assert not results[1][-1][~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_at_a_real_token_makes_the_loss_nan(name: str) -> None:
    """The session refuses a step whose loss is no number, so no fault may hide from the loss."""
    n, loss = LOSSES[name]
    for at in range(n):
        inputs, mask = _inputs(n, 0)
        inputs[at][1, 1] = math.nan
        assert bool(loss(*inputs, mask)[0].isnan()), at


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_reaches_the_loss_of_pairs(value: float) -> None:
    scores, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, value])
    for pair in ((scores, broken), (broken, scores)):
        assert not bool(bradley_terry_loss(*pair, total_pairs=2)[0].isfinite())
        dpo = losses.dpo_loss(*pair, beta=0.1, label_smoothing=0.0, total_pairs=2)
        assert not bool(dpo[0].isfinite())


class _HostReads(TorchDispatchMode):
    """Counts how often Python asks for a number, for which a GPU would have to finish."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        self.n += func.overloadpacket in reads
        return func(*args, **(kwargs or {}))


def test_no_loss_waits_for_the_device() -> None:
    runs = {name: (loss, _inputs(n, 0)) for name, (n, loss) in LOSSES.items()}
    generator = torch.Generator().manual_seed(0)
    logits, student = torch.randn(2, 5, 9, generator=generator)
    top = distillation_losses.topk_with_tail(logits, k=3, tau=2.0)
    nll = torch.rand(5, generator=generator)
    with _HostReads() as reads:
        for loss, (inputs, mask) in runs.values():
            loss(*inputs, mask)
        weights = importance.likelihood_weights("topr", inputs[0], inputs[0], mask, clip_range=0.2)
        importance.sequence_log_ratio(weights, weights, mask, level="sequence")
        bradley_terry_loss(nll, nll, total_pairs=5, weights=nll, margins=nll, trust=nll)
        losses.dpo_loss(nll, nll, beta=0.1, label_smoothing=0.1, total_pairs=5)
        soft = distillation_losses.topk_tail_kl(
            top.logprobs, top.ids, student, tau=2.0, direction="forward"
        )
        mixed = distillation_losses.soft_hard_tokens(soft, nll, alpha=0.5, tau=2.0, weights=nll)
        distillation_losses.soft_hard_mean(mixed, soft, nll, tau=2.0, total_tokens=5)
        assert reads.n == 0
        assert float(soft.sum()) > 0.0  # the counter counts
    assert reads.n == 1


def test_metrics_are_read_from_the_device_at_once() -> None:
    from tasks.runtime.verl_losses import floats

    inputs, mask = _inputs(4, 0)
    _, metrics = LOSSES["ppo"][1](*inputs, mask)
    with _HostReads() as reads:
        found = floats(metrics)
    assert reads.n == 0 and found == {name: value.item() for name, value in metrics.items()}
