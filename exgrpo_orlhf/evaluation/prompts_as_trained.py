"""The prompts of an evaluation: by its own options, else as the checkpoint was trained, else by its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..questions.prompts import PromptEncoder, Prompts
from ..records import Question
from .benchmarks import Benchmark
from .evaluated_model import EvaluatedModel, RequestBuilder

log = logging.getLogger(__name__)
Training = Mapping[str, Any]  # the prompts of a checkpoint's training, as `evaluated_model.load` returns them


@dataclass(frozen=True)
class PromptOptions:
    """As the fields of `Prompts` and the options of run_bench.py; None: as in training.

    row_system: whether the system message that the questions of training brought along is sent
    """

    template: str | None = None
    system: str | None = None
    row_system: bool | None = None
    chat_template_from: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thought_tags: Sequence[str] | None = None


def prompts_of(options: PromptOptions, model: EvaluatedModel, training: Training) -> Prompts:
    """Raises ValueError for options that cannot be followed."""
    row_system = _row_system(training)
    if options.row_system and options.system is not None:
        raise ValueError("--row-system cannot be used with --system")
    if options.row_system and row_system is None:
        raise ValueError(
            f"--row-system: {model.name} is no checkpoint of a run whose questions have one system message of their "
            "own in common; give a message with --system"
        )
    tags = tuple(options.thought_tags or training.get("thought_tags", ()))
    if model.tokenizer is None:
        return replace(_of_a_server(options, training), thought_tags=tags)
    source = options.chat_template_from
    default = "chat" if model.tokenizer.chat_template or source else "plain"
    template = Prompts(template=options.template or training.get("template", default)).template
    same = template == training.get("template")
    system = options.system if options.system is not None else (training.get("system") if same else None)
    if system is None and (same if options.row_system is None else options.row_system):
        system = row_system
        if system is None and any(training.get("row_systems", ())):
            log.warning("the questions of training had system messages, which are not sent; --system sends one")
    own = options.chat_template_kwargs
    own = training.get("chat_template_kwargs") if own is None and same and not source else own
    prompts = Prompts(template=template, system=system, chat_template_from=source, chat_template_kwargs=own or None)
    return replace(prompts, thought_tags=tags)


def _of_a_server(options: PromptOptions, training: Training) -> Prompts:
    if options.template or options.chat_template_from:
        option = "--template" if options.template else "--chat-template-from"
        raise ValueError(f"{option} cannot be used with --api chat: the server renders the prompts")
    kwargs = options.chat_template_kwargs
    kwargs = training.get("chat_template_kwargs") if kwargs is None else kwargs
    system = training.get("system") if options.system is None else options.system
    system = _row_system(training) if system is None and options.row_system is not False else system
    return Prompts(template="chat", system=system, chat_template_kwargs=kwargs)


def _row_system(training: Training) -> str | None:
    """The system message that all questions of training brought along, if the template can write another question's."""
    systems = training.get("row_systems", [])
    return systems[0] if len(systems) == 1 and training.get("template") != "plain" else None


def departures(builder: RequestBuilder, benchmarks: Sequence[Benchmark] = ()) -> list[str]:
    """What makes the prompts others than those of training; [] for no difference, or an unknown training."""
    asked = [(builder.instruction(one), builder.instruction(replace(one, ask=""))) for one in benchmarks]
    of_sets = [
        f"{one.title}: ask {one.ask!r}" for one, (now, then) in zip(benchmarks, asked, strict=True) if now != then
    ]
    return [*_of_the_template(builder), *of_sets] if builder.training else []


def _of_the_template(builder: RequestBuilder) -> list[str]:
    prompts, training, probe = builder.prompts, builder.training, Question.make("", "?", "?")
    system = training.get("system")
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


def log_prompts(builder: RequestBuilder, asked_otherwise: Sequence[str]) -> None:
    """Say how the questions are asked, and whether that is as in training, where it is known."""
    if builder.encoder is None:
        return
    prompts = builder.prompts
    system = "" if prompts.system is None else f", system message {prompts.system!r:.60}"
    differences = f", not as in training: {'; '.join(asked_otherwise)}" if asked_otherwise else ", as in training"
    log.info("prompts by --template %.60r%s%s", prompts.template, system, differences if builder.training else "")
