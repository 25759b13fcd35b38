"""Benchmarks with an environment: run_bench.py plays them as a run's own evaluation does."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from eval_builders import HERE, definition, results, samples
from run_builders import ROOT, train_small

from exgrpo_orlhf.environments.environment import Environment

CALCULATOR = ROOT / "benchmarks" / "slipping_calculator.py"
BLOCK = """
[calculator]
title = "Chains with a calculator"
verifier = "modular_chain"
chains = {{ count = 20, operands = [2, 3], split = "validation" }}
max_tokens = 24
temperature = {temperature}
top_p = 1.0
samples = {samples}
ask = ""
environment = {{ path = "{path}", stop = ["="], timeout = 60.0{more} }}
"""
VERIFIED = ', reward = "verifier_with_observations"'


@pytest.fixture
def play(bench, warm_model, tmp_path):
    """An evaluation of a model on chains with an environment; the folder of its results."""

    def run(*words, model=warm_model, out="x", status=0, temperature=1.0, count=2, path=CALCULATOR, more=""):
        block = tmp_path / "mine.toml"
        block.write_text(BLOCK.format(temperature=temperature, samples=count, path=path, more=more))
        own = ("--definitions", block, "--benchmarks", "calculator", *(words or HERE), "--out", tmp_path / out)
        output = bench("--model", model, *own, status=status)
        return output if status else tmp_path / out

    return run


@pytest.mark.slow
def test_episodes_score_as_in_the_runs_own_evaluation(warm_model, tmp_path, play):
    """The same greedy episodes, one by one, with the same verdicts. The calculator draws no numbers, because the
    seeds of a run's evaluation are others."""
    calculator = ROOT / "exgrpo_orlhf" / "testbed" / "chain_calculator.py"
    bindings = [f"Environment.path = {str(calculator)!r}", "Environment.stop = ('=',)", "Environment.timeout = 60.0"]
    bindings += ["train.steps = 1", "train.eval_every = 1", "validation/ModularChains.count = 20"]
    run = tmp_path / "run"
    train_small(warm_model, run, *bindings)
    out = play(model=run / "checkpoint-1", temperature=0.0, count=1, path="chain_calculator.py")
    then = {each["id"]: each for each in samples(run / "evaluation" / "1", "validation")}
    now = {each["id"]: each for each in samples(out, "calculator")}
    assert then.keys() == now.keys()
    for name in ("prompt", "response", "response_tokens", "verdict", "finish"):
        assert [now[each][name] for each in then] == [then[each][name] for each in then], name
    assert all("=" in each["response"] for each in now.values())
    assert len({each["verdict"] for each in now.values()}) == 2


@pytest.mark.slow
def test_an_interrupted_evaluation_ends_with_the_same_episodes(play, tmp_path):
    """Of episodes that are played together, where one is missing, all are played again."""
    words = (*HERE, "--rows", 8)
    content = (play(*words) / "calculator" / "samples.jsonl").read_bytes()
    noted = json.loads((tmp_path / "x" / "config.json").read_text())["benchmarks"]["calculator"]["environment"]
    assert noted.keys() <= {"sha256", *(each.name for each in fields(Environment))}, "of its file no more than the hash"
    again = play(*words, out="y") / "calculator" / "samples.jsonl"
    assert again.read_bytes() == content
    lines = content.splitlines(keepends=True)
    again.write_bytes(b"".join([*lines[:3], *lines[8:20]]) + lines[20][:30])
    (again.parents[1] / "results.json").unlink()
    play(*words, out="y")
    assert again.read_bytes() == content
    assert len({json.loads(line)["response"] for line in lines}) > 20, "each sample has its seed"


@pytest.mark.slow
def test_an_environment_gets_the_columns_that_a_files_entry_names(byte_model, tmp_path, bench):
    (tmp_path / "agent.py").write_text(
        "class Agent:\n"
        "    def reset(self, states):\n"
        "        self.meta = states['meta']\n"
        "        return states\n\n"
        "    def step(self, states):\n"
        "        right = self.meta == {'level': 3, 'tests': ['a', 2.5]}\n"
        "        return {'rewards': float(right), 'environment_feedback': '', 'done': True}\n"
    )
    row = {"problem": "2+2?", "answer": "4", "tests": ["a", 2.5], "more": {"level": 3}, "other": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    more = {"environment": '{ path = "agent.py", timeout = 60.0 }', "max_tokens": "4"}
    entry = 'name = "rows.jsonl", question = "problem"'
    block = definition(tmp_path, files=f'[{{ {entry}, meta = ["tests", "more.level"] }}]', **more)
    words = ("--model", byte_model, "--definitions", block, "--benchmarks", "mine", *HERE, "--out", tmp_path / "x")
    bench(*words)
    assert results(tmp_path / "x")["benchmarks"]["mine"]["avg"]["value"] == 1
    definition(tmp_path, files=f"[{{ {entry} }}]", **more)
    assert "mine.meta: ['more.level', 'tests'] there, None now" in bench(*words, status=2)


@pytest.mark.parametrize("more", ["", VERIFIED])
def test_regrading_keeps_the_verdicts_of_the_environment_and_of_a_verifier_that_grades_in_its_place(play, bench, more):
    out = play(count=1, more=more)
    before = samples(out, "calculator")
    assert {each["verdict"] for each in before} >= {"correct", "wrong"}
    assert {each["extracted"] is not None for each in before if each["verdict"] == "correct"} == {bool(more)}
    bench("regrade", out)
    assert samples(out, "calculator") == before
    assert results(out)["benchmarks"]["calculator"]["environment"]["stop"] == ["="]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "nowhere.py"}, "there is no file"),
        ({"more": ", turns = 2"}, "there is no key 'turns'; did you mean max_turns"),
        ({"more": ", max_turns = 0"}, "max_turns"),
        ({"words": (*HERE, "--engine", "openai", "--base-url", "http://127.0.0.1:9/v1", "--api", "chat")}, "openai"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_before_anything_is_generated(arguments, message, play):
    words = arguments.pop("words", ())
    assert message in play(*words, **arguments, status=2)


@pytest.mark.slow
def test_another_environment_is_another_evaluation(play, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(CALCULATOR.read_text())
    play(count=1, path=own)
    assert "max_turns" in play(count=1, path=own, more=", max_turns = 2", status=2)
    own.write_text(CALCULATOR.read_text().replace("0.3", "0.4"))
    assert "calculator.environment.sha256" in play(count=1, path=own, status=2)
