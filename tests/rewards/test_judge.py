"""The judge: a right program passes, however its tests are written; a wrong one does not."""

from __future__ import annotations

import textwrap
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from exgrpo_orlhf.rewards.sandbox import sandbox
from exgrpo_orlhf.rewards.sandbox.plain import Packer, dumps, loads

RIGHT = {
    "in place": ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
    "in place, nested": (
        """
        def f(rows, seen):
            rows[0][1] = 9
            rows.append(rows[0])
            seen["a"].add(3)
        """,
        """
        rows, seen = [[1, 2]], {"a": {1}}
        row = rows[0]
        f(rows, seen)
        assert rows == [[1, 9]] * 2 and rows[1] is row and seen == {"a": {1, 3}}
        """,
    ),
    "the argument itself": (
        "def f(x): return x",
        "x = [1]\nassert f(x) is x and f([x, x])[0] is x and f([1]) is not x",
    ),
    "a cycle": ("def f(x): x.append(x)", "x = []\nf(x)\nassert x[0] is x"),
    "a counter": (
        "def f(c): c['a'] += 2",
        "from collections import Counter\nc = Counter('a')\nf(c)\nassert c == Counter('aaa')",
    ),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
    "an endless generator": (
        "import itertools\ndef f(): return itertools.count(3)",
        "x = f()\nassert [next(x), next(x)] == [3, 4]",
    ),
    "views": (
        "def f(d): return d.keys(), d.values(), map(str, d)",
        "a, b, c = f({1: 2})\nassert 1 in a and list(b) == [2] and '1' in c",
    ),
    "an exception": (
        "def f(x): return [][x]",
        """
        try:
            f(3)
            assert 0
        except IndexError as error:
            assert "out of range" in str(error)
        """,
    ),
    "its own exception": (
        """
        class Bad(ValueError):
            def __init__(self, code): self.code = code
            def __str__(self): return "bad"
        def f(x): raise Bad(x)
        """,
        """
        try:
            f(3)
            assert 0
        except Bad as error:
            assert error.code == 3 and str(error) == "bad" and isinstance(error, ValueError)
        """,
    ),
    "a library's exception": (
        "import json\ndef f(x): return json.loads(x)",
        "import json\nseen = 0\ntry: f('')\nexcept json.JSONDecodeError: seen = 1\nassert seen",
    ),
    "an exception of the test's function": (
        "def f(g):\n    try: g()\n    except KeyError as error: return error.args[0]",
        "def g(): raise KeyError('k')\nassert f(g) == 'k'",
    ),
    "a class": (
        """
        class Stack:
            def __init__(self): self.items, self.name = [], "new"
            def __len__(self): return len(self.items)
            def __getitem__(self, i): return self.items[i]
            def __eq__(self, other): return self.items == other.items
            def __add__(self, other): self.items += other.items; return self
            def push(self, x): self.items.append(x); return self
            def __enter__(self): return self
            def __exit__(self, *error): self.name = "left"
            def __str__(self): return f"<{self.items}>"
        """,
        """
        s, t = Stack(), Stack()
        assert s == t and not s and isinstance(s, Stack) and s is not t
        assert s.push(1).push(2) is s and len(s) == 2 and s[-1] == 2 and s[:1] == [1] and s != t
        with s as inside:
            assert inside is s
        s.name += "!"
        assert s.name == "left!" and str(s) == f"{s}" == "<[1, 2]>" and (s + s).items == [1, 2, 1, 2]
        assert not hasattr(s, "nothing") and [*s] == s.items and [s] == [s]
        """,
    ),
    "a tree": (
        """
        class Node:
            def __init__(self, v, left=None): self.v, self.left = v, left
        def depth(node): return 1 + depth(node.left) if node else 0
        """,
        """
        root = Node(1)
        root.left = Node(2, left=Node(3))
        assert depth(root) == 3 and root.left.left.v == 3 and not root.left.left.left
        """,
    ),
    "closures": ("def f(x): return lambda y: x + y", "assert f(2)(3) == 5 and callable(f(2))"),
    "the test's functions": (
        "def f(g, items): return sorted(filter(g, items), key=lambda x: -x)",
        "assert f(lambda x: x % 2, [1, 2, 3]) == [3, 1] and f(bool, [0, 1]) == [1]",
    ),
    "back and forth": ("def f(g, n): return n and g(n - 1) + 1", "def g(n): return f(g, n)\nassert f(g, 30) == 30"),
    "types": ("def f(x): return type(x)", "assert f(1) is int and f([]) == list"),
    "what it prints": (
        "def f(x): print('hello', x)",
        """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as out:
            f("ä")
        assert out.getvalue() == "hello ä\\n"
        """,
    ),
    "a tolerance": (
        "def f(x): return x / 3",
        "import math\nassert math.isclose(f(1), 0.3333, abs_tol=1e-3) and f(1) != 0.3333",
    ),
    "imports of the program": (
        "from collections import Counter\nimport math, itertools as it\ndef f(x): return x",
        "assert math.pi > 3 and Counter('aab') == f({'a': 2, 'b': 1}) and [*it.chain([1])] == [1]",
    ),
    "a builtin's name": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
    "a module's name": ("def bisect(a, b): return a", "assert bisect(10, 15) == 10"),
    "its globals": ("n = 0\ndef f():\n    global n\n    n += 1", "f()", "assert n == 1"),
    "keywords": (
        "def f(*a, b=1, **c): return a, b, c",
        "assert f(1, *[2], b=3, d=4) == ((1, 2), 3, {'d': 4})",
    ),
    "a test with a function": (
        "def g(x): return x\ndef f(x): return g(x)",
        "def check(candidate):\n    assert candidate(2) == g(2)\ncheck(f)",
    ),
    "files": ("def f(): return open('x').read()", "open('x', 'w').write('a')\nassert f() == 'a'"),
    "a thread that goes on": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\ndef f(): return 1",
        "assert f() == 1",
    ),
}
WRONG = {
    "one test of two": ("def f(x): return 2", "assert f(1) == 2", "assert f(5) == 6"),
    "one by one": ("def f(x): return x", "assert f(1) == 1 and f(2) == 3"),
    "not in place": ("def f(x): return sorted(x)", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
    "a tuple for a list": ("def f(x): return (x,)", "assert f(1) == [1]"),
    "no function": ("", "assert f(1) == 2"),
    "an error at once": ("1 / 0", "assert True"),
    "no Python": ("syntax error", "assert True"),
    "a test that is no Python": ("def f(x): return 1", "nonsense ("),
    "another exception": ("def f(x): raise KeyError(x)", "try:\n    f(3)\nexcept IndexError:\n    pass"),
    "input": ("input()", "assert True"),
    "an exception with a long name": ("def f(x): raise type('E' * 5000, (Exception,), {})", "f(1)"),
}


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    try:
        sandbox.check()
    except sandbox.NoSandbox as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(name):
    program, *tests = map(textwrap.dedent, RIGHT[name])
    assert sandbox.judge(program, tests, 30.0, 512) == sandbox.Run("exit 0", "")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_does_not_pass(name):
    program, *tests = WRONG[name]
    assert sandbox.judge(program, tests, 30.0, 512).how == "exit 1"


class _Nothing:
    def pack_other(self, value):
        raise TypeError(f"{value!r} is not plain")

    unpack_other = pack_other


def sent(value):
    return Packer(_Nothing()).unpack(loads(dumps(Packer(_Nothing()).pack(value))))


def test_plain_data_keeps_its_type_and_its_value():
    for value in (
        [None, True, 1, 1.5, "a\ud800\n", b"\0", 10**400, -(10**4000), 1j, float("inf"), ()],
        {1: "a", (1, (2,)): [3], None: {4, frozenset([5])}, "6": {}},
        *(deque([1, 2]), Counter("aab"), OrderedDict(b=1, a=2), bytearray(b"ab"), range(1, 9, 2), slice(1, None)),
        *(Fraction(1, 3), Decimal("1.10"), date(2020, 1, 2), datetime(2020, 1, 2, 3), timedelta(1, 2)),
        *(np.float64(0.1), np.int8(-3), np.arange(6.0).reshape(2, 3), np.array(["ab"]), np.zeros((0, 2))),
    ):
        assert type(sent(value)) is type(value)
        assert repr(sent(value)) == repr(value)
    assert sent(defaultdict(int, a=1)) == {"a": 1}
    assert type(sent([True])[0]) is bool
    for value in (object(), len, type("I", (int,), {})(1), np.array([object()])):
        with pytest.raises(TypeError, match="is not plain"):
            sent(value)
