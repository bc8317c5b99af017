"""Sentence BLEU-4 against the preferred response, from 0 to 1.

    BLEU = BP * exp(1/4 * sum_{n=1..4} log p_n)        (Papineni et al. 2002)
    BP   = 1 if c > r else exp(1 - r / c)              c, r: tokens of response and reference
    p_1  = m_1 / l_1
    p_n  = (m_n + 1) / (l_n + 1)  for n > 1            add-one smoothing, Lin and Och 2004 (ORANGE)

``l_n`` is the number of n-grams of the response and ``m_n`` how many of them the reference has,
each counted at most as often as there. Without smoothing nearly every short sentence would score 0.
A response that shares no word with the reference scores 0, and the reference itself scores 1.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

MAX_ORDER = 4
_TOKEN = re.compile(r"\w+|[^\w\s]")


def reward_fn(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return the BLEU score of a response; words and punctuation marks are tokens, case counts."""
    return sentence_bleu(_TOKEN.findall(solution_str), _TOKEN.findall(ground_truth))


def sentence_bleu(response: list[str], reference: list[str]) -> float:
    """Return the smoothed BLEU-4 score of a tokenized response."""
    log_precision = 0.0
    for order in range(1, MAX_ORDER + 1):
        own, wanted = _ngrams(response, order), _ngrams(reference, order)
        matches, total = (own & wanted).total(), own.total()
        if order > 1:
            matches, total = matches + 1, total + 1
        if matches == 0:
            return 0.0
        log_precision += math.log(matches / total) / MAX_ORDER
    brevity = min(0.0, 1.0 - len(reference) / len(response))
    return math.exp(brevity + log_precision)


def _ngrams(tokens: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
