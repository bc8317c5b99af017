"""A real HTTP server on loopback that speaks chat completions, and fails as it is told."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

GOOD: Final = "Fine. Rating: [[7]]"
HANG_SECONDS: Final = 30.0


@dataclass
class Act:
    """What the server does with one request.

    Args:
        how: reply, garbage, empty, hang, cut, slow_stream.
    """

    how: str = "reply"
    status: int = 200
    text: str = GOOD
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Seen:
    """One request that arrived."""

    at: float
    content: str
    payload: dict[str, Any]
    key: str | None
    nth: int


# Gets the text of the last message, and how often it was asked before.
Script = Callable[[str, int], Act]


class ChatServer:
    """The server, and what it saw."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.busy = 0
        self.most_busy = 0
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = _Http(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wake whoever hangs."""
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def asked(self) -> Counter[str]:
        """How often each prompt was asked."""
        return Counter(seen.content for seen in self.seen)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that give up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    owner: ChatServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = payload["messages"][-1]["content"]
        owner = self.owner
        with owner.lock:
            nth = sum(seen.content == content for seen in owner.seen)
            key = self.headers.get("Authorization")
            owner.seen.append(Seen(time.monotonic(), content, payload, key, nth))
            owner.busy += 1
            owner.most_busy = max(owner.most_busy, owner.busy)
        try:
            self._act(owner.script(content, nth))
        finally:
            with owner.lock:
                owner.busy -= 1

    def _act(self, act: Act) -> None:
        if act.how == "hang":
            self.owner.closing.wait(HANG_SECONDS)
            self.close_connection = True
            return
        if act.seconds and act.how == "reply":
            time.sleep(act.seconds)
        body = (act.body if act.body is not None else _completion(act)).encode()
        self.send_response(act.status)
        for name, value in act.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if act.how == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif act.how == "slow_stream":
            for byte in body:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if self.owner.closing.wait(act.seconds / len(body)):
                    return
        else:
            self.wfile.write(body)


def _completion(act: Act) -> str:
    message = {"role": "assistant", "content": act.text}
    choice = {"index": 0, "message": message, "finish_reason": act.finish_reason}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage})


@contextmanager
def chat_server(script: Script = lambda content, nth: Act()) -> Iterator[ChatServer]:
    """Serve on a free port until the block ends."""
    server = ChatServer(script)
    try:
        yield server
    finally:
        server.close()
