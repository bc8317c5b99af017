"""deployments/Containerfile and what the image is built from: no password, the right Python."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import PurePosixPath

import pytest
from compose_file import DEPLOYMENTS
from packaging.specifiers import SpecifierSet

ROOT = DEPLOYMENTS.parent
CONTAINERFILE = (DEPLOYMENTS / "Containerfile").read_text()
PASSWORD_FILES = ("deployments/.env", ".env", "deployments/.env.production")


def _is_left_out(path: str) -> bool:
    """Apply .dockerignore: patterns are anchored at the root, and the last one that fits counts."""
    is_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!").strip("/")
        if not pattern or line.startswith("#"):
            continue
        parts = [re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split("/")]
        expression = "/".join(parts).replace("[^/]*[^/]*/", "(.*/)?")
        above = [path, *map(str, PurePosixPath(path).parents)]
        if any(re.fullmatch(expression, one) for one in above):
            is_out = not line.startswith("!")
    return is_out


@pytest.mark.parametrize("path", PASSWORD_FILES)
def test_passwords_of_the_servers_do_not_get_into_the_image(path: str) -> None:
    assert "COPY . ." in CONTAINERFILE
    assert _is_left_out(path)
    assert not _is_left_out("deployments/prefect.yaml")
    assert _is_left_out("var/x") and not _is_left_out("flows/var/x")


@pytest.mark.parametrize("path", PASSWORD_FILES)
def test_passwords_of_the_servers_do_not_get_into_git(path: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", "--quiet", path]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_image_has_the_python_that_the_package_wants() -> None:
    (image,) = re.findall(r"^FROM python:(\d+\.\d+)-\S+ AS base$", CONTAINERFILE, re.MULTILINE)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert image in SpecifierSet(wanted), (image, wanted)


def test_the_project_lies_at_one_place_in_the_image() -> None:
    (directory,) = re.findall(r"^WORKDIR (\S+)$", CONTAINERFILE, re.MULTILINE)
    assert re.findall(r"safe\.directory (\S+)", CONTAINERFILE) == [directory]
    assert re.findall(r"RLHF_PROJECT=(\S+)", CONTAINERFILE) == [directory]
