"""What README.md and the job files say works."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaybatch import spec
from relaybatch.cli import app
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    found = re.findall(r"^    (relaybatch [^#\n]+)", README, re.MULTILINE)
    return sorted({c.strip() for c in found})


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize("line", commands())
def test_its_commands_and_their_job_files_exist(line: str) -> None:
    words = shlex.split(line)[1:]
    assert CliRunner().invoke(app, [words[0], "--help"]).exit_code == 0
    for word in words[1:]:
        if word.endswith(".yaml"):
            spec.load(ROOT / word)


def test_its_job_file_is_valid(tmp_path: Path) -> None:
    block = re.search(r"^    name: labels\n(?:(?:    .*)?\n)+", README, re.MULTILINE)
    assert block is not None
    (tmp_path / "job.yaml").write_text(textwrap.dedent(block[0]))
    job = spec.load(tmp_path / "job.yaml")
    assert [t.name for t in job.spec.tiers] == ["small", "large"]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^    |`)make (\w+)", README, re.MULTILINE))))
def test_its_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_nothing_still_waits_to_be_filled_in() -> None:
    assert "<!--" not in README
