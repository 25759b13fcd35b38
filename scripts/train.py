#!/usr/bin/env python
"""Train with ExGRPO, or whatever the gin files make of it.

    python scripts/train.py --gin gin/quickstart.gin
    python scripts/train.py --gin gin/ablation_no_entropy.gin --set 'ReplayMixer.rho=0.25' --seed 3
    python scripts/train.py --gin gin/quickstart.gin --smoke     # try everything, estimate time, memory and disk, end
    python scripts/train.py --gin gin/quickstart.gin --dry-run   # the plan and what is missing; trains nothing
    python scripts/train.py --gin gin/quickstart.gin --resume
    python scripts/train.py --gin gin/quickstart.gin --resume-from checkpoint-50     # an older checkpoint

Runs go to runs/<name>/ of the project: config.gin, metrics.jsonl, checkpoint-<step>/. Ctrl-C, SIGTERM and
SIGHUP (a closed terminal) finish the step and save; --resume continues exactly there. Exit status: 0 for a complete
run, 128 + signal for one that a signal ended, 1 for an error while it trained, 2 for a configuration, a model,
questions, a reward function, a folder, or a checkpoint to resume from, that cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.metric_names import check_name
from exgrpo_orlhf.io.paths import WORKPLACE
from exgrpo_orlhf.io.redaction import REDACTED, without_password

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from exgrpo_orlhf.experiment import Experiment
    from exgrpo_orlhf.records import Question

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_LONGEST = 180  # bytes of a run's name; what is longer ends in a hash
_HIGH_RATE = 0.1  # weights of trained models are mostly smaller


def main() -> int:
    arguments, unknown = _parser().parse_known_args()
    terminal.messages()

    from exgrpo_orlhf import config
    from exgrpo_orlhf.checkpoints import (
        CheckpointError,
        RunFolderError,
        UnusableCheckpoint,
        refuse_earlier,
        refuse_other,
    )
    from exgrpo_orlhf.config import gin_files
    from exgrpo_orlhf.engines.openrlhf.stack import refuse_wrong_versions
    from exgrpo_orlhf.io.provenance import git_commit
    from exgrpo_orlhf.rewards import GradingError, NoGrader
    from exgrpo_orlhf.sampling import EngineLost
    from exgrpo_orlhf.tracking.client import own_tags
    from exgrpo_orlhf.training.run import train

    if unknown:
        name, _, value = " ".join(unknown).lstrip("-").replace(" ", "=", 1).partition("=")
        bindings = [f"--set {setting}={value}" for setting in config.all_settings() if setting.endswith(f".{name}")]
        hint = f"; a setting is bound by {' or '.join(bindings)}" if bindings else ""
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        experiment = config.load(arguments.gin, arguments.set, arguments.seed)
    except config.ConfigError as error:
        print(f"error: {without_password(str(error))}", file=sys.stderr)
        return 2
    overrides = config.overrides_as_bound(arguments.set)
    name = arguments.name or _name(arguments, experiment.settings.seed, config.may_change, overrides)
    run = arguments.out or WORKPLACE / "runs" / name
    if not arguments.out and WORKPLACE / "runs" not in Path(os.path.normpath(run)).parents:
        print(f"error: --name {name!r} is no folder in {WORKPLACE / 'runs'}; --out takes any folder", file=sys.stderr)
        return 2
    resume = arguments.resume or arguments.resume_from is not None
    if resume and not run.exists():
        print(f"{run} does not exist yet: there is nothing to resume, the run begins", file=sys.stderr)
    if experiment.local and experiment.local.threads > (cores := len(os.sched_getaffinity(0))):
        print(
            f"LocalEngine.threads = {experiment.local.threads}, but this process has {cores} cores and is slower by "
            f"far than with --set LocalEngine.threads={cores}",
            file=sys.stderr,
        )
    if (rate := experiment.optimizer.learning_rate) > _HIGH_RATE:
        print(f"Optimizer.learning_rate = {rate:g}: AdamW moves each weight by up to that an update", file=sys.stderr)
    if arguments.dry_run:
        return _dry_run(experiment, run)
    uri = f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    tags = {
        "gin": " ".join(Path(file).name for file in arguments.gin),
        "engine": experiment.settings.engine,
        "seed": str(experiment.settings.seed),
        "git_commit": (commit := git_commit()),
        "mlflow.source.git.commit": commit.removesuffix("-dirty"),
        **own_tags(__file__),
        **({"set": "\n".join(overrides)} if overrides else {}),
        **dict(arguments.tag),
    }
    if hypotheses := [text for file in arguments.gin if (text := gin_files.hypothesis(gin_files.find(file, None)))]:
        tags["mlflow.note.content"] = "\n\n".join(hypotheses)  # the description at the top of the run's page
    try:
        if experiment.openrlhf is not None:  # before a model is made and questions are loaded
            refuse_wrong_versions()
        if arguments.smoke:
            refuse_earlier(run, resume)  # before the imports that take seconds
            refuse_other(run)
            from exgrpo_orlhf.preflight.smoke import smoke

            for line in smoke(experiment, run, uri):
                print(line, flush=True)
            return 0
        earlier = arguments.resume_from
        outcome = train(experiment, run, resume=resume, resume_from=earlier, tracking_uri=uri, tags=tags)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (CheckpointError, RunFolderError, ArithmeticError, ValueError, OSError, EngineLost) as error:
        print(f"error: {without_password(str(error))}", file=sys.stderr)
        unusable = isinstance(error, (UnusableCheckpoint, RunFolderError, ValueError, FileNotFoundError))
        return 2 if isinstance(error, NoGrader) or (unusable and not isinstance(error, GradingError)) else 1
    if outcome.stopped_by is not None:
        print(f"stopped after step {outcome.steps} of {outcome.planned}; continue with --resume", file=sys.stderr)
        return 128 + outcome.stopped_by
    print(f"{run}: {outcome.steps} steps done, last checkpoint checkpoint-{outcome.steps}", file=sys.stderr)
    return 0


def _dry_run(experiment: Experiment, run: Path) -> int:
    """Prints the plan of the run, and a line for each thing that is wrong or missing. Returns the exit status.

    No step is made, and no model is loaded except a GGUF file that must be converted first.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    from exgrpo_orlhf.checkpoints import RunFolderError, refuse_earlier
    from exgrpo_orlhf.engines.local import placement
    from exgrpo_orlhf.engines.lora import is_adapter
    from exgrpo_orlhf.engines.model import too_few_positions
    from exgrpo_orlhf.engines.openrlhf import estimates, flags, stack
    from exgrpo_orlhf.engines.pretrained import PretrainedModel, find_gguf, published_config
    from exgrpo_orlhf.io import tokenizer_file, weights
    from exgrpo_orlhf.questions.prompts import PromptEncoder
    from exgrpo_orlhf.testbed.tiny_models import WarmedUpModel
    from exgrpo_orlhf.training.load_questions import load_questions
    from exgrpo_orlhf.training.supervised_start import SupervisedModel

    s, mixer, longest = experiment.settings, experiment.mixer, estimates.longest_sequence(experiment)
    problems: list[str] = []
    training: list[Question] = []
    validation: list[Question] = []
    path, config, count = None, None, None
    try:
        refuse_earlier(run, resume=True)
    except RunFolderError as error:
        problems.append(str(error))
    with _noted(problems):
        training, validation = load_questions(experiment)
        print(f"questions   {len(training):,} to train on, {len(validation):,} for validation", flush=True)
        if len(training) < s.questions_per_step:
            fewer = f"FEWER than train.questions_per_step = {s.questions_per_step}: no batch is whole"
            print(f"            {fewer}")
            problems += [f"questions: {fewer}; OpenRLHF needs whole ones"] if experiment.openrlhf else []
        grader = experiment.verifier
        by = ", ".join(map(str, filter(None, [grader.function, grader.url])))
        print(f"answer      {training[0].answer!r} to the first question; graded by {grader.kind!r}{by and f' ({by})'}")
        if unseen := sum(map(_hides_its_options, [*training, *validation])):
            print(
                f"            NOT IN THE PROMPT: of {unseen:,} questions no option's text, so the model cannot choose; "
                "write the options into the column of the prompt, a line each ('A) first', 'B) second')"
            )
    model = experiment.model
    while isinstance(model, SupervisedModel):  # its sizes and its tokenizer are those of what it is made of
        model = model.model
    name = getattr(model, "path", type(model).__name__)
    if isinstance(model, WarmedUpModel) and not model.directory.is_dir():
        print(f"model       {name}: trained when the run begins; --smoke trains it now")
    else:
        with _noted(problems, f"PretrainedModel.path = {name!r}: " if isinstance(model, PretrainedModel) else ""):
            is_made = not isinstance(model, PretrainedModel) or find_gguf(name) or is_adapter(Path(name).expanduser())
            path = str(model.prepare()) if is_made else weights.locate(name)
    with _noted(problems):
        config = published_config(name) if path is None else AutoConfig.from_pretrained(path, trust_remote_code=False)
        if config is not None:
            count = estimates.parameters_of(config, experiment.lora)
            sizes = [f"{each / 1e6:,.1f} million" for each in count]
            trained = f" ({sizes[1]} of them trained, LoRA)" if experiment.lora.rank else ""
            positions = getattr(config.get_text_config(), "max_position_embeddings", "any number of")
            source = ", as published" if path is None else ""
            print(f"model       {name}: {sizes[0]} parameters{trained}, {positions} positions{source}")
            problems += filter(None, [too_few_positions(config, longest, name)])
    if path is not None and config is not None:
        with _noted(problems):
            tokenizer = tokenizer_file.load(path)
            names = (f"{stem}{end}" for stem in WEIGHTS for end in ("", ".index.json"))
            if Path(path).is_dir() or any(isinstance(try_to_load_from_cache(path, each), str) for each in names):
                with _noted(problems):
                    weights.check_model_files(path, tokenizer)
            else:
                problems.append(f"the weights of {path} are not in the hub's cache here: hf download {path}")
            prompts = PromptEncoder(experiment.prompts, tokenizer)
            for question in training[:1]:
                ids = prompts.token_ids(question)
                print(f"prompt      {len(ids)} tokens, with a question of {question.source}:")
                print(textwrap.indent(str(tokenizer.decode(ids)), " " * 12, lambda _: True), flush=True)
            prompts.check_prompts([*training, *validation])
    updates = experiment.optimizer.steps_per_batch * experiment.optimizer.passes_per_batch
    print(f"batch       {s.questions_per_step} questions × {s.group_size} rows of at most {longest:,} tokens", end="; ")
    print(f"{updates} optimiser step{'s' if updates > 1 else ''}")
    evaluations = f"validation every {s.eval_every}" if s.eval_every and experiment.validation else "no validation"
    print(f"steps       {s.steps:,}; {evaluations}; a checkpoint every {s.save_every}, {s.keep} of them kept")
    at, rho, rho_end = mixer.share.start_at_accuracy, mixer.share.rho, mixer.share.rho_end
    share = f"ρ = {float(rho):g}, {int(rho * s.questions_per_step)} questions of a batch"
    share += f", to ρ = {float(rho_end):g} in {mixer.share.rho_steps} steps" if rho_end != rho else ""
    start = "the first step" if at is None else f"the step after a batch whose Pass@1 exceeds {float(at):g}"
    kinds = [share] * (mixer.share.largest > 0) + ["late injection"] * (mixer.injection.late_injection is not None)
    print(f"replay      {' and '.join(kinds)}, from {start}" if kinds else "replay      none")
    if experiment.local is not None:
        with _noted(problems):
            device = placement.device_of(experiment.local.device)
            dtype = str(placement.dtype_of(experiment.local.dtype, device)).removeprefix("torch.")
            sampler = "vLLM" if experiment.local.samples_by_vllm(device.type) else "a loop in torch"
            print(f"device      {device}, {dtype}, {experiment.local.threads} CPU threads; sampled by {sampler}")
    with _noted(problems):
        if experiment.openrlhf is not None:
            stack.refuse_wrong_versions()
            flags.command_line(experiment, experiment.openrlhf.all_flags(), name, run, resume=False)
        if config is not None and count is not None:
            _print_needs(experiment, config, count, run)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _hides_its_options(question: Question) -> bool:
    """Whether a question has options for the verifier, and its prompt has the text of none of them."""
    from exgrpo_orlhf.grader.choice import options_of

    prompt = question.prompt if isinstance(question.prompt, str) else "\n".join(text for _, text in question.prompt)
    texts = options_of(question.meta.get("options")).values()
    parts = [r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text))) for text in texts if text.strip()]
    return bool(parts) and not any(re.search(rf"(?<!\w){part}(?!\w)", prompt) for part in parts)


