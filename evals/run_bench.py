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
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    parser = _run_parser()
    arguments = arguments or parser.parse_args(words)
    _settle_engine(arguments)
    if arguments.model and arguments.engine != "openai":
        _require_model(arguments.model)
    import transformers

    from exgrpo_orlhf.evaluation import evaluated_model, sets
    from exgrpo_orlhf.evaluation.bench_run import EvaluationPlan, evaluate
    from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, Definitions, override
    from exgrpo_orlhf.evaluation.results_folder import progress
    from exgrpo_orlhf.io.provenance import provenance
    from exgrpo_orlhf.io.stopping import StopRequest

    transformers.utils.logging.disable_progress_bar()
    definitions = Definitions((DEFINITIONS, *arguments.definitions))
    if arguments.list:
        return _list(definitions)
    names = [name.strip() for name in (arguments.benchmarks or "").split(",") if name.strip()]
    if not arguments.suite and not names:
        raise ValueError(f"nothing to run: give --suite or --benchmarks; there are {', '.join(definitions.benchmarks)}")
    if not arguments.model:
        parser.error("--model is required")
    if absent := [folder for folder in arguments.data if not folder.is_dir()]:
        raise ValueError(f"--data {absent[0]}: there is no such folder")
    benchmarks = [*(definitions.suite(arguments.suite) if arguments.suite else ()), *map(definitions.benchmark, names)]
    settings = _options(arguments, "samples", "temperature", "top_p", "max_tokens")
    benchmarks = [override(each, **settings) for each in dict.fromkeys(benchmarks)]
    if greedy := [each.name for each in benchmarks if each.temperature == 0 and each.top_p < 1]:
        logging.warning("top-p has no effect on %s: temperature 0 is greedy decoding", ", ".join(greedy))
    model, training, server = _model(arguments)
    available, not_run = [], {}
    for benchmark in benchmarks:
        try:
            available.append(sets.load(benchmark, arguments.data, arguments.limit))
        except sets.Unavailable as error:
            if benchmark.name in names:
                raise ValueError(f"benchmark {benchmark.name!r} is not available: {error}") from error
            logging.warning("%s is not run: %s", benchmark.title, error)
            not_run[benchmark.name] = {"title": benchmark.title, "group": benchmark.group, "reason": str(error)}
    if not available:
        raise ValueError("none of the benchmarks is available; give folders with their sets by --data FOLDER")
    playing = [each.benchmark.name for each in available if each.benchmark.environment]
    if playing and arguments.engine == "openai":
        raise ValueError(
            f"benchmark {playing[0]!r} has an environment, and --engine openai returns text, and an episode is tokens, "
            "which are never encoded again; take --engine vllm or transformers"
        )
    builder = evaluated_model.RequestBuilder(model, _prompts(arguments, model, training), arguments.seed, training)
    asked_otherwise = _prompt_departures(builder, training, benchmarks)
    _log_prompts(builder, training, asked_otherwise)
    engine = _engine(arguments, model, builder.prompts)
    out = arguments.out or WORKPLACE / "results" / f"{model.name}-{arguments.suite or '+'.join(names)}"
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
        suite=definitions.suites[arguments.suite] if arguments.suite else None,
        record={
            "model": model.describe(),
            "template": builder.describe(),
            "seed": arguments.seed,
            "command": [Path(sys.argv[0]).name, *map(without_password, words)],
            "asked_otherwise": asked_otherwise,
        },
        provenance=provenance(),
    )
    logging.info("%d benchmarks, %d questions → %s", len(available), sum(len(each.rows) for each in available), out)
    with StopRequest("responses under way are finished and saved, then the evaluation ends") as stop:
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


