"""Artefacts: what passes between stages, written whole or not at all, verified before use."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.config.shared import STAGES
from tasks.errors import ArtifactError, MissingInputError, WorkspaceError

# What a reward model's artefact says of its components: ``reward.json``.

_FILE: Final = "reward.json"


@dataclass(frozen=True)
class RewardComponent:
    """One kind of reward: the mean score of its members.

    Args:
        name: for instance ``preference`` or ``harmlessness``.
        member_dirs: one-label token classifiers in transformers format, at least one.
        member_means: mean score of the training responses by each member.
        std: standard deviation of the averaged scores of the same responses.
    """

    name: str
    member_dirs: tuple[Path, ...]
    member_means: tuple[float, ...]
    std: float

    @property
    def mean(self) -> float:
        """Mean of the averaged scores of the training responses."""
        return sum(self.member_means) / len(self.member_means)


def read_reward_components(directory: Path) -> dict[str, RewardComponent]:
    """Return what `write_reward_components` wrote, in its order."""
    loaded = json.loads((directory / _FILE).read_text())
    return {
        name: RewardComponent(
            name,
            tuple(directory / member["directory"] for member in record["members"]),
            tuple(member["mean"] for member in record["members"]),
            record["std"],
        )
        for name, record in loaded["components"].items()
    }


def write_reward_components(directory: Path, components: Iterable[RewardComponent]) -> None:
    """Write the record beside the members, which must lie under ``directory``."""
    records = {
        component.name: {
            "members": [
                {"directory": str(member.relative_to(directory)), "mean": mean}
                for member, mean in zip(component.member_dirs, component.member_means, strict=True)
            ],
            "std": component.std,
        }
        for component in components
    }
    text = json.dumps({"components": records}, indent=2) + "\n"
    (directory / _FILE).write_text(text, encoding="utf-8")


MANIFEST_NAME = "artifact.json"
SCHEMA_VERSION = 1
_STORAGE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOTDIR)


class FileEntry(BaseModel):
    """Size and checksum of one payload file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: int
    sha256: str


class ParentRef(BaseModel):
    """One upstream of an artefact: another artefact, or a raw source (a file, a model)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    fingerprint: str
    path: str
    mlflow_run_id: str | None = None


class Manifest(BaseModel):
    """What ``artifact.json`` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    schema_version: int
    stage: str
    fingerprint: str
    created_at: str
    config: dict[str, Any]
    parents: dict[str, ParentRef]
    counts: dict[str, int]
    metrics: dict[str, float]
    renderer_fingerprint: str | None
    package_versions: dict[str, str]
    git_commit: str | None
    mlflow_run_id: str | None
    prefect_flow_run_id: str | None
    files: dict[str, FileEntry]


@dataclass
class Draft:
    """The part of a manifest that a stage fills in while it works; numbers must be finite."""

    kind: str
    stage: str
    fingerprint: str
    config: dict[str, Any]
    parents: dict[str, ParentRef] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    renderer_fingerprint: str | None = None
    package_versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    mlflow_run_id: str | None = None
    prefect_flow_run_id: str | None = None


@dataclass(frozen=True)
class Artifact:
    """A verified artefact on disk; subclasses name the kinds."""

    path: Path
    manifest: Manifest
    KIND: ClassVar[str] = ""

    @property
    def fingerprint(self) -> str:
        """Identity of the content: stage config, upstreams, code version."""
        return self.manifest.fingerprint

    @property
    def content_hash(self) -> str:
        """Hash of the payload itself, for whatever is computed from its bytes."""
        entries = sorted((name, entry.sha256) for name, entry in self.manifest.files.items())
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def as_parent(self) -> ParentRef:
        """Return the reference that a downstream manifest keeps."""
        return ParentRef(
            kind=self.manifest.kind,
            fingerprint=self.fingerprint,
            path=str(self.path),
            mlflow_run_id=self.manifest.mlflow_run_id,
        )


@dataclass(frozen=True)
class PreferenceDataset(Artifact):
    """Validated pairs: ``{train,validation,test}.parquet`` and ``quarantine.parquet``."""

    KIND: ClassVar[str] = "preference_dataset"

    def split_path(self, split: str) -> Path:
        """Return the Parquet file of one split."""
        return self.path / f"{split}.parquet"


@dataclass(frozen=True)
class PolicyCheckpoint(Artifact):
    """A causal language model in transformers format under ``model/``."""

    KIND: ClassVar[str] = "policy_checkpoint"

    @property
    def model_dir(self) -> Path:
        """Directory that transformers loads."""
        return self.path / "model"


