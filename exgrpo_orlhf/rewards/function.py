"""A reward function of the user's, as OpenRLHF takes them: `reward_func(queries, prompts, labels)`.

It is called in the pool with lists of one: a response that it hangs on costs that response and no other.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .answer import Answer, Graded, Grader

NAME = "reward_func"


def load(where: str) -> Callable[..., Any]:
    """The function at "file.py" or "file.py:name". Raises ValueError, or whatever the file raises."""
    path, colon, name = where.rpartition(":")
    if not colon or not path.endswith(".py"):
        path, name = where, NAME
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"Verifier.function = {where!r}: there is no file {str(file.absolute())!r}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"Verifier.function = {where!r}: the file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look a module up
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"Verifier.function = {where!r}: the file defines no function {name!r}")
    return function


def grader(where: str) -> Grader:
    """Correct means a reward above 0; the reward itself is the function's. queries: prompt and response in one text."""
    function = load(where)

    def grade(answer: Answer) -> Graded:
        result = function([answer.prompt + answer.response], [answer.prompt], [answer.gold])
        if isinstance(result, dict):
            result = result["rewards"]
        if hasattr(result, "tolist"):  # a tensor or an array
            result = result.tolist()
        while isinstance(result, list | tuple):
            if len(result) != 1:
                raise ValueError(f"it must return one reward for each query, got {len(result)} for one")
            result = result[0]
        reward = float(result)
        if not math.isfinite(reward):
            raise ValueError(f"it must return finite rewards, got {reward}")
        return Graded("correct" if reward > 0 else "wrong", reward)

    return grade
