"""Candidate responses: exact probabilities of what was sampled, filters, and killed runs."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.config.shared import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.columns import read_chunk
from tasks.data.hh import Message
from tasks.data.rendering import Renderer, load_tokenizer
from tasks.errors import DataError, TrainingError
from tasks.models.loading import load_causal_lm
from tasks.offline_ppo import candidates as candidate_sampler
from tasks.offline_ppo.candidates import (
    CandidateSampler,
    CandidateSet,
    CandidateSource,
    generate_candidates,
)
from tasks.offline_ppo.config import CandidatesConfig
from tasks.offline_ppo.data import groups_with
from tasks.runtime.generation import EndTokens
from tasks.runtime.rows import Row

QUESTIONS = ["Hi.", "What is up there?", "Tell me more of it.", "Why?", "And now, what?"]
CFG = CandidatesConfig(
    per_prompt=2, temperature=0.6, top_p=0.9, max_new_tokens=6, batch_size=4, chunk_prompts=2
)
MakeSource = Callable[..., CandidateSource]


@pytest.fixture(scope="session")
def peaked_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with logits so far apart that a nucleus cuts and turns end."""
    directory = tmp_path_factory.mktemp("peaked") / "model"
    model = load_causal_lm(tiny_dir)
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        states = model.model(torch.arange(6, 262)[None]).last_hidden_state[0]
        weight = 0.35 * torch.randn(head.weight.shape, generator=generator)
        end_of_turn_id = Renderer.load(tiny_dir, RenderingConfig()).end_of_turn_id
        weight[end_of_turn_id] = 5.0 * states.mean(dim=0) / states.square().mean()
        model.config.tie_word_embeddings = False
        head.weight = torch.nn.Parameter(weight)
    model.save_pretrained(directory)
    load_tokenizer(tiny_dir).save_pretrained(directory)
    return directory


@pytest.fixture
def source(peaked_dir: Path, tmp_path: Path) -> MakeSource:
    """A function that returns the peaked model as a source with its chunks in a new directory."""

    def make(cache: str = "cache", model_dir: Path = peaked_dir, *identity: str) -> CandidateSource:
        renderer = Renderer.load(model_dir, RenderingConfig())
        runtime = RuntimeConfig(device="cpu", cpu_threads=1)
        return CandidateSource(model_dir, renderer, runtime, tmp_path / cache, identity)

    return make


@pytest.fixture
def prompts(source: MakeSource) -> list[tuple[int, ...]]:
    renderer = source().renderer
    return [renderer.prompt_ids((Message("user", text),))[0] for text in QUESTIONS]


def _changed(**changes: Any) -> CandidatesConfig:
    return CandidatesConfig(**{**CFG.model_dump(), **changes})


def _ids(found: CandidateSet) -> list[list[int]]:
    return [list(row.response_ids) for row in found.rows]


def _nucleus(logits: Tensor, temperature: float, top_p: float) -> list[float]:
    """Sampling probabilities by a plain loop from the most likely token on, in fp64."""
    weights = (logits.double() / temperature).softmax(-1).tolist()
    kept, before = [0.0] * len(weights), 0.0
    for token in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if before < top_p:
            kept[token] = weights[token]
        before += weights[token]
    return [weight / sum(kept) for weight in kept]