def _print_needs(experiment: Experiment, config: PretrainedConfig, count: tuple[int, int], run: Path) -> None:
    from exgrpo_orlhf.engines.openrlhf import estimates
    from exgrpo_orlhf.engines.openrlhf.worker_environment import ray_address
    from exgrpo_orlhf.io.lazy import torch
    from exgrpo_orlhf.io.progress import duration
    from exgrpo_orlhf.preflight.smoke import buffer_bytes, disk_text, size

    buffer = buffer_bytes(experiment, 0.5, min(estimates.RESPONSE, experiment.sampling.max_response_tokens))
    beside = f"a replay buffer of {size(buffer)} if half of the rollouts are right"
    checkpoint = 4 * count[0] + 8 * count[1]  # the local engine's weights and Adam, float32
    settings = experiment.openrlhf
    if settings is None or settings.cpu_bench:
        weights = size(4 * count[0] + 12 * count[1])
        print(f"memory      estimated: {weights}, activations and {beside}; --smoke measures it")
        local = experiment.local
        if local is not None and (local.device == "cuda" or (local.device == "auto" and torch.cuda.is_available())):
            step, _ = estimates.step_of(experiment, count[0], estimates.CARDS["H100"])
            run_hours = f"{duration(step)} a step, {experiment.settings.steps * step / 3600:.0f} h a run"
            sampled = "vLLM's tokens assumed" if local.samples_by_vllm("cuda") else "the loop's tokens measured"
            basis = f"estimated for one {estimates.MEASURED_ON}, from another model's update, {sampled}"
            print(f"time        {basis}: {run_hours}")
    else:
        card, checkpoint = estimates.CARDS[settings.gpu], estimates.checkpoint_bytes(*count)
        sums = estimates.memory_of(experiment, config, card.memory)
        rows = sums.cache / estimates.longest_sequence(experiment)
        cache = f"{sums.cache:,} tokens, {rows:.0f} of the longest rows"
        print(f"GPU memory  estimated: {sums.text()} of {size(card.memory)} ({settings.gpu}); vLLM's cache {cache}")
        if short := estimates.too_little_memory(experiment, sums, card.memory):
            print(f"            TOO LITTLE: {short}")
        print(f"host memory estimated: {size(sums.host)} a node, and {beside}")
        step, gpus = estimates.step_of(experiment, count[0], card)
        here = torch.cuda.device_count()
        where = "this machine" if ray_address(settings.ray_address, os.environ) == "local" else "the cluster"
        print(f"device      {gpus} GPUs of {where}")
        if where == "this machine" and here < gpus:
            print(f"            NOT THERE: it has {here}; OpenRLHF.ray_address names a cluster that has {gpus}")
        total = experiment.settings.steps * step / 3600
        print(f"time        estimated: {duration(step)} a step, {total:.0f} h a run, {total * gpus:,.0f} GPU-hours")
    free = shutil.disk_usage(next(folder for folder in run.absolute().parents if folder.is_dir())).free
    print(f"disk        estimated: {disk_text(experiment, checkpoint + buffer, free)}")


