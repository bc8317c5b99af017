"""A cluster is joined with a token or without, as it asks for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.runtime.session import asks_for_token

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
JOIN = """
import sys
from tasks.runtime.session import connect
from tasks.config.shared import RuntimeConfig
connect(RuntimeConfig(device="cpu", ray_address=sys.argv[1]))
import ray
class Adder:
    def add(self, a, b):
        return a + b
adder = ray.remote(num_cpus=0)(Adder).remote()
print("sum", ray.get(adder.add.remote(3, 4)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_actors_live_on_a_cluster_with_tokens_and_without(mode: str, tmp_path: Path) -> None:
    # Ray writes this file when it first starts a cluster here, so most users have one.
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("5" * 64)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**environment, "RAY_AUTH_MODE": mode},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None and cluster.stdin is not None
        address = next(line.strip() for line in cluster.stdout if line[:1].isdigit())
        assert asks_for_token(address) == (mode == "token")
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        cluster.stdin.close()
    assert joined.returncode == 0 and "sum 7" in joined.stdout, joined.stderr[-2000:]


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "127.0.0.1:9"])
def test_what_cannot_be_asked_may_want_a_token(address: str) -> None:
    assert asks_for_token(address)