_OF_ENGINES: dict[str, tuple[tuple[str, ...], Any]] = {  # option: the engines that read it, its default
    "tokenizer": (("openai",), None),
    "base_url": (("openai",), None),
    "api": (("openai",), "completions"),
    "concurrency": (("openai",), 64),
    "key_variable": (("openai",), "OPENAI_API_KEY"),
    "tensor_parallel": (("vllm",), 1),
    "replicas": (("vllm",), 1),
    "gpu_memory": (("vllm",), 0.9),
    "device": (("transformers",), "auto"),
    "threads": (("transformers",), 1),
    "rows": (("transformers",), 64),
    "dtype": (("vllm", "transformers"), "auto"),
}


def _settle_engine(arguments: argparse.Namespace) -> None:
    """Choose the engine and fill in the options of engines. Raises ValueError for one that the engine does not read."""
    if arguments.engine == "auto" and not arguments.list:
        arguments.engine = "vllm" if find_spec("vllm") else "transformers"
        logging.info("--engine %s", arguments.engine)
    for name, (engines, default) in _OF_ENGINES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.engine not in engines:
            raise ValueError(
                f"--{name.replace('_', '-')} is for --engine {' or '.join(engines)}, and this is --engine "
                f"{arguments.engine}: give that engine, or leave the option out"
            )


def _require_model(name: str) -> None:
    """Refuse a model that is not there before the imports that take seconds."""
    from exgrpo_orlhf.engines import pretrained
    from exgrpo_orlhf.io import weights

    if name not in pretrained.SHIPPED and not pretrained.find_gguf(name):
        try:
            weights.locate(name)
        except weights.WeightsError as error:
            raise ValueError(f"--model {name}: {error}") from error


def _list(definitions: Any) -> int:
    for name, benchmark in definitions.benchmarks.items():
        rows = "" if benchmark.rows is None else f", {benchmark.rows:,} questions"
        print(f"{name:15} {benchmark.title}{rows}, {benchmark.samples} samples, group {benchmark.group}")
    for name, members in definitions.suites.items():
        print(f"--suite {name}: {', '.join(members)}")
    return 0


