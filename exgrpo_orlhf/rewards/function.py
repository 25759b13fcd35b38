"""A user's own reward function, called as OpenRLHF, TRL or verl calls it; its parameters' names tell which.

It is called in the pool, where a call that hangs can be ended: for one response (OpenRLHF, verl), for those to one
question (TRL) or for all of a step (verl's batch reward managers).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from ..grader.answer import Answer, Grading
from ..grader.grade import Grade
from ..grader.kind import Kind
from ..io.metric_names import allowed_name
from ..records import EXTRA_INFO, mean
from ..rounding import LARGEST_REWARD
from ..workers.user_file import load_file, placed
from .protocol import logs_of, openrlhf_lists, single

NAME = "reward_func"  # where the binding names no function
Tool = Literal["openrlhf", "trl", "verl"]
Logs = dict[str, list[Any]]  # by name a value for each answer


class _Form(NamedTuple):
    """A way of calling. tool: whose; calls: as `Grading`; marks: parameters that tell it from the others; arguments: of
    these answers, some of which put into the logs; reward: where a dict that is returned has it"""

    tool: Tool
    calls: str
    marks: tuple[str, ...]
    arguments: Callable[[Sequence[Answer], Logs], dict[str, Any]]
    reward: str | None

    def names(self) -> set[str]:
        """Of the arguments, but for those that are columns of the questions."""
        return set(self.arguments([Answer("", "")], {}))


def _trl(answers: Sequence[Answer], logs: Logs) -> dict[str, Any]:
    common = set.intersection(*({*answer.meta} for answer in answers)) - {EXTRA_INFO}
    columns = {name: [answer.meta[name] for answer in answers] for name in answers[0].meta if name in common}
    prompts: list[Any] = [answer.prompt for answer in answers]
    completions: list[Any] = [answer.response for answer in answers]
    if not isinstance(prompts[0], str):  # messages, and then the completion is one too
        prompts = [[{"role": role, "content": content} for role, content in prompt] for prompt in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    made, planned = answers[0].progress
    metrics: Logs = {}

    def log_metric(name: str, value: Any) -> None:  # a call that logs it several times logs their mean
        metrics.setdefault(name, []).append(float(value))
        logs[name] = [mean(metrics[name])] * len(answers)

    return {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [[*answer.token_ids] for answer in answers],
        "trainer_state": SimpleNamespace(global_step=made, max_steps=planned, is_world_process_zero=True),
        "log_extra": lambda column, values: logs.setdefault(column, []).extend(values),
        "log_metric": log_metric,
    }


def _verl(answer: Answer) -> dict[str, Any]:
    columns = {name: value for name, value in answer.meta.items() if name != EXTRA_INFO}
    extra = answer.meta.get("extra_info", {**columns, **answer.meta.get(EXTRA_INFO, {})})
    if isinstance(extra, Mapping):
        # verl counts the prompt, and what comes back after each turn of the model but the last one.
        extra = {**extra, "num_turns": 2 * (answer.turns or 1), "rollout_reward_scores": {}}
    return {
        "data_source": answer.source, "solution_str": answer.response, "ground_truth": answer.gold, "extra_info": extra
    }  # fmt: skip


def _verl_batch(answers: Sequence[Answer], logs: Logs) -> dict[str, Any]:
    rows = [_verl(answer) for answer in answers]
    plural = {"extra_info": "extra_infos"}
    return {plural.get(name, f"{name}s"): [row[name] for row in rows] for name in rows[0]}


_FORMS = (
    _Form("openrlhf", "response", ("queries",), lambda answers, logs: openrlhf_lists(answers), "rewards"),
    _Form("trl", "group", ("completions", "completion_ids"), _trl, None),
    _Form("verl", "response", ("solution_str",), lambda answers, logs: _verl(answers[0]), "score"),
    _Form("verl", "batch", ("solution_strs",), _verl_batch, "score"),
)
_ACCEPTED = (
    "accepted are OpenRLHF's reward_func(queries, prompts, labels), TRL's reward(completions, **kwargs) and verl's "
    "compute_score(data_source, solution_str, ground_truth, extra_info), or that with lists (solution_strs, …)"
)


def named(where: str) -> tuple[Path, str]:
    """The file, as tracebacks name it, and the function that "file.py" or "file.py:name" says."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py"):
        path, name = where, NAME
    return Path(path).expanduser().absolute(), name


def is_function(reward: str) -> bool:
    return reward.rpartition(":")[0].endswith(".py") or Path(reward).suffix == ".py"


def name_of(reward: str) -> str:
    """Of a kind its name; of "file.py:name" name, of "file.py" the file's stem."""
    if not is_function(reward):
        return reward
    file, name = named(reward)
    return allowed_name(file.stem if name == NAME else name) or "reward"


