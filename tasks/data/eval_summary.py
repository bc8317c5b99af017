"""What an evaluation found, as the plain values of ``report.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from tasks.algorithms.question_statistics import label_agreement
from tasks.data.gate import BASELINE
from tasks.data.leaderboard import compare, score_model
from tasks.data.pairwise import PairJudgment, summarize_pairs
from tasks.data.questions import ModelAnswer, Question
from tasks.data.scores import Score, compare_scores
from tasks.errors import DataError

_SHOWN_CHARACTERS: Final = 80
# Of a subset's name, and what its rate is called.
_RATES: Final = {"helpful": "helpfulness", "harmless": "harmlessness"}


@dataclass(frozen=True)
class HeldOut:
    """One model's responses to the held-out prompts.

    Args:
        scores: by the reward model; None where a response cannot be scored.
        components: the same by component of the reward model.
        subsets: subset of each prompt.
    """

    texts: Sequence[str]
    scores: Sequence[float | None]
    components: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    subsets: Sequence[str] = ()


def questions_section(
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[ModelAnswer]],
    scores: Sequence[Score],
) -> dict[str, Any]:
    """Return means, intervals and coverage of each model."""
    category_of = {question.question_id: question.category for question in questions}
    section = {}
    for name, given in answers.items():
        found = score_model([s for s in scores if s.model_id == name], category_of).as_json()
        del found["model"], found["judge"]
        section[name] = found | {"truncated": sum(sum(answer.truncated) for answer in given)}
    return section


def differences_section(models: Sequence[str], scores: Sequence[Score]) -> dict[str, Any]:
    """Return each model's paired difference from the base; a model that shares no judged question
    with it has none."""
    base = [score for score in scores if score.model_id == BASELINE]
    section: dict[str, Any] = {}
    for name in models:
        if name == BASELINE:
            continue
        try:
            found = compare([score for score in scores if score.model_id == name], base).as_json()
        except DataError:
            continue
        section[name] = {key: found[key] for key in ("difference", "interval", "n")}
    return section


def pairwise_section(models: Sequence[str], pairs: Sequence[PairJudgment]) -> dict[str, Any]:
    """Return wins, ties and losses of each model against the base."""
    section = {}
    for name in models:
        if name == BASELINE:
            continue
        games = [pair for pair in pairs if name in (pair.model_1, pair.model_2)]
        summary = summarize_pairs(games, name)
        rate = summary.rate
        repeats: dict[tuple[int, int], list[str]] = {}
        for game in games:
            winner = game.winner_for(name)
            if winner is not None:
                repeats.setdefault((game.question_id, game.turn), []).append(winner)
        agreed = label_agreement(list(repeats.values()))
        section[name] = {
            "wins": rate.wins if rate else 0,
            "ties": rate.ties if rate else 0,
            "losses": rate.losses if rate else 0,
            "win_rate": rate.strict if rate else None,
            "win_rate_adjusted": rate.adjusted if rate else None,
            "orders_agree": summary.consistent,
            "coverage": summary.coverage,
            "agreement": asdict(agreed) if agreed else None,
        }
    return section


def held_out_section(heard: Mapping[str, HeldOut]) -> dict[str, Any]:
    """Return what the reward model says of the responses to held-out prompts."""
    base = heard[BASELINE].scores
    section: dict[str, Any] = {}
    for name, found in heard.items():
        known = [score for score in found.scores if score is not None]
        both = [
            (ours, theirs)
            for ours, theirs in zip(found.scores, base, strict=True)
            if ours is not None and theirs is not None
        ]
        rate = compare_scores([a for a, _ in both], [b for _, b in both]) if both else None
        section[name] = {
            "mean_score": fmean(known) if known else None,
            "win_rate_against_base": rate.adjusted if rate else None,
            "mean_characters": fmean(map(len, found.texts)),
            "scored": len(known),
            **subset_rates(found),
        }
    return section


def subset_rates(found: HeldOut) -> dict[str, float]:
    """Return helpfulness and harmlessness rates, where the prompts have such subsets.

    A rate is the share of the responses to prompts of subsets named helpful (harmless) that score
    above the mean training response, by the reward component of that name or else by all.
    """
    rates = {}
    for word, name in _RATES.items():
        component = next((c for c in found.components if word in c), None)
        scores = found.scores if component is None else found.components[component]
        known = [
            score
            for score, subset in zip(scores, found.subsets, strict=False)
            if word in subset and score is not None
        ]
        if known:
            rates[f"{name}_rate"] = fmean(score > 0.0 for score in known)
    return rates


def failure_counts(scores: Sequence[Score]) -> dict[str, int]:
    """Return how many judgments failed for which reason, the most frequent first."""
    reasons = [score.failure[:_SHOWN_CHARACTERS] for score in scores if score.score is None]
    return dict(Counter(reasons).most_common())


def flat_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that runs are compared by; what was not measured is left out."""
    found: dict[str, float | None] = {}
    for name, section in report["questions"].items():
        found[f"{name}_question_score"] = section["mean"]
        found[f"{name}_judgment_coverage"] = section["coverage"]
    for name, section in report["held_out"].items():
        found[f"{name}_win_rate_against_base"] = section["win_rate_against_base"]
        found[f"{name}_held_out_score"] = section["mean_score"]
        found |= {f"{name}_{key}": v for key, v in section.items() if key.endswith("_rate")}
    for name, section in report.get("pairwise", {}).items():
        found[f"{name}_judged_win_rate"] = section["win_rate_adjusted"]
    for name, section in report["differences"].items():
        found[f"{name}_score_difference"] = section["difference"]
    if "demo" in report:
        rates = report["demo"]["oracle_good_rate"]
        found |= {f"{name}_oracle_good_rate": rate for name, rate in rates.items()}
        found["reward_accuracy_clean"] = report["demo"]["reward_accuracy_clean"]
    if report["gate"]["verdict"] is not None:
        found["gate_passed"] = float(report["gate"]["verdict"] == "passed")
    return {name: value for name, value in found.items() if value is not None}
