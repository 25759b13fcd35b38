#!/usr/bin/env python
"""What the paper measures of a finished run besides accuracy (docs/explore.md). No model is loaded.

    python scripts/measure.py cost runs/exgrpo runs/on_policy      # Table 8: seconds, what replay adds, the buffer
    python scripts/measure.py entropy runs/x                       # of correct responses by difficulty (Fig. 1c)
    python scripts/measure.py code runs/x                          # share with a block of code over time (Table 11)
    python scripts/measure.py kept runs/x                          # questions in the loss of a mini-batch (Table 10)
    python scripts/measure.py judge runs/x --base-url http://localhost:8000/v1 --model NAME --prompt judge.txt

`judge` sends the correct responses to a server with OpenAI's protocol, with your own prompt, in which {question},
{answer} and {response} stand for theirs, and appends what it says to RUN/judged.jsonl; the same command continues after
a stop. The server's key is what OPENAI_API_KEY holds. Exit status: 0, or 2 for what cannot be measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.io.terminal import positive

if TYPE_CHECKING:
    from exgrpo_orlhf.experiment import Experiment
    from exgrpo_orlhf.records import Trajectory


def main() -> int:
    arguments = _parser().parse_args()
    terminal.messages()
    from exgrpo_orlhf.sampling import EngineLost
    from exgrpo_orlhf.show.tables import aligned, csv_text

    try:
        table = _measured(arguments)
        if not table:
            raise ValueError(f"{arguments.run[0]} has no correct response to measure")
        cells = [[name for name in table[0]], *([_cell(row[name]) for name in table[0]] for row in table)]
        print("\n".join(aligned(cells, left=3)))
        if arguments.csv:
            write(arguments.csv, csv_text(list(table[0]), table))
    except (ValueError, OSError, EngineLost) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measured(arguments: argparse.Namespace) -> list[dict[str, object]]:
    from exgrpo_orlhf import config

    sys.path.insert(0, str(Path(__file__).resolve().parent))  # of exgrpo-measure the path lacks this folder
    import paper_measures as measures

    if arguments.what == "cost":
        return measures.cost({str(run): run for run in arguments.run})
    if len(arguments.run) > 1:
        raise ValueError(f"{arguments.what} measures one run, and {len(arguments.run)} are given")
    (run,) = arguments.run
    experiment = config.load([run / "config.gin"])
    if arguments.what == "kept":
        return measures.kept(run, experiment.dynamic_sampling, experiment.optimizer.steps_per_batch)
    is_correct = _success(experiment) if experiment.mixer.store_rule.stores_failures else (lambda _: True)
    found = measures.responses(run, experiment.questions.load(), is_correct)
    if arguments.what == "code":
        return measures.code(found)
    if arguments.what == "entropy":
        return measures.entropy(found, experiment.mixer.buckets)
    if not (arguments.base_url and arguments.model and arguments.prompt):
        raise ValueError("judge needs --base-url, --model and --prompt")
    from exgrpo_orlhf.sampling.openai_server import ServerSampler

    prompt = arguments.prompt.read_text(encoding="utf-8")
    key = os.environ.get("OPENAI_API_KEY")
    sampler = ServerSampler(arguments.base_url, arguments.model, api="chat", key=key, concurrency=arguments.concurrency)
    sampling = {"seed": 0, "max_tokens": arguments.max_tokens, "temperature": 0.6, "top_p": 0.95}  # the paper's
    try:
        sampler.check_server()
        measures.judge(run, found, prompt, arguments.model, sampler, sampling)
    finally:
        sampler.close()
    return measures.verdicts(run, found, prompt, arguments.model, tuple(arguments.words), experiment.mixer.buckets)


def _success(experiment: Experiment) -> Callable[[Trajectory], bool]:
    """Whether a stored trajectory is a success, by its reward, or by that one of several that decides."""
    from exgrpo_orlhf.rounding import less_rounding

    verifier, environment = experiment.verifier, experiment.environment
    name = verifier.success_by or next(iter(verifier.parts), "")
    plays = environment.path is not None and environment.reward == "environment"
    least = less_rounding((environment if plays else verifier).success_at)
    return lambda trajectory: less_rounding(dict(trajectory.parts).get(name, trajectory.reward)) >= least


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if value != value else f"{value:.4g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "entropy", "code", "kept", "judge"))
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN", help="a run's folder; of cost also several")
    parser.add_argument("--csv", type=terminal.output_file, metavar="FILE", help="the table")
    group = parser.add_argument_group("judge")
    group.add_argument("--base-url", metavar="URL", help="of the server, with its version: http://localhost:8000/v1")
    group.add_argument("--model", metavar="NAME", help="the server's name of the model")
    group.add_argument("--prompt", type=Path, metavar="FILE", help="text with {question}, {answer} and {response}")
    group.add_argument("--words", nargs=2, default=("valid", "invalid"), help="verdicts (default: valid invalid)")
    group.add_argument("--concurrency", type=positive, default=16, metavar="N", help="requests at a time (default 16)")
    group.add_argument("--max-tokens", type=positive, default=8192, metavar="N", help="of an answer (default 8192)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