def _kwargs(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Of the command line. Raises ValueError."""
    text = arguments.chat_template_kwargs
    with suppress(ValueError):
        if text is None or isinstance(value := json.loads(text), dict):
            return None if text is None else value
    raise ValueError(f"--chat-template-kwargs takes a JSON object such as '{{\"enable_thinking\": false}}', got {text}")


def _model(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """(the model, the prompt settings of its training, the settings of a server)."""
    from exgrpo_orlhf.evaluation import evaluated_model

    if arguments.engine != "openai":
        return *evaluated_model.load(arguments.model), {}
    if not arguments.base_url:
        raise ValueError("--engine openai needs --base-url, such as http://127.0.0.1:8000/v1")
    server = {"model": arguments.model, "api": arguments.api}
    if arguments.api == "completions" and not arguments.tokenizer:
        if not Path(arguments.model).is_dir():
            raise ValueError(
                "--engine openai needs --tokenizer FOLDER-OR-HUB-ID of the served model, to write its prompts; or "
                "--api chat, where the server writes them"
            )
        return *evaluated_model.load(arguments.model), server
    if arguments.api == "chat" and arguments.tokenizer:
        raise ValueError("--tokenizer cannot be used with --api chat: the server renders the prompts")
    training = evaluated_model.training_prompts(Path(arguments.tokenizer or arguments.model))  # of a checkpoint of ours
    return evaluated_model.served(arguments.model, arguments.tokenizer), training, server


def _prompts(arguments: argparse.Namespace, model: Any, training: dict[str, Any]) -> Any:
    """Prompts by the command line, else as the checkpoint was trained, else by its tokenizer."""
    from exgrpo_orlhf.questions.prompts import Prompts

    row_system = _row_system(training)
    if arguments.row_system and (row_system is None or arguments.system is not None):
        raise ValueError(
            "--row-system cannot be used with --system"
            if arguments.system is not None
            else f"--row-system: {model.name} is no checkpoint of a run whose questions have one system message of "
            "their own in common; give a message with --system"
        )
    source = arguments.chat_template_from
    tags = tuple(arguments.thought_tags or training.get("thought_tags", ()))
    if model.tokenizer is None:
        if arguments.template or source:
            option = "--template" if arguments.template else "--chat-template-from"
            raise ValueError(f"{option} cannot be used with --api chat: the server renders the prompts")
        kwargs = _kwargs(arguments)
        kwargs = training.get("chat_template_kwargs") if kwargs is None else kwargs
        system = training.get("system") if arguments.system is None else arguments.system
        system = row_system if system is None and arguments.row_system is not False else system
        return Prompts(template="chat", system=system, chat_template_kwargs=kwargs, thought_tags=tags)
    default = "chat" if model.tokenizer.chat_template or source else "plain"
    template = Prompts(template=arguments.template or training.get("template", default)).template
    same = template == training.get("template")
    system = arguments.system if arguments.system is not None else (training.get("system") if same else None)
    if system is None and (same if arguments.row_system is None else arguments.row_system):
        system = row_system
        if system is None and any(training.get("row_systems", ())):
            logging.warning("the questions of training had system messages, which are not sent; --system sends one")
    own = _kwargs(arguments)
    own = training.get("chat_template_kwargs") if own is None and same and not source else own
    prompts = Prompts(template=template, system=system, chat_template_from=source, chat_template_kwargs=own or None)
    return replace(prompts, thought_tags=tags)


def _log_prompts(builder: Any, training: dict[str, Any], asked_otherwise: list[str]) -> None:
    """Say how the questions are asked, and whether that is as in training, where it is known."""
    if builder.encoder is None:
        return
    prompts = builder.prompts
    system = "" if prompts.system is None else f", system message {prompts.system!r:.60}"
    differences = f", not as in training: {'; '.join(asked_otherwise)}" if asked_otherwise else ", as in training"
    logging.info("prompts by --template %.60r%s%s", prompts.template, system, differences if training else "")


def _row_system(training: dict[str, Any]) -> str | None:
    """The system message that all questions of training brought along, if the template can write another question's."""
    systems = training.get("row_systems", [])
    return systems[0] if len(systems) == 1 and training.get("template") != "plain" else None


def _prompt_departures(builder: Any, training: dict[str, Any], benchmarks: Sequence[Any] = ()) -> list[str]:
    """What makes the prompts others than those of training; [] for no difference, or an unknown training."""
    as_trained = [builder.instruction(replace(benchmark, ask="")) for benchmark in benchmarks]
    asked = [builder.instruction(benchmark) for benchmark in benchmarks]
    of_sets = [
        f"{benchmark.title}: ask {benchmark.ask!r}"
        for benchmark, now, then in zip(benchmarks, asked, as_trained, strict=True)
        if now != then
    ]
    return [*_template_departures(builder, training), *of_sets] if training else []


def _template_departures(builder: Any, training: dict[str, Any]) -> list[str]:
    from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
    from exgrpo_orlhf.records import Question

    prompts, probe, system = builder.prompts, Question.make("", "?", "?"), training.get("system")
    lost = [f"without the messages {roles} of questions of training" for roles in training.get("other_turns", ())]
    if any(training.get("row_systems", ())) and _row_system(training) is None and not (prompts.system or system):
        lost.append("without the system messages of questions of training")
    if builder.encoder is None:
        return ["rendered by the server", *lost]
    if prompts.chat_template_from:  # the tokenizer's own is gone
        return [f"chat_template_from {prompts.chat_template_from!r:.80}", *lost]
    trained = Prompts(
        template=training["template"],
        system=_row_system(training) if system is None else system,
        chat_template_kwargs=training.get("chat_template_kwargs"),
    )
    if PromptEncoder(trained, builder.model.tokenizer).render(probe) == builder.encoder.render(probe):
        return lost  # a chat template may bring the same system message
    names = ("template", "system", "chat_template_kwargs")
    changes = [name for name in names if getattr(prompts, name) != getattr(trained, name)]
    return [*(f"{name} {getattr(prompts, name)!r}" for name in changes), *lost]


def _engine(arguments: argparse.Namespace, model: Any, prompts: Any) -> Callable[[], Any]:
    """A function that makes the engine. What can be checked before is checked now."""
    if arguments.engine == "openai":
        from exgrpo_orlhf.sampling.openai_server import ServerSampler

        key = os.environ.get(arguments.key_variable)
        server = ServerSampler(
            arguments.base_url,
            arguments.model,
            key=key,
            **_options(arguments, "api", "concurrency"),
            chat_template_kwargs=prompts.chat_template_kwargs if arguments.api == "chat" else None,
        )
        server.check_server()
        return lambda: server
    if arguments.engine == "vllm":
        from exgrpo_orlhf.sampling.vllm_processes import VllmProcesses

        settings = _options(arguments, "dtype", "tensor_parallel", "replicas", "gpu_memory")
        return lambda: VllmProcesses(model.path, **settings)
    if arguments.threads > (cores := len(os.sched_getaffinity(0))):
        logging.warning("--threads %d, but this process has %d cores: it is slower by far", arguments.threads, cores)
    return lambda: _loop(arguments, model)


def _loop(arguments: argparse.Namespace, model: Any) -> Any:
    """Load the model into this process. Raises EngineLost for a device that is not there and a model without weights,
    an end token, or a cache of rows."""
    import torch

    from exgrpo_orlhf.engines.local.placement import device_of, dtype_of, end_and_pad, load
    from exgrpo_orlhf.sampling import EngineLost
    from exgrpo_orlhf.sampling.generation import check_rows
    from exgrpo_orlhf.sampling.torch_loop import LoopSampler

    torch.set_num_threads(arguments.threads)
    try:
        place = device_of(arguments.device, "--device")
        loaded = load(model.path, place, dtype_of(arguments.dtype, place))
        end, pad = end_and_pad(loaded, model.tokenizer)
        check_rows(loaded, pad)
    except ValueError as error:
        raise EngineLost(f"{model.path}: {error}") from error
    return LoopSampler(loaded, model.tokenizer, end, pad, arguments.rows)


def _options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names}


