"""Measures the policies or students of an ablation on held-out prompts, each once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import ValidationError
from torch import Tensor

from tasks.ablation.report import Measurement, Split
from tasks.algorithms.kl import kl_probe_estimate
from tasks.algorithms.masking import masked_mean
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
    write_whole,
)
from tasks.config.shared import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.hh import Pair
from tasks.data.pairs import read_pairs
from tasks.data.rendering import Renderer
from tasks.demo.oracle import good_rate
from tasks.errors import DataError
from tasks.runtime.generation import Reply, Speaker
from tasks.runtime.rows import ACTOR, REFERENCE, RoleSpec, Row, mask_of, one_pair_per_prompt, pad
from tasks.runtime.scoring import RewardScorer
from tasks.runtime.session import Session, open_session

# Raised when the code starts to measure something else.
_VERSION = 1
_BATCH_SIZE = 512

Trained = PolicyCheckpoint | StudentAdapter


@dataclass(frozen=True)
class Asked:
    """What a policy is asked.

    Args:
        prompts: at most so many of the split, the first ones.
        seed: of the sampling.
    """

    split: Split
    prompts: int
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Upstream:
    """What the policies of one seed share."""

    preferences: PreferenceDataset
    base: PolicyCheckpoint
    reward_model: RewardModelCheckpoint

    @property
    def is_demo(self) -> bool:
        """Whether the data are the demo world's, which has an oracle."""
        config = self.preferences.manifest.config
        return config.get("source") == "demo" and not config.get("sources")


@dataclass(frozen=True)
class Measured:
    """A measurement and the file that holds it; ``is_new`` says that it was made just now."""

    measurement: Measurement
    path: Path
    is_new: bool


@task(name="measure-policy", cache_policy=NO_CACHE)
def measure_policy(
    directory: Path,
    rendering: RenderingConfig,
    runtime: RuntimeConfig,
    upstream: Upstream,
    policy: Trained,
    asked: Asked,
) -> Measured:
    """Let a policy answer held-out prompts at temperature 1, and judge the answers.

    A measurement that ``directory`` has already, of the same weights and prompts, is read.

    Raises:
        DataError: the split has no prompts.
        RendererMismatchError: models that were trained with other limits or templates.
        RewardError: the reward model gives an answer a score that is not finite.
    """
    key = _key(rendering, upstream, policy, asked)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = directory / f"{digest[:32]}.json"
    stored = _read(path)
    if stored is not None:
        return Measured(stored, path, is_new=False)
    found = _measure(rendering, runtime, upstream, policy, asked)
    content = {"of": key, "measurement": found.model_dump()}
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=2, allow_nan=False))
    return Measured(found, path, is_new=True)


def _key(
    rendering: RenderingConfig, upstream: Upstream, policy: Trained, asked: Asked
) -> dict[str, Any]:
    """Return all that decides a measurement."""
    artifacts = {"policy": policy, **vars(upstream)}
    return {
        "version": _VERSION,
        "asked": asdict(asked),
        "rendering": rendering.model_dump(),
        # By content: a policy that was trained anew need not have the same weights.
        "artifacts": {name: artifact.content_hash for name, artifact in artifacts.items()},
    }


def _read(path: Path) -> Measurement | None:
    """Return what an earlier run left; None where there is nothing whole."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        return Measurement.model_validate(loaded["measurement"])
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
    except ValidationError:
        return None


def _measure(
    rendering: RenderingConfig,
    runtime: RuntimeConfig,
    upstream: Upstream,
    policy: Trained,
    asked: Asked,
) -> Measurement:
    renderer = _one_renderer(rendering, upstream, policy)
    pairs = one_pair_per_prompt(read_pairs(upstream.preferences, asked.split), asked.prompts)
    if not pairs:
        raise DataError(
            f"The {asked.split} split has no prompts", "at least one", "raise its share in `ingest`"
        )
    replies = _replies(runtime, renderer, policy, pairs, asked)
    rows = [reply.row for reply in replies]
    session = open_session(runtime)
    now, ref = _logprobs(session, policy, upstream.base, rows)
    mask = mask_of(rows)
    kl = kl_probe_estimate(now, ref, mask)
    texts = [reply.text for reply in replies]
    ended = [row.response_ids[-1] == renderer.end_of_turn_id for row in rows]
    return Measurement(
        split=asked.split,
        good_rate=good_rate([p.prompt for p in pairs], texts) if upstream.is_demo else None,
        scores=RewardScorer.load(session, upstream.reward_model).score(rows).total.tolist(),
        kl_per_token=kl.k1.value,
        kl_k3_per_token=kl.k3.value,
        # The mean surprise of the policy at its own words is its entropy.
        entropy=float(masked_mean(-now, mask)),
        length_tokens=sum(len(row.response_ids) for row in rows) / len(rows),
        ended_share=sum(ended) / len(ended),
    )


def _one_renderer(rendering: RenderingConfig, upstream: Upstream, policy: Trained) -> Renderer:
    renderer = Renderer.load(upstream.base.model_dir, rendering)
    named = {"policy": policy, "base": upstream.base, "reward": upstream.reward_model}
    for name, artifact in named.items():
        if artifact.manifest.renderer_fingerprint is not None:
            renderer.check_same(artifact.manifest.renderer_fingerprint, f"the {name} model")
    return renderer


def _replies(
    runtime: RuntimeConfig,
    renderer: Renderer,
    policy: Trained,
    pairs: Sequence[Pair],
    asked: Asked,
) -> list[Reply]:
    # Only at temperature 1 and top_p 1 are the estimates of KL and entropy unbiased.
    sampling = GenerationConfig(
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=asked.max_new_tokens,
        batch_size=_BATCH_SIZE,
    )
    speaker = Speaker(policy.model_dir, renderer, runtime)
    return speaker.reply([pair.prompt for pair in pairs], sampling, asked.seed)


def _logprobs(
    session: Session, policy: Trained, base: PolicyCheckpoint, rows: Sequence[Row]
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N, T) of the answers by the policy and by the base."""
    session.load(RoleSpec(REFERENCE, "language_model", str(base.model_dir)))
    ref = pad(session.logprobs(REFERENCE, rows))
    if policy.model_dir == base.model_dir:
        return ref, torch.clone(ref)
    session.load(RoleSpec(ACTOR, "language_model", str(policy.model_dir)))
    return pad(session.logprobs(ACTOR, rows)), ref
