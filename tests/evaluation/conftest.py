"""run_bench.py in this process, and a model that takes any text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from eval_builders import CHAINS, RUN_BENCH
from eval_builders import byte_model as make_byte_model


@pytest.fixture(scope="session")
def script():
    spec = importlib.util.spec_from_file_location("run_bench", RUN_BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(script, monkeypatch, capsys):
    """run_bench.py in this process: what it writes to standard output or, of one that fails, to standard error."""

    def run(*words: object, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["run_bench.py", *map(str, words)])
        capsys.readouterr()
        ended = script.main()
        output = capsys.readouterr()
        assert ended == status, output.err
        return output.err if status else output.out

    return run


@pytest.fixture
def chains(bench, warm_model, tmp_path):
    """An evaluation of the warm model on chains."""

    def run(*words: object, out: Path = tmp_path, status: int = 0) -> str:
        return bench("--model", warm_model, *CHAINS, *words, "--out", out, status=status)

    return run


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes") / "model")
