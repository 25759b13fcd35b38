"""The versions that are asked for in different files agree, and what is private in other libraries is listed."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from run_builders import ROOT

PAGE = (ROOT / "docs" / "dev" / "versions.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")][2:]
NAMES = [name for _, names, *_ in ROWS for name in re.findall(r"`([^`]+)`", names)]
SOURCES = [path for folder in ("exgrpo_orlhf", "scripts", "evals") for path in (ROOT / folder).rglob("*.py")]
STANDARD = {"_exit", "_replace", "_asdict"}  # os._exit, and a named tuple's methods
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BOUNDED = ("torch", "transformers", "peft", "mlflow")
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


def source_of(name: str) -> tuple[Path, list[str]]:
    """The file of a library that a dotted name leads to, found without an import, and the rest of the name."""
    package, *parts = name.split(".")
    spec = importlib.util.find_spec(package)
    if not (spec and spec.origin and spec.submodule_search_locations):  # a folder tests/…/openrlhf/ has no origin
        pytest.skip(f"{package} is not installed")
    place = Path(spec.submodule_search_locations[0])
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        return place / f"{parts.pop(0)}.py", parts
    return place / "__init__.py", parts


@cache
def all_names(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    imported = {str(node.asname) for node in ast.walk(tree) if isinstance(node, ast.alias)}
    return {*own_names(tree), *used_names(tree)} | parameters | imported


@pytest.mark.parametrize("name", NAMES)
def test_each_name_exists_in_the_installed_version(name):
    if name.startswith("torch.ops."):  # defined in C++
        assert hasattr(torch.ops.mkldnn, name.rpartition(".")[2])
        return
    file, parts = source_of(name)
    assert parts
    assert {*parts} <= all_names(file), file


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


@pytest.mark.parametrize("name", BOUNDED)
def test_a_range_begins_with_what_was_tested_and_ends(name):
    [line] = [line for line in PROJECT["dependencies"] if Requirement(line).name == name]
    bounds = {specifier.operator: Version(specifier.version) for specifier in Requirement(line).specifier}
    assert bounds.keys() == {">=", "<"}
    assert bounds[">="] == Version(TESTED[name])


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
