"""scripts/grade.py: one row out for each row in, resumable, bad rows named."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from run_builders import ROOT, rows

from exgrpo_orlhf.io.files import locked
from exgrpo_orlhf.workers import fork_server
from exgrpo_orlhf.workers.fork_server import close_workers

ROWS = [
    {"gold": "42", "response": "\\boxed{42}", "id": 1, "note": "a\u2028b"},
    {"gold": 7, "response": "\\boxed{8}", "id": 2},
    {"gold": "B", "response": "The answer is (B).", "id": 3},
    {"gold": None, "response": "\\boxed{None}", "id": 4},
    {"gold": "5", "response": "", "id": 5},
    {"gold": "5", "response": "\\boxed{5} \ud800", "id": 6},
]
VERDICTS = ["correct", "wrong", "correct", "error", "no_answer", "correct"]


@pytest.fixture(scope="module", autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@pytest.fixture
def grade(run_script, monkeypatch):
    """Runs the script: how it ended. refused: why it must stop with status 2; None: it must succeed.

    Its graders, which take a second to start, stay until the last test.
    """
    monkeypatch.setattr(fork_server, "close_workers", lambda: None)

    def run(source, out, *more: str, refused: str | None = None) -> subprocess.CompletedProcess[str]:
        done = run_script("grade.py", "--in", source, "--out", out, "--workers", 1, *more)
        assert done.returncode == (2 if refused else 0), done.stderr
        assert (refused or "") in done.stderr
        return done

    return run


def write(path, lines, **how):
    path.write_text("".join(json.dumps(row, **how) + "\n" for row in lines), encoding="utf-8", errors="surrogatepass")
    return path


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_continues_where_it_stopped_and_mends_a_torn_line(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    grade(source, out)
    content = out.read_bytes()
    lines = content.split(b"\n")
    kept = lines[0].replace(b'"verdict": "correct"', b'"verdict": "timeout"')  # told from one that is graded again
    out.write_bytes(kept + b"\n" + lines[1] + b"\n" + lines[2][:20])
    for done in (2, 6):
        assert f"{done} rows are graded already" in grade(source, out).stderr
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


def test_of_two_processes_on_one_output_the_second_is_refused(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "new" / "out.jsonl"
    out.parent.mkdir()
    with locked(out):
        grade(source, out, "--kind", "exact", refused=f"{out}: another process writes it")
        assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"], "nor are its settings written"
    grade(source, out)
    assert [row["verdict"] for row in rows(out)] == VERDICTS


@pytest.mark.slow
def test_it_refuses_to_continue_with_other_settings(tmp_path, grade):
    source, out, kept = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", tmp_path / "out.jsonl.settings.json"
    grade(source, out)
    content, settings = out.read_bytes(), kept.read_bytes()
    torn = content[: content.index(b"\n") + 9]
    out.write_bytes(torn)
    grade(source, out, "--kind", "exact", refused="--kind math and not exact")
    grade(source, out, "--timeout", "9", refused="--timeout 5.0 and")
    kept.unlink()
    grade(source, out, refused="out.jsonl.settings.json is missing")
    kept.write_text('{"my": "own"}\n')
    grade(source, out, refused="not the settings of an earlier run")
    assert (kept.read_text(), out.read_bytes()) == ('{"my": "own"}\n', torn)
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
        ("", "line 2: an empty line is no row"),
        ('{"gold": "1", "gold": "2", "response": "1"}', "line 2: not JSON: 'gold' stands twice"),
        ('{"gold": {"a": 1}, "response": "1"}', "line 2: --kind math takes one gold, got {'a': 1}"),
        ("[" * 10**5 + "]" * 10**5, "line 2: not JSON"),
        ('{"gold": "1", "response": "", "prompt": ["a"]}', "line 2: a prompt is text or messages with role and conten"),
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


def test_a_thought_that_the_prompt_opens_and_one_in_tags_of_ones_own_are_no_answers(tmp_path, grade):
    whole = "<ponder>\\boxed{3}</ponder>\\boxed{4}"
    texts = ("\\boxed{3}", whole.removeprefix("<ponder>"), whole.partition("</")[0], whole)
    opened = [("user", "2+2?"), ("assistant", "<ponder>")]
    prompts = ("2+2?<ponder>\n", [{"role": role, "content": text} for role, text in opened], "2+2?", "")
    lines = [{"gold": "4", "response": text, "prompt": prompt} for text, prompt in zip(texts, prompts, strict=True)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    grade(source, out, "--thought-tags", "<ponder>", "</ponder>")
    assert [row["verdict"] for row in rows(out)] == ["no_answer", "correct", "no_answer", "correct"]
    grade(source, out, refused="--thought_tags ['<ponder>', '</ponder>'] and not None")
    grade(source, out, "--thought-tags", "", "x", refused="Prompts.thought_tags must be two different tags")
    source = write(source, [{**row, "prompt": "2+2?\n◁think▷"} for row in lines[:1]])
    grade(source, tmp_path / "known.jsonl")
    assert [row["verdict"] for row in rows(tmp_path / "known.jsonl")] == ["no_answer"]


STYLE = """
def brief(completions, level, **kwargs):
    shortest = min(map(len, completions))
    kwargs["log_metric"]("shortest", shortest)
    return [None if text == "two" else float(len(text) == shortest) + each for text, each in zip(completions, level)]

