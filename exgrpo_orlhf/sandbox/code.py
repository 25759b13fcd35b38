"""Programs: a Python code block of the response, run in a sandbox against the question's tests. All must pass.

It is the last block tagged python, python3 or py, else the last block without a tag, of those that define the functions
which the tests call, or read standard input if the tests have any; of all where none does.

meta["tests"], or the gold answer where there are none, as JSON or as Python:
    {"inputs": [stdin, …], "outputs": [stdout, …]}, or [{"input": …, "output": …}, …]: a fresh process for each
    {"fn_name": "f", "inputs": [[argument, …], …], "outputs": [result, …]}, or [{"fn_name": …, "input": …, …}, …]: calls
        in one process, of the program's f or its Solution().f; where every output is a list of one, as in APPS and
        TACO, its item is a right result too
    "assert f(1) == 2\\nassert …", or a list of such lines: the same, read from Python (`calls.py`)

A program that crashes, never ends or takes too much memory is a wrong answer. Output is compared line by line and word
by word, empty lines at its begin and end aside, and decimals within a tolerance (`_same_word`).
"""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from ..grader.answer import Answer, Grader
from ..grader.grade import Grade
from ..grader.kind import Kind
from ..grader.thoughts import BEHIND, CHAT_TOKEN, TAG, tag_of, visible
from . import sandbox
from .calls import TOLERANCE, Call, all_pass, read_assertions, read_json_call

_MARK = re.compile(
    # A fence may follow a tag or a chat token, and the text after it ends where a tag begins.
    rf"(?:^|{BEHIND}|(?<=<answer>))"
    rf"(?P<indent>[ \t]*)(?P<fence>```+|~~~+)(?P<info>(?:(?!\[/?think\])[^\n<◁])*)|(?P<thought>{TAG.pattern})",
    re.MULTILINE | re.IGNORECASE,
)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?", re.ASCII)
_STRING = re.compile(  # of Python, or a comment; open: it has no end
    r"""#[^\n]*|(?P<quotes>\"{3}|'{3})(?:\\.|[^\\])*?(?:(?P=quotes)|\\?(?P<open>\Z))"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?""",
    re.DOTALL,
)
_READS = re.compile(  # standard input; what sets it (sys.stdin = …) or hands it to a process (input=…) is a test
    r"(?<![\w.])(?<!def )input\s*\(|\b(?:iter|map)\(\s*input\b|=\s*input\s*(?:$|;)|\bopen\(\s*0|\bos\.read\(\s*0"
    r"|(?<![\w.])(?:sys\.)?stdin\s*\.\s*(?:read|buffer)|(?:\bin|\()\s*(?:sys\.)?stdin\b(?!\s*=)|\bfileinput\b",
    re.MULTILINE,
)
_NO_FENCES = str.maketrans("`~", "''")
_PYTHON = ("python", "python3", "py")
_LONGEST = 100_000  # bytes of a program: it travels as one argument
_MOST_STARTS = 45.0  # seconds that are added for the starts of interpreters; within the pool's grace
_CALLER = Path(__file__).with_name("caller.py").read_text()


def grader(timeout: float, memory: int) -> Grader:
    """timeout: seconds for all tests of a program; memory: MiB. Raises NoSandbox if this machine has no sandbox."""
    sandbox.check_available()
    _start_seconds()  # once, before the workers are forked

    def grade(answer: Answer) -> Grade:
        try:
            tests = tests_of(answer)
        except ValueError as error:
            return Grade("error", None, reason=str(error))
        program = last_program(answer.response, tests)
        if program is None:
            return Grade("no_answer", 0.0)
        correct = len(program.encode()) <= _LONGEST and "\0" not in program and passes(program, tests, timeout, memory)
        return Grade("correct", 1.0, extracted=program) if correct else Grade("wrong", 0.0, extracted=program)

    return grade


def passes(program: str, tests: dict[str, str] | list[Call], timeout: float, memory: int) -> bool:
    """Whether a program passes all tests. timeout: seconds for all of them; memory: MiB."""
    if isinstance(tests, list):
        orders = json.dumps([program, [[call.name, call.text] for call in tests]])
        [run] = sandbox.run(["-c", _CALLER], [orders], timeout, memory)
        return run.how == "exit 0" and all_pass(tests, run.output)
    length = sum(len(expected.encode("utf-8", "replace")) for expected in tests.values())
    limit = timeout + min(len(tests) * _start_seconds(), _MOST_STARTS)
    runs = sandbox.run(["-c", program], list(tests), limit, memory, length)  # up to the first that fails
    outputs = [run.output for run in runs if run.how == "exit 0"]
    return len(outputs) == len(tests) and all(map(_same_output, outputs, tests.values()))


