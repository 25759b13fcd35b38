"""Runs OpenRLHF's own program with our policy actor and our trainer instead of its own.

In order: the flags are put together and go through OpenRLHF's parser and checks; the model and the questions are
checked; Ray is started or reached; the program runs, and is watched for actors that die and steps that do not end. A
Ray that was started here is shut down in any case, and checkpoints are always complete.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ... import checkpoints
from ...checkpoints import claim
from ...experiment import Experiment, Outcome
from ...io import tokenizer_file
from ...io.stopping import StopRequest
from ...questions.prompts import PromptEncoder
from ...settings import OpenRLHF
from ...workers.fork_server import close_workers
from ..engine import RunSpec
from ..model import changes_logits, too_few_positions
from . import cpu, estimates, packed_attention, patches, stack, universal
from . import flags as openrlhf_flags
from .worker_environment import ray_address, wrong_arch_list

log = logging.getLogger(__name__)
_PROGRAM = "openrlhf.cli.train_ppo_ray"
_OF_OTHER_HEADS = ("classifier_", "summary_")  # settings of heads that a causal language model does not have


class LaunchError(ValueError):
    """OpenRLHF's parser or its checks refuse the flags, or something that it needs is missing."""


def launch(
    spec: RunSpec,
    model_path: str,
    *,
    resume: bool,
    resume_from: str | None = None,
    classes: Callable[[Any], tuple[type, type, type]] | None = None,
    logs: Path | None = None,
) -> Outcome:
    """Trains with OpenRLHF. Raises LaunchError, EngineLost, and the errors of the training loop.

    Args:
        resume_from: the name of an older checkpoint to resume from
        classes: takes OpenRLHF's arguments and returns the classes of the policy actors, the trainer and the vLLM
            engines; called when OpenRLHF can be imported. None: MixedPolicyActor, MixedTrainer, VllmEngine
        logs: folder for what OpenRLHF, Ray, DeepSpeed and vLLM print; None: it is printed
    """
    experiment, run, settings = spec.experiment, spec.run.absolute(), spec.experiment.openrlhf
    assert settings is not None
    with claim(run, resume), StopRequest() as stop, contextlib.ExitStack() as printed:
        contents, identity = experiment.settings.verify_checkpoint, dict(experiment.identity)
        checkpoint = checkpoints.to_resume(
            run, identity, experiment.defaults, name=resume_from, contents=contents, base=experiment.base
        )
        prepare(settings)
        args = parse(experiment, model_path, checkpoint or run / "none", resume=checkpoint is not None)
        gpus = openrlhf_flags.needed_gpus(experiment)
        _check_model(experiment, model_path)
        _check_questions(spec, model_path, begins=checkpoint is None)
        _check_memory(experiment, model_path)
        if checkpoint is not None:
            universal.convert(args, checkpoint, run)
        # Imported only after all checks: this takes seconds and starts processes.
        output = None
        if logs is not None:
            from .output import output_in

            output = printed.enter_context(output_in(logs))
        from . import driver

        roles = driver.CLASSES if classes is None else classes(args)
        shipped = replace(spec, run=run, checkpoint=checkpoint, questions=None, load_buffer=None)
        driver.drive(shipped, args, gpus, stop, roles, output)
    step = max(checkpoints.find(run), default=0)
    return Outcome(step, experiment.settings.steps, stop.signal if step < experiment.settings.steps else None)


def wrong_python(version: tuple[int, ...]) -> str | None:
    """What is wrong with a version of Python (major, minor), and what to do, or None."""
    if version[:2] < (3, 13):
        return None
    return (
        "train.engine = 'openrlhf' needs Python 3.11 or 3.12: OpenRLHF 0.11.2 has no build for newer ones, and this is "
        f"Python {version[0]}.{version[1]}"
    )


def prepare(settings: OpenRLHF) -> None:
    """Prepares this process for importing OpenRLHF.

    Raises LaunchError for a Python that OpenRLHF has no build for, for a missing package, and, where
    OpenRLHF.cpu_bench is False, without CUDA or with a list of architectures that DeepSpeed cannot read; ValueError
    for a package of another version.
    """
    if wrong := wrong_python(sys.version_info[:2]):
        raise LaunchError(wrong)
    stack.refuse_wrong_versions()
    for package in ("openrlhf", "vllm", "deepspeed", "ray"):
        if importlib.util.find_spec(package) is None:
            raise LaunchError(
                f"train.engine = 'openrlhf' needs the package {package}, which is not installed: "
                "pip install -e '.[openrlhf]' on a machine with CUDA, make openrlhf-cpu for the CPU test layout"
            )
    if settings.cpu_bench:
        os.environ.update(cpu.environment())
        cpu.install()
    elif wrong := wrong_arch_list(os.environ):
        raise LaunchError(wrong)
    elif ray_address(settings.ray_address, os.environ) == "local" and not torch.cuda.is_available():
        raise LaunchError(
            "train.engine = 'openrlhf' needs GPUs, and torch sees none here: give the cluster's address "
            "(OpenRLHF.ray_address), use the local engine, or gin/engines/openrlhf_cpu.gin to test the engine itself"
        )
    elif packed_attention.is_needed():
        packed_attention.install()


class _Parsed(Exception):
    """Carries OpenRLHF's validated arguments out of its program, which does not return them."""


