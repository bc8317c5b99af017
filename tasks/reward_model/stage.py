"""Stage reward_model: Bradley-Terry on the base model's backbone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from tasks.algorithms.calibration import pair_accuracy
from tasks.artifacts import (
    PolicyCheckpoint,
    PreferenceDataset,
    RewardComponent,
    RewardModelCheckpoint,
    write_reward_components,
)
from tasks.context import StageContext
from tasks.data.columns import PairScore, write_pair_scores
from tasks.data.hh import SPLITS
from tasks.data.rendering import Renderer
from tasks.errors import DataError, RewardError
from tasks.reward_model.config import RewardComponentConfig, RewardModelConfig
from tasks.reward_model.report import RewardReport, reward_report, scored_pairs, write_reward_report
from tasks.reward_model.training import (
    CrossFit,
    LabelledPairs,
    MemberTrainer,
    cross_fit,
    rated_margins,
    with_trust,
)
from tasks.runtime.rows import Responses
from tasks.runtime.scoring import ComponentScores, RewardScorer, RewardScores
from tasks.runtime.session import Session, open_session

Splits = Mapping[str, Responses]


@dataclass(frozen=True)
class TrainedComponent:
    """One component before it is published.

    Args:
        component: its members, where they were trained, with statistics.
        splits: the pairs it is about.
        members: (K, N) raw scores of the responses of all pairs, by split.
        own: rows of ``members`` that are about its own pairs, by split.
        labels: what held-out members say of its training labels, if they were asked.
    """

    component: RewardComponent
    splits: Splits
    members: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    labels: CrossFit | None

    def scores(self, split: str) -> ComponentScores:
        """Return the scores of the responses of all pairs."""
        return ComponentScores.of(self.component, self.members[split])

    def own_scores(self, split: str) -> ComponentScores:
        """Return the scores of the responses of its own pairs."""
        return replace(self.scores(split), members=self.members[split][:, self.own[split]])


@task(name="train-reward-model", cache_policy=NO_CACHE)
def train_reward_model(
    ctx: StageContext,
    cfg: RewardModelConfig,
    preferences: PreferenceDataset,
    base: PolicyCheckpoint,
) -> RewardModelCheckpoint:
    """Fit P(chosen beats rejected) = sigmoid(r_chosen - r_rejected), for each component.

    Raises:
        RlhfError: inputs that do not fit together (before training), or training that went wrong.
    """
    renderer = Renderer.load(base.model_dir, cfg.rendering)
    if base.manifest.renderer_fingerprint is not None:
        renderer.check_same(base.manifest.renderer_fingerprint, "the base model")
    ctx.draft.renderer_fingerprint = renderer.fingerprint
    splits = {name: Responses.of(preferences, name, renderer) for name in SPLITS}
    ctx.draft.counts |= _counts(splits)
    own = {name: _select(name, wanted, splits) for name, wanted in cfg.components.items()}

    trainer = MemberTrainer(
        open_session(cfg.runtime, ctx.log), cfg, base.model_dir, ctx.checkpoint_dir, ctx.log
    )
    trained = [_train_component(ctx, trainer, name, part, splits) for name, part in own.items()]
    return ctx.publish(RewardModelCheckpoint, partial(_fill, ctx, trained, splits))


def _counts(splits: Splits) -> dict[str, int]:
    counts = {f"{name}_pairs": len(responses.pairs) for name, responses in splits.items()}
    for name, responses in splits.items():
        counts |= {f"{name}_{reason}": n for reason, n in responses.left_out.items()}
    return counts


def _select(name: str, wanted: RewardComponentConfig, splits: Splits) -> Splits:
    """Return the pairs of a component.

    Raises:
        DataError: a split has none; names the subsets that there are.
    """
    if wanted.subsets is None:
        return splits
    selected = {split: part.of_subsets(wanted.subsets) for split, part in splits.items()}
    for split, part in selected.items():
        if not part.pairs:
            known = sorted({pair.subset for pair in splits[split].pairs})
            raise DataError(
                f"Component {name!r} has no pair in the {split} split: subsets "
                f"{list(wanted.subsets)} of {known}",
                "at least one pair in each split",
                f"correct reward_model.components.{name}.subsets, or ingest such pairs",
            )
    return selected


def _train_component(
    ctx: StageContext, trainer: MemberTrainer, name: str, own: Splits, splits: Splits
) -> TrainedComponent:
    cfg = trainer.cfg
    rated = rated_margins([pair.margin for pair in own["train"].pairs], cfg.loss.margin_scale)
    train = LabelledPairs(own["train"].rendered, margins=rated)
    validation = own["validation"].rendered
    if cfg.noise.compare:
        plain = (trainer.fit(f"{name}.plain", cfg.seed, train, validation),)
        scores = _load_members(trainer.session, name, plain).score(own["test"].rows)
        ctx.draft.metrics[f"{name}.plain_test_accuracy"] = _accuracy(scores.raw)
    labels = None
    if cfg.noise.method != "none":
        labels = cross_fit(trainer, name, cfg.seed, train, validation)
        ctx.draft.metrics[f"{name}.contradicted_share"] = labels.contradicted_share
        train = with_trust(train, labels.trust, cfg.noise.method)
    members = list(labels.members) if labels is not None and cfg.noise.keep_folds else []
    for index in range(cfg.members):
        member = f"{name}.{index}"
        members.append(trainer.fit(member, cfg.seed + index, train, validation))
        step = trainer.selected_step(member)
        if step is not None:
            ctx.draft.metrics[f"{member}.selected_step"] = float(step)
    return _with_statistics(ctx, trainer.session, name, tuple(members), (own, splits), labels)


def _with_statistics(
    ctx: StageContext,
    session: Session,
    name: str,
    member_dirs: tuple[Path, ...],
    splits: tuple[Splits, Splits],
    labels: CrossFit | None,
) -> TrainedComponent:
    """Score every response once; ``splits`` are the component's own pairs and all pairs."""
    own, everything = splits
    scorer = _load_members(session, name, member_dirs)
    members = {
        split: scorer.score(part.rows).components[name].members
        for split, part in everything.items()
    }
    session.drop()  # the members that train next need the memory
    rows = {split: _rows_of(own[split], part) for split, part in everything.items()}
    train = members["train"][:, rows["train"]]
    mean, std = _statistics(train.mean(dim=0), name)
    ctx.draft.metrics |= {f"{name}.score_mean": mean, f"{name}.score_std": std}
    if len(member_dirs) > 1:
        first = _accuracy(members["test"][0][rows["test"]])
        ctx.draft.metrics[f"{name}.first_member_test_accuracy"] = first
    component = RewardComponent(name, member_dirs, tuple(train.mean(dim=1).tolist()), std)
    return TrainedComponent(component, own, members, rows, labels)


