"""The renderer: the one way from a conversation to token ids, for every stage.

Prompt and response are tokenized apart: both responses of a pair share exactly the same prompt ids,
and these are the ids that generation starts from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from transformers import AutoTokenizer

from tasks.config.shared import RenderingConfig
from tasks.data.hh import Message, Pair
from tasks.errors import ConfigError, DataError, ModelError, RendererMismatchError

# Tokenizers and chat templates: loading, the end of turn, what identifies them.

_PROBE_PROMPT: Final = Message("user", "probeprompt")
_PROBE_ANSWER: Final = Message("assistant", "probeanswer")


def _fixed_now(pattern: str) -> str:
    return datetime(2024, 7, 26).strftime(pattern)


# Some templates print today's date or open a reasoning block: both would make a conversation
# render differently from one day, or one stage, to the next.
_TEMPLATE_VARIABLES: Final = {"strftime_now": _fixed_now, "enable_thinking": False}


@dataclass(frozen=True)
class AnswerFrame:
    """What the template puts around the text of an answer.

    Args:
        prompt_tail: belongs to the prompt although the template leaves it out of the generation
            prompt, for instance an assistant header.
        before: text between prompt and answer, for instance a space.
        after: text between answer and end of turn.
    """

    prompt_tail: str
    before: str
    after: str
    end_of_turn_id: int


def load_tokenizer(model_dir: Path) -> Any:
    """Load the tokenizer of a model directory, without the network.

    Raises:
        ModelError: no directory, no tokenizer in it, or no chat template.
    """
    fix = "save the model together with its tokenizer: tokenizer.save_pretrained(directory)"
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir} is not a directory", "a model directory", fix)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{model_dir} holds no tokenizer that loads: {reason}", "a tokenizer", fix
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"The tokenizer in {model_dir} has no chat template",
            "a chat_template in tokenizer_config.json or chat_template.jinja",
            "use an instruct model's tokenizer, or set tokenizer.chat_template and save it",
        )
    return tokenizer


def apply_template(tokenizer: Any, messages: Sequence[Message], open_answer: bool) -> str:
    """Return the text of a conversation, up to where the next answer starts if `open_answer`."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text: str = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=open_answer, **_TEMPLATE_VARIABLES
    )
    return text


def find_answer_frame(tokenizer: Any, name: str) -> AnswerFrame:
    """Render a probe answer and return what surrounds it.

    Raises:
        ModelError: the template fails, or no special token follows the answer.
    """
    try:
        opened = apply_template(tokenizer, [_PROBE_PROMPT], open_answer=True)
        whole = apply_template(tokenizer, [_PROBE_PROMPT, _PROBE_ANSWER], open_answer=False)
    except (TemplateError, ValueError) as error:
        raise ModelError(
            f"The chat template of {name} does not render a question and an answer: {error}",
            "a template for user and assistant turns",
            "correct chat_template in the model directory",
        ) from error
    head, found, tail = whole.partition(_PROBE_ANSWER.content)
    specials = special_tokens(tokenizer)
    end = any_of(specials).search(tail) if found else None
    if end is None:
        raise ModelError(
            f"The chat template of {name} puts no special token after an answer",
            "an end-of-turn token such as <|im_end|>",
            "correct chat_template, and add its end-of-turn token as a special token",
        )
    before = head[len(opened) :] if head.startswith(opened) else ""
    is_header = any_of(specials).search(before) is not None
    return AnswerFrame(
        prompt_tail=before if is_header else "",
        before="" if is_header else before,
        after=tail[: end.start()],
        end_of_turn_id=specials[end[0]],
    )


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the id of each special token by its text."""
    tokens = {
        token.content: int(token_id)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return tokens | {text: int(token_id) for text, token_id in named}


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of the texts, the longest first; nothing when there are none."""
    ordered = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def tokenizer_content(tokenizer: Any) -> Any:
    """Return what decides the ids of a text, as plain JSON values.

    Padding, truncation and automatically added special tokens are not part of it: the renderer uses
    none of them, and saving a tokenizer again may change them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    content = json.loads(backend.to_str())
    return {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


_VERSION: Final = 1
# Stand-ins for special-token text inside a message, from a private-use plane.
_STAND_IN_BASE: Final = 0xF0000


class ResponseTooLong(DataError):
    """A response over the limit where cutting was not asked for."""


@dataclass(frozen=True, slots=True)
class RenderedPair:
    """Token ids of a pair; the prompt is shared.

    Args:
        chosen_truncated: True when the chosen response was cut and so has no end-of-turn token.
        rejected_truncated: the same for the rejected response.
    """

    pair_id: str
    prompt_id: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    subset: str
    chosen_truncated: bool = False
    rejected_truncated: bool = False

    @property
    def longest_row_tokens(self) -> int:
        """Tokens of the prompt with the longer of the two responses."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


