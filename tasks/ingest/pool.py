"""Worker processes that parse chunks.

A worker is `tasks.ingest.worker` run as a program. It knows its parent by a pair of pipes
alone: when the parent is gone, however it ended, the worker reads an end of file and ends, too. It
does not import the parent's main module, unlike multiprocessing's workers, so it starts in a tenth
of a second.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import tasks
from tasks.errors import ClusterError
from tasks.ingest.chunks import ChunkResult, ParseJob, ParseOptions
from tasks.ingest.parser import ChunkParser

# How far ahead of the slowest chunk the others may be, per worker.
_AHEAD: Final = 4

_WORKER_ENVIRONMENT: Final = {
    # One thread each: the processes are what uses the cores.
    "OMP_NUM_THREADS": "1",
    "ARROW_NUM_THREADS": "1",
    # Chunks are alike: memory that goes back to the system has to be asked for, and cleared, anew.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**24),
    "MIMALLOC_PURGE_DELAY": "-1",
}


def parse_chunks(
    jobs: Iterator[ParseJob], options: ParseOptions, n_workers: int
) -> Iterator[ChunkResult]:
    """Yield the result of each job, in the order of the jobs, whatever the number of workers.

    Raises:
        ClusterError: a worker process ended.
        RlhfError: whatever reading the source or parsing raises.
    """
    if n_workers <= 1:
        parser = ChunkParser(options)
        for job in jobs:
            yield parser.parse(job)
        return
    pool = _Pool(jobs, options, n_workers)
    try:
        yield from pool.results()
    finally:
        pool.close()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, options: ParseOptions) -> None:
        self._pipe, theirs = Pipe()
        root = str(Path(tasks.__file__).resolve().parents[1])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= _WORKER_ENVIRONMENT
        command = [sys.executable, "-m", "tasks.ingest.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._pipe.send(options)

    def parse(self, job: ParseJob) -> ChunkResult:
        try:
            self._pipe.send_bytes(pickle.dumps(job, pickle.HIGHEST_PROTOCOL))
            answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            code = self._process.wait()
            raise ClusterError(
                f"The process that parsed {job.file.path} ended with exit code {code}",
                "a process that stays until the source is read",
                "look for a memory limit, and lower ingest.workers",
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, ChunkResult)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


class _Pool:
    """A thread for each worker takes the next job, waits for its result, and takes the next."""

    def __init__(self, jobs: Iterator[ParseJob], options: ParseOptions, n_workers: int) -> None:
        self._jobs = jobs
        self._ahead = _AHEAD * n_workers
        self._next_job = threading.Lock()
        self._changed = threading.Condition()
        self._results: dict[int, ChunkResult] = {}
        self._n_taken = 0
        self._n_yielded = 0
        self._is_last = False
        self._error: BaseException | None = None
        self._workers = [_Worker(options) for _ in range(n_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> Iterator[ChunkResult]:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._error is not None:
                    raise self._error
                if self._n_yielded not in self._results:
                    return
                result = self._results.pop(self._n_yielded)
                self._n_yielded += 1
                self._changed.notify_all()
            yield result

    def close(self) -> None:
        with self._changed:
            self._is_last = True
            self._ahead = 0
            self._changed.notify_all()
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join()

    def _has_news(self) -> bool:
        is_over = self._is_last and self._n_yielded >= self._n_taken
        return self._error is not None or self._n_yielded in self._results or is_over

    def _serve(self, worker: _Worker) -> None:
        try:
            while (job := self._take()) is not None:
                result = worker.parse(job)
                with self._changed:
                    self._results[result.index] = result
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                if self._error is None:
                    self._error = error
                self._changed.notify_all()

    def _take(self) -> ParseJob | None:
        """Return the next job, or None when there is none or nobody waits for it any more."""
        with self._next_job:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_last or self._n_taken - self._n_yielded < self._ahead
                )
                if self._is_last or self._error is not None:
                    return None
            job = next(self._jobs, None)
            with self._changed:
                if job is None:
                    self._is_last = True
                else:
                    self._n_taken += 1
                self._changed.notify_all()
            return job


def serve_parent(descriptor: int) -> None:
    """Parse what the parent sends through the pipe until it is gone."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    # Rows make no cycles, but so many objects that looking for cycles takes a tenth of the time.
    gc.disable()
    try:
        parser = ChunkParser(pipe.recv())
        while True:
            job = pickle.loads(pipe.recv_bytes())
            try:
                answer: Any = parser.parse(job)
            except Exception as error:
                # The parent raises it again, with the source in its message.
                answer = error
            pipe.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
