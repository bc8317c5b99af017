"""Artefacts that were deleted and made again: the same fingerprint, at another path."""

from __future__ import annotations

from pathlib import Path

from tasks.artifacts import MANIFEST_NAME, Manifest, ParentRef, read_manifest
from tasks.errors import ArtifactError, MissingInputError


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
