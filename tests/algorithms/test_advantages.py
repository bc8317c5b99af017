"""Advantages: GAE with padding and truncation, group baselines, explained variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tasks.algorithms import advantages as adv

NAN = math.nan


Case = dict[str, Any]


@pytest.fixture
def gae_case(shared_cases: Callable[[str], list[Case]]) -> Callable[[str], tuple[Case, Case]]:
    """A function that returns input and expectation of a case."""

    def find(case_id: str) -> tuple[Case, Case]:
        cases = [*shared_cases("gae"), *shared_cases("ppo_reward")]
        case = next(case for case in cases if case["id"] == case_id)
        return case["input"], case["expected"]

    return find


def _matrix(rows: list[list[float | str]]) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in rows])


def test_gae_02_equals_gae_on_the_unpadded_tokens(gae_case: Any) -> None:
    given, expected = gae_case("GAE-02")
    advantages, returns = adv.generalized_advantage_estimate(
        _matrix(given["rewards"]),
        _matrix(given["values"]),
        _matrix(given["mask"]).bool(),
        gamma=given["gamma"],
        gae_lambda=given["lam"],
    )
    # row 0: 1 - 0.3 = 0.7; 0.3 - 0.4 + 0.95 * 0.7 = 0.565; 0.4 - 0.5 + 0.95 * 0.565 = 0.43675
    # row 1: 1 - 0.1 = 0.9; 0.1 - 0.2 + 0.95 * 0.9 = 0.755
    torch.testing.assert_close(advantages, _matrix(expected["advantages"]))
    torch.testing.assert_close(returns, _matrix(expected["returns"]))


def test_rew_03_nothing_after_the_last_action_counts(gae_case: Any) -> None:
    given, expected = gae_case("REW-03")
    advantages, _ = adv.generalized_advantage_estimate(
        _matrix([given["rewards"]]),
        _matrix([given["values"]]),
        _matrix([given["action_mask"]]).bool(),
        gamma=given["gamma"],
        gae_lambda=given["lam"],
    )
    torch.testing.assert_close(advantages, _matrix([expected["advantages"]]))
    assert int((advantages != 0).sum()) == expected["nonzero_count"]


def test_gae_04_a_response_cut_off_by_length_bootstraps(gae_case: Any) -> None:
    given, expected = gae_case("GAE-04")
    advantages, _ = adv.generalized_advantage_estimate(
        _matrix([given["rewards"]] * 2),
        _matrix([given["values"]] * 2),
        torch.ones(2, 2, dtype=torch.bool),
        gamma=given["gamma"],
        gae_lambda=given["lam"],
        bootstrap_values=torch.tensor([given["bootstrap_value"], 0.0]),
    )
    # cut off: 0.99 * 0.8 - 0.6 = 0.192; 0.99 * 0.6 - 0.5 + 0.9405 * 0.192 = 0.274576
    # ended: -0.6; 0.094 + 0.9405 * -0.6 = -0.4703
    torch.testing.assert_close(advantages, _matrix([expected["truncated"], expected["terminal"]]))


def test_gae_21_what_follows_a_cut_is_worth_what_the_critic_says(gae_case: Any) -> None:
    given, expected = gae_case("GAE-21")
    values = _matrix([given["values"]])
    advantages, returns = adv.generalized_advantage_estimate(
        torch.full_like(values, given["reward"]),
        values,
        torch.ones_like(values, dtype=torch.bool),
        gamma=given["gamma"],
        gae_lambda=given["lambda"],
        bootstrap_values=torch.tensor([given["bootstrap"]]),
    )
    assert returns.tolist() == [expected["returns"]]
    assert advantages.tolist() == [expected["advantages"]]


def test_gae_on_any_padding_equals_a_plain_fp64_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        rewards, values = torch.randn(2, 1, 9, generator=generator)
        mask = torch.rand(1, 9, generator=generator) < 0.6
        mask[0, 4] = True
        boot = torch.randn(1, generator=generator)
        kept_r, kept_v = rewards[mask].double().tolist(), values[mask].double().tolist()
        expected, following = [], 0.0
        nexts = [*kept_v[1:], boot.item()]
        for r, v, nv in reversed(list(zip(kept_r, kept_v, nexts, strict=True))):
            following = r + 0.9 * nv - v + 0.9 * 0.8 * following
            expected.insert(0, following)
        rewards[~mask], values[~mask] = math.inf, NAN
        got, _ = adv.generalized_advantage_estimate(
            rewards, values, mask, gamma=0.9, gae_lambda=0.8, bootstrap_values=boot
        )
        assert got[mask].tolist() == pytest.approx(expected, abs=1e-5)
        assert torch.equal(got[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.0, 0.98), (0.5, 0.965), (1.0, 0.95), (7.0, 0.95), (-1.0, 0.98)]
)
def test_adaptive_lambda(ratio: float, expected: float) -> None:
    assert adv.adaptive_gae_lambda(ratio) == pytest.approx(expected)


def test_group_statistics_survive_bf16() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0078125], dtype=torch.bfloat16)
    stats = adv.group_statistics(scores, torch.zeros(4, dtype=torch.long))
    # mean 1.001953125, std over n - 1 0.00390625: -0.001953125 / 0.00390625 = -0.5
    expected = torch.tensor([-0.5, -0.5, -0.5, 1.5])
    torch.testing.assert_close(stats.centred / stats.std, expected)


def test_group_baselines_for_groups_of_any_size_and_order() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 2.0, 9.0, 8.0])
    groups = torch.tensor([7, 1, 7, 7, 4, 1])
    # group 7: 1, 3, 2 mean 2 std 1; group 1: 5, 8 mean 6.5 std 2.1213203; group 4 alone
    grpo = adv.grpo_advantages(scores, groups, normalize_std=True)
    half = 1.5 / 2.1213203
    torch.testing.assert_close(grpo, torch.tensor([-1.0, -half, 1.0, 0.0, 0.0, half]))
    plain = adv.grpo_advantages(scores, groups, normalize_std=False)
    torch.testing.assert_close(plain, torch.tensor([-1.0, -1.5, 1.0, 0.0, 0.0, 1.5]))
    # leave one out: 1 - 2.5, 5 - 8, 3 - 1.5, 2 - 2, alone, 8 - 5
    rloo = adv.rloo_advantages(scores, groups)
    torch.testing.assert_close(rloo, torch.tensor([-1.5, -3.0, 1.5, 0.0, 0.0, 3.0]))


def test_equal_scores_give_exactly_zero() -> None:
    for value in (0.1, 5.3, 123.456, -7.7e5):
        for size in (1, 3, 7):
            scores = torch.full((size,), value)
            groups = torch.zeros(size, dtype=torch.long)
            grpo = adv.grpo_advantages(scores, groups, normalize_std=True)
            assert torch.equal(grpo, torch.zeros(size))
            assert torch.equal(adv.rloo_advantages(scores, groups), torch.zeros(size))


def test_a_permutation_of_the_batch_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, generator=generator)
    groups = torch.randint(0, 4, (12,), generator=generator)
    order = torch.randperm(12, generator=generator)
    for fn in (partial(adv.grpo_advantages, normalize_std=True), adv.rloo_advantages):
        torch.testing.assert_close(
            fn(scores[order], groups[order]), fn(scores, groups)[order], atol=1e-5, rtol=1e-5
        )


def test_reinforce_pp_whitens_returns_over_the_batch() -> None:
    rewards = torch.tensor([[0.0, 1.0, NAN], [0.0, 0.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    got = adv.reinforce_pp_advantages(rewards, mask, gamma=0.5)
    # returns 0.5, 1 and 1, 2, 4: mean 1.7, squares 1.44 + 0.49 + 0.49 + 0.09 + 5.29 = 7.8,
    # variance 7.8 / 4 = 1.95
    std = math.sqrt(1.95)
    expected = torch.tensor([[-1.2, -0.7, 0.0], [-0.7, 0.3, 2.3]]) / std
    torch.testing.assert_close(got, expected)


def test_explained_variance() -> None:
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, NAN]])
    perfect = adv.explained_variance(returns + 5.0, returns, mask)
    assert perfect.item() == pytest.approx(1.0)  # a constant offset is no variance
    # errors 0, 0, 1: variance 2/9 over 2/3 = 1/3
    values = torch.tensor([[1.0, 2.0, 2.0, NAN]])
    assert adv.explained_variance(values, returns, mask).item() == pytest.approx(2 / 3)
    assert adv.explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)
    constant = torch.full((1, 4), 0.1)
    assert adv.explained_variance(returns, constant, mask).item() == 0.0
