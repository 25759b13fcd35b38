"""Assertions: a program that cheats does not pass them."""

from __future__ import annotations

import textwrap

import pytest

from exgrpo_orlhf.rewards.sandbox import sandbox

# What a test expects, and a program that returns it only if it finds it somewhere.
SECRET = ("assert f(1) == 'expected-271828'",)
CAUGHT = ("try:\n    f(1)\nexcept BaseException:\n    pass",)
NUMBER = ("assert f(1) == 271828",)
CLOSE = ("assert abs(f(1) - 271.828) < 1e-6",)
HUNT = r"""
import gc, os, re, sys
def hunt(data):
    data = data if isinstance(data, bytes) else repr(data).encode()
    found = re.findall(rb"expected-" + rb"[0-9]{6}", data)
    return found[0].decode() if found else None
"""
ALWAYS = """
class Always{base}:
    def yes(*given): return True
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = yes
    __hash__ = object.__hash__
"""
EQUAL = ALWAYS.format(base="")
CHEATS = {
    "equal": (EQUAL + "def f(x): return Always()", SECRET),
    "equal in a list": (EQUAL + "def f(x): return [Always()]", ("assert f(1) == [271828]",)),
    "equal in a tuple": (EQUAL + "def f(x): return Always(), 1", ("assert (271828, 1) == f(1)",)),
    "equal by its class": (EQUAL + "class f(Always):\n    def __init__(self, x): pass", SECRET),
    "contains": (EQUAL + "def f(x): return Always()", ("assert 271828 in f(1)",)),
    "greater": (EQUAL + "def f(x): return Always()", ("assert f(1) > 271828",)),
    "close": ("class X:\n    __sub__ = lambda *given: 0.0\ndef f(x): return X()", CLOSE),
    "close, reflected": ("class X:\n    __rsub__ = lambda *given: 0\ndef f(x): return X()", ("assert 271 - f(1) < 1",)),
    "caught by the test": ("class X: pass\ndef f(x): return X()", ("try: f(1) == 2\nexcept BaseException: pass",)),
    "of another class": ("class X:\n    __class__ = int\ndef f(x): return X()", ("assert isinstance(f(1), int)",)),
    "mock.ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", SECRET),
    "a mock": ("from unittest.mock import MagicMock\nf = MagicMock()\nf.return_value.__eq__ = lambda *a: True", SECRET),
    **{
        f"a subclass of {base}": (ALWAYS.format(base=f"({base})") + f"def f(x): return Always({given})", (test,))
        for base, given, test in (
            ("int", "1", NUMBER[0]),
            ("float", "1", NUMBER[0]),
            ("str", "'a'", SECRET[0]),
            ("bytes", "b'a'", "assert f(1) == b'271828'"),
            ("list", "", "assert f(1) == [271828]"),
            ("tuple", "", "assert f(1) == (271828,)"),
            ("set", "", "assert f(1) == {271828}"),
            ("dict", "", "assert f(1) == {'a': 271828}"),
        )
    },
    "compile": ("import builtins\nbuiltins.compile = lambda *a, **k: 'pass'\ndef f(x): return 0", SECRET),
    "exec": ("import builtins\nbuiltins.exec = lambda *a, **k: None\ndef f(x): return 0", SECRET),
    "eval": ("import builtins\nbuiltins.eval = eval = lambda *a: 0\ndef f(x): return 0", ("assert f(1) == eval('2')",)),
    "isinstance": ("def isinstance(*a): return True\ndef f(x): return ''", ("assert isinstance(f(1), int)",)),
    "len": ("import builtins\nbuiltins.len = len = lambda x: 3\ndef f(x): return []", ("assert len(f(1)) == 3",)),
    "sorted": ("sorted = lambda x: 0\ndef f(x): return []", ("assert sorted(f(1)) == sorted([271828])",)),
    "abs": ("abs = lambda x: 0\ndef f(x): return 0.0", CLOSE),
    "set and sum": ("def set(x): return 0\ndef sum(*x): return []", ("assert set(sum(1, 2)) == set([3])",)),
    "a class math": ("class math:\n    isclose = lambda *a: 1\ndef f(x): pass", ("assert math.isclose(f(1), 2.5)",)),
    "isclose": ("isclose = lambda *a: True\ndef f(x): return 0", ("assert isclose(f(1), 2.5)",)),
    "Counter": ("Counter = lambda x: 0\ndef f(x): return ''", ("assert Counter(f(1)) == Counter('ab')",)),
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
            known = [each for each in gc.get_objects() if type(each) in (list, dict, tuple, str)]
            return next(filter(None, map(hunt, known)), None)
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
                        found = hunt(memory.read(end - begin))
                    except (OSError, OverflowError):
                        continue
                if found:
                    return found
        """,
        SECRET,
    ),
    "other processes' files": (
        """
        def f(x):
            for pid in {*range(1, 9), *map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}:
                for name in "mem", "maps", "cmdline", "environ", "fd/0", "fd/3", "fd/5", "stack", "cwd", "root":
                    try:
                        found = hunt(open(f"/proc/{pid}/{name}", "rb").read())
                    except OSError:
                        continue
                    if found:
                        return found
        """,
        SECRET,
    ),
    "other processes' memory": (
        """
        import ctypes
        libc = ctypes.CDLL(None)
        def f(x):
            calls = {101: (16,), 117: (16,), 310: (), 270: ()}
            done = [libc.syscall(call, *first, pid, 0, 0, 0, 0) for call, first in calls.items() for pid in range(1, 9)]
            return None if set(done) == {-1} else "expected-271828"
        """,
        SECRET,
    ),
    "sys.modules": ("import sys\nsys.modules.clear()\ndef f(x): return 0", SECRET),
    "atexit": (
        """
        import atexit, os
        atexit.register(lambda: [os.write(fd, b'[true,""]') for fd in (1, 4)])
        def f(x): raise SystemExit(0)
        """,
        SECRET,
    ),
    "os._exit": ("import os\ndef f(x): os._exit(0)", SECRET),
    "os._exit where a test catches": ("import os\ndef f(x): os._exit(0)", CAUGHT),
    "sys.exit at once": ("import sys\nsys.exit(0)", SECRET),
    "forged results": (
        """
        import os
        def f(x):
            for fd in range(64):
                for line in b'[true,""]\\n', b'exit 0\\n', b'{"results": [{"how": "exit 0", "output": ""}]}\\n':
                    try:
                        os.write(fd, line)
                    except OSError:
                        pass
        """,
        SECRET,
    ),
    "answers in advance": (
        """
        import os, threading
        def flood():
            while True:
                os.write(4, b'["value",[],true,""]\\n')
        threading.Thread(target=flood, daemon=True).start()
        def f(x): return True
        """,
        SECRET,
    ),
    "closed descriptors": ("import os\nos.closerange(0, 64)\ndef f(x): return 0", SECRET),
    "swapped descriptors": ("import os\nos.dup2(4, 3)\nos.dup2(3, 4)\nos.dup2(4, 1)\ndef f(x): return 0", SECRET),
    "json and pickle": (
        """
        import json, marshal, pickle
        json.dumps = json.loads = pickle.dumps = pickle.loads = marshal.loads = lambda *given, **named: True
        json.JSONEncoder.encode = json.JSONDecoder.decode = lambda *given: True
        def f(x): return 0
        """,
        SECRET,
    ),
    "the answering code": (
        """
        import sys
        answering, plain = sys.modules["sandbox.answering"], sys.modules["sandbox.plain"]
        answering.dumps = plain.Packer.pack = lambda *given: '["value",[],true,""]'
        def f(x): return 0
        """,
        SECRET,
    ),
    **{
        f"sent by hand: {name}": (f"import os\ndef f(x): os.write(4, {line})", SECRET)
        for name, line in {
            "a pickle": r"b'\x80\x04cos\n_exit\nK\x00\x85R.\n'",
            "depth": r"""b'["value",[],' + b'["list",[' * 20000 + b'\n'""",
            "an argument": r"""b'["value",[[9,[1]]],["same",0],""]\n'""",
            "a function": r"""b'["value",[],["python","os:_exit"],""]\n'""",
            "a module": r"""b'["value",[],["module","exgrpo_orlhf"],""]\n'""",
            "an object": r"""b'["value",[],{"a": 1},""]\n'""",
            "a callback": r"""b'["call",[],["tuple",[0,["tuple",[]],["tuple",[]]]],""]\n'""",
        }.items()
    },
    "a function for a number": ("import os\ndef f(x): return os._exit", ("f(1)(0)",)),
    "a line without end": ("import os\ndef f(x):\n    while True: os.write(4, b' ' * 65536)", SECRET),
    "a huge result": ("def f(x): return 'x' * 40_000_000", SECRET),
    "a deep result": ("def f(x):\n    x = []\n    for i in range(10**5): x = [x]\n    return x", SECRET),
    "NaN": ("def f(x): return float('nan')", NUMBER),
    "NaNs that are sorted": ("def f(x): return [float('nan')] * 3", ("assert sorted(f(1)) == [1, 2, 3]",)),
    "a generator": ("def f(x):\n    yield 271828", ("assert f(1) == [271828]",)),
    "an endless iterator": ("import itertools\ndef f(x): return itertools.count()", ("assert list(f(1)) == [0, 1]",)),
    "standard output": ("import io, sys\nsys.stdout = io.StringIO()\nsys.stdout.flush = 0\ndef f(x): return 0", SECRET),
    "a child that stays": ("import os, time\ndef f(x):\n    if os.fork() == 0: time.sleep(60)\n    return 0", SECRET),
    "a child that answers": ("import os\ndef f(x):\n    os.fork()\n    return 0", SECRET),
    **{
        f"signal {number} to the judge": (
            f"""
            import os
            def f(x):
                for pid in {{*range(1, 9)}} - {{os.getpid()}}:
                    try:
                        os.kill(pid, {number})
                    except OSError:
                        pass
            """,
            SECRET,
        )
        for number in (9, 10, 19)
    },
    "int.__eq__": (
        """
        import ctypes, gc
        gc.get_referents(int.__dict__)[0]["__eq__"] = lambda *given: True
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(int))
        def f(x): return 0
        """,
        NUMBER,
    ),
    "tracing": ("import sys\nsys.settrace(print)\nsys.setprofile(print)\ndef f(x): return 0", SECRET),
    "a module put in the way": (
        """
        for name in "statistics", "sitecustomize", "usercustomize":
            open(f"/tmp/{name}.py", "w").write("mean = lambda values: 2")
        def f(x): return [1]
        """,
        ("import statistics\nassert statistics.mean(f(1)) == 2",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    try:
        sandbox.check()
    except sandbox.NoSandbox as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(name):
    program, tests = CHEATS[name]
    lasts = name in ("an endless iterator", "signal 19 to the judge")  # until its time is over
    assert sandbox.judge(textwrap.dedent(program) + HUNT, tests, 2.0 if lasts else 30.0, 256).how != "exit 0"


def test_these_tests_can_be_passed():
    program = "def f(x): return 'expected-271828' if x == 1 else 271828"
    assert sandbox.judge(program, SECRET, 30.0, 256).how == "exit 0"
    assert sandbox.judge(program, ("assert f(2) == 271828",), 30.0, 256).how == "exit 0"
