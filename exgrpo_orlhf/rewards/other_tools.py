"""A reward function called by TRL's or OpenRLHF's own code, to compare it with a call from here."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from .answer import Answer, single
from .sandbox.function import NAME, load_file, named

Rewards = list[float | None]
PACKAGES = {"trl": "trl==1.16.0", "openrlhf": "openrlhf==0.11.2"}


class NotInstalled(ValueError):
    """The tool is not here. The message says how to get it."""


def rewards_of(tool: str, where: str, groups: Sequence[Sequence[Answer]]) -> list[Rewards]:
    """What the tool's own code gets from the function at "file.py:name" for each response; None for no reward.

    groups: the responses to one question each. Raises NotInstalled, ValueError, and what the function raises.
    """
    try:
        version(tool)
    except PackageNotFoundError:
        raise NotInstalled(f"{tool} is not installed: pip install {PACKAGES[tool]}") from None
    return (_trl if tool == "trl" else _openrlhf)(where, groups)


def _trl(where: str, groups: Sequence[Sequence[Answer]]) -> list[Rewards]:
    """`GRPOTrainer._calculate_rewards`, of a trainer that has what it reads, one group a call."""
    trl, utils, accelerate = (import_module(name) for name in ("trl", "trl.trainer.utils", "accelerate"))
    file, name = named(where)
    function = getattr(load_file(file, "trl_reward"), name)
    trainer = object.__new__(trl.GRPOTrainer)
    trainer.accelerator, trainer.args = accelerate.Accelerator(cpu=True), SimpleNamespace(report_to=[])
    trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes = [function], [name], [None]
    trainer.environments, trainer.state = None, import_module("transformers").TrainerState()
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    if inspect.iscoroutinefunction(function):
        _, trainer.async_loop, ready = utils.start_event_loop_in_daemon("rewards")
        ready.wait()
    rewards = []
    for group in groups:
        trainer.state.global_step, trainer.state.max_steps = group[0].progress
        plain = isinstance(group[0].prompt, str)
        prompts = [one.prompt if plain else _messages(one.prompt) for one in group]
        texts = [one.response if plain else _messages([("assistant", one.response)]) for one in group]
        inputs = [{**one.meta, "prompt": prompt} for one, prompt in zip(group, prompts, strict=True)]
        found = trainer._calculate_rewards(inputs, prompts, texts, [[*one.token_ids] for one in group])
        rewards.append([None if math.isnan(reward) else reward for reward in found[:, 0].tolist()])
    return rewards


def _messages(turns: Any) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def _openrlhf(where: str, groups: Sequence[Sequence[Answer]]) -> list[Rewards]:
    """`SingleTurnAgentExecutor`'s call, one response at a time."""
    file, name = named(where)
    if name != NAME:
        raise ValueError(f"OpenRLHF calls the function {NAME!r} of a file, not {name!r}")
    fetch = import_module("openrlhf.utils.agent").SingleTurnAgentExecutor(str(file))._fetch_rewards_via_func

    def reward(answer: Answer) -> float | None:
        prompt, query = answer.as_read
        [result] = asyncio.run(fetch([query], [prompt], [answer.gold]))
        value = single(result["rewards"])
        return None if value is None else float(value)

    return [[reward(one) for one in group] for group in groups]
