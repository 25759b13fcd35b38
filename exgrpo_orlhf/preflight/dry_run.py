"""The plan of a run, and what is missing or wrong: no step is made, and no model is loaded except a GGUF file that must
be converted first."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig

from ..checkpoints import RunFolderError, UnusableCheckpoint, refuse_earlier, refuse_other, verified
from ..engines.local import placement
from ..engines.lora import is_adapter
from ..engines.model import too_few_positions
from ..engines.openrlhf import estimates, flags, stack
from ..engines.pretrained import PretrainedModel, find_gguf
from ..experiment import Experiment
from ..io import tokenizer_file, weights
from ..io.paths import PROJECT
from ..questions.prompts import PromptEncoder
from ..questions.reading import QuestionRecords
from ..questions.solutions import hides_its_options
from ..questions.text import plain_text
from ..records import Question
from ..training import initial_buffer
from ..training.load_questions import load_questions
from ..training.supervised_start import SupervisedModel
from .likely import likely_wrong
from .needs import needs

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class _Model(NamedTuple):
    """name: as bound; path: what `from_pretrained` takes, None where there is none yet; config: None if not known;
    parameters: how many, and how many of them or of the adapter are trained"""

    name: str
    path: str | None
    config: PretrainedConfig | None
    parameters: tuple[int, int] | None


def dry_run(experiment: Experiment, run: Path, *, resume: bool, resume_from: str | None) -> int:
    """Prints the plan of the run, and a line for each thing that is wrong or missing. Returns the exit status: 2 if
    there is any.

    resume, resume_from: as `training.run.train` has them
    """
    problems: list[str] = []
    try:
        refuse_earlier(run, resume)
        refuse_other(run)
        if resume:
            contents, identity = experiment.settings.verify_checkpoint, dict(experiment.identity)
            verified(run, identity, experiment.defaults, name=resume_from, contents=contents)
    except (RunFolderError, UnusableCheckpoint) as error:
        problems.append(str(error))
    with _noted(problems):
        if experiment.experience:
            print(f"experience  {initial_buffer.found(experiment)}")
    questions = _questions(experiment, problems)
    model = _model(experiment, problems)
    if model.path is not None and model.config is not None:
        with _noted(problems):
            _prompt(experiment, model.path, questions, problems)
    _schedule(experiment)
    if experiment.local is not None:
        with _noted(problems):
            device = placement.device_of(experiment.local.device)
            dtype = str(placement.dtype_of(experiment.local.dtype, device)).removeprefix("torch.")
            sampler = "vLLM" if experiment.local.samples_by_vllm(device.type) else "a loop in torch"
            print(f"device      {device}, {dtype}, {experiment.local.threads} CPU threads; sampled by {sampler}")
    with _noted(problems):
        if experiment.openrlhf is not None:
            stack.refuse_wrong_versions()
            flags.command_line(experiment, experiment.openrlhf.all_flags(), model.name, run, resume=False)
        if model.config is not None and model.parameters is not None:
            for line in needs(experiment, model.config, model.parameters, run):
                print(line)
    for hint in likely_wrong(experiment, questions, model.parameters):
        print(f"likely wrong {hint}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


def published_config(name: str) -> PretrainedConfig | None:
    """Of a model of gin/paper/, by a file there with the sizes of its config.json: for a plan where the hub is out of
    reach. name: a hub id or a folder; None for any other model"""
    file = PROJECT / "gin" / "paper" / f"{Path(name).name}.json"
    return AutoConfig.for_model(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _questions(experiment: Experiment, problems: list[str]) -> list[Question]:
    """Those of training, then those of validation; none if they cannot be loaded."""
    training: list[Question] = []
    validation: list[Question] = []
    per_step = experiment.settings.questions_per_step
    with _noted(problems):
        training, validation = load_questions(experiment)
        print(f"questions   {len(training):,} to train on, {len(validation):,} for validation", flush=True)
        if len(training) < per_step:
            fewer = f"FEWER than train.questions_per_step = {per_step}: no batch is whole"
            print(f"            {fewer}")
            problems += [f"questions: {fewer}; OpenRLHF needs whole ones"] if experiment.openrlhf else []
        grader = experiment.verifier
        by = ", ".join(map(str, filter(None, [grader.function, grader.url])))
        print(f"answer      {training[0].answer!r} to the first question; graded by {grader.kind!r}{by and f' ({by})'}")
        print("golds       beside the ends of their questions:")
        for question in (training[0], training[len(training) // 2], training[-1]):
            print(f"            {_short(question.answer_text, 28):28}  {_short(plain_text(question.prompt), 78)}")
        if unseen := sum(map(hides_its_options, [*training, *validation])):
            print(
                f"            NOT IN THE PROMPT: of {unseen:,} questions no option's text, so the model cannot choose; "
                "write the options into the column of the prompt, a line each ('A) first', 'B) second')"
            )
    return [*training, *validation]


def _short(text: str, length: int) -> str:
    """In one line, by its end."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"…{line[1 - length :]}"


