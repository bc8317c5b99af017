"""Stage distill: the aligned policy teaches a LoRA student with top-k soft labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.artifacts import PolicyCheckpoint, PreferenceDataset, StudentAdapter
from tasks.backends.behavior import NUMERIC_FIELDS
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.cluster import resolve_device
from tasks.backends.generation import EndTokens, TransformersGenerator
from tasks.backends.roles import Batch, RoleSpec, Row
from tasks.backends.session import Session, open_session
from tasks.backends.supervised import SupervisedRun, count_steps, train_supervised
from tasks.backends.trajectories import response_rows
from tasks.config import DistillConfig
from tasks.context import StageContext
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.data.token_columns import TokenColumns, read_token_columns, write_token_columns
from tasks.errors import DataError, ModelError, RendererMismatchError
from tasks.models.export import merge_adapter, response_logprobs
from tasks.models.loading import load_causal_lm, load_student

TEACHER = "teacher"
STUDENT = "student"
# Largest difference of a log-probability between the trained student and what a reader loads.
ADAPTER_TOLERANCE = 1e-4
MERGED_TOLERANCE = 1e-3
CHECKED_ROWS = 32


@task(name="train-student", cache_policy=NO_CACHE)
def train_student(
    ctx: StageContext,
    cfg: DistillConfig,
    preferences: PreferenceDataset,
    policy: PolicyCheckpoint,
    base: PolicyCheckpoint,
) -> StudentAdapter:
    """Distil the policy into an adapter on the base (or another) model.

    Raises:
        RlhfError: teacher and student that do not fit together (before training), or training that
            went wrong.
    """
    student_dir = base.model_dir if cfg.student == "base" else Path(ctx.sources["model"].path)
    renderer = _same_renderer(cfg, policy, student_dir)
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    pairs, left_out = render_pairs(read_pairs(preferences, "train"), renderer)
    if not pairs:
        raise DataError(
            f"No training pair fits the renderer: {left_out}", "some", "raise rendering limits"
        )
    labels = _teacher_labels(ctx, cfg, policy, pairs, renderer)
    rows = [Row(p, r) for p, r in zip(labels.prompt_ids, labels.response_ids, strict=True)]
    steps = count_steps(len(rows), cfg.batch_rows, cfg.epochs, cfg.max_steps)
    ctx.draft.counts |= {"rows": len(rows), "steps": steps, **left_out}

    session = open_session(cfg.runtime, ctx.log)
    session.load(
        RoleSpec(
            STUDENT, "language_model", str(student_dir), cfg.seed, steps, cfg.optimizer, cfg.lora
        )
    )
    _fit(ctx, cfg, session, rows, labels, steps)
    write = partial(_write, ctx, session, student_dir, rows[:CHECKED_ROWS])
    return ctx.publish(StudentAdapter, write)


def _same_renderer(cfg: DistillConfig, policy: PolicyCheckpoint, student_dir: Path) -> Renderer:
    """Return the renderer that teacher and student share: same tokens by content, not by number."""
    teacher = Renderer.load(policy.model_dir, cfg.rendering)
    student = Renderer.load(student_dir, cfg.rendering)
    if policy.manifest.renderer_fingerprint is not None:
        teacher.check_same(policy.manifest.renderer_fingerprint, "the teacher")
    if student.fingerprint != teacher.fingerprint:
        raise RendererMismatchError(
            f"The student {student_dir} and the teacher {policy.model_dir} tokenize differently",
            "the same tokenizer, special tokens and chat template",
            "choose a student of the teacher's family",
        )
    return teacher


def _teacher_labels(
    ctx: StageContext,
    cfg: DistillConfig,
    policy: PolicyCheckpoint,
    pairs: Sequence[RenderedPair],
    renderer: Renderer,
) -> TokenColumns:
    """Return the teacher's top-k log-probabilities, from their Parquet file where it exists
    already."""
    soft = cfg.soft_labels
    identity = [
        policy.content_hash,
        ctx.inputs["preferences"].content_hash,
        renderer.fingerprint,
        cfg.data,
        str(soft.tau),
        str(soft.top_k),
        str(cfg.seed),
        cfg.generation.model_dump_json(),
        cfg.runtime.model_dump_json(include=NUMERIC_FIELDS),
    ]
    key = hashlib.sha256("|".join(identity).encode()).hexdigest()
    file = ctx.workspace.cache_dir / "teacher" / f"{key[:16]}.parquet"
    if not file.exists():
        rows = _student_rows(ctx, cfg, policy, pairs, renderer)
        session = open_session(cfg.runtime, ctx.log)
        session.load(RoleSpec(TEACHER, "language_model", str(policy.model_dir)))
        logprobs, ids = session.top_k(TEACHER, rows, soft.top_k, soft.tau)
        columns = TokenColumns(
            [row.prompt_ids for row in rows],
            [row.response_ids for row in rows],
            {"teacher_logprobs": logprobs},
            {"teacher_ids": ids},
        )
        write_token_columns(file, columns, key)
    return read_token_columns(file, key)


def _student_rows(
    ctx: StageContext,
    cfg: DistillConfig,
    policy: PolicyCheckpoint,
    pairs: Sequence[RenderedPair],
    renderer: Renderer,
) -> list[Row]:
    """Return the responses that the student learns on."""
    if cfg.data == "all":
        return response_rows(pairs)
    if cfg.data == "chosen":
        return [Row(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
    prompts = list(dict.fromkeys(pair.prompt_ids for pair in pairs))
    generator = TransformersGenerator(
        policy.model_dir,
        EndTokens(renderer.end_of_turn_id, renderer.pad_token_id),
        device=resolve_device(cfg.runtime),
        threads=cfg.runtime.cpu_threads,
    )
    responses = generator.generate(
        prompts,
        cfg.generation,
        cfg.seed,
        lambda done, total: ctx.log.progress(done, total, "teacher responses"),
    )
    ended = [
        Row(prompt, response)
        for prompt, response in zip(prompts, responses, strict=True)
        if response and response[-1] == renderer.end_of_turn_id
    ]
    ctx.draft.counts["teacher_responses_without_end"] = len(prompts) - len(ended)
    if not ended:
        raise DataError(
            f"None of {len(prompts)} responses ended in {cfg.generation.max_new_tokens} tokens",
            "responses with an end of turn",
            "raise distill.generation.max_new_tokens or set distill.data: chosen",
        )
    return ended


def _fit(
    ctx: StageContext,
    cfg: DistillConfig,
    session: Session,
    rows: Sequence[Row],
    labels: TokenColumns,
    steps: int,
) -> None:
    from tasks.backends.verl_losses import distillation_loss

    soft = cfg.soft_labels
    session.set_loss(STUDENT, partial(distillation_loss, soft.alpha, soft.tau))
    logprobs, ids = labels.floats["teacher_logprobs"], labels.integers["teacher_ids"]

    def make_batch(units: Sequence[int]) -> Batch:
        columns = {
            "teacher_logprobs": [logprobs[unit] for unit in units],
            "teacher_ids": [ids[unit].long() for unit in units],
        }
        scalars: dict[str, float | bool] = {"distillation_use_topk": True}
        return Batch([rows[unit] for unit in units], columns, scalars=scalars)

    run = SupervisedRun(
        session,
        STUDENT,
        steps,
        cfg.batch_rows,
        make_batch,
        CheckpointStore(ctx.checkpoint_dir, cfg.checkpoint.keep),
        ctx.log,
    )
    lengths = [len(row) for row in rows]
    sampler = LengthGroupedSampler(lengths, batch_size=cfg.batch_rows, seed=cfg.seed)
    train_supervised(run, sampler, cfg.checkpoint)


def _write(
    ctx: StageContext, session: Session, student_dir: Path, rows: Sequence[Row], directory: Path
) -> None:
    """Export adapter and merged model, load both as a reader would, and compare with the trained
    student."""
    session.export(STUDENT, directory / "adapter")
    merge_adapter(student_dir, directory / "adapter", directory / "merged")
    trained = session.logprobs(STUDENT, rows)
    adapter = load_student(student_dir, directory / "adapter")
    merged = load_causal_lm(directory / "merged")
    for name, model, limit in (
        ("adapter", adapter, ADAPTER_TOLERANCE),
        ("merged", merged, MERGED_TOLERANCE),
    ):
        found = [response_logprobs(model, row.prompt_ids, row.response_ids) for row in rows]
        ctx.draft.metrics[f"{name}_reload_difference"] = _compare(name, trained, found, limit)


def _compare(name: str, trained: Sequence[Tensor], found: Sequence[Tensor], limit: float) -> float:
    difference = float((torch.cat(list(trained)) - torch.cat(list(found))).abs().max())
    if not difference <= limit:
        raise ModelError(
            f"The exported {name} differs from the trained student by {difference:.2e} nats",
            f"at most {limit:.0e}",
            "nothing was published; report this defect with the base model's name",
        )
    return difference
