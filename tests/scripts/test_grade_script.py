"""scripts/grade.py: one row out for each row in, resumable, bad rows named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from run_builders import ROOT, rows

ROWS = [
    {"gold": "42", "response": "\\boxed{42}", "id": 1, "note": "a\u2028b"},
    {"gold": 7, "response": "\\boxed{8}", "id": 2},
    {"gold": "B", "response": "The answer is (B).", "id": 3},
    {"gold": None, "response": "\\boxed{None}", "id": 4},
    {"gold": "5", "response": "", "id": 5},
    {"gold": "5", "response": "\\boxed{5} \ud800", "id": 6},
]
VERDICTS = ["correct", "wrong", "correct", "error", "no_answer", "correct"]


@pytest.fixture
def grade(run_script):
    """Runs the script: what it said. refused: why it must stop with status 2; None: it must succeed."""

    def run(source, out, *more: str, refused: str | None = None) -> str:
        done = run_script("grade.py", "--in", source, "--out", out, "--workers", 1, *more)
        assert done.returncode == (2 if refused else 0), done.stderr
        assert (refused or "") in done.stderr
        return done.stderr

    return run


def write(path, lines, **how):
    path.write_text("".join(json.dumps(row, **how) + "\n" for row in lines), encoding="utf-8", errors="surrogatepass")
    return path


def test_rows_pass_through_in_order_with_their_verdicts(tmp_path):
    """In a process of its own, as users run it."""
    source = write(tmp_path / "in.jsonl", ROWS)
    command = [sys.executable, ROOT / "scripts" / "grade.py", "--in", source, "--out", tmp_path / "out.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    graded = rows(tmp_path / "out.jsonl")
    assert [row["verdict"] for row in graded] == VERDICTS
    assert [row["extracted"] for row in graded] == ["42", "8", "B", None, None, "5"]
    assert [{k: v for k, v in row.items() if k not in ("verdict", "extracted")} for row in graded] == ROWS
    assert "6/6 rows" in done.stderr


def test_it_continues_where_it_stopped_and_mends_a_torn_line(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    grade(source, out)
    content = out.read_bytes()
    lines = content.split(b"\n")
    kept = lines[0].replace(b'"verdict": "correct"', b'"verdict": "timeout"')  # told from one that is graded again
    out.write_bytes(kept + b"\n" + lines[1] + b"\n" + lines[2][:20])
    for done in (2, 6):
        assert f"{done} rows are graded already" in grade(source, out)
        assert out.read_bytes() == content.replace(lines[0], kept)


def test_it_refuses_to_continue_another_file(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    grade(source, out)
    write(source, [ROWS[0], {**ROWS[1], "response": "changed"}, *ROWS[2:]])
    grade(source, out, refused=f"{out}, line 2: not the row of {source}, line 2")
    write(source, ROWS[:3])
    grade(source, out, refused=f"{out}, line 4: {source} has fewer rows")


@pytest.mark.parametrize("content", ["a note\nwithout an end", "a note", '{"gold": "42"}\n{"go', '{"gold": "42"}'])
def test_a_file_that_is_not_its_own_stays_as_it_is(tmp_path, grade, content):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "notes.txt"
    out.write_text(content)
    grade(source, out, refused=str(out))
    assert out.read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "notes.txt"}


@pytest.mark.parametrize("added", [{}, {"verdict": "correct", "extracted": None}])
def test_the_input_is_never_the_output(tmp_path, grade, added):
    source, link = write(tmp_path / "in.jsonl", [{**row, **added} for row in ROWS]), tmp_path / "link.jsonl"
    source.write_bytes(source.read_bytes().rstrip(b"\n"))
    content = source.read_bytes()
    link.symlink_to(source)
    for out in (source, link):
        grade(source, out, refused="is the input itself")
        assert source.read_bytes() == content


def test_it_refuses_to_continue_with_other_settings(tmp_path, grade):
    source, out, kept = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", tmp_path / "out.jsonl.settings.json"
    grade(source, out)
    content, settings = out.read_bytes(), kept.read_bytes()
    lines = content.split(b"\n")
    torn = b"\n".join(lines[:2]) + b"\n" + lines[2][:9]
    out.write_bytes(torn)
    grade(source, out, "--kind", "exact", refused="--kind math and not exact")
    grade(source, out, "--timeout", "9", refused="--timeout 5.0 and")
    kept.unlink()
    grade(source, out, refused="out.jsonl.settings.json is missing")
    kept.write_text('{"my": "own"}\n')
    grade(source, out, refused="not the settings of an earlier run")
    assert kept.read_text() == '{"my": "own"}\n'
    assert out.read_bytes() == torn
    kept.write_bytes(settings)
    grade(source, out, "--workers", "2")
    assert out.read_bytes() == content


def test_a_byte_order_mark_is_read_away(tmp_path, grade):
    source = write(tmp_path / "in.jsonl", ROWS)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    for _ in range(2):
        grade(source, tmp_path / "out.jsonl")
    assert [row["verdict"] for row in rows(tmp_path / "out.jsonl")] == VERDICTS


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: a row is an object"),
        ('{"gold": "1"}', "line 2: no response; there are gold"),
        ('{"gold": "1", "response": 5}', "line 2: a response is text, not 5"),
        ("", "line 2: not JSON"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_graded(tmp_path, grade, bad, message):
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"gold": "1", "response": "1"}}\n{bad}\n')
    grade(source, tmp_path / "out.jsonl", refused=f"{source}, {message}")
    assert not (tmp_path / "out.jsonl").exists()


def test_other_kinds(tmp_path, grade):
    london = [{"gold": gold, "response": "\\boxed{London}", "options": ["Paris", "London"]} for gold in "BA"]
    source = write(tmp_path / "in.jsonl", london)
    for kind, verdicts in (("choice", ["correct", "wrong"]), ("exact", ["wrong", "wrong"])):
        grade(source, tmp_path / f"{kind}.jsonl", "--kind", kind)
        assert [row["verdict"] for row in rows(tmp_path / f"{kind}.jsonl")] == verdicts
    grade(source, tmp_path / "x.jsonl", "--kind", "maths", refused="Verifier.kind must be one of")


STYLE = """
def brief(completions, level, **kwargs):
    shortest = min(map(len, completions))
    kwargs["log_metric"]("shortest", shortest)
    return [None if text == "two" else float(len(text) == shortest) + each for text, each in zip(completions, level)]

