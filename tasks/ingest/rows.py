"""Row formats: a JSON object in, a prompt with two responses out, or the reason why not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from tasks.data.hh import (
    Message,
    Pair,
    Quarantined,
    Refusal,
    leading_text,
    make_pair_id,
    make_prompt_id,
    orient_scored,
    parse_transcript,
)
from tasks.data.quarantine import REASONS, Action, QuarantineReason, default_actions

# Scores, margins and log-probabilities of a row; and who decides about what is wrong with it.

SIDES: Final = ("chosen", "rejected")
_LEAST_LOGPROB: Final = -1e9
_LARGEST_SCORE: Final = 1e9

Scores = tuple[float, float]


class Judge:
    """Decides about what is wrong with one row.

    Args:
        actions: what is done about each reason.
        flags: reasons that the row is kept in spite of.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self.actions = actions
        self.flags: list[str] = []

    def find(self, reason: QuarantineReason, detail: str) -> None:
        """Object to the row: note the reason, or refuse the row.

        Raises:
            Refusal: the reason is not one to keep rows in spite of.
        """
        if self.actions[reason.value] != "keep":
            raise Refusal(reason, detail)
        if reason.value not in self.flags:
            self.flags.append(reason.value)


def scores_of(row: Mapping[str, Any], judge: Judge) -> Scores | None:
    """Return the scores of chosen and rejected, or None when the row has none."""
    values = [row.get(f"score_{side}") for side in SIDES]
    if values == [None, None]:
        return None
    chosen, rejected = as_scores(values)
    if chosen == rejected:
        judge.find(QuarantineReason.TIE, f"both responses score {chosen:g}")
    if chosen < rejected:
        detail = f"chosen scores {chosen:g}, rejected {rejected:g}"
        judge.find(QuarantineReason.SCORES_CONTRADICT_LABEL, detail)
    return chosen, rejected


def as_scores(values: Sequence[Any]) -> Scores:
    """Return two numbers.

    Raises:
        Refusal: they are not.
    """
    if not all(is_finite_number(v) and abs(v) <= _LARGEST_SCORE for v in values):
        raise Refusal(QuarantineReason.WRONG_TYPE, "scores must be two numbers up to 1e9")
    return float(values[0]), float(values[1])


def margin_of(row: Mapping[str, Any]) -> float | None:
    """Return what the row calls its margin, or how much higher chosen is scored; None where the
    scores contradict the label."""
    value = row.get("margin")
    if value is None:
        scores = [row.get(f"score_{side}") for side in SIDES]
        if None in scores:
            return None
        difference = float(scores[0]) - float(scores[1])  # type: ignore[arg-type]
        return difference if difference >= 0 else None
    if not is_finite_number(value) or not 0 <= value <= _LARGEST_SCORE:
        raise Refusal(QuarantineReason.WRONG_TYPE, "'margin' must be a number from 0 to 1e9")
    return float(value)


def logged_of(row: Mapping[str, Any]) -> Scores | None:
    """Return the logged log-probabilities of chosen and rejected, or None when there are none."""
    return as_logged([row.get(f"{side}_logprob") for side in SIDES])


def as_logged(values: Sequence[Any]) -> Scores | None:
    """Return two log-probabilities, or None for two nulls.

    Raises:
        Refusal: they are something else.
    """
    if list(values) == [None, None]:
        return None
    for side, value in zip(SIDES, values, strict=True):
        if not is_finite_number(value) or not _LEAST_LOGPROB <= value <= 0:
            detail = f"the log-probability of {side} is not a number of nats up to 0"
            raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    return float(values[0]), float(values[1])


