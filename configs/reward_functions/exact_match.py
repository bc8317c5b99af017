"""1 where the response equals the preferred one after normalisation, else 0.

Normalisation, in this order, after the answer comparison of SQuAD (Rajpurkar et al. 2016): Unicode
form NFKC, case folded, punctuation removed, the words a, an and the removed, white space collapsed.
Texts of which nothing remains are compared as they are, without white space around them.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def reward_fn(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 for a match, 0.0 otherwise."""
    response, wanted = normalize(solution_str), normalize(ground_truth)
    if not response and not wanted:
        return float(solution_str.strip() == ground_truth.strip())
    return float(response == wanted)


def normalize(text: str) -> str:
    """Return what two texts that say the same should have in common."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(c for c in folded if not unicodedata.category(c).startswith("P"))
    return " ".join(_ARTICLES.sub(" ", plain).split())