@dataclass(frozen=True)
class RewardModelCheckpoint(Artifact):
    """Reward components: members under ``members/<component>-<index>/``, statistics in
    ``reward.json``."""

    KIND: ClassVar[str] = "reward_model_checkpoint"

    @property
    def components(self) -> dict[str, RewardComponent]:
        """What `write_reward_components` wrote, in its order."""
        return read_reward_components(self.path)

    @property
    def model_dir(self) -> Path:
        """The first member, for what starts from the reward model's backbone."""
        return next(iter(self.components.values())).member_dirs[0]


@dataclass(frozen=True)
class StudentAdapter(Artifact):
    """A PEFT adapter under ``adapter/`` and the same model merged under ``merged/``."""

    KIND: ClassVar[str] = "student_adapter"

    @property
    def adapter_dir(self) -> Path:
        """Directory that peft loads."""
        return self.path / "adapter"

    @property
    def model_dir(self) -> Path:
        """The merged model, which transformers loads."""
        return self.path / "merged"


@dataclass(frozen=True)
class EvalReport(Artifact):
    """Answers, judgments and scores: ``report.json`` beside FastChat-format files."""

    KIND: ClassVar[str] = "eval_report"

    @property
    def report(self) -> dict[str, Any]:
        """The scores."""
        loaded: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return loaded


A = TypeVar("A", bound=Artifact)
KINDS: dict[str, type[Artifact]] = {
    kind.KIND: kind
    for kind in (
        PreferenceDataset,
        PolicyCheckpoint,
        RewardModelCheckpoint,
        StudentAdapter,
        EvalReport,
    )
}


def fingerprint(
    stage: str, code_version: int, identity: Mapping[str, Any], parents: Mapping[str, str]
) -> str:
    """Hash what decides a stage's result.

    Args:
        stage: stem of the stage.
        code_version: raised by hand when a stage's code starts to give another result.
        identity: config fields that change the result (`identity_fields`).
        parents: fingerprint of each upstream by name.

    Returns:
        64 hexadecimal digits.
    """
    document = {"stage": stage, "code": code_version, "config": identity, "parents": dict(parents)}
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in blocks."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def build_artifact(parent_dir: Path, draft: Draft) -> Iterator[Path]:
    """Yield a temporary directory; on a clean exit make it the artefact, on an error remove it.

    The final name is ``<fingerprint[:16]>-<UTC time>-<random>``: a rerun never replaces what
    another run refers to. Find it afterwards with `newest_artifact`.

    Args:
        parent_dir: directory of the stage's artefacts.
        draft: filled in by the stage until the exit.

    Raises:
        WorkspaceError: the directory cannot be written.
    """
    name = f"{draft.fingerprint[:16]}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:6]}"
    try:
        with appearing_directory(parent_dir / name) as temporary:
            yield temporary
            _write_manifest(temporary, draft)
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        raise WorkspaceError(
            f"Writing {error.filename or parent_dir / name} failed: {error.strerror}",
            "a writable workspace with free space",
            "free space or choose another RLHF_HOME",
        ) from error


def _write_manifest(directory: Path, draft: Draft) -> None:
    files = {
        str(path.relative_to(directory)): FileEntry(
            bytes=path.stat().st_size, sha256=file_sha256(path)
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        files=files,
        **vars(draft),
    )
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False)
    (directory / MANIFEST_NAME).write_text(text + "\n")


def read_manifest(path: Path) -> Manifest:
    """Read ``artifact.json`` without checking the payload.

    Raises:
        MissingInputError: no such directory or no manifest in it.
        ArtifactError: the manifest is torn or of another schema version.
    """
    file = path / MANIFEST_NAME
    if not file.is_file():
        raise MissingInputError(
            f"No artefact at {path}",
            f"a directory with {MANIFEST_NAME}",
            "give the path that a stage printed",
        )
    try:
        content = json.loads(file.read_text())
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ArtifactError(
                f"{file} has schema version {version}",
                str(SCHEMA_VERSION),
                "make it again with this version",
            )
        return Manifest.model_validate(content)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, ValidationError) as error:
        raise ArtifactError(
            f"{file} is torn or edited: {error}", "a complete manifest", _way_out(path)
        ) from error


