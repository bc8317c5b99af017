"""Offline PPO with three policies: behaviour (wrote the data), proximal (a snapshot), current.

The loop draws windows of batches, takes their steps, asks the guards after each of them, and probes
the policy between windows. Checkpoints are written between windows only, so that a resumed run
takes its next snapshot where the first one did.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tasks.algorithms.advantages import explained_variance, generalized_advantage_estimate
from tasks.algorithms.guards import (
    Actions,
    Firing,
    GuardEngine,
    after_out_of_memory,
    merge_actions,
)
from tasks.algorithms.importance import sequence_weights
from tasks.algorithms.kl import adapted_kl_coef
from tasks.algorithms.samplers import OfflineSampler
from tasks.config.shared import RuntimeConfig
from tasks.context import RunLog
from tasks.data.history import RunHistory
from tasks.errors import MemoryLimitError, TrainingError, WorkerLostError
from tasks.offline_ppo.batches import BatchSource, Drawn, Minibatch, OwnSampler, build_sampler
from tasks.offline_ppo.config import GUARD_METRICS, OfflinePPOConfig
from tasks.offline_ppo.probe import PolicyProbe
from tasks.offline_ppo.step import (
    actor_batch,
    actor_loss,
    advantages_of,
    critic_batch,
    critic_step_loss,
    prepare_step,
    sizes_of,
    token_rewards_of,
)
from tasks.runtime.rows import ACTOR, CRITIC, Trajectories
from tasks.runtime.session import Session
from tasks.runtime.supervised import CheckpointStore, per_unit

# Without re-anchoring a window only decides how far ahead batches are drawn.
_FIXED_ANCHOR_WINDOW_STEPS = 16
# How many of the last steps' weights the report shows.
_WEIGHTS_STEPS = 16


@dataclass
class PPOLoop:
    """The loop.

    Args:
        session: holds the actor, and the critic where advantages need one.
        cfg: the stage's config.
        data: the fixed dataset.
        store: checkpoints.
        log: where to report.
        probe: measures the policy between windows; None where there are no held-out prompts.
        facts: what guards may know before training.
        lowered: fields of the runtime config that memory was too small for.
    """

    session: Session
    cfg: OfflinePPOConfig
    data: Trajectories
    store: CheckpointStore
    log: RunLog
    probe: PolicyProbe | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    lowered: dict[str, Any] | None = None
    recent_weights: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_WEIGHTS_STEPS))
    state: LoopState = field(init=False)
    sampler: OfflineSampler | OwnSampler = field(init=False)
    engine: GuardEngine = field(init=False)
    history: RunHistory = field(init=False)
    source: BatchSource = field(init=False)
    clock: PhaseClock = field(init=False)

    def __post_init__(self) -> None:
        self.source = BatchSource(self.session, self.cfg, self.data)
        self.clock = PhaseClock()
        self._logged_until = -1

    @property
    def roles(self) -> list[str]:
        """Roles whose state a checkpoint holds."""
        return [ACTOR, CRITIC] if self.source.uses_critic else [ACTOR]

    @property
    def is_done(self) -> bool:
        """Whether the last step was taken or a guard ended the run."""
        return self.state.step >= self.cfg.steps or bool(self.state.stopped)

    def run(self) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        A step that needs too much memory is tried again in smaller pieces, and a worker that died
        is started again; both go on from the newest checkpoint.

        Raises:
            TrainingError: something that is not finite, a critic that explains nothing, or memory
                that does not hold one row.
            WorkerLostError: workers died more often than ``max_restarts``.
        """
        asleep = self.cfg.sleeping_rules
        if asleep:
            self.log.event("guards_asleep", "; ".join(asleep.values()))
        restarts = 0
        mend: Callable[[], None] | None = None
        while True:
            try:
                # Inside: workers may die again while they are started.
                if mend is not None:
                    mend()
                self._begin()
                while not self.is_done:
                    self._window()
                self._tell_unobserved()
                self.history.close()
                return
            except MemoryLimitError as error:
                self.history.close()
                mend = partial(lower_memory, self, error)
            except WorkerLostError as error:
                self.history.close()
                restarts += 1
                if restarts > self.cfg.max_restarts:
                    raise
                mend = partial(self._replace_workers, restarts, error)

    def _window(self) -> None:
        """Take the steps between two snapshots, or as many of them as the guards let pass; then
        probe the policy, or write a checkpoint, where it is time."""
        cfg, state = self.cfg, self.state
        every = cfg.reanchor_steps or min(cfg.guards.probe_every_steps, _FIXED_ANCHOR_WINDOW_STEPS)
        drawn = [self._draw() for _ in range(min(every, cfg.steps - state.step))]
        with self.clock.phase("snapshot"):
            batches = self.source.window(drawn)
        for position, batch in enumerate(batches, start=1):
            metrics = self._step(batch)
            actions = self._observe(metrics)
            if actions.change_run:
                state.pending = [*drawn[position:], *state.pending]
                respond(self, actions)
                break
        # Guards may have gone back to another state.
        state = self.state
        if state.stopped:
            return
        if self.is_done or state.step - state.probed >= cfg.guards.probe_every_steps:
            self._look_back(self._probe())
        elif state.step - self.store.latest_step() >= cfg.checkpoint.save_every_steps:
            self.save()

    def _draw(self) -> Drawn:
        if self.state.pending:
            return self.state.pending.pop(0)
        return self.source.rows_of(self.sampler.next_draw())

    def _step(self, drawn: Minibatch) -> dict[str, float]:
        """Take one optimizer step and return its metrics."""
        started, state = time.monotonic(), self.state
        batch, report, log_tau = prepare_step(self.cfg, drawn, state.kl_coef, state.log_tau)
        n_rows = self.source.n_trained(batch)
        with self.clock.phase("update"):
            batches = {CRITIC: critic_batch(batch, n_rows)} if batch.returns is not None else {}
            batches[ACTOR] = actor_batch(self.cfg, batch, n_rows)
            metrics = per_unit(self.session.train_steps(batches)[ACTOR]) | report
        state.step += 1
        state.log_tau = log_tau
        if batch.weights is not None:
            self.recent_weights.append(sequence_weights(batch.weights, batch.mask))
        self._adapt_priorities(batch)
        self._adapt_kl(report.get("kl_data"), len(batch.rows))
        metrics["tokens_per_second"] = sum(map(len, batch.rows)) / (time.monotonic() - started)
        metrics["learning_rate"] = metrics.pop("lr")
        metrics["batch_prompts"] = float(len(set(batch.groups.tolist())))
        variance = state.take_reward(report["reward_mean"])
        if variance is not None:
            metrics["reward_variance"] = variance
        note = f"ESS {metrics['ess_share']:.2f}" if "ess_share" in metrics else self.cfg.policy_loss
        self.log.progress(state.step, self.cfg.steps, note)
        return metrics

    def _adapt_priorities(self, batch: Minibatch) -> None:
        """Prefer prompts whose responses the policy should treat most differently."""
        if self.cfg.sampler.priority != "advantage":
            return
        assert isinstance(self.sampler, OfflineSampler), "a sampler of the user's has no priority"
        largest: dict[int, float] = {}
        for group, size in zip(batch.groups.tolist(), sizes_of(batch).tolist(), strict=True):
            largest[group] = max(size, largest.get(group, 0.0))
        self.sampler.update_priorities(list(largest), list(largest.values()))

    def _adapt_kl(self, observed: float | None, n_rows: int) -> None:
        reward = self.cfg.reward
        if reward.kl_target is None or observed is None:
            return
        self.state.kl_coef = adapted_kl_coef(
            self.state.kl_coef,
            observed=observed,
            target=reward.kl_target,
            horizon=reward.kl_horizon,
            # Prompts with many responses, or a batch that a guard grew, must not end the run here.
            n=min(n_rows, reward.kl_horizon),
        )

    def _probe(self, facts: Mapping[str, float] | None = None) -> Actions:
        """Measure the policy; it is good where no rule doubts it."""
        metrics = dict(facts or {})
        if self.probe is not None:
            with self.clock.phase("probe"):
                metrics |= self.probe.measure()
        self.state.probed = self.state.step
        actions = self._observe(metrics)
        if self.engine.passing:
            self.state.take_probe(metrics.get("probe_win_rate", metrics.get("held_out_accuracy")))
        return actions

    def _look_back(self, actions: Actions) -> None:
        """Do what the guards ask for, and write a checkpoint of what that leaves.

        One checkpoint for both: a kill between them would make the guards forget what they wanted.
        """
        if actions.change_run:
            respond(self, actions)
        else:
            self.save()

    def _observe(self, metrics: Mapping[str, float]) -> Actions:
        """Log metrics of the present step and return what the guards make of them."""
        if not metrics:
            return Actions()
        step = self.state.step
        self.history.append(step, metrics)
        if step > self._logged_until or "kl_probe" in metrics:
            # A restarted run repeats steps that were logged already, with the same numbers.
            self.log.metrics(metrics, step)
            self._logged_until = max(step, self._logged_until)
        firings = self.engine.observe(step, guarded(metrics))
        for firing in firings:
            self._tell(firing)
        return merge_actions([firing.actions for firing in firings])

    def _tell(self, firing: Firing) -> None:
        self.state.events.append(firing.to_dict())
        self.log.event(f"guard.{firing.rule}", firing.message)

    def _begin(self) -> None:
        cfg = self.cfg
        self.recent_weights.clear()
        self.history = RunHistory.open(self.store.directory, self.store.latest_step())
        self.sampler = build_sampler(cfg, self.data)
        self.state = LoopState(0, cfg.batch_prompts, cfg.reward.kl_coef)
        self.engine = GuardEngine(cfg.guards.to_rules(), max_rollbacks=cfg.guards.max_rollbacks)
        if self.probe is not None and self.probe.base is None:
            self.probe.prepare()
        if self.store.is_empty:
            self._begin_anew()
        else:
            self.resume()

    def _set_losses(self) -> None:
        self.session.set_loss(ACTOR, actor_loss(self.cfg))
        if self.source.uses_critic:
            self.session.set_loss(CRITIC, critic_step_loss(self.cfg))

    def _begin_anew(self) -> None:
        self._set_losses()
        if self.source.uses_critic:
            warm_up_critic(self.source, self._draw, self.log)
        self.save()
        self._look_back(self._probe(self.facts))

    def resume(self) -> None:
        """Go on from the newest checkpoint."""
        step = self.store.latest_step()
        state = self.store.restore(step, self.session, self.roles)
        if adopt_memory(self, state.get("memory")):
            self.store.restore(step, self.session, self.roles)
        self._set_losses()
        self.sampler.load_state_dict(state["sampler"])
        self.engine.load_state_dict(state["guards"])
        self.state = LoopState.from_dict(state["loop"])
        self.set_learning_rates()
        self.log.event("resumed", f"continuing from step {step} of {self.cfg.steps}")
        if self.state.probed < 0:
            self._look_back(self._probe(self.facts))

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        with self.clock.phase("checkpoint"):
            self.history.sync()
            state = {
                "sampler": self.sampler.state_dict(),
                "guards": self.engine.state_dict(),
                "loop": self.state.to_dict(),
                "memory": self.lowered,
            }
            self.store.save(self.state.step, self.session, self.roles, state, self.state.pointers)

    def set_learning_rates(self) -> None:
        """Give all roles the share of their learning rate that the guards left."""
        for role in self.roles:
            self.session.scale_learning_rate(role, self.state.lr_scale)

    def _replace_workers(self, restarts: int, error: WorkerLostError) -> None:
        where = self.session.rebuild()
        self.log.event("restart", f"{restarts} of {self.cfg.max_restarts}{where}: {error}")

    def _tell_unobserved(self) -> None:
        """Say which other rules never saw their metric."""
        asleep = self.cfg.sleeping_rules
        expected = {rule.to_condition().metric for rule in asleep}
        missing = [m for m in self.engine.unobserved_metrics if m not in expected]
        if missing:
            texts = [*asleep.values(), f"no rule could watch {', '.join(missing)}"]
            self.log.event("guards_asleep", "; ".join(texts))


