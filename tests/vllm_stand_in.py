"""A program with the command line of `vllm serve`, for machines that vLLM does not run on.

It serves one model directory over HTTP: chat template, greedy decoding by transformers, and the
answers of a server that ends, hangs or leaves a process behind. Arguments of its own: ``--ends``,
``--ends-when-asked``, ``--hangs``, ``--leaves-a-process PIDFILE``, ``--writes-environment FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from functools import cached_property
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


class Model:
    """A model that is loaded when it is first asked."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype="float32")
        return AutoTokenizer.from_pretrained(self.directory), model

    def complete(self, messages: list[dict[str, str]], max_tokens: int) -> tuple[str, str]:
        """Return the answer and why it ended."""
        tokenizer, model = self._loaded
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        end = tokenizer.eos_token_id
        output = model.generate(
            **ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=end, pad_token_id=end
        )
        said = output[0, ids["input_ids"].shape[1] :]
        reason = "stop" if end in said.tolist() else "length"
        return tokenizer.decode(said, skip_special_tokens=True), reason


def handler(model: Model, name: str, *, ends_when_asked: bool) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for a model under a name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, {"data": [{"id": name, "root": model.directory}]})

        def do_POST(self) -> None:
            if ends_when_asked:
                print("CUDA error: out of memory", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked["model"] != name:
                self._reply(404, {"error": f"The model {asked['model']} does not exist"})
                return
            text, reason = model.complete(asked["messages"], asked["max_tokens"])
            message = {"role": "assistant", "content": text}
            self._reply(200, {"choices": [{"message": message, "finish_reason": reason}]})

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--generation-config", choices=["vllm"], required=True)
    parser.add_argument("--ends", action="store_true")
    parser.add_argument("--ends-when-asked", action="store_true")
    parser.add_argument("--hangs", action="store_true")
    parser.add_argument("--writes-environment", type=Path)
    parser.add_argument("--leaves-a-process", type=Path)
    arguments = parser.parse_args()
    if arguments.ends:
        sys.exit("CUDA error: out of memory")
    if arguments.hangs:
        time.sleep(600)
    if arguments.leaves_a_process:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        arguments.leaves_a_process.write_text(str(child.pid))
    if arguments.writes_environment:
        arguments.writes_environment.write_text(json.dumps(dict(os.environ)))
    served = handler(
        Model(arguments.model),
        arguments.served_model_name,
        ends_when_asked=arguments.ends_when_asked,
    )
    HTTPServer((arguments.host, arguments.port), served).serve_forever()


if __name__ == "__main__":
    main()
