"""A reward function called by TRL's, OpenRLHF's or verl's own code, to compare it with a call from here."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.records import EXTRA_INFO
from exgrpo_orlhf.rewards.function import NAME, named
from exgrpo_orlhf.rewards.protocol import openrlhf_lists, single
from exgrpo_orlhf.workers.user_file import load_file, placed

Rewards = list[tuple[float | None, str | None]]  # of each response, and why there is none
_PACKAGES = {"trl": "trl==1.16.0", "openrlhf": "openrlhf==0.11.2", "verl": "verl==0.9.1"}
_NEEDED = {"trl": ("trl", "accelerate"), "openrlhf": ("openrlhf", "ray"), "verl": ("verl", "tensordict")}


class NotInstalled(ValueError):
    """The tool is not here. The message says how to get it."""


def check_installed(tool: str) -> None:
    """Raises NotInstalled."""
    if any(find_spec(name) is None for name in _NEEDED[tool]):
        raise NotInstalled(f"{tool} is not installed: pip install {_PACKAGES[tool]}")


def rewards_of(
    tool: str, where: str, batches: Sequence[Sequence[Sequence[Answer]]], gets: str | None = None
) -> Rewards:
    """What the tool's own code gets from the function at "file.py:name" for each response.

    batches: of each batch its groups, the responses to one question; gets: as `Verifier.gets`
    Raises NotInstalled, ValueError.
    """
    check_installed(tool)
    file, name = named(where)
    function = getattr(load_file(file, f"{tool}_reward"), name)
    own_call = {"trl": _trl, "openrlhf": _openrlhf, "verl": _verl}[tool](name, function)
    lists = "solution_strs" in inspect.signature(function).parameters
    groups = [[*group] for batch in batches for group in batch]
    if tool != "trl" and not lists:
        calls = [[answer] for group in groups for answer in group]
    else:
        whole = (gets or ("batch" if lists else "group")) == "batch"
        calls = [[answer for group in batch for answer in group] for batch in batches] if whole else groups
    rewards: Rewards = []
    for call in calls:
        try:
            values = [None if value is None or math.isnan(value) else value for value in own_call(call)]
            rewards += [(value, f"{file.name}: it returned None" if value is None else None) for value in values]
        except Exception as error:  # whatever the function raises, or the tool, of what it returns
            rewards += [(None, placed(error, file))] * len(call)
    return rewards


_OwnCall = Callable[[Sequence[Answer]], list[float | None]]


def _trl(name: str, function: Any) -> _OwnCall:
    """`GRPOTrainer._calculate_rewards`, of a trainer that has what it reads."""
    trl, utils, accelerate = (import_module(name) for name in ("trl", "trl.trainer.utils", "accelerate"))
    trainer = object.__new__(trl.GRPOTrainer)
    trainer.accelerator, trainer.args = accelerate.Accelerator(cpu=True), SimpleNamespace(report_to=[])
    trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes = [function], [name], [None]
    trainer.environments, trainer.state = None, import_module("transformers").TrainerState()
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    if utils.is_async_callable(function):
        _, trainer.async_loop, ready = utils.start_event_loop_in_daemon("rewards")
        ready.wait()

    def call(answers: Sequence[Answer]) -> list[float | None]:
        trainer.state.global_step, trainer.state.max_steps = answers[0].progress
        plain = isinstance(answers[0].prompt, str)
        prompts = [answer.prompt if plain else _messages(answer.prompt) for answer in answers]
        texts = [answer.response if plain else _messages([("assistant", answer.response)]) for answer in answers]
        inputs = [{**answer.meta, "prompt": prompt} for answer, prompt in zip(answers, prompts, strict=True)]
        rewards = trainer._calculate_rewards(inputs, prompts, texts, [[*answer.token_ids] for answer in answers])
        return list(rewards[:, 0].tolist())

    return call


def _messages(turns: Any) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def _openrlhf(name: str, function: Any) -> _OwnCall:
    """`SingleTurnAgentExecutor`'s call, and its reading of the result."""
    if name != NAME:
        raise ValueError(f"OpenRLHF calls the function {NAME!r} of a file, not {name!r}")
    executor = import_module("openrlhf.utils.agent").SingleTurnAgentExecutor()
    executor.reward_func = function

    def call(answers: Sequence[Answer]) -> list[float | None]:
        [result] = asyncio.run(executor._fetch_rewards_via_func(*openrlhf_lists(answers).values()))
        value = single(result.get("rewards"))
        return [None if value is None else float(value)]

    return call


def _verl(name: str, function: Any) -> _OwnCall:
    """`NaiveRewardManager`, and for a function with lists `BatchRewardManager`; a response is one token, its number."""
    managers, torch = import_module("verl.workers.reward_manager"), import_module("torch")
    lists = "solution_strs" in inspect.signature(function).parameters
    manager = managers.BatchRewardManager if lists else managers.NaiveRewardManager
    score = (lambda **row: asyncio.run(function(**row))) if inspect.iscoroutinefunction(function) else function

    def call(answers: Sequence[Answer]) -> list[float | None]:
        tokenizer = SimpleNamespace(decode=lambda ids, **kwargs: answers[int(ids[0])].response)
        ids = torch.arange(len(answers))[:, None]
        rows = {
            "data_source": [answer.source for answer in answers],
            "reward_model": [{"ground_truth": answer.gold} for answer in answers],
            "extra_info": [dict(answer.meta.get("extra_info", answer.meta.get(EXTRA_INFO, {}))) for answer in answers],
            "__num_turns__": [2 * (answer.turns or 1) for answer in answers],
        }
        tensors = {"prompts": ids, "responses": ids, "attention_mask": torch.ones(len(answers), 2, dtype=torch.long)}
        data = import_module("verl").DataProto.from_dict(tensors, rows)
        return list(manager(tokenizer, 0, score)(data)[:, 0].tolist())

    return call
