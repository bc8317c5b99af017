"""Rules and engines in a few words."""

from __future__ import annotations

from tasks.algorithms.guards import Action, GuardEngine, Rule, Warn, parse_condition


def rule(
    when: str,
    *actions: Action,
    name: str = "r",
    cooldown_steps: int = 0,
    for_observations: int = 1,
) -> Rule:
    """Return a rule that warns unless it is told what to do."""
    return Rule(
        name,
        parse_condition(when, rule=name),
        actions or (Warn(),),
        cooldown_steps=cooldown_steps,
        for_observations=for_observations,
    )


def engine_of(*rules: Rule, max_rollbacks: int = 100) -> GuardEngine:
    """Return an engine that has seen nothing."""
    return GuardEngine(rules, max_rollbacks=max_rollbacks)
