"""Every value of a setting that names a kind, every row of the paper's tables and every ablation trains by
scripts/train.py, with evaluations and a checkpoint."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from http_server import http_server
from product_runs import (
    ABLATIONS,
    OF_OPENRLHF,
    ON_OPENRLHF,
    PAPER_ROWS,
    WITHOUT_A_RUN,
    files_of,
    guesser,
    kinds,
    kinds_in,
    run_of_files,
    runs,
    write_files,
)
from run_builders import ROOT, python, rows, set_words

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.checkpoints import manifest
from exgrpo_orlhf.workers.fork_server import close_workers

TRAIN = ROOT / "scripts" / "train.py"
RARELY = "ReplayMixer.store_rule = @OneSuccess()"
UNBOUND = runs(Path(), Path(), Path(), "http://nowhere")
VLLM = "sampler vllm"


@pytest.fixture(scope="module")
def table(warm_model, tmp_path_factory):
    """The bindings of all runs by name, with a reward server that is right by chance."""
    folder = tmp_path_factory.mktemp("product")
    write_files(folder)

    def reply(method, path, headers, body):
        queries = json.loads(body)["query"] if body else []
        return 200, {"connection": "close"}, json.dumps({"rewards": [float(len(query) % 2) for query in queries]})

    with http_server(reply) as address:
        yield runs(warm_model, guesser(folder / "guesser"), folder, f"{address}/get_reward")
    close_workers()


def test_every_value_that_names_a_kind_has_a_run():
    of_run = {name: kinds_in(files_of(name), bindings) for name, bindings in UNBOUND.items()}
    on_openrlhf = set().union(*(pairs for name, pairs in of_run.items() if name.startswith(ON_OPENRLHF)))
    trained = set().union(*of_run.values())
    expected = kinds() - WITHOUT_A_RUN.keys()
    assert not expected - trained, f"no run of product_runs.py has {sorted(map(str, expected - trained))}"
    missing = {pair for pair in expected - on_openrlhf if pair[0].startswith(OF_OPENRLHF)}
    assert missing == {("train.engine", "local")}, "no run on OpenRLHF has them"
    assert not WITHOUT_A_RUN.keys() & trained


def case(name: str) -> Any:
    marks = [pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")] if name == VLLM else []
    if name.startswith(ON_OPENRLHF):
        reason = "the OpenRLHF stack is not installed (make openrlhf-cpu)"
        marks = [pytest.mark.openrlhf, pytest.mark.skipif(find_spec("ray") is None, reason=reason)]
    return pytest.param(name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*map(case, UNBOUND), *PAPER_ROWS, *ABLATIONS])
def test_a_run_trains_evaluates_and_saves(name, table, warm_model, tmp_path, run_script):
    files, bindings = (files_of(name), table[name]) if name in table else run_of_files(name, warm_model)
    words = [word for file in files for word in ("--gin", file)]
    words += [*set_words(bindings), "--out", tmp_path / "run"]
    # vLLM and Ray leave more in a process than the others.
    own_process = name == VLLM or name.startswith(ON_OPENRLHF)
    done = python(TRAIN, *words) if own_process else run_script("train.py", *words)
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "run", bindings)
    assert name not in ABLATIONS or rows(tmp_path / "run")[-1]["policy/grad_norm"] > 0


def assert_trained(run: Path, bindings: list[str]) -> None:
    """Two steps, an evaluation before and after them, and a whole checkpoint."""
    manifest.verify(checkpoints.find(run)[2])
    metrics = rows(run)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert all("policy/grad_norm" in row for row in metrics[1:])
    if {f"Verifier.kind = {kind!r}" for kind in ("math", "choice", "code")} & {*bindings}:
        assert {row[f"reward/{share}_share"] for row in metrics[1:] for share in ("error", "timeout")} == {0}
    evaluated = [row["step"] for row in metrics if "eval/validation/avg_at_1" in row]
    assert evaluated == ([] if "Work.validation = None" in bindings else [0, 2])
    # In two steps these replay whatever is sampled: experts' answers, or successes of 8 groups, right by chance.
    by_chance = "Verifier.kind = 'function'" in bindings and not {"train.generate_ahead = True", RARELY} & {*bindings}
    if metrics[2].get("replay/over"):
        assert metrics[2]["replay/added_rows"] == 0
    elif "replay/added_rows" in metrics[2]:
        assert metrics[2]["replay/added_rows"] > 0
    elif by_chance or "ReplayMixer.collects = False" in bindings:
        assert metrics[2]["replay/actual_share"] > 0
