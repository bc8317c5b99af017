"""Names and values in the form that MLflow keeps whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_PARAM_CHARS = 500
MAX_TAG_CHARS = 5000
_REFUSED_IN_NAMES = re.compile(r"[^\w\-. :/]")


def cut_tag(value: str) -> str:
    """Return a tag value, cut with a mark where MLflow would cut it without one."""
    text = str(value)
    return text if len(text) <= MAX_TAG_CHARS else text[: MAX_TAG_CHARS - 6] + " [...]"


def clean_name(name: str) -> str:
    """Replace the characters that MLflow refuses in names of metrics, parameters and tags."""
    return _REFUSED_IN_NAMES.sub("_", name)


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted names and short values; a longer one is given by its digest and length.

    MLflow cuts values over 6,000 characters without a word; ``config.json`` holds them whole.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = clean_name(f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MAX_PARAM_CHARS:
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            text = f"sha256:{digest} length:{len(text)}"
        flat[name] = text
    return flat