def _model(experiment: Experiment, problems: list[str]) -> _Model:
    model: Any = experiment.model
    while isinstance(model, SupervisedModel):  # its sizes and its tokenizer are those of what it is made of
        model = model.model
    name = getattr(model, "path", type(model).__name__)
    path, config, count = None, None, None
    made_in = getattr(model, "directory", None)  # of a tiny model, which is trained
    if made_in is not None and not made_in.is_dir():
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
            problems += filter(None, [too_few_positions(config, estimates.longest_sequence(experiment), name)])
    return _Model(name, path, config, count)


def _prompt(experiment: Experiment, path: str, questions: list[Question], problems: list[str]) -> None:
    """Checks the model's files and all prompts, and prints one. Raises OSError and ValueError."""
    tokenizer = tokenizer_file.load(path)
    names = (f"{stem}{end}" for stem in _WEIGHTS for end in ("", ".index.json"))
    if Path(path).is_dir() or any(isinstance(try_to_load_from_cache(path, each), str) for each in names):
        with _noted(problems):
            weights.check_model_files(path, tokenizer)
    else:
        problems.append(f"the weights of {path} are not in the hub's cache here: hf download {path}")
    prompts = PromptEncoder(experiment.prompts, tokenizer)
    for question in questions[:1]:
        ids = prompts.token_ids(question)
        print(f"prompt      {len(ids)} tokens, with a question of {question.source}:")
        print(textwrap.indent(str(tokenizer.decode(ids)), " " * 12, lambda _: True), flush=True)
    if questions:
        limit, lengths = experiment.prompts.max_tokens, sorted(len(prompts.token_ids(each)) for each in questions)
        too_long = sum(length > limit for length in lengths)
        print(
            f"lengths     {lengths[0]:,} to {lengths[-1]:,} tokens, the median {lengths[len(lengths) // 2]:,}", end="; "
        )
        print(f"{too_long:,} of {len(lengths):,} ({too_long / len(lengths):.1%}) exceed Prompts.max_tokens = {limit:,}")
        if too_long and isinstance(experiment.questions, QuestionRecords):
            name = type(experiment.questions).__name__
            parts = {"questions": f"@{name}()", "model": "@PretrainedModel()", "prompts": "@Prompts()"}
            bindings = ["Work.questions = @LengthFilter()", *(f"LengthFilter.{k} = {v}" for k, v in parts.items())]
            print("            left out with", *(f'--set "{binding}"' for binding in bindings))
    prompts.check_prompts(questions)


def _schedule(experiment: Experiment) -> None:
    s, mixer, optimizer = experiment.settings, experiment.mixer, experiment.optimizer
    updates = optimizer.steps_per_batch * optimizer.passes_per_batch
    longest = estimates.longest_sequence(experiment)
    print(f"batch       {s.questions_per_step} questions × {s.group_size} rows of at most {longest:,} tokens", end="; ")
    if added := mixer.injection.added_rows:
        print(f"up to {added.rows} stored rows are added to each: {added!r}", end="; ")
    print(f"{updates} optimiser step{'s' if updates > 1 else ''}")
    evaluations = f"validation every {s.eval_every}" if s.eval_every and experiment.validation else "no validation"
    print(f"steps       {s.steps:,}; {evaluations}; a checkpoint every {s.save_every}, {s.keep} of them kept")
    at, rho, rho_end = mixer.share.start_at_accuracy, mixer.share.rho, mixer.share.rho_end
    share = f"ρ = {float(rho):g}, {int(rho * s.questions_per_step)} questions of a batch"
    share += f", to ρ = {float(rho_end):g} in {mixer.share.rho_steps} steps" if rho_end != rho else ""
    start = "the first step" if at is None else f"the step after a batch whose Pass@1 exceeds {float(at):g}"
    kinds = [share] * (mixer.share.largest > 0) + ["late injection"] * (mixer.injection.late_injection is not None)
    kinds += ["added rows"] * (mixer.injection.added_rows is not None)
    print(f"replay      {' and '.join(kinds)}, from {start}" if kinds else "replay      none")
    if anew := mixer.reincarnation:
        rule = f"the first batch whose Pass@1 exceeds {anew.at_accuracy}"
        print(f"anew        after {rule if anew.after_step is None else f'step {anew.after_step}'}, on-policy")
    if kinds and (prefix := mixer.injection.prefix):
        whose = prefix.of.replace("both", "successes and failures")
        print(
            f"given       the beginning of stored {whose}, at most {prefix.share.largest:.0%} of one: {prefix.share!r}"
        )


@contextmanager
def _noted(problems: list[str], prefix: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        problems.append(prefix + " ".join(str(error).split()).removeprefix(prefix))
