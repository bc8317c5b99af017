"""Real verl workers: the same numbers whether prompts are shared or not, on one and two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.offline_ppo.config import OfflinePPOConfig, PolicyLossConfig
from tasks.offline_ppo.step import actor_loss
from tasks.runtime.logits_hooks import TopKReader
from tasks.runtime.rows import Batch, RoleSpec, Row

pytestmark = pytest.mark.slow

ROLE = "model"
Open = Callable[..., Any]
FirstMetrics = Callable[..., dict[str, float]]


def _row(seed: int, prompt_tokens: int, response_tokens: int) -> Row:
    """Return a row whose prompt depends on its length alone."""
    prompt = torch.Generator().manual_seed(prompt_tokens)
    response = torch.Generator().manual_seed(1000 + seed)
    return Row(
        tuple(torch.randint(6, 262, (prompt_tokens,), generator=prompt).tolist()),
        tuple(torch.randint(6, 262, (response_tokens,), generator=response).tolist()),
    )


# Prompts of 2, 5, 9 and 3 tokens with 3, 2, 1 and 2 responses, out of order.
SIZES = [(2, 3), (5, 6), (2, 1), (9, 4), (5, 2), (2, 7), (3, 1), (3, 1)]
ROWS = [_row(i, *sizes) for i, sizes in enumerate(SIZES)]


def _batches() -> dict[str, tuple[str, Batch, Any]]:
    """Return a role's kind, a batch of prompts with one to three responses, and a loss, by name."""
    from tasks.runtime import verl_losses as losses

    generator = torch.Generator().manual_seed(6)
    noise = [torch.randn(len(row.response_ids), generator=generator) for row in ROWS]
    critic = Batch(ROWS, {"old_values": noise, "returns": [3.0 * x.flip(0) for x in noise]})
    ppo = {"proximal_logprobs": [x - 5.0 for x in noise], "advantages": noise}
    columns = ppo | {"weights": [x.abs() for x in noise]}
    clip = actor_loss(OfflinePPOConfig(loss=PolicyLossConfig(entropy_coef=0.1)))
    critic_loss = partial(losses.critic_loss, clip_range=0.2, mode="token-mean")
    return {
        "cloning": ("language_model", Batch(ROWS), losses.cloning_loss),
        "ppo": (
            "language_model",
            Batch(ROWS, columns, scalars={"calculate_entropy": True}),
            clip,
        ),
        "critic": ("value_model", critic, critic_loss),
    }


@pytest.fixture
def first_metrics(open_workers: Open, tiny_dir: Path) -> FirstMetrics:
    """A function that takes one step on fresh workers; keywords change the runtime."""

    def take(name: str, **runtime: Any) -> dict[str, float]:
        kind, batch, loss_fn = _batches()[name]
        session = open_workers(**runtime)
        session.load(RoleSpec(ROLE, kind, str(tiny_dir), 5, 4))  # type: ignore[arg-type]
        session.set_loss(ROLE, loss_fn)
        metrics: dict[str, float] = session.train_step(ROLE, batch)
        return metrics

    return take


@pytest.mark.parametrize("name", ["cloning", "ppo", "critic"])
def test_first_step_equals_plain_rows(name: str, first_metrics: FirstMetrics) -> None:
    expected = first_metrics(name, share_prompts=False)
    assert expected["grad_norm"] > 0.1
    for changes in ({}, {"tokens_per_micro_batch": 24}):
        found = first_metrics(name, **changes)
        for metric, value in expected.items():
            assert found[metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric


def _readings(session: Any, tiny_dir: Path, rows: Sequence[Row]) -> list[Tensor]:
    session.load(RoleSpec("language", "language_model", str(tiny_dir)))
    session.load(RoleSpec("value", "value_model", str(tiny_dir), seed=3))
    labels = session.read_tokens("language", rows, TopKReader(3, 2.0, 262))
    return [
        torch.cat(session.logprobs("language", rows, temperature=0.7)),
        torch.cat(session.values("value", rows)),
        session.scores("value", rows),
        torch.cat(labels["teacher_logprobs"]),
        torch.cat(labels["teacher_ids"]),
    ]


def test_readings_equal_plain_rows(open_workers: Open, tiny_dir: Path) -> None:
    expected = _readings(open_workers(share_prompts=False), tiny_dir, ROWS)
    session = open_workers()
    found = _readings(session, tiny_dir, ROWS)
    assert session.notes == {}
    for shared, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)


def test_rows_that_cannot_be_merged_are_told(
    open_workers: Open, tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _readings(open_workers(), tiny_dir, ROWS)
    session = open_workers(remove_padding=True)
    found = _readings(session, tiny_dir, ROWS)
    assert set(session.notes) == {"language", "value"}
    assert (
        "remove_padding" in session.notes["value"]
        and "role language computes each prompt again" in caplog.text
    )
    for packed, shared in zip(found, expected, strict=True):
        torch.testing.assert_close(packed, shared, atol=1e-5, rtol=1e-5)
    session.drop()
    assert session.notes == {}


def test_two_ranks_give_the_numbers_of_one(
    open_workers: Open, tiny_dir: Path, first_metrics: FirstMetrics
) -> None:
    # The border between the ranks cuts prompts: ROWS has the second prompt's rows on both.
    names = sorted(_batches())
    expected = {name: first_metrics(name, share_prompts=False) for name in names}
    # Seven rows: the last call is filled up.
    readings = _readings(open_workers(share_prompts=False), tiny_dir, ROWS[:7])
    for budget in (24, 16384):
        for name in names:
            found = first_metrics(name, ranks=2, tokens_per_micro_batch=budget)
            for metric in ("loss", "grad_norm"):
                assert found[metric] == pytest.approx(expected[name][metric], rel=1e-5, abs=1e-6)
    for found_, plain in zip(
        _readings(open_workers(ranks=2), tiny_dir, ROWS[:7]), readings, strict=True
    ):
        torch.testing.assert_close(found_, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.endurance
def test_ranks_with_one_and_with_four_prompts(open_workers: Open, tiny_dir: Path) -> None:
    from tasks.runtime.verl_losses import cloning_loss

    # The first rank merges its rows into one of 22 tokens, the second has four rows that do not
    # fit together, and would by itself run more passes, which the first would not join.
    one_prompt = [_row(i, 2, 5) for i in range(4)]
    rows = one_prompt + [_row(9 + i, 8 + i, 6) for i in range(4)]
    losses = []
    for ranks in (1, 2):
        session = open_workers(ranks=ranks, tokens_per_micro_batch=24)
        session.load(RoleSpec(ROLE, "language_model", str(tiny_dir), 5, 4))
        session.set_loss(ROLE, cloning_loss)
        losses.append(session.train_step(ROLE, Batch(rows)))
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], abs=1e-6)
    assert losses[1]["grad_norm"] == pytest.approx(losses[0]["grad_norm"], rel=1e-5)
