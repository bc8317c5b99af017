"""What an evaluation reads besides the chain's models: files, hub data sets, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tasks.backends.api_key import read_key
from tasks.backends.model_server import check_program
from tasks.config import EvaluateConfig
from tasks.data.hub import is_hub_id
from tasks.data.hub_questions import download_questions
from tasks.data.judge_prompts import OWN, load_judge_prompts
from tasks.data.questions import answers_to, read_questions, read_references
from tasks.errors import MissingInputError
from tasks.workspace import Workspace

DEMO: Final = "demo"


def evaluate_files(cfg: EvaluateConfig, workspace: Workspace) -> dict[str, tuple[Path, str]]:
    """Return the files by name, each with the field that names it; hub questions are downloaded.

    Raises:
        MissingInputError: the hub does not have the questions.
    """
    judging = cfg.judging
    found = {
        f"answers.{name}": (Path(path), f"evaluate.answers.files.{name}")
        for name, path in cfg.answers.files.items()
    }
    if cfg.questions != DEMO:
        path = Path(cfg.questions)
        if is_hub_id(cfg.questions):
            path = download_questions(cfg.questions, workspace.cache_dir)
        found["questions"] = (path, "evaluate.questions")
    if judging.references is not None:
        found["references"] = (Path(judging.references), "evaluate.judging.references")
    if judging.prompts != OWN:
        found["judge_prompts"] = (Path(judging.prompts), "evaluate.judging.prompts")
    return found


def evaluate_fields(cfg: EvaluateConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for the fingerprint; files and models count by their hash."""
    judging, answers = dict(fields["judging"]), dict(fields["answers"])
    for name in ("references", "model"):
        judging[name] = None if judging[name] is None else "file"
    judging["prompts"] = OWN if judging["prompts"] == OWN else "file"
    answers["files"] = dict.fromkeys(sorted(answers["files"]), "file")
    if cfg.answers.backend != "vllm":
        del answers["vllm"]
    questions = DEMO if cfg.questions == DEMO else "file"
    return {**fields, "questions": questions, "judging": judging, "answers": answers}


def check_evaluation(cfg: EvaluateConfig, workspace: Workspace) -> None:
    """Check files and keys before anything is trained.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file in another format, or answers to other questions.
        ConfigError: no key in the environment, or no vLLM.
    """
    files = {}
    for name, (path, field) in evaluate_files(cfg, workspace).items():
        files[name] = _existing(path, field)
    if "questions" in files or cfg.answers.files:
        path = files["questions"] if "questions" in files else demo_questions(workspace)
        questions = read_questions(path)[: cfg.max_questions]
        for name in cfg.answers.files:
            answers_to(files[f"answers.{name}"], questions)
    if "references" in files:
        read_references(files["references"])
    if "judge_prompts" in files:
        load_judge_prompts(str(files["judge_prompts"]))
    if cfg.judge == "openai":
        read_key(cfg.judging.endpoint.api_key_env)
    if cfg.answers.backend == "openai":
        read_key(cfg.answers.endpoint.api_key_env)
    if cfg.answers.backend == "vllm":
        check_program(cfg.answers.vllm)


def demo_questions(workspace: Workspace) -> Path:
    """Write the demo world's questions, the same bytes every time, and return their file."""
    from tasks.demo.questions import write_questions

    return Path(write_questions(workspace.cache_dir / "demo-questions.jsonl"))


def _existing(path: Path, field: str) -> Path:
    full = path.expanduser()
    if not full.is_file():
        hint = "give a question.jsonl in FastChat's format, a hub data set, or 'demo'"
        raise MissingInputError(
            f"{field}: no file {full.absolute()}",
            "a file in FastChat's format",
            hint if field == "evaluate.questions" else f"correct {field}",
        )
    return full
