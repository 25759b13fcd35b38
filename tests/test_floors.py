"""The package's floors: nothing imports upwards, and there is no circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "exgrpo_orlhf"

# From the top: a room imports what lies on its own floor or below it.
FLOORS = (
    {"doctor", "config", "__main__", "study", "explore"},
    {"training"},
    {"evaluation", "models"},
    {"engines"},
    {"sampling"},
    {"tracking", "experiment", "initial_buffer"},
    {"rewards", "environments"},
    {"replay", "objective", "questions", "tasks", "checkpoints", "workers", "cache", "tokenizer_file"},
    {"show"},
    {"records", "settings", "files", "paths", "progress", "stopping", "terminal", "lazy", "weights", "redaction"}
    | {"metric_names", "json_lines", "annotations", "rounding"},
)


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


def _floor(name: str) -> int:
    """Counted from the top. The package itself has nothing in it."""
    if name == PACKAGE.name:
        return len(FLOORS)
    room = name.split(".")[1]
    floors = [i for i, rooms in enumerate(FLOORS) if room in rooms]
    assert len(floors) == 1, f"{room} stands on no floor: name it in FLOORS"
    return floors[0]


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_nothing_imports_upwards(name):
    assert [module for module in GRAPH[name] if _floor(module) < _floor(name)] == []


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
