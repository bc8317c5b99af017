"""The known cases of distillation losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tasks.algorithms import distillation_losses as dl

SharedCases = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def case(shared_cases: SharedCases) -> Callable[[str], tuple[dict[str, Any], dict[str, Any]]]:
    """A function that returns input and expectation of a case."""

    def find(case_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        found = next(one for one in shared_cases("distill") if one["id"] == case_id)
        return found["input"], found["expected"]

    return find


def test_kd_01_soft_loss_keeps_tau_squared(case: Any) -> None:
    given, expected = case("KD-01")
    student = torch.tensor([given["student_logits"]], requires_grad=True)
    tau, alpha = given["tau"], given["alpha"]
    teacher = torch.tensor([given["teacher_logits"]])
    kl = dl.full_kl(teacher, student, tau=tau, direction="forward")
    nll = -student.log_softmax(-1)[:, given["hard_label"]]
    mixed = dl.soft_hard_tokens(kl, nll, alpha=alpha, tau=tau)
    loss, metrics = dl.soft_hard_mean(mixed, kl, nll, tau=tau, total_tokens=1)
    assert kl.item() == pytest.approx(expected["kl_unscaled"], abs=1e-5)
    assert metrics["soft_sum"].item() == pytest.approx(expected["kl_scaled"], abs=1e-5)
    assert metrics["hard_sum"].item() == pytest.approx(expected["ce"], abs=1e-5)
    assert loss.item() == pytest.approx(expected["total"], abs=1e-5)
    soft = dl.soft_hard_tokens(kl, nll, alpha=1.0, tau=tau)
    (gradient,) = torch.autograd.grad(soft.sum(), student)
    torch.testing.assert_close(
        gradient[0], torch.tensor(expected["grad_scaled"]), atol=1e-5, rtol=0
    )


def test_kd_03_directions(case: Any) -> None:
    given, expected = case("KD-03")
    teacher, student = (torch.tensor(given[side]).log() for side in ("teacher", "student"))
    forward = dl.full_kl(teacher, student, tau=1.0, direction="forward")
    reverse = dl.full_kl(teacher, student, tau=1.0, direction="reverse")
    assert forward.item() == pytest.approx(expected["forward_kl_teacher_student"], abs=1e-6)
    assert reverse.item() == pytest.approx(expected["reverse_kl_student_teacher"], abs=1e-6)


def test_kd_04_generalised_jsd(case: Any) -> None:
    given, expected = case("KD-04")
    teacher, student = (torch.tensor(given[side]).log() for side in ("teacher", "student"))
    for beta in given["beta"]:
        found = dl.jsd(teacher, student, beta=float(beta), tau=1.0).item()
        wanted = expected["paper_definition"][str(beta)]
        assert found == pytest.approx(wanted, abs=1e-6), beta
        assert found > 0.0


def test_kd_06_padding_is_in_no_mean(case: Any) -> None:
    given, expected = case("KD-06")
    # Losses of responses lie end to end, without padding.
    kl = torch.tensor(given["per_token_kl"])[torch.tensor(given["mask"]).bool()]
    loss, metrics = dl.soft_hard_mean(kl, kl, kl, tau=1.0, total_tokens=len(kl))
    assert loss.item() == pytest.approx(expected["loss"])
    assert metrics["n_tokens"].item() == len(kl)


def test_kd_09_mean_over_the_global_batch(case: Any) -> None:
    given, expected = case("KD-09")
    parts = [torch.tensor(given[name]) for name in ("micro0", "micro1")]
    total = float(sum(map(len, parts)))
    losses = [dl.soft_hard_mean(p, p, p, tau=1.0, total_tokens=total)[0] for p in parts]
    assert float(sum(losses)) == pytest.approx(expected["token_mean"])
