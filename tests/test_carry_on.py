"""What stands at the root for users and for whoever carries on: AGENTS.md, CHANGELOG.md, CITATION.cff, commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from run_builders import ROOT

import exgrpo_orlhf
from exgrpo_orlhf import __main__, config
from exgrpo_orlhf.config.gin_files import RENAMED


def test_the_citation_is_of_this_version():
    """It was valid by schema 1.2.0 of citation-file-format.github.io, whose required keys these are."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", "Apache-2.0")
    assert citation["version"] == exgrpo_orlhf.__version__
    for work in (citation, *citation["references"]):
        assert all({"name"} == {*author} or {"family-names", "given-names"} == {*author} for author in work["authors"])


def test_every_command_runs_the_script_of_its_name():
    """What each prints with --help is compared with an installation by test_packaging.py."""
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert commands.keys() == {f"exgrpo-{name}" for name in __main__.SCRIPTS}
    for command, target in commands.items():
        name = command.removeprefix("exgrpo-")
        assert getattr(__main__, target.rpartition(":")[2]).args == (name,)
        assert (ROOT / __main__.SCRIPTS[name]).is_file()


GUIDE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```\n(.*?)^```", GUIDE, re.M | re.S) for line in block.splitlines()]
COMMANDS += re.findall(r"`((?:make|python) [^`]+)`", GUIDE)
FAST = ("make", "ruff")


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=() if each.startswith(FAST) else pytest.mark.slow) for each in dict.fromkeys(COMMANDS)],
)
def test_a_command_of_the_guide_runs(command, tmp_path):
    """make prints what it would run: that takes from minutes to an hour, and its parts have tests. What writes into the
    project does so in a copy."""
    program, *words = shlex.split(command)
    tools = Path(sys.executable).parent
    if not (shutil.which(program) if program == "make" else (tools / program).exists()):
        pytest.skip(f"{program} is not installed")
    folder = ROOT
    if command == "python docs/dev/settings.py":
        folder = tmp_path
        for name in ("docs", "exgrpo_orlhf", "gin"):
            shutil.copytree(
                ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.csv", "*.png")
            )
    call = ["make", "--dry-run", "--always-make", *words] if program == "make" else [tools / program, *words]
    environment = {**os.environ, "PYTHONPATH": str(folder), "EXGRPO_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if program == "make":
        scripts = re.findall(r"python ([\w/]+\.py)", done.stdout)
        assert scripts or re.search(r"-m (pytest|pip)|mypy", done.stdout)
        assert all((ROOT / script).is_file() for script in scripts)
    if folder is not ROOT:
        assert (folder / "docs" / "settings.md").read_bytes() == (ROOT / "docs" / "settings.md").read_bytes()


def test_the_guide_is_short_and_names_what_is_there():
    assert len(GUIDE.splitlines()) <= 120
    assert {"make quickstart", "make test"} <= {*COMMANDS}
    for name in re.findall(r"`((?:docs|evals|exgrpo_orlhf|gin|scripts|tests|benchmarks)/[\w/.]*)`", GUIDE):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"\]\(([\w/.]+)\)", GUIDE):
        assert (ROOT / target).is_file(), target


def test_the_changes_are_of_this_version_and_its_renamed_settings_are_as_they_say():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(changes.splitlines()) <= 150
    assert re.search(r"^## (\S+)$", changes, re.M)[1] == exgrpo_orlhf.__version__
    newest = changes.split("\n## ")[1]
    rows = re.findall(r"^ *\| (`.+) \| (`.+) \|$", newest, re.M)
    before, now = (
        [binding for row in rows for binding in re.findall(r"`([\w.]+ = [^`]+)`", row[column])] for column in (0, 1)
    )
    assert {binding.partition(" = ")[0] for binding in before} == RENAMED.keys() - {"Environment.recheck_every"}
    for binding in before:
        with pytest.raises(config.ConfigError, match="ReplayMixer"):
            config.load(["base.gin"], [binding])
    for binding in now:
        config.load(["base.gin"], [*(["ReplayMixer.rho = 0"] * ("@LateInjection" in binding)), binding])
    named = re.findall(r"gin/[\w/]+\.gin", newest)
    assert named
    assert all((ROOT / name).is_file() for name in named)
