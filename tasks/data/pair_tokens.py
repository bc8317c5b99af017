"""Token ids of pairs, by the one renderer, for the optional columns of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts import PreferenceDataset
from tasks.config import RenderingConfig
from tasks.data.hh import Message
from tasks.data.rendering import Renderer, ResponseTooLong
from tasks.data.schemas import PAIR_SCHEMA, TOKEN_FIELDS, open_parquet, renderer_of
from tasks.errors import DataError, RendererMismatchError

Ids = tuple[int, ...]


def load_renderer(model_dir: str, rendering: Mapping[str, Any]) -> Renderer:
    """Return the renderer of a model directory; errors as in `Renderer.load`."""
    return Renderer.load(Path(model_dir).expanduser(), RenderingConfig(**rendering))


def token_ids_of(
    renderer: Renderer, roles: Sequence[str], contents: Sequence[str], answers: tuple[str, str]
) -> tuple[Ids, Ids, Ids] | str:
    """Return the ids of prompt, chosen and rejected, or why there are none."""
    turns = [Message(role, content) for role, content in zip(roles, contents, strict=True)]
    try:
        prompt, _ = renderer.prompt_ids(turns)
        chosen, rejected = (renderer.response_ids(answer)[0] for answer in answers)
    except ResponseTooLong as error:
        return error.found
    except DataError as error:
        return f"it cannot be rendered: {error.found}"
    return prompt, chosen, rejected


def read_token_ids(
    dataset: PreferenceDataset, split: str, renderer: Renderer
) -> list[tuple[list[int], list[int], list[int]] | None]:
    """Return the ids of prompt, chosen and rejected of each pair; None where a pair has none.

    Raises:
        RendererMismatchError: the dataset has no token columns, or those of another renderer.
        ArtifactError: the file is torn or of another schema version.
    """
    with open_parquet(dataset.split_path(split), PAIR_SCHEMA) as file:
        found = renderer_of(file.schema_arrow)
        if found is None:
            raise RendererMismatchError(
                f"{dataset.path} has no token columns",
                f"those of renderer {renderer.fingerprint[:12]}",
                "set ingest.tokens.model_dir and run ingest again",
            )
        renderer.check_same(found, f"{dataset.path}, split {split},")
        names = [field.name for field in TOKEN_FIELDS]
        rows = file.read(columns=names).to_pylist()
    return [
        None if row[names[0]] is None else (row[names[0]], row[names[1]], row[names[2]])
        for row in rows
    ]
