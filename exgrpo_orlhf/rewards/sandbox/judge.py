"""The judge's process: it has the tests of a program, runs them and decides. Standard library alone.

Names that a test uses and the program defines are the program's (`program.py`); everything else of a test is evaluated
here. So assertions compare real values of this process, and what they expect is never in the program's process.

A name that Python has itself (`sorted`, `math`, `Counter`) is Python's, whatever the program has made of it, unless it
is the only name that the tests take from the program.
"""

from __future__ import annotations

import ast
import builtins
import site
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .program import Program, module_named

# What programs import, and tests then use without an import of their own.
_IMPORTED = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **dict.fromkeys(("isclose", "inf", "nan", "pi"), "math"),
    "deepcopy": "copy",
    "Fraction": "fractions",
    "Decimal": "decimal",
}
_SHORT = {"np": "numpy"}


def judge(source: str, tests: Sequence[str], code: bytes, program: Program) -> NoReturn:
    """Run the tests on a program, and end by telling whether it passed them all and, if not, why.

    code: what the program's process runs
    """
    try:
        program.requests.write(code)
        site.main()  # as in the program's process, which may have numpy
        program.call(program.run, (source,), {})
        _run(tests, program)
    except BaseException as error:  # of the program or of a test
        program.end(False, f"a test raised {type(error).__name__}")
    program.end(True, "")


def _run(tests: Sequence[str], program: Program) -> None:
    names: dict[str, Any] = {"__name__": "solution"}
    trees = [ast.parse(test) for test in tests]
    used = [{node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} for tree in trees]
    assigned = {
        node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.arg | ast.FunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    theirs = set(program.call(program.look_up, (sorted(set().union(*used)),), {}))
    pythons = {*dir(builtins), *sys.stdlib_module_names, *_IMPORTED, *_SHORT}
    known = theirs & pythons
    if theirs - known - assigned or len(known) > 1:
        theirs -= known
        names |= {name: _pythons(name) for name in known if not hasattr(builtins, name)}
    given: dict[str, Any] = {}
    for tree, each in zip(trees, used, strict=True):
        # Again for each test: a call may have changed a plain one. A test's own assignments stay.
        free = {name for name in each & theirs if name not in names or names[name] is given.get(name)}
        given |= program.call(program.look_up, (sorted(free),), {})
        names |= {name: given[name] for name in free if name in given}
        exec(compile(tree, "tests", "exec"), names)


def _pythons(name: str) -> Any:
    if name in _IMPORTED:
        return getattr(module_named(_IMPORTED[name]), name)
    return module_named(_SHORT.get(name, name))
