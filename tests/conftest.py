"""What several test files share: where the data is, and small models made here."""

from __future__ import annotations

import gc
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from run_builders import DATA, ROOT, THINKING, byte_tokenizer

from exgrpo_orlhf.checkpoints import manifest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup a file's tests run in one process, because they share what is slow to make, and those of
    all files about OpenRLHF in the same one: two of its runs at the same time are too much for two cores.

    pytest-xdist 3.8's own groups do nothing with pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "openrlhf" if "openrlhf" in file or "doctor" in file else file

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """What is imported by now is left out of every later collection of garbage, which would take up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real questions, or skip."""
    if not DATA.is_dir():
        pytest.skip(f"no shared data at {DATA}; set EXGRPO_TEST_DATA")
    return DATA


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory) -> Path:
    """A chain model after a very short warm-up on 2 and 3 operands: it answers, and is right now and then."""
    from exgrpo_orlhf.models.tiny_models import ChainModel

    cache = tmp_path_factory.mktemp("models")
    return _open(ChainModel(operands=(2, 3), steps=150, width=32, layers=2, cache=str(cache)).prepare())


@pytest.fixture(scope="session")
def raw_model(tmp_path_factory) -> Path:
    """A chain model that has seen next to nothing."""
    from exgrpo_orlhf.models.tiny_models import ChainModel

    cache = tmp_path_factory.mktemp("models")
    return _open(ChainModel(operands=(2, 3), steps=1, width=32, layers=2, cache=str(cache)).prepare())


@pytest.fixture(scope="session")
def thinking(tmp_path_factory) -> Path:
    """The folder of a tokenizer alone, whose chat template opens the thought."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("thinking"))
    return folder


@pytest.fixture
def no_tracking_server(monkeypatch) -> None:
    """MLflow as a run sets it up, and no server but the test's own."""
    from exgrpo_orlhf.tracking.client import MLFLOW_ENVIRONMENT

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in MLFLOW_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def made_database(tmp_path_factory) -> Path:
    """An empty MLflow database: making one takes seconds."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def sqlite(tmp_path, made_database) -> str:
    shutil.copy(made_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def _open(model: Path) -> Path:
    """Without its manifest: tests copy the model and change the copy."""
    (model / manifest.NAME).unlink()
    return model


@pytest.fixture
def run_script(capsys, monkeypatch):
    """Runs a script's main() in this process: (name, arguments …) → status, stdout and stderr.

    It saves the imports of a process for each call.
    """

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            status = runpy.run_path(str(ROOT / "scripts" / name))["main"]()
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, output.out, output.err)

    return run
