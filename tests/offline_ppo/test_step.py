"""Advantages as the loop computes them, by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tasks.errors import ConfigError, TrainingError
from tasks.offline_ppo.batches import Drawn, Minibatch, check_subsets, distances, margins
from tasks.offline_ppo.config import (
    AdvantageConfig,
    ImportanceConfig,
    OfflinePPOConfig,
    SequenceThresholdConfig,
)
from tasks.offline_ppo.objectives import OBJECTIVES
from tasks.offline_ppo.step import (
    advantages_of,
    gae_of,
    prepare_step,
    sequence_advantages,
    sequence_veto,
    sizes_of,
    weights_of,
)
from tasks.runtime.rows import Row, Trajectories

# Two prompts with two responses each, of 2, 1, 1 and 2 tokens; the score stands at the last token.
MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]], dtype=torch.bool)
REWARDS = torch.tensor([[0.0, 1.0], [3.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
GROUPS = torch.tensor([7, 7, 2, 2])


def _rounded(tensor: Tensor) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in tensor.tolist()]


def _advantages(**changes: object) -> list[list[float]]:
    cfg = AdvantageConfig.model_validate(changes)
    return _rounded(sequence_advantages(cfg, REWARDS, MASK, GROUPS))


def test_gae_by_hand() -> None:
    cfg = AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=0.5)
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.5, 0.4]])
    advantages, returns = gae_of(cfg, rewards, values, torch.ones(1, 3, dtype=torch.bool), None)
    # delta = 0.3, -0.1, 0.6; A3 = 0.6, A2 = -0.1 + 0.5 * 0.6 = 0.2, A1 = 0.3 + 0.5 * 0.2 = 0.4;
    # mean 0.4, standard deviation over n - 1 0.2.
    assert _rounded(returns) == [[0.6, 0.7, 1.0]]
    assert _rounded(advantages) == [[0.0, -1.0, 1.0]]


def test_adaptive_lambda_follows_the_unexplained_variance() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    values = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    # Returns 1, 1, 0, 0 with variance 1/4; errors 1/2, 1/2, 0, 0 with variance 1/16: a quarter is
    # unexplained, so lambda = 0.95 + 0.03 * 3/4.
    adaptive = gae_of(AdvantageConfig(gae_lambda="adaptive"), rewards, values, mask, None)
    fixed = gae_of(AdvantageConfig(gae_lambda=0.9725), rewards, values, mask, None)
    other = gae_of(AdvantageConfig(gae_lambda=0.95), rewards, values, mask, None)
    torch.testing.assert_close(adaptive, fixed)
    assert not torch.allclose(adaptive[1], other[1])


def test_group_advantages_by_hand() -> None:
    # Prompt 7: 1 and 3, mean 2, standard deviation over n - 1 sqrt(2). Prompt 2: equal, so 0.
    a = round(1 / math.sqrt(2), 4)
    assert _advantages(estimator="group") == [[-a, -a], [a, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_group_advantages_without_the_standard_deviation() -> None:
    found = _advantages(estimator="group", normalize_std=False)
    assert found == [[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_leave_one_out_by_hand() -> None:
    # 1 - 3, 3 - 1, 5 - 5, 5 - 5
    assert _advantages(estimator="rloo") == [[-2.0, -2.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_discounted_returns_are_whitened_over_all_tokens() -> None:
    # gamma 1/2: returns 0.5, 1 | 3 | 5 | 2.5, 5; mean 17/6, squares around it 18.3333,
    # variance over n - 1 3.6667, standard deviation 1.9149.
    found = _advantages(estimator="reinforce_pp", gamma=0.5)
    returns = [[0.5, 1.0], [3.0], [5.0], [2.5, 5.0]]
    expected = [[(x - 17 / 6) / math.sqrt(18 + 1 / 3) * math.sqrt(5) for x in r] for r in returns]
    for row, wanted in zip(found, expected, strict=True):
        assert row[: len(wanted)] == pytest.approx(wanted, abs=1e-4)
        assert row[len(wanted) :] == [0.0] * (2 - len(wanted))


def test_whitening_is_asked_for() -> None:
    plain = torch.tensor(_advantages(estimator="rloo"))[MASK]
    white = torch.tensor(_advantages(estimator="rloo", whiten=True))[MASK]
    expected = (plain - plain.mean()) / plain.std()
    torch.testing.assert_close(white, expected, atol=1e-3, rtol=0)


def _row(n_tokens: int) -> Row:
    return Row((1, 2), tuple(range(n_tokens)))


# Two prompts with two responses of one token each; the last one is far from the behaviour policy.
DATA = Trajectories(
    rows=[_row(1)] * 4,
    groups=[[0, 1], [2, 3]],
    rewards=torch.tensor([1.0, 3.0, 2.0, 6.0]),
    behavior_logprobs=[torch.tensor([-1.0])] * 4,
    ref_logprobs=[torch.tensor([-1.0])] * 4,
)
PROXIMAL = torch.tensor([[-1.0], [-0.9], [-1.1], [-3.0]])
BATCH = Minibatch.of(DATA, Drawn([0, 1, 2, 3], [1.0] * 4), list(PROXIMAL), None)


def _veto(log_tau: float | None = None, **changes: object) -> tuple[Tensor, float, float | None]:
    cfg = SequenceThresholdConfig.model_validate(changes)
    weights, _ = weights_of(ImportanceConfig(cap=2.0), BATCH, torch.ones(4, 1))
    return sequence_veto(cfg, BATCH, weights, log_tau)


def _prepared(batch: Minibatch, **changes: object) -> tuple[Minibatch, dict[str, float]]:
    batch, report, _ = prepare_step(OfflinePPOConfig.model_validate(changes), batch, 0.0, None)
    return batch, report


def test_responses_far_from_the_behaviour_policy_are_left_out() -> None:
    # Mean log-ratios 0, 0.1, -0.1 and -2; log 1.5 = 0.405.
    keep, tau, _ = _veto(mode="fixed", tau=1.5)
    assert (keep.tolist(), tau) == ([True, True, True, False], 1.5)


def test_adaptive_threshold_moves_from_where_it_stood() -> None:
    # Three of four are within |log-ratio| 0.1: that is the tau which keeps a share of 0.75. Half of
    # the way from log 2: (0.1 + 0.693) / 2 = 0.397.
    how = {"mode": "adaptive", "target_keep_share": 0.75, "smoothing": 0.5}
    assert _veto(**how)[2] == pytest.approx(0.1, abs=1e-6)
    keep, _, log_tau = _veto(log_tau=math.log(2.0), **how)
    assert log_tau == pytest.approx(0.3966, abs=1e-4)
    assert keep.tolist() == [True, True, True, False]


def test_a_threshold_that_leaves_nothing_is_told() -> None:
    far = dataclasses.replace(BATCH, proximal_logprobs=PROXIMAL - 4.0)
    cfg = SequenceThresholdConfig(mode="fixed", tau=1.5)
    with pytest.raises(TrainingError, match=r"All 4 responses.*tau 1\.5"):
        sequence_veto(cfg, far, torch.ones(4, 1), None)


def test_vetoed_responses_lose_their_weight_only() -> None:
    with_veto, report = _prepared(BATCH, filters={"sequence": {"mode": "fixed", "tau": 1.5}})
    without, _ = _prepared(BATCH)
    assert with_veto.weights is not None and without.weights is not None
    assert with_veto.weights[:, 0].tolist() == [*without.weights[:3, 0].tolist(), 0.0]
    assert (report["tau"], report["vetoed_share"]) == (1.5, 0.25)
    assert with_veto.advantages is not None and without.advantages is not None
    assert torch.equal(with_veto.advantages, without.advantages)


def test_control_variate_is_taken_off_before_advantages() -> None:
    # Leave-one-out baselines 3, 1, 6, 2; rewards less these -2, 2, -4, 4: variance (4 + 4 + 16 +
    # 16) / 4 = 10 instead of ((1-3)^2 + 0 + 1 + 9) / 4 = 3.5, so 1 - 10 / 3.5 is removed.
    cfg = AdvantageConfig.model_validate(
        {"estimator": "reinforce_pp", "control_variate": {"kind": "leave_one_out"}}
    )
    advantages, _, report = advantages_of(cfg, BATCH, 0.0)
    assert report["variance_removed"] == pytest.approx(1 - 10 / 3.5)
    # Whitened: mean 0, standard deviation over n - 1 sqrt(40 / 3).
    expected = [x / math.sqrt(40 / 3) for x in (-2.0, 2.0, -4.0, 4.0)]
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_prioritised_draw_is_corrected() -> None:
    twice = dataclasses.replace(BATCH, corrections=torch.tensor([2.0, 2.0, 1.0, 1.0]))
    plain, corrected = _prepared(BATCH)[0].advantages, _prepared(twice)[0].advantages
    assert plain is not None and corrected is not None
    assert torch.equal(corrected, plain * torch.tensor([[2.0], [2.0], [1.0], [1.0]]))


def test_sizes_are_distances_from_the_prompts_mean_whatever_the_draw() -> None:
    # Rewards 1 and 3, 2 and 6: one and two from their means, in units of the reward.
    twice = dataclasses.replace(BATCH, corrections=torch.tensor([3.0, 3.0, 1.0, 1.0]))
    for batch in (BATCH, twice):
        assert sizes_of(_prepared(batch)[0]).tolist() == [1.0, 1.0, 2.0, 2.0]
    assert distances(DATA) == [1.0, 2.0]
    assert margins(DATA) == [2.0, 4.0]


def test_what_follows_a_response_that_was_cut_off_is_worth_what_the_critic_says() -> None:
    # Two responses of two tokens, worth 0, of which the critic says 0.5 before, between and after.
    data = Trajectories(
        rows=[_row(2)] * 2,
        groups=[[0, 1]],
        rewards=torch.tensor([0.0, 1.0]),
        behavior_logprobs=[torch.zeros(2)] * 2,
        ref_logprobs=[torch.zeros(2)] * 2,
        ended=torch.tensor([False, True]),
    )
    batch = Minibatch.of(data, Drawn([0, 1], [1.0, 1.0]), None, [torch.full((3,), 0.5)] * 2)
    assert batch.values is not None and batch.values.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    cfg = AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=1.0)
    advantages, returns, _ = advantages_of(cfg, batch, 0.0)
    # The first was cut: 0 + 0.5. The second ended: its reward, 1, and nothing after it.
    assert returns is not None and returns.tolist() == [[0.5, 0.5], [1.0, 1.0]]
    # Before whitening 0, 0 and 0.5, 0.5: mean 0.25, standard deviation over n - 1 sqrt(1 / 12).
    side = 0.25 * math.sqrt(12)
    assert _rounded(advantages) == [[round(-side, 4)] * 2, [round(side, 4)] * 2]


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({"policy_loss": "topr", "filters": {"sequence": {"mode": "fixed"}}}, "filters.sequence"),
        ({"policy_loss": "dpo", "sampler": {"priority": "margin"}}, "sampler.priority"),
        ({"policy_loss": "dpo", "candidates": {"per_prompt": 1}}, "candidates.per_prompt"),
        ({"policy_loss": "dpo", "advantage": {"estimator": "gae"}}, "advantage.estimator gae"),
    ],
)
def test_what_a_loss_would_not_read_is_refused(changes: dict[str, object], unread: str) -> None:
    with pytest.raises(ValidationError, match=f"does not use {unread}"):
        OfflinePPOConfig.model_validate(changes)


def test_every_policy_loss_has_an_objective() -> None:
    assert get_args(OfflinePPOConfig.model_fields["policy_loss"].annotation) == tuple(OBJECTIVES)


def test_weights_of_unknown_subsets_are_refused() -> None:
    cfg = OfflinePPOConfig.model_validate(
        {"sampler": {"stratify": True, "subset_weights": {"helpfull": 2.0}}}
    )
    with pytest.raises(ConfigError, match=r"helpfull.*helpful"):
        check_subsets(cfg, {"helpful", "harmless"})