def is_finite_number(value: Any) -> bool:
    """Tell whether a JSON value is a number, and a finite one."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_SPEAKERS: Final = ("system", "user", "assistant")
# Line ends and tabs are text; the rest breaks terminals, tokenizers and C strings.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

Turns = tuple[Message, ...]


@dataclass(slots=True)
class Row:
    """A usable row.

    Args:
        roles, contents: of the prompt's turns.
        scores: of chosen and rejected, where the source rates them.
        logged: log-probabilities of chosen and rejected in nats, where the source has them.
        subset: where the row itself says what part of the corpus it is.
    """

    roles: list[str]
    contents: list[str]
    chosen: str
    rejected: str
    scores: Scores | None = None
    margin: float | None = None
    logged: Scores | None = None
    subset: str | None = None
    flags: list[str] = field(default_factory=list)

    @property
    def alternating(self) -> bool:
        """Whether no two turns in a row, the response included, have the same role."""
        return all(left != right for left, right in pairwise([*self.roles, "assistant"]))


def parse_line(line: bytes, subset: str, source_file: str, source_line: int) -> Pair | Quarantined:
    """Read one JSON line with the default actions; see `read_row` for what it may hold."""
    try:
        row = read_row(decode_object(line), "auto", Judge(default_actions()))
    except Refusal as refusal:
        raw = line.decode("utf-8", errors="backslashreplace").rstrip("\r\n")
        return Quarantined(refusal.reason, refusal.detail, source_file, source_line, raw)
    prompt = tuple(Message(*turn) for turn in zip(row.roles, row.contents, strict=True))
    prompt_id = make_prompt_id(prompt)
    return Pair(
        pair_id=make_pair_id(prompt_id, row.chosen, row.rejected),
        prompt_id=prompt_id,
        subset=subset,
        prompt=prompt,
        chosen=row.chosen,
        rejected=row.rejected,
        source_file=source_file,
        source_line=source_line,
        logged=row.logged,
        margin=row.margin,
    )


def decode_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        Refusal: no UTF-8, no JSON, or no object.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is not UTF-8"
        raise Refusal(QuarantineReason.INVALID_ENCODING, detail) from error
    except (ValueError, RecursionError) as error:
        detail = str(error) or type(error).__name__
        raise Refusal(QuarantineReason.INVALID_JSON, detail) from error
    if not isinstance(row, dict):
        detail = f"the line holds a {type(row).__name__}, not an object"
        raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    return row


def read_row(row: Mapping[str, Any], form: str, judge: Judge) -> Row:
    """Read a row of one of the formats.

    - ``hh``: ``chosen`` and ``rejected`` are HH transcripts.
    - ``prompt``: ``prompt``, ``chosen`` and ``rejected``, each a text or a list of messages. If the
      responses bring their prompt along, the field is that, its first or its last turns, or empty.
    - ``messages``: ``chosen`` and ``rejected`` are lists of messages that share the prompt.
    - ``scored``: ``{"text": [a, b], "score": [x, y]}``, HH transcripts.
    - ``verl``: ``prompt``, ``response`` and ``reward_model.ground_truth``: the ground truth is
      preferred to the response (or to ``extra_info.rejected``); ``data_source`` is the subset.

    Any of them may rate its responses (``score_chosen``, ``score_rejected``, or ``margin``) and say
    how likely their policy found them (``chosen_logprob``, ``rejected_logprob``, in nats).

    Raises:
        Refusal: the row cannot be used.
    """
    name = detect_form(row) if form == "auto" else form
    return _READERS[name](row, judge)


def detect_form(row: Mapping[str, Any]) -> str:
    """Return the format that a row's fields point to."""
    has_sides = "chosen" in row or "rejected" in row
    if not has_sides and "text" in row and "score" in row:
        return "scored"
    if not has_sides and ("response" in row or "reward_model" in row):
        return "verl"
    if has_sides and "prompt" in row:
        return "prompt"
    return "messages" if isinstance(row.get("chosen"), list) else "hh"


def _read_hh(row: Mapping[str, Any], judge: Judge) -> Row:
    texts = [storable(side, _field(row, side)) for side in SIDES]
    scores, margin, logged = scores_of(row, judge), margin_of(row), logged_of(row)
    return _finish([_transcript(s, t, judge) for s, t in zip(SIDES, texts, strict=True)], judge)(
        scores, margin, logged
    )


def _read_scored(row: Mapping[str, Any], judge: Judge) -> Row:
    texts, scores = row["text"], row["score"]
    pairs = isinstance(texts, list) and isinstance(scores, list) and len(texts) == len(scores) == 2
    if not pairs or not all(is_finite_number(score) for score in scores):
        detail = "'text' and 'score' must be two strings and two finite numbers"
        raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    checked = [storable(f"text[{index}]", text) for index, text in enumerate(texts)]
    oriented = orient_scored(checked, scores)
    if oriented is None:
        judge.find(QuarantineReason.TIE, f"both responses score {scores[0]}")
        oriented = (checked[0], checked[1])
    is_swapped = scores[0] < scores[1]
    ordered = scores[::-1] if is_swapped else scores
    rated = as_scores(ordered)
    logged = row.get("logprob", [None, None])
    if not isinstance(logged, list) or len(logged) != 2:
        raise Refusal(QuarantineReason.WRONG_TYPE, "'logprob' must be a list of two numbers")
    turns = [_transcript(s, t, judge) for s, t in zip(SIDES, oriented, strict=True)]
    return _finish(turns, judge)(
        rated, rated[0] - rated[1], as_logged(logged[::-1] if is_swapped else logged)
    )


