"""A real headless chromium for the tests of pages, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)
_FLAGS = (
    "--headless",
    # The pages are ours, and in containers the sandbox does not start.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
    # Nothing but this machine: a page that needs the network shows it.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
# Stays after the tests, for people to look at; git ignores it.
OUTPUT = Path(__file__).resolve().parent.parent / "var" / "test-output"
START_SECONDS = 60.0
_POLL_SECONDS = 0.2


class Browser:
    """One tab.

    Args:
        connection: the tab's DevTools socket.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last_id = 0

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its answer; events that come before it are left out."""
        self._last_id += 1
        self._connection.send(json.dumps({"id": self._last_id, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(START_SECONDS))
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def open(self, url: str) -> None:
        """Go to a page and wait until it and its scripts are loaded."""
        answer = self._send("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def html(self) -> str:
        """The document as it is now."""
        found: str = self.evaluate("document.documentElement.outerHTML")
        return found

    @property
    def text(self) -> str:
        """What a reader sees and the values of fields, in one line, without backticks."""
        found: str = self.evaluate(
            "[document.body.innerText, ...[...document.querySelectorAll('input, textarea')]"
            ".map((field) => field.value)].join('\\n')"
        )
        return " ".join(found.replace("`", "").split())

    def wait_for(self, script: str, timeout_seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_seconds
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_seconds} s: {script}; the page:\n{self.text}")
            time.sleep(_POLL_SECONDS)

    def wait_for_text(self, *parts: str, timeout_seconds: float = 60) -> None:
        """Wait until the page shows all these texts."""
        deadline = time.monotonic() + timeout_seconds
        while missing := [part for part in parts if part not in self.text]:
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_seconds} s: {missing}; the page:\n{self.text}")
            time.sleep(_POLL_SECONDS)

    def fill(self, label: str, value: str) -> None:
        """Type into the field of a label, as with the keyboard."""
        self.evaluate(
            f"""(() => {{
                const labels = [...document.querySelectorAll('label')];
                const label = labels.find((one) => one.innerText.startsWith({json.dumps(label)}));
                let field = document.getElementById(label.htmlFor);
                for (let near = label; !field; near = near.parentElement)
                    field = near.querySelector('input');
                field.focus();
                field.select();
            }})()"""
        )
        self._send("Input.insertText", text=value)
        self.wait_for(f"document.activeElement.value === {json.dumps(value)}")

    def press(self, button: str) -> None:
        """Click the button with this text."""
        self.evaluate(
            "[...document.querySelectorAll('button')]"
            f".find((one) => one.innerText.trim() === {json.dumps(button)}).click()"
        )

    def screenshot(self, name: str) -> Path:
        """Write what the window shows to `OUTPUT`; return the file."""
        OUTPUT.mkdir(parents=True, exist_ok=True)
        file = OUTPUT / name
        data = self._send("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))
        return file


@contextlib.contextmanager
def browser(profile: Path, size: tuple[int, int] = (1400, 1000)) -> Iterator[Browser]:
    """Start chromium and yield one tab of it; all its processes end with the block.

    Args:
        profile: a new directory for what the browser keeps.
        size: width and height of the window in pixels.
    """
    assert CHROMIUM is not None
    profile.mkdir(parents=True)
    command = [
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        f"--window-size={size[0]},{size[1]}",
    ]
    log = profile / "chromium.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        with connect(_tab(profile, process, log), max_size=None) as connection:
            yield Browser(connection)
    finally:
        # The launcher is a shell script in some packages; its session has the whole browser.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(30)


def _tab(profile: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of a new tab's DevTools socket."""
    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + START_SECONDS
    # Chromium writes the port and a path, on two lines.
    while not file.exists() or len(file.read_text().splitlines()) < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"chromium did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(_POLL_SECONDS)
    port = file.read_text().splitlines()[0]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        address: str = json.load(answer)["webSocketDebuggerUrl"]
    return address
