"""Tests that are calls: which are read, which results pass, and that a program that cheats does not pass."""

from __future__ import annotations

import textwrap

import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.sandbox.calls import all_pass, read_assertions
from exgrpo_orlhf.sandbox.code import passes, read_tests

SAME = "def f(x): return x"
RIGHT = {
    "plain data": (
        "def f(*x, **y): return x, y",
        "assert f([1, {2: (3,)}], None, a={'b', 4}, b=-1.5) == (([1, {2: (3,)}], None), {'a': {'b', 4}, 'b': -1.5})",
        "assert f(b'\\x00', 1j, 'ä\\n', set()) == ((b'\\x00', 1j, 'ä\\n', set()), {})",
    ),
    "containers of the library": (
        """
        from collections import Counter, OrderedDict, defaultdict, namedtuple
        def f(x): return [Counter(x), OrderedDict(a=1), defaultdict(int, b=2), namedtuple("P", "x y")(3, 4)]
        """,
        "assert f('aab') == [{'a': 2, 'b': 1}, {'a': 1}, {'b': 2}, (3, 4)]",
    ),
    "the other way round": (SAME, "assert (1, 2) == f((1, 2)), 'a message'"),
    "is": ("def f(x): return {1: True}.get(x)", "assert f(1) is True", "assert f(3) is None"),
    "tolerances": (
        "def f(x): return x / 3",
        "import math\nfrom math import isclose\nassert math.isclose(f(1), 0.3333, abs_tol=1e-3)",
        "assert isclose(0.3333, f(1), rel_tol=0.01)\nassert abs(f(1) - 0.3333) < 1e-3",
        "assert abs(0.5 - f(3)) <= 0.5",
    ),
    "a sum of floats": (
        "def f(*x): return sum(x)",
        "assert f(0.1, 0.1, 0.1) == 0.3",
        "assert 0.3 == f(0.1, 0.2)\nassert f(1, 2) == 3.0",
    ),
    "floats in containers": ("def f(x): return {'a': [x * 3, (x,)]}", "assert f(0.1) == {'a': [0.3, (0.1,)]}"),
    "a builtin's name": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
    "a method of an import's name": ("class Solution:\n def merge(self, x): return x", "assert merge([1]) == [1]"),
    "an import of its own": ("from heapq import merge\ndef f(x): return [*merge(x, [2])]", "assert f([1]) == [1, 2]"),
    "types of arguments": ("def f(x: int): return f.__annotations__['x'] is int", "assert f(1) is True"),
    "calls in order": ("n = []\ndef f():\n    n.append(0)\n    return len(n)", "assert f() == 1", "assert f() == 2"),
    "a thread that goes on, and noise": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\ndef f(): print(2); return 1",
        "assert f() == 1",
    ),
}  # fmt: skip
WRONG = {
    "one test of two": ("def f(x): return 2", "assert f(1) == 2", "assert f(5) == 6"),
    "a tuple for a list": ("def f(x): return (x,)", "assert f(1) == [1]"),
    "1 for True": ("def f(x): return 1", "assert f(1) is True"),
    "too far": ("def f(x): return 0.5", "assert abs(f(1) - 0.501) < 1e-4"),
    "a float that is too far": ("def f(x): return [0.30001]", "assert f(1) == [0.3]"),
    "a float near an integer": ("def f(x): return 3.0000001", "assert f(1) == 3"),
    "no function": ("", "assert f(1) == 2"),
    "an error at once": ("1 / 0", "assert f(1) == 2"),
    "a name that nobody has": ("def f(x: List[int]): return 2", "assert f([1]) == 2"),
    "no Python": ("syntax error", "assert f(1) == 2"),
    "input": ("input()\ndef f(x): return 2", "assert f(1) == 2"),
    "an exception with a long name": ("def f(x): raise type('E' * 5000, (Exception,), {})", "assert f(1) == 2"),
}
JSON = {"fn_name": "f", "inputs": [[[3, 1], {"a": None}], [[], {}]], "outputs": [[[1, 3], {"a": None}], [[], {}]]}


