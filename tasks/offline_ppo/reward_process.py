"""A user's reward function in a process of its own, with limits on time and memory.

Run as a program, this file is that process; it imports nothing but the standard library and the
user's file. A function that hangs, asks for too much memory or ends its process is a named error of
the run, and the file is imported nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tasks.errors import MissingInputError, RewardError

if TYPE_CHECKING:
    from tasks.data.hh import Pair

RESPONSES_PER_PROCESS: Final = 4000
_PARAMETERS: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class Judged:
    """A response as a reward function sees it.

    Args:
        data_source: subset.
        solution_str: the response.
        ground_truth: the dataset's chosen response to the same prompt.
        extra_info: ``prompt`` as messages, ``pair_id``, ``side``.
        where: file and line, for messages.
    """

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any]
    where: str

    @classmethod
    def of(cls, pair: Pair, side: str, response: str) -> Judged:
        """Build it for a response to the prompt of a pair.

        Args:
            pair: gives prompt, subset and chosen response.
            side: ``chosen``, ``rejected``, or where else the response comes from.
            response: its text.
        """
        prompt = [{"role": turn.role, "content": turn.content} for turn in pair.prompt]
        extra = {"prompt": prompt, "pair_id": pair.pair_id, "side": side}
        where = f"{side} response of {pair.source_file}:{pair.source_line}"
        return cls(pair.subset, response, pair.chosen, extra, where)


@dataclass(frozen=True)
class RewardFunction:
    """A function of a Python file, by verl's signature, and its limits.

    ``reward_fn(data_source, solution_str, ground_truth, extra_info) -> float``: subset, response,
    the chosen response, and ``{"prompt", "pair_id", "side"}``.

    Args:
        seconds: longest time for one response, and for importing the file.
        memory_gib: what the process may hold (Linux).
    """

    path: str
    name: str = "reward_fn"
    seconds: float = 60.0
    memory_gib: float = 8.0

    def check(self) -> None:
        """Import the file and look at the function.

        Raises:
            MissingInputError: no such file.
            RewardError: it does not import, lacks the function, or that takes other arguments.
        """
        with _Process(self):
            pass

    def scores(
        self, responses: Sequence[Judged], per_process: int = RESPONSES_PER_PROCESS
    ) -> list[float]:
        """Score responses, many of them in several processes.

        Raises:
            RewardError: as in `check`; or the function raised, took too long, ended its process or
                returned something that is not a finite number. Names the row.
        """
        starts = range(0, len(responses), per_process)
        parts = [responses[start : start + per_process] for start in starts]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            scored = list(threads.map(self._score_part, parts))
        return [value for part in scored for value in part]

    def _score_part(self, responses: Sequence[Judged]) -> list[float]:
        with _Process(self) as process:
            return [process.score(response) for response in responses]


class _Process:
    """The process of one function and the pipe to it."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._file = Path(function.path).expanduser()
        if not self._file.is_file():
            raise MissingInputError(
                f"No reward function file {self._file}",
                "a Python file",
                "correct offline_ppo.reward.function_path",
            )
        self._pipe, theirs = Pipe()
        memory = str(int(function.memory_gib * 2**30))
        arguments = [str(self._file), function.name, memory, str(theirs.fileno())]
        # The root of the project is known; what else is on the path is the user's.
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.offline_ppo.reward_process", *arguments],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def __enter__(self) -> _Process:
        try:
            refused = self._answer(f"{self._file}").get("refused")
            if refused is not None:
                raise RewardError(*refused)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def score(self, response: Judged) -> float:
        where = f"reward function on the {response.where}"
        given = {name: getattr(response, name) for name in _PARAMETERS}
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send_bytes(json.dumps(given).encode())
        answer = self._answer(where)
        if "raised" in answer:
            raise RewardError(f"{where} raised {answer['raised']}", "a number", "mend the function")
        value = float(answer["value"])
        if not math.isfinite(value):
            raise RewardError(f"{where} returned {value}", "a finite number", "mend the function")
        return value

    def _answer(self, where: str) -> dict[str, Any]:
        if not self._pipe.poll(self._function.seconds):
            raise RewardError(
                f"{where} took longer than {self._function.seconds:g} s",
                "an answer within offline_ppo.reward.function_seconds",
                "mend the function, or raise the limit",
            )
        try:
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RewardError(
                f"{where}: its process ended with {how}",
                "a function that returns a number",
                "mend the function; with signal 9 the machine had no memory left for it",
            ) from error
        return answer


def _load(file: Path, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"rlhf_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(
            f"{file} does not import: {error!r}", "a module that imports", "mend the file"
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise RewardError(
            f"{file} has no function {name!r}", name, "correct offline_ppo.reward.function_name"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(_PARAMETERS))
    except TypeError as error:
        raise RewardError(
            f"{name} in {file} cannot be called: {error}",
            f"parameters {', '.join(_PARAMETERS)}",
            "rename them",
        ) from error
    return function


def _serve(file: Path, name: str, memory_bytes: int, pipe: Connection) -> None:
    """Answer until the other end closes the pipe."""
    if sys.platform == "linux":
        # A function that hangs does not outlive the run.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    # What the function prints is not mixed with what the run prints for programs.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    limit = f"it asked for more than {memory_bytes / 2**30:g} GiB of memory"

    def answer(**said: Any) -> None:
        pipe.send_bytes(json.dumps(said).encode())

    try:
        function = _load(file, name)
    except RewardError as error:
        answer(refused=[error.found, error.expected, error.fix])
        return
    answer(ready=True)
    with contextlib.suppress(EOFError):
        while True:
            given = json.loads(pipe.recv_bytes())
            try:
                value = float(function(**given))  # by name, as verl calls it
            except MemoryError:
                answer(raised=f"MemoryError: {limit} (offline_ppo.reward.function_memory_gib)")
            except Exception as error:
                answer(raised=repr(error))
            else:
                answer(value=value)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Connection(int(sys.argv[4])))
