"""A small model answers MT-Bench's questions, and a server judges the answers over HTTP.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.mt_bench --help

The model answers in batches with transformers, as the stage `evaluate` has it answer. Then
`transformers serve` serves the same model on loopback, and judges each turn through the
OpenAI-compatible client that any judge is asked through. A model this small is no judge: what is
measured is the time of the answers, and that every judgment has a rating or a named reason.

Answers, judgments, a page to read and a JSON file of the figures go to the output directory, the
first two in FastChat's format. A second call goes on with what is missing there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.run import PEER_PYTHON, ROOT
from tasks.config.shared import GenerationConfig, RenderingConfig, RuntimeConfig
from tasks.data.history import LineStore
from tasks.data.rendering import Renderer
from tasks.evaluate.answers import LocalAnswerer, answer_questions
from tasks.evaluate.config import EndpointConfig, EvaluateConfig, JudgingConfig
from tasks.evaluate.endpoint import ChatEndpoint
from tasks.evaluate.judges import EndpointJudge, grade
from tasks.evaluate.judgments import Score, write_scores
from tasks.evaluate.prompts import OWN, load_judge_prompts
from tasks.evaluate.questions import ModelAnswer, Question, read_questions, write_answers
from tasks.evaluate.report import failure_counts, questions_section, render_page
from tasks.models.sources import resolve_model
from tasks.runtime.generation import Speaker
from tasks.tracking.run_log import ProgressDisplay
from tasks.workspace import Workspace

DATA: Final = ROOT.parent / "shared" / "data" / "mt_bench"
RENDERING: Final = RenderingConfig(max_prompt_tokens=1792, max_response_tokens=256)
LIMIT_MINUTES: Final = 60
_NAME: Final = "model"
_START_SECONDS: Final = 120.0
_JUDGE_SECONDS: Final = 1800.0
_JUDGE_TOKENS: Final = 192


@dataclass(frozen=True)
class Timed:
    """One part of the work; ``done`` items of ``asked`` were made by this call."""

    seconds: float
    done: int
    asked: int


@dataclass(frozen=True)
class Bench:
    """What all parts share.

    Args:
        output: directory of stores and results.
    """

    model_dir: Path
    questions: Sequence[Question]
    output: Path
    threads: int
    max_new_tokens: int

    def answer(self, batch_size: int) -> tuple[list[ModelAnswer], Timed]:
        """Answer both turns of all questions that the store lacks."""
        renderer = Renderer.load(self.model_dir, RENDERING)
        runtime = RuntimeConfig(device="cpu", cpu_threads=self.threads)
        generation = GenerationConfig(max_new_tokens=self.max_new_tokens, batch_size=batch_size)
        cfg = EvaluateConfig(generation=generation)
        display = ProgressDisplay("answers")
        with closing(LineStore(self.output / "answers.jsonl")) as store, closing(display):
            before = len(store.rows)
            begin = time.perf_counter()
            speaker = Speaker(self.model_dir, renderer, runtime)
            done = 0

            def count(n_new: int) -> None:
                nonlocal done
                done += n_new
                display.update(done, 2 * (len(self.questions) - before), "responses")

            answerer = LocalAnswerer(speaker, renderer, generation, count)
            found = answer_questions(_NAME, answerer, self.questions, cfg, store)
            seconds = time.perf_counter() - begin
            timed = Timed(seconds, len(store.rows) - before, len(self.questions))
        return [one.as_answer(_NAME) for one in found], timed

    def judge(self, answers: Sequence[ModelAnswer], server: str) -> tuple[list[Score], Timed]:
        """Have a server judge both turns of all answers that the store lacks."""
        endpoint = EndpointConfig(
            base_url=server,
            model=str(self.model_dir),
            api_key_env=None,
            max_concurrency=self.threads,
            timeout_seconds=_JUDGE_SECONDS,
        )
        # Asked again, a greedy model on one machine says the same.
        judging = JudgingConfig(max_new_tokens=_JUDGE_TOKENS, rating_attempts=1)
        display = ProgressDisplay("judgments")
        with closing(LineStore(self.output / "judgments.jsonl")) as store, closing(display):
            before = len(store.rows)
            begin = time.perf_counter()
            scores, _ = grade(
                EndpointJudge(ChatEndpoint(endpoint), judging),
                self.questions,
                {_NAME: answers},
                load_judge_prompts(OWN),
                judging,
                store,
                baseline=_NAME,
                seed=0,
                progress=display.update,
            )
            seconds = time.perf_counter() - begin
            timed = Timed(seconds, len(store.rows) - before, len(scores))
        return scores, timed

    def write(
        self, answers: Sequence[ModelAnswer], scores: Sequence[Score], times: dict[str, Timed]
    ) -> dict[str, Any]:
        """Write the results, and return the figures."""
        section = questions_section(self.questions, {_NAME: answers}, scores)
        figures: dict[str, Any] = {
            "benchmark": "mt-bench",
            "machine": machine.describe(self.threads),
            "model": self.model_dir.name,
            "n_questions": len(self.questions),
            "max_new_tokens": self.max_new_tokens,
            "times": {name: vars(one) for name, one in times.items()},
            "questions": section,
            "failures": failure_counts(scores),
        }
        write_answers(self.output / "model_answer.jsonl", answers)
        write_scores(self.output / "model_judgment.jsonl", scores)
        report = {
            "judge": self.model_dir.name,
            "scale": "1 to 10, by a model too small to judge",
            "questions": section,
            "held_out": {},
        }
        page = render_page(report, self.questions, {_NAME: answers}, scores, [], {})
        (self.output / "report.html").write_text(page, encoding="utf-8")
        (self.output / "bench-mt-bench.json").write_text(json.dumps(figures, indent=2) + "\n")
        return figures


@contextmanager
def served(python: Path, model_dir: Path, threads: int, log: Path) -> Iterator[str]:
    """Serve a model on loopback; yields the address, and ends the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-m", "transformers.cli.transformers", "serve", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = machine.thread_environment(threads) | {"HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--dtype", "float32"], env=environment, stdout=file, stderr=file
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    # No proxy leads to this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with direct.open(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"transformers serve does not answer; see {log}")


