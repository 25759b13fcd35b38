"""run_bench.py in this process, and a model that takes any text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from eval_builders import CHAINS, RUN_BENCH
from eval_builders import byte_model as make_byte_model

from exgrpo_orlhf.evaluation import bench_run, report
from exgrpo_orlhf.show.charts import Chart
from exgrpo_orlhf.workers.fork_server import close_workers


@pytest.fixture(scope="session")
def script():
    spec = importlib.util.spec_from_file_location("run_bench", RUN_BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@pytest.fixture
def bench(script, monkeypatch, capsys):
    """run_bench.py in this process: what it writes to standard output or, of one that fails, to standard error.

    Its graders, which take a second to start, stay until the file's last test; only `report` draws.
    """
    monkeypatch.setattr(bench_run, "close_workers", lambda: None)

    def run(*words: object, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["run_bench.py", *map(str, words)])
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if words[0] != "report":
                for chart in ("_accuracies", "_pass_curve"):
                    patch.setattr(report, chart, lambda *_: Chart("not drawn", "none", 1, 1, "data:,"))
                patch.setattr(report, "_lengths", lambda *_: [])
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