def _write(out: Path, results: dict[str, Any]) -> None:
    """Write report.html and, if a benchmark of the paper was run, paper.md; print the table."""
    from exgrpo_orlhf.evaluation import paper, report, results_table

    published = paper.read_paper(PROJECT / "evals" / "paper.toml")
    if set(published.samples) & set(results["benchmarks"]):
        (out / "paper.md").write_text(paper.markdown(results, published), encoding="utf-8")
    report.write_report([out], out / "report.html")
    print(results_table.terminal(results))


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint's folder, hub id, or the server's name for it")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and suites, and exit")
    parser.add_argument("--suite", help="a list of benchmarks by name: paper, math, general, quick, chains")
    parser.add_argument("--benchmarks", help="names, separated by commas")
    parser.add_argument("--limit", type=positive, help="at most that many questions of each, the same ones every time")
    parser.add_argument("--out", type=Path, help="folder (default: results/<model>-<suite> of the project)")
    parser.add_argument(
        "--data", type=Path, action="append", default=[], metavar="FOLDER", help="a folder with sets, searched first"
    )
    parser.add_argument(
        "--definitions", type=Path, action="append", default=[], metavar="FILE", help="benchmarks of your own, as TOML"
    )
    sampling = parser.add_argument_group("in place of the benchmarks' settings")
    sampling.add_argument("--samples", type=positive, help="responses to each question")
    sampling.add_argument("--temperature", type=float, help="0 is greedy decoding, with one sample by default")
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--max-tokens", type=positive, help="of a response")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--template", help="as Prompts.template (default: as the checkpoint was trained)")
    prompts.add_argument("--system", help="system message; '' for none")
    prompts.add_argument(
        "--row-system",
        action=argparse.BooleanOptionalAction,
        help="whether the system message that the questions of training brought along is sent (default: with the "
        "template of training); without it the chat template's own stands, as in the official evaluation",
    )
    prompts.add_argument(
        "--chat-template-from", metavar="FOLDER-OR-HUB-ID", help="a tokenizer, as Prompts.chat_template_from"
    )
    prompts.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="as Prompts.chat_template_kwargs: '{\"enable_thinking\": false}' (default: as in training); with --api "
        "chat they are sent to the server",
    )
    prompts.add_argument(
        "--thought-tags",
        nargs=2,
        metavar=("OPEN", "CLOSE"),
        help="as Prompts.thought_tags: '<ponder>' '</ponder>' (default: as in training)",
    )
    prompts.add_argument("--tokenizer", help="openai: folder or hub id of the served model's tokenizer")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", choices=("auto", "vllm", "transformers", "openai"), default="auto")
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="vllm and transformers")
    engine.add_argument("--seed", type=int, default=0)
    engine.add_argument("--device", help="transformers: cpu, cuda, cuda:1 (default: the GPU if there is one)")
    engine.add_argument("--threads", type=positive, help="transformers: of the CPU (default 1)")
    engine.add_argument("--rows", type=positive, help="transformers: responses at a time (default 64)")
    engine.add_argument("--tensor-parallel", type=positive, help="vllm: GPUs of one replica (default 1)")
    engine.add_argument("--replicas", type=positive, help="vllm: copies of the model (default 1)")
    engine.add_argument("--gpu-memory", type=float, help="vllm: share of the GPU's memory (default 0.9)")
    engine.add_argument("--base-url", help="openai: of the server, such as http://127.0.0.1:8000/v1")
    engine.add_argument("--api", choices=("completions", "chat"), help="openai (default completions)")
    engine.add_argument("--concurrency", type=positive, help="openai: requests at a time (default 64)")
    engine.add_argument(
        "--key-variable", help="openai: the environment variable that holds the key (default OPENAI_API_KEY)"
    )
    _add_grading(parser)
    parser.add_argument("--no-mlflow", action="store_true", help="write files only")
    parser.add_argument("--experiment", default="exgrpo-eval", help="MLflow experiment of models without a run")
    return parser