def reward_func(queries, prompts, labels):
    return {"rewards": [float(str(labels[0]) in queries[0][len(prompts[0]):])]}
"""
ANSWERS = [("6*7?", 42, "it is 42"), ("6*7?", 42, "42"), ("1+1?", 2, "two"), ("1+1?", 2, "it is 3, surely")]


@pytest.fixture
def answers(tmp_path):
    (tmp_path / "style.py").write_text(STYLE)
    lines = [{"prompt": prompt, "gold": gold, "response": text, "level": gold} for prompt, gold, text in ANSWERS]
    return write(tmp_path / "in.jsonl", lines)


def test_a_function_gets_columns_and_the_responses_to_one_question_together(tmp_path, answers, run_script):
    out = tmp_path / "out.jsonl"
    done = run_script("grade.py", "--function", f"{tmp_path}/style.py:brief", "--in", answers, "--out", out)
    assert done.returncode == 0, done.stderr
    graded = rows(out)
    assert [row["reward"] for row in graded] == [42.0, 43.0, None, 2.0]
    assert [row["logs"]["shortest"] for row in graded if "logs" in row] == [2, 2, 3, 3]
    assert "reward: mean 29, 2 to 43; 1 rows without" in done.stdout
    content = out.read_bytes()
    lines = content.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]))  # a group that was cut off is graded again, whole
    again = run_script("grade.py", "--function", f"{tmp_path}/style.py:brief", "--in", answers, "--out", out)
    assert "2 rows are graded already" in again.stderr
    assert out.read_bytes() == content


def test_of_several_rewards_each_is_written_and_summed_up(tmp_path, answers, run_script):
    rewards = {"math": 1.0, f"{tmp_path}/style.py:brief": 0.5}
    out = tmp_path / "out.jsonl"
    done = run_script("grade.py", "--rewards", repr(rewards), "--in", answers, "--out", out)
    assert done.returncode == 0, done.stderr
    graded = rows(out)
    assert graded[1]["rewards"] == {"math": 1.0, "brief": 43.0}
    assert [row["reward"] for row in graded] == [22.0, 22.5, 0.0, 1.0]
    assert "math: mean 0.5, 0 to 1; 0 rows without" in done.stdout
    assert "brief: mean 29, 2 to 43; 1 rows without" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "function"), [("trl", "style.py:brief"), ("openrlhf", "style.py")])
def test_against_another_tool_its_own_code_calls_the_function(tmp_path, answers, run_script, tool, function):
    out = tmp_path / "out.jsonl"
    words = ("--function", tmp_path / function, "--in", answers, "--out", out, "--against", tool)
    done = run_script("grade.py", *words)
    if importlib.util.find_spec(tool) is None or importlib.util.find_spec("ray") is None:
        assert done.returncode == 2
        assert f"{tool} is not installed: pip install {tool}==" in done.stderr
        return
    assert (done.returncode, f"{tool}: 0 rows differ" in done.stdout) == (0, True), done.stderr
    lines = out.read_text().splitlines()
    out.write_text("\n".join([lines[0].replace('"reward": ', '"reward": 1'), *lines[1:]]) + "\n")
    done = run_script("grade.py", *words)
    assert done.returncode == 1
    assert f"row 1: {tool} gives" in done.stdout
