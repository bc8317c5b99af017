"""Memory of whole stages, and what the packaged GPU configs need."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.doctor import (
    KNOWN_MODELS,
    ModelShape,
    RoleBytes,
    StageMemory,
    estimate,
    gpu_finding,
    gpu_memory,
    gpu_stages,
    shape_of,
)
from tasks.config.loading import find_config, load_config
from tasks.config.shared import ModelConfig
from tasks.pipeline_config import PipelineConfig
from tasks.workspace import Workspace

GIB = 2**30
# As in test_memory_of_models.py: 1304 weights, 1313 with a score head, 608 of them a layer.
SMALL = ModelShape(8, 2, 2, 1, 4, 16, 10, tied=True, qkv_bias=True)
GPU_CONFIGS = ["hh_gpu", "hh_gpu_single", "hh_gpu_7b", "hh_gpu_7b_two_nodes"]


def _stages(cfg: PipelineConfig, shape: ModelShape = SMALL) -> dict[str, StageMemory]:
    return {stage.stage: stage for stage in estimate(cfg, shape, shape)}


def _plain(**sections: object) -> PipelineConfig:
    """Return a config with micro-batches of 400 tokens in fp32 and prompts of at most 100."""
    shared = {
        "runtime": {"tokens_per_micro_batch": 400},
        "rendering": {"max_prompt_tokens": 100, "max_response_tokens": 100},
    }
    trained = ("sft", "reward_model", "offline_ppo", "distill", "evaluate")
    plain = {name: {**shared, **_section(sections, name)} for name in trained}
    return PipelineConfig.model_validate(plain)


def _section(sections: dict[str, object], name: str) -> dict[str, object]:
    found = sections.get(name, {})
    assert isinstance(found, dict)
    return found


def test_behaviour_cloning_by_hand() -> None:
    found = _stages(_plain())["sft"]
    # 4 bytes of weights and gradients, 8 of moments for 1304 weights.
    assert found.states == RoleBytes(5216, 5216, 10432)
    # fp32: 4 * (80 + 1216) whole, 8 * 1216 of gradients.
    assert found.gathered == 5184 + 9728
    # 400 tokens: 2 layers * 576 bytes, and 12 bytes for each of 10 logits.
    assert found.working == 400 * (1152 + 120)
    assert found.driver_gpu == found.per_rank == 20864 + 14912 + 508800


def test_a_model_that_is_taken_as_it_is_trains_nothing() -> None:
    assert "sft" not in _stages(_plain(sft={"enabled": False}))


def test_offline_ppo_by_hand() -> None:
    found = _stages(_plain())["offline_ppo"]
    # Actor, reference and one reward model of 1313 weights.
    assert found.states == RoleBytes(5216 + 5216 + 5252, 5216, 10432)
    # 200 answers of the report are more than 128 of a probe: 164 tokens of keys and values, 100
    # tokens of each prompt read.
    assert found.generator == 5216 + 200 * 164 * 64 + 200 * 100 * 320
    with_critic = _stages(_plain(offline_ppo={"advantage": {"estimator": "gae"}}))["offline_ppo"]
    assert with_critic.states.total - found.states.total == 16 * 1313
    by_labels = _stages(_plain(offline_ppo={"reward": {"components": {"labels": 1.0}}}))
    assert found.states.total - by_labels["offline_ppo"].states.total == 5252


def _groups(**section: object) -> dict[str, StageMemory]:
    """Return the groups of offline PPO where the policy is alone."""
    runtime = {"tokens_per_micro_batch": 400, "placement": "separate"}
    cfg = _plain(offline_ppo={"runtime": runtime, **section})
    found = [stage for stage in estimate(cfg, SMALL, SMALL) if stage.stage == "offline_ppo"]
    return {stage.group: stage for stage in found}


def test_separate_groups_by_hand() -> None:
    together = _stages(_plain())["offline_ppo"]
    policy, rest = _groups().values()
    assert (policy.group, rest.group) == ("policy", "critic and frozen models")
    # 16 bytes for each of 1304 weights, and as much work as where it is not alone.
    assert policy.states == RoleBytes(5216, 5216, 10432)
    assert (policy.gathered, policy.working) == (together.gathered, together.working)
    # Reference and reward model; 400 tokens of one layer, and 12 bytes for each of 10 logits.
    assert rest.states == RoleBytes(5216 + 5252)
    assert rest.working == 400 * (576 + 120)
    # The driver may answer on a GPU of either.
    assert policy.generator == rest.generator == together.generator
    assert policy.states + rest.states == together.states


def test_a_critic_is_beside_the_frozen_models_by_hand() -> None:
    gae = {"advantage": {"estimator": "gae"}}
    policy, rest = _groups(**gae).values()
    assert policy == _groups()["policy"]
    assert rest.states == RoleBytes(5216 + 2 * 5252, 5252, 2 * 5252)
    # It keeps both layers for its backward pass, which is more than the reference's one and logits.
    assert rest.working == 400 * 1152
    together = _stages(_plain(offline_ppo=gae))["offline_ppo"]
    assert policy.states + rest.states == together.states
    by_labels = _groups(**gae, reward={"components": {"labels": 1.0}})
    assert rest.states.total - by_labels["critic and frozen models"].states.total == 5252


def test_a_7b_model_in_two_groups_by_hand() -> None:
    changes = ["offline_ppo.runtime.placement=separate", "offline_ppo.advantage.estimator=gae"]
    shape = KNOWN_MODELS["Qwen/Qwen2.5-7B-Instruct"]
    together, *groups = (
        stage
        for overrides in (changes[1:], changes)
        for stage in estimate(load_config(find_config("hh_gpu_7b"), overrides), shape, shape)
        if stage.stage == "offline_ppo"
    )
    # On 8 ranks, N = 7.616e9 and 7.071e9 with a value head: 16 N + 4 N + 4 V + 16 V bytes against
    # 16 N and 16 V + 4 N + 4 V.
    states = [round(stage.states.total / GIB, 1) for stage in (together, *groups)]
    assert states == [34.2, 14.2, 20.0]
    assert [gpu_finding(stage, 80 * GIB).subject for stage in groups] == [
        "offline_ppo policy memory",
        "offline_ppo critic and frozen models memory",
    ]


def test_offloaded_roles_take_turns() -> None:
    runtime = {"tokens_per_micro_batch": 400, "offload": True}
    found = _stages(_plain(offline_ppo={"runtime": runtime}))["offline_ppo"]
    assert found.states.total == 16 * 1304


def test_the_step_of_the_optimizer_counts_where_it_is_more() -> None:
    wide = ModelShape(8, 2, 2, 1, 4, 16, 500_000, tied=True, qkv_bias=True)
    found = _stages(_plain(reward_model={"runtime": {"tokens_per_micro_batch": 400}}), wide)
    # 400 tokens of 1152 bytes are less than a copy of four million weights.
    assert found["reward_model"].working == 4 * wide.n_value_parameters


def test_parts_of_a_model_by_hand() -> None:
    cfg = _plain(
        reward_model={"lora": {"rank": 2}, "members": 3},
        distill={"lora": {"rank": 2}, "data": "chosen", "report": {"prompts": 0}},
        evaluate={"answers": _served()},
    )
    found = _stages(cfg)
    # 512 weights of the adapter learn, see test_memory_of_models.py.
    assert found["reward_model"].states == RoleBytes(4 * (1313 + 512), 2048, 4096)
    assert found["distill"].states == RoleBytes(4 * (1304 + 512), 2048, 4096)
    assert found["distill"].working == 400 * (1152 + (12 + 8) * 10)
    assert found["distill"].generator == found["evaluate"].generator == 0
    assert found["evaluate"].states == RoleBytes(weights=3 * 5252)
    # One layer at a time without a backward pass.
    assert found["evaluate"].working == 400 * 576
    frozen = _stages(_plain(reward_model={"freeze_backbone": True}))["reward_model"]
    assert frozen.states == RoleBytes(weights=5252)


def test_answers_of_a_student_by_hand() -> None:
    # 200 answers of the report, 164 tokens of keys and values, 100 tokens of each prompt read.
    chosen = _stages(_plain(distill={"data": "chosen"}))["distill"]
    assert chosen.generator == 5216 + 200 * 164 * 64 + 200 * 100 * 320
    generation = {"batch_size": 300, "max_new_tokens": 64}
    mixed = _stages(_plain(distill={"data": "mixture", "generation": generation}))["distill"]
    assert mixed.generator == 5216 + 300 * 164 * 64 + 300 * 100 * 320


def _served() -> dict[str, object]:
    return {"backend": "openai", "served": dict.fromkeys(("base", "policy", "student"), "m")}


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_packaged_gpu_configs_fit_and_say_how(name: str) -> None:
    cfg = load_config(find_config(name))
    shape = KNOWN_MODELS[cfg.sft.model.source]
    stages = _stages(cfg, shape)
    assert set(stages) == {"reward_model", "offline_ppo", "distill", "evaluate"}
    assert all(stage.fits(80 * GIB) for stage in stages.values())
    written = find_config(name).read_text()
    for stage in stages.values():
        numbers = (stage.states.total, stage.gathered, stage.working)
        row = [stage.stage, *(f"{size / GIB:.1f}" for size in numbers)]
        row += [f"{stage.per_rank / GIB:.1f}", f"{stage.driver_gpu / GIB:.1f}"]
        assert ["#", *row] in [line.split() for line in written.splitlines()]


def test_a_7b_model_does_not_fit_on_one_gpu() -> None:
    cfg = load_config(find_config("hh_gpu_7b"), ["runtime.ranks=1"])
    found = _stages(cfg, KNOWN_MODELS[cfg.sft.model.source])["offline_ppo"]
    finding = gpu_finding(found, 80 * GIB)
    assert (finding.subject, finding.status) == ("offline_ppo memory", "fail")
    # 16 * 7.616e9 + 4 * (7.616e9 + 7.071e9) bytes.
    assert found.states.total == pytest.approx(180.6e9, rel=1e-3)
    assert "raise ranks" in finding.detail


def test_findings_compare_with_the_gpu() -> None:
    stage = StageMemory("distill", RoleBytes(4 * GIB), GIB, 5 * GIB, 8 * GIB)
    assert gpu_finding(stage, 20 * GIB).status == "ok"  # 18 of 20 GiB, a tenth is left
    tight = gpu_finding(stage, 19 * GIB)
    assert tight.status == "warn"
    assert "10.0 GiB per GPU" in tight.detail and "18.0 on the driver's" in tight.detail
    assert "answer fewer prompts" in tight.detail
    assert "fewer prompts" not in gpu_finding(stage, 9 * GIB).detail
    assert gpu_finding(stage, 3 * GIB).status == "fail"
    assert gpu_finding(stage, None).status == "note"


def test_only_stages_on_gpus_are_told() -> None:
    cfg = _plain(sft={"runtime": {"tokens_per_micro_batch": 400, "device": "cuda"}})
    stages = estimate(cfg, SMALL, SMALL)
    assert [stage.stage for stage in gpu_stages(cfg, stages, 0)] == ["sft"]
    assert len(list(gpu_stages(cfg, stages, 1))) == len(stages)


def test_doctor_tells_of_each_stage_before_the_model_is_there(tmp_path: Path) -> None:
    cfg = load_config(find_config("hh_gpu_7b"))
    findings = {f.subject: f for f in gpu_memory(cfg, Workspace(tmp_path))}
    assert list(findings) == [
        f"{stage} memory" for stage in ("reward_model", "offline_ppo", "distill", "evaluate")
    ]
    assert "about 31.1 GiB per GPU" in findings["offline_ppo memory"].detail
    assert not list(gpu_memory(load_config(find_config("demo")), Workspace(tmp_path)))


def test_shape_without_a_download() -> None:
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    assert shape_of(ModelConfig(source=name), None) == KNOWN_MODELS[name]
    assert shape_of(ModelConfig(source="tiny"), None) is None
