"""The page of an evaluation: what stands in it, and that nothing in it runs but its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import NEEDS_CHROMIUM, browser

from tasks.evaluate.judgments import PairJudgment, Score
from tasks.evaluate.questions import ModelAnswer, Question
from tasks.evaluate.report import render_page

EVIL = (
    "</pre></article><script>document.title='broken'</script><img src=x onerror=\"alert(1)\">"
    "{{ 7*7 }} {% raw %} & ' \" \x00 \x1b \ud800 <!-- </script> ]]> javascript:alert(1)"
)
JUDGE = ("judge", "single-v1")


class _Page(HTMLParser):
    """Elements with their attributes, and the text in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        else:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def _report(models: tuple[str, ...]) -> dict[str, Any]:
    section = {"turn_1": 7.0, "turn_2": None, "mean": 7.0, "interval": [6.5, 7.5], "coverage": 0.5}
    check = {"name": "min_score", "limit": 5.0, "value": 7.0, "passed": True, "what": "mean score"}
    return {
        "judge": EVIL,
        "scale": "1 to 10",
        "questions": {name: section | {"truncated": 1} for name in models},
        "held_out": {},
        "gate": {"model": "student", "verdict": "passed", "checks": [check]},
    }


def make_page(n_questions: int = 3, models: tuple[str, ...] = ("base", "policy", "student")) -> str:
    questions = [
        Question(q, "math" if q % 2 else EVIL, (f"ask {q} {EVIL}", "more"), (f"ref {EVIL}",))
        for q in range(n_questions)
    ]
    answers = {
        name: [
            ModelAnswer(q, name, (f"{name} {q}: {EVIL}", "two"), 0.0) for q in range(n_questions)
        ]
        for name in models
    }
    scores = [
        Score(q, name, 1, 7.5, JUDGE, f"said {name} {q} {EVIL}")
        for q in range(n_questions)
        for name in models
    ]
    scores.append(Score(0, "base", 2, None, JUDGE, "I refuse", failure=f"no rating {EVIL}"))
    pairs = [PairJudgment(0, "student", "base", 1, "A", "B", JUDGE, (f"game {EVIL}", "swapped"))]
    return render_page(_report(models), questions, answers, scores, pairs)


def test_everything_is_in_it() -> None:
    page = _Page(make_page())
    assert page.count("article") == 3
    for name in ("base", "policy", "student"):
        for question in range(3):
            assert f"{name} {question}: </pre>" in page.text
            assert f"said {name} {question} " in page.text
    for part in ("ref </pre>", "no rating </pre>", "game </pre>", "student wins", "failed", "6.50"):
        assert part in page.text
    assert "min_score: passed, 7.000 (mean score), limit 5" in page.text


def test_what_models_wrote_is_text_and_nothing_else() -> None:
    page = _Page(make_page())
    harmless = _Page(make_page().replace("x onerror", "y onerror"))
    assert page.count("script") == harmless.count("script") == 1
    assert page.count("img") == 0
    assert "49" not in page.text.replace("{{ 7*7 }}", "")
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
    raw = make_page()
    assert "\x00" not in raw and "\x1b" not in raw
    raw.encode()


def test_policy_lets_only_the_pages_own_script_run() -> None:
    page = _Page(make_page())
    (script,) = page.scripts
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv")) or ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_page_needs_no_network() -> None:
    page = _Page(make_page())
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes or str(attributes["src"]).startswith("data:")
        assert not str(attributes.get("href", "#")).startswith(("http", "//", "javascript"))
    assert not re.search(r"url\(|@import", make_page())


def test_picture_is_in_the_page(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG")
    page = _Page(render_page(_report(("base",)), [], {"base": []}, [], images={"bars": file}))
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert images == [{"alt": "bars", "src": "data:image/png;base64,iVBORw=="}]


_PRESSES = """
<script>
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
addEventListener("load", () => {
  press("j"); press("j"); press("o");
  const open = document.querySelectorAll("details.judgment[open]").length;
  document.body.dataset.result = JSON.stringify({
    current: document.querySelector("article.current").id, open, title: document.title,
  });
});
</script>
"""


def _open(page: str, folder: Path) -> _Page:
    """Return the document after its scripts have run."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    with browser(folder / "profile") as tab:
        tab.open(file.as_uri())
        tab.wait_for("document.body.dataset.ready")
        return _Page(tab.html)


def _body(page: _Page) -> dict[str, str | None]:
    return next(attributes for tag, attributes in page.elements if tag == "body")


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_page_works_in_a_browser(tmp_path: Path) -> None:
    # The policy would refuse the test's own script.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", make_page())
    dom = _open(page.replace("</body>", _PRESSES + "</body>"), tmp_path)
    body = _body(dom)
    assert body["data-ready"] == "true"
    # Two questions on; all 9 + 1 judgments and the pair are open; no script of a model has run.
    for part in ('"current":"q1"', '"open":11', '"title":"Evaluation by'):
        assert part in str(body["data-result"])
    assert "student 2: </pre>" in dom.text


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_browser_runs_the_pages_script_and_no_other(tmp_path: Path) -> None:
    evil = "<script>document.body.dataset.evil = 'ran'</script>"
    evil += "<img src=x onerror=\"document.body.dataset.evil = 'ran'\">"
    body = _body(_open(make_page().replace("</body>", evil + "</body>"), tmp_path))
    assert body["data-ready"] == "true" and "data-evil" not in body
