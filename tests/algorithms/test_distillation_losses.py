"""Distillation: directions, temperature, tail bucket, masks and global token means."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import distillation_losses as dl
from tasks.algorithms import distillation_losses as sl
from tasks.algorithms.logprobs import logprobs_from_logits
from tasks.errors import ConfigError, DataError, TrainingError


def _mean(
    kl: torch.Tensor, nll: torch.Tensor, mask: torch.Tensor, *, alpha: float, tau: float, total: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mixed = dl.soft_hard_tokens(kl, nll, alpha=alpha, tau=tau)
    return dl.soft_hard_mean(mixed, kl, nll, mask, tau=tau, total_tokens=total)


TEACHER = torch.tensor([0.9, 0.1]).log()
STUDENT = torch.tensor([0.5, 0.5]).log()


def test_soft_loss_carries_tau_squared() -> None:
    teacher = torch.tensor([[2.0, 0.0, -2.0]])
    student = torch.tensor([[1.0, 1.0, 0.0]], requires_grad=True)
    kl = dl.full_kl(teacher, student, tau=2.0)
    nll = -logprobs_from_logits(student, torch.tensor([0]))
    mask = torch.tensor([True])
    loss, metrics = _mean(kl, nll, mask, alpha=0.5, tau=2.0, total=1)
    assert kl.item() == pytest.approx(0.17064, abs=1e-5)
    assert metrics["soft_sum"].item() == pytest.approx(0.682559, abs=1e-5)  # 4 * 0.17064
    assert metrics["hard_sum"].item() == pytest.approx(0.861995, abs=1e-5)
    assert loss.item() == pytest.approx(0.772277, abs=1e-5)  # half of each
    soft, _ = _mean(kl, nll, mask, alpha=1.0, tau=2.0, total=1)
    (grad,) = torch.autograd.grad(soft, student)
    # tau * (softmax(student / 2) - softmax(teacher / 2))
    expected = torch.tensor([[-0.563178, 0.277847, 0.285332]])
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=0)


def test_directions_are_not_swapped() -> None:
    # 0.9 log 1.8 + 0.1 log 0.2; 0.5 log(5/9) + 0.5 log 5
    forward = dl.full_kl(TEACHER, STUDENT, tau=1.0, direction="forward")
    reverse = dl.full_kl(TEACHER, STUDENT, tau=1.0, direction="reverse")
    assert forward.item() == pytest.approx(0.368064, abs=1e-6)
    assert reverse.item() == pytest.approx(0.510826, abs=1e-6)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.0, 0.368064), (0.1, 0.033603), (0.5, 0.101749), (0.9, 0.043074), (1.0, 0.510826)],
)
def test_jsd_as_the_paper_defines_it(beta: float, expected: float) -> None:
    # M = beta T + (1 - beta) S; at 0.5 M = 0.7, 0.3
    assert dl.jsd(TEACHER, STUDENT, beta=beta).item() == pytest.approx(expected, abs=1e-6)


def test_padding_counts_in_no_mean() -> None:
    kl = torch.tensor([0.2, 0.4, math.nan])
    mask = torch.tensor([True, True, False])
    loss, metrics = _mean(kl, kl, mask, alpha=1.0, tau=1.0, total=2)
    assert loss.item() == pytest.approx(0.3)  # (0.2 + 0.4) / 2
    assert metrics["n_tokens"].item() == 2.0


def test_tokens_are_averaged_over_the_whole_step() -> None:
    parts = [torch.tensor([1.0]), torch.tensor([0.2, 0.2, 0.2])]
    loss = sum(
        _mean(part, part, torch.ones_like(part).bool(), alpha=0.5, tau=1.0, total=4)[0]
        for part in parts
    )
    assert float(loss) == pytest.approx(0.4)  # 1.6 / 4, not (1.0 + 0.2) / 2


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_of_the_whole_vocabulary_is_the_full_kl(direction: dl.Direction) -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    top = sl.topk_with_tail(teacher, k=7, tau=2.0)
    got = sl.topk_tail_kl(top.logprobs, top.ids, student, tau=2.0, direction=direction)
    expected = dl.full_kl(teacher, student, tau=2.0, direction=direction)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_tail_bucket_against_fp64(direction: dl.Direction) -> None:
    torch.manual_seed(1)
    teacher, student = torch.randn(5, 11), torch.randn(5, 11)
    top = sl.topk_with_tail(teacher, k=4, tau=1.5)
    p = torch.softmax(teacher.double() / 1.5, -1)
    plain = student.double().requires_grad_()
    q = torch.softmax(plain / 1.5, -1)
    order = p.argsort(-1, descending=True)[:, :4]
    p4, q4 = p.gather(1, order), q.gather(1, order)
    pb = torch.cat([p4, 1 - p4.sum(1, keepdim=True)], 1)
    qb = torch.cat([q4, 1 - q4.sum(1, keepdim=True)], 1)
    if direction == "reverse":
        pb, qb = qb, pb
    expected = (pb * (pb / qb).log()).sum(1)
    expected.sum().backward()
    tested = student.clone().requires_grad_()
    got = sl.topk_tail_kl(top.logprobs, top.ids, tested, tau=1.5, direction=direction)
    got.sum().backward()
    torch.testing.assert_close(got, expected.float(), atol=1e-6, rtol=1e-5)
    assert tested.grad is not None and plain.grad is not None
    torch.testing.assert_close(tested.grad, plain.grad.float(), atol=1e-6, rtol=1e-4)
    assert (got <= dl.full_kl(teacher, student, tau=1.5, direction=direction) + 1e-6).all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("scale", [50.0, 1000.0])
def test_a_vanishing_tail_stays_finite(direction: dl.Direction, scale: float) -> None:
    teacher = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]) * scale
    student = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]) * scale
    student.requires_grad_()
    top = sl.topk_with_tail(teacher, k=2, tau=1.0)
    kl = sl.topk_tail_kl(top.logprobs, top.ids, student, tau=1.0, direction=direction)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert kl[0].item() == pytest.approx(0.0, abs=1e-5)
    assert kl[1].item() > 10.0
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_tail_logprob_is_exact_over_many_magnitudes() -> None:
    for tail in (0.9, 0.5, 0.1, 1e-3, 1e-5):
        # two tokens of (1 - tail) / 2 each
        value = sl.tail_logprob(torch.tensor([(1 - tail) / 2] * 2, dtype=torch.float64).log())
        assert value.item() == pytest.approx(math.log(tail), abs=0.02 if tail < 1e-4 else 2e-4)
    assert math.isfinite(sl.tail_logprob(torch.tensor([0.0])).item())
    assert math.isfinite(sl.tail_logprob(torch.tensor([0.01])).item())


def test_masked_positions_may_hold_anything() -> None:
    torch.manual_seed(2)
    mask = torch.tensor([[True, False, True]])
    teacher, student = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    top = sl.topk_with_tail(teacher, k=2, tau=1.0)
    ids, logprobs = top.ids.clone(), top.logprobs.clone()
    teacher[0, 1], student[0, 1] = math.nan, math.inf
    ids[0, 1], logprobs[0, 1] = -1, math.nan
    student.requires_grad_()
    values = [
        sl.topk_tail_kl(logprobs, ids, student, tau=1.0, mask=mask),
        dl.full_kl(teacher, student, tau=1.0, mask=mask),
        dl.jsd(teacher, student, beta=0.3, mask=mask),
    ]
    torch.stack(values).sum().backward()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert torch.equal(student.grad[0, 1], torch.zeros(5))
    assert all(value[0, 1].item() == 0.0 for value in values)


def test_flat_and_padded_logits_agree() -> None:
    torch.manual_seed(3)
    teacher, student = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    padded = dl.jsd(teacher, student, beta=0.4)
    flat = dl.jsd(teacher.reshape(6, 5), student.reshape(6, 5), beta=0.4)
    torch.testing.assert_close(padded.reshape(6), flat)


def test_divergences_are_zero_for_equal_and_positive_for_different_logits() -> None:
    torch.manual_seed(4)
    logits, other = torch.randn(20, 9), torch.randn(20, 9)
    for direction in ("forward", "reverse"):
        same = dl.full_kl(logits, logits, tau=2.0, direction=direction)
        torch.testing.assert_close(same, torch.zeros(20), atol=1e-6, rtol=0)
        assert (dl.full_kl(logits, other, tau=2.0, direction=direction) > 0).all()
    assert (dl.jsd(logits, other, beta=0.5) < math.log(2)).all()


def test_forbidden_tokens_are_no_nan() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    student = torch.tensor([[1.0, 1.0, -math.inf]], requires_grad=True)
    total = dl.full_kl(logits, student, tau=1.0) + dl.jsd(logits, student, beta=0.5)
    total.sum().backward()
    assert torch.isfinite(total).all()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_wrong_inputs_are_refused() -> None:
    logits = torch.zeros(1, 4)
    with pytest.raises(DataError, match="k is 5"):
        sl.topk_with_tail(logits, k=5, tau=1.0)
    with pytest.raises(ConfigError, match="temperature"):
        sl.topk_with_tail(logits, k=2, tau=0.0)
    with pytest.raises(ConfigError, match="beta"):
        dl.jsd(logits, logits, beta=1.5)
    with pytest.raises(DataError, match="shape"):
        dl.full_kl(logits, torch.zeros(1, 5), tau=1.0)
    with pytest.raises(DataError, match="same tokenizer"):
        sl.topk_tail_kl(torch.zeros(1, 1), torch.tensor([[9]]), logits, tau=1.0)
    with pytest.raises(TrainingError, match="full_kl"):
        dl.full_kl(logits * math.nan, logits, tau=1.0)
    with pytest.raises(ConfigError, match="direction"):
        dl.full_kl(logits, logits, tau=1.0, direction="both")  # type: ignore[arg-type]
