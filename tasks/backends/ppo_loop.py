"""Offline PPO with three policies: behaviour (wrote the data), proximal (a snapshot), current.

The loop draws windows of batches, takes their steps, asks the guards after each of them, and probes
the policy between windows. Checkpoints are written between windows only, so that a resumed run
takes its next snapshot where the first one did.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from torch import Tensor

from tasks.algorithms.guard_actions import Action, Rollback, Stop, Warn
from tasks.algorithms.guards import Firing, GuardEngine, MemorySettings, merged_actions
from tasks.algorithms.kl import AdaptiveKLController
from tasks.algorithms.offline_sampler import OfflineSampler
from tasks.algorithms.sequence_threshold import sequence_weights
from tasks.backends.checkpoints import CheckpointStore
from tasks.backends.critic_warmup import warm_up_critic
from tasks.backends.guard_response import adopt_memory, carry_out, guarded, lower_memory
from tasks.backends.phase_clock import PhaseClock
from tasks.backends.policy_objectives import actor_batch, actor_loss, critic_batch, critic_step_loss
from tasks.backends.policy_probe import PolicyProbe
from tasks.backends.ppo_batches import ACTOR, CRITIC, BatchSource, Drawn, Minibatch
from tasks.backends.ppo_sampling import build_sampler
from tasks.backends.ppo_state import LoopState
from tasks.backends.ppo_step import StepState, prepare_step
from tasks.backends.session import Session
from tasks.backends.supervised import per_unit
from tasks.backends.trajectories import Trajectories
from tasks.config import OfflinePPOConfig
from tasks.context import RunLog
from tasks.data.run_history import RunHistory
from tasks.errors import MemoryLimitError, WorkerLostError

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
        lowered: how small steps had to be cut after memory ran out.
    """

    session: Session
    cfg: OfflinePPOConfig
    data: Trajectories
    store: CheckpointStore
    log: RunLog
    probe: PolicyProbe | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    clock: PhaseClock = field(default_factory=PhaseClock)
    lowered: MemorySettings | None = None
    recent_weights: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_WEIGHTS_STEPS))
    state: LoopState = field(init=False)
    sampler: OfflineSampler = field(init=False)
    engine: GuardEngine = field(init=False)
    history: RunHistory = field(init=False)
    source: BatchSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = BatchSource(self.session, self.cfg, self.data)
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
                self._tell_asleep()
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

    def _replace_workers(self, restarts: int, error: WorkerLostError) -> None:
        where = self.session.rebuild()
        self.log.event("restart", f"{restarts} of {self.cfg.max_restarts}{where}: {error}")

    def _tell_asleep(self) -> None:
        """Say which rules never saw their metric."""
        asleep = self.engine.unobserved_metrics
        if asleep:
            self.log.event("guards_asleep", f"no rule could watch {', '.join(asleep)}")

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
        found = self.store.restore(step, self.session, self.roles)
        if adopt_memory(self, found.get("memory")):
            self.store.restore(step, self.session, self.roles)
        self._set_losses()
        self.sampler.load_state_dict(found["sampler"])
        self.engine.load_state_dict(found["guards"])
        self.state = LoopState.from_dict(found["loop"])
        self.set_learning_rates()
        self.log.event("resumed", f"continuing from step {step} of {self.cfg.steps}")
        if self.state.probed < 0:
            self._look_back(self._probe(self.facts))

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        with self.clock.phase("checkpoint"):
            self.history.sync()
            found = {
                "sampler": self.sampler.state_dict(),
                "guards": self.engine.state_dict(),
                "loop": self.state.to_dict(),
                "memory": asdict(self.lowered) if self.lowered else None,
            }
            self.store.save(self.state.step, self.session, self.roles, found, self.state.pointers)

    def set_learning_rates(self) -> None:
        """Give all roles the share of their learning rate that the guards left."""
        for role in self.roles:
            self.session.scale_learning_rate(role, self.state.lr_scale)

    def _window(self) -> None:
        """Take the steps between two snapshots, or as many of them as the guards let pass."""
        every = self.cfg.reanchor_steps or min(
            self.cfg.guards.probe_every_steps, _FIXED_ANCHOR_WINDOW_STEPS
        )
        drawn = [self._draw() for _ in range(min(every, self.cfg.steps - self.state.step))]
        with self.clock.phase("snapshot"):
            batches = self.source.window(drawn)
        for position, batch in enumerate(batches, start=1):
            actions = self._step(batch)
            if any(not isinstance(action, Warn) for action in actions):
                self.state.pending = [*drawn[position:], *self.state.pending]
                carry_out(self, actions)
                break
        if self.state.stopped:
            return
        is_last = self.state.step >= self.cfg.steps
        if is_last or self.state.step - self.state.probed >= self.cfg.guards.probe_every_steps:
            self._look_back(self._probe())
        elif self.state.step - self.store.latest_step() >= self.cfg.checkpoint.save_every_steps:
            self.save()

    def _look_back(self, actions: Sequence[Action]) -> None:
        """Do what the guards ask for, and write a checkpoint of what that leaves.

        One checkpoint for both: a kill between them would make the guards forget what they wanted.
        """
        if any(not isinstance(action, Warn) for action in actions):
            carry_out(self, actions)
        else:
            self.save()

    def _draw(self) -> Drawn:
        if self.state.pending:
            return self.state.pending.pop(0)
        return self.source.rows_of(self.sampler.next_draw())

    def _step(self, batch: Minibatch) -> tuple[Action, ...]:
        started = time.monotonic()
        adaptive = StepState(self.state.kl_coef, self.state.log_tau)
        inputs = prepare_step(self.cfg, self.data, batch, adaptive)
        n_rows = self.source.n_trained(batch)
        with self.clock.phase("update"):
            batches = {}
            if inputs.returns is not None:
                batches[CRITIC] = critic_batch(batch, inputs.returns, n_rows)
            batches[ACTOR] = actor_batch(self.cfg, self.data, batch, inputs, n_rows)
            metrics = per_unit(self.session.train_steps(batches)[ACTOR]) | inputs.report
        self.state.step += 1
        self.state.log_tau = inputs.log_tau
        if self.cfg.policy_loss == "ppo":
            self.recent_weights.append(sequence_weights(inputs.weights, batch.mask))
        self._adapt_priorities(batch, inputs.sizes)
        self._adapt_kl(inputs.report.get("kl_data"), len(batch.rows))
        metrics["tokens_per_second"] = sum(map(len, batch.rows)) / (time.monotonic() - started)
        metrics["learning_rate"] = metrics.pop("lr")
        metrics["batch_prompts"] = float(len(set(self.data.group_of[list(batch.indices)].tolist())))
        variance = self.state.take_reward(inputs.report["reward_mean"])
        if variance is not None:
            metrics["reward_variance"] = variance
        note = f"ESS {metrics['ess_share']:.2f}" if "ess_share" in metrics else self.cfg.policy_loss
        self.log.progress(self.state.step, self.cfg.steps, note)
        return self._observe(metrics)

    def _adapt_priorities(self, batch: Minibatch, sizes: Tensor | None) -> None:
        """Prefer prompts whose responses the policy should treat most differently."""
        if self.cfg.sampler.priority != "advantage" or sizes is None:
            return
        found: dict[int, float] = {}
        groups = self.data.group_of[list(batch.indices)].tolist()
        for group, size in zip(groups, sizes.tolist(), strict=True):
            found[group] = max(size, found.get(group, 0.0))
        self.sampler.update_priorities(list(found), list(found.values()))

    def _adapt_kl(self, observed: float | None, n_rows: int) -> None:
        reward = self.cfg.reward
        if reward.kl_target is None or observed is None:
            return
        controller = AdaptiveKLController(self.state.kl_coef, reward.kl_target, reward.kl_horizon)
        # Prompts with many responses, or a batch that a guard grew, must not end the run here.
        self.state.kl_coef = controller.update(observed, min(n_rows, reward.kl_horizon)).coef

    def _probe(self, facts: Mapping[str, float] | None = None) -> tuple[Action, ...]:
        """Measure the policy; it is good where no rule doubts it."""
        found = dict(facts or {})
        if self.probe is not None:
            with self.clock.phase("probe"):
                found |= self.probe.measure()
        self.state.probed = self.state.step
        actions = self._observe(found)
        is_doubted = any(isinstance(action, Rollback | Stop) for action in actions)
        if self.engine.passing and not is_doubted:
            self.state.take_probe(found.get("probe_win_rate", found.get("held_out_accuracy")))
        return actions

    def _observe(self, metrics: Mapping[str, float]) -> tuple[Action, ...]:
        """Log metrics of the present step and return what the guards make of them."""
        if not metrics:
            return ()
        step = self.state.step
        self.history.append(step, metrics)
        if step > self._logged_until or "kl_probe" in metrics:
            # A restarted run repeats steps that were logged already, with the same numbers.
            self.log.metrics(metrics, step)
            self._logged_until = max(step, self._logged_until)
        firings = self.engine.observe(step, guarded(metrics))
        for firing in firings:
            self._tell(firing)
        return merged_actions(firings)

    def _tell(self, firing: Firing) -> None:
        self.state.events.append(firing.to_dict())
        self.log.event(f"guard.{firing.rule}", firing.message)