def _add_grading(parser: argparse.ArgumentParser) -> None:
    grading = parser.add_argument_group("grading")
    grading.add_argument("--timeout", type=float, default=5.0, help="seconds for an answer (default 5)")
    grading.add_argument("--workers", type=int, default=0, help="processes (default: one per core)")
    grading.add_argument("--one-grader", action="store_true", help="do not grade by math-verify's plain recipe too")


# -- on results -------------------------------------------------------------------------------------------------------


def _regrade(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_bench.py regrade", description="Grade saved responses again.")
    parser.add_argument("folder", type=Path)
    _add_grading(parser)
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
    from exgrpo_orlhf import checkpoints, config
    from exgrpo_orlhf.evaluation import paper, results_folder
    from exgrpo_orlhf.study.paper_table import suite_table

    published = paper.read_paper(PROJECT / "evals" / "paper.toml")
    parser = _run_parser()
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
    for variant, by_seed in results.items():
        seeds = sorted((runs / variant).glob("seed*"), key=lambda run: (len(run.name), run.name))
        for run in seeds or [runs / variant / "seed0"]:
            out = (arguments.out or WORKPLACE / "results" / runs.name) / variant / run.name
            steps, file = checkpoints.find(run), run / "config.gin"
            planned = re.search(r"(?m)^train\.steps = (\d+)", file.read_text("utf-8") if file.exists() else "")
            checkpoint = steps[max(steps)] if steps and planned and max(steps) >= int(planned[1]) else None
            if checkpoint and not arguments.dry_run:
                of_run = argparse.Namespace(**{**vars(arguments), "model": str(checkpoint), "out": out})
                if status := _run(["table", *words], of_run):
                    return status
            if (out / results_folder.RESULTS).exists():
                by_seed[run.name] = results_folder.read_results(out)
            else:
                logging.warning("%s: %s", run, "not evaluated" if checkpoint else "no finished run")
    print(suite_table(published, name, suite, arguments.backbone, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
