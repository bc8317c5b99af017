"""The same numbers on two ranks as on one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.errors import ConfigError, TrainingError
from tasks.runtime.rows import Batch, RoleSpec, Row

pytestmark = pytest.mark.slow

ROLE = "model"
KINDS = ["cloning", "bradley-terry", "ppo", "topr", "dpo", "critic", "distillation"]
Open = Callable[..., Any]
Metrics = dict[str, float]


def _step(session: Any, scenario: Any) -> Metrics:
    session.load(scenario.spec)
    session.set_loss(ROLE, scenario.loss_fn)
    metrics: Metrics = session.train_step(ROLE, scenario.batch)
    return metrics


@pytest.fixture(scope="module")
def on_one_rank(cluster: None, scenarios: Any, runtime: Any) -> dict[str, Metrics]:
    """The first step of each kind on one rank."""
    from tasks.runtime.session import open_session

    session = open_session(runtime)
    return {kind: _step(session, scenarios[kind]) for kind in KINDS}


@pytest.fixture
def two(on_one_rank: dict[str, Metrics], open_workers: Open) -> Any:
    """Two ranks, opened after the single one is done."""
    return open_workers(ranks=2)


@pytest.mark.parametrize("kind", KINDS)
def test_first_step_is_the_same(
    kind: str, scenarios: Any, two: Any, on_one_rank: dict[str, Metrics]
) -> None:
    found, expected = _step(two, scenarios[kind]), on_one_rank[kind]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_cut_into_unequal_numbers_of_micro_batches(
    scenarios: Any, open_workers: Open, on_one_rank: dict[str, Metrics]
) -> None:
    # The ranks hold rows of different lengths and would by themselves run different numbers of
    # passes, and wait for each other for ever.
    found = _step(open_workers(ranks=2, tokens_per_micro_batch=40), scenarios["cloning"])
    assert found["loss"] == pytest.approx(on_one_rank["cloning"]["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(on_one_rank["cloning"]["grad_norm"], rel=1e-5)


def test_odd_number_of_rows_is_scored(two: Any, tiny_dir: Path, rows: list[Row]) -> None:
    two.load(RoleSpec(ROLE, "language_model", str(tiny_dir)))
    whole = two.logprobs(ROLE, rows)
    found = two.logprobs(ROLE, rows[:5])
    assert [len(values) for values in found] == [len(row.response_ids) for row in rows[:5]]
    torch.testing.assert_close(torch.cat(found), torch.cat(whole[:5]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("n_rows", "group_size"), [(3, 1), (6, 2)])
def test_batch_that_cannot_be_shared(
    two: Any, rows: list[Row], n_rows: int, group_size: int
) -> None:
    with pytest.raises(ConfigError, match=r"3 pairs or prompts .* 2 ranks"):
        two.train_step(ROLE, Batch(rows[:n_rows], group_size=group_size))


def test_error_on_one_rank_reaches_the_driver(scenarios: Any, two: Any) -> None:
    scenario = scenarios["ppo"]
    spoiled = [column.clone() for column in scenario.batch.columns["weights"]]
    spoiled[0][0] = math.nan
    two.load(scenario.spec)
    two.set_loss(ROLE, scenario.loss_fn)
    started = time.monotonic()
    with pytest.raises(TrainingError, match="loss is nan"):
        columns = scenario.batch.columns | {"weights": spoiled}
        two.train_step(ROLE, Batch(scenario.batch.rows, columns))
    # The other rank still waits for this one; the driver does not.
    assert time.monotonic() - started < 60.0
