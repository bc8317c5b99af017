"""Every error that the project raises on purpose.

Each class is also a standard-library type, so callers may catch either, and survives pickling,
because errors cross process borders (Ray workers, Prefect results). The message has three parts:
what was found, what was expected, and what to do about it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Final

# Keys and passwords are left out of what is recorded, logged and printed.

HIDDEN: Final = "[redacted]"
_MIN_CHARS: Final = 8
_SECRET_VARIABLE: Final = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_SECRET_FIELD: Final = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|token|access_key|credentials?)$", re.IGNORECASE
)
_USER_INFO: Final = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]+@")
# As the services write their keys: a directory or a model of the hub may begin with `hf-`, too.
_PATTERNS: Final = (
    re.compile(r"\bsk-(?=[\w-]*[A-Za-z0-9]{16})(?=[\w-]*\d)[A-Za-z0-9_-]{20,}"),
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    re.compile(r"\bgh[oprsu]_[A-Za-z0-9]{30,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{30,}"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}"),
    re.compile(r"\bxox[abprs]-\d+-[A-Za-z0-9-]{10,}"),
    re.compile(r"\bAKIA[A-Z0-9]{16}\b"),
    re.compile(r"(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?<=[?&])(api_?key|token|access_token|password|sig|signature)=[^&\s'\"]+", re.I),
)
# Tags that the project reads again: a changed one leads to nothing.
_PLACE_TAG: Final = re.compile(r"artifact\.path|fingerprint|process|workspace|outcome\..+")
_UPSTREAM_TAG: Final = re.compile(r"upstream\..+\.(path|fingerprint|run_id)")
_LOGGERS: Final = ("prefect", "prefect.flow_runs", "prefect.task_runs", "prefect.engine", "rlhf")


def redact(text: str) -> str:
    """Return a text without passwords in addresses, keys of known forms, and the values of
    environment variables whose names say that they are secret."""
    shown = _redact_forms(str(text))
    for name, value in os.environ.items():
        if len(value) >= _MIN_CHARS and value in shown and _SECRET_VARIABLE.search(name.upper()):
            shown = shown.replace(value, f"[{name}]")
    return shown


def _redact_forms(text: str) -> str:
    shown = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    for pattern in _PATTERNS:
        shown = pattern.sub(HIDDEN, shown)
    return shown


def redact_tag(key: str, value: str) -> str:
    """Return a tag's value, redacted unless the project finds an artefact by it.

    A path may hold the value of a secret variable: user, password and directory of a database
    are often one word. An upstream may be an address, which is kept without its password.
    """
    if _PLACE_TAG.fullmatch(key):
        return str(value)
    return _redact_forms(str(value)) if _UPSTREAM_TAG.fullmatch(key) else redact(value)


def without_credentials(address: str) -> str:
    """Return an address without user name and password."""
    return _USER_INFO.sub(r"\1", address)


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose secret fields and texts are redacted, nested ones too."""
    return {key: _redact_value(key, value) for key, value in config.items()}


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact_config(value)
    if isinstance(value, list | tuple):
        return [_redact_value(key, entry) for entry in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _SECRET_FIELD.search(str(key)) else redact(value)


class _RedactingFilter(logging.Filter):
    """Redacts message and traceback of a record before any handler sees them."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = redact(message)
        if shown != message:
            record.msg, record.args = shown, ()
        if record.exc_info and not record.exc_text:
            # Formatters take the text that is there instead of making their own.
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


_FILTER: Final = _RedactingFilter()


def guard_logs() -> None:
    """Redact what runs log; safe to call again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)


def sentence(text: str) -> str:
    """Return a text that ends like a sentence: with one mark, whatever it came with."""
    bare = text.rstrip()
    if bare.endswith(("...", "?", "!")):
        return bare
    return bare.rstrip(".") + "."


class RlhfError(Exception):
    """Base of the project's errors.

    Args:
        found: what was found, naming file, line, field or step.
        expected: what would have been right; may be empty when ``found`` says it.
        fix: what the user can do about it.
    """

    def __init__(self, found: str, expected: str = "", fix: str = "") -> None:
        super().__init__(found, expected, fix)
        self.found = found
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        parts = [sentence(self.found)]
        if self.expected:
            parts.append(sentence(f"Expected: {self.expected}"))
        if self.fix:
            parts.append(sentence(f"Fix: {self.fix}"))
        # A message may name an address with a password; it ends up in logs and tags.
        return redact(" ".join(parts))


class ConfigError(RlhfError, ValueError):
    """A configuration that cannot work: unknown key, wrong type, values that contradict each
    other."""


class MissingInputError(RlhfError, FileNotFoundError):
    """A file, directory, model or upstream artefact that is not there."""


class DataError(RlhfError, ValueError):
    """Input rows or a dataset that cannot be used."""


class RendererMismatchError(RlhfError, ValueError):
    """Two artefacts that were made with different chat templates, special tokens or lengths."""


class ArtifactError(RlhfError, ValueError):
    """An artefact that is torn, edited, of another kind or of another schema version."""


class ModelError(RlhfError, ValueError):
    """A model directory or hub id that cannot be used: no tokenizer, no chat template, wrong
    architecture."""


class WorkspaceError(RlhfError, OSError):
    """A workspace that cannot be written: read-only, full, or not a directory."""


class DiskFullError(WorkspaceError):
    """A disk that filled up while a run was at work; finished artefacts and checkpoints stay."""


class ClusterError(RlhfError, ConnectionError):
    """A Ray cluster, Prefect server or MLflow server that does not answer or lacks the resources
    asked for."""


class StageTimeoutError(RlhfError, TimeoutError):
    """A stage that took longer than it was given; its checkpoints are kept."""


class TrainingError(RlhfError, ArithmeticError):
    """Training that went wrong: a non-finite loss, a dead gradient, a worker that disagrees with
    its checkpoint."""


class MemoryLimitError(RlhfError, MemoryError):
    """A step that needed more memory than the device has; no step was taken."""


class WorkerLostError(RlhfError, ConnectionError):
    """A worker process, or its node, that died; what it held is gone, checkpoints are not."""


class RewardError(RlhfError, ValueError):
    """A reward that cannot be used: no variance, not a number, a reward function that fails."""


class PromotionError(RlhfError, ValueError):
    """A student that does not become the champion, or a rollback with nothing to go back to; the
    last champion stays."""
