"""Distillation: directions, temperature, tail bucket, masks and global token means."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.algorithms import distillation_losses as dl


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_of_the_whole_vocabulary_is_the_full_kl(direction: dl.Direction) -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    top = dl.topk_with_tail(teacher, k=7, tau=2.0)
    got = dl.topk_tail_kl(top.logprobs, top.ids, student, tau=2.0, direction=direction)
    expected = dl.full_kl(teacher, student, tau=2.0, direction=direction)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_tail_bucket_against_fp64(direction: dl.Direction) -> None:
    torch.manual_seed(1)
    teacher, student = torch.randn(5, 11), torch.randn(5, 11)
    top = dl.topk_with_tail(teacher, k=4, tau=1.5)
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
    got = dl.topk_tail_kl(top.logprobs, top.ids, tested, tau=1.5, direction=direction)
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
    top = dl.topk_with_tail(teacher, k=2, tau=1.0)
    kl = dl.topk_tail_kl(top.logprobs, top.ids, student, tau=1.0, direction=direction)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert kl[0].item() == pytest.approx(0.0, abs=1e-5)
    assert kl[1].item() > 10.0
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_tail_logprob_is_exact_over_many_magnitudes() -> None:
    for tail in (0.9, 0.5, 0.1, 1e-3, 1e-5):
        # two tokens of (1 - tail) / 2 each
        value = dl.tail_logprob(torch.tensor([(1 - tail) / 2] * 2, dtype=torch.float64).log())
        assert value.item() == pytest.approx(math.log(tail), abs=0.02 if tail < 1e-4 else 2e-4)
    assert math.isfinite(dl.tail_logprob(torch.tensor([0.0])).item())
    assert math.isfinite(dl.tail_logprob(torch.tensor([0.01])).item())


def test_flat_and_padded_logits_agree() -> None:
    torch.manual_seed(3)
    teacher, student = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    padded = dl.jsd(teacher, student, beta=0.4, tau=1.0)
    flat = dl.jsd(teacher.reshape(6, 5), student.reshape(6, 5), beta=0.4, tau=1.0)
    torch.testing.assert_close(padded.reshape(6), flat)


def test_divergences_are_zero_for_equal_and_positive_for_different_logits() -> None:
    torch.manual_seed(4)
    logits, other = torch.randn(20, 9), torch.randn(20, 9)
    for direction in ("forward", "reverse"):
        same = dl.full_kl(logits, logits, tau=2.0, direction=direction)
        torch.testing.assert_close(same, torch.zeros(20), atol=1e-6, rtol=0)
        assert (dl.full_kl(logits, other, tau=2.0, direction=direction) > 0).all()
    assert (dl.jsd(logits, other, beta=0.5, tau=1.0) < math.log(2)).all()


def test_forbidden_tokens_are_no_nan() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    student = torch.tensor([[1.0, 1.0, -math.inf]], requires_grad=True)
    total = dl.full_kl(logits, student, tau=1.0, direction="forward")
    total = total + dl.jsd(logits, student, beta=0.5, tau=1.0)
    total.sum().backward()
    assert torch.isfinite(total).all()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_bf16_logits_are_computed_in_fp32() -> None:
    teacher, student = torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = dl.full_kl(teacher, student, tau=1.0, direction="forward")
    p, q = (x.double().log_softmax(-1) for x in (teacher, student))
    assert found.dtype == torch.float32
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
