"""Tests that call a function: read from JSON or from assert lines, and checked against what the program returned.

A call's arguments and its expected result are literals, so nothing of a test is evaluated: the call goes to the
program's process (`caller.py`), plain data comes back and is compared here.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .sandbox import MOST_DIGITS

TOLERANCE = 1e-6
sys.set_int_max_str_digits(MOST_DIGITS)  # of tests and results, which are read in this process
_ACCEPTED = (
    "accepted are assert f(literals) == literal, assert f(literals) is True (False, None), "
    "assert math.isclose(f(literals), number) and assert abs(f(literals) - number) < number"
)
_KINDS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Call(NamedTuple):
    """A call and what its result must be.

    name: the program's function; text: the call in Python; passes: whether a result is right, from the result and the
        expected one (raises what it likes for a result of another type)
    """

    name: str
    text: str
    expected: Any
    passes: Callable[[Any, Any], Any]


def read_assertions(text: str) -> list[Call]:
    """Tests from Python text of assert lines; imports among them are ignored. Raises ValueError with the line."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are neither JSON nor assert lines: {error}") from error
    calls = []
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        try:
            calls.append(_read_assertion(statement))
        except (ValueError, TypeError, RecursionError) as error:
            line = text.split("\n")[statement.lineno - 1].strip()
            raise ValueError(
                f"line {statement.lineno} of the tests cannot be read: {line:.120}; {_ACCEPTED}"
            ) from error
    return calls


def _read_assertion(statement: ast.stmt) -> Call:
    literal = ast.literal_eval
    passes: Callable[[Any, Any], Any]
    match statement:
        case ast.Assert(
            ast.Compare(
                ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), value)]), [ast.Lt() | ast.LtE() as sign], [limit]
            )
        ):
            smaller, most = operator.lt if isinstance(sign, ast.Lt) else operator.le, literal(limit)
            passes = lambda result, expected: smaller(abs(result - expected), most)
        case ast.Assert(
            ast.Call(ast.Name("isclose") | ast.Attribute(ast.Name("math"), "isclose"), [call, value], options)
        ):
            tolerances = {str(keyword.arg): literal(keyword.value) for keyword in options}
            passes = lambda result, expected: math.isclose(result, expected, **tolerances)
        case ast.Assert(ast.Compare(call, [ast.Is()], [ast.Constant(True | False | None) as value])):
            passes = operator.is_
        case ast.Assert(ast.Compare(call, [ast.Eq()], [value])):
            passes = same_result
        case _:
            raise ValueError("another statement")
    if not isinstance(call, ast.Call):
        call, value = value, call
    expected = literal(value)
    if not passes(expected, expected):
        raise ValueError("no result passes")
    return Call(*_literal_call(call), expected, passes)


def read_json_call(name: str, arguments: Any, expected: Any, wrapped: bool = False) -> Call:
    """A test of JSON: a list of arguments, and a result that is compared as JSON has it (a tuple is a list there).
    wrapped: whether the expected one is a list that may hold the result instead of being it. Raises ValueError."""
    if not isinstance(arguments, list):
        raise ValueError(f"the input of a call is the list of its arguments, not {arguments!r:.80}")
    name = name.removeprefix("Solution().").removeprefix("Solution.")
    text = f"{name}({', '.join(map(repr, arguments))})"
    try:
        call = _literal_call(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{text:.120} cannot be called: fn_name is a name alone, and arguments are JSON") from error

    def passes(result: Any, expected: Any) -> bool:
        result = json.loads(json.dumps(result))
        return same_result(result, expected) or (wrapped and same_result(result, expected[0]))

    return Call(*call, expected, passes)


def same_result(result: Any, expected: Any) -> bool:
    """Equality, but a float, also in a list, tuple or dict, within 1e-6, absolute or relative, as EvalPlus has it."""
    if isinstance(expected, float):
        return math.isclose(result, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if type(result) is type(expected) and isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(map(same_result, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(same_result(result[key], expected[key]) for key in expected)
    return bool(result == expected)


def _literal_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("no call of a function")
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        ast.literal_eval(argument)
    return call.func.id, ast.unparse(call)


def all_pass(calls: Sequence[Call], output: str) -> bool:
    """Whether the results that `caller.py` wrote pass all tests."""
    line = output.partition("\n")[0]
    if len(line) > 1000 + 20 * sum(len(repr(call.expected)) for call in calls):
        return False  # longer than what is expected in any notation: not worth the time to read
    try:
        results = [_unpack(packed) for packed in json.loads(line)]
        return all(call.passes(result, call.expected) for call, result in zip(calls, results, strict=True))
    except Exception:  # the program may have written anything
        return False


def _unpack(packed: Any) -> Any:
    """The value of `caller.pack`."""
    if not isinstance(packed, list):
        return packed
    kind, *items = packed
    if kind == "bytes":
        return bytes.fromhex(*items)
    if kind == "complex":
        return complex(*items)
    values = map(_unpack, items)
    return dict(zip(values, values, strict=True)) if kind == "dict" else _KINDS[kind](values)
