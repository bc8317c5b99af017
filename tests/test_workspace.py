"""Servers of this machine are reached although a proxy is set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
import requests
from conftest import ROOT, SMALL_CHAIN

from tasks.workspace import bypass_proxies

# Nothing listens there.
DEAD_PROXY = "http://127.0.0.1:9"
OURS = "127.0.0.1,localhost,::1"


@pytest.fixture(autouse=True)
def no_proxy_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and nothing that goes around one."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    # So that what the function sets is taken back.
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server that always answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_every_client_reaches_this_machine(
    variable: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, DEAD_PROXY)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    bypass_proxies()
    assert httpx.get(url).status_code == requests.get(url, timeout=5).status_code == 200
    # Not urlopen, which would keep the proxy for all later tests.
    with urllib.request.build_opener().open(url, timeout=5) as reply:
        assert reply.status == 200
    # Other hosts still go through the proxy.
    with pytest.raises(requests.exceptions.ProxyError):
        requests.get("http://192.0.2.1/", timeout=5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"no_proxy": OURS, "NO_PROXY": OURS}),
        (
            {"NO_PROXY": "a.b, localhost"},
            dict.fromkeys(["no_proxy", "NO_PROXY"], "a.b,localhost,127.0.0.1,::1"),
        ),
        ({"no_proxy": "a", "NO_PROXY": "b"}, {"no_proxy": f"a,{OURS}", "NO_PROXY": f"b,{OURS}"}),
        ({"no_proxy": "*, a.b"}, dict.fromkeys(["no_proxy", "NO_PROXY"], f"*,a.b,{OURS}")),
        ({"NO_PROXY": "*"}, {"no_proxy": None, "NO_PROXY": "*"}),
    ],
)
def test_what_the_user_set_is_kept(
    given: dict[str, str], expected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", DEAD_PROXY)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        bypass_proxies()
        assert {name: os.environ.get(name) for name in expected} == expected


def test_without_a_proxy_nothing_is_set() -> None:
    bypass_proxies()
    assert not {"no_proxy", "NO_PROXY"} & set(os.environ)


@pytest.mark.slow
def test_a_run_reaches_its_prefect_and_mlflow_servers(mlflow_server: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HTTP_PROXY": DEAD_PROXY, "RLHF_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "flows.cli.main", "run", str(SMALL_CHAIN), "--only", "ingest"]
    command += ["-o", f"tracking.tracking_uri={mlflow_server}"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
