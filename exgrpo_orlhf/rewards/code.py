"""Programs: the response's last code block, run in a sandbox against the question's tests. All of them must pass.

meta["tests"], or the gold answer where there are none, as JSON or as Python:
    {"inputs": [stdin, …], "outputs": [stdout, …]}, or [{"input": …, "output": …}, …]: a fresh process for each
    "assert f(1) == 2\\nassert …", or a list of such lines: after the program, in its process

What a program does to itself (a crash, an endless loop, too much memory) is a wrong answer. Output is compared line by
line, white space at line ends and empty lines at the end aside. A program that leaves before the last assertion has
passed has not passed: only the harness writes the token that says so.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from . import sandbox
from .extraction import visible
from .worker import Answer, Graded, Grader

_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_LONGEST = 100_000  # bytes of a program: it travels as one argument
_HARNESS = """
import json, os, sys
def _go():
    orders = json.load(sys.stdin)
    names = {"__name__": "solution"}
    exec(compile(orders["program"], "solution", "exec"), names)
    for test in orders["tests"]:
        exec(compile(test, "tests", "exec"), names)
    sys.stdout.flush()
    os.write(1, orders["token"].encode())
_go()
"""


def grader(timeout: float, memory: int) -> Grader:
    """timeout: seconds for all tests of a program; memory: MiB. Raises NoSandbox where there is none."""
    sandbox.check()

    def grade(answer: Answer) -> Graded:
        try:
            given = answer.meta.get("tests")
            tests = read_tests(answer.gold if given is None else given)
        except ValueError as error:
            return Graded("error", None, reason=str(error))
        program = last_program(answer.response)
        if program is None:
            return Graded("no_answer", 0.0)
        if len(program.encode()) > _LONGEST or "\0" in program:
            return Graded("wrong", 0.0, program)
        passes = _stdin_tests if isinstance(tests, dict) else _assertions
        correct = passes(program, tests, timeout, memory)
        return Graded("correct", 1.0, program) if correct else Graded("wrong", 0.0, program)

    return grade


def last_program(response: str) -> str | None:
    """The content of the last code block that is not empty, closed or not; None if there is none."""
    text = visible(response)
    program, opened = None, None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            program = text[opened.end() : fence.start()] if text[opened.end() : fence.start()].strip() else program
            opened = None
    if opened is not None and text[opened.end() :].strip():
        program = text[opened.end() :]
    return None if program is None else program.strip("\n")


def read_tests(given: Any) -> dict[str, str] | list[str]:
    """{stdin: stdout}, or assertions. Raises ValueError."""
    if isinstance(given, str) and given.strip()[:1] in ("{", "["):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"the tests are no JSON: {error}") from error
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        if given.get("fn_name"):
            raise ValueError("tests that call a function ('fn_name') must be written as assert lines")
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise ValueError("tests are {'inputs': […], 'outputs': […]} of equal length")
        given = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"there are no tests in {given!r:.80}")
    if all(isinstance(test, str) and test.strip() for test in given):
        return list(given)
    if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in given):
        return {_lines(test["input"]): _lines(test["output"]) for test in given}
    raise ValueError("tests are assert lines, or {'input': stdin, 'output': stdout}")


def _lines(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list | tuple) else str(given)


def _stdin_tests(program: str, tests: dict[str, str], timeout: float, memory: int) -> bool:
    runs = sandbox.run(["-c", program], list(tests), timeout, memory)
    return len(runs) == len(tests) and all(
        run.how == "exit 0" and _plain(run.output) == _plain(expected)
        for run, expected in zip(runs, tests.values(), strict=True)
    )


def _assertions(program: str, tests: list[str], timeout: float, memory: int) -> bool:
    token = secrets.token_hex(16)
    orders = json.dumps({"program": program, "tests": tests, "token": token})
    (run,) = sandbox.run(["-c", _HARNESS], [orders], timeout, memory)
    return run.how == "exit 0" and run.output.endswith(token)


def _plain(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]
