"""Checks before any work."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from flows import inputs as preflight
from flows.inputs import (
    check_gpus,
    check_ray_address,
    demo_questions,
    ray_addresses,
    subset_name,
)
from flows.stages import check_inputs, models_of, raw_sources, result_fields
from tasks.artifacts import file_sha256
from tasks.config.shared import ModelConfig, RuntimeConfig
from tasks.distill.config import DistillConfig
from tasks.errors import ClusterError, ConfigError, DataError, MissingInputError, ModelError
from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.questions import ModelAnswer, read_questions, write_answers
from tasks.ingest.config import IngestConfig
from tasks.offline_ppo.config import OfflinePPOConfig, RewardConfig
from tasks.pipeline_config import PipelineConfig
from tasks.sft.config import SftConfig
from tasks.workspace import Workspace


def _chain(**sections: Any) -> PipelineConfig:
    return PipelineConfig(**sections)


def _function(path: Path, name: str = "reward_fn") -> OfflinePPOConfig:
    reward = RewardConfig(components={"function": 1.0}, function_path=str(path), function_name=name)
    return OfflinePPOConfig(reward=reward)


def test_defaults_need_nothing(workspace: Workspace) -> None:
    check_inputs(_chain())


def test_real_files_pass(shared_data: Path, workspace: Workspace) -> None:
    source = shared_data / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    questions = shared_data / "mt_bench" / "question.jsonl"
    check_inputs(
        _chain(
            ingest=IngestConfig(source=str(source)),
            evaluate=EvaluateConfig(questions=str(questions)),
        )
    )


def test_evaluation_with_a_judge_is_checked(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(**judging: Any) -> None:
        endpoint = {"model": "m", "api_key_env": "NO_SUCH_KEY"}
        section = {"judge": "openai", "judging": {"endpoint": endpoint, **judging}}
        check_inputs(_chain(evaluate=EvaluateConfig.model_validate(section)))

    with pytest.raises(ConfigError, match="NO_SUCH_KEY holds no key"):
        check()
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    check()
    with pytest.raises(MissingInputError, match=r"evaluate\.judging\.references: no file"):
        check(references=str(tmp_path / "absent"))
    empty = tmp_path / "prompts.jsonl"
    empty.write_text('{"name": "other"}')
    with pytest.raises(DataError, match="holds no judge prompt"):
        check(prompts=str(empty))


def test_given_answers_are_read_beside_the_demo_questions_too(
    workspace: Workspace, tmp_path: Path
) -> None:
    def check(path: Path) -> None:
        answers = {"files": {"other": str(path)}}
        check_inputs(_chain(evaluate=EvaluateConfig.model_validate({"answers": answers})))

    given = tmp_path / "other.jsonl"
    given.write_text("no answers\n")
    with pytest.raises(DataError, match=r"other\.jsonl"):
        check(given)
    write_answers(given, [ModelAnswer(1, "other", ("I", "You"), 0.0)])
    with pytest.raises(DataError, match=r"answers 1 of .* questions"):
        check(given)
    questions = read_questions(demo_questions(workspace))
    write_answers(given, [ModelAnswer(q.question_id, "o", ("I", "You"), 0.0) for q in questions])
    check(given)


def test_files_of_an_evaluation_count_by_their_content(
    shared_data: Path, workspace: Workspace, tmp_path: Path
) -> None:
    folder = shared_data / "mt_bench"
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        copies = {}
        for file in ("question", "judge_prompts", "reference_answer_gpt-4"):
            copies[file] = tmp_path / name / f"{file}.jsonl"
            copies[file].write_bytes((folder / copies[file].name).read_bytes())
        judging = {
            "endpoint": {"model": "m"},
            "prompts": str(copies["judge_prompts"]),
            "references": str(copies["reference_answer_gpt-4"]),
        }
        section = {"judge": "openai", "judging": judging, "questions": str(copies["question"])}
        cfg = EvaluateConfig.model_validate(section)
        sources = raw_sources(cfg, workspace)
        assert set(sources) == {"questions", "judge_prompts", "references"}
        hashes = {key: source.fingerprint for key, source in sources.items()}
        found.append((result_fields(cfg), hashes))
    assert found[0] == found[1]


def test_missing_files_are_named(workspace: Workspace) -> None:
    with pytest.raises(MissingInputError, match=r"ingest\.source: no file /nowhere/a"):
        check_inputs(_chain(ingest=IngestConfig(source="/nowhere/a")))
    with pytest.raises(MissingInputError, match=r"evaluate\.questions: no file /nowhere/b"):
        check_inputs(_chain(evaluate=EvaluateConfig(questions="/nowhere/b")))
    with pytest.raises(MissingInputError, match=r"function_path: no file /nowhere/c"):
        check_inputs(_chain(offline_ppo=_function(Path("/nowhere/c"))))


@pytest.mark.parametrize(
    "content", [b"PAR1\x00\x00", b"", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_files_of_another_format_are_refused(
    tmp_path: Path, content: bytes, workspace: Workspace
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        check_inputs(_chain(ingest=IngestConfig(source=str(path))))


@pytest.mark.parametrize(
    ("text", "error"),
    [("def other(): pass\n", "defines \\['other'\\]"), ("def reward_fn(:\n", "is not Python")],
)
def test_reward_file_without_the_function(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        check_inputs(_chain(offline_ppo=_function(path)))


def test_model_directory_without_anything(tmp_path: Path, workspace: Workspace) -> None:
    broken = SftConfig(model=ModelConfig(source=str(tmp_path)))
    with pytest.raises(ModelError, match=str(tmp_path)):
        check_inputs(_chain(sft=broken))


def test_only_the_stages_asked_for_are_checked(workspace: Workspace) -> None:
    check_inputs(_chain(ingest=IngestConfig(source="/nowhere/a")), ["sft", "evaluate"])


def test_same_model_is_checked_once() -> None:
    model = ModelConfig(source="org/name")
    cfg = _chain(sft=SftConfig(model=model), distill=DistillConfig(student="model", model=model))
    assert models_of(cfg) == [model]
    assert models_of(_chain()) == []


def test_ray_address_that_listens_passes() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        check_ray_address(f"127.0.0.1:{port}")
        check_ray_address(f"ray://127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "127.0.0.1:99999", "ray://x"])
def test_ray_address_that_does_not_answer(address: str) -> None:
    with pytest.raises(ClusterError, match="does not answer"):
        check_ray_address(address)


def test_automatic_ray_address_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ClusterError, match="'auto' does not answer"):
        check_ray_address("auto")


def test_addresses_of_all_stages() -> None:
    runtime = RuntimeConfig(ray_address="h:1")
    assert ray_addresses(_chain(sft=SftConfig(runtime=runtime))) == {"h:1"}


@pytest.mark.parametrize(
    ("device", "groups", "n_gpus"),
    [("cuda", 1, 4), ("cuda", 2, 8), ("auto", 2, 8), ("auto", 2, 3), ("auto", 1, 0), ("cpu", 2, 0)],
)
def test_gpus_that_are_enough_or_not_used(device: Any, groups: int, n_gpus: int) -> None:
    check_gpus(RuntimeConfig(ranks=4, device=device), groups, n_gpus)


@pytest.mark.parametrize(
    ("device", "groups", "n_gpus", "expected"),
    [
        ("cuda", 1, 3, "3 GPUs on this machine. Expected: 4 for runtime.ranks=4. Fix: lower"),
        ("cuda", 2, 7, "7 GPUs on this machine. Expected: 8 for 2 groups of runtime.ranks=4 "),
        # Enough for one group, so that the chain would run on them.
        ("auto", 2, 4, "4 GPUs on this machine. Expected: 8 for 2 groups of runtime.ranks=4 "),
        ("auto", 2, 7, "(runtime.placement=separate). Fix: set runtime.placement=colocated"),
    ],
)
def test_too_few_gpus_are_told(device: Any, groups: int, n_gpus: int, expected: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_gpus(RuntimeConfig(ranks=4, device=device), groups, n_gpus)
    assert expected in str(caught.value)


def test_two_groups_on_gpus_are_refused_before_any_work(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "count_gpus", lambda: 1)
    separate = RuntimeConfig(device="cuda", placement="separate")
    with pytest.raises(ClusterError, match=r"1 GPUs on this machine. Expected: 2 for 2 groups"):
        check_inputs(_chain(offline_ppo=OfflinePPOConfig(runtime=separate)))
    check_inputs(_chain(sft=SftConfig(runtime=separate)))
    together = separate.model_copy(update={"placement": "colocated"})
    check_inputs(_chain(offline_ppo=OfflinePPOConfig(runtime=together)))


def test_moved_file_keeps_the_identity(tmp_path: Path, workspace: Workspace) -> None:
    found = []
    for name in ("a", "b"):
        path = tmp_path / name / "harmless-base" / "pairs.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("{}\n")
        cfg = IngestConfig(source=str(path))
        source = raw_sources(cfg, workspace)["source"]
        assert source.fingerprint == file_sha256(path)
        found.append((result_fields(cfg), source.fingerprint))
    assert found[0] == found[1]


def test_subset_is_part_of_the_identity(tmp_path: Path) -> None:
    harmless = IngestConfig(source=str(tmp_path / "harmless-base" / "pairs.jsonl"))
    helpful = IngestConfig(source=str(tmp_path / "helpful-base" / "pairs.jsonl"))
    assert (subset_name(harmless), subset_name(helpful)) == ("harmless-base", "helpful-base")
    assert result_fields(harmless) != result_fields(helpful)
    assert subset_name(IngestConfig()) == "demo"


def test_demo_file_is_the_same_every_time(workspace: Workspace) -> None:
    cfg = IngestConfig()
    first = raw_sources(cfg, workspace)["source"]
    Path(first.path).write_text("edited")
    assert raw_sources(cfg, workspace)["source"] == first
    other = raw_sources(cfg.model_copy(update={"seed": 1}), workspace)["source"]
    assert other.fingerprint != first.fingerprint


def test_reward_function_counts_by_its_text(tmp_path: Path, workspace: Workspace) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def reward_fn(): return 1\n")
    cfg = _function(path)
    before = raw_sources(cfg, workspace)["reward_function"]
    path.write_text("def reward_fn(): return 2\n")
    after = raw_sources(cfg, workspace)["reward_function"]
    assert before.fingerprint != after.fingerprint
    assert result_fields(cfg)["reward"]["function_path"] == "file"