class Renderer:
    """A tokenizer, its chat template and the length limits. Make one with `Renderer.load`."""

    def __init__(self, tokenizer: Any, limits: RenderingConfig, name: str) -> None:
        self._tokenizer = tokenizer
        self.limits = limits
        self._name = name
        self._frame = find_answer_frame(tokenizer, name)
        self._special_ids = special_tokens(tokenizer)
        self._special_pattern = any_of(self._special_ids)
        self.end_of_turn_id: int = self._frame.end_of_turn_id
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.end_of_turn_id if pad is None else int(pad)
        self.fingerprint: str = _fingerprint(tokenizer, self._frame, limits)
        self._check_limits()

    @classmethod
    def load(cls, model_dir: Path, limits: RenderingConfig) -> Renderer:
        """Load the tokenizer and chat template of a model directory.

        Raises:
            ModelError: no directory, no tokenizer, no chat template, or a template without an
                end-of-turn token.
            ConfigError: ``max_prompt_tokens`` is too small for the template.
        """
        return cls(load_tokenizer(model_dir), limits, str(model_dir))

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer has; a model's vocabulary may be padded behind them."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], int]:
        """Return the ids of a prompt, which end where the answer starts, and how many of its turns
        lost all or part of their text.

        Over ``max_prompt_tokens`` the oldest turns go first, so that the rest starts with a user
        turn (a leading system turn stays); if the last turn alone is too long, its beginning goes.

        Raises:
            DataError: no messages, or the chat template refuses them.
        """
        if not messages:
            raise DataError("A prompt has no messages", "at least one", "give the user's turn")
        system = tuple(messages[:1]) if messages[0].role == "system" else ()
        turns = tuple(messages[len(system) :])
        for start in _possible_starts(turns):
            ids = self._encode_prompt(system + turns[start:])
            if len(ids) <= self.limits.max_prompt_tokens:
                return ids, start
        if not turns:
            raise DataError(
                "The system turn alone exceeds max_prompt_tokens",
                f"at most {self.limits.max_prompt_tokens} tokens",
                "raise rendering.max_prompt_tokens",
            )
        return self._cut_last(system, turns[-1]), len(turns)

    def response_ids(self, response: str) -> tuple[tuple[int, ...], bool]:
        """Return the ids of a response and whether it was cut.

        The end-of-turn token counts towards ``max_response_tokens`` and is never forced onto a
        cut response.

        Raises:
            ResponseTooLong: over the limit and ``truncate_response`` is off.
        """
        text = f"{self._frame.before}{response}{self._frame.after}"
        ids = (*self._encode(text, plain=True), self.end_of_turn_id)
        limit = self.limits.max_response_tokens
        if len(ids) <= limit:
            return ids, False
        if not self.limits.truncate_response:
            raise ResponseTooLong(
                f"A response has {len(ids)} tokens with its end of turn",
                f"at most {limit}",
                "raise rendering.max_response_tokens or set rendering.truncate_response",
            )
        return ids[:limit], True

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text up to the end of turn, stripped, without special tokens."""
        text_ids, _ = split_at_end(ids, self.end_of_turn_id, self.pad_token_id)
        text: str = self._tokenizer.decode(
            list(text_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.strip()

    def check_same(self, other_fingerprint: str, what: str) -> None:
        """Refuse an artefact that was made with another renderer.

        Raises:
            RendererMismatchError: the fingerprints differ.
        """
        if other_fingerprint != self.fingerprint:
            raise RendererMismatchError(
                f"{what} was made with renderer {other_fingerprint[:12]}, "
                f"but {self._name} gives renderer {self.fingerprint[:12]}",
                "the same chat template, special tokens, vocabulary and length limits",
                "use the model directory and the rendering section that it was made with, "
                "or make it again",
            )

    def _check_limits(self) -> None:
        needed = len(self._encode_prompt((Message("user", "a"),)))
        if needed > self.limits.max_prompt_tokens:
            raise ConfigError(
                f"The chat template of {self._name} needs {needed} tokens for one letter",
                f"rendering.max_prompt_tokens of at least {needed}",
                f"raise it from {self.limits.max_prompt_tokens}",
            )

    def _encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        found = self._special_texts_in(messages)
        if not found:
            return self._encode(self._render_text(messages))
        # Text such as "<|im_end|>" inside a message must stay text and not end the turn.
        stand_ins = {text: chr(_STAND_IN_BASE + index) for index, text in enumerate(found)}
        originals = {stand_in: text for text, stand_in in stand_ins.items()}
        pattern = any_of(found)
        protected = [
            replace(m, content=pattern.sub(lambda hit: stand_ins[hit[0]], m.content))
            for m in messages
        ]
        pieces = re.split(f"([{''.join(originals)}])", self._render_text(protected))
        ids: list[int] = []
        for piece in filter(None, pieces):
            ids.extend(self._encode(originals.get(piece, piece), plain=piece in originals))
        return tuple(ids)

    def _special_texts_in(self, messages: Sequence[Message]) -> list[str]:
        hits = {hit for m in messages for hit in self._special_pattern.findall(m.content)}
        return sorted(hits)

    def _render_text(self, messages: Sequence[Message]) -> str:
        try:
            text = apply_template(self._tokenizer, messages, open_answer=True)
        except TemplateError as error:
            roles = [message.role for message in messages]
            raise DataError(
                f"The chat template of {self._name} refuses turns {roles}: {error}",
                "turns that the template accepts",
                "leave the conversation out, or use a model whose template accepts it",
            ) from error
        return text + self._frame.prompt_tail

    def _encode(self, text: str, plain: bool = False) -> tuple[int, ...]:
        ids = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=plain, verbose=False
        )
        return tuple(ids)

    def _cut_last(self, system: tuple[Message, ...], last: Message) -> tuple[int, ...]:
        """Return the longest rendering within the limit whose last turn lost its beginning."""
        too_few, enough = 0, len(last.content) - 1
        best = self._encode_prompt((*system, replace(last, content=last.content[-1:])))
        if len(best) > self.limits.max_prompt_tokens:
            raise DataError(
                f"A prompt needs {len(best)} tokens with its last turn cut to one character",
                f"at most {self.limits.max_prompt_tokens}",
                "raise rendering.max_prompt_tokens",
            )
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            kept = replace(last, content=last.content[middle:].lstrip())
            ids = self._encode_prompt((*system, kept))
            if len(ids) <= self.limits.max_prompt_tokens:
                enough, best = middle, ids
            else:
                too_few = middle
        return best


def render_pairs(
    pairs: Iterable[Pair], renderer: Renderer
) -> tuple[list[RenderedPair], dict[str, int]]:
    """Render pairs; return those that fit and the number left out by reason.

    Reasons: ``too_long`` (a response over the limit), ``identical_after_truncation`` and
    ``identical_tokens`` (no difference left to learn from), ``template_refused`` (turns do not
    alternate and the template insists on it).

    Raises:
        DataError: the template refuses a pair whose turns do alternate.
    """
    rendered: list[RenderedPair] = []
    left_out: Counter[str] = Counter()
    for pair in pairs:
        result = _render_pair(pair, renderer)
        if isinstance(result, str):
            left_out[result] += 1
        else:
            rendered.append(result)
    return rendered, dict(left_out)


def _render_pair(pair: Pair, renderer: Renderer) -> RenderedPair | str:
    try:
        chosen, chosen_truncated = renderer.response_ids(pair.chosen)
        rejected, rejected_truncated = renderer.response_ids(pair.rejected)
        prompt, _ = renderer.prompt_ids(pair.prompt)
    except ResponseTooLong:
        return "too_long"
    except DataError as error:
        if isinstance(error.__cause__, TemplateError) and not pair.alternating:
            return "template_refused"
        where = f"Pair {pair.pair_id} ({pair.source_file}, line {pair.source_line})"
        raise DataError(f"{where}: {error.found}", error.expected, error.fix) from error
    if chosen == rejected:
        return "identical_after_truncation" if chosen_truncated else "identical_tokens"
    return RenderedPair(
        pair_id=pair.pair_id,
        prompt_id=pair.prompt_id,
        prompt_ids=prompt,
        chosen_ids=chosen,
        rejected_ids=rejected,
        subset=pair.subset,
        chosen_truncated=chosen_truncated,
        rejected_truncated=rejected_truncated,
    )


def split_at_end(
    ids: Iterable[int], end_of_turn_id: int, pad_token_id: int
) -> tuple[tuple[int, ...], bool]:
    """Return a generated row without end of turn and padding, and whether it ended by itself.

    The end is looked for in all tokens, not in the last slot, which is padding in a short row of a
    batch.
    """
    row = tuple(ids)
    if end_of_turn_id in row:
        return row[: row.index(end_of_turn_id)], True
    length = len(row)
    while length and row[length - 1] == pad_token_id:
        length -= 1
    return row[:length], False


def _possible_starts(turns: Sequence[Message]) -> list[int]:
    later = [index for index, turn in enumerate(turns) if index and turn.role == "user"]
    # A prompt that ends with an assistant turn (roles do not alternate) may have to start with it.
    last = [len(turns) - 1] if len(turns) - 1 not in (0, *later) else []
    return [0, *later, *last]


def _fingerprint(tokenizer: Any, frame: AnswerFrame, limits: RenderingConfig) -> str:
    document = {
        "version": _VERSION,
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens_map,
        "pad_token_id": tokenizer.pad_token_id,
        "answer_frame": asdict(frame),
        "limits": limits.model_dump(mode="json"),
        "tokenizer": tokenizer_content(tokenizer),
    }
    text = json.dumps(document, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
