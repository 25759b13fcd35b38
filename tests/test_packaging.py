"""An ordinary installation, without the checkout: its commands work from any folder and write to the current one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from run_builders import ROOT, small_bindings

pytestmark = pytest.mark.slow

FOLDERS = ("exgrpo_orlhf", "gin", "evals", "scripts")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with nothing but the installed wheel. It is built from a copy, because building leaves files behind."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", source / "wheels", source], check=True)
    (wheel,) = (source / "wheels").iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", folder, wheel], check=True)
    return folder


@pytest.fixture
def say(installed, tmp_path):
    """Runs Python in an empty folder with that installation alone on PYTHONPATH, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment |= {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: object) -> str:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_package_and_its_files_come_from_the_installation(installed, say):
    code = (
        "import exgrpo_orlhf; from exgrpo_orlhf.config import gin_files\n"
        "from exgrpo_orlhf.evaluation import benchmarks, sets\n"
        "print(exgrpo_orlhf.__file__, gin_files.GIN_FOLDER, benchmarks.DEFINITIONS, sets.DATASETS, sep='\\n')"
    )
    package, gin, definitions, datasets = map(Path, say("-c", code).split())
    assert package == installed / "exgrpo_orlhf" / "__init__.py"
    assert all(path.is_relative_to(package.parent) and path.exists() for path in (gin, definitions))
    assert not datasets.is_relative_to(installed)
    names = {path.relative_to(ROOT / "gin") for path in (ROOT / "gin").rglob("*.gin")}
    assert {path.relative_to(gin) for path in gin.rglob("*.gin")} == names
    others = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert others == {"bin", "exgrpo_orlhf"}, "gin and datasets are names of libraries"


def test_the_commands_train_and_list_benchmarks_and_write_to_the_current_folder(installed, say, raw_model, tmp_path):
    before = sorted(installed.rglob("*"))
    bindings = small_bindings(raw_model, "train.steps = 1", "Tracking.enabled = True")
    more = [word for binding in bindings for word in ("--set", binding)]
    say(installed / "bin" / "exgrpo-train", "--gin", "ablation_no_entropy.gin", "--name", "short", *more)
    assert (tmp_path / "runs" / "short" / "checkpoint-1" / "model.safetensors").is_file()
    assert (tmp_path / "mlflow.db").is_file()
    assert (tmp_path / "runs" / "short" / "explore.html").is_file(), "the templates of pages are installed too"
    listed = say("-m", "exgrpo_orlhf", "bench", "--list")
    assert "--suite paper: " in listed
    assert sorted(installed.rglob("*")) == before


def test_every_command_says_how_it_is_used(installed, say):
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {path.name for path in (installed / "bin").iterdir()} == set(commands)
    for command in commands:
        assert say(installed / "bin" / command, "--help").startswith(f"usage: {command} ")