def load_artifact(path: Path, kind: type[A]) -> A:
    """Verify an artefact and return its handle.

    Raises:
        MissingInputError: nothing is there.
        ArtifactError: another kind, a missing or extra file, or a checksum that does not match.
    """
    manifest = read_manifest(path)
    if manifest.kind != kind.KIND:
        raise ArtifactError(
            f"{path} holds a {manifest.kind}", f"a {kind.KIND}", f"give the path of a {kind.KIND}"
        )
    present = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {MANIFEST_NAME}
    for odd in sorted(present ^ set(manifest.files)):
        state = "is not in the manifest" if odd in present else "is missing"
        raise ArtifactError(
            f"{path / odd} {state}", "exactly the files of the manifest", _way_out(path)
        )
    for name, entry in manifest.files.items():
        _verify_file(path, name, entry)
    return kind(path=path, manifest=manifest)


def load_any_artifact(path: Path) -> Artifact:
    """Verify an artefact of whatever kind it says it is."""
    name = read_manifest(path).kind
    if name not in KINDS:
        raise ArtifactError(
            f"{path} holds an unknown kind {name!r}", f"one of {sorted(KINDS)}", _way_out(path)
        )
    return load_artifact(path, KINDS[name])


def _verify_file(path: Path, name: str, entry: FileEntry) -> None:
    file = path / name
    size = file.stat().st_size
    if size != entry.bytes:
        raise ArtifactError(f"{file} has {size} bytes", f"{entry.bytes} bytes", _way_out(path))
    digest = file_sha256(file)
    if digest != entry.sha256:
        raise ArtifactError(
            f"{file} has SHA-256 {digest[:12]}...", f"{entry.sha256[:12]}...", _way_out(path)
        )


def _way_out(path: Path) -> str:
    """Say how to get a sound artefact again; its stage is the name of the directory around it."""
    stage = path.absolute().parent.name
    if stage not in STAGES:
        return "run the stage that made it again, or restore the directory"
    return f"make it again with `rlhf run CONFIG --from {stage}`, or restore the directory"


def newest_artifact(parent_dir: Path, kind: type[A], wanted: str) -> A | None:
    """Return the newest verified artefact with this fingerprint, or None when there is none.

    Raises:
        ArtifactError: the newest one is there but torn or edited.
    """
    found = sorted(
        (path for path in parent_dir.glob(f"{wanted[:16]}-*") if path.is_dir()),
        key=lambda path: path.name,
    )
    for path in reversed(found):
        artifact = load_artifact(path, kind)
        if artifact.fingerprint == wanted:
            return artifact
    return None


# Artefacts that were deleted and made again: the same fingerprint, at another path.


def standing_path(parent: ParentRef) -> Path:
    """Return where an upstream artefact lies: where it was, or else where it was made again.

    The newest artefact of its fingerprint in the same directory stands for one that is gone; where
    there is none, the path is the recorded one.
    """
    path = Path(parent.path)
    if (path / MANIFEST_NAME).is_file() or not parent.fingerprint:
        return path
    found = sorted(path.parent.glob(f"{parent.fingerprint[:16]}-*"), key=lambda entry: entry.name)
    for candidate in reversed(found):
        try:
            if read_manifest(candidate).fingerprint == parent.fingerprint:
                return candidate
        except (MissingInputError, ArtifactError):
            # Not whole, so it stands for nothing.
            continue
    return path


def likeness(first: Manifest | None, again: Manifest) -> str:
    """Say whether an artefact that was made again has the bits of the first one."""
    if first is None:
        return "whether with the same bits is not recorded"
    names = {**first.files, **again.files}
    odd = sorted(name for name in names if first.files.get(name) != again.files.get(name))
    return f"with other bits in {', '.join(odd)}" if odd else "with the same bits"


# Files and directories that are written whole or not at all.

_SUFFIX = ".unfinished"


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that gets its name when the block ends well.

    What is unfinished carries the name of its process: it goes when the writing fails, and what a
    process left that was killed goes with the next writing of the same file.
    """
    ours = f".{path.name}.{socket.gethostname()}."
    temporary = path.with_name(f"{ours}{os.getpid()}{_SUFFIX}")
    _sweep(path.parent, ours)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def appearing_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory that gets its name when the block ends well, and goes when it fails."""
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:6]}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for entry in (*temporary.rglob("*"), temporary):
            _sync(entry)
        temporary.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        WorkspaceError: the directory cannot be written.
    """
    try:
        with appearing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkspaceError(
            f"{path} cannot be written: {error.strerror or error}",
            "a writable workspace with room",
            "free space, or make its directory writable",
        ) from error


def _sweep(directory: Path, ours: str) -> None:
    """Remove what dead processes of this machine left."""
    for file in directory.iterdir():
        pid = file.name.removeprefix(ours).removesuffix(_SUFFIX)
        if (
            file.name == f"{ours}{pid}{_SUFFIX}"
            and pid.isdigit()
            and not psutil.pid_exists(int(pid))
        ):
            file.unlink(missing_ok=True)