# What the loop does when guards fire, or memory runs out.


def guarded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that rules may watch, by the names that rules use."""
    logged = {name: metric.logged_as or name for name, metric in GUARD_METRICS.items()}
    return {name: metrics[key] for name, key in logged.items() if key in metrics}


def respond(loop: PPOLoop, actions: Actions) -> None:
    """Do what guards ask for, and write a checkpoint of the result.

    The step goes on counting: a rollback takes weights and optimizers back, not the order of the
    data, so that the policy does not meet the very batches again that led it astray.
    """
    state, runtime = loop.state, loop.session.runtime
    if actions.rollback:
        target = state.pointers[actions.rollback]
        loop.store.restore(target, loop.session, loop.roles)
        loop.log.event("rollback", f"to the weights of step {target} at step {state.step}")
    state.lr_scale = actions.lr_scale(state.lr_scale)
    if actions.rollback or actions.learning_rate_scale != 1.0:
        loop.set_learning_rates()
    grown = actions.batch_prompts(state.batch_prompts)
    if grown > state.batch_prompts:
        # Every rank has the same number of prompts.
        grown -= grown % loop.session.host.ranks
        state.batch_prompts = max(state.batch_prompts, grown)
        loop.sampler.set_batch_size(state.batch_prompts)
    if actions.reset_sampler:
        loop.sampler.reset(seed=loop.cfg.seed + state.step)
        state.pending = []
    if actions.stop:
        state.stopped = actions.reason
        loop.log.event("stopped", f"after step {state.step}: {state.stopped}")
    if actions.change_memory:
        loop.lowered = _lowered(runtime, actions)
    loop.save()
    if actions.change_memory:
        loop.session.rebuild(runtime.model_copy(update=loop.lowered))
        loop.resume()


def lower_memory(loop: PPOLoop, error: MemoryLimitError) -> None:
    """Build the workers anew so that a step needs less memory.

    Raises:
        TrainingError: nothing is left to lower.
    """
    limits, runtime = loop.cfg.rendering, loop.session.runtime
    actions = after_out_of_memory(
        runtime.tokens_per_micro_batch,
        runtime.gradient_checkpointing,
        minimum_tokens=limits.max_prompt_tokens + limits.max_response_tokens,
        scale=loop.cfg.guards.oom_token_budget_scale,
    )
    loop.log.event("out_of_memory", f"{error} {actions}")
    loop.lowered = _lowered(runtime, actions)
    loop.session.rebuild(runtime.model_copy(update=loop.lowered))


def _lowered(runtime: RuntimeConfig, actions: Actions) -> dict[str, Any]:
    return {
        "tokens_per_micro_batch": actions.token_budget(runtime.tokens_per_micro_batch),
        "gradient_checkpointing": runtime.gradient_checkpointing or actions.gradient_checkpointing,
    }


def adopt_memory(loop: PPOLoop, lowered: dict[str, Any] | None) -> bool:
    """Build the workers as small as an earlier process had to make them, before which it ran out
    of memory, so that this one need not find that out again.

    Args:
        loop: its workers are replaced; their weights have to be restored.
        lowered: of a checkpoint; None when nothing was lowered.

    Returns:
        Whether the workers were built anew.
    """
    # What this process lowered itself is newer than the checkpoint.
    loop.lowered = loop.lowered or lowered
    runtime = loop.session.runtime.model_copy(update=loop.lowered)
    if runtime == loop.session.runtime:
        return False
    loop.session.rebuild(runtime)
    loop.log.event(
        "memory_lowered",
        f"{runtime.tokens_per_micro_batch} tokens per micro-batch, gradient checkpointing "
        f"{'on' if runtime.gradient_checkpointing else 'off'}, as before the restart",
    )
    return True


# The driver's state of a run: everything that a checkpoint holds beside weights and optimizers.

_VARIANCE_STEPS = 8


@dataclass
class LoopState:
    """Where a run stands.

    Args:
        step: optimizer steps taken; grows also after a rollback.
        batch_prompts: prompts of a step; a guard may raise it.
        kl_coef: of the KL-in-reward; a controller may move it.
        lr_scale: share of the configured learning rate; a guard may lower it.
        log_tau: where the adaptive sequence threshold stands.
        pending: steps that were drawn and not taken yet.
        good: step of the newest checkpoint whose probe passed.
        best: step of the checkpoint with the best probe.
        best_value: its probe's value; None before the first probe.
        probed: step of the newest probe.
        stopped: why a guard ended the run; empty while it goes on.
        reward_means: of the last steps.
        events: what guards did, as plain values.
    """

    step: int
    batch_prompts: int
    kl_coef: float
    lr_scale: float = 1.0
    log_tau: float | None = None
    pending: list[Drawn] = field(default_factory=list)
    good: int = 0
    best: int = 0
    best_value: float | None = None
    probed: int = -1
    stopped: str = ""
    reward_means: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> LoopState:
        """Return the state that `to_dict` gave."""
        pending = [Drawn(**drawn) for drawn in plain["pending"]]
        return cls(**{**plain, "pending": pending})

    @property
    def pointers(self) -> dict[str, int]:
        """Checkpoints that stay on disk."""
        return {"start": 0, "good": self.good, "best": self.best}

    def take_reward(self, mean: float) -> float | None:
        """Add a step's mean reward; return the variance over the last steps, None before there are
        enough of them."""
        kept = deque([*self.reward_means, mean], maxlen=_VARIANCE_STEPS)
        self.reward_means = list(kept)
        if len(kept) < _VARIANCE_STEPS:
            return None
        return float(torch.tensor(self.reward_means).var())

    def take_probe(self, value: float | None) -> None:
        """Mark the present step as good, and as best where its probe's value is the highest."""
        self.good = self.step
        known = value if value is not None and math.isfinite(value) else None
        if self.best_value is None or (known is not None and known > self.best_value):
            self.best, self.best_value = self.step, known


