"""Public sets prepared from copies made here with the hub's fields, and from the real ones in the shared data."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_server import http_server
from run_builders import ROOT
from run_builders import rows as rows_of

from exgrpo_orlhf.grader.boxes import last_box
from exgrpo_orlhf.io import paths
from exgrpo_orlhf.io.files import locked, sha256
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.catalogue import PUBLIC_SETS, PublicSet
from exgrpo_orlhf.questions.overlap import write_rows
from exgrpo_orlhf.questions.prepare import convert, prepare, read_manifest
from exgrpo_orlhf.questions.question_files import read_rows
from exgrpo_orlhf.testbed.modular_chains import ModularChains

AIME = [{"id": i, "problem": f"How many of {i}?", "answer": f"{i:03}", "solution": "…"} for i in range(30)]


@pytest.fixture
def copies(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "copies"


@pytest.fixture
def aime(copies) -> PublicSet:
    copy(copies, "aime25", AIME)
    return PUBLIC_SETS["aime25"]


def copy(copies: Path, name: str, rows, subset: str | None = None) -> None:
    """A set as the hub has it: a folder for the subset, and a card that names it."""
    public = PUBLIC_SETS[name]
    folder = copies / public.id
    subset = subset or public.subset
    (folder / (subset or "data")).mkdir(parents=True)
    file = f"{subset or 'data'}/{public.split}-00000-of-00001.parquet"
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), folder / file)
    if subset:
        card = f"configs:\n- config_name: {subset}\n  data_files:\n  - split: {public.split}\n    path: {file}\n"
        (folder / "README.md").write_text(f"---\n{card}---\n")


def pairs(name: str, *rows) -> list[tuple[str, str]]:
    written, _ = convert(PUBLIC_SETS[name], rows)
    return [(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]) for row in written]


def script(*arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / "prepare_data.py", *arguments]
    online = {**os.environ, "HF_HUB_OFFLINE": "0", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=online)


# -- conversions ------------------------------------------------------------------------------------------------------


OPENR1 = [{"role": "system", "content": "Think in two sections."}, {"role": "user", "content": "1+1?"}]
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nFind $x$.\n\nRemember to put your "
    'answer on its own line after "Answer:".'
)
TEN = [f"o{i}" for i in range(10)]


GSM8K = {"question": "How much?", "answer": "4*300=<<4*300=1200>>1200 #1\n#### 1,200"}
GOLDS = [  # as written behind ####, and as read
    ("1,200", "1200"), ("-1,200", "-1200"), ("$1,200,300.50", "$1200300.50"), ("1,200 m", "1200 m"), ("0,1", "0,1"),
    ("3,5", "3,5"), ("-3, 3", "-3, 3"), ("1,2,3", "1,2,3"), ("12,34", "12,34"), ("0,125", "0,125"),
    ("1234,567", "1234,567"), ("(1,200)", "(1,200)"), ("1,200, 3,400", "1200, 3400"), ("1,200,3", "1,200,3"),
]  # fmt: skip
ARC = {"question": "Why?", "choices": {"text": ["so", "thus"], "label": ["1", "2"]}, "answerKey": "2"}
PRIME = {"context": "Let $p$ be prime.", "question": "Find all n.", "final_answer": ["1", "p "]}
LETTERED = "\n".join(f"{label}) {text}" for label, text in zip("ABCDEFGHIJ", TEN, strict=True))
ROWS = [
    ("openr1", {"prompt": OPENR1, "reward_model": {"style": "rule", "ground_truth": "2"}}, "1+1?", "2"),
    ("svamp", {"question_concat": "4 less 3?", "Answer": "1.0"}, "4 less 3?", "1.0"),
    *(("gsm8k_train", {**GSM8K, "answer": f"So.\n#### {gold}"}, "How much?", read) for gold, read in GOLDS),
    ("dapo", {"prompt": DAPO, "solution": "34"}, "Find $x$.", "34"),
    ("dapo", {"prompt": "求 $y$。", "solution": "2"}, "求 $y$。", "2"),
    ("amc", {"problem": "a", "answer": 142.0}, "a", "142"),
    ("amc", {"problem": "b", "answer": 0.5}, "b", "0.5"),
    ("olympiad", {"context": None, "question": "Find n.", "final_answer": ["$2$"]}, "Find n.", "$2$"),
    ("olympiad", PRIME, "Let $p$ be prime.\nFind all n.", "1, p"),
    ("arc_c", ARC, "Why?\n\n1) so\n2) thus", "2"),
    ("mmlu_pro", {"question": "Which?", "options": TEN, "answer": "J"}, f"Which?\n\n{LETTERED}", "J"),
]


@pytest.mark.parametrize(("name", "row", "question", "answer"), ROWS)
def test_a_row_becomes_the_bare_question_and_its_answer(name, row, question, answer):
    assert pairs(name, row) == [(question, answer)]


def test_gpqa_options_are_in_an_order_of_their_own_that_stays():
    wrong = {"Incorrect Answer 1": "wrong", "Incorrect Answer 2": "false", "Incorrect Answer 3": "no\n"}
    rows = [{"Question": f" Question {i}? ", "Correct Answer": "right ", **wrong} for i in range(200)]
    converted = pairs("gpqa", *rows)
    assert converted == pairs("gpqa", *reversed(rows))[::-1]
    for question, letter in converted:
        assert f"{letter}) right" in question.split("\n")
    counts = [sum(letter == answer for _, answer in converted) for letter in "ABCD"]
    assert min(counts) > 30, "the right answer's place must not tell"


def test_rows_without_an_answer_or_in_contradiction_are_left_out_and_counted():
    rows = [{"problem": f"p{i}", "solution": "\\boxed{1}"} for i in range(400)]
    rows[7] = {"problem": "p7", "solution": "\\boxed{}"}
    rows += [{"problem": "p9", "solution": "\\boxed{2}"}]
    written, dropped = convert(PUBLIC_SETS["math_train"], rows)
    assert dropped == {"without question or answer": 1, "contradicting each other": 2}
    assert len(written) == 398
    assert [row["extra_info"]["index"] for row in written][6:9] == [6, 8, 10]


def test_a_column_that_holds_something_else_is_an_error_that_names_it():
    rows = [{"problem": f"p{i}", "solution": "see the book"} for i in range(400)]
    with pytest.raises(ValueError, match=r"MATH-lighteval: of 400 rows 400 without question or answer; do problem"):
        convert(PUBLIC_SETS["math_train"], rows)
    with pytest.raises(ValueError, match=r"openai/gsm8k, row 0: not of the form expected of question, answer"):
        convert(PUBLIC_SETS["gsm8k_test"], [{"question": "a", "answer": 7}])


# -- preparing --------------------------------------------------------------------------------------------------------


def test_a_prepared_set_loads_without_any_binding_and_its_manifest_says_what_it_is(tmp_path, copies, aime):
    line, made = prepare(aime, tmp_path / "out", copies)
    assert made
    assert "30 rows, 30 distinct questions" in line
    questions = QuestionFile(str(tmp_path / "out" / "aime25.parquet")).load()
    assert questions[24].prompt == (("user", "How many of 24?"),)
    assert (questions[24].answer, questions[24].source) == ("024", "aime25")
    entry = read_manifest(tmp_path / "out")["aime25"]
    expected = {"source": "math-ai/aime25", "split": "test", "rows": 30, "licence": "Apache-2.0; questions © MAA"}
    assert expected.items() <= entry.items()
    assert len(entry["sha256"]) == 64
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"aime25.parquet", "manifest.json"}


def test_a_rows_own_system_message_is_kept_unless_it_is_dropped(tmp_path, copies, run_script):
    """And a file that was prepared the other way is made again."""
    row = {"prompt": OPENR1, "reward_model": {"style": "rule", "ground_truth": "2"}}
    copy(copies, "openr1", [row] * 3)
    words = ("prepare_data.py", "--only", "openr1", "--out", tmp_path, "--from", copies, "--any-rows")
    kept = (("system", "Think in two sections."),)
    for more, own in (((), kept), (("--drop-system",), ()), ((), kept)):
        assert "1 distinct questions" in run_script(*words, *more).stdout
        [question] = QuestionFile(str(tmp_path / "openr1.parquet")).load()
        assert question.prompt == (*own, ("user", "1+1?"))
        assert "nothing to do" in run_script(*words, *more).stdout


def test_preparing_twice_does_nothing_and_a_damaged_file_is_made_again_the_same(tmp_path, copies, aime):
    out, path = tmp_path / "out", tmp_path / "out" / "aime25.parquet"
    prepare(aime, out, copies)
    content, manifest = path.read_bytes(), (out / "manifest.json").read_bytes()
    shutil.move(copies, tmp_path / "away")  # nothing is asked for again
    assert prepare(aime, out, copies) == ("30 rows, as in manifest.json: nothing to do", False)
    assert prepare(aime, out) == ("30 rows, as in manifest.json: nothing to do", False)
    shutil.move(tmp_path / "away", copies)
    for damage in (content[:-10], content + b"x"):
        path.write_bytes(damage)
        assert prepare(aime, out, copies)[1]
        assert (path.read_bytes(), (out / "manifest.json").read_bytes()) == (content, manifest)


@pytest.mark.parametrize("moment", [1, 2])
def test_an_interrupted_preparation_leaves_nothing_half_written_and_is_done_again(
    tmp_path, copies, aime, monkeypatch, moment
):
    out, calls, rename = tmp_path / "out", [], os.replace

    def interrupted(source, target):
        calls.append(target)
        if len(calls) == moment:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(aime, out, copies)
    assert read_manifest(out) == {}
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert prepare(aime, out, copies)[1]
    assert {path.name for path in out.iterdir()} == {"aime25.parquet", "manifest.json"}
    assert len(QuestionFile(str(out / "aime25.parquet")).load()) == 30


@pytest.mark.usefixtures("aime")
def test_a_second_process_is_refused_while_the_first_prepares(tmp_path, copies, run_script):
    words = ("prepare_data.py", "--only", "aime25", "--out", tmp_path / "out", "--from", copies)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / ".lock"):
        done = run_script(*words)
    text = f"error: another process prepares sets in {tmp_path / 'out'}: wait for it\n"
    assert (done.returncode, done.stderr) == (1, text)
    assert run_script(*words).returncode == 0


def test_another_number_of_rows_or_another_column_stops_with_what_to_do(tmp_path, copies):
    copy(copies, "aime25", AIME[:29])
    with pytest.raises(ValueError, match=r"aime25, split 'test', has 29 rows, and 30 are expected.*--any-rows"):
        prepare(PUBLIC_SETS["aime25"], tmp_path / "out", copies)
    assert prepare(PUBLIC_SETS["aime25"], tmp_path / "out", copies, any_rows=True)[1]
    copy(copies, "aime24", [{"Problem": "a", "Answer": "1"}] * 30)
    with pytest.raises(ValueError, match=r"no column 'problem' and no 'answer', there are Problem, Answer.*'aime24'"):
        prepare(PUBLIC_SETS["aime24"], tmp_path / "out", copies)
    with pytest.raises(ValueError, match=r"hf download --repo-type dataset HuggingFaceH4/MATH-500 .*--revision 6e4e"):
        prepare(PUBLIC_SETS["math500"], tmp_path / "out", copies)


def test_another_revision_in_the_catalogue_is_fetched_again(tmp_path, copies, aime):
    out, public = tmp_path, replace(aime, revision=None)
    prepare(public, out, copies)
    manifest = read_manifest(out)
    manifest["aime25"]["revision"] = "0" * 40
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert not prepare(public, out, copies)[1], "nothing is pinned: what is there is kept"
    assert prepare(aime, out, copies)[1]


@pytest.mark.usefixtures("aime")
def test_the_script_prepares_what_it_can_and_says_what_it_could_not(tmp_path, copies, run_script):
    script, out = partial(run_script, "prepare_data.py"), tmp_path / "out"
    done = script("--only", "aime25", "gpqa", "--from", copies, "--out", out)
    assert done.returncode == 1
    assert "aime25: 30 rows, 30 distinct questions" in done.stdout
    assert "gpqa: error:" in done.stdout
    assert "hf download --repo-type dataset Idavidrein/gpqa" in done.stdout
    assert "1 not prepared: gpqa" in done.stderr
    listed = script("--list", "--out", out).stdout.split("\n")
    assert [line.split()[0] for line in listed if "prepared" in line] == ["aime25"]
    assert len(listed) == len(PUBLIC_SETS) + 2
    (out / "manifest.json").write_text("{")
    assert "manifest.json: not JSON" in script("--only", "aime25", "--out", out).stdout


@pytest.mark.slow
def test_gated_missing_and_unreachable_sets_each_say_what_to_do(tmp_path):
    def hub(method, path, headers, body):
        """As the hub answers for a gated set and for one that is not there."""
        if "gpqa" in path:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, ""
        return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Not found"}, ""

    home = {"HF_HOME": str(tmp_path / "hf")}
    with http_server(hub) as address:
        done = script("--only", "gpqa", "dapo", "--out", tmp_path, HF_ENDPOINT=address, **home)
    assert "gpqa: error: Idavidrein/gpqa is gated: accept its terms" in done.stdout
    assert "hf auth login" in done.stdout
    assert "dapo: error: open-r1/DAPO-Math-17k-Processed: no such set on the hub" in done.stdout
    done = script("--only", "dapo", "--out", tmp_path, HF_ENDPOINT=address, **home)
    assert "the hub cannot be reached from here" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


# -- real sets --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_sets_are_prepared_whole_from_copies_in_the_hubs_form(tmp_path, copies, shared_data):
    copy(copies, "gsm8k_test", rows_of(shared_data / "gsm8k_test.jsonl"))
    copy(copies, "math500", rows_of(shared_data / "math500_test.jsonl"))
    copy(copies, "mmlu_pro", pq.read_table(shared_data / "mmlu_pro_test.parquet"))
    for name, questions in [("gsm8k_test", 1319), ("math500", 500), ("mmlu_pro", 11_873)]:  # 159 rows repeat others
        line, _ = prepare(PUBLIC_SETS[name], tmp_path / "out", copies)
        assert f"{questions:,} distinct questions" in line
        loaded = QuestionFile(str(tmp_path / "out" / f"{name}.parquet")).load()
        assert len(loaded) == questions
        if name == "gsm8k_test":
            assert all(question.answer.lstrip("-").isdigit() for question in loaded)
        if name == "mmlu_pro":
            assert {question.answer for question in loaded} == set("ABCDEFGHIJ")


def test_arc_questions_come_out_as_the_papers_authors_wrote_theirs(shared_data):
    theirs = QuestionFile(str(shared_data / "arc_challenge_test.parquet")).load()
    for question in theirs[::50]:
        text = question.prompt[-1][1]
        stem, _, choices = text.rstrip("\n").rpartition("\n\n")
        labels, options = zip(*(line.split(") ", 1) for line in choices.split("\n")), strict=True)
        row = {"question": stem, "choices": {"label": labels, "text": options}, "answerKey": question.answer}
        assert pairs("arc_c", row) == [(text.rstrip("\n"), question.answer)]


def test_every_boxed_answer_of_math_500_is_found(shared_data):
    rows = rows_of(shared_data / "math500_test.jsonl")
    assert [last_box(row["solution"]) for row in rows] == [row["answer"] for row in rows]


# -- questions chosen by a model's pass rate --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_chosen_rows_are_written_with_all_their_columns_and_the_rate(form, tmp_path):
    rows = [{"asked": f"{i}, or\u2028not?", "n": 4.50, "gold": str(i)} for i in range(5)]
    file, out = tmp_path / f"mine.{form}", tmp_path / f"kept.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif form == "jsonl":
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).replace("4.5", "4.50"))
    else:
        file.write_text("asked,n,gold\n" + "".join(f'"{row["asked"]}",4.50,{row["gold"]}\n' for row in rows))
    write_rows(file, [0, 3], out, "pass_rate", [1.0, 0.25])
    found, before = [*read_rows(out, ())], [*read_rows(file, ())]
    assert [{name: value for name, value in row.items() if name != "pass_rate"} for row in found] == [
        before[0],
        before[3],
    ]
    assert [float(row["pass_rate"]) for row in found] == [1.0, 0.25]
    assert form == "parquet" or "4.50" in out.read_text(), "numbers stay as they are written"
    with pytest.raises(ValueError, match="has a column 'pass_rate' already; take the file without it"):
        write_rows(out, [0], tmp_path / f"again.{form}", "pass_rate", [1.0])


@pytest.mark.slow
def test_rows_are_kept_by_the_share_of_right_responses_and_the_same_command_goes_on(
    warm_model, tmp_path, run_script, monkeypatch
):
    monkeypatch.setattr(paths, "WORKPLACE", tmp_path)
    asked = ModularChains(count=16, operands=(2, 3), seed=5).load()
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"q": q.prompt, "gold": q.answer}) + "\n" for q in asked))
    digest = sha256(tmp_path / "mine.jsonl")[:8]
    name = f"pass_rate-mine-{digest}-modular_chain-{warm_model.parent.name}-{warm_model.name}-*"
    words = ("--measure", warm_model, "--questions", f"{tmp_path}/mine.jsonl:q:gold", "--kind", "modular_chain")
    more = ("--samples", "6", "--", "--engine", "transformers", "--max-tokens", "24")
    done = run_script("prepare_data.py", *words, "--keep", "0:1", "--write-kept", tmp_path / "all.jsonl", *more)
    assert done.returncode == 0, done.stderr
    rates = {row["q"]: row["pass_rate"] for row in rows_of(tmp_path / "all.jsonl")}
    [results] = (tmp_path / "results").glob(name)
    before = (results / "pass_rate" / "samples.jsonl").read_bytes()
    samples = [json.loads(line) for line in before.splitlines()]
    for question in asked:
        verdicts = [sample["verdict"] for sample in samples if sample["question"] == question.prompt]
        assert len(verdicts) == 6
        assert rates[question.prompt] == verdicts.count("correct") / 6
    assert 0 < sum(rates.values()) < 16, "or the test shows nothing"
    done = run_script("prepare_data.py", *words, "--keep", "0.1:0.9", "--write-kept", tmp_path / "kept.jsonl", *more)
    assert f"16 rows measured: {[*rates.values()].count(0)} never solved" in done.stdout
    chosen = [question.prompt for question in asked if 0.1 <= rates[question.prompt] <= 0.9]
    assert [row["q"] for row in rows_of(tmp_path / "kept.jsonl")] == chosen
    assert (results / "pass_rate" / "samples.jsonl").read_bytes() == before, "nothing is sampled again"


def test_each_kind_and_model_is_measured_in_a_folder_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text('{"q": "two?", "gold": "2"}\n')
    main = runpy.run_path(str(ROOT / "scripts" / "prepare_data.py"))["main"]
    monkeypatch.setitem(main.__globals__, "WORKPLACE", tmp_path)
    folders = []

    def run(command):
        folders.append(command[command.index("--out") + 1])
        return subprocess.CompletedProcess(command, 3)  # so that nothing is read

    monkeypatch.setattr(subprocess, "run", run)
    for model, kind in (("a/x/m", "math"), ("b/x/m", "math"), ("a/x/m", "exact"), ("a/x/m", "math")):
        words = ("--measure", model, "--questions", f"{tmp_path}/mine.jsonl:q:gold", "--kind", kind, "--keep", "0:1")
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *words, "--write-kept", f"{tmp_path}/kept.jsonl"])
        assert main() == 3
    assert len({*folders[:3]}) == 3
    assert folders[3] == folders[0], "the same command goes on"


@pytest.mark.parametrize("fields", ["", ":q", ":q:gold:more", ":q:answer"])
def test_columns_that_are_not_there_are_named_before_anything_is_sampled(fields, tmp_path, run_script):
    (tmp_path / "mine.jsonl").write_text('{"q": "1+1?", "gold": "2"}\n')
    words = ("--measure", "m", "--questions", f"{tmp_path}/mine.jsonl{fields}", "--keep", "0:1")
    done = run_script("prepare_data.py", *words, "--write-kept", tmp_path / "kept.jsonl")
    assert done.returncode == 1
    assert "mine.jsonl has the columns q, gold: --questions" in done.stderr