def print_figures(console: Console, figures: dict[str, Any]) -> None:
    """Print what was reached."""
    times, found = figures["times"], figures["questions"][_NAME]
    title = f"{figures['n_questions']} questions, two turns, {figures['model']}"
    table = Table("", "", title=title)
    answers, judgments = times["answers"], times["judgments"]
    minutes = f"{answers['seconds'] / 60:.1f} of at most {LIMIT_MINUTES}"
    table.add_row("minutes of answers", f"{minutes}, {answers['done']} of {answers['asked']} new")
    table.add_row("answers that end at the limit", str(found["truncated"]))
    minutes = f"{judgments['seconds'] / 60:.1f}"
    new = f"{judgments['done']} of {judgments['asked']} new"
    table.add_row("minutes of judging over HTTP", f"{minutes}, {new}")
    for name, value in found.items():
        if not isinstance(value, dict | list):
            table.add_row(name, str(value))
    for reason, count in figures["failures"].items():
        table.add_row(f"failed: {reason}", str(count))
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; ``--questions`` is required where the usual file is not there."""
    parser = argparse.ArgumentParser(prog="benchmarks.mt_bench", description=__doc__)
    parser.add_argument("--model", default="package:smollm2-135m", help="or a directory or hub id")
    parser.add_argument("--questions", type=Path, default=DATA / "question.jsonl")
    parser.add_argument("--max-questions", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--serve-python", type=Path, default=PEER_PYTHON, help="has openai")
    parser.add_argument("--output", type=Path, help="default: in the workspace")
    arguments = parser.parse_args()
    if not arguments.questions.is_file():
        parser.error("--questions: name a question.jsonl in FastChat's format")
    if not arguments.serve_python.is_file():
        parser.error(f"--serve-python: no {arguments.serve_python}; `make bench-mt-bench` makes it")
    return arguments


def main() -> None:
    """Answer, judge, print and write."""
    arguments = parse_arguments()
    workspace = Workspace.from_environment()
    workspace.cache_dir.mkdir(parents=True, exist_ok=True)
    model = resolve_model(arguments.model, cache_dir=workspace.cache_dir)
    questions = read_questions(arguments.questions)[: arguments.max_questions]
    # What is there is gone on with, so other settings are another directory.
    settings = [model.fingerprint, *(q.turns for q in questions), arguments.max_new_tokens]
    key = hashlib.sha256(json.dumps([*settings, arguments.batch_size]).encode()).hexdigest()[:12]
    output = (arguments.output or workspace.root / "bench-mt-bench") / key
    output.mkdir(parents=True, exist_ok=True)
    console = Console(width=120)
    if machine.is_busy():
        console.print("[yellow]Something else is running here: expect noise.[/]")
    bench = Bench(
        model.path,
        questions,
        output,
        arguments.threads,
        arguments.max_new_tokens,
    )
    answers, answered = bench.answer(arguments.batch_size)
    log = output / "server.log"
    with served(arguments.serve_python, bench.model_dir, arguments.threads, log) as server:
        scores, judged = bench.judge(answers, server)
    figures = bench.write(answers, scores, {"answers": answered, "judgments": judged})
    print_figures(console, figures)
    console.print(str(output))


if __name__ == "__main__":
    sys.exit(main())
