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
# What a newcomer holds in the head: six rooms of the core, each of one or more folders, and the parts. What is in
# neither is the ground on which all stand.
ROOMS = (
    {"__main__", "preflight", "config"},
    {"training"},
    {"engines"},
    {"tracking", "checkpoints", "experiment"},
    {"sampling", "environments", "rewards"},
    {"replay", "objective", "questions"},
)
# What stands beside the core, and what it may import. A name with a dot is one module, and that alone.
PARTS = {
    "grader": set(),
    "show": set(),
    "sandbox": {"grader", "workers"},
    "evaluation": {
        *("show", "grader", "checks", "io", "records", "questions", "checkpoints", "workers", "rewards"),
        *("sampling", "environments", "tracking", "engines"),
    },
    "study": {
        *("show", "records", "checks", "io", "replay", "checkpoints", "experiment"),
        *("tracking.metrics_log", "tracking.decisions", "tracking.client", "tracking.listener", "tracking.set_aside"),
        *("questions.text", "questions.question_files", "questions.special_tokens"),
    },
    "testbed": {
        *("grader", "sandbox", "checks", "io", "records", "checkpoints", "workers"),
        *("engines.rows", "training.optimiser_steps"),
    },
    "selftest": {
        *("grader", "testbed", "io", "records", "settings", "experiment", "replay", "sampling"),
        *("engines", "training", "config"),
    },
}
# Of the grader the core knows what an answer, a grade and a kind are, what in a text is a thought or a box, and the
# options of a question.
KNOWN_TO_THE_CORE = {
    *("grader.answer", "grader.grade", "grader.kind", "grader.thoughts", "grader.boxes", "grader.options"),
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
    assert imported == set()


@pytest.mark.parametrize("part", PARTS)
def test_the_table_allows_a_part_no_more_than_it_imports(part):
    modules = {other for name in GRAPH if "." in name and _room(name) == part for other in GRAPH[name] if "." in other}
    imported = {_room(other) for other in modules} | {other.split(".", 1)[1] for other in modules}
    assert PARTS[part] - imported == set(), "take it out of the table"


def _circle(graph: dict[str, set[str]]) -> set[str]:
    """Nodes that lie on circles or import such: what is left when those that import nothing left are taken away, again
    and again."""
    left = dict(graph)
    while done := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in done:
            del left[name]
    return set(left)


def test_the_rooms_and_their_arrows_are_few():
    room = {
        folder: min(folders)
        for folders in (*ROOMS, *({part} for part in PARTS.keys() - {"show"}))
        for folder in folders
    }
    pairs = {(room.get(_room(name)), room.get(_room(other))) for name in GRAPH for other in GRAPH[name] if "." in other}
    arrows = {(one, another) for one, another in pairs if one and another and one != another}
    assert len({*room.values()}) <= 14
    assert len(arrows) <= 41
    assert not {(another, one) for one, another in arrows} & arrows


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
