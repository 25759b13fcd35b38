"""Programs in a sandbox: tests decide, breaches are wrong answers, nothing gets out and nothing stays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from run_builders import wait_until
from thought_builders import TAGS

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.sandbox import code
from exgrpo_orlhf.sandbox.code import last_program, read_tests
from exgrpo_orlhf.workers.fork_server import close_workers

SUMS = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34"]}
ASSERTS = "assert f(1) == 2\nassert f(5) == 6"
DATACLASS = "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n"
TIMEOUT = 2.0  # of what does not end by itself; what does has 30 s, on however busy a machine
pytestmark = pytest.mark.usefixtures("needs_sandbox")


def verdict(program: str, tests=SUMS, **settings) -> str:
    question = Question.make("test", "", "", {"tests": tests})
    verifier = Verifier("code", **{"timeout": 30.0, "memory": 256, "max_failed_share": 1.0, **settings})
    return verifier.grade(question, f"Here it is:\n```python\n{program}\n```\nThat is all.").verdict


def sandboxes() -> set[str]:
    """Their processes on this machine, also those of tests that run at the same time in another process."""
    command = ["pgrep", "-f", "sandbox/namespaces.py|marked-by-the-test"]
    return set(subprocess.run(command, capture_output=True, text=True).stdout.split())


def assert_nothing_is_left_running() -> None:
    """Those of other tests end soon. What a test had left would sleep for a minute, or run for ever."""
    now = sandboxes()
    wait_until(lambda: not now & sandboxes(), seconds=30)


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("print(sum(map(int, input().split())))", SUMS, "correct"),
        ("import sys\nprint(sum(map(int, open('/dev/stdin').read().split())), ' ')", SUMS, "correct"),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", SUMS, "correct"),
        ("print(3)", SUMS, "wrong"),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", SUMS, "wrong"),
        ("import numbers, math, json, re, collections\ndef f(x):\n    return x + 1", ASSERTS, "correct"),
        (f"{DATACLASS}def f(x):\n    return max(P(x), P(0)).x + 1", ASSERTS, "correct"),
        ("import pickle\nclass P: pass\ndef f(x):\n    return x + len([pickle.dumps(P())])", ASSERTS, "correct"),
        ("print(1)", {"fn_name": "f", "inputs": [1], "outputs": [1]}, "error"),
        ("print(1)", "nonsense", "error"),
        ("print(1)", "import os", "error"),
        ("print(1)", [], "error"),
        ("print(1)", {"inputs": ["1"], "outputs": []}, "error"),
        ("print(1)", {"inputs": ["1", "1"], "outputs": ["1", "2"]}, "error"),
    ],
)
def test_all_tests_must_pass(program, tests, expected):
    assert verdict(program, tests) == expected


PRINTED = [  # what a test expects, what is the same, what is not
    ("0.333333333333", ("0.333333", "0.33333333333333", "3.33333333e-1"), ("0.3333", "0.333333a", "1/3")),
    ("3", ("3.0", "3.000"), ("3.0000001", "03", "4", "3 3")),
    ("3.0 yes", ("3 yes",), ("3 no", "3")),
    ("011", ("011",), ("11", "11.0")),
    ("100000000000000000001", ("100000000000000000001.0",), ("100000000000000000000", "1e20")),
    ("1 2\n0.5", ("1 2.0\n0.5", "1 2\n0.50", "\n 1  2 \n\t0.5\n\n", "1\t2\r\n0.5"),
     ("1 2\n\n0.5", "1\n2\n0.5", "1 2 0.5")),
    ("nan", ("nan",), ("NaN", "0.0")),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "right", "wrong"), PRINTED)
def test_printed_numbers_are_compared_as_public_judges_compare(expected, right, wrong):
    for verdict_, outputs in (("correct", right), ("wrong", wrong)):
        tests = {"inputs": [""], "outputs": [expected]}
        assert {output: verdict(f"print({output!r})", tests) for output in outputs} == dict.fromkeys(outputs, verdict_)


def test_integers_may_have_more_digits_than_python_s_limit():
    digits, power = "1" + "0" * 9_999, "def f(n): return 10**n"
    assert verdict("print(10**9999)", {"inputs": [""], "outputs": [digits]}) == "correct"
    assert verdict("print(10**9999 + 1)", {"inputs": [""], "outputs": [digits]}) == "wrong"
    assert verdict(power, f"assert f(9999) == {digits}") == "correct"
    assert verdict(power, {"fn_name": "f", "inputs": [[9999]], "outputs": [int(digits)]}) == "correct"


OUTSIDE = f"{tempfile.gettempdir()}/exgrpo-code-test-{os.getpid()}"
BREACHES = {  # each prints what is right if it succeeds
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)\nprint(3)",
    "stubborn fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading as t\nfor i in range(99): t.Thread(target=t.Event().wait).start()\nprint(3)",
    "10 GB": "x = bytearray(10 * 2**30)\nprint(3)",
    "file outside": f"open({OUTSIDE!r}).read()\nprint(3)",
    "passwords": "open('/etc/passwd').read()\nprint(3)",
    "where projects lie": "import os\nif {'src', 'share'} & {*os.listdir('/usr')}: print(3)",
    "own project": f"import os\nos.listdir({str(Path(__file__).parent)!r})\nprint(3)",
    "write outside": "open('/usr/marked-by-the-test', 'w')\nprint(3)",
    "any socket": "import socket\nsocket.socket(socket.AF_UNIX)\nprint(3)",
    "process 1": "import os\nos.kill(1, 9)\nos.kill(-1, 9)\nprint(3)",
    "more rights": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nprint(3)",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_a_wrong_answer_within_the_limit(name):
    Path(OUTSIDE).write_text("3\n")
    begun = time.monotonic()
    assert verdict(BREACHES[name], {"inputs": [""], "outputs": ["3"]}, timeout=TIMEOUT) == "wrong"
    assert time.monotonic() - begun < TIMEOUT + 30  # with the start of the workers, on a busy machine
    assert_nothing_is_left_running()
    assert not Path("/usr/marked-by-the-test").exists()
    Path(OUTSIDE).unlink()


@pytest.mark.slow
def test_a_program_s_limit_is_for_all_its_tests():
    slow = "import time\ntime.sleep(1)\nprint(1)"
    assert verdict(slow, {"inputs": ["a"] * 1, "outputs": ["1"]}, timeout=5.0) == "correct"
    assert verdict(slow, {"inputs": list("abcdefghij"), "outputs": ["1"] * 10}, timeout=1.0) == "wrong"


def test_the_starts_of_interpreters_are_no_part_of_it(monkeypatch):
    assert 0 < code._start_seconds() < 30
    limits, run = [], code.sandbox.run
    monkeypatch.setattr(code, "_start_seconds", lambda: 0.5)
    monkeypatch.setattr(code.sandbox, "run", lambda *rest: limits.append(rest[2]) or run(*rest))
    assert code.passes("print(input())", {"1": "1", "2": "2"}, 30.0, 256)
    monkeypatch.setattr(code, "_start_seconds", lambda: 40.0)  # however many: the pool waits no longer
    assert code.passes("print(input())", {"1": "1", "2": "2"}, 30.0, 256)
    assert limits == [31.0, 75.0]
    assert limits[1] - 30.0 < code.KIND.grace


def test_a_program_has_the_same_verdict_each_time():
    """The order of a set of texts depends on the hash seed."""
    ordered = f"print(list({{*{[*'abcdefgh']}}}))"
    assert len({run.output for _ in range(4) for run in code.sandbox.run(["-c", ordered], [""], 30.0, 256)}) == 1


INDENTED = "1. So:\n\n   ```python\n   def f(x):\n       return x\n\n   f(1)\n   ```\n2. Done."
DOCSTRING = 'def f(x):\n    """\n    ```python\n    f(1)\n    ```\n    """\n    return x'


@pytest.mark.parametrize(
    ("response", "program"),
    [
        # The last block, closed or not.
        ("```python\na\n```\n```py\nb\n```", "b"),
        ("```\na\n```\nno more", "a"),
        ("```python\na\n", "a"),
        ("none", None),
        ("````\n```\na\n```\n````", "```\na\n```"),
        ("```python\n \n\na\n\n```", "a"),
        ("Call ```f(1)```\n```f(1)``` so:\n```python\na\n```", "a"),
        # Blocks of another language, tags and chat tokens.
        ("```python\na\n```\nRun it:\n```bash\npython a.py\n```\n```text\n3\n```", "a"),
        ("```py\na\n```\nprints\n```\n3\n```", "a"),
        ("```Python3 title=x\na\n```\n```json\n{}\n```", "a"),
        ("```\na\n```\n```output\n3\n```", "a"),
        ("```bash\nls\n```", None),
        ("```python\na\n```<|im_end|>", "a"),
        ("```python\na<|im_end|>\n", "a"),
        ("<|assistant|>```python\na\n```<|im_end|>", "a"),
        ("<answer>```python\na\n```</answer>", "a"),
        # The indentation of a list goes, the spaces of a text and a fenced example stay.
        (INDENTED, "def f(x):\n    return x\n\nf(1)"),
        ("```python\nx = '''\n   \n'''\n```", "x = '''\n   \n'''"),
        (f"```python\n{DOCSTRING}\n```\nThat is all.", DOCSTRING),
        (f"```python\n{DOCSTRING}", DOCSTRING),
        # A draft in a thought is no program.
        ("<think>```python\na\n```</think> none", None),
        ("<think>```python\ndraft\n```</think>```python\na\n```", "a"),
        ("<think>```python\ndraft\n```</think>\n```python\na\n```", "a"),
        ("```python\ndraft\n```</think>\n```\na\n```", "a"),
        ("<think>\n```python\ndraft\n</think>\n```python\na\n```", "a"),
        ("<think>\n```python\ndraft\n</think>\n```\na\n```", "a"),
        ("```python\ndraft\n</think>\n```python\na\n```", "a"),
        ("<think>\n```python\ndraft\n</think>\nnone", None),
        ("<think>\n```python\ndraft\n```", None),
        ("```python\ndraft\n```</think>\nnone", None),
        ("```python\ndraft\n```\n</think>\n```text\nnone\n```", None),
        ("```python\na\n```\n<think>so</think>", "a"),
        ("```python\na\n```\n<think>\n```python\ndraft\n```", "a"),
    ],
)
def test_the_program_is_the_last_python_block_outside_thoughts(response, program):
    assert last_program(response) == program


ADD = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + Counter(b)[2] * 2"
SUM = "print(sum(map(int, input().split())))"
IN_STRING = "TEXT = {0}Example:\n```python\nadd(1, 2)\n```\n{0}\n"
CALLS = {"fn_name": "add", "inputs": [[1, 2], [5, 6]], "outputs": [3, 11]}
BLOCK = "```python\n{}\n```\n".format
WITH_EXAMPLE = f'def add(a, b):\n    """Adds.\n{BLOCK("add(1, 2)")}    """\n    return a + b'
TESTS_OF_A_PROGRAM = (
    "import subprocess\nprint(subprocess.run(['python', 's.py'], input='1 2', stdin=None, text=True))",
    "import io, sys\nbefore = sys.stdin\nsys.stdin = io.StringIO('1 2')\nmain()",
    "from unittest.mock import patch\nwith patch('builtins.input', side_effect=['1 2']):\n    main()",
    "import subprocess\nrun = subprocess.Popen(['python', 's.py'], stdin=subprocess.PIPE)\nrun.stdin.write(b'1 2')",
    "def input():\n    return '1 2'\nmain()",
)


@pytest.mark.parametrize(
    ("response", "tests", "program"),
    [
        # A function, and blocks after it that call or test it.
        *(
            (BLOCK(ADD) + BLOCK(later), tests, ADD)
            for later in (
                "print(add(1, 2))", "# def add\nassert add(1, 2) == 3", "from solution import add\nadd(1, 2)",
                "def test_add():\n    assert add(1, 2) == 3", "x = add == 3", 'print("""\ndef add(a): pass\n""")',
            )
            for tests in (CALLS, ASSERTS.replace("f(", "add("))
        ),
        (f"```\n{ADD}\n```\n" + BLOCK("add(1, 2)"), CALLS, ADD),
        (BLOCK("def add(a, b):\n    return 0") + BLOCK(ADD) + BLOCK("add(1, 2)"), CALLS, ADD),
        (BLOCK(METHOD) + BLOCK("print(Solution().add(1, 2))"), CALLS, METHOD),
        (BLOCK("add = lambda a, b: a + b") + BLOCK("add(1, 2)"), CALLS, "add = lambda a, b: a + b"),
        (BLOCK(ADD) + BLOCK("def sub(a, b): pass"), "assert add(1, 2) == 3\nassert add(1, 0) == 1", ADD),
        (BLOCK("x = 1") + BLOCK("y = 2"), CALLS, "y = 2"),
        # A program, and a test of it.
        *((BLOCK(SUM) + BLOCK(test), SUMS, SUM) for test in TESTS_OF_A_PROGRAM),
        *(
            (BLOCK(reads) + BLOCK("print(3)"), SUMS, reads)
            for reads in (
                "import sys\nprint(sum(map(int, sys.stdin.read().split())))", "for line in open(0): print(line)",
                "from sys import stdin\nfor line in stdin: print(line)", "print(open('/dev/stdin').read())",
                "import sys\ninput = sys.stdin.readline\nprint(input())", "print(list(iter(input, '')))",
            )
        ),
        (BLOCK("print(3)") + BLOCK("print(4)"), {"inputs": [""], "outputs": ["4"]}, "print(4)"),
        # A fence inside a string is none, unless the string has no end.
        *((BLOCK(IN_STRING.format(quotes) + ADD), CALLS, IN_STRING.format(quotes) + ADD) for quotes in ('"""', "'''")),
        (BLOCK(WITH_EXAMPLE), CALLS, WITH_EXAMPLE),
        (BLOCK(IN_STRING.format('"""') + SUM), SUMS, IN_STRING.format('"""') + SUM),
        (BLOCK('x = """') + BLOCK(f'"""Sums."""\n{ADD}'), CALLS, f'"""Sums."""\n{ADD}'),
        (BLOCK('x = """') + "Two:\n" + BLOCK(ADD), CALLS, ADD),
        # The prompt may have opened the block.
        (f"{ADD}\n```", CALLS, ADD),
        (f"{ADD}\n```\nIt adds.", CALLS, ADD),
        (f"{ADD}\n```\nUse it:\n{BLOCK('add(1, 2)')}", CALLS, ADD),
        (f"python\n{ADD}\n```\n", CALLS, ADD),
        (f"{SUM}\n```\n", SUMS, SUM),
        (ADD, CALLS, ADD),
        ("Read with input() and add.\n```\nx\n```", SUMS, "x"),
        (f"<think>{ADD}\n```\n</think> none", CALLS, None),
        ("def add of two\n", CALLS, None),
    ],
)  # fmt: skip
def test_the_program_is_the_last_block_with_what_the_tests_need(response, tests, program):
    assert last_program(response, read_tests(tests)) == program


