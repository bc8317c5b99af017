"""What the teacher gives: responses of its own, each sampled once, and soft labels of responses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tasks.algorithms.distillation_losses import agreement_weights
from tasks.artifacts import RewardModelCheckpoint
from tasks.config.shared import identity_fields
from tasks.context import StageContext
from tasks.data.columns import TokenColumns, read_token_columns, write_token_columns
from tasks.data.rendering import RenderedPair, Renderer
from tasks.data.teacher_labels import GIB, LabelLayout, LabelStore, TeacherLabels
from tasks.distill.config import DistillConfig, SoftLabelConfig
from tasks.errors import ConfigError, DataError
from tasks.runtime.generation import EndTokens, TransformersGenerator
from tasks.runtime.logits_hooks import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    LogitsHook,
    RowReader,
    SampleReader,
    TopKReader,
)
from tasks.runtime.rows import NUMERIC_FIELDS, REFERENCE, RoleSpec, Row
from tasks.runtime.scoring import RewardScorer
from tasks.runtime.session import Session, resolve_device

TEACHER = "teacher"
# Prompts after which responses are stored.
PROMPTS_PER_CHUNK = 2048
# Part of the name of stored responses and labels; raise it when the same config gives others.
_VERSION = 1
# Rows of the whole vocabulary are for vocabularies up to this size.
MAX_FULL_VOCABULARY = 8192
# With a ninth of the mass in the tail, 64 labels of a real model still gave gradients of a cosine
# of 0.99 to the full ones; with three quarters of it there, 0.8 to 0.9.
_MUCH_TAIL = 0.25


@dataclass(frozen=True)
class StudentData:
    """Responses that the student learns on.

    Args:
        rows: N responses.
        own: (N,) bool, True = the teacher wrote it.
        labels: of the teacher; None where the loss reads none.
        weights: (N,) of the responses, mean 1; None where all weigh the same.
    """

    rows: Sequence[Row]
    own: Tensor
    labels: TeacherLabels | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Teacher:
    """The aligned policy.

    Args:
        ctx: the run.
        cfg: of the stage.
        model_dir: the teacher.
        base_dir: what the teacher was aligned from.
        renderer: of teacher and student.
        reward_model: judges responses, where the config asks for it.
    """

    ctx: StageContext
    cfg: DistillConfig
    model_dir: Path
    base_dir: Path
    renderer: Renderer
    reward_model: RewardModelCheckpoint

    def collect(self, session: Session, pairs: Sequence[RenderedPair]) -> StudentData:
        """Return the student's rows with their labels and weights, computed or read back.

        Raises:
            ConfigError: labels that would be too large, or of a kind that does not fit the
                vocabulary; before the teacher labels anything.
            DataError: the teacher wrote nothing that can be used.
            ArtifactError: stored responses or labels that are torn or of something else.
        """
        check_layout(self.cfg.soft_labels, self.renderer)
        data = self._rows(session, pairs)
        if self.cfg.soft_labels.is_used:
            data = replace(data, labels=self._labels(session, data.rows))
        if self.cfg.reward_weighting == "agreement":
            data = replace(data, weights=self._weights(session, data))
        return data

    def _rows(self, session: Session, pairs: Sequence[RenderedPair]) -> StudentData:
        cfg = self.cfg
        if cfg.data == "all":
            rows = [Row(p.prompt_ids, r) for p in pairs for r in (p.chosen_ids, p.rejected_ids)]
            return StudentData(rows, torch.zeros(len(rows), dtype=torch.bool))
        chosen = [Row(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
        if cfg.data == "chosen":
            return StudentData(chosen, torch.zeros(len(chosen), dtype=torch.bool))
        own = self._good(session, self._spoken(pairs))
        stored = chosen if cfg.data == "mixture" else []
        is_own = torch.arange(len(own) + len(stored)) < len(own)
        return StudentData([*own, *stored], is_own)

    def _spoken(self, pairs: Sequence[RenderedPair]) -> list[Row]:
        """Return the teacher's responses, one to each prompt, that end by themselves."""
        prompts = list(dict.fromkeys(pair.prompt_ids for pair in pairs))
        responses = TeacherResponses(self, prompts).read()
        ended = [
            Row(prompt, response)
            for prompt, response in zip(prompts, responses, strict=True)
            if response and response[-1] == self.renderer.end_of_turn_id
        ]
        self.ctx.draft.counts["teacher_responses_without_end"] = len(prompts) - len(ended)
        if not ended:
            limit = self.cfg.generation.max_new_tokens
            raise DataError(
                f"None of {len(prompts)} responses ended in {limit} tokens",
                "responses with an end of turn",
                "raise distill.generation.max_new_tokens or set distill.data: chosen",
            )
        return ended

    def _good(self, session: Session, rows: list[Row]) -> list[Row]:
        """Return the responses whose reward reaches the quantile."""
        quantile = self.cfg.min_reward_quantile
        if not quantile:
            return rows
        rewards = RewardScorer.load(session, self.reward_model).score(rows).total
        bound = float(torch.quantile(rewards.double(), quantile))
        kept = [row for row, reward in zip(rows, rewards.tolist(), strict=True) if reward >= bound]
        self.ctx.draft.counts["teacher_responses_below_quantile"] = len(rows) - len(kept)
        self.ctx.draft.metrics["min_reward"] = bound
        return kept

    def _labels(self, session: Session, rows: Sequence[Row]) -> TeacherLabels:
        soft, log = self.cfg.soft_labels, self.ctx.log
        layout = label_layout(soft, self.renderer.vocab_size)
        store = LabelStore.at(
            self.ctx.workspace.cache_dir / "teacher",
            layout,
            self._identity(soft),
            [row.prompt_ids for row in rows],
            [row.response_ids for row in rows],
        )
        n_tokens = sum(len(row.response_ids) for row in rows)
        size = layout.check_size(n_tokens, soft.max_cache_gib)
        log.event(
            "teacher_labels",
            f"soft labels of {n_tokens:,} tokens take at most {size / GIB:.3g} GiB on the disk",
        )
        hook = reader_of(layout, soft.tau, self.cfg.seed)

        def compute(start: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
            if TEACHER not in session.specs:
                session.load(self.role)
            found = session.read_tokens(TEACHER, rows[start:end], hook)
            log.progress(end, len(rows), "teacher labels")
            return found[TEACHER_LOGPROBS], found.get(TEACHER_IDS, [])

        store.fill(compute)
        self.ctx.draft.counts["teacher_label_bytes"] = store.bytes_on_disk()
        labels = store.read()
        if layout.has_tail:
            self._tell_tail(labels)
        return labels

    def _tell_tail(self, labels: TeacherLabels) -> None:
        """Say what share of the teacher's probability the labels leave to the tail, which teaches
        the student nothing about the tokens in it."""
        tail = 1.0 - float(torch.cat(labels.logprobs).exp().sum(-1).mean())
        self.ctx.draft.metrics["teacher_tail_mass"] = max(tail, 0.0)
        if tail > _MUCH_TAIL:
            soft = self.cfg.soft_labels
            self.ctx.log.event(
                "teacher_tail",
                f"the {soft.top_k} best tokens at tau {soft.tau:g} hold {1.0 - tail:.0%} of the "
                "teacher's probability; a lower soft_labels.tau or a higher top_k teaches more",
            )

    @property
    def role(self) -> RoleSpec:
        """The teacher in the workers."""
        return RoleSpec(TEACHER, "language_model", str(self.model_dir))

    def _identity(self, soft: SoftLabelConfig) -> dict[str, str]:
        runtime, numeric, drawn = self.cfg.runtime, NUMERIC_FIELDS, {}
        if soft.kind == "sampled":
            # The draws of a micro-batch follow from its rows.
            numeric, drawn = numeric | {"tokens_per_micro_batch"}, {"seed": str(self.cfg.seed)}
        return {
            "version": str(_VERSION),
            "teacher": self.ctx.inputs["policy"].content_hash[:16],
            "dataset": self.ctx.inputs["preferences"].content_hash[:16],
            "renderer": self.renderer.fingerprint[:16],
            "tau": str(soft.tau),
            "runtime": runtime.model_dump_json(include=numeric),
            **drawn,
        }

    def _weights(self, session: Session, data: StudentData) -> Tensor:
        """Return how far teacher and reward model agree about each response: what alignment made of
        its likelihood is the teacher's opinion."""
        rewards = RewardScorer.load(session, self.reward_model).score(data.rows).total
        margin = torch.full((len(data.rows),), torch.nan)
        stored = [i for i, own in enumerate(data.own.tolist()) if not own]
        if stored:
            rows = [data.rows[i] for i in stored]
            session.load(RoleSpec(REFERENCE, "language_model", str(self.base_dir)), self.role)
            now, base = (session.logprobs(role, rows) for role in (TEACHER, REFERENCE))
            moved = [(a - b).sum() for a, b in zip(now, base, strict=True)]
            margin[stored] = torch.stack(moved)
        weights = agreement_weights(margin, rewards)
        self.ctx.draft.metrics |= {
            "agreement_weight_min": float(weights.min()),
            "agreement_weight_max": float(weights.max()),
        }
        return weights


@dataclass(frozen=True)
class TeacherResponses:
    """One sampled response per prompt, stored in chunks so that a killed run goes on."""

    teacher: Teacher
    prompts: Sequence[Sequence[int]]

    @cached_property
    def key(self) -> str:
        """Identity of everything that the responses depend on."""
        teacher = self.teacher
        document = {
            "version": _VERSION,
            "teacher": teacher.ctx.inputs["policy"].content_hash,
            "renderer": teacher.renderer.fingerprint,
            "generation": identity_fields(teacher.cfg.generation),
            "seed": teacher.cfg.seed,
            "prompts": [list(prompt) for prompt in self.prompts],
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def read(self) -> list[Sequence[int]]:
        """Return a response to each prompt, sampling those that are not stored."""
        directory = self.teacher.ctx.workspace.cache_dir / "teacher_responses" / self.key[:16]
        found: list[Sequence[int]] = []
        for index, start in enumerate(range(0, len(self.prompts), PROMPTS_PER_CHUNK)):
            file = directory / f"{index:06d}.parquet"
            if not file.exists():
                self._sample(file, index, start)
            found += read_token_columns(file, self.key).response_ids
        return found

    @cached_property
    def _generator(self) -> TransformersGenerator:
        """The teacher, loaded when something is left to sample."""
        renderer, runtime = self.teacher.renderer, self.teacher.cfg.runtime
        return TransformersGenerator(
            self.teacher.model_dir,
            EndTokens(renderer.end_of_turn_id, renderer.pad_token_id),
            device=resolve_device(runtime),
            threads=runtime.cpu_threads,
        )

    def _sample(self, file: Path, index: int, start: int) -> None:
        cfg, log, total = self.teacher.cfg, self.teacher.ctx.log, len(self.prompts)
        prompts = self.prompts[start : start + PROMPTS_PER_CHUNK]
        digest = hashlib.sha256(f"{cfg.seed}/{index}".encode()).digest()
        responses = self._generator.generate(
            prompts,
            cfg.generation,
            int.from_bytes(digest[:6], "big"),
            lambda done, _: log.progress(start + done, total, "teacher responses"),
        )
        write_token_columns(file, TokenColumns(prompts, responses), self.key)


def label_layout(soft: SoftLabelConfig, vocab_size: int) -> LabelLayout:
    """Return what is kept of each token; of a small vocabulary no more labels than it has."""
    k = {
        "top_k": min(soft.top_k, vocab_size),
        "sampled": soft.samples,
        "full": vocab_size,
    }[soft.kind]
    return LabelLayout(soft.kind, k, vocab_size)


def check_layout(soft: SoftLabelConfig, renderer: Renderer) -> None:
    """Refuse rows of the whole vocabulary where that is not small.

    Raises:
        ConfigError: names both sizes.
    """
    if soft.is_used and soft.kind == "full" and renderer.vocab_size > MAX_FULL_VOCABULARY:
        raise ConfigError(
            f"distill.soft_labels.kind is full with a vocabulary of {renderer.vocab_size:,}",
            f"a vocabulary of at most {MAX_FULL_VOCABULARY:,} for whole rows",
            "set soft_labels.kind to top_k or sampled",
        )


def reader_of(layout: LabelLayout, tau: float, seed: int) -> LogitsHook:
    """Return what reads such labels from the teacher's logits."""
    if layout.kind == "full":
        return RowReader(tau, layout.vocab_size)
    if layout.kind == "sampled":
        return SampleReader(layout.k, tau, layout.vocab_size, seed)
    return TopKReader(layout.k, tau, layout.vocab_size)