def parse(experiment: Experiment, model_path: str, state: Path, *, resume: bool) -> Any:
    """OpenRLHF's arguments after its parser and its checks. Raises LaunchError."""
    settings = experiment.openrlhf
    assert settings is not None
    flags = settings.all_flags()
    if settings.cpu_bench:
        flags |= cpu.FLAGS
    line = openrlhf_flags.command_line(experiment, flags, model_path, state, resume=resume)
    output = io.StringIO()
    from openrlhf.models import PolicyLoss  # it checks which of the correction's flags go together

    def parsed(args: Any) -> None:
        raise _Parsed(args)

    try:
        with (
            patches.parser_alone([_PROGRAM, *openrlhf_flags.as_arguments(line)], parsed),
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(output),
        ):
            runpy.run_module(_PROGRAM, run_name="__main__")
    except _Parsed as error:
        args = error.args[0]
    except SystemExit:
        message = output.getvalue().strip().rpartition("error: ")[2]
        raise LaunchError(f"OpenRLHF.flags: OpenRLHF refuses them: {message}") from None
    except (AssertionError, ValueError) as error:
        raise LaunchError(f"OpenRLHF.flags: OpenRLHF refuses them: {error}") from None
    else:
        raise LaunchError(f"{_PROGRAM} ended before its arguments were read: is this OpenRLHF 0.11.2?")
    try:
        PolicyLoss(**{name: value for name, value in vars(args.algo.advantage).items() if name.startswith("is_corr")})
    except ValueError as error:
        raise LaunchError(f"OpenRLHF.flags: algo.advantage.{error}") from None
    for message in re.findall(r"^\[Warning\] (.*)", output.getvalue(), re.MULTILINE):
        log.warning("OpenRLHF: %s", message)
    if settings.cpu_bench:  # OpenRLHF's checks switch flash attention on with packing
        args.ds.attn_implementation = cpu.FLAGS["ds.attn_implementation"]
    elif args.ds.attn_implementation == "flash_attention_2" and packed_attention.is_needed():
        args.ds.attn_implementation = packed_attention.ATTENTION if args.ds.packing_samples else "sdpa"
        log.info("flash-attn is not installed: attention is computed by %s", args.ds.attn_implementation)
    return args


def _check_memory(experiment: Experiment, model_path: str) -> None:
    """Warns if that of this machine's GPUs will not suffice."""
    if total := estimates.gpu_bytes():
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        if short := estimates.too_little_memory(experiment, estimates.memory_of(experiment, config, total), total):
            log.warning("%s", short)


def _check_model(experiment: Experiment, model_path: str) -> None:
    """Raises LaunchError and AdapterError for what would stop the run after minutes of loading."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    mapped = getattr(config, "auto_map", None) or tokenizer_file.load(model_path).init_kwargs.get("auto_map")
    if mapped or any(Path(model_path).rglob("*.py")):
        raise LaunchError(
            f"{model_path} brings Python files along, which OpenRLHF and its vLLM would run: take a copy without .py "
            "files and without auto_map in config.json and tokenizer_config.json"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if changes_logits(model):
            raise LaunchError(f"{model_path} does more to its logits than its output layer does, such as scaling them")
    except (RuntimeError, TypeError) as error:
        log.warning("%s: whether it scales or caps its logits could not be checked (%s)", model_path, error)
    # OpenRLHF trains in training mode, where log-probs would be those of another policy than the one that samples.
    settings = config.get_text_config().to_dict()
    random = [name for name in settings if ("drop" in name or "jitter" in name) and settings[name]]
    if random := [name for name in random if not name.startswith(_OF_OTHER_HEADS)]:
        raise LaunchError(
            f"{model_path} has dropout or router noise ({', '.join(random)}); set it to 0 in its config.json"
        )
    flags = experiment.openrlhf.all_flags() if experiment.openrlhf else {}
    if flags.get("actor.aux_loss_coef") and "output_router_logits" not in settings:
        raise LaunchError(f"OpenRLHF.flags: actor.aux_loss_coef balances experts, and {model_path} has none")
    if wrong := too_few_positions(config, estimates.longest_sequence(experiment), model_path):
        raise LaunchError(wrong)
    if experiment.lora.rank is not None:
        estimates.parameters_of(config, experiment.lora)  # which refuses targets that there are none of


def _check_questions(spec: RunSpec, model_path: str, *, begins: bool) -> None:
    """Raises what would stop the run after minutes of loading, for questions, prompts and experience. begins: whether
    the run begins here, so that the experience that it begins with is checked too"""
    experiment = spec.experiment
    source, per_step = experiment.validation, experiment.settings.questions_per_step
    questions, validation = spec.questions or (experiment.questions.load(), source.load() if source else [])
    if len(questions) < per_step:
        raise LaunchError(
            f"train.questions_per_step = {per_step}, but there are {len(questions)} questions; this engine needs whole "
            "batches"
        )
    prompts = PromptEncoder(experiment.prompts, tokenizer_file.load(model_path))
    prompts.check_prompts([*questions, *validation])
    if begins and experiment.experience:
        assert spec.load_buffer is not None
        spec.load_buffer(experiment, questions, prompts)
    close_workers()  # the workers that read gold answers and graded the experts must not run beside Ray's
