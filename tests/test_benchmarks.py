"""Every benchmark runs to its end at its small size, in a process of its own, and its figures are finite."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_builders import DATA, ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import estimates, flags

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


# By hand, because vLLM takes a minute to start: `generation --vllm`.
CASES = [
    case("against_trl", "fixed|varied", "trl_seconds|our_seconds|speed_ratio|largest_difference", "trl"),
    case("campaign", "killed at a sync|killed at a rename|local: flip|local: swap|local: folders",
     "tried|detected|silent|lost|seed"),
    case("eval_throughput", "round 1: bare", "responses|tokens|graded_right|overhead", "data"),
    case("gpu --section 1 2 3 7",
     "forward 896: nats off, at most|1 - cosine of the updates|grad_norm, off by|compiled layers: ms",
     "forward 896: nats off, at most|1 - cosine of the updates|grad_norm, off by|compiled layers: ms", passes=9,
     marks=pytest.mark.slow),
    case("gpu --section 4 5", "grad_norm, off by|log-probs, nats off|update: ms|measure: ms",
     "grad_norm, off by|log-probs, nats off|entropies, nats off|update: ms|measure: ms", "openrlhf", passes=8,
     marks=SLOW_OPENRLHF),
    case("gpu --section 6", "TRL, loop: s a step|steps, times TRL's, loop",
     "TRL, loop: s a step|ours, loop: update, s|steps, times TRL's, loop", "trl"),
    case("gpu --section 8", "sync: s|replay's part of a step",
     "sync: s|train: s|rollout: s|replay's part of a step|replayed rows, share", "openrlhf", passes=0,
     marks=SLOW_OPENRLHF),
    case("generation", "ours|copied|turns|generate|rows with", "ours|copied|turns|generate|same_rows"),
    case("grading", "plain math-verify|ours  |ours, 1 % path", "plain|ours|pathological|speed|harm", "data"),
    case("hybrid", "met", "packed|padded|wrong"),
    case("layouts", "met", "model|update|rollout|cache|host|download|disk|A100"),
    case("lora", "peak_MB|trained|adam_MB|update_seconds|merged_tokens_per_second|beside_tokens_per_second",
     "peak_MB|trained|adam_MB|merged_tokens_per_second|beside_tokens_per_second|saved|faster"),
    case("planted_faults", "met", "deviation|limit|norm|cosine|differ|compared|smallest", "openrlhf",
     marks=SLOW_OPENRLHF),
    case("replay_scale", "300.00|1,000.00|3,000.00|a trajectory of 2,000|snapshot of 1,200",
     "plan|observe|store|step_max|copying|ratio|save_s_per_GB|growth|processor_s"),
    case("smollm2", "on_policy|paper|one_rollout_beside|met", "on_policy, seed 0|accuracy|answered|responses"),
]  # fmt: skip


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
    assert passes is None or len(re.findall(r"^met  ", run.stdout, re.MULTILINE)) == passes, run.stdout
    result = json.loads(written.read_text(), parse_constant=lambda name: pytest.fail(f"{name} among the figures"))
    assert result["small"] is True
    assert result["met"] is True
    assert set(figures) <= set(numbers(result)), run.stdout


# gpu.py at full size in all but width, depth and number of rows: its lengths, limits, layouts and batches are the real
# ones.
FULL = """
import sys
from pathlib import Path
import gpu
from gpu_work import FULL, Work
section, folder = int(sys.argv[1]), Path(sys.argv[2])
statistics = {name: (16, h) for name, (_, h) in FULL.statistics.items()}
narrow = {"model": (64, 1, 2, 128), "vocabulary": 4096, "statistics": statistics, "chain": {**FULL.chain, "steps": 1}}
rows = 8 if section in (4, 5) else 2  # OpenRLHF's micro-batches have 16 rows
size = FULL._replace(**narrow, questions=rows, group=2, repeats=1)
gpu.SECTIONS[section][1](Work(False, size, folder))
"""


@pytest.mark.parametrize("section", [1, 2, 3, 7, *(pytest.param(n, marks=SLOW_OPENRLHF) for n in (4, 5))])
def test_every_section_of_the_gpus_benchmark_is_built_at_full_size_too(section, environment, tmp_path):
    if section in (4, 5) and importlib.util.find_spec("ray") is None:
        pytest.skip("OpenRLHF is not installed")
    path = os.pathsep.join((str(ROOT / "benchmarks"), environment["PYTHONPATH"]))
    line = [sys.executable, "-c", FULL, str(section), str(tmp_path)]
    run = subprocess.run(line, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]


def test_the_runs_of_the_gpus_benchmark_are_bound_as_their_engines_ask(monkeypatch):
    """64 × 8 rows whose prompt and response fit the 2,048 positions that SmolLM2 was trained on."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_runs
    import gpu_work

    work = gpu_work.Work(True, gpu_work.FULL, Path())
    for files in (("baselines/on_policy.gin",), ("engines/openrlhf_1gpu.gin",)):
        experiment = config.load(*gpu_runs.layout(work, *files))
        assert experiment.settings.questions_per_step * experiment.settings.group_size == 512
        assert estimates.longest_sequence(experiment) <= 2048
        if experiment.openrlhf is not None:
            flags.command_line(experiment, experiment.openrlhf.all_flags(), "model", Path(), resume=False)
            assert 64 % flags.divisible_questions(experiment) == 0


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