def _read_prompt(row: Mapping[str, Any], judge: Judge) -> Row:
    chosen, rejected = (_field(row, side) for side in SIDES)
    if any(_is_whole(answer) for answer in (chosen, rejected)):
        # The responses repeat the prompt, as in the datasets that also have it apart.
        found = (_read_messages if isinstance(chosen, list) else _read_hh)(row, judge)
        _check_prompt(row["prompt"], found, judge)
        return found
    prompt = _prompt_turns(row["prompt"], judge)
    answers = [_answer(side, row[side]) for side in SIDES]
    scores, margin, logged = scores_of(row, judge), margin_of(row), logged_of(row)
    turns = [(*prompt, Message("assistant", answer)) for answer in answers]
    return _finish(turns, judge)(scores, margin, logged)


def _read_messages(row: Mapping[str, Any], judge: Judge) -> Row:
    turns = [_messages(side, _field(row, side)) for side in SIDES]
    scores, margin, logged = scores_of(row, judge), margin_of(row), logged_of(row)
    for side, found in zip(SIDES, turns, strict=True):
        _check_order(side, found, judge)
    return _finish(turns, judge)(scores, margin, logged)


def _read_verl(row: Mapping[str, Any], judge: Judge) -> Row:
    rule = _field(row, "reward_model")
    if not isinstance(rule, Mapping) or "ground_truth" not in rule:
        raise Refusal(QuarantineReason.MISSING_FIELD, "no field 'reward_model.ground_truth'")
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    worse = extra["rejected"] if extra.get("rejected") is not None else _field(row, "response")
    explicit: dict[str, Any] = {
        "prompt": _field(row, "prompt"),
        "chosen": rule["ground_truth"],
        "rejected": worse,
    }
    named = ("score_chosen", "score_rejected", "margin", "chosen_logprob", "rejected_logprob")
    explicit |= {name: extra[name] for name in named if name in extra}
    found = _read_prompt(explicit, judge)
    source = row.get("data_source")
    found.subset = storable("data_source", source) if source is not None else None
    return found


_READERS: Final[dict[str, Callable[[Mapping[str, Any], Judge], Row]]] = {
    "hh": _read_hh,
    "prompt": _read_prompt,
    "messages": _read_messages,
    "scored": _read_scored,
    "verl": _read_verl,
}


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    detail = f"no field {name!r}; there are {sorted(row)[:8]}"
    # A key may hold an unpaired surrogate, which no file can store.
    detail = detail.encode("utf-8", "backslashreplace").decode()
    raise Refusal(QuarantineReason.MISSING_FIELD, detail)


def storable(name: str, text: Any) -> str:
    """Return a text that can be stored.

    Raises:
        Refusal: no string, or one with an unpaired surrogate.
    """
    if not isinstance(text, str):
        detail = f"{name} is a {type(text).__name__}, not a string"
        raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = f"{name} has an unpaired surrogate at character {error.start}"
        raise Refusal(QuarantineReason.INVALID_ENCODING, detail) from error
    return text


def _is_whole(answer: Any) -> bool:
    """Tell whether an answer brings its prompt along."""
    if isinstance(answer, str):
        return answer.lstrip(" ").startswith("\n\nHuman:")
    return isinstance(answer, list) and len(answer) > 1


def _check_prompt(value: Any, row: Row, judge: Judge) -> None:
    """Object to a prompt given apart that is neither the responses' own nor its start or end."""
    if value in (None, "", []):
        return
    # Whatever else is wrong with the turns is said of the responses' own.
    given = _prompt_turns(value, Judge(dict.fromkeys(REASONS, "keep")))
    own = tuple(Message(*turn) for turn in zip(row.roles, row.contents, strict=True))
    for whole in (own, tuple(turn for turn in own if turn.role != "system")):
        if given in (whole[: len(given)], whole[-len(given) :]):
            return
    detail = "the field 'prompt' is not what chosen and rejected begin with"
    judge.find(QuarantineReason.PROMPT_MISMATCH, detail)


def _prompt_turns(value: Any, judge: Judge) -> Turns:
    if isinstance(value, list):
        turns = _messages("prompt", value)
        _check_first("prompt", turns, judge)
        return turns
    text = storable("prompt", value)
    turns = parse_transcript(text)
    if not turns or leading_text(text):
        return (Message("user", text.strip()),)
    if turns[-1] == Message("assistant", ""):
        turns = turns[:-1]
    _check_first("prompt", turns, judge)
    return turns


