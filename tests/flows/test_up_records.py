"""What `rlhf up` makes of the records of services."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flows.services.records import ServiceRecord, read_record, worker
from flows.services.up import _has_addresses, up
from tasks.errors import ConfigError
from tasks.workspace import Workspace


@pytest.mark.parametrize("content", [b'{"name": "prefect", "pid": ', b"\xff\xfe\xe1", b"[]", b""])
def test_a_record_that_cannot_be_read_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "prefect.json").write_bytes(content)
    assert read_record(tmp_path, "prefect") is None


def test_a_worker_knows_one_set_of_addresses(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    service = worker(workspace, "http://127.0.0.1:4200/api", "http://127.0.0.1:5000")
    record = ServiceRecord(
        name="worker",
        pid=1,
        started_at=time.time(),
        port=None,
        log_path=str(service.log_path),
        environment=dict(service.environment),
    )
    assert _has_addresses(record, service)
    moved = worker(workspace, "http://127.0.0.1:4200/api", "http://127.0.0.1:5001")
    assert not _has_addresses(record, moved)
    # Written by a version that did not keep the environment.
    assert not _has_addresses(record.model_copy(update={"environment": {}}), service)


def test_one_port_for_both_servers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="Port 4311 is given to Prefect and to MLflow"):
        up("demo", 4311, 4311)
