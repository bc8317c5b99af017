"""Optional token columns: the renderer's own ids, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasks.artifacts import PreferenceDataset
from tasks.config.shared import RenderingConfig
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer
from tasks.errors import RendererMismatchError
from tasks.ingest.parser import read_token_ids

Ingest = Callable[..., PreferenceDataset]
LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 12}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [{"prompt": f"the cat {n}", "chosen": "yes", "rejected": "no"} for n in range(60)]
    rows.append({"prompt": "long", "chosen": "yes " * 40, "rejected": "no"})
    rows.append({"prompt": "same", "chosen": "ab" * 40 + "c", "rejected": "ab" * 40 + "d"})
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ids_are_the_renderers_and_limits_quarantine(
    ingest: Ingest, source: Path, model_dir: Path
) -> None:
    dataset = ingest(source, tokens={"model_dir": str(model_dir), "rendering": LIMITS})
    renderer = Renderer.load(model_dir, RenderingConfig(**LIMITS))
    pairs = read_pairs(dataset, "train")
    ids = read_token_ids(dataset, "train", renderer)
    assert len(ids) == len(pairs) > 30
    for pair, found in zip(pairs, ids, strict=True):
        prompt, _ = renderer.prompt_ids(pair.prompt)
        chosen, _ = renderer.response_ids(pair.chosen)
        rejected, _ = renderer.response_ids(pair.rejected)
        assert found == (list(prompt), list(chosen), list(rejected))
    left_out = pq.read_table(dataset.path / "quarantine.parquet").to_pylist()
    assert [(e["source_line"], e["reason"]) for e in left_out] == [
        (61, "too_long"),
        (62, "too_long"),
    ]


def test_responses_that_are_cut_to_the_same_ids_are_no_pair(
    ingest: Ingest, source: Path, model_dir: Path
) -> None:
    cut = {**LIMITS, "truncate_response": True}
    dataset = ingest(source, tokens={"model_dir": str(model_dir), "rendering": cut})
    left_out = pq.read_table(dataset.path / "quarantine.parquet").to_pylist()
    assert [(e["source_line"], e["reason"]) for e in left_out] == [
        (62, "identical_after_truncation")
    ]


def test_ids_of_another_renderer_are_refused(ingest: Ingest, source: Path, model_dir: Path) -> None:
    dataset = ingest(source, tokens={"model_dir": str(model_dir), "rendering": LIMITS})
    other = Renderer.load(model_dir, RenderingConfig(max_prompt_tokens=63))
    with pytest.raises(RendererMismatchError):
        read_token_ids(dataset, "train", other)
    with pytest.raises(RendererMismatchError, match="has no token columns"):
        read_token_ids(ingest(source), "train", other)
