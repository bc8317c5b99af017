"""Tokenizers and chat templates: loading, the end of turn, what identifies them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from transformers import AutoTokenizer

from tasks.data.hh import Message
from tasks.errors import ModelError

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


def find_end_of_turn(tokenizer: Any) -> int:
    """Return the id of the special token that the chat template puts after an answer.

    It need not be ``eos_token``: base and converted tokenizers often name another one there.

    Raises:
        ModelError: no chat template, or no special token after the answer.
    """
    return find_answer_frame(tokenizer, str(tokenizer.name_or_path)).end_of_turn_id


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
