"""The package's rooms: what each may import, and that there is no circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "exgrpo_orlhf"

# The core, from the top: a room imports what lies on its own floor or below it.
FLOORS = (
    {"__main__", "preflight", "config"},
    {"training"},
    {"engines"},
    {"tracking", "experiment"},
    {"environments"},
    {"sampling"},
    {"rewards"},
    {"replay", "objective", "questions", "checkpoints", "workers"},
    {"records", "settings", "attention"},
    {"io"},
    {"checks", "rounding"},
)
CORE = frozenset().union(*FLOORS)
# What stands beside the core, and what it may import. A name with a dot is one module, and that alone.
PARTS = {
    "grader": set(),
    "show": set(),
    "sandbox": {"grader", "workers"},
    "evaluation": {*CORE, "grader", "show"} - {"training", "config", "preflight"},
    "study": {"show", "records", "checks", "io", "questions", "replay", "tracking", "checkpoints", "experiment"}
    | {"training.listener"},
    "testbed": {*CORE, "grader", "sandbox"} - {"config", "preflight"},
    "selftest": {*CORE, "grader", "show", "testbed"},
}
# Of the grader the core knows what an answer and a grade are, and what in a text is a thought or a box.
KNOWN_TO_THE_CORE = {"grader.answer", "grader.grade", "grader.thoughts", "grader.boxes"}
LEFT = {
    *("rewards.grading>grader.extraction", "rewards.kinds>grader.math", "rewards.kinds>grader.choice"),
    *("rewards.grading>testbed.modular_chains", "rewards.grading>testbed.word_problems"),
    *("rewards.grading>testbed.reasoning_gym", "rewards.kinds>testbed.gym_grader"),
    *("rewards.verifier>testbed.reasoning_gym", "rewards.kinds>sandbox.code", "rewards.verifier>sandbox.code"),
    *("config.build>evaluation.benchmarks", "training.loop>evaluation.validation"),
    *("training.preparation>evaluation.validation", "training.load_questions>evaluation.validation"),
    *("evaluation.benchmarks>testbed.made_questions", "evaluation.benchmarks>testbed.modular_chains"),
    *("evaluation.benchmarks>testbed.reasoning_gym", "evaluation.benchmarks>testbed.word_problems"),
    *("study.measures>sampling", "study.paper_table>evaluation.benchmarks", "study.paper_table>evaluation.paper"),
    *("study.paper_table>evaluation.results_folder", "engines.openrlhf.launch>training.initial_buffer"),
}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(name: str) -> set[str]:
    """The package's modules that a module imports anywhere, inside its functions too."""
    package = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
    modules: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            modules |= {inner if (inner := f"{module}.{alias.name}") in FILES else module for alias in node.names}
    return {module for module in modules if module in FILES} - {name}


GRAPH = {name: _imports(name) for name in FILES}


def _room(name: str) -> str:
    return name.split(".")[1]


def _may_import(name: str, other: str) -> bool:
    room, inside = _room(name), other.split(".", 1)[1]
    if _room(other) == room:
        return True
    if room in PARTS:
        return bool({_room(other), inside} & PARTS[room])
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    return inside in KNOWN_TO_THE_CORE if _room(other) in PARTS else floor[room] <= floor[_room(other)]


@pytest.mark.parametrize("name", sorted(GRAPH.keys() - {PACKAGE.name}))
def test_a_room_imports_what_the_table_allows(name):
    assert _room(name) in {*CORE, *PARTS}, f"{name} stands on no floor: name its room in FLOORS or in PARTS"
    imported = {module for module in GRAPH[name] - {PACKAGE.name} if not _may_import(name, module)}
    short = {f"{name.split('.', 1)[1]}>{module.split('.', 1)[1]}" for module in imported}
    assert short == {pair for pair in LEFT if pair.startswith(f"{name.split('.', 1)[1]}>")}


def _circle(graph: dict[str, set[str]]) -> set[str]:
    """Nodes that lie on circles: what is left when those that import nothing left are taken away, again and again."""
    left = dict(graph)
    while done := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in done:
            del left[name]
    return set(left)


def test_no_module_imports_itself_by_a_detour():
    assert _circle(GRAPH) == set()


def test_no_room_imports_itself_by_a_detour():
    rooms: dict[str, set[str]] = {}
    for name, imported in GRAPH.items():
        if "." in name:
            inside = {module.split(".")[1] for module in imported if "." in module}
            rooms.setdefault(name.split(".")[1], set()).update(inside - {name.split(".")[1]})
    assert _circle(rooms) == set()


def test_a_planted_circle_is_found():
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}