@contextmanager
def _noted(problems: list[str], prefix: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        problems.append(prefix + " ".join(str(error).split()).removeprefix(prefix))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gin", action="append", required=True, metavar="FILE", help="gin file, as given or in gin/; later ones win"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="BINDING", help="one more binding, such as 'ReplayMixer.rho=0.25'"
    )
    parser.add_argument("--seed", type=int, help="train.seed")
    parser.add_argument(
        "--tag", action="append", default=[], type=_tag, metavar="NAME=VALUE", help="one more tag of the MLflow run"
    )
    parser.add_argument("--name", help="name of the run (default: from gin files, --set and seed)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<name> of the project)")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="load and check everything, make a few small steps in a folder that is removed unless they fail, estimate "
        "the run's time, memory and disk, and end",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan of the run (model, a prompt, batch, steps, replay, memory, disk, hours) and what is "
        "missing or wrong, and end; nothing is trained and no weights are loaded",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run from its newest checkpoint, or begin it if it has none"
    )
    parser.add_argument(
        "--resume-from",
        metavar="checkpoint-N",
        help="continue the run from this older checkpoint; newer ones are renamed to checkpoint-M.set-aside",
    )
    return parser


def _name(arguments: argparse.Namespace, seed: int, may_change: Callable[[str], bool], overrides: list[str]) -> str:
    """The same experiment gets the same name, so that --resume finds its run, also to make it longer.

    overrides: the bindings of --set as they may be written; one with a secret is no part of the name
    """
    hidden = {text.partition(" = ")[0] for text in overrides if REDACTED in text}
    hidden |= {text.partition("=")[0].strip() for text in arguments.set if without_password(text) != text}
    files = [Path(file) for file in arguments.gin]
    parts = [f"{file.parent.name}-again" if file.name == "config.gin" else file.stem for file in files]
    for binding in arguments.set:
        name, _, value = binding.partition("=")
        if name.strip() not in hidden and not may_change(name.strip()):
            parts.append("".join(c if c.isalnum() or c in "._-" else "_" for c in f"{name.strip()}_{value.strip()}"))
    name = "-".join([*parts, f"seed{seed}"])
    if len(name.encode()) <= _LONGEST:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name.encode()[:_LONGEST].decode(errors='ignore')}-{digest}"


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value


if __name__ == "__main__":
    sys.exit(main())
