"""Pages, Markdown or HTML, that keep what people and models wrote inert."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

_TEXT_CHARS: Final = 800
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")


def write_report(directory: Path, record: Mapping[str, Any], page: str) -> list[Path]:
    """Write ``report.json`` and ``report.md``; return both."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "report.json", directory / "report.md"]
    paths[0].write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    paths[1].write_text(page, encoding="utf-8")
    return paths


def join(sections: Iterable[str]) -> str:
    """Return a page of Markdown; empty sections are left out."""
    return "\n\n".join(filter(None, sections)) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; its cells are taken as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def example(heading: str, facts: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return a section with texts to read, below what is known about them."""
    blocks = [f"{name}:\n\n{block(text)}" for name, text in texts.items()]
    return "\n\n".join([f"### {heading}", "; ".join(facts), *blocks])


def interval(low: float, high: float, form: str = ".3f") -> str:
    """Return both ends as text."""
    return f"{low:{form}} to {high:{form}}"


def with_error(value: float, error: float | None, form: str = ".3f", sign: str = "±") -> str:
    """Return a mean and its standard error, where it has one, as text."""
    return f"{value:{form}}" + ("" if error is None else f" {sign} {error:{form.lstrip('+')}}")


def cell(text: str) -> str:
    """Return one line that is neither HTML nor Markdown."""
    # Quotes stay: as entities they would hold a #, which is escaped next.
    line = html.escape(" ".join(plain(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", line)


def block(text: str, max_chars: int = _TEXT_CHARS) -> str:
    """Return text as a fenced block that nothing in it can end."""
    shown = plain(text[:max_chars]) + (" ..." if len(text) > max_chars else "")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def plain(text: str) -> str:
    """Replace control characters and unpaired surrogates, which no page or table can hold."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def render_html(package: str, name: str, **values: Any) -> str:
    """Return the page of a template for a browser, which needs no network; values are escaped.

    Args:
        package: where the template ``<name>.html`` lies, and ``<name>.js`` if it has a script, the
            only one that the page's policy lets run.
    """
    from jinja2 import Environment

    folder = files(package)
    script = folder / f"{name}.js"
    code = script.read_text("utf-8").strip() if script.is_file() else ""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    policy += "form-action 'none'"
    if code:
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    template = (folder / f"{name}.html").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return plain(environment.from_string(template).render(policy=policy, script=code, **values))
