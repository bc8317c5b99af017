"""The prioritised draw without replacement and its corrections."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from tasks.algorithms.samplers import Priorities, draw_probabilities, select_prioritized


def test_probabilities_by_hand() -> None:
    # values 1, 3, 0 squared: 1, 9, 0 of 10; uniform share 0.3: 0.7 * (0.1, 0.9, 0) + 0.1
    settings_ = Priorities([0.0], exponent=2.0, uniform_share=0.3)
    assert draw_probabilities([1.0, 3.0, 0.0], settings_) == pytest.approx([0.17, 0.73, 0.1])
    assert draw_probabilities([0.0, 0.0], settings_) == [0.5, 0.5]
    huge = draw_probabilities([1e200, 2e200], Priorities([0.0], exponent=9.0, uniform_share=1e-9))
    assert sum(huge) == pytest.approx(1.0) and huge[1] == pytest.approx(512 / 513)


def test_first_draws_follow_the_probabilities() -> None:
    # m = 1 of 3: item i is drawn with p_i = 0.5 * v_i / 4 + 0.5 / 3
    values = [1.0, 3.0, 0.0]
    kept = Priorities(values, uniform_share=0.5, epoch_share=0.3)
    n_trials = 20_000
    counts = Counter(
        select_prioritized(values, kept, random.Random(t))[0].item for t in range(n_trials)
    )
    for index, value in enumerate(values):
        p = 0.5 * value / 4.0 + 0.5 / 3.0
        # four standard errors
        assert abs(counts[index] / n_trials - p) < 4 * math.sqrt(p * (1 - p) / n_trials)


def test_corrections_make_the_mean_unbiased() -> None:
    # x correlates with the priority, so the plain mean of what is drawn is far too high.
    values = [0.0, 1.0, 2.0, 3.0, 10.0]
    x = [1.0, 2.0, 3.0, 4.0, 20.0]
    kept = Priorities(values, uniform_share=0.2, epoch_share=0.6)
    plain, corrected = [], []
    for trial in range(20_000):
        drawn = select_prioritized(values, kept, random.Random(trial))
        assert len(drawn) == 3
        plain.append(sum(x[i] for i, _ in drawn) / 3)
        corrected.append(sum(c * x[i] for i, c in drawn) / 3)
    # The mean of all five is 30 / 5 = 6.
    mean = sum(corrected) / len(corrected)
    variance = sum((value - mean) ** 2 for value in corrected) / len(corrected)
    assert abs(mean - 6.0) < 4 * math.sqrt(variance / len(corrected))
    assert sum(plain) / len(plain) > 8.0


def test_all_drawn_needs_no_correction() -> None:
    kept = Priorities([1.0, 5.0], epoch_share=1.0)
    drawn = select_prioritized([1.0, 5.0], kept, random.Random(0))
    assert sorted(drawn) == [(0, 1.0), (1, 1.0)]
    assert [
        Priorities([], epoch_share=s).n_selected(n) for s, n in ((0.07, 100), (0.5, 3), (0.1, 1))
    ] == [7, 2, 1]
