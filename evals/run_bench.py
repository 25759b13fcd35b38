#!/usr/bin/env python
"""Evaluate a model on benchmarks, grade saved responses again, write reports.

    python evals/run_bench.py --model runs/x/checkpoint-700 --suite paper --out results/x
    python evals/run_bench.py --model … --benchmarks math500,aime24 --limit 20 --engine transformers
    python evals/run_bench.py regrade results/x
    python evals/run_bench.py report results/a results/b --html out.html
    python evals/run_bench.py table gin/paper/table6.gin            # all finished runs of a suite, beside the paper's

An evaluation is a folder: samples.jsonl of each benchmark, results.json, paper.md, report.html. Responses that exist
are not generated again: the same command continues after Ctrl-C, a kill or a crash. See docs/evaluation.md.
Exit status: 0 if all available benchmarks were evaluated, 128 + signal if a signal ended it, 1 if an engine or grader
failed, 2 if something is wrong before anything is generated.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from exgrpo_orlhf.evaluation.bench_options import (
    add_grading,
    chat_template_kwargs,
    make_parser,
    option_values,
    settle_engine,
)
from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.paths import PROJECT, WORKPLACE
from exgrpo_orlhf.io.redaction import without_password
from exgrpo_orlhf.io.terminal import positive


def main() -> int:
    actions = {"run": _run, "regrade": _regrade, "report": _report, "table": _table}
    words = sys.argv[1:]
    action = words.pop(0) if words and words[0] in actions else "run"
    terminal.messages()
    from exgrpo_orlhf.checkpoints import RunFolderError
    from exgrpo_orlhf.rewards import GradingError
    from exgrpo_orlhf.sampling import EngineLost

    try:
        return actions[action](words)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    except EngineLost as error:  # it says itself where the same command can continue
        print(f"error: {error}", file=sys.stderr)
        return 1
    except GradingError as error:
        print(f"error: {error}\nFinished responses are saved; the same command continues.", file=sys.stderr)
        return 1
    except (ValueError, OSError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


# -- run --------------------------------------------------------------------------------------------------------------


def _run(words: list[str], arguments: argparse.Namespace | None = None) -> int:
    parser = make_parser(__doc__)
    arguments = arguments or parser.parse_args(words)
    settle_engine(arguments)
    if arguments.model and arguments.engine != "openai":
        _require_model(arguments.model)
    import transformers

    from exgrpo_orlhf.checkpoints import find
    from exgrpo_orlhf.evaluation.bench_run import evaluate
    from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, Definitions
    from exgrpo_orlhf.evaluation.results_folder import progress
    from exgrpo_orlhf.io.stopping import StopRequest

    transformers.utils.logging.disable_progress_bar()
    definitions = Definitions((DEFINITIONS, *arguments.definitions))
    if arguments.list:
        print(definitions.listing())
        return 0
    names = [name.strip() for name in (arguments.benchmarks or "").split(",") if name.strip()]
    if not arguments.suite and not names:
        raise ValueError(f"nothing to run: give --suite or --benchmarks; there are {', '.join(definitions.benchmarks)}")
    if not arguments.model:
        parser.error("--model is required")
    plan, engine = _plan(arguments, definitions, names, words)
    name = f"{plan.builder.model.name}-{arguments.suite or '+'.join(names)}"
    out = arguments.out or WORKPLACE / "results" / name
    if (out / "metrics.jsonl").exists() or find(out):
        raise ValueError(f"--out {out} is the folder of a training run; give another one")
    logging.info("%d benchmarks, %d questions → %s", len(plan.sets), sum(len(each.rows) for each in plan.sets), out)
    under_way = (
        "what has arrived is saved, what is under way is asked again"
        if arguments.engine == "openai"
        else "responses under way are finished and saved"
    )
    with StopRequest(f"{under_way}, then the evaluation ends") as stop:
        results = evaluate(plan, out, engine, stop)
    if results is None:
        print(f"stopped at {progress(out)}; the same command continues {out}", file=sys.stderr)
        return 128 + (stop.signal or 0)
    _write(out, results)
    print(f"\n{out}: results.json, report.html", file=sys.stderr)
    if not arguments.no_mlflow:
        from exgrpo_orlhf.evaluation.mlflow_log import log_results

        log_results(out, results, default_uri=f"sqlite:///{WORKPLACE / 'mlflow.db'}", experiment=arguments.experiment)
    return 0


def _plan(arguments: argparse.Namespace, definitions: Any, names: list[str], words: list[str]) -> tuple[Any, Any]:
    """(the plan, what makes the engine). names: of --benchmarks; words: of the command line"""
    from exgrpo_orlhf.evaluation import prompts_as_trained, sets
    from exgrpo_orlhf.evaluation.bench_run import EvaluationPlan
    from exgrpo_orlhf.evaluation.benchmarks import override
    from exgrpo_orlhf.evaluation.evaluated_model import RequestBuilder
    from exgrpo_orlhf.io.provenance import provenance

    if absent := [folder for folder in arguments.data if not folder.is_dir()]:
        raise ValueError(f"--data {absent[0]}: there is no such folder")
    benchmarks = [*(definitions.suite(arguments.suite) if arguments.suite else ()), *map(definitions.benchmark, names)]
    settings = option_values(arguments, "samples", "temperature", "top_p", "max_tokens")
    benchmarks = [override(each, **settings) for each in dict.fromkeys(benchmarks)]
    if greedy := [each.name for each in benchmarks if each.temperature == 0 and each.top_p < 1]:
        logging.warning("top-p has no effect on %s: temperature 0 is greedy decoding", ", ".join(greedy))
    model, training, server = _model(arguments)
    available, not_run = sets.load_available(benchmarks, names, arguments.data, arguments.limit)
    playing = [each.benchmark.name for each in available if each.benchmark.environment]
    if playing and arguments.engine == "openai":
        raise ValueError(
            f"benchmark {playing[0]!r} has an environment, and --engine openai returns text, and an episode is tokens, "
            "which are never encoded again; take --engine transformers"
        )
    prompts = prompts_as_trained.prompts_of(_prompt_options(arguments), model, training)
    engine, model = _engine(arguments, model, prompts)
    builder = RequestBuilder(model, prompts, arguments.seed, training)
    asked_otherwise = prompts_as_trained.departures(builder, benchmarks)
    prompts_as_trained.log_prompts(builder, asked_otherwise)
    plan = EvaluationPlan(
        builder=builder,
        sets=available,
        not_run=not_run,
        limit=arguments.limit,
        plain=not arguments.one_grader,
        timeout=arguments.timeout,
        workers=arguments.workers,
        engine={"name": arguments.engine, **server},
        groups={group: definitions.group(group) for group in {each.group for each in benchmarks}},
        suite=definitions.suites.get(arguments.suite, ()),
        record={
            "model": model.describe(),
            "template": builder.describe(),
            "seed": arguments.seed,
            "command": [Path(sys.argv[0]).name, *map(without_password, words)],
            "asked_otherwise": asked_otherwise,
        },
        provenance=provenance(),
    )
    return plan, engine


def _require_model(name: str) -> None:
    """Refuse a model that is not there before the imports that take seconds."""
    from exgrpo_orlhf.engines import pretrained
    from exgrpo_orlhf.io import weights

    if name not in pretrained.SHIPPED and not pretrained.find_gguf(name):
        try:
            weights.locate(name)
        except weights.WeightsError as error:
            raise ValueError(f"--model {name}: {error}") from error


def _model(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """(the model, the prompt settings of its training, the settings of a server)."""
    from exgrpo_orlhf.evaluation import evaluated_model

    if arguments.engine != "openai":
        return *evaluated_model.load(arguments.model), {}
    if not arguments.base_url:
        raise ValueError("--engine openai needs --base-url, such as http://127.0.0.1:8000/v1")
    server = {"model": arguments.model, "api": arguments.api}
    return *evaluated_model.served(arguments.model, arguments.tokenizer, arguments.api), server


def _prompt_options(arguments: argparse.Namespace) -> Any:
    from exgrpo_orlhf.evaluation.prompts_as_trained import PromptOptions

    names = ("template", "system", "row_system", "chat_template_from", "thought_tags")
    return PromptOptions(**option_values(arguments, *names), chat_template_kwargs=chat_template_kwargs(arguments))


def _engine(arguments: argparse.Namespace, model: Any, prompts: Any) -> tuple[Callable[[], Any], Any]:
    """(what makes the engine, the model with what a server says of it). What can be checked before is checked now."""
    if arguments.engine == "openai":
        from exgrpo_orlhf.sampling.openai_server import ServerSampler

        key = os.environ.get(arguments.key_variable)
        server = ServerSampler(
            arguments.base_url,
            arguments.model,
            key=key,
            **option_values(arguments, "api", "concurrency"),
            chat_template_kwargs=prompts.chat_template_kwargs if arguments.api == "chat" else None,
        )
        root = server.check_server()
        return lambda: server, model if model.hash else replace(model, root=root)
    from exgrpo_orlhf.evaluation.evaluated_model import loop_sampler

    options = option_values(arguments, "device", "dtype", "rows", "threads")
    return lambda: loop_sampler(model, **options), model


def _write(out: Path, results: dict[str, Any]) -> None:
    """Write report.html and, if a benchmark of the paper was run, paper.md; print the table."""
    from exgrpo_orlhf.evaluation import paper, report, results_table

    published = paper.read_paper(PROJECT / "evals" / "paper.toml")
    if set(published.samples) & set(results["benchmarks"]):
        (out / "paper.md").write_text(paper.markdown(results, published), encoding="utf-8")
    report.write_report([out], out / "report.html")
    print(results_table.terminal(results))


# -- on results -------------------------------------------------------------------------------------------------------


def _regrade(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_bench.py regrade", description="Grade saved responses again.")
    parser.add_argument("folder", type=Path)
    add_grading(parser)
    arguments = parser.parse_args(words)
    from exgrpo_orlhf.evaluation.bench_run import regrade

    folder = arguments.folder
    _write(folder, regrade(folder, arguments.timeout, arguments.workers, not arguments.one_grader))
    return 0


def _report(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_bench.py report", description="One page about one or more evaluations.")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--html", type=terminal.output_file, required=True, metavar="FILE")
    parser.add_argument("--samples", type=positive, default=200, help="of each benchmark in the page (default 200)")
    arguments = parser.parse_args(words)
    from exgrpo_orlhf.evaluation.report import write_report

    write_report(arguments.folders, arguments.html, arguments.samples)
    print(arguments.html)
    return 0


def _table(words: list[str]) -> int:
    from exgrpo_orlhf import config

    sys.path.insert(0, str(Path(__file__).resolve().parent))  # of exgrpo-bench the path lacks this folder
    from paper_table import last_checkpoint, runs_of, suite_table

    from exgrpo_orlhf.evaluation import paper, results_folder
    from exgrpo_orlhf.tracking.scores import RESULTS

    published = paper.read_paper(PROJECT / "evals" / "paper.toml")
    parser = make_parser(__doc__)
    parser.add_argument("file", metavar="FILE", help="of the suite, such as gin/paper/table6.gin")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="of the runs (default: runs/<name of FILE>)")
    backbones = dict.fromkeys(backbone for _, backbone, _ in published.rows)
    parser.add_argument("--backbone", choices=backbones, default="Qwen2.5-Math-7B", help="of the paper's rows")
    parser.add_argument("--dry-run", action="store_true", help="evaluate nothing, print what is evaluated already")
    arguments = parser.parse_args(words)
    if arguments.model or arguments.list:
        raise ValueError("table evaluates the runs of a suite: leave out --model and --list")
    arguments.suite = arguments.suite or (None if arguments.benchmarks else "paper")
    suite, name = config.load_suite(arguments.file), Path(arguments.file).stem
    runs = arguments.runs or WORKPLACE / "runs" / name
    results: dict[str, dict[str, Any]] = {variant: {} for variant in suite.variants}
    for variant, run in runs_of(runs, suite.variants):
        out = (arguments.out or WORKPLACE / "results" / runs.name) / variant / run.name
        checkpoint = last_checkpoint(run)
        if checkpoint and not arguments.dry_run:
            of_run = argparse.Namespace(**{**vars(arguments), "model": str(checkpoint), "out": out})
            if status := _run(["table", *words], of_run):
                return status
        if (out / RESULTS).exists():
            results[variant][run.name] = results_folder.read_results(out)
        else:
            logging.warning("%s: %s", run, "not evaluated" if checkpoint else "no finished run")
    print(suite_table(published, name, suite.baseline, arguments.backbone, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
