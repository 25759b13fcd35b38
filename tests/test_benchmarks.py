"""Every benchmark runs to its end at its small size, in a process of its own, and its figures are finite."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from run_builders import DATA, ROOT

pytestmark = pytest.mark.slow

SCRIPTS = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if '\nif __name__ == "__main__":' in p.read_text()}
SLOW_OPENRLHF = (pytest.mark.slow, pytest.mark.openrlhf)


def case(command: str, lines: str, figures: str, needs: str = "", passes: int | None = None, marks: Any = ()) -> Any:
    """command: script and its arguments besides --small and --json
    lines: the beginnings of the table's lines, on each of which a number follows, split by |
    figures: names of numbers in the file, split by |
    needs: packages, and 'data' for the shared questions, split by spaces
    passes: how many goals of correctness it says are met; None: it does not count them
    """
    return pytest.param(command, lines.split("|"), figures.split("|"), needs.split(), passes, marks=marks, id=command)


# By hand, because vLLM takes a minute to start: `eval_throughput --engine vllm`, `generation --vllm`.
CASES = [
    case("against_trl", "fixed|varied", "trl_seconds|our_seconds|speed_ratio|largest_difference", "trl"),
    case(
        "campaign",
        "killed at a sync|killed at a rename|local: flip|local: swap|local: folders",
        "tried|detected|silent|lost|seed",
    ),
    case("eval_throughput", "round 1: bare", "responses|tokens|graded_right|overhead", "data"),
    case(
        "gpu --section 1 2 3",
        "forward: nats off, at most|1 - cosine of the updates|scoring: tokens/s|grad_norm, off by",
        "forward: nats off, at most|1 - cosine of the updates|scoring: tokens/s|grad_norm, off by",
        passes=7,
        marks=pytest.mark.slow,
    ),
    case(
        "gpu --section 4 5",
        "grad_norm, off by|log-probs, nats off|update: ms|measure: ms",
        "grad_norm, off by|log-probs, nats off|entropies, nats off|update: ms|measure: ms",
        "openrlhf",
        passes=8,
        marks=SLOW_OPENRLHF,
    ),
    case("generation", "ours|copied|turns|generate|rows with", "ours|copied|turns|generate|same_rows"),
    case("grading", "plain math-verify|ours  |ours, 1 % path", "plain|ours|pathological|speed|harm", "data"),
    case("hybrid", "met", "packed|padded|wrong"),
    case("layouts", "met", "model|update|rollout|cache|host|download|disk|A100"),
    case(
        "lora",
        "peak_MB|trained|adam_MB|update_seconds|merged_tokens_per_second|beside_tokens_per_second",
        "peak_MB|trained|adam_MB|merged_tokens_per_second|beside_tokens_per_second|saved|faster",
    ),
    case(
        "replay_scale",
        "300.00|1,000.00|3,000.00|a trajectory of 2,000|snapshot of 1,200",
        "plan|observe|store|step_max|copying|ratio|save_s_per_GB|growth|processor_s",
    ),
    case("smollm2", "on_policy|paper|one_rollout_beside|met", "on_policy, seed 0|accuracy|answered|responses"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """With a cache of its own: the tiny model of several scripts is warmed up once."""
    cache = str(tmp_path_factory.mktemp("models"))
    return {**os.environ, "PYTHONPATH": str(ROOT), "EXGRPO_CACHE": cache, "EXGRPO_TEST_DATA": str(DATA)}


def test_every_benchmark_has_a_small_size_that_is_run():
    assert {param.id.split()[0] for param in CASES} == SCRIPTS


@pytest.mark.parametrize(("command", "lines", "figures", "needs", "passes"), CASES)
def test_the_small_size_runs_to_its_end(command, lines, figures, needs, passes, request, environment, tmp_path):
    for package in needs:
        if package == "data":
            request.getfixturevalue("shared_data")
        elif importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    script, *arguments = command.split()
    written = tmp_path / "figures.json"
    line = [sys.executable, f"benchmarks/{script}.py", "--small", "--json", str(written), *arguments]
    run = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    for beginning in lines:
        assert re.search(rf"^ *{re.escape(beginning)}.*\d", run.stdout, re.MULTILINE), f"{beginning}\n{run.stdout}"
    assert passes is None or run.stdout.count("PASS") == passes, run.stdout
    result = json.loads(written.read_text(), parse_constant=lambda name: pytest.fail(f"{name} among the figures"))
    assert result["small"] is True
    assert result["met"] is True
    assert set(figures) <= set(numbers(result)), run.stdout


def numbers(value: Any, name: str = "") -> Iterator[str]:
    """Names of all numbers in what a script wrote; those of a list have its name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name
