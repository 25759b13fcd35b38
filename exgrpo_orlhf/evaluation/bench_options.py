"""The options of evals/run_bench.py: which there are, and which of them the engine reads."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..io.terminal import positive

_VLLM = (  # what took --engine vllm, --tensor-parallel, --replicas and --gpu-memory
    "an evaluation starts no vLLM of its own: start `vllm serve MODEL` (with --tensor-parallel-size GPUS, "
    "--data-parallel-size COPIES, --gpu-memory-utilization SHARE), and give --engine openai --model MODEL --tokenizer "
    "MODEL --base-url http://localhost:8000/v1"
)
_OF_ENGINES: dict[str, tuple[str, Any]] = {  # option: the engine that reads it, its default
    "tokenizer": ("openai", None),
    "base_url": ("openai", None),
    "api": ("openai", "completions"),
    "concurrency": ("openai", 64),
    "key_variable": ("openai", "OPENAI_API_KEY"),
    "device": ("transformers", "auto"),
    "threads": ("transformers", 1),
    "rows": ("transformers", 64),
    "dtype": ("transformers", "auto"),
}


def settle_engine(arguments: argparse.Namespace) -> None:
    """Fill in the options of engines. Raises ValueError for one that the engine does not read."""
    of_vllm = option_values(arguments, "tensor_parallel", "replicas", "gpu_memory")
    if arguments.engine == "vllm" or any(of_vllm.values()):
        raise ValueError(_VLLM)
    for name, (engine, default) in _OF_ENGINES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.engine != engine:
            raise ValueError(
                f"--{name.replace('_', '-')} is for --engine {engine}, and this is --engine "
                f"{arguments.engine}: give that engine, or leave the option out"
            )


def chat_template_kwargs(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The object of --chat-template-kwargs. Raises ValueError."""
    text = arguments.chat_template_kwargs
    with suppress(ValueError):
        if text is None or isinstance(value := json.loads(text), dict):
            return None if text is None else value
    raise ValueError(f"--chat-template-kwargs takes a JSON object such as '{{\"enable_thinking\": false}}', got {text}")


def option_values(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """By name."""
    return {name: getattr(arguments, name) for name in names}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Of an evaluation. Options of engines have no defaults: `settle_engine` fills them in."""
    looks = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=looks, allow_abbrev=False)
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
    prompts.add_argument("--chat-template-from", metavar="TOKENIZER", help="as Prompts.chat_template_from")
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
    _add_engine(parser)
    add_grading(parser)
    parser.add_argument("--no-mlflow", action="store_true", help="write files only")
    parser.add_argument("--experiment", default="exgrpo-eval", help="MLflow experiment of models without a run")
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--engine", choices=("transformers", "openai", "vllm"), metavar="{transformers,openai}", default="transformers"
    )
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="transformers")
    engine.add_argument("--seed", type=int, default=0)
    engine.add_argument("--device", help="transformers: cpu, cuda, cuda:1 (default: the GPU if there is one)")
    engine.add_argument("--threads", type=positive, help="transformers: of the CPU (default 1)")
    engine.add_argument("--rows", type=positive, help="transformers: responses at a time (default 64)")
    for name in ("--tensor-parallel", "--replicas", "--gpu-memory"):
        engine.add_argument(name, help=argparse.SUPPRESS)
    engine.add_argument("--base-url", help="openai: of the server, such as http://127.0.0.1:8000/v1")
    engine.add_argument("--api", choices=("completions", "chat"), help="openai (default completions)")
    engine.add_argument("--concurrency", type=positive, help="openai: requests at a time (default 64)")
    engine.add_argument("--key-variable", help="openai: the variable that holds the key (default OPENAI_API_KEY)")


def add_grading(parser: argparse.ArgumentParser) -> None:
    """Those that `regrade` has too."""
    grading = parser.add_argument_group("grading")
    grading.add_argument("--timeout", type=float, default=5.0, help="seconds for an answer (default 5)")
    grading.add_argument("--workers", type=int, default=0, help="processes (default: one per core)")
    grading.add_argument("--one-grader", action="store_true", help="do not grade by math-verify's plain recipe too")
