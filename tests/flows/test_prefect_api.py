"""A Prefect server that wants a login, or fails."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows.services import up as status_module
from flows.services.deploy import _ensure_pool, _finished, deploy
from flows.services.records import AUTH_VARIABLE, api_client
from flows.services.up import _query, read_status
from tasks.config.shared import TrackingConfig
from tasks.errors import ClusterError
from tasks.workspace import Workspace

LOGIN = "admin:a word: and more"
HEADER = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"


class _Guarded(BaseHTTPRequestHandler):
    """Answers 401 without the login, and with it 200 to GET and 503 to POST."""

    def _answer(self, code: int) -> None:
        code = code if self.headers.get("Authorization") == HEADER else 401
        self.send_response(code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(503)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def guarded() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Guarded)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_login_is_sent(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_VARIABLE, LOGIN)
    with api_client(guarded, 20) as client:
        _ensure_pool(client)


def test_a_refused_login_is_named(
    guarded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for login in (None, "admin:wrong"):
        if login is not None:
            monkeypatch.setenv(AUTH_VARIABLE, login)
        with pytest.raises(ClusterError, match=f"401.*{AUTH_VARIABLE}"):
            deploy("demo", guarded, Workspace(tmp_path))


def test_a_server_that_fails_does_not_hide_the_services(
    guarded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(AUTH_VARIABLE, LOGIN)
    with pytest.raises(ClusterError, match="503"):
        _query(guarded, ["RUNNING"])
    monkeypatch.setattr(status_module, "running_addresses", lambda workspace: (guarded, None))
    status = read_status(Workspace(tmp_path), TrackingConfig())
    assert [one.state for one in status.services] == ["stopped"] * 3
    assert status.is_broken and "503" in status.problems[0]


def test_deploying_that_takes_too_long_is_told() -> None:
    with pytest.raises(ClusterError, match=r"longer than 0\.2 s"):
        _finished([sys.executable, "-c", "import time; time.sleep(30)"], {}, 0.2)
