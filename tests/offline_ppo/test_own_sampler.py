"""A sampler of the user's, by path and name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.inputs import own_code, own_code_fields
from tasks.config.shared import identity_fields
from tasks.errors import ConfigError, DataError, MissingInputError
from tasks.offline_ppo.batches import OwnSampler
from tasks.offline_ppo.config import OfflinePPOConfig
from tasks.workspace import Workspace

GROUPS = [
    {"subset": "a", "prompt_tokens": 3, "response_tokens": [2, n], "rewards": [0.0, float(n)]}
    for n in range(5)
]
# In the order of the reward margin, the largest first, and then from the start again.
BY_MARGIN = """
class Mine:
    def __init__(self, groups, seed):
        spans = [max(g["rewards"]) - min(g["rewards"]) for g in groups]
        self.order = sorted(range(len(groups)), key=lambda i: -spans[i])
        self.at = seed % len(groups)

    def draw(self, batch_prompts):
        drawn = [self.order[(self.at + i) % len(self.order)] for i in range(batch_prompts)]
        self.at += batch_prompts
        return drawn

    def state(self):
        return {"at": self.at}

    def resume(self, state):
        self.at = state["at"]
"""


def _config(path: Path, **fields: Any) -> OfflinePPOConfig:
    return OfflinePPOConfig.model_validate(
        {"batch_prompts": 2, "sampler": {"path": str(path), "name": "Mine", **fields}}
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(BY_MARGIN)
    return path


def test_it_decides_what_is_drawn_and_resumes(file: Path) -> None:
    sampler = OwnSampler(_config(file), GROUPS)
    # Margins 0, 1, 2, 3, 4.
    assert sampler.next_draw().indices == [4, 3]
    state = json.loads(json.dumps(sampler.state_dict()))
    draw = sampler.next_draw()
    assert draw.indices == [2, 1] and draw.corrections == [1.0, 1.0]
    resumed = OwnSampler(_config(file), GROUPS)
    resumed.load_state_dict(state)
    assert resumed.next_draw().indices == [2, 1]
    resumed.set_batch_size(3)
    assert resumed.next_draw().indices == [0, 4, 3]
    resumed.reset(1)
    assert resumed.next_draw().indices == [3, 2, 1]


def test_a_state_of_another_file_or_other_prompts_is_refused(file: Path) -> None:
    state = OwnSampler(_config(file), GROUPS).state_dict()
    with pytest.raises(DataError, match=r"Mine of .*mine\.py"):
        OwnSampler(_config(file), GROUPS[:4]).load_state_dict(state)
    file.write_text(BY_MARGIN + "\n")
    with pytest.raises(DataError, match=r"Mine of .*mine\.py"):
        OwnSampler(_config(file), GROUPS).load_state_dict(state)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Mine", "class Other"),
        ("return drawn", "return drawn[:1]"),
        ("return drawn", "return [5] * batch_prompts"),
        ("return drawn", "return [0.5] * batch_prompts"),
        ("return drawn", "return 1 / 0"),
        ("def __init__(self, groups, seed)", "def __init__(self, groups)"),
        ("import", "import"),
    ],
)
def test_what_cannot_be_used_is_named(file: Path, old: str, new: str) -> None:
    file.write_text(BY_MARGIN.replace(old, new) if old != "import" else "import no_such_module")
    with pytest.raises(ConfigError, match=r"Mine of .*mine\.py"):
        OwnSampler(_config(file), GROUPS).next_draw()


def test_settings_that_it_would_not_read_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"sampler\.stratify"):
        _config(file, stratify=True)


def test_its_text_is_part_of_the_fingerprint_and_its_absence_is_not(
    file: Path, workspace: Workspace
) -> None:
    plain = OfflinePPOConfig()
    assert {"path", "name"}.isdisjoint(identity_fields(plain)["sampler"])
    cfg = _config(file)
    fields = own_code_fields(cfg, identity_fields(cfg))
    assert fields["sampler"]["path"] == "file" and fields["sampler"]["name"] == "Mine"
    before = own_code(cfg, workspace)["sampler"].fingerprint
    file.write_text(BY_MARGIN + "\n")
    assert own_code(cfg, workspace)["sampler"].fingerprint != before
    file.unlink()
    with pytest.raises(MissingInputError, match=r"offline_ppo\.sampler\.path"):
        own_code(cfg, workspace)
