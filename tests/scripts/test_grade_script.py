"""scripts/grade.py: one row out for each row in, resumable, bad rows named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from run_builders import ROOT

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
    def run(source, out, *more: str):
        return run_script("grade.py", "--in", source, "--out", out, "--workers", 1, *more)

    return run


def write(path, rows, **how):
    path.write_text("".join(json.dumps(row, **how) + "\n" for row in rows), encoding="utf-8", errors="surrogatepass")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_rows_pass_through_in_order_with_their_verdicts(tmp_path):
    """In a process of its own, as users run it."""
    source = write(tmp_path / "in.jsonl", ROWS)
    command = [sys.executable, ROOT / "scripts" / "grade.py", "--in", source, "--out", tmp_path / "out.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "out.jsonl")
    assert [row["verdict"] for row in rows] == VERDICTS
    assert [row["extracted"] for row in rows] == ["42", "8", "B", None, None, "5"]
    assert [{k: v for k, v in row.items() if k not in ("verdict", "extracted")} for row in rows] == ROWS
    assert "6/6 rows" in done.stderr


def test_it_continues_where_it_stopped_and_mends_a_torn_line(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    grade(source, out)
    whole = out.read_bytes()
    lines = whole.split(b"\n")
    kept = lines[0].replace(b'"verdict": "correct"', b'"verdict": "timeout"')  # told from one that is graded again
    out.write_bytes(kept + b"\n" + lines[1] + b"\n" + lines[2][:20])
    done = grade(source, out)
    assert done.returncode == 0, done.stderr
    assert "2 rows are graded already" in done.stderr
    assert out.read_bytes() == whole.replace(lines[0], kept)
    assert grade(source, out).returncode == 0
    assert out.read_bytes() == whole.replace(lines[0], kept)


def test_it_refuses_to_continue_another_file(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    grade(source, out)
    write(source, [ROWS[0], {**ROWS[1], "response": "changed"}, *ROWS[2:]])
    done = grade(source, out)
    assert done.returncode == 2
    assert f"{out}, line 2: not the row of {source}, line 2" in done.stderr
    write(source, ROWS[:3])
    done = grade(source, out)
    assert done.returncode == 2
    assert f"{out}, line 4: {source} has fewer rows" in done.stderr


@pytest.mark.parametrize("content", ["a note\nwithout an end", "a note", '{"gold": "42"}\n{"go', '{"gold": "42"}'])
def test_a_file_that_is_not_its_own_stays_as_it_is(tmp_path, grade, content):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "notes.txt"
    out.write_text(content)
    done = grade(source, out)
    assert done.returncode == 2
    assert str(out) in done.stderr
    assert out.read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "notes.txt"}


def test_the_input_is_never_the_output(tmp_path, grade):
    graded = [{**row, "verdict": "correct", "extracted": None} for row in ROWS]
    for rows in (ROWS, graded):
        source = write(tmp_path / "in.jsonl", rows)
        source.write_bytes(source.read_bytes().rstrip(b"\n"))
        whole = source.read_bytes()
        link = tmp_path / "link.jsonl"
        link.unlink(missing_ok=True)
        link.symlink_to(source)
        for out in (source, link):
            done = grade(source, out)
            assert done.returncode == 2
            assert "is the input itself" in done.stderr
            assert source.read_bytes() == whole


def test_it_refuses_to_continue_with_other_settings(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    assert grade(source, out).returncode == 0
    whole = out.read_bytes()
    lines = whole.split(b"\n")
    out.write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2][:9])
    torn = out.read_bytes()
    for more, message in [
        (("--kind", "exact"), "--kind math and not exact"),
        (("--timeout", "9"), "--timeout 5.0 and"),
    ]:
        done = grade(source, out, *more)
        assert done.returncode == 2
        assert message in done.stderr
        assert out.read_bytes() == torn
    kept = tmp_path / "out.jsonl.settings.json"
    settings = kept.read_bytes()
    kept.unlink()
    done = grade(source, out)
    assert done.returncode == 2
    assert "out.jsonl.settings.json is missing" in done.stderr
    kept.write_text('{"my": "own"}\n')
    assert grade(source, out).returncode == 2
    assert kept.read_text() == '{"my": "own"}\n'
    kept.write_bytes(settings)
    assert grade(source, out, "--workers", "2").returncode == 0
    assert out.read_bytes() == whole


def test_a_byte_order_mark_is_read_away(tmp_path, grade):
    source = write(tmp_path / "in.jsonl", ROWS)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    for _ in range(2):
        assert grade(source, tmp_path / "out.jsonl").returncode == 0
    assert [row["verdict"] for row in read(tmp_path / "out.jsonl")] == VERDICTS


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
    done = grade(source, tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert f"{source}, {message}" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_other_kinds(tmp_path, grade):
    rows = [
        {"gold": "B", "response": "\\boxed{London}", "options": ["Paris", "London"]},
        {"gold": "A", "response": "\\boxed{London}", "options": ["Paris", "London"]},
    ]
    source = write(tmp_path / "in.jsonl", rows)
    assert grade(source, tmp_path / "out.jsonl", "--kind", "choice").returncode == 0
    assert [row["verdict"] for row in read(tmp_path / "out.jsonl")] == ["correct", "wrong"]
    assert grade(source, tmp_path / "exact.jsonl", "--kind", "exact").returncode == 0
    assert [row["verdict"] for row in read(tmp_path / "exact.jsonl")] == ["wrong", "wrong"]
    done = grade(source, tmp_path / "x.jsonl", "--kind", "maths")
    assert done.returncode == 2
    assert "Verifier.kind must be one of" in done.stderr