def grading(
    where: str,
    success_at: float = 1.0,
    tool: Tool | None = None,
    gets: str | None = None,
    source: str | None = None,
    columns: Sequence[str] | None = None,
) -> Grading:
    """The rewards of the function at "file.py" or "file.py:name"; a success has a reward of success_at at least, or
    OpenRLHF's score where it returns one.

    tool: for which it is written, None: by its parameters; gets: 'group' or 'batch', for a function that takes several
    source: of the file, as `load_file` has it
    columns: in the meta of all questions, or None where that is not known

    Raises ValueError, or whatever the file raises."""
    file, name = named(where)
    function = getattr(load_file(file, "reward_function", source), name, None)
    if not callable(function):
        raise ValueError(f"Verifier.function = {where!r}: the file defines no function {name!r}")
    parameters = inspect.signature(function).parameters
    takes_all = any(arg.kind is arg.VAR_KEYWORD for arg in parameters.values())
    required = {name for name, arg in parameters.items() if arg.default is arg.empty and arg.kind not in (2, 4)}
    form = _form_of(parameters, required, tool, where)
    no_column = f"{file.name} takes {{}}, which is no column of the questions: add it to QuestionFile.meta"
    absent = required - form.names() - set(required if columns is None else columns)
    if absent:
        raise ValueError(no_column.format(", ".join(sorted(absent))))
    if gets is not None and form.calls == "response":
        raise ValueError(f"Verifier.gets = {gets!r}, but {where!r} takes one response at a time; {_ACCEPTED}")
    calls = gets or form.calls
    place = _place(function, file)

    def grade(answers: Sequence[Answer]) -> list[Grade]:
        logs: Logs = {}
        arguments = form.arguments(answers, logs)
        if missing := ", ".join(sorted(required - set(arguments))):
            return [Grade("error", None, reason=no_column.format(missing))] * len(answers)
        try:
            result = function(**{name: arguments[name] for name in arguments if takes_all or name in parameters})
            result = _loop().run(_awaited(result)) if inspect.isawaitable(result) else result
            rewards, scores, extra = _read(result, form, len(answers))
            # OpenRLHF's extra_logs may be anything, which `logs_of` reports; it fills no `logs`.
            source = "log_extra" if logs else "extra_logs"
            own_logs, left_out = logs_of({**logs, **extra} if logs else extra, len(answers), source)
        except MemoryError:
            raise
        except Exception as error:
            return [Grade("error", None, reason=placed(error, file))] * len(answers)
        graded = []
        for reward, score, noted in zip(rewards, scores, own_logs, strict=True):
            if reward is None or score is None:
                graded.append(Grade("error", None, reason=f"{place}: it returned None", logs=noted, abstains=True))
            elif fault := _fault(reward) or _fault(score):
                graded.append(Grade("error", None, reason=f"{place}: {fault}"))
            else:
                graded.append(Grade("correct" if score >= success_at else "wrong", reward, reason=left_out, logs=noted))
        return graded

    return Grading(calls, grade)


def _place(function: Any, file: Path) -> str:
    """The file's name and, of a plain function, its line."""
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
    return f"{file.name}, line {line}" if line else file.name


def _form_of(
    parameters: Mapping[str, inspect.Parameter], required: Collection[str], tool: Tool | None, where: str
) -> _Form:
    """The way of calling that the parameters' names tell, of this tool or of any. Raises ValueError."""
    of_tool = [form for form in _FORMS if tool in (None, form.tool)]
    marked = [form for form in of_tool if not set(form.marks).isdisjoint(parameters)]
    form = next(iter(marked or (of_tool if tool else [])), None)
    if form is None or (form.tool != "trl" and set(required) - form.names()):
        bound = "" if tool is None else f" with Verifier.tool = {tool!r}"
        told = "" if tool else ". Where the parameters do not tell which, Verifier.tool does: 'openrlhf', 'trl', 'verl'"
        raise ValueError(f"Verifier.function = {where!r}{bound} takes {', '.join(parameters)}; {_ACCEPTED}{told}")
    if alone := [name for name, arg in parameters.items() if arg.kind is arg.POSITIONAL_ONLY]:
        raise ValueError(f"Verifier.function = {where!r} takes {alone[0]} by position alone: write no / behind it")
    return form


@cache
def _loop() -> asyncio.Runner:
    """The event loop of this process: what a function keeps between its calls (connections) belongs to one."""
    return asyncio.Runner()


async def _awaited(result: Any) -> Any:
    return await result


def _read(result: Any, form: _Form, count: int) -> tuple[list[float | None], list[float | None], Any]:
    """The rewards, the scores that decide on success, and what is logged by name, a number for each answer."""
    if form.tool == "openrlhf":
        fields = result if isinstance(result, Mapping) else {}
        rewards, scores = [_number(result, form.reward)], fields.get("scores")
        return rewards, rewards if scores is None else [_number(scores, None)], fields.get("extra_logs")
    results = [result]
    if form.calls != "response":
        results = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(results, list | tuple):
            raise ValueError(f"it must return a list with a reward for each response, got {results!r:.80}")
    if len(results) != count:
        raise ValueError(f"it must return one reward for each response, got {len(results)} for {count}")
    rewards = [_number(item, form.reward) for item in results]
    dicts = [item for item in results if isinstance(item, Mapping)]
    names = dict.fromkeys(name for item in dicts for name in item if name != form.reward)
    logs = {name: [single(item.get(name)) for item in dicts] for name in names} if len(dicts) == count else {}
    numbers = {name: values for name, values in logs.items() if all(isinstance(x, int | float) for x in values)}
    return rewards, rewards, numbers


def _number(result: Any, key: str | None) -> float | None:
    if isinstance(result, Mapping):
        if key not in result:
            raise ValueError(f"it returned {result!r:.80}; a dict has the reward as {key!r}")
        result = result[key]
    result = single(result)
    if isinstance(result, list | tuple):
        raise ValueError(f"it must return one reward for each query, got {len(result)} for one")
    if isinstance(result, str | bytes | bytearray):
        raise ValueError(f"it must return a number, got {result!r:.80}")
    return None if result is None else float(result)


def _fault(reward: float) -> str | None:
    if not math.isfinite(reward):
        return f"it must return finite rewards, got {reward}"
    if abs(reward) > LARGEST_REWARD:
        return f"it must return rewards between ±{LARGEST_REWARD:,.0f}, got {reward:g}"
    return None


KIND = Kind(
    loads=f"{__name__}:grading",
    settings=("function", "success_at", "tool", "gets", "source"),
    takes_list=True,
    any_reward=True,
    whole=True,
    tries_loading=True,
    workers=1,  # it may keep something between its calls
)
