"""On a cluster with GPUs the same code asks Ray for one per rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.runtime.session import worker_environment

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).with_name("gpu_request.py")


def test_each_rank_gets_a_gpu_of_its_own() -> None:
    # Other tests may have hidden all GPUs from this process.
    hidden = worker_environment("cpu").keys() - worker_environment("cuda").keys()
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=SCRIPT.parents[2],
        env={name: value for name, value in os.environ.items() if name not in hidden},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "cuda"
    assert found["layout"] == [1, 1]
    ranks = sorted(found["ranks"], key=lambda rank: rank["rank"])
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [rank["gpus"] for rank in ranks] == [1, 1]
    # The CPU platform is not forced on them, and the GPU is not hidden.
    assert [rank["platform"] for rank in ranks] == [None, None]
    assert all(rank["visible"] for rank in ranks)
    assert len({rank["node"] for rank in ranks}) == 2
    # In two groups each is rank 0, and has the GPU of another node.
    assert [(rank["rank"], rank["gpus"]) for rank in found["apart"]] == [(0, 1), (0, 1)]
    assert len({rank["node"] for rank in found["apart"]}) == 2
    assert "4 GPUs for runtime.placement: separate" in found["refused"]