def _rows_of(own: Responses, everything: Responses) -> Tensor:
    """Return the rows that the responses of a component's own pairs have among those of all
    pairs."""
    place = {pair.pair_id: index for index, pair in enumerate(everything.rendered)}
    pairs = torch.tensor([place[pair.pair_id] for pair in own.rendered])
    return (2 * pairs[:, None] + torch.arange(2)).flatten()


def _load_members(session: Session, name: str, member_dirs: tuple[Path, ...]) -> RewardScorer:
    """Put members that have no statistics yet into the workers."""
    raw = RewardComponent(name, member_dirs, (0.0,) * len(member_dirs), 1.0)
    return RewardScorer.load_components(session, {name: raw})


def _statistics(scores: Tensor, name: str) -> tuple[float, float]:
    """Return mean and standard deviation of the scores of all training responses."""
    mean, std = float(scores.mean()), float(scores.std())
    # Below this the spread is rounding noise of fp32 around the mean.
    if not std > 1e-6 * max(1.0, abs(mean)):
        raise RewardError(
            f"Component {name!r} gives every training response the score {mean}",
            "scores that differ",
            "train longer, raise the learning rate, or look at the data",
        )
    return mean, std


def _accuracy(scores: Tensor) -> float:
    return pair_accuracy((scores[0::2] - scores[1::2]).numpy()).value


