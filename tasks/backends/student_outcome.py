"""Measures a student beside its teacher and its base on held-out prompts and responses."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tasks.algorithms.resampling import Bootstrap, clustered_mean
from tasks.artifacts import RewardModelCheckpoint
from tasks.backends.logits_hooks import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    AgreementReader,
    TopKReader,
)
from tasks.backends.policy_probe import one_pair_per_prompt
from tasks.backends.reward_scoring import RewardScorer
from tasks.backends.roles import RoleSpec, Row
from tasks.backends.session import Session
from tasks.backends.speaking import Reply, Speaker
from tasks.backends.student_export import adapter_parameters
from tasks.backends.trajectories import Responses
from tasks.config import GenerationConfig
from tasks.data.hh import Pair
from tasks.data.policy_report import HeldOut, compare_pairs
from tasks.data.policy_samples import ResponsePair, prompt_text
from tasks.data.rendering import Renderer
from tasks.data.run_history import History
from tasks.data.student_report import (
    BASE,
    STUDENT,
    TEACHER,
    Agreement,
    ModelFigures,
    StudentReport,
)
from tasks.models.student import n_parameters
from tasks.models.weights import list_weight_files

# Labels per token that the agreement is computed from; a small vocabulary is used whole.
AGREEMENT_LABELS = 64
_SMALL_VOCABULARY = 1024
_COMPARED = "compared"
_JUDGE = "the reward model"
_BATCH_SIZE = 512


@dataclass(frozen=True)
class _Spoken:
    replies: list[Reply]
    seconds: float
    scores: Tensor

    @property
    def tokens(self) -> list[int]:
        return [len(reply.row.response_ids) for reply in self.replies]


@dataclass(frozen=True)
class StudentOutcome:
    """Measures.

    Args:
        session: holds the student under its own role.
        renderer: of all models.
        reward_model: judges.
        dirs: model directories by `STUDENT` (merged), `TEACHER` and `BASE`.
        adapter_dir: of the student.
        seed: of the sampling.
    """

    session: Session
    renderer: Renderer
    reward_model: RewardModelCheckpoint
    dirs: dict[str, Path]
    adapter_dir: Path
    seed: int

    def report(
        self, held_out: Responses, n_prompts: int, max_new_tokens: int, history: History
    ) -> StudentReport:
        """Return the report on prompts and chosen responses that nothing was trained on."""
        pairs = one_pair_per_prompt(held_out.pairs, n_prompts)
        scorer = RewardScorer.load(self.session, self.reward_model)
        spoken = {n: self._speak(d, pairs, scorer, max_new_tokens) for n, d in self.dirs.items()}
        chosen = held_out.first(n_prompts).rows[0::2]
        perplexity = {STUDENT: self._perplexity(STUDENT, chosen)}
        agreement = self._load_teacher_and_agree(spoken[TEACHER])
        perplexity[TEACHER] = self._perplexity(_COMPARED, chosen)
        self.session.load(RoleSpec(_COMPARED, "language_model", str(self.dirs[BASE])))
        perplexity[BASE] = self._perplexity(_COMPARED, chosen)
        models = {n: self._figures(n, spoken[n], perplexity[n]) for n in self.dirs}
        return StudentReport(
            models,
            agreement,
            self._compare(pairs, spoken[STUDENT], spoken[BASE]),
            self._compare(pairs, spoken[STUDENT], spoken[TEACHER]),
            adapter_parameters(self.adapter_dir),
            _weight_bytes(self.adapter_dir, adapter=True),
            history,
        )

    def _speak(
        self, model_dir: Path, pairs: Sequence[Pair], scorer: RewardScorer, max_new_tokens: int
    ) -> _Spoken:
        how = GenerationConfig(
            temperature=1.0, max_new_tokens=max_new_tokens, batch_size=_BATCH_SIZE
        )
        speaker = Speaker(model_dir, self.renderer, self.session.runtime)
        begin = time.perf_counter()
        replies = speaker.reply([pair.prompt for pair in pairs], how, self.seed)
        seconds = time.perf_counter() - begin
        return _Spoken(replies, seconds, scorer.score([reply.row for reply in replies]).total)

    def _perplexity(self, role: str, rows: Sequence[Row]) -> float:
        logprobs = torch.cat(self.session.logprobs(role, rows)).double()
        return math.exp(-float(logprobs.mean()))

    def _load_teacher_and_agree(self, teacher: _Spoken) -> Agreement:
        """Return how the student differs from the teacher on what the teacher said."""
        vocabulary = self.renderer.vocab_size
        k = vocabulary if vocabulary <= _SMALL_VOCABULARY else AGREEMENT_LABELS
        rows = [reply.row for reply in teacher.replies]
        self.session.load(RoleSpec(_COMPARED, "language_model", str(self.dirs[TEACHER])))
        labels = self.session.read_tokens(_COMPARED, rows, TopKReader(k, 1.0, vocabulary))
        columns = {
            # The tail follows from the others.
            TEACHER_LOGPROBS: [values[:, :-1] for values in labels[TEACHER_LOGPROBS]],
            TEACHER_IDS: labels[TEACHER_IDS],
        }
        found = self.session.read_tokens(STUDENT, rows, AgreementReader(vocabulary), columns)
        response = torch.arange(len(rows)).repeat_interleave(
            torch.tensor([len(row.response_ids) for row in rows])
        )
        kl = torch.cat(found["kl"])[:, 0]
        same = torch.cat(found["same_top"])
        return Agreement(clustered_mean(kl, response), k, k == vocabulary, float(same.mean()))

    def _figures(self, name: str, spoken: _Spoken, perplexity: float) -> ModelFigures:
        return ModelFigures(
            parameters=n_parameters(self.dirs[name]),
            size_bytes=_weight_bytes(self.dirs[name]),
            scores=spoken.scores.tolist(),
            response_tokens=sum(spoken.tokens) / len(spoken.tokens),
            seconds=spoken.seconds,
            tokens=sum(spoken.tokens),
            perplexity=perplexity,
        )

    def _compare(self, pairs: Sequence[Pair], student: _Spoken, other: _Spoken) -> HeldOut:
        responses = [
            ResponsePair(
                prompt_id=pair.prompt_id,
                prompt=prompt_text(pair.prompt),
                base_response=other.replies[i].text,
                policy_response=student.replies[i].text,
                base_score=float(other.scores[i]),
                policy_score=float(student.scores[i]),
                base_tokens=other.tokens[i],
                policy_tokens=student.tokens[i],
                subset=pair.subset,
            )
            for i, pair in enumerate(pairs)
        ]
        return compare_pairs(responses, judge=_JUDGE, bootstrap=Bootstrap(seed=self.seed))


def _weight_bytes(directory: Path, adapter: bool = False) -> int:
    files = [directory / "adapter_model.safetensors"] if adapter else list_weight_files(directory)
    return sum(file.stat().st_size for file in files)