def size(completions, **kwargs):
    return [len(completions)] * len(completions)

"""
ANSWERS = [("6*7?", 42, "it is 42"), ("6*7?", 42, "42"), ("1+1?", 2, "two"), ("1+1?", 2, "it is 3, surely")]


@pytest.fixture
def style(tmp_path, grade):
    """Runs the script with a function of STYLE: the rows that it writes. refused: as with `grade`."""
    (tmp_path / "style.py").write_text(STYLE)

    def run(lines, name: str, *more: str, refused: str | None = None) -> list[dict]:
        source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        run.done = grade(source, out, "--function", f"{tmp_path}/style.py:{name}", *more, refused=refused)
        return rows(out) if refused is None else []

    return run


def asked(answers=ANSWERS) -> list[dict]:
    return [{"prompt": prompt, "gold": gold, "response": text, "level": gold} for prompt, gold, text in answers]


def test_a_function_gets_columns_and_the_responses_to_one_question_together_and_a_summary_is_printed(tmp_path, style):
    for _ in range(2):  # the second time all rows are graded already
        graded = style(asked(), "brief")
        assert style.done.stdout.splitlines() == [
            f"{tmp_path}/out.jsonl: 4 rows, 3 correct, 1 error",
            "reward: mean 29, 2 to 43, of 3 rows",
            "1 rows without a reward (abstained or failed), the first row 3: style.py, line 2: it returned None",
        ]
    assert [row["reward"] for row in graded] == [42, 43, None, 2]
    assert [row["logs"]["shortest"] for row in graded] == [2, 2, 3, 3]
    assert [row.get("reason") for row in graded] == [None, None, "style.py, line 2: it returned None", None]
    assert [row["response"] for row in graded] == [text for _, _, text in ANSWERS]


def test_a_key_that_the_script_writes_is_no_column_which_it_says(style):
    graded = style([{**row, "reward": 7.0} for row in asked()], "size")
    assert [row["reward"] for row in graded] == [2] * 4
    assert "in.jsonl: reward: this script writes these keys, so they are no columns" in style.done.stderr


def test_a_group_is_never_cut_off_and_rows_without_a_prompt_are_alone(style):
    """256 rows are graded and written at a time."""
    lines = asked([("6*7?", 42, f"{n}") for n in range(250)] + [("1+1?", 2, f"{n}") for n in range(20)])
    alone = [{"gold": row["gold"], "response": row["response"]} for row in lines[:3]]
    graded = style([*lines, *lines[:250], *alone], "size")
    assert [row["reward"] for row in graded] == [*[250] * 250, *[20] * 20, *[250] * 250, 1, 1, 1]


def test_a_function_that_gets_batches_gets_the_same_ones_after_an_interruption(tmp_path, style):
    lines, out = asked([("6*7?", 42, f"{n}") for n in range(257)] + ANSWERS[2:]), tmp_path / "out.jsonl"
    graded = style(lines, "size", "--gets", "batch")
    assert [row["reward"] for row in graded] == [257] * 257 + [2] * 2
    content = out.read_bytes()
    for kept, rows_graded in ((258, 257), (100, None)):
        out.write_bytes(b"".join(content.splitlines(keepends=True)[:kept]) + b'{"pro')
        style(lines, "size", "--gets", "batch")
        assert out.read_bytes() == content
        assert (f"{rows_graded} rows are graded already" in style.done.stderr) is (rows_graded is not None)


def test_settings_and_the_file_of_a_function_are_kept(tmp_path, style):
    style(asked(), "size")
    style(asked(), "size", "--gets", "batch", refused="--gets None and not batch")
    style(asked(), "size", "--success-at", "3", refused="--success_at None and not 3.0")
    style(asked(), "size", "--tool", "trl", refused="--tool None and not trl")
    style(asked(), "brief", refused="style.py:size and not ")
    file, text = tmp_path / "style.py", (tmp_path / "style.py").read_text()
    file.write_text(text + "\n")
    style(asked(), "size", refused="out.jsonl: graded before the file of Verifier.function was changed; remove it")
    file.write_text(text)
    style(asked(), "size")


def test_it_refuses_to_continue_where_another_reward_decides_on_success(tmp_path, grade):
    source, out = write(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"
    grade(source, out, "--rewards", "{'math': 1.0, 'exact': 0.5}")
    first = "--rewards {'math': 1.0, 'exact': 0.5} and not {'exact': 0.5, 'math': 1.0}"
    grade(source, out, "--rewards", "{'exact': 0.5, 'math': 1.0}", refused=first)
    grade(source, out, "--rewards", "{'math': 1, 'exact': 0.5}")


@pytest.mark.slow
def test_of_several_rewards_each_is_written_and_summed_up(tmp_path, run_script):
    (tmp_path / "style.py").write_text(STYLE)
    source, out = write(tmp_path / "in.jsonl", asked()), tmp_path / "out.jsonl"
    rewards = {"math": 1.0, f"{tmp_path}/style.py:brief": 0.5}
    done = run_script("grade.py", "--rewards", repr(rewards), "--success-by", "brief", "--in", source, "--out", out)
    assert done.returncode == 0, done.stderr
    graded = rows(out)
    assert graded[1]["rewards"] == {"math": 1.0, "brief": 43.0}
    assert [row["reward"] for row in graded] == [22.0, 22.5, 0.0, 1.0]
    assert [row["verdict"] for row in graded] == ["correct", "correct", "no_answer", "correct"]
    assert done.stdout.splitlines()[1:] == [
        "reward: mean 11.375, 0 to 22.5, of 4 rows",
        "math: mean 0.5, 0 to 1, of 4 rows",
        "brief: mean 29, 2 to 43, of 3 rows",
    ]
    for wrong in ("{'math'", "math"):
        done = run_script("grade.py", "--rewards", wrong, "--in", source, "--out", out)
        assert (done.returncode, "weight for each kind or function, \"{'math': 1.0" in done.stderr) == (2, True)
        assert done.stderr.startswith("error: --rewards: ")


PAGE = (ROOT / "docs" / "reward_functions.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Try a reward before a run\n")[1].split("\n#")[0]
LINES, COMMANDS, PRINTED = re.findall(r"^```\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
REWARDS = {"openrlhf": [1, 0, 0], "trl": [1, 1, 0], "verl": [1, 1, 0]}


@pytest.mark.parametrize("command", COMMANDS.splitlines())
def test_the_examples_of_the_documentation_do_what_it_says(tmp_path, run_script, monkeypatch, command):
    functions = next(
        block for block in re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "def " in block
    )
    (tmp_path / "rewards.py").write_text(functions)
    (tmp_path / "responses.jsonl").write_text(LINES)
    monkeypatch.chdir(tmp_path)
    script, *words = shlex.split(command.removeprefix("python scripts/"))
    tool = words[-1].removesuffix(".jsonl")
    done = run_script(script, *words)
    assert done.returncode == 0, done.stderr
    assert [row["reward"] for row in rows(tmp_path / f"{tool}.jsonl")] == REWARDS[tool]
    if tool == "trl":
        assert done.stdout == PRINTED