def _plain(model: Any, row: Row, temperature: float, top_p: float) -> tuple[list[float], float]:
    """Log-probabilities and summed KL of one row, without padding, cache or chunks."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
    logprobs, kl = [], 0.0
    for state, token in zip(logits, row.response_ids, strict=True):
        mu = _nucleus(state, temperature, top_p)
        own = state.double().log_softmax(-1).tolist()
        logprobs.append(math.log(mu[token]))
        kl += sum(p * (math.log(p) - q) for p, q in zip(mu, own, strict=True) if p > 0.0)
    return logprobs, kl


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.7, 0.8), (0.7, 0.6)])
@pytest.mark.parametrize("logits_at_a_time", [1, 3000, 2**24])
def test_logprobs_equal_a_plain_computation(
    source: MakeSource,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    logits_at_a_time: int,
    temperature: float,
    top_p: float,
) -> None:
    monkeypatch.setattr(candidate_sampler, "_LOGITS_AT_A_TIME", logits_at_a_time)
    cfg = _changed(temperature=temperature, top_p=top_p, chunk_prompts=5)
    found = generate_candidates(source(), cfg, prompts, seed=1)
    model = load_causal_lm(source().model_dir)
    total_kl = 0.0
    for row, logprobs in zip(found.rows, found.logprobs, strict=True):
        wanted, kl = _plain(model, row, temperature, top_p)
        assert logprobs.tolist() == pytest.approx(wanted, abs=2e-4)
        total_kl += kl
    n_tokens = sum(len(row.response_ids) for row in found.rows)
    assert found.kl == pytest.approx(total_kl / n_tokens, abs=2e-4)
    assert (found.kl < 1e-6) == (temperature == top_p == 1.0)


def test_frequencies_equal_the_probabilities(
    source: MakeSource, prompts: list[tuple[int, ...]]
) -> None:
    n_samples = 4000
    cfg = _changed(
        per_prompt=n_samples, top_p=0.7, max_new_tokens=2, batch_size=n_samples, max_tries=1
    )
    found = generate_candidates(source(), cfg, prompts[:1], seed=0)
    drawn = Counter(tuple(row.response_ids) for row in found.rows)
    mass = {
        tuple(row.response_ids): float(values.sum().exp())
        for row, values in zip(found.rows, found.logprobs, strict=True)
    }
    assert all(p > 0.0 for p in mass.values())
    # What was never drawn is unlikely, so with the share of an end of turn by itself, which is
    # dropped, the masses of what was drawn nearly add up.
    empty = found.counts["dropped_empty"] / n_samples
    assert 0.02 < empty < 0.3
    assert sum(mass.values()) + empty == pytest.approx(1.0, abs=0.03)
    assert len(mass) > 50
    for response, p in mass.items():
        # Binomial: five standard deviations, and one draw where less than one is expected.
        error = abs(drawn[response] / n_samples - p)
        assert error < 5 * math.sqrt(p * (1 - p) / n_samples) + 1 / n_samples
    # Pearson's chi-square over responses expected at least 10 times; 6 standard deviations of it.
    expected = {response: p * n_samples for response, p in mass.items() if p * n_samples >= 10}
    chi_square = sum((drawn[r] - e) ** 2 / e for r, e in expected.items())
    assert chi_square < len(expected) + 6 * math.sqrt(2 * len(expected))


def test_the_model_itself_would_be_the_wrong_policy(
    source: MakeSource, prompts: list[tuple[int, ...]]
) -> None:
    found = generate_candidates(source(), _changed(temperature=0.5), prompts, seed=0)
    model = load_causal_lm(source().model_dir)
    gaps = [
        float(values.sum()) - sum(_plain(model, row, 1.0, 1.0)[0])
        for row, values in zip(found.rows, found.logprobs, strict=True)
    ]
    assert min(gaps) > 0.0
    assert sum(gaps) / len(gaps) > 0.5


def test_settings_of_the_model_do_not_take_part(
    source: MakeSource, peaked_dir: Path, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(peaked_dir, other)
    (other / "generation_config.json").write_text(
        json.dumps({"repetition_penalty": 4.0, "top_k": 2, "suppress_tokens": [10, 11, 12, 13]})
    )
    expected = generate_candidates(source("a"), CFG, prompts, seed=0)
    assert _ids(generate_candidates(source("b", other), CFG, prompts, seed=0)) == _ids(expected)


def test_seeds_decide(source: MakeSource, prompts: list[tuple[int, ...]]) -> None:
    first = generate_candidates(source("a"), CFG, prompts, seed=3)
    torch.rand(7)
    assert _ids(generate_candidates(source("b"), CFG, prompts, seed=3)) == _ids(first)
    assert _ids(generate_candidates(source("a"), CFG, prompts, seed=4)) != _ids(first)
    assert len(set(map(tuple, _ids(first)))) > 5
    # A prompt that comes again in a later chunk is answered anew.
    cfg = _changed(chunk_prompts=1, temperature=1.5, top_p=1.0, max_tries=1)
    same = generate_candidates(source("c"), cfg, [prompts[1]] * 4, seed=3)
    assert len(set(map(tuple, _ids(same)))) > 5


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("killed_at", [1, 2, 4])
def test_a_killed_run_ends_like_any_other(
    source: MakeSource, prompts: list[tuple[int, ...]], killed_at: int
) -> None:
    cfg = _changed(temperature=3.0, top_p=1.0, kl_bound=1e-3, batch_size=2)
    expected = generate_candidates(source("whole"), cfg, prompts, seed=1)
    assert expected.temperature < 3.0

    def kill(done: int, total: int) -> None:
        if done >= killed_at:
            raise _Killed

    with pytest.raises(_Killed):
        generate_candidates(source("killed"), cfg, prompts, 1, kill)
    before = {f: f.stat().st_mtime_ns for f in source("killed").cache_dir.rglob("*.parquet")}
    found = generate_candidates(source("killed"), cfg, prompts, seed=1)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    assert len(before) == killed_at // 2
    assert _ids(found) == _ids(expected)
    assert [v.tolist() for v in found.logprobs] == [v.tolist() for v in expected.logprobs]
    assert (found.counts, found.temperature, found.kl) == (
        expected.counts,
        expected.temperature,
        expected.kl,
    )


def test_stored_responses_need_no_model(
    source: MakeSource, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = generate_candidates(source(), CFG, prompts, seed=0)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(CandidateSampler, "__init__", refuse)
    again = generate_candidates(source(), CFG, prompts, seed=0)
    assert _ids(again) == _ids(first)
    assert again.texts == first.texts
    # How many are generated at a time changes no result, so it does not ask for new ones.
    other = generate_candidates(source(), _changed(batch_size=3), prompts, seed=0)
    assert _ids(other) == _ids(first)


@pytest.mark.parametrize("change", ["identity", "seed", "config", "prompts"])
def test_anything_else_is_sampled_anew(
    source: MakeSource, prompts: list[tuple[int, ...]], change: str
) -> None:
    generate_candidates(source(), CFG, prompts, seed=0)
    other = source()
    if change == "identity":
        other = source("cache", other.model_dir, "another dataset")
    cfg = _changed(top_p=0.8) if change == "config" else CFG
    asked = prompts[1:] if change == "prompts" else prompts
    generate_candidates(other, cfg, asked, seed=int(change == "seed"))
    assert len(list(other.cache_dir.iterdir())) == 2


def test_groups_texts_and_truncation(source: MakeSource, prompts: list[tuple[int, ...]]) -> None:
    found = generate_candidates(source(), _changed(per_prompt=12), prompts, seed=0)
    renderer = source().renderer
    assert found.group.tolist() == sorted(found.group.tolist())
    for row, group, text, logprobs, truncated in zip(
        found.rows, found.group, found.texts, found.logprobs, found.truncated, strict=True
    ):
        assert row.prompt_ids == prompts[int(group)]
        assert text == renderer.decode(row.response_ids) != ""
        assert logprobs.shape == (len(row.response_ids),)
        assert bool(truncated) == (row.response_ids[-1] != renderer.end_of_turn_id)
        assert not truncated or len(row.response_ids) == CFG.max_new_tokens
    assert found.truncated.any() and not found.truncated.all()
    assert found.counts["truncated"] == int(found.truncated.sum())
    assert found.counts["kept"] == len(found.rows) == 60 - 12 * found.counts["short_prompts"]


def test_a_pattern_filters_and_retries(source: MakeSource, prompts: list[tuple[int, ...]]) -> None:
    once = _changed(
        per_prompt=6, temperature=1.2, top_p=1.0, pattern="[a-m]", batch_size=32, max_tries=1
    )
    first = generate_candidates(source(), once, prompts, seed=0)
    assert all(set("abcdefghijklm") & set(text) for text in first.texts)
    counts = first.counts
    assert counts["generated"] == 6 * len(prompts)
    assert counts["generated"] == sum(
        counts[name] for name in ("kept", "dropped_empty", "dropped_pattern")
    )
    assert counts["dropped_pattern"] > 0
    per_prompt = first.group.bincount(minlength=len(prompts))
    assert counts["short_prompts"] == int((per_prompt < 6).sum()) > 0

    often = generate_candidates(
        source(), _changed(**{**once.model_dump(), "max_tries": 40}), prompts, 0
    )
    assert often.group.bincount(minlength=len(prompts)).tolist() == [6] * len(prompts)
    assert often.counts["short_prompts"] == 0
    # The first round is the same; later ones fill up.
    assert {tuple(ids) for ids in _ids(first)} <= {tuple(ids) for ids in _ids(often)}


def test_a_pattern_that_nothing_matches_is_named(
    source: MakeSource, prompts: list[tuple[int, ...]]
) -> None:
    cfg = _changed(pattern="no such text", max_tries=2)
    with pytest.raises(DataError, match=r"None of 8 candidate responses .* 'no such text'"):
        generate_candidates(source(), cfg, prompts, seed=0)
    assert not list(source().cache_dir.rglob("*.parquet"))


def test_empty_responses_are_dropped(source: MakeSource, prompts: list[tuple[int, ...]]) -> None:
    # One token: the end of turn by itself is empty, anything else ran out of length.
    cfg = _changed(per_prompt=200, temperature=1.5, top_p=1.0, max_new_tokens=1, max_tries=1)
    found = generate_candidates(source(), cfg, prompts, seed=0)
    assert found.counts["dropped_empty"] > 0
    assert found.truncated.all()
    assert all(found.texts)


def test_progress_counts_prompts(source: MakeSource, prompts: list[tuple[int, ...]]) -> None:
    seen: list[tuple[int, int]] = []
    cfg = _changed(batch_size=2, max_tries=1)
    generate_candidates(source(), cfg, prompts, 0, lambda done, total: seen.append((done, total)))
    # Chunks of two prompts, two responses each, two responses at a time.
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_the_temperature_falls_to_its_bound(
    source: MakeSource, prompts: list[tuple[int, ...]]
) -> None:
    cfg = _changed(
        temperature=2.0,
        top_p=1.0,
        chunk_prompts=1,
        kl_bound=1e-4,
        temperature_scale=0.7,
        min_temperature=1.2,
    )
    found = generate_candidates(source(), cfg, prompts, seed=0)
    files = sorted(source().cache_dir.rglob("*.parquet"))
    chunks = [read_chunk(file, _key_of(file)) for file in files]
    # 2, 1.4, then 0.98 is below 1.2.
    assert [chunk.temperature for chunk in chunks] == pytest.approx([2.0, 1.4, 1.2, 1.2, 1.2])
    assert found.temperature == pytest.approx(1.2)
    assert chunks[0].kl > chunks[1].kl > chunks[2].kl > 1e-4
    # Each chunk's log-probabilities are those of its own temperature.
    model = load_causal_lm(source().model_dir)
    for chunk in chunks:
        row = Row(prompts[chunk.prompts[0]], chunk.response_ids[0])
        wanted, _ = _plain(model, row, chunk.temperature, 1.0)
        assert chunk.logprobs[0].tolist() == pytest.approx(wanted, abs=2e-4)
    loose = _changed(**{**cfg.model_dump(), "kl_bound": 50.0})
    assert generate_candidates(source(), loose, prompts, seed=0).temperature == 2.0


def _key_of(file: Path) -> str:
    import pyarrow.parquet as pq

    key: str = pq.read_schema(file).metadata[b"rlhf.key"].decode()
    return key


def test_none_are_sampled_where_none_are_asked_for(source: MakeSource) -> None:
    found = generate_candidates(source(), CandidatesConfig(), [(1, 2)], seed=0)
    assert (found.rows, found.logprobs, found.group.tolist()) == ([], [], [])


def test_candidates_go_behind_the_stored_responses() -> None:
    # Prompt 0 has the pairs of rows 0, 1 and 4, 5; prompt 1 that of 2, 3.
    groups = [[0, 1, 4, 5], [2, 3]]
    assert groups_with([0, 1, 1], groups, 6) == [[0, 1, 4, 5, 6], [2, 3, 7, 8]]
    assert groups_with([], groups, 6) == groups == [[0, 1, 4, 5], [2, 3]]


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 5, 2), (9, 1, 9)])
def test_padding_and_batch_mates_do_not_matter(peaked_dir: Path, lengths: tuple[int, ...]) -> None:
    sampler = CandidateSampler(peaked_dir, EndTokens(1, 0), device="cpu", threads=1)
    rows = [Row(tuple(range(20, 20 + n)), tuple(range(40, 41 + 3 * n))) for n in lengths]
    cfg = GenerationConfig(temperature=1.3)
    together, kl = sampler.score([*rows, *rows], cfg)
    model = load_causal_lm(peaked_dir)
    wanted = [_plain(model, row, 1.3, 1.0) for row in rows]
    for values, (logprobs, _) in zip(together, wanted * 2, strict=True):
        assert values.tolist() == pytest.approx(logprobs, abs=2e-4)
    assert kl == pytest.approx(2 * sum(part for _, part in wanted), rel=1e-4)


def test_scoring_refuses_what_was_not_sampled(
    peaked_dir: Path, prompts: list[tuple[int, ...]]
) -> None:
    sampler = CandidateSampler(peaked_dir, EndTokens(1, 0), device="cpu", threads=1)
    cold = GenerationConfig(temperature=0.3, top_p=0.5, max_new_tokens=4)
    hot = GenerationConfig(temperature=5.0, max_new_tokens=4)
    responses = sampler.generate(prompts, hot, seed=0)
    rows = [Row(p, r) for p, r in zip(prompts, responses, strict=True)]
    with pytest.raises(TrainingError, match="outside the nucleus"):
        sampler.score(rows, cold)
