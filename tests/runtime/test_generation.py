"""Generation against a plain loop: greedy decoding, seeds, ends of turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.config.shared import GenerationConfig
from tasks.errors import DataError
from tasks.models.loading import load_causal_lm
from tasks.runtime.generation import EndTokens, TransformersGenerator
from tasks.runtime.rows import Row

PAD = 0
NO_END = 1
GREEDY = GenerationConfig(temperature=0.0, max_new_tokens=12, batch_size=8)
SAMPLED = GenerationConfig(temperature=1.0, max_new_tokens=12, batch_size=8)


@pytest.fixture(scope="module")
def prompts(rows: list[Row]) -> list[list[int]]:
    return [[*row.prompt_ids, *row.response_ids[:k]] for k, row in enumerate(rows)]


@pytest.fixture(scope="module")
def expected(tiny_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The likeliest token after token, each prompt by itself, without a cache."""
    model = load_causal_lm(tiny_dir)
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(GREEDY.max_new_tokens):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def _generator(tiny_dir: Path, end_of_turn_id: int = NO_END) -> TransformersGenerator:
    return TransformersGenerator(tiny_dir, EndTokens(end_of_turn_id, PAD), device="cpu", threads=1)


def test_greedy_equals_a_plain_loop(
    tiny_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert all(NO_END not in response for response in expected)
    assert _generator(tiny_dir).generate(prompts, GREEDY, seed=0) == expected


def test_order_and_batch_mates_do_not_matter_for_greedy(
    tiny_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    alone = GREEDY.model_copy(update={"batch_size": 1})
    for cfg in (GREEDY, alone):
        found = _generator(tiny_dir).generate(prompts[::-1], cfg, seed=0)
        assert found == expected[::-1]


def test_a_response_ends_with_its_first_end_of_turn(
    tiny_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    end = expected[0][4]
    found = _generator(tiny_dir, end).generate(prompts, GREEDY, seed=0)
    for response, whole in zip(found, expected, strict=True):
        # A response that never says it runs to the limit, and nothing is put behind it.
        assert response == (whole[: whole.index(end) + 1] if end in whole else whole)
    assert found[0][-1] == end
    assert any(response[-1] != end for response in found)


def test_seeds_decide_what_is_sampled(tiny_dir: Path, prompts: list[list[int]]) -> None:
    generator = _generator(tiny_dir)
    first = generator.generate(prompts, SAMPLED, seed=3)
    torch.rand(5)
    assert generator.generate(prompts, SAMPLED, seed=3) == first
    assert generator.generate(prompts, SAMPLED, seed=4) != first


def test_the_global_random_state_stays(tiny_dir: Path, prompts: list[list[int]]) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    _generator(tiny_dir).generate(prompts[:2], SAMPLED, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_follows_the_distribution(tiny_dir: Path, prompts: list[list[int]]) -> None:
    n_samples = 2000
    cfg = GenerationConfig(temperature=0.5, max_new_tokens=1, batch_size=n_samples)
    found = _generator(tiny_dir).generate([prompts[3]] * n_samples, cfg, seed=0)
    logits = load_causal_lm(tiny_dir)(torch.tensor([prompts[3]])).logits[0, -1].detach()
    wanted = (logits / 0.5).softmax(-1)
    counts = torch.bincount(torch.tensor(found).flatten(), minlength=len(wanted))
    likeliest = wanted.argmax()
    p = float(wanted[likeliest])
    # Binomial: five standard deviations.
    assert abs(float(counts[likeliest]) / n_samples - p) < 5 * (p * (1 - p) / n_samples) ** 0.5


def test_progress_counts_prompts(tiny_dir: Path, prompts: list[list[int]]) -> None:
    seen: list[tuple[int, int]] = []
    cfg = GenerationConfig(temperature=0.0, max_new_tokens=1, batch_size=3)
    _generator(tiny_dir).generate(
        prompts, cfg, seed=0, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(3, 8), (6, 8), (8, 8)]


def test_an_empty_prompt_is_named(tiny_dir: Path) -> None:
    with pytest.raises(DataError, match="Prompt 1 has no tokens"):
        _generator(tiny_dir).generate([[5], []], GREEDY, seed=0)
