"""Every value of a setting that names a kind trains by scripts/train.py, with evaluations and a checkpoint."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_server import http_server
from product_runs import FILES, OF_OPENRLHF, WITHOUT_A_RUN, guesser, kinds, kinds_in, openrlhf_runs, runs, write_files
from run_builders import ROOT, python, rows, set_words

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.checkpoints import manifest
from exgrpo_orlhf.workers.fork_server import close_workers

LOCAL, OPENRLHF = ("toy.gin",), ("toy.gin", "engines/openrlhf_cpu.gin")
TRAIN = ROOT / "scripts" / "train.py"
RARELY = "ReplayMixer.store_rule = @OneSuccess()"
NOWHERE = Path(), Path(), "http://nowhere"


@pytest.fixture(scope="module")
def table(warm_model, tmp_path_factory):
    """The bindings of all runs by name, with a reward server that is right by chance."""
    folder = tmp_path_factory.mktemp("product")
    write_files(folder)

    def reply(method, path, headers, body):
        queries = json.loads(body)["query"] if body else []
        return 200, {"connection": "close"}, json.dumps({"rewards": [float(len(query) % 2) for query in queries]})

    with http_server(reply) as address:
        yield runs(warm_model, guesser(folder / "guesser"), folder, url := f"{address}/get_reward") | openrlhf_runs(
            warm_model, folder, url
        )
    close_workers()


def test_every_value_that_names_a_kind_has_a_run():
    on_openrlhf = set().union(*(kinds_in(OPENRLHF, bindings) for bindings in openrlhf_runs(*NOWHERE).values()))
    local = (kinds_in(LOCAL + FILES.get(name, ()), bindings) for name, bindings in runs(Path(), *NOWHERE).items())
    trained = on_openrlhf.union(*local)
    expected = kinds() - WITHOUT_A_RUN.keys()
    assert not expected - trained, f"no run of product_runs.py has {sorted(map(str, expected - trained))}"
    missing = {pair for pair in expected - on_openrlhf if pair[0].startswith(OF_OPENRLHF)}
    assert missing == {("train.engine", "local")}, "no run on OpenRLHF has them"
    assert not WITHOUT_A_RUN.keys() & trained


@pytest.mark.slow
@pytest.mark.parametrize("name", runs(Path(), *NOWHERE))
def test_a_run_trains_evaluates_and_saves(name, table, tmp_path, run_script):
    words = [*gin_words(LOCAL + FILES.get(name, ())), *set_words(table[name]), "--out", tmp_path / "run"]
    if name == "sampler vllm":
        if find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        done = python(TRAIN, *words)  # it leaves more in a process than the others
    else:
        done = run_script("train.py", *words)
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "run", table[name])


@pytest.mark.slow
@pytest.mark.openrlhf
@pytest.mark.skipif(find_spec("ray") is None, reason="the OpenRLHF stack is not installed (make openrlhf-cpu)")
@pytest.mark.parametrize("name", openrlhf_runs(*NOWHERE))
def test_a_run_on_openrlhf_does_too(name, table, tmp_path):
    done = python(TRAIN, *gin_words(OPENRLHF), *set_words(table[name]), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "run", table[name])


def gin_words(files: tuple[str, ...]) -> list[str]:
    return [word for file in files for word in ("--gin", file)]


def assert_trained(run: Path, bindings: list[str]) -> None:
    """Two steps, an evaluation before and after them, and a whole checkpoint."""
    manifest.verify(checkpoints.find(run)[2])
    metrics = rows(run)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all(math.isfinite(row["policy/grad_norm"]) for row in metrics[1:])
    if {f"Verifier.kind = {kind!r}" for kind in ("math", "choice", "code")} & {*bindings}:
        assert {row[f"reward/{share}_share"] for row in metrics[1:] for share in ("error", "timeout")} == {0}
    evaluated = [row["step"] for row in metrics if "eval/validation/avg_at_1" in row]
    assert evaluated == ([] if "Work.validation = None" in bindings else [0, 2])
    # In two steps these replay whatever is sampled: experts' answers, or successes of 8 groups, right by chance.
    by_chance = "Verifier.kind = 'function'" in bindings and not {"train.generate_ahead = True", RARELY} & {*bindings}
    if by_chance or "ReplayMixer.collects = False" in bindings:
        assert metrics[2]["replay/actual_share"] > 0
