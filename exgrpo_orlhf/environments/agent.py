"""A user's file with an environment: which class of it is run, and what its methods may return.

The interface is that of OpenRLHF 0.11.2, openrlhf/utils/agent.py. A user's file runs in the episodes' processes alone:
one server loads it, and forks a worker for each episode.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import mmap
import random
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from numpy import random as numpy_random  # takes 13 ms, which no episode should

from ..rewards.protocol import logs_of, single
from ..rounding import LARGEST_REWARD
from ..workers.user_file import BadResult, UserFileError, load_file, placing_errors
from . import openrlhf_agent
from .openrlhf_agent import MultiTurnAgentExecutor

_RESET, _STEP = ("observation",), ("rewards", "environment_feedback", "done")
_SAID = mmap.mmap(-1, 2)  # shared by all forks: which warnings have been printed


class Reply(NamedTuple):
    """The environment's answer to a reset or a step.

    observation: of a reset the observation, of a step its environment_feedback
    reward: of this step
    score: OpenRLHF's `scores`, where the step returned it
    logs: names and numbers to be logged (OpenRLHF's extra_logs)
    """

    observation: str
    done: bool = False
    reward: float = 0.0
    score: float | None = None
    logs: tuple[tuple[str, float], ...] = ()


def _name_for_openrlhf() -> None:
    """Lets a user's file import openrlhf_agent.py as `openrlhf.utils.agent`, also where OpenRLHF is installed: its own
    takes 12 s and 3,900 modules, with threads that no fork survives, and only its names are needed. Everything else of
    OpenRLHF is its own; where it is not installed, the two packages above are empty."""
    if importlib.util.find_spec("openrlhf") is None:
        for name in ("openrlhf", "openrlhf.utils"):
            sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        sys.modules["openrlhf"].utils = sys.modules["openrlhf.utils"]  # type: ignore[attr-defined]
        sys.modules["openrlhf.utils"].agent = openrlhf_agent  # type: ignore[attr-defined]
    sys.modules["openrlhf.utils.agent"] = openrlhf_agent


def load(settings: Mapping[str, str]) -> tuple[str, Callable[[dict[str, Any]], Reply]]:
    """What answers the calls of an episode of the file at 'path', as its 'source' has it. Raises UserFileError that
    says why nothing does."""
    file = Path(settings["path"]).expanduser().absolute()  # as tracebacks name it
    _name_for_openrlhf()
    module = load_file(file, "environment", settings["source"])
    agents: set[type]
    executor: Any = getattr(module, "AgentExecutor", None)
    if executor is not None:
        multi_turn = isinstance(executor, type) and issubclass(executor, MultiTurnAgentExecutor)
        if not multi_turn or executor.execute is not MultiTurnAgentExecutor.execute:
            raise UserFileError(
                f"{file.name}: its AgentExecutor must be a MultiTurnAgentExecutor without an `execute` of its own, "
                "because the engine generates here; write the turns as reset and step of an AgentInstance"
            )
        with placing_errors(file):
            agents = {executor().agent_instance_cls}
    else:
        members = [member for member in vars(module).values() if getattr(member, "__module__", None) == module.__name__]
        agents = {member for member in members if isinstance(member, type) and callable(getattr(member, "step", None))}
    if len(agents) != 1:
        names = ", ".join(sorted(agent.__name__ for agent in agents)) or "none"
        raise UserFileError(
            f"{file.name}: expected an AgentExecutor, or one class with the methods reset(states) and step(states); "
            f"classes with a step: {names}"
        )
    return "", Agent(agents.pop(), file).answer


class Agent:
    """An instance of the user's class, for one episode."""

    def __init__(self, agent_class: type, file: Path) -> None:
        self._class, self._file = agent_class, file
        self._instance: Any = None
        self._runner = asyncio.Runner()  # one loop for all turns: what a reset opens in it, a step may use

    def answer(self, states: dict[str, Any]) -> Reply:
        """To the first call, which is the reset, or to a step. Raises UserFileError."""
        with placing_errors(self._file):
            if self._instance is not None:
                return self._step(states)
            _seed(states["seed"])
            self._instance = self._class()
            if not hasattr(self._instance, "reset"):
                return Reply(states["observation"])
            return Reply(_text(self._call("reset", states, _RESET), "reset", "observation"))

    def _step(self, states: dict[str, Any]) -> Reply:
        params = states.get("sampling_params")
        result = self._call("step", states, _STEP)
        if result.get("sampling_params") not in (None, params):
            _warn_once(0, "a step's sampling_params are ignored: every turn is sampled as Sampling says")
        [logs], left_out = logs_of(result.get("extra_logs"), 1)
        if left_out:
            _warn_once(1, f"left out: {left_out}")
        done = single(result["done"])
        if not isinstance(done, bool | int) or done not in (0, 1):
            raise BadResult(f"step returned 'done' = {result['done']!r:.80}; expected True or False")
        return Reply(
            observation=_text(result, "step", "environment_feedback"),
            done=bool(done),
            reward=_number(result, "rewards"),
            score=None if result.get("scores") is None else _number(result, "scores"),
            logs=logs,
        )

    def _call(self, method: str, states: dict[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
        result = getattr(self._instance, method)(states)
        if inspect.iscoroutine(result):
            result = self._runner.run(result)
        if not isinstance(result, Mapping):
            raise BadResult(f"{method} returned {result!r:.80}; expected a dict with {_listed(names)}")
        if missing := [name for name in names if name not in result]:
            raise BadResult(f"{method} returned no {_listed(missing)}; expected a dict with {_listed(names)}")
        for name in ("environment_images", "images"):
            images = result.get(name)
            if images is not None and not (isinstance(images, list | tuple) and not images):
                raise BadResult(f"{method} returned {name!r}: images are not supported, only text")
        return result


def _seed(seed: int) -> None:
    """Of the generators that a user's file may use without one of its own, so that an episode can be repeated."""
    random.seed(seed)
    numpy_random.seed(seed % 2**32)  # noqa: NPY002  (the global one)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(map(repr, names))


def _number(result: Mapping[str, Any], name: str) -> float:
    number = single(result[name])
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise BadResult(f"step returned {name!r} = {result[name]!r:.80}; expected one finite number")
    if name == "rewards" and abs(number) > LARGEST_REWARD:
        raise BadResult(f"step returned 'rewards' = {number:g}; expected a number between ±{LARGEST_REWARD:,.0f}")
    return float(number)


def _text(result: Mapping[str, Any], method: str, name: str) -> str:
    if not isinstance(result[name], str):
        raise BadResult(f"{method} returned {name!r} = {result[name]!r:.80}; expected text")
    text = str(result[name])
    if any("\ud800" <= character <= "\udfff" for character in text):  # what a tokenizer cannot encode
        raise BadResult(f"{method} returned {name!r} with half a surrogate pair; decode with errors='replace'")
    return text


def _warn_once(which: int, text: str) -> None:
    if not _SAID[which]:
        _SAID[which] = 1
        print(f"environment: {text}", file=sys.stderr, flush=True)