def _fill(
    ctx: StageContext, trained: Sequence[TrainedComponent], splits: Splits, directory: Path
) -> None:
    """Write members, statistics, scores and reports."""
    components = [_publish_members(part.component, directory) for part in trained]
    write_reward_components(directory, components)
    scores = {
        split: RewardScores({part.component.name: part.scores(split) for part in trained})
        for split in splits
    }
    write_pair_scores(directory / "pair_scores.parquet", _pair_scores(trained, splits, scores))
    report = _report(splits, {split: _judged(found) for split, found in scores.items()})
    ctx.draft.metrics |= report.metrics()
    _write_report(ctx, report, directory, "report")
    if len(trained) == 1:
        return
    for part in trained:
        name = part.component.name
        own = {split: _judged(RewardScores({name: part.own_scores(split)})) for split in splits}
        report = _report(part.splits, own)
        ctx.draft.metrics |= {f"{name}.{key}": value for key, value in report.metrics().items()}
        _write_report(ctx, report, directory, f"report/{name}")


def _publish_members(component: RewardComponent, directory: Path) -> RewardComponent:
    """Copy the members, and adapters that they were merged from, into the artefact."""
    placed = []
    for index, source in enumerate(component.member_dirs):
        name = f"{component.name}.{index}"
        placed.append(directory / "members" / name)
        shutil.copytree(source, placed[-1])
        adapter = source.with_name("adapter")
        if adapter.is_dir():
            shutil.copytree(adapter, directory / "adapters" / name)
    return replace(component, member_dirs=tuple(placed))


def _judged(scores: RewardScores) -> tuple[Tensor, Tensor | None]:
    """Return the scores that are used, log odds of one component or the mean of several, and how
    far the members of one component disagree on each pair."""
    if len(scores.components) > 1:
        return scores.total, None
    (only,) = scores.components.values()
    return only.raw, only.pair_disagreement


def _report(splits: Splits, judged: Mapping[str, tuple[Tensor, Tensor | None]]) -> RewardReport:
    parts = ((splits[name], *judged[name]) for name in ("validation", "test"))
    validation, test = (
        scored_pairs(part.pairs, part.rendered, scores[0::2], scores[1::2], apart)
        for part, scores, apart in parts
    )
    return reward_report(validation, test)


def _write_report(ctx: StageContext, report: RewardReport, root: Path, place: str) -> None:
    for file in write_reward_report(report, root / place):
        ctx.log.file(file, place)


def _pair_scores(
    trained: Sequence[TrainedComponent], splits: Splits, scores: Mapping[str, RewardScores]
) -> Iterator[PairScore]:
    for part in trained:
        name = part.component.name
        judged = {}
        if part.labels is not None:
            ids = [pair.pair_id for pair in part.splits["train"].pairs]
            columns = part.labels.margins.tolist(), part.labels.trust.tolist()
            judged = dict(zip(ids, zip(*columns, strict=True), strict=True))
        for split, responses in splits.items():
            found = scores[split].components[name]
            apart = found.pair_disagreement
            disagreement = [None] * len(responses.pairs) if apart is None else apart.tolist()
            total = found.total.tolist()
            for index, pair in enumerate(responses.pairs):
                margin, trust = judged.get(pair.pair_id, (None, None))
                yield PairScore(
                    pair.pair_id,
                    split,
                    name,
                    total[2 * index],
                    total[2 * index + 1],
                    disagreement[index],
                    margin,
                    trust,
                )
