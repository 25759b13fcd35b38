"""What several test files share: where the data is, and small models made here."""

from __future__ import annotations

import gc
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from run_builders import DATA, ROOT, THINKING, byte_tokenizer

from exgrpo_orlhf.checkpoints import manifest
from exgrpo_orlhf.sandbox import sandbox

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


# Slow tests of what shorter ones cover in part: runs of one more layout, campaigns, studies. `make test-long` runs
# them; with them `make test-all` would take an hour on two cores.
LONG = (
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[campaign]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[smollm2]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[gpu",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[eval_throughput",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[grading]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[hybrid]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[layouts]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[lora]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[planted_faults]",
    "test_benchmarks.py::test_the_small_size_runs_to_its_end[replay_scale]",
    "test_benchmarks.py::test_every_section_of_the_gpus_benchmark_is_built_at_full_size_too",
    "test_ablate.py::test_a_failed_run_and_an_outage_stop_nothing",
    "test_carry_on.py::test_a_command_of_the_guide_runs[mypy]",
    "test_doctor.py::test_planted_faults_are_named",
    "test_openrlhf_driver.py::test_a_real_cluster_needs_as_many_cpus_as_gpus[2]",
    "test_openrlhf_lora.py::test_with_zero_3_on_two_ranks",
    "test_openrlhf_run.py::test_a_run_goes_on_with_another_number_of_ranks",
    "test_openrlhf_matrix.py::*[1-",
    "test_openrlhf_run.py::test_a_colocated_zero_3_run_follows_its_ablation_and_a_signal",
    "test_openrlhf_run.py::test_a_full_object_store_ends_the_run_with_its_name",
    "test_openrlhf_run.py::test_a_run_generates_ahead",
    "test_openrlhf_run.py::test_a_signal_while_the_engines_start",
    "test_openrlhf_run.py::test_two_ranks_and_two_engines",
    "test_openrlhf_run.py::test_su01s_recipe",
    "test_openrlhf_run.py::test_a_trial_makes_its_steps",
    "test_pool.py::test_the_same_verdicts_in_ray",
    "test_product_path.py::test_a_run_trains_evaluates_and_saves[OpenRLHF: ",
    "test_real_questions.py::test_replayed_steps_on_real_questions_stay_within_bounded_memory",
    "test_reasoning_gym.py::test_every_task_has_the_same_questions_whatever_the_hash_seed",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[episodes, late and ahead]",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[graded]",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[reincarnated early]",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[revisits]",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[several rewards]",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[together]",
    "test_resume.py::test_a_resumed_run_with_options_equals_a_straight_one[weighted]",
    "test_run_bench.py::test_random_kills_change_nothing",
    "test_study_script.py::test_a_study_runs_and_writes",
    "test_tiny_models.py::test_a_warm_up_teaches_the_form_of_chains_asked_together",
    "test_vllm_here.py::test_a_killed_run_resumes_and_ends_as_an_undisturbed_one",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before -m chooses among them."""
    for item in items:
        if any(_is(item, name) for name in LONG):
            item.add_marker("long")
    files = {item.path.name for item in items}
    gone = [name for name in LONG if name.split("::")[0] in files and not any(_is(item, name) for item in items)]
    assert not gone or any("::" in word for word in config.args), f"LONG names tests that are gone: {gone}"


def _is(item: pytest.Item, name: str) -> bool:
    """name: the beginning of an id without its folder; a * stands for any text"""
    return fnmatchcase(item.nodeid, f"*/{name.replace('[', '[[]')}*")


def pytest_collection_finish() -> None:
    """What is imported by now is left out of every later collection of garbage, which would take up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_pictures() -> Iterator[None]:
    """curves.png takes a second of processor time at the end of each of hundreds of small runs, 40 % of some files'
    time. Runs in processes of their own draw it, and tests/study/test_training_picture.py does."""
    from exgrpo_orlhf.study.comparison_charts import Curves

    with patch.object(Curves, "ended", lambda self, buffer, step: None):
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_session() -> Iterator[None]:
    """Two processes of git and ten versions of libraries are 0.06 s of each small run. In this process they stay."""
    from exgrpo_orlhf.io import provenance

    commit, versions = provenance.git_commit(), provenance.versions()
    with (
        patch.object(provenance, "git_commit", lambda: commit),
        patch.object(provenance, "versions", lambda: dict(versions)),
    ):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real questions, or skip."""
    if not DATA.is_dir():
        pytest.skip(f"no shared data at {DATA}; set EXGRPO_TEST_DATA")
    return DATA


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory) -> Path:
    """A chain model after a very short warm-up on 2 and 3 operands: it answers, and is right now and then."""
    from exgrpo_orlhf.testbed.tiny_models import ChainModel

    cache = tmp_path_factory.mktemp("models")
    return _open(ChainModel(operands=(2, 3), steps=150, width=32, layers=2, cache=str(cache)).prepare())


@pytest.fixture(scope="session")
def raw_model(tmp_path_factory) -> Path:
    """A chain model that has seen next to nothing."""
    from exgrpo_orlhf.testbed.tiny_models import ChainModel

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


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    """Skips where programs cannot be run."""
    try:
        sandbox.check_available()
    except sandbox.NoSandbox as error:
        pytest.skip(str(error))