def passed(program: str, tests, seconds: float = 30.0) -> bool:
    return passes(textwrap.dedent(program), read_tests(tests), seconds, 256)


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_program_passes_if_it_is_right(name):
    program, *tests = {**RIGHT, **WRONG}[name]
    assert passed(program, tests) == (name in RIGHT)


@pytest.mark.usefixtures("needs_sandbox")
def test_calls_of_json_are_compared_as_json():
    assert passed("def f(x, y): return sorted(x), y", JSON)
    assert passed("class Solution:\n    def f(self, x, y): return sorted(x), y", JSON)
    assert not passed("def f(x, y): return x, y", JSON)
    assert passed("def f(x): return (x * 3,)", {"fn_name": "f", "inputs": [[0.1]], "outputs": [[0.3]]})


REFUSED = (
    "f(1)", "x = f(1)", "assert True", "assert f(1)", "assert not f(1)", "assert f(1) > 2", "assert 2 in f(1)",
    "assert f(1) == 1 and f(2) == 3", "assert f(1) == g(1)", "assert f(g(1)) == 2", "assert f(x) == 2",
    "assert f(1) == 2 == 2", "assert f(1) is 5", "assert f(1).x == 2", "assert f(1)(0) == 2", "assert a.f(1) == 2",
    "assert sorted(f(1)) == [1]", "assert len(f(1)) == 3", "assert isinstance(f(1), int)", "assert 271 - f(1) < 1",
    "assert abs(f(1) - 2) == 0", "assert abs(f(1) - 'a') < 1", "assert abs(f(1) - 2) < -1",
    "assert isclose(f(1), 2, abs_tol=x)", "assert isclose(f(1), 2, abs=1)", "assert f(1) == eval('2')",
    "assert set(sum(1, x)) == set([3])", "try:\n    f(1)\nexcept BaseException: pass", "def g(): assert f(1) == 2",
    "import os; os._exit(0)", "for i in range(3): assert f(i) == i", "[x] = [f(1)]; assert x == 2",
)  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_any_other_assertion_is_refused_with_its_line(line):
    with pytest.raises(ValueError, match="line 2 of the tests cannot be read: ") as error:
        read_assertions(f"assert f(0) == 0\n{line}")
    assert line.split("\n")[0] in str(error.value)
    assert "accepted are assert f(literals) == literal" in str(error.value)


@pytest.mark.usefixtures("needs_sandbox")
def test_a_question_is_refused_before_anything_is_generated():
    right, wrong = (
        Question.make("set", "Write f.", "", {"tests": test}) for test in ("assert f(1) == 2", "assert f(1)")
    )
    verifier = Verifier("code", memory=256)
    verifier.check_questions([right])
    message = r"'Write f\.' of 'set', .* = 'code': line 1 of the tests cannot be read: assert f\(1\);"
    with pytest.raises(ValueError, match=message):
        verifier.check_questions([right, wrong])


@pytest.mark.parametrize(
    "output",
    [
        "", "[]", "[271828, 271828]", "271828", "null", "true", "[true]", "{}", '[{"a": 1}]', "[NaN]", "[Infinity]",
        "[" * 500,
        '[["os", "_exit"]]', '[["list", ["os:_exit"]]]', '[["set", ["list"]]]', '[["dict", 1]]', '[["bytes", "zz"]]',
        '[["complex", 271828, 0, 0]]', "[" + "9" * 900 + "]", "[[]]", "\x80\x04cos\n_exit\nK\x00\x85R.\n", "exit 0",
        '{"results": [{"how": "exit 0", "output": ""}]}', "[271827]\n[271828]", "[271828" + " " * 2000 + "]",
    ],
)  # fmt: skip
def test_what_is_no_result_does_not_pass(output):
    assert not all_pass(read_assertions("assert f(1) == 271828"), output)
    assert all_pass(read_assertions("assert f(1) == 271828"), "[271828]\n")