@pytest.mark.parametrize(
    ("outputs", "results", "expected"),
    [
        ([[3], [11]], "a + b", "correct"),
        ([[3], [11]], "[a + b]", "correct"),
        ([[3], [11]], "a + b + 1", "wrong"),
        ([[3], [11, 0]], "a + b", "wrong"),
        ([[[3]], [[11]]], "[a + b]", "correct"),
        ([[[3]], [[11]]], "a + b", "wrong"),
        ([[3.0], [11.0]], "[a + b + 1.0]", "wrong"),
        ([["3"], ["11"]], "str(a + b)", "correct"),
    ],
)
def test_a_result_in_a_list_of_one_is_the_result_or_the_list(outputs, results, expected):
    tests = {**CALLS, "outputs": outputs}
    assert verdict(f"class Solution:\n    def add(self, a: List[int], b):\n        return {results}", tests) == expected


@pytest.mark.parametrize(("begin", "end"), TAGS)
@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("{begin}```python\ndraft\n```{end} none", None),
        ("{begin}```python\ndraft\n```{end}```python\na\n```", "a"),
        ("```python\ndraft\n```{end}\n```\na\n```", "a"),
        ("{begin}\n```python\ndraft\n{end}\n```python\na\n```", "a"),
        ("{begin}\n```python\ndraft\n```", None),
        ("```python\na\n```\n{begin}\n```python\ndraft\n```", "a"),
        ("```python\nprint('{begin}', '{end}')\n```", "print('{begin}', '{end}')"),
        ("{begin}so {other}\n```python\ndraft\n```", None),
    ],
)
def test_a_draft_in_the_tags_of_any_family_is_no_program(begin, end, response, program):
    other = "[/THINK]" if re.match("<.*think", begin) else "</think>"
    filled = lambda text: text and re.sub("{(begin|end|other)}", lambda name: tags[name[1]], text)
    tags = {"begin": begin.strip(), "end": end.split("\n")[0], "other": other}
    assert last_program(filled(response)) == filled(program)


