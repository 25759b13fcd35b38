"""A user's own reward function, called as OpenRLHF, TRL or verl calls it; a parameter's name tells which.

It is called in the pool for one response at a time, so that a response on which it hangs affects no other response.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...rounding import LARGEST_REWARD
from ..answer import Answer, Graded, Grader, logs_of, single

NAME = "reward_func"  # where the binding names no function
_ACCEPTED = (
    "accepted are OpenRLHF's reward_func(queries, prompts, labels), TRL's reward(completions, **kwargs) and verl's "
    "compute_score(data_source, solution_str, ground_truth, extra_info)"
)


def _forms(answer: Answer) -> dict[str, tuple[dict[str, Any], str | None]]:
    """By a parameter that only this form has: the arguments, and where a dict that is returned has the reward."""
    text: Any = answer.prompt
    prompt: Any = text
    completion: Any = answer.response
    if not isinstance(text, str):  # messages, and then TRL's completion is one too
        prompt, completion = ([{"role": r, "content": c} for r, c in m] for m in (text, [("assistant", completion)]))
        text = "\n".join(content for _, content in text)
    extra = {"data_source": answer.source, "extra_info": answer.meta.get("extra_info", answer.meta)}
    columns = {**answer.meta, "prompts": prompt, "completions": completion}
    return {
        "queries": ({"queries": [f"{text}{answer.response}"], "prompts": [text], "labels": [answer.gold]}, "rewards"),
        "completions": ({name: [value] for name, value in columns.items()}, None),
        "solution_str": ({"solution_str": answer.response, "ground_truth": answer.gold, **extra}, "score"),
    }


def named(where: str) -> tuple[Path, str]:
    """The file, as tracebacks name it, and the function that "file.py" or "file.py:name" says."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py"):
        path, name = where, NAME
    return Path(path).expanduser().absolute(), name


def grader(where: str, success_at: float = 1.0, columns: Sequence[str] | None = None) -> Grader:
    """The reward of the function at "file.py" or "file.py:name"; a success has a reward of success_at at least, or
    OpenRLHF's score where it returns one. columns: in the meta of all questions, or None where that is not known

    Raises ValueError, or whatever the file raises."""
    file, name = named(where)
    if not file.is_file():
        raise ValueError(f"Verifier.function = {where!r}: there is no file {str(file.absolute())!r}")
    if file.suffix != ".py":
        raise ValueError(f"Verifier.function = {where!r}: the file must end in .py")
    function = getattr(load_file(file, "reward_function"), name, None)
    if not callable(function):
        raise ValueError(f"Verifier.function = {where!r}: the file defines no function {name!r}")
    parameters = inspect.signature(function).parameters
    form = next((name for name in _forms(Answer("", "")) if name in parameters), None)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    required = {name for name, each in parameters.items() if each.default is each.empty and each.kind not in (2, 4)}
    if form is None or (form != "completions" and required - set(_forms(Answer("", ""))[form][0])):
        raise ValueError(f"Verifier.function = {where!r} takes {', '.join(parameters)}; {_ACCEPTED}")
    no_column = f"{file.name} takes {{}}, which is no column of the questions: add it to QuestionFile.meta"
    absent = required - set(_forms(Answer("", ""))[form][0]) - set(required if columns is None else columns)
    if absent:
        raise ValueError(no_column.format(", ".join(sorted(absent))))

    def grade(answer: Answer) -> Graded:
        arguments, key = _forms(answer)[form]
        if missing := ", ".join(sorted(required - set(arguments))):
            return Graded("error", None, reason=no_column.format(missing))
        try:
            result = function(**{name: arguments[name] for name in arguments if takes_all or name in parameters})
            result = asyncio.run(result) if inspect.iscoroutine(result) else result
            reward = _number(result, key)
            if abs(reward) > LARGEST_REWARD:
                raise ValueError(f"it must return rewards between ±{LARGEST_REWARD:,.0f}, got {reward:g}")
            scored = key == "rewards" and isinstance(result, dict) and result.get("scores") is not None
            score = _number(result, "scores") if scored else reward
            extra = result.get("extra_logs") if key == "rewards" and isinstance(result, dict) else None
            [logs], left_out = logs_of(extra, 1)
        except MemoryError:
            raise
        except Exception as error:
            return Graded("error", None, reason=placed(error, file))
        return Graded("correct" if score >= success_at else "wrong", reward, reason=left_out, logs=logs)

    return grade


def load_file(file: Path, prefix: str) -> ModuleType:
    """The module of a user's file, which ends in .py, under a name with this prefix. Raises ValueError, with the line,
    where the file raises."""
    spec = importlib.util.spec_from_file_location(f"{prefix}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(placed(error, file)) from error
    return module


def placed(error: BaseException, file: Path) -> str:
    """The error with the last line of the user's file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f", line {each.lineno}" for each in frames[::-1] if each.filename == str(file)), "")
    return f"{file.name}{line}: {type(error).__name__}: {error}"


def _number(result: Any, key: str | None) -> float:
    if isinstance(result, dict):
        if key not in result:
            raise ValueError(f"it returned {result!r:.80}; a dict has the reward as {key!r}")
        result = result[key]
    result = single(result)
    if isinstance(result, list | tuple):
        raise ValueError(f"it must return one reward for each query, got {len(result)} for one")
    reward = float(result)
    if not math.isfinite(reward):
        raise ValueError(f"it must return finite rewards, got {reward}")
    return reward