@cache
def _start_seconds() -> float:
    """Twice what an interpreter takes, which each input begins anew: none of a program's own time, and with a hundred
    inputs most of what they take. Twice, because the machine may be busier later."""
    began = time.monotonic()
    sandbox.run(["-c", ""], [""] * 5, 60.0, 512)
    return 2 * (time.monotonic() - began) / 5


def _same_output(output: str, expected: str) -> bool:
    lines, expected_lines = _words(output), _words(expected)
    same_shape = [*map(len, lines)] == [*map(len, expected_lines)]
    return same_shape and all(map(_same_word, chain(*lines), chain(*expected_lines)))


def _same_word(word: str, expected: str) -> bool:
    """Whether two words are the same text, or two numbers of which one is a decimal and that are close enough."""
    if word == expected or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return word == expected
    if not re.search("[.eE]", expected):  # an integer must be met exactly; 011 is no number
        return bool(re.search("[.eE]", word)) and Decimal(word) == Decimal(expected)
    return math.isclose(float(word), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def last_program(response: str, tests: dict[str, str] | list[Call] | None = None) -> str | None:
    """The last block in Python that is not empty, closed or not, and has what the tests need; else the last without a
    tag; where no block has it, the text before the first fence if that is Python and has it. None if there is none.

    Thoughts (outside a block: up to the last </think>, and after a <think> that is never closed) are ignored. Inside a
    block nothing is removed but the indentation that all its lines share.
    """
    text = re.sub("[\ud800-\udfff]", "", response).lstrip("\ufeff\u200b")
    masked = _STRING.sub(lambda part: part[0].translate(_NO_FENCES) if part["quotes"] else part[0], text)
    blocks = [*(_blocks(text, masked) if masked != text else ()), *_blocks(text, text)]
    programs = [(_needed(body, tests), tag in _PYTHON, body) for tag, body in blocks if not tag or tag in _PYTHON]
    if not programs or max(programs)[0] < 1:
        head = re.split(r"(?m)^[ \t]*(?:```|~~~)", visible(text), maxsplit=1)[0]
        head = re.sub(r"(?i)\A(?:python3?|py)[ \t]*\n", "", head)  # the info of a fence that the prompt ends in
        programs += [(1, False, head)] if _needed(head, tests) > 0 and _is_python(head) else []
    if not programs:
        return None
    best = max(rank for *rank, _ in programs)
    [*_, program] = (body for *rank, body in programs if rank == best)
    program = re.sub(r"\A(?:[ \t\r]*\n)+", "", program).rstrip("\r\n")
    return textwrap.dedent(program) if program[:1] in (" ", "\t") else program


def _needed(program: str, tests: dict[str, str] | list[Call] | None) -> int:
    """How much of what the tests need a program has: the functions that they call, or that it reads standard input; -1
    if a string of it has no end, because a fence inside that was taken for the block's."""
    if any(part["open"] is not None for part in _STRING.finditer(program)):
        return -1
    code = _STRING.sub("", program)
    if isinstance(tests, list):
        define = r"(?m)^(?:[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+{0}\b|{0}[ \t]*(?::[^=\n]*)?=(?!=))"
        return sum(re.search(define.format(re.escape(name)), code) is not None for name in {one.name for one in tests})
    reads = _READS.search(code) is not None or "/dev/stdin" in program
    return int(reads and any(text.strip() for text in tests or ()))


def _is_python(text: str) -> bool:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        ast.parse(text)
        return True
    return False


def _blocks(text: str, masked: str) -> list[tuple[str, str]]:
    """The tag and the content of each block that counts. masked: the text, without fences that are to be ignored"""
    blocks: list[tuple[str, str]] = []  # tag and content
    earlier: list[tuple[str, str]] = []  # before a thought; they count if no block follows it
    thinking = 0  # the family of the thought's tags, as `tag_of` has it
    opened: re.Match[str] | None = None
    marks = [*_MARK.finditer(masked)]
    fences = [mark for mark in marks if mark["fence"]]
    for mark in marks:
        if mark["thought"]:
            family, ends = tag_of(mark)
            if thinking not in (0, family) or (opened and not _ends_draft(text, mark, opened, fences, thinking > 0)):
                continue
            opened = None
            if ends or not thinking:
                earlier, blocks = (earlier if ends else blocks or earlier), []
            thinking = 0 if ends else family
        elif opened is None:
            if "`" not in mark["info"] or mark["fence"][0] == "~":  # ```print(1)``` opens no block
                opened = mark
        elif mark["fence"].startswith(opened["fence"]) and not mark["info"].strip() and _width(mark) <= _width(opened):
            # A fence that is indented further is part of the program.
            blocks.append((_tag(opened), text[opened.end() : mark.start()]))
            opened = None
    if opened is not None:
        blocks.append((_tag(opened), _without_last_tokens(text[opened.end() :])))
    return [(tag, content) for tag, content in ([] if thinking else blocks) or earlier if content.strip()]


def _tag(fence: re.Match[str]) -> str:
    info = fence["info"].strip()
    word = re.match(r"[\s{.]*([\w+-]+)", info)
    return (word[1] if word else info).lower()


def _width(fence: re.Match[str]) -> int:
    return len(fence["indent"].expandtabs(4))


def _ends_draft(
    text: str, tag: re.Match[str], opened: re.Match[str], fences: list[re.Match[str]], thinking: bool
) -> bool:
    """Whether a </think> inside a block ends a thought that left the block open, and is not part of the program."""
    if not tag_of(tag)[1]:
        return False
    if thinking and not text[text.rfind("\n", 0, tag.start()) + 1 : tag.start()].strip():
        return True
    first = bisect_left(fences, tag.end(), key=re.Match.start)
    following = next((mark for mark in fences[first:] if _width(mark) <= _width(opened)), None)
    return following is not None and _tag(following) in _PYTHON


def _without_last_tokens(text: str) -> str:
    text = text.rstrip()
    for token in reversed([*CHAT_TOKEN.finditer(text)]):
        if token.end() == len(text):
            text = text[: token.start()].rstrip()
    return text


def tests_of(answer: Answer) -> dict[str, str] | list[Call]:
    """{stdin: stdout}, or calls. Raises ValueError for tests in any other form."""
    tests = answer.meta.get("tests")
    return read_tests(answer.gold if tests is None else tests)


def read_tests(tests: Any) -> dict[str, str] | list[Call]:
    """As `tests_of`."""
    if isinstance(tests, str) and tests.strip()[:1] in ("{", "["):
        tests = _read_literal(tests.strip())
    if isinstance(tests, str):
        tests = [tests]
    name = None
    if isinstance(tests, Mapping):
        name, inputs, outputs = (tests.get(key) for key in ("fn_name", "inputs", "outputs"))
        if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs)):
            raise ValueError("tests are {'inputs': […], 'outputs': […]} of equal length")
        tests = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"there are no tests in {tests!r:.80}")
    if all(isinstance(test, str) for test in tests):
        if calls := read_assertions("\n".join(tests)):
            return calls
        raise ValueError(f"there are no tests in {tests!r:.80}")
    if not all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
        raise ValueError("tests are assert lines, or {'input': stdin, 'output': stdout}")
    if any(names := [test.get("fn_name") or name for test in tests]):
        if not all(names):
            raise ValueError("some tests name a function (fn_name) and others do not")
        lists = [isinstance(test["output"], list) and len(test["output"]) == 1 for test in tests]
        pairs = zip(names, tests, strict=True)
        return [read_json_call(str(name), test["input"], test["output"], all(lists)) for name, test in pairs]
    outputs_of: dict[str, str] = {}
    for test in tests:
        if (kind := test.get("testtype", test.get("type", "stdin"))) not in ("stdin", "stdin_stdout"):
            raise ValueError(f"a test of type {kind!r} calls a function: add its name to each test as 'fn_name'")
        if test["input"] is None or test["output"] is None:
            raise ValueError("a test's input and output are texts, or lists of lines; one of them is None")
        text, expected = _lines(test["input"]), _lines(test["output"])
        if _words(outputs_of.setdefault(text, expected)) != _words(expected):
            raise ValueError(f"two tests have the input {text!r:.80} and different outputs")
    return outputs_of


def _read_literal(text: str) -> Any:
    """The value of JSON or of a Python literal. Raises ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise ValueError(f"the tests are neither JSON nor assert lines: {error}") from error


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _words(output: str) -> list[list[str]]:
    """Of each line, empty ones at the begin and the end left out."""
    return [line.split() for line in output.strip().split("\n")]


KIND = Kind(
    loads=f"{__name__}:grader",
    settings=("timeout", "memory"),
    takes_list=True,
    check=tests_of,
    tries_loading=True,
    grace=_MOST_STARTS + 15.0,  # and for the sandbox around a program, which has the limit
)