def test_tags_and_tokens_inside_a_program_stay():
    for line in ('print("</think>")', 'print("<think>")', 'print("<|im_end|>", "<s>", "[INST]")', 'x = "\u200b"'):
        block = f"```python\n{line}\ny = 1\n```"
        for response in (block, f"<think>hm\n```python\nno\n```</think>\n{block}\nDone."):
            assert last_program(response) == f"{line}\ny = 1"


def test_a_program_is_found_in_time_linear_in_the_response():
    begun = time.monotonic()
    tags = ("</think>", "\n</think>", "<think>", "<|im_end|>")
    strings = ('"""', '\\"""\n', '"""\n```\n', "'''\n```python\n", "'\n```\n", "#", '"""\\', '```python\n"""\n```\n')
    codes = ("(", "-", "def add(", "lambda:", "f'{", "input(", "add:", "add =")
    for part in (*tags, *strings, *codes, " ", "\n", " \n", "```\n", "   ```\n", "```python\n", "`"):
        for tests in (read_tests(CALLS), read_tests(SUMS)):
            last_program("```python\n" + part * (100_000 // len(part)) + "x", tests)
            last_program("<think>\n  ```python\n" + part * (100_000 // len(part)), tests)
            last_program(f"{ADD}\ninput()\n" + part * (100_000 // len(part)), tests)
    assert time.monotonic() - begun < 120  # quadratic time would be hours


def test_tests_are_read():
    assert [call.text for call in read_tests(ASSERTS)] == ["f(1)", "f(5)"]
    assert [call[:3] for call in read_tests(str(["assert f(1, b=[2])  ==2", ""]))] == [("f", "f(1, b=[2])", 2)]
    assert read_tests("{'inputs': ['1'], 'outputs': ['2']}") == {"1": "2"}, "as an assertion it could not fail"
    assert read_tests('[{"input": "1", "output": "2"}]') == {"1": "2"}
    assert read_tests({"inputs": ["1", "1"], "outputs": ["1", "1\n"]}) == {"1": "1"}
    assert code.tests_of(Answer('{"inputs": ["1"], "outputs": ["2"]}', "")) == {"1": "2"}
    for broken in ('{"inputs": ["1"', "[assert", "[x] = [f(1)]; assert x == 2", "assert f("):
        with pytest.raises(ValueError, match="neither JSON nor assert lines"):
            read_tests(broken)
    for values in ("[[Infinity]]", '[[{"a": NaN}]]'):
        with pytest.raises(ValueError, match=r"f\(.*\) cannot be called: fn_name is .* and arguments are JSON"):
            read_tests(f'{{"fn_name": "f", "inputs": {values}, "outputs": [1]}}')
    named = {"input": [1, [2]], "output": 3, "type": "function_call", "fn_name": "Solution().f"}
    assert [call[:3] for call in read_tests([named])] == [("f", "f(1, [2])", 3)]
    assert read_tests([{"input": "1", "output": "2", "testtype": "stdin"}]) == {"1": "2"}
    typed = {"input": "[1]\n2", "output": "3", "testtype": "functional"}
    for wrong, reason in (
        ([typed], "a test of type 'functional' calls a function: add its name to each test as 'fn_name'"),
        ([named, {"input": "1", "output": "2"}], "some tests name a function"),
        ({"inputs": "10", "outputs": "55"}, "of equal length"),
        ([{"input": None, "output": "1"}], "one of them is None"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_tests(wrong)
    with pytest.raises(ValueError, match="two tests have the input '1' and different outputs"):
        read_tests({"inputs": ["1", "2", "1"], "outputs": ["1", "2", "3"]})


def test_without_a_sandbox_nothing_is_run():
    """As another user's container would have it: user namespaces are used up."""
    limit = Path("/proc/sys/user/max_user_namespaces")
    if not shutil.which("unshare"):
        pytest.skip("needs unshare, to forbid user namespaces to a process")
    source = (
        "from exgrpo_orlhf.records import Question\nfrom exgrpo_orlhf.rewards import Verifier\n"
        "Verifier('code', memory=257).grade(Question.make('t', '', 'assert f() == 1'), '```\\nprint(1)\\n```')"
    )
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", f'echo 0 > {limit} && exec {sys.executable} -c "$0"']
    done = subprocess.run([*command, source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    message = "NoGrader: Verifier.kind = 'code' cannot be used: NoSandbox: this machine allows no sandbox"
    assert message in done.stderr


def test_close():
    close_workers()
    assert_nothing_is_left_running()
