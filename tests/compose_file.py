"""Reads deployments/compose.yaml as compose does: merged, with the environment put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOYMENTS = Path(__file__).resolve().parent.parent / "deployments"
COMPOSE = DEPLOYMENTS / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<rule>:[-?])?(?P<text>[^}]*)\}")


class UnsetVariableError(KeyError):
    """A variable that must be set is not."""


def read_compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the whole file.

    Args:
        environment: in place of the process's own.

    Raises:
        UnsetVariableError: of ``${NAME:?text}``.
    """
    found: dict[str, Any] = _filled(yaml.safe_load(COMPOSE.read_text()), environment)
    return found


def _filled(node: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, environment) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, environment) for value in node]
    return _substituted(node, environment) if isinstance(node, str) else node


def _substituted(text: str, environment: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        given = environment.get(match["name"], "")
        if not given and match["rule"] == ":?":
            raise UnsetVariableError(match["name"])
        return given or (match["text"] if match["rule"] == ":-" else "")

    return _VARIABLE.sub(value, text)
