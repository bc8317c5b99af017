"""The section `ablation`: what is refused, where the message points, and what methods become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.ablation import Clock, Job, check_ablation, final_jobs, tuning_jobs
from flows.stages import raw_sources, result_fields
from tasks.ablation.config import AblationConfig, label_of, with_overrides
from tasks.config.loading import find_config, known_keys, load_config
from tasks.errors import ConfigError, MissingInputError
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.pipeline_config import PipelineConfig
from tasks.workspace import Workspace

RATES: list[dict[str, Any]] = [
    {"optimizer.learning_rate": 1e-4},
    {"optimizer.learning_rate": 2e-4},
]


def _section(**changes: Any) -> dict[str, Any]:
    methods = {
        "ppo": {"grid": RATES},
        "topr": {"overrides": {"policy_loss": "topr"}, "grid": RATES},
    }
    return {"methods": methods, **changes}


def _write(tmp_path: Path, section: dict[str, Any]) -> Path:
    path = tmp_path / "ablation.yaml"
    path.write_text(yaml.safe_dump({"ablation": section}, sort_keys=False))
    return path


def test_methods_become_configs_of_the_stage(tmp_path: Path) -> None:
    cfg = load_config(_write(tmp_path, _section()), ["offline_ppo.steps=7"])
    assert cfg.ablation is not None
    found = cfg.ablation.resolve(cfg.offline_ppo)
    assert list(found) == [("ppo", 0), ("ppo", 1), ("topr", 0), ("topr", 1)]
    assert {(c.policy_loss, c.optimizer.learning_rate) for c in found.values()} == {
        ("ppo", 1e-4),
        ("ppo", 2e-4),
        ("topr", 1e-4),
        ("topr", 2e-4),
    }
    # What no override names is the chain's own.
    assert {c.steps for c in found.values()} == {7}


def test_a_dotted_name_replaces_a_value_as_on_the_command_line() -> None:
    cfg = with_overrides(
        OfflinePPOConfig(), {"reward.components": {"labels": 1.0}, "reward.search": None}
    )
    assert cfg.reward.components == {"labels": 1.0}
    assert cfg.reward.clip == OfflinePPOConfig().reward.clip
    assert OfflinePPOConfig().reward.components == {"reward_model": 1.0}


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        (
            "ppo",
            {"overrides": {"importance.lvel": "token"}, "grid": RATES},
            ("unknown key 'importance.lvel'", "did you mean 'level'", "line 5"),
        ),
        (
            "ppo",
            {"grid": [RATES[0], {"optimiser.learning_rate": 1.0}]},
            ("unknown key 'optimiser'", "did you mean 'optimizer'", "methods.ppo.grid.1"),
        ),
        (
            "ppo",
            {"overrides": {"policy_loss": "tpor"}, "grid": RATES},
            ("policy_loss", "'ppo', 'topr'", "got 'tpor'"),
        ),
        (
            "ppo",
            {"overrides": {"loss.dual_clip": 1.05}, "grid": RATES},
            ("methods.ppo.overrides.loss.dual_clip", "below 1 + clip_high"),
        ),
        (
            "ppo",
            {"overrides": {"reward.components": {"reward_model.x": 1.0}}, "grid": RATES},
            ("method 'ppo'", "reward_model.x", "reward_model.preference"),
        ),
        ("ppo", {"grid": RATES[:1]}, ("ppo 1, topr 2", "equal tuning budget")),
        ("ppo", {"grid": []}, ("ppo.grid", "at least 1")),
        ("ppo", {"grid": [RATES[0], RATES[0]]}, ("the same run as setting 1 of 'ppo'",)),
        (
            "ppo",
            {"overrides": {"policy_loss": "topr"}, "grid": RATES},
            ("topr.grid.0", "the same run as setting 1 of 'ppo'"),
        ),
        ("ppo", {"grd": RATES}, ("unknown key", "did you mean 'grid'", "line 4")),
        ("no name", {"grid": RATES}, ("no name", "pattern")),
        ("base", {"grid": RATES}, ("named 'base'",)),
        (
            "ppo",
            {"overrides": {"seed": 7}, "grid": RATES},
            ("methods.ppo: 'seed' is no override", "ablation.tuning_seeds", "line 3"),
        ),
        ("ppo", {"grid": [RATES[0], {"seed": 1}]}, ("methods.ppo: 'seed' is no override",)),
    ],
)
def test_a_method_that_cannot_run_is_named(
    tmp_path: Path, name: str, method: dict[str, Any], expected: tuple[str, ...]
) -> None:
    section = _section()
    section["methods"] = {name: method, "topr": section["methods"]["topr"]}
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path, section))
    for part in expected:
        assert part in str(caught.value)


def test_braces_in_a_value_survive_the_message(tmp_path: Path) -> None:
    section = _section()
    section["methods"]["topr"]["overrides"] = {"policy_loss": "{loss}"}
    with pytest.raises(ConfigError, match=r"got '\{loss\}'"):
        load_config(_write(tmp_path, section))


@pytest.mark.parametrize("field", ["seeds", "tuning_seeds"])
def test_a_seed_that_is_given_twice_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"ablation\.{field}: seed 4 is given twice"):
        load_config(_write(tmp_path, _section(**{field: [4, 5, 4]})))


def test_a_reward_function_that_is_not_there_is_refused_before_any_work(tmp_path: Path) -> None:
    section = _section()
    section["methods"]["topr"]["overrides"] |= {
        "reward.components": {"function": 1.0},
        "reward.function_path": "/nowhere/reward.py",
    }
    cfg = load_config(_write(tmp_path, section))
    with pytest.raises(MissingInputError, match=r"/nowhere/reward\.py"):
        check_ablation(cfg)


def _paths(cfg: PipelineConfig) -> list[str | None]:
    assert cfg.ablation is not None
    found = cfg.ablation.resolve(cfg.offline_ppo).values()
    return [cfg.offline_ppo.reward.function_path, *(c.reward.function_path for c in found)]


def test_a_reward_function_is_found_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    function = there / "reward.py"
    function.write_text("def reward_fn(): return 1\n")
    nested = {"components": {"function": 1.0}, "function_path": "reward.py"}
    grid = [RATES[0], {**RATES[1], "reward": nested}]
    section = _section()
    section["methods"] = {"ppo": {"overrides": {"reward.function_path": "reward.py"}, "grid": grid}}
    path = _write(there, section)
    below = there / "below.yaml"
    below.write_text(
        "offline_ppo: {reward: {components: {function: 1.0}, function_path: reward.py}}"
    )
    path.write_text(f"extends: below.yaml\n{path.read_text()}")
    assert _paths(load_config(path)) == [str(function)] * 3
    # A value of the command line is one from here, as are the names of files that are nowhere.
    overridden = load_config(path, ["offline_ppo.reward.function_path=reward.py"])
    assert _paths(overridden)[0] == "reward.py"
    below.write_text(below.read_text().replace("reward.py", "absent.py"))
    assert _paths(load_config(path))[0] == "absent.py"
    # What is here goes first.
    (here / "reward.py").write_text("def reward_fn(): return 2\n")
    assert _paths(load_config(path))[1:] == ["reward.py"] * 2


def test_the_packaged_ablation_finds_its_reward_function_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workspace: Workspace
) -> None:
    at_home = load_config(find_config("demo_ablation"))
    monkeypatch.chdir(tmp_path)
    away = load_config(find_config("demo_ablation"))
    check_ablation(away)
    assert at_home.ablation is not None and away.ablation is not None
    (here,), (there,) = (
        [c for c in cfg.ablation.resolve(cfg.offline_ppo).values() if c.reward.function_path][:1]
        for cfg in (at_home, away)
        if cfg.ablation is not None
    )
    assert here.reward.function_path != there.reward.function_path
    # Where the file lies does not change what a stage is.
    assert result_fields(here) == result_fields(there)
    monkeypatch.chdir(Path(__file__).parents[2])
    fingerprints = {raw_sources(c, workspace)["reward_function"].fingerprint for c in (here, there)}
    assert len(fingerprints) == 1


def test_without_the_section_there_is_no_ablation() -> None:
    assert PipelineConfig().ablation is None
    with pytest.raises(ConfigError, match="no section `ablation`"):
        check_ablation(PipelineConfig())


def test_jobs_and_time_left_by_hand() -> None:
    cfg = AblationConfig.model_validate(_section(tuning_seeds=[0], seeds=[0, 1]))
    assert tuning_jobs(cfg) == [
        Job("ppo", 0, 0, "validation"),
        Job("ppo", 1, 0, "validation"),
        Job("topr", 0, 0, "validation"),
        Job("topr", 1, 0, "validation"),
    ]
    # A method whose settings all failed is not run again.
    assert final_jobs(cfg, {"ppo": 1, "topr": None}) == [
        Job("ppo", 1, 0, "test"),
        Job("ppo", 1, 1, "test"),
    ]
    clock = Clock(cfg)
    assert (clock.n_jobs, clock.n_seeds, clock.seconds_left) == (8, 2, None)
    clock.seed_done(100.0)
    clock.job_done(10.0, is_new=True)
    clock.job_done(0.1, is_new=False)
    clock.job_done(30.0, is_new=True)
    # 5 of 8 jobs at (10 + 30) / 2 and one more seed at 100.
    assert clock.seconds_left == pytest.approx(5 * 20.0 + 100.0)


def test_only_some_methods_take_part(tmp_path: Path) -> None:
    path = _write(tmp_path, _section())
    section = load_config(path, ["ablation.only=[topr]"]).ablation
    assert section is not None
    assert {job.method for job in tuning_jobs(section)} == {"topr"}
    # Two settings on seed 0, and the chosen one on seeds 1, 2 and 3.
    assert Clock(section).n_jobs == 2 + 3
    for value, shown in (("[tpor]", "only names tpor; methods: ppo, topr"), ("[]", "nothing")):
        with pytest.raises(ConfigError, match=shown):
            load_config(path, [f"ablation.only={value}"])


def test_label_and_known_keys() -> None:
    assert label_of({"loss.dpo_beta": 0.1, "policy_loss": "dpo"}) == (
        "loss.dpo_beta=0.1, policy_loss=dpo"
    )
    assert label_of({"reward.components": {"labels": 1.0}}) == 'reward.components={"labels": 1.0}'
    assert label_of({}) == "as configured"
    assert known_keys(("ablation", "methods", "ppo")) == ["overrides", "grid"]
    assert known_keys(("reward_model", "components", "preference"))


def test_the_demo_ablation_is_the_demo_with_other_methods() -> None:
    cfg, demo = load_config(find_config("demo_ablation")), load_config(find_config("demo"))
    assert cfg.ablation is not None
    assert (cfg.ingest, cfg.sft, cfg.reward_model) == (demo.ingest, demo.sft, demo.reward_model)
    assert next(iter(cfg.ablation.methods)) == "ppo"
    for section in cfg.ablation.resolve(cfg.offline_ppo).values():
        assert section.steps == demo.offline_ppo.steps
        assert section.batch_prompts == demo.offline_ppo.batch_prompts
    losses = {s.policy_loss for s in cfg.ablation.resolve(cfg.offline_ppo).values()}
    assert losses == {"ppo", "topr", "a_lol", "positives_only", "dpo"}
