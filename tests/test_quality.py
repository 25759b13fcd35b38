"""The tree is clean: linted, formatted, type-checked, and free of paths of somebody's machine."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_tools_find_nothing(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_of_the_library_is_long():
    """One idea a file."""
    lengths = {path: len(path.read_text().split("\n")) for path in (ROOT / "exgrpo_orlhf").rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > 360} == {}


def test_replay_and_objective_import_nothing_above_them():
    """No arrow upwards: the algorithm knows no engine, no tracker, no gin."""
    imports = re.compile(r"^\s*(?:from|import)\s+(\S+)", re.MULTILINE)
    allowed = {"numpy", "pyarrow", "torch", *sys.stdlib_module_names}
    for package in ("replay", "objective"):
        for path in (ROOT / "exgrpo_orlhf" / package).glob("*.py"):
            for module in imports.findall(path.read_text()):
                assert not module.startswith(".."), f"{path}: {module}"
                if not module.startswith("."):
                    assert module.split(".")[0] in allowed, f"{path}: {module}"
        files = (ROOT / "exgrpo_orlhf" / package).glob("*.py")
        used = {m.split(".")[0] for path in files for m in imports.findall(path.read_text())}
        assert not (package == "replay" and "torch" in used)
        assert not (package == "objective" and "pyarrow" in used)