def _answer(side: str, value: Any) -> str:
    if isinstance(value, str):
        return storable(side, value).strip()
    turns = _messages(side, value)
    if not turns or turns[-1].role != "assistant":
        detail = f"{side} has no assistant message"
        raise Refusal(QuarantineReason.LAST_TURN_NOT_ASSISTANT, detail)
    return turns[-1].content


def _messages(name: str, value: Any) -> Turns:
    if not isinstance(value, list):
        detail = f"{name} is a {type(value).__name__}, not a list of messages"
        raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    return tuple(_message(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def _message(name: str, value: Any) -> Message:
    if not isinstance(value, Mapping) or value.get("role") not in _SPEAKERS:
        detail = f"{name} is no message with a role of {', '.join(_SPEAKERS)}"
        raise Refusal(QuarantineReason.WRONG_TYPE, detail)
    return Message(value["role"], storable(f"{name}.content", value.get("content")).strip())


def _transcript(side: str, text: str, judge: Judge) -> Turns:
    turns = parse_transcript(text)
    if not turns:
        detail = f"{side} has neither Human: nor Assistant:"
        raise Refusal(QuarantineReason.NO_TURNS, detail)
    leading = leading_text(text)
    if leading:
        detail = f"{side} has {len(leading)} characters before its first turn"
        judge.find(QuarantineReason.LEADING_TEXT, detail)
    _check_order(side, turns, judge)
    return turns


def _check_order(side: str, turns: Turns, judge: Judge) -> None:
    _check_first(side, turns, judge)
    if turns[-1].role != "assistant":
        detail = f"{side} ends with a {turns[-1].role} turn"
        raise Refusal(QuarantineReason.LAST_TURN_NOT_ASSISTANT, detail)


def _check_first(side: str, turns: Turns, judge: Judge) -> None:
    spoken = turns[1:] if turns and turns[0].role == "system" else turns
    if not spoken:
        raise Refusal(QuarantineReason.NO_TURNS, f"{side} has no turns")
    if spoken[0].role != "user":
        detail = f"{side} starts with an {spoken[0].role} turn"
        judge.find(QuarantineReason.FIRST_TURN_NOT_HUMAN, detail)


def _finish(turns: Sequence[Turns], judge: Judge) -> Callable[..., Row]:
    """Compare the prompts and responses; return what takes the numbers and makes the row."""
    chosen, rejected = turns
    if chosen[:-1] != rejected[:-1]:
        chosen, rejected = _at_first_difference(chosen, rejected, judge)
    _check_question(chosen[:-1], judge)
    for side, answer in (("chosen", chosen[-1]), ("rejected", rejected[-1])):
        if not answer.content:
            judge.find(QuarantineReason.EMPTY_RESPONSE, f"the response of {side} is empty")
    if chosen[-1].content == rejected[-1].content:
        judge.find(QuarantineReason.IDENTICAL_PAIR, "chosen and rejected are the same text")
    prompt = chosen[:-1]

    def make(scores: Scores | None, margin: float | None, logged: Scores | None) -> Row:
        return Row(
            [turn.role for turn in prompt],
            [turn.content for turn in prompt],
            chosen[-1].content,
            rejected[-1].content,
            scores,
            margin,
            logged,
        )

    return make


def _check_question(prompt: Turns, judge: Judge) -> None:
    asked = [turn.content for turn in prompt if turn.role == "user"]
    if asked and not asked[-1]:
        judge.find(QuarantineReason.EMPTY_PROMPT, "the last user turn of the prompt is empty")


def _at_first_difference(chosen: Turns, rejected: Turns, judge: Judge) -> tuple[Turns, Turns]:
    """Cut both at their first different turn, where that is an answer on both sides."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    detail = (
        f"prompts of {len(chosen) - 1} and {len(rejected) - 1} turns differ from turn {same + 1} "
        "on, so the responses do not answer the same prompt"
    )
    judge.find(QuarantineReason.PROMPT_MISMATCH, detail)
    heads = chosen[: same + 1], rejected[: same + 1]
    if not same or any(len(h) <= same or h[same].role != "assistant" for h in heads):
        raise Refusal(QuarantineReason.PROMPT_MISMATCH, detail)
    return heads


def check_characters(row: Row, judge: Judge) -> None:
    """Object to control characters other than tabs and line ends."""
    for text in (*row.contents, row.chosen, row.rejected):
        found = _CONTROL.search(text)
        if found is not None:
            detail = f"U+{ord(found[0]):04X} at character {found.start()} of a turn"
            judge.find(QuarantineReason.CONTROL_CHARACTERS, detail)
            return
