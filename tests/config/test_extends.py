"""`extends`: a config laid over another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.config.loading import find_config, known_keys, load_config
from tasks.errors import ConfigError, MissingInputError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_config(text: str, name: str = "own.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_config


def test_values_are_laid_over_those_below_key_by_key(write: Write) -> None:
    write("name: below\nseed: 3\nsft: {epochs: 2, optimizer: {learning_rate: 0.1}}\n", "b.yaml")
    path = write("extends: b.yaml\nsft: {optimizer: {weight_decay: 0.5}}\nname: own\n")
    cfg = load_config(path, ["sft.epochs=9"])
    assert (cfg.name, cfg.evaluate.seed, cfg.sft.epochs) == ("own", 3, 9)
    assert (cfg.sft.optimizer.learning_rate, cfg.sft.optimizer.weight_decay) == (0.1, 0.5)


def test_a_packaged_config_is_found_by_name(write: Write) -> None:
    cfg = load_config(write("extends: demo\nname: mine\n"))
    demo = load_config(find_config("demo"))
    assert cfg == demo.model_copy(update={"name": "mine"})


def test_paths_are_relative_to_the_file_that_names_them(write: Write) -> None:
    write("seed: 5\n", "below.yaml")
    write("extends: ../below.yaml\nname: middle\n", "folder/middle.yaml")
    cfg = load_config(write("extends: folder/middle.yaml\n"))
    assert (cfg.name, cfg.sft.seed) == ("middle", 5)


def test_a_list_is_replaced_whole(write: Write) -> None:
    write("sft: {optimizer: {betas: [0.1, 0.2]}}\n", "b.yaml")
    cfg = load_config(write("extends: b.yaml\nsft: {optimizer: {betas: [0.3, 0.4]}}\n"))
    assert cfg.sft.optimizer.betas == (0.3, 0.4)


def test_errors_name_the_file_and_line_that_the_value_is_in(write: Write) -> None:
    write("# comment\n\nsft:\n  epohcs: 2\n", "b.yaml")
    path = write("name: own\nextends: b.yaml\n\n\n\ndistill:\n  epochs: many\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "b.yaml, line 4: unknown key 'sft.epohcs'" in str(caught.value)
    assert "own.yaml, line 7: distill.epochs" in str(caught.value)


def test_an_overridden_line_is_the_one_that_counts(write: Write) -> None:
    write("sft: {epochs: 2}\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"own\.yaml, line 3: sft\.epochs"):
        load_config(write("extends: b.yaml\nsft:\n  epochs: -1\n"))


def test_circles_are_refused(write: Write) -> None:
    write("extends: c.yaml\n", "b.yaml")
    write("extends: own.yaml\n", "c.yaml")
    with pytest.raises(ConfigError, match=r"extends itself: .*own.*b\.yaml.*c\.yaml.*own"):
        load_config(write("extends: b.yaml\n"))
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(write("extends: own.yaml\n"))


@pytest.mark.parametrize("value", ["3", "[demo]", "''", "null"])
def test_anything_but_one_name_is_refused(write: Write, value: str) -> None:
    with pytest.raises(ConfigError, match=r"own\.yaml, line 1: extends is"):
        load_config(write(f"extends: {value}\n"))


def test_a_file_that_is_not_there_is_named_with_its_line(write: Write) -> None:
    with pytest.raises(MissingInputError, match=r"line 2: No config file dmeo.*demo"):
        load_config(write("name: own\nextends: dmeo\n"))


def test_extends_is_known_and_not_for_the_command_line(write: Write) -> None:
    assert "extends" in known_keys(())
    with pytest.raises(ConfigError, match="did you mean 'extends'"):
        load_config(write("extend: demo\n"))
    with pytest.raises(ConfigError, match="before values are overridden"):
        load_config(write(""), ["extends=demo"])


def test_a_merge_key_takes_over_what_the_section_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "sft: &a\n  epochs: 1\n  batch_pairs: 8\nreward_model:\n  <<: *a\n  epochs: 3\n"
    )
    config = load_config(path)
    assert (config.reward_model.epochs, config.reward_model.batch_pairs) == (3.0, 8)
    path.write_text("sft: &a\n  epochs: -1\nreward_model:\n  <<: *a\n")
    with pytest.raises(ConfigError, match=r"line 3: reward_model\.epochs: .* greater than 0"):
        load_config(path)