# What a test expects, and a program that returns it only if it finds it somewhere.
SECRET = "assert f(1) == 'expected-271828'"
NUMBER = "assert f(1) == 271828"
CLOSE = "assert abs(f(1) - 271.828) < 1e-6"
HUNT = r"""
import gc, os, re, sys
def hunt(data):
    data = data if isinstance(data, bytes) else repr(data).encode()
    matches = re.findall(rb"expected-" + rb"[0-9]{6}", data)
    return matches[0].decode() if matches else None
"""
ALWAYS = """
class Always{base}:
    def yes(*values): return True
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = yes
    __hash__ = object.__hash__
"""
EQUAL = ALWAYS.format(base="")
CHEATS = {
    "equal": (EQUAL + "def f(x): return Always()", SECRET),
    "equal in a list": (EQUAL + "def f(x): return [Always()]", "assert f(1) == [271828]"),
    "equal in a tuple": (EQUAL + "def f(x): return Always(), 1", "assert (271828, 1) == f(1)"),
    "equal by its class": (EQUAL + "class f(Always):\n    def __init__(self, x): pass", SECRET),
    "close": ("class X:\n    __sub__ = lambda *values: 0.0\ndef f(x): return X()", CLOSE),
    "of another class": ("class X:\n    __class__ = int\ndef f(x): return X()", NUMBER),
    "mock.ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", SECRET),
    "a mock": ("from unittest.mock import MagicMock\nf = MagicMock()\nf.return_value.__eq__ = lambda *a: True", SECRET),
    **{
        f"a subclass of {base}": (
            ALWAYS.format(base=f"({base})") + f"def f(x): return Always({value})", f"assert f(1) == {expected}",
        )
        for base, value, expected in (
            ("int", "1", "271828"), ("float", "1", "271828"), ("str", "'a'", "'271828'"), ("list", "", "[271828]"),
            ("bytes", "b'a'", "b'271828'"), ("tuple", "", "(271828,)"), ("set", "", "{271828}"), ("dict", "", "{1: 2}"),
        )
    },
    **{
        name: (f"import builtins\nbuiltins.{name} = {name} = lambda *a, **k: {value}\ndef f(x): return 0", SECRET)
        for name, value in (
            ("compile", "'pass'"), ("exec", "None"), ("eval", "0"), ("isinstance", "1"), ("len", "3"), ("repr", "''"),
        )
    },
    "abs": ("abs = lambda x: 0\ndef f(x): return 0.0", CLOSE),
    "a class math": ("class math:\n    isclose = lambda *a: 1\ndef f(x): pass", "assert math.isclose(f(1), 2.5)"),
    "isclose": ("isclose = lambda *a: True\ndef f(x): return 0", "assert isclose(f(1), 2.5)"),
    "frames": (
        """
        def f(x):
            frame, seen = sys._getframe(), []
            while frame:
                seen += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
                frame = frame.f_back
            return hunt(seen)
        """,
        SECRET,
    ),
    "gc": (
        """
        def f(x):
            objects = [each for each in gc.get_objects() if type(each) in (list, dict, tuple, str)]
            return next(filter(None, map(hunt, objects)), None)
        """,
        SECRET,
    ),
    "its memory": (
        """
        def f(x):
            for line in open("/proc/self/maps"):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                with open("/proc/self/mem", "rb", 0) as memory:
                    memory.seek(begin)
                    try:
                        secret = hunt(memory.read(end - begin))
                    except (OSError, OverflowError):
                        continue
                if secret:
                    return secret
        """,
        SECRET,
    ),
    "other processes' files": (
        """
        def f(x):
            for pid in {*range(1, 9), *map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}:
                for name in "mem", "maps", "cmdline", "environ", "fd/0", "fd/3", "fd/5", "stack", "cwd", "root":
                    try:
                        secret = hunt(open(f"/proc/{pid}/{name}", "rb").read())
                    except OSError:
                        continue
                    if secret:
                        return secret
        """,
        SECRET,
    ),
    "sys.modules": ("import sys\nsys.modules.clear()\ndef f(x): return 0", SECRET),
    "os._exit": ("import os\ndef f(x): os._exit(0)", SECRET),
    "sys.exit at once": ("import sys\nsys.exit(0)", SECRET),
    "forged results": (
        """
        import os
        def f(x):
            for fd in range(64):
                for line in b'[true]\\n', b'exit 0\\n', b'{"results": [{"how": "exit 0", "output": ""}]}\\n':
                    try:
                        os.write(fd, line)
                    except OSError:
                        pass
            os._exit(0)
        """,
        SECRET,
    ),
    "results in advance": (
        """
        import os, threading
        def flood():
            while True:
                os.write(3, b'[true]\\n')
        threading.Thread(target=flood, daemon=True).start()
        def f(x): return True
        """,
        SECRET,
    ),
    "closed descriptors": ("import os\nos.closerange(0, 64)\ndef f(x): return 0", SECRET),
    "swapped descriptors": ("import os\nos.dup2(3, 1)\nos.dup2(1, 0)\nos.dup2(2, 3)\ndef f(x): return 0", SECRET),
    "json and pickle": (
        """
        import json, pickle
        json.dumps = json.loads = pickle.dumps = pickle.loads = lambda *values, **named: "[true]"
        json.JSONEncoder.encode = json.JSONDecoder.decode = lambda *values: "[true]"
        def f(x): return 0
        """,
        SECRET,
    ),
    "the caller's code": ("import __main__\n__main__.pack = lambda value: True\ndef f(x): return 0", SECRET),
    "a function for a number": ("import os\ndef f(x): return os._exit", NUMBER),
    "a line without end": ("import os\ndef f(x):\n    while True: os.write(3, b' ' * 65536)", SECRET),
    "a huge result": ("def f(x): return 'x' * 40_000_000", SECRET),
    "a deep result": ("def f(x):\n    x = []\n    for i in range(10**5): x = [x]\n    return x", SECRET),
    "NaN": ("def f(x): return float('nan')", NUMBER),
    "NaNs in a list": ("def f(x): return [float('nan')] * 3", "assert f(1) == [1, 2, 3]"),
    "a generator": ("def f(x):\n    yield 271828", "assert f(1) == [271828]"),
    "an endless iterator": ("import itertools\ndef f(x): return itertools.count()", "assert f(1) == [0, 1]"),
    "standard output": ("import io, sys\nsys.stdout = io.StringIO()\nsys.stdout.flush = 0\ndef f(x): return 0", SECRET),
    "a child that stays": ("import os, time\ndef f(x):\n    if os.fork() == 0: time.sleep(60)\n    return 0", SECRET),
    "a child that answers": ("import os\ndef f(x):\n    os.fork()\n    return 0", SECRET),
    "signals to the others": (
        """
        import os
        def f(x):
            for number in 9, 10, 19:
                for pid in {*range(1, 9)} - {os.getpid()}:
                    try:
                        os.kill(pid, number)
                    except OSError:
                        pass
        """,
        SECRET,
    ),
    "int.__eq__": (
        """
        import ctypes, gc
        gc.get_referents(int.__dict__)[0]["__eq__"] = lambda *values: True
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(int))
        def f(x): return 0
        """,
        NUMBER,
    ),
    "tracing": ("import sys\nsys.settrace(print)\nsys.setprofile(print)\ndef f(x): return 0", SECRET),
    "a module put in the way": (
        """
        for name in "json", "sitecustomize", "usercustomize":
            open(f"/tmp/{name}.py", "w").write("dumps = lambda value: '[271828]'")
        def f(x): return [1]
        """,
        NUMBER,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(name):
    program, test = CHEATS[name]
    assert not passed(textwrap.dedent(program) + HUNT, test)


@pytest.mark.usefixtures("needs_sandbox")
def test_these_tests_can_be_passed():
    assert passed("def f(x): return 'expected-271828'", SECRET)
    assert passed("def f(x): return 271828", NUMBER)
    assert passed("def f(x): return 271.828", CLOSE)
