"""scripts/grade.py: one row out for each row in, resumable, bad rows named."""

from __future__ import annotations

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