# Where the time of a run goes.


@dataclass
class PhaseClock:
    """Adds up seconds by phase; what no phase takes is ``other``."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time towards a phase. Phases do not nest."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - start

    def shares(self) -> dict[str, float]:
        """Return ``time_share_<phase>``, which add up to 1, since the clock was made."""
        total = max(time.monotonic() - self.started_at, 1e-9)
        shares = {f"time_share_{name}": value / total for name, value in self.seconds.items()}
        return {**shares, "time_share_other": max(0.0, 1.0 - sum(shares.values()))}


# The critic before PPO starts: fitted on returns while the policy stands still.

_JUDGED_BATCHES = 4


def warm_up_critic(source: BatchSource, draw: Callable[[], Drawn], log: RunLog) -> float:
    """Fit the critic and return the share of the returns' variance that it then explains.

    Args:
        source: builds batches.
        draw: gives the rows of the next step.
        log: where to report.

    Raises:
        TrainingError: it explains nothing, and is not forced.
    """
    cfg = source.cfg
    steps = cfg.critic.warmup_steps
    for step in range(1, steps + 1):
        batch = source.window([draw()])[0]
        _, returns, _ = advantages_of(cfg.advantage, batch, cfg.reward.kl_coef)
        batch = replace(batch, returns=returns)
        metrics = source.session.train_step(CRITIC, critic_batch(batch, source.n_trained(batch)))
        log.metrics({f"critic_warmup/{k}": v for k, v in per_unit(metrics).items()}, step)
        log.progress(step, steps, "critic warm-up")
    explained = _explained(source, draw)
    log.metrics({"critic_explained_variance": explained}, 0)
    if explained <= 0.0 and not cfg.critic.force:
        raise TrainingError(
            f"After {steps} steps the critic explains {explained:.3f} of the returns' variance",
            "more than 0",
            "raise critic.warmup_steps, use advantage.estimator: group, or set critic.force",
        )
    return explained


def _explained(source: BatchSource, draw: Callable[[], Drawn]) -> float:
    """Judge the critic by batches that it was not fitted on last."""
    cfg = source.cfg
    values, targets = [], []
    for batch in source.window([draw() for _ in range(_JUDGED_BATCHES)]):
        assert batch.values is not None
        rewards, _ = token_rewards_of(cfg.advantage, batch, cfg.reward.kl_coef)
        # Lambda 1: returns that do not lean on the values which they judge, but for what comes
        # after a response that was cut off.
        _, returns = generalized_advantage_estimate(
            rewards,
            batch.values,
            batch.mask,
            gamma=cfg.advantage.gamma,
            gae_lambda=1.0,
            bootstrap_values=batch.bootstrap_values,
        )
        values.append(batch.values[batch.mask])
        targets.append(returns[batch.mask])
    known, wanted = torch.cat(values)[None], torch.cat(targets)[None]
    return float(explained_variance(known, wanted, torch.ones(known.shape, dtype=torch.bool)))
