"""Pieces of Markdown pages that keep what people and models wrote inert."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

_TEXT_CHARS: Final = 800
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")


def block(text: str, max_chars: int = _TEXT_CHARS) -> str:
    """Return text as a fenced block that nothing in it can end."""
    shown = plain(text[:max_chars]) + (" ..." if len(text) > max_chars else "")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def plain(text: str) -> str:
    """Replace control characters and unpaired surrogates, which no page or table can hold."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def cell(text: str) -> str:
    """Return one line that is neither HTML nor Markdown."""
    # Quotes stay: as entities they would hold a #, which is escaped next.
    line = html.escape(" ".join(plain(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", line)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; its cells are taken as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
