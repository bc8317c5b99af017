"""Every error that the project raises on purpose.

Each class is also a standard-library type, so callers may catch either, and survives pickling,
because errors cross process borders (Ray workers, Prefect results). The message has three parts:
what was found, what was expected, and what to do about it.
"""

from __future__ import annotations

from tasks.redaction import redact


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

    __str__ = RlhfError.__str__


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

    __str__ = RlhfError.__str__


class DiskFullError(WorkspaceError):
    """A disk that filled up while a run was at work; finished artefacts and checkpoints stay."""


class ClusterError(RlhfError, ConnectionError):
    """A Ray cluster, Prefect server or MLflow server that does not answer or lacks the resources
    asked for."""

    __str__ = RlhfError.__str__


class StageTimeoutError(RlhfError, TimeoutError):
    """A stage that took longer than it was given; its checkpoints are kept."""

    __str__ = RlhfError.__str__


class TrainingError(RlhfError, ArithmeticError):
    """Training that went wrong: a non-finite loss, a dead gradient, a worker that disagrees with
    its checkpoint."""


class MemoryLimitError(RlhfError, MemoryError):
    """A step that needed more memory than the device has; no step was taken."""

    __str__ = RlhfError.__str__


class WorkerLostError(RlhfError, ConnectionError):
    """A worker process, or its node, that died; what it held is gone, checkpoints are not."""

    __str__ = RlhfError.__str__


class RewardError(RlhfError, ValueError):
    """A reward that cannot be used: no variance, not a number, a reward function that fails."""


class PromotionError(RlhfError, ValueError):
    """A student that does not become the champion, or a rollback with nothing to go back to; the
    last champion stays."""
