"""Model cards of a student: what it is made of, whom it learned from, how good it is, and under
which licences."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tasks.artifacts import Manifest, ParentRef, read_manifest
from tasks.config import ModelCardConfig
from tasks.data.markdown import cell, table
from tasks.errors import ArtifactError, MissingInputError
from tasks.successors import standing_path

CARD_NAME: Final = "README.md"
UNKNOWN: Final = "unknown"
_LICENSE_LINE: Final = re.compile(r"^license:\s*[\"']?([\w.-]+)[\"']?\s*$", re.MULTILINE)

Form = Literal["adapter", "merged"]


@dataclass(frozen=True)
class CardFacts:
    """What both cards of a student say.

    Args:
        base: name of the model that is adapted, as a hub id where there is one.
        base_license, data_license, license: as the hub names them; `UNKNOWN` where nobody says.
        data: where the preference pairs come from.
        teacher: artefact of the teacher.
        settings: of the distillation, in words.
        lineage: rows of name, kind, fingerprint and MLflow run, the student first.
        metrics: by name.
        summary: sentences about the student; empty without a report.
    """

    base: str
    base_license: str
    data: Sequence[str]
    data_license: str
    license: str
    teacher: str
    settings: Mapping[str, str]
    lineage: Sequence[tuple[str, str, str, str]]
    metrics: Mapping[str, float]
    summary: Sequence[str] = ()
    tags: Sequence[str] = field(default=("rlhf-flows", "distillation"))


def render_student_card(facts: CardFacts, form: Form) -> str:
    """Return the card of the adapter or of the merged model, as the hub reads it."""
    what = "LoRA adapter" if form == "adapter" else "Merged model"
    use = (
        "Load it with `peft.PeftModel.from_pretrained(base_model, directory)`."
        if form == "adapter"
        else "Load it with `transformers.AutoModelForCausalLM.from_pretrained(directory)`."
    )
    sections = [
        _front_matter(facts, form),
        f"# {what} of a distilled student",
        f"Base model: {cell(facts.base)}. Teacher: {cell(facts.teacher)}. {use}",
        *map(cell, facts.summary),
        "## Training",
        table(("setting", "value"), [(cell(n), cell(v)) for n, v in facts.settings.items()]),
        "## Data",
        *[f"- {cell(name)}" for name in facts.data],
        "## Licences",
        table(
            ("of", "licence"),
            [
                ("this model", cell(facts.license)),
                ("base model", cell(facts.base_license)),
                ("data", cell(facts.data_license)),
            ],
        ),
        "## Metrics",
        table(("metric", "value"), [(cell(n), f"{v:.6g}") for n, v in facts.metrics.items()]),
        "## Lineage",
        table(
            ("artefact", "kind", "fingerprint", "MLflow run"),
            [tuple(map(cell, row)) for row in facts.lineage],
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: CardFacts, form: Form) -> str:
    """Return the YAML block that the hub reads; JSON values are YAML."""
    known = facts.license != UNKNOWN
    fields: dict[str, Any] = {
        "base_model": facts.base,
        "base_model_relation": "adapter" if form == "adapter" else "finetune",
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "license": facts.license if known else "other",
        **({} if known else {"license_name": UNKNOWN}),
        "datasets": [name for name in facts.data if re.fullmatch(r"[\w.-]+/[\w.-]+", name)],
        "tags": [*facts.tags, *(["lora"] if form == "adapter" else [])],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items() if value != []]
    return "\n".join(["---", *lines, "---"])


def write_cards(facts: CardFacts, directories: Mapping[Form, Path]) -> None:
    """Write a card into each directory, in place of what a library left there."""
    for form, directory in directories.items():
        (directory / CARD_NAME).write_text(render_student_card(facts, form), encoding="utf-8")


def licenses_of(cfg: ModelCardConfig, base_dir: Path) -> dict[str, str]:
    """Return the licence fields: as configured, the base's else as its own card says it."""
    return {
        "license": cfg.license or UNKNOWN,
        "base_license": cfg.base_license or _license_in(base_dir / CARD_NAME) or UNKNOWN,
        "data_license": cfg.data_license or UNKNOWN,
    }


def _license_in(card: Path) -> str | None:
    """Return the licence that a model's card names in its front matter."""
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    head = text.split("---", 2)
    found = _LICENSE_LINE.search(head[1]) if text.startswith("---") and len(head) == 3 else None
    return None if found is None else found[1]


def base_name(base: Manifest, student_source: ParentRef | None) -> str:
    """Return what the student's base is called: a hub id or package where it is one."""
    source = student_source or base.parents.get("model")
    if source is not None:
        return _short(source.path)
    return f"built by stage {base.stage} ({base.fingerprint[:12]})"


def _short(path: str) -> str:
    """Return a hub id as it is, and of a path its last part: a card travels, the path does not."""
    return Path(path).name if Path(path).is_absolute() else path


def data_names(preferences: Manifest) -> list[str]:
    """Return where the pairs come from, named as the ingestion's config and sources name them."""
    names = [
        _short(ref.path)
        for name, ref in preferences.parents.items()
        if name.split(".")[0] == "source" and ref.kind != "model"
    ]
    return names or [str(preferences.config.get("source", UNKNOWN))]


def lineage_rows(parents: Mapping[str, ParentRef]) -> list[tuple[str, str, str, str]]:
    """Return one row per artefact or raw source behind a student, each once."""
    rows: dict[str, tuple[str, str, str, str]] = {}
    waiting = list(parents.items())
    while waiting:
        name, ref = waiting.pop(0)
        if ref.fingerprint in rows:
            continue
        rows[ref.fingerprint] = (name, ref.kind, ref.fingerprint[:16], ref.mlflow_run_id or "")
        waiting += _parents_of(ref)
    return list(rows.values())


def _parents_of(ref: ParentRef) -> list[tuple[str, ParentRef]]:
    """Return what an artefact was made from; nothing for a raw source or one that is gone."""
    try:
        return list(read_manifest(standing_path(ref)).parents.items())
    except (MissingInputError, ArtifactError):
        return []
