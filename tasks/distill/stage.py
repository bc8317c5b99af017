"""Stage distill: the aligned policy teaches a LoRA student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.algorithms.samplers import LengthGroupedSampler
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardModelCheckpoint,
    StudentAdapter,
)
from tasks.context import StageContext
from tasks.data.history import FILE_NAME, RunHistory, read_history
from tasks.data.pairs import read_pairs
from tasks.data.rendering import RenderedPair, Renderer, render_pairs
from tasks.distill.config import DistillConfig
from tasks.distill.report import (
    BASE,
    STUDENT,
    TEACHER,
    CardFacts,
    StudentOutcome,
    StudentReport,
    base_name,
    data_names,
    licenses_of,
    lineage_rows,
    summarize,
    write_cards,
    write_student_report,
)
from tasks.distill.student import (
    StudentExport,
    check_targets,
    check_vocabulary,
    checked_rows,
    n_parameters,
    refuse_other_tokens,
)
from tasks.distill.teacher import StudentData, Teacher
from tasks.errors import DataError
from tasks.runtime.logits_hooks import FLAG, TEACHER_IDS, TEACHER_LOGPROBS, WEIGHTS, StudentLoss
from tasks.runtime.rows import Batch, Responses, RoleSpec
from tasks.runtime.session import Session, open_session
from tasks.runtime.supervised import CheckpointStore, SupervisedRun, count_steps, train_supervised


@task(name="train-student", cache_policy=NO_CACHE)
def train_student(
    ctx: StageContext,
    cfg: DistillConfig,
    preferences: PreferenceDataset,
    policy: PolicyCheckpoint,
    base: PolicyCheckpoint,
    reward_model: RewardModelCheckpoint,
) -> StudentAdapter:
    """Distil the policy into an adapter on the base (or another) model.

    Raises:
        RlhfError: teacher and student that do not fit together (before training), training that
            went wrong, or an export that is not what was trained.
    """
    run = _Distillation(ctx, cfg, preferences, policy, base, reward_model)
    run.check()
    pairs, left_out = render_pairs(read_pairs(preferences, "train"), run.renderer)
    if not pairs:
        raise DataError(
            f"No training pair fits the renderer: {left_out}", "some", "raise rendering limits"
        )
    ctx.draft.counts |= left_out
    return run.train(pairs)


@dataclass(frozen=True)
class _Distillation:
    ctx: StageContext
    cfg: DistillConfig
    preferences: PreferenceDataset
    policy: PolicyCheckpoint
    base: PolicyCheckpoint
    reward_model: RewardModelCheckpoint

    @property
    def student_dir(self) -> Path:
        """The model that is adapted."""
        if self.cfg.student == "base":
            return self.base.model_dir
        return Path(self.ctx.sources["model"].path)

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer that teacher and student share: same tokens by content, not by number."""
        teacher = Renderer.load(self.policy.model_dir, self.cfg.rendering)
        for what, artifact in (("teacher", self.policy), ("reward model", self.reward_model)):
            if artifact.manifest.renderer_fingerprint is not None:
                teacher.check_same(artifact.manifest.renderer_fingerprint, f"the {what}")
        student = Renderer.load(self.student_dir, self.cfg.rendering)
        if student.fingerprint != teacher.fingerprint:
            refuse_other_tokens(self.policy.model_dir, self.student_dir)
        return teacher

    def check(self) -> None:
        """Refuse what does not fit together, before anything is computed."""
        self.ctx.draft.renderer_fingerprint = self.renderer.fingerprint
        for what, directory in (
            ("The teacher", self.policy.model_dir),
            ("The student", self.student_dir),
        ):
            check_vocabulary(directory, self.renderer.vocab_size, what)
        adapted = check_targets(self.student_dir, self.cfg.lora.target_modules)
        self.ctx.draft.counts["adapted_layers"] = adapted
        sizes = n_parameters(self.student_dir), n_parameters(self.policy.model_dir)
        if sizes[0] > sizes[1]:
            self.ctx.log.event(
                "student_is_larger",
                f"the student has {sizes[0]:,} weights, its teacher {sizes[1]:,}",
            )

    def train(self, pairs: Sequence[RenderedPair]) -> StudentAdapter:
        """Let the teacher speak and label, train, export and report."""
        cfg, ctx = self.cfg, self.ctx
        session = open_session(cfg.runtime, ctx.log)
        teacher = Teacher(
            ctx, cfg, self.policy.model_dir, self.base.model_dir, self.renderer, self.reward_model
        )
        data = teacher.collect(session, pairs)
        session.drop()
        steps = count_steps(len(data.rows), cfg.batch_rows, cfg.epochs, cfg.max_steps)
        ctx.draft.counts |= {"rows": len(data.rows), "steps": steps}
        spec = RoleSpec(
            STUDENT,
            "language_model",
            str(self.student_dir),
            cfg.seed,
            steps,
            cfg.optimizer,
            cfg.lora,
        )
        session.load(spec)
        self._fit(session, data, steps)

        def write(directory: Path) -> None:
            self._write(session, spec, data, directory)

        return ctx.publish(StudentAdapter, write)

    def _fit(self, session: Session, data: StudentData, steps: int) -> None:
        cfg, ctx = self.cfg, self.ctx
        session.set_loss(STUDENT, self._loss(data))
        store = CheckpointStore(ctx.checkpoint_dir, cfg.checkpoint.keep)
        history = RunHistory.open(ctx.checkpoint_dir, store.latest_step())
        run = SupervisedRun(
            session,
            STUDENT,
            steps,
            cfg.batch_rows,
            lambda units: make_batch(data, units),
            store,
            ctx.log,
            history=history,
        )
        sampler = LengthGroupedSampler(
            [len(row) for row in data.rows], batch_size=cfg.batch_rows, seed=cfg.seed
        )
        try:
            train_supervised(run, sampler, cfg.checkpoint)
        finally:
            history.close()

    def _loss(self, data: StudentData) -> StudentLoss:
        soft, vocabulary = self.cfg.soft_labels, self.renderer.vocab_size
        if data.labels is None:
            return StudentLoss("none", 0.0, 1.0, vocabulary)
        divergence = "forward_kl" if soft.loss == "sequence" else soft.loss
        return StudentLoss(soft.kind, soft.alpha, soft.tau, vocabulary, divergence, soft.jsd_beta)

    def _write(self, session: Session, spec: RoleSpec, data: StudentData, directory: Path) -> None:
        """Write adapter, merged model, report and cards."""
        ctx = self.ctx
        export = StudentExport(session, spec, self.student_dir, self._changes_embeddings)
        ctx.draft.metrics |= export.write(directory, checked_rows(data.rows))
        report = self._report(session, directory)
        if report is not None:
            ctx.draft.metrics |= report.metrics()
            for file in write_student_report(report, directory / "report"):
                ctx.log.file(file, "report")
        facts = self._card(report)
        write_cards(facts, {"adapter": directory / "adapter", "merged": directory / "merged"})
        ctx.log.file(directory / "merged" / "README.md", "card")

    @property
    def _changes_embeddings(self) -> bool:
        targets = self.cfg.lora.target_modules
        return targets != "all-linear" and any("embed" in t or "wte" in t for t in [*targets])

    def _report(self, session: Session, directory: Path) -> StudentReport | None:
        """Compare on test prompts, which nothing was chosen on."""
        wanted = self.cfg.report
        if not wanted.prompts:
            return None
        try:
            held_out = Responses.of(self.preferences, "test", self.renderer)
        except DataError as error:
            self.ctx.log.event("no_report", f"the student is not compared: {error}")
            return None
        dirs = {
            STUDENT: directory / "merged",
            TEACHER: self.policy.model_dir,
            BASE: self.base.model_dir,
        }
        outcome = StudentOutcome(
            session, self.renderer, self.reward_model, dirs, directory / "adapter", self.cfg.seed
        )
        history = read_history(self.ctx.checkpoint_dir / FILE_NAME)
        return outcome.report(held_out, wanted.prompts, wanted.max_new_tokens, history)

    def _card(self, report: StudentReport | None) -> CardFacts:
        draft, soft, lora = self.ctx.draft, self.cfg.soft_labels, self.cfg.lora
        settings = {
            "data": self.cfg.data,
            "loss": soft.loss,
            "soft labels": f"{soft.kind}, tau {soft.tau:g}, alpha {soft.alpha:g}",
            "adapter": f"rank {lora.rank}, alpha {lora.alpha}, dropout {lora.dropout:g}"
            + (", rsLoRA" if lora.use_rslora else "")
            + (", DoRA" if lora.use_dora else ""),
            "steps": str(draft.counts["steps"]),
            "responses": str(draft.counts["rows"]),
            "seed": str(self.cfg.seed),
            "git commit": str(draft.git_commit),
        }
        own = (STUDENT, draft.kind, draft.fingerprint[:16], draft.mlflow_run_id or "")
        return CardFacts(
            base=base_name(self.base.manifest, self.ctx.sources.get("model")),
            data=data_names(self.preferences.manifest),
            teacher=f"{self.policy.manifest.stage} {self.policy.fingerprint[:16]}",
            settings=settings,
            lineage=[own, *lineage_rows(draft.parents)],
            metrics=dict(draft.metrics),
            summary=() if report is None else summarize(report),
            **licenses_of(self.cfg.card, self.student_dir),
        )


def make_batch(data: StudentData, units: Sequence[int]) -> Batch:
    """Return rows with their labels and weights, as `StudentLoss` reads them."""
    columns = {}
    if data.labels is not None:
        columns[TEACHER_LOGPROBS] = [data.labels.logprobs[unit] for unit in units]
        if data.labels.ids:
            columns[TEACHER_IDS] = [data.labels.ids[unit] for unit in units]
    rows = [data.rows[unit] for unit in units]
    if data.weights is not None:
        columns[WEIGHTS] = [
            torch.full((len(row.response_ids),), float(data.weights[unit]))
            for row, unit in zip(rows, units, strict=True)
        ]
    scalars: dict[str, float | bool] = {FLAG: True}
    return Batch(rows, columns, scalars=scalars)
