"""The versions that are asked for in different files agree, and what is private in other libraries is listed."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_builders import ROOT

PAGE = (ROOT / "docs" / "dev" / "versions.md").read_text()
ROWS = [re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("|")][2:]
SOURCES = [path for folder in ("exgrpo_orlhf", "scripts", "evals") for path in (ROOT / folder).rglob("*.py")]
STANDARD = {"_exit", "_replace", "_asdict"}  # os._exit, and a named tuple's methods
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.ImportFrom(module=str(module), level=0):
                yield from [*module.split("."), *(alias.name for alias in node.names)]


def test_every_private_name_of_a_library_is_in_the_table():
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    ours = {name for tree in trees for name in own_names(tree)}
    theirs = {name for tree in trees for name in used_names(tree) if private(name)} - ours - STANDARD
    listed = set(re.findall(r"\w+", " ".join(name for _, name, *_ in ROWS)))
    assert len(theirs) > 10
    assert theirs <= listed


def test_each_row_names_what_its_file_uses_and_a_test_that_exists():
    for number, (_, names, file, test) in enumerate(ROWS):
        source = (ROOT / "exgrpo_orlhf" / file.strip("`")).read_text()
        for name in re.findall(r"`([^`]+)`", names):
            assert name.split(".")[-1] in source, (name, file)
        if test == "the same":
            assert number
            continue
        path, _, function = test.strip("`").partition("::")
        assert f"def {function}" in (ROOT / path).read_text(), test


def test_constraints_are_names_and_versions_that_the_ranges_hold():
    assert all(re.fullmatch(r"[a-z0-9-]+", name) and re.fullmatch(r"[\w.]+", TESTED[name]) for name in TESTED)
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(TESTED[canonicalize_name(requirement.name)]), line


def test_the_openrlhf_extra_has_what_was_tested_to_the_digit():
    for line in PROJECT["optional-dependencies"]["openrlhf"]:
        requirement = Requirement(line)
        assert str(requirement.specifier) == f"=={TESTED[requirement.name]}"


def test_make_takes_what_was_tested_but_for_the_newest():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    commands = [line for line in makefile.splitlines() if " pip install " in line and not line.startswith("#")]
    free = [line for line in commands if "constraints.txt" not in line]
    assert len(commands) > len(free) == 2
    assert all("$(NEWEST)" in line for line in free)
