"""Kinds of verifiers are entry points: what they load, which others there may be, and older installations."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from exgrpo_orlhf.io import entry_points
from exgrpo_orlhf.io.entry_points import entry_points_of, loaded
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.rewards.kinds import GROUP

ROOT = Path(__file__).resolve().parents[2]
OTHERS = """
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.grader.kind import Kind

HERE = Kind(here=lambda question, response: Grade("correct", 7.0))
SENT = Kind(loads="lengths:grader", settings=("success_at",), any_reward=True)

def grader(success_at):
    return lambda answer: Grade("correct" if len(answer.response) >= success_at else "wrong", len(answer.response))
"""
LIST = "'chain_steps', 'choice', 'code', 'exact', 'function', 'http', 'math', 'math_verify'"


def python(program: str, *folders: Path) -> str:
    """What a new process prints."""
    path = ":".join(map(str, (ROOT, *folders)))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": path})
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_kind_of_another_distribution_grades_here_and_in_workers(tmp_path):
    (tmp_path / "lengths.py").write_text(OTHERS)
    info = tmp_path / "lengths-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lengths\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nseven = lengths:HERE\nlength = lengths:SENT\n")
    program = (
        "from exgrpo_orlhf.records import Question; from exgrpo_orlhf.rewards import Verifier\n"
        "question = Question.make('t', '1+1?', '2')\n"
        "for verifier in (Verifier('seven'), Verifier('length', success_at=3.0), Verifier(rewards={'length': 2.0, "
        "'exact': 1.0})):\n"
        "    verifier.check_questions([question])\n"
        "    grade = verifier.grade(question, '2 '); print(grade.verdict, grade.reward)\n"
    )
    assert python(program, tmp_path).split("\n")[:3] == ["correct 7.0", "wrong 2", "correct 5.0"]


@pytest.mark.parametrize("more", [{}, {"rewards": {"exact": 1.0}}])
def test_an_unknown_kind_is_refused_with_the_names(more):
    with pytest.raises(ValueError, match=f"Verifier.kind must be one of {LIST}"):
        Verifier("maths", **more)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("exact", ("torch", "sympy", "exgrpo_orlhf.testbed", "exgrpo_orlhf.sandbox")),
        ("math", ("torch", "sympy", "exgrpo_orlhf.testbed", "exgrpo_orlhf.sandbox")),
        ("code", ("torch", "sympy", "exgrpo_orlhf.testbed")),
        ("reasoning_gym", ("torch", "sympy", "reasoning_gym", "exgrpo_orlhf.sandbox")),
    ],
)
def test_a_kind_imports_no_other_kind(kind, left_out):
    program = f"import sys; from exgrpo_orlhf.rewards import Verifier; Verifier({kind!r}); print(*sys.modules)"
    assert not {*left_out} & {*python(program).split()}


def test_the_parts_of_several_rewards_are_made_once():
    verifier = Verifier(rewards={"math": 1.0, "exact": 0.5})
    assert verifier.parts is verifier.parts
    assert verifier.deciding is verifier.parts["math"]


@pytest.mark.parametrize("value", ["exgrpo_orlhf.nowhere:KIND", "exgrpo_orlhf.sandbox.code:NOTHING"])
def test_an_entry_point_that_this_checkout_has_no_more_is_reported(value):
    with pytest.raises(ValueError, match=r"older than this checkout: run pip install -e \. again"):
        loaded(EntryPoint("old", value, GROUP))


def test_another_distributions_own_fault_stays_what_it_is():
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        loaded(EntryPoint("theirs", "nowhere.at_all:KIND", GROUP))


@pytest.mark.parametrize("group", [GROUP, "exgrpo_orlhf.gin"])
def test_an_installation_without_a_group_is_reported(group, monkeypatch):
    monkeypatch.setattr(entry_points, "entry_points", lambda group: ())
    entry_points_of.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"older than this checkout: run pip install -e \. again"):
            entry_points_of(group)
    finally:
        entry_points_of.cache_clear()
