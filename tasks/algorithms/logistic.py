"""Logistic regression on one variable, for many weightings of the same rows at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tasks.errors import TrainingError

# Curvature added to the mean log loss: no finite fit moves visibly, and separable rows get one.
_RIDGE: Final = 1e-6
_GRADIENT_TOLERANCE: Final = 1e-12
_NEWTON_STEPS: Final = 200
_HALVINGS: Final = 40


def fit_logistic(x: Tensor, credit: Tensor, weights: Tensor) -> Tensor:
    """Return the ``(R, 2)`` a and b that minimise the log loss of ``sigmoid(a + b x)``.

    Damped Newton steps in fp64 on the weighted mean log loss plus ``1e-6 / 2 (a^2 + b^2)``.

    Args:
        x: ``(N,)``, of mean about 0 and standard deviation about 1.
        credit: ``(N,)`` from 0 (loss) to 1 (win).
        weights: ``(R, N)``, each row sums to 1.

    Raises:
        TrainingError: a gradient that stays above the tolerance.
    """
    beta = torch.zeros(len(weights), 2, dtype=torch.float64)
    active = torch.arange(len(weights))
    for _ in range(_NEWTON_STEPS):
        loss = _LogLoss(x, credit, weights[active])
        gradient = loss.gradient(beta[active])
        open_ = gradient.abs().amax(dim=1) > _GRADIENT_TOLERANCE
        if not bool(open_.any()):
            return beta
        active = active[open_]
        loss = _LogLoss(x, credit, weights[active])
        step = loss.newton_step(beta[active], gradient[open_])
        beta[active] = _descend(loss, beta[active], step)
    raise TrainingError(
        f"The regression on length has not converged for {len(active)} of {len(weights)} samples "
        f"after {_NEWTON_STEPS} Newton steps",
        f"a gradient below {_GRADIENT_TOLERANCE:g}",
        "look for lengths that differ by many orders of magnitude",
    )


def is_separable(x: Tensor, credit: Tensor) -> bool:
    """Return whether some line has no win on one side and no loss on the other; x is not constant.

    A tie is half of each, so it may only lie on the line.
    """
    wins, losses = x[credit > 0.0], x[credit < 1.0]
    if not (wins.numel() and losses.numel()):
        return True
    return bool(losses.max() <= wins.min() or wins.max() <= losses.min())


@dataclass(frozen=True)
class _LogLoss:
    """Mean log loss of ``sigmoid(a + b x)`` plus ``1e-6 / 2 (a^2 + b^2)``, for R weightings.

    Args:
        x, credit: ``(N,)``; weights: ``(R, N)``, each row sums to 1.
    """

    x: Tensor
    credit: Tensor
    weights: Tensor

    def value(self, beta: Tensor) -> Tensor:
        """Return the loss (R,) at beta (R, 2)."""
        z = beta[:, :1] + beta[:, 1:] * self.x
        fit = (self.weights * (softplus(z) - self.credit * z)).sum(dim=1)
        return fit + 0.5 * _RIDGE * beta.square().sum(dim=1)

    def gradient(self, beta: Tensor) -> Tensor:
        """Return the gradient (R, 2) at beta (R, 2)."""
        z = beta[:, :1] + beta[:, 1:] * self.x
        slope = self.weights * (torch.sigmoid(z) - self.credit)
        return torch.stack([slope.sum(dim=1), slope @ self.x], dim=1) + _RIDGE * beta

    def newton_step(self, beta: Tensor, gradient: Tensor) -> Tensor:
        """Return ``H^-1 g``; the 2 x 2 inverse is written out."""
        p = torch.sigmoid(beta[:, :1] + beta[:, 1:] * self.x)
        curve = self.weights * p * (1.0 - p)
        aa = curve.sum(dim=1) + _RIDGE
        ab = curve @ self.x
        bb = curve @ self.x.square() + _RIDGE
        ga, gb = gradient.unbind(dim=1)
        return torch.stack([bb * ga - ab * gb, aa * gb - ab * ga], dim=1) / (
            aa * bb - ab.square()
        ).unsqueeze(1)


def _descend(loss: _LogLoss, beta: Tensor, step: Tensor) -> Tensor:
    """Take the step, halved where the whole of it would raise the loss."""
    before = loss.value(beta)
    size = torch.ones_like(before)
    for _ in range(_HALVINGS):
        # Near the minimum a good step changes the loss by less than its rounding error.
        rises = loss.value(beta - size.unsqueeze(1) * step) > before + 1e-14
        if not bool(rises.any()):
            break
        size = torch.where(rises, 0.5 * size, size)
    return beta - size.unsqueeze(1) * step
