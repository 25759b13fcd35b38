"""What two question sets have in common: normalised text, the script's report and clean subset."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_orlhf import config
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.overlap import PromptColumn, compare
from exgrpo_orlhf.questions.text import normalised, normalised_answer
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.training.load_questions import load_questions


@pytest.fixture
def script(run_script):
    return partial(run_script, "prepare_data.py")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x^{2}$ if $\\dfrac{1}{2} x = 3$.", "find $ x^2 $  if\n\\(\\frac{1}{2}x=3\\)"),
        ("In $\\triangle ABC$, $\\left( 3, 10{,}080 \\right)$?", "In \\triangle ABC, (3, 10,080)"),
        ("“Seven” – that’s it…", '"Seven" - that\'s it...'),
        ("Is $a \\leq b$, or $17_{b}$ ≥ x²?", "is a \\le b, or $17_b \\ge x^2$"),
        ("A so-called **greedy algorithm**<br/>", "A so-called greedy algorithm"),
        ((("system", "Box it."), ("user", "One and one?")), "one and one?"),
    ],
)
def test_the_same_question_set_differently_is_the_same_text(one, other):
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1+2=", "1-2="), ("2**3", "23"), ("5!", "5"), ("$\\frac{11}{2}$", "$\\frac{1}{12}$"), ("$x^{12}$", "$x^12$"),
        ("x²", "x2"), ("f(x)=x", "f(x)=-x"), ("[0, 1)", "(0, 1]"), ("$", "?"),
    ],
)  # fmt: skip
def test_what_carries_meaning_is_not_dropped(one, other):
    assert normalised(one) != normalised(other)


def test_answers_are_compared_with_their_capitals():
    assert normalised_answer("$ \\dfrac12 $.") == normalised_answer("\\frac12")
    assert normalised_answer("aB") != normalised_answer("Ab")


def test_the_official_validation_set_is_found_to_be_the_test_sets(shared_data):
    """T12, on real questions that were set by different hands."""
    sets = {
        "math500_test.jsonl": ("problem", 500),
        "minerva_test.jsonl": ("problem", 272),
        "amc23_test.jsonl": ("question", 40),
        "aime24_test.jsonl": ("problem", 27),
        "gsm8k_test.jsonl": ("question", 0),
    }
    columns = [PromptColumn(shared_data / name, prompt) for name, (prompt, _) in sets.items()]
    report = compare(PromptColumn(shared_data / "exgrpo_valid.parquet", "prompt"), columns)
    assert [len(overlap.hits) for overlap in report.tests] == [same for _, same in sets.values()]


# -- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path):
    """A training file of five rows in each form, and a test file that shares the second, the fourth and the last, which
    is the second once more."""
    rows = [
        ("One apple?", "1"),
        ("Two\u2028apples, or $2$?", "2"),
        ("Three, “apples”?", "3"),
        ("Is $a \\leq b$ or $x^{2}$?", "4"),
        ("two apples, or 2", "2"),
    ]
    records = [{"question": q, "answer": a, "level": 5} for q, a in rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer", "level"])
        writer.writeheader()
        writer.writerows(records)
    test = [{"prompt": "two apples, or 2?"}, {"prompt": "is a \\le b or x^2?"}, {"prompt": "Nine pears?"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in test))
    (tmp_path / "clean_test.jsonl").write_text(json.dumps(test[2]) + "\n")
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "Two \ud800 apples?"}) + "\n")
    return tmp_path


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_the_clean_subset_keeps_the_form_and_all_columns_and_overlaps_no_more(sets, form, script):
    train, clean, report = sets / f"train.{form}", sets / f"clean.{form}", sets / "overlap.json"
    tests = [sets / "test.jsonl", f"{sets / 'clean_test.jsonl'}:prompt"]
    done = script("--check-overlap", f"{train}:question", *tests, "--json", report, "--write-clean", clean)
    assert done.returncode == 0, done.stderr
    assert "3 of 5 training rows overlap, 2 are clean" in done.stdout
    overlap = json.loads(report.read_text())
    assert [(t["questions"], t["same_text"]) for t in overlap["tests"]] == [(3, 2), (1, 0)]
    assert [(hit["test_row"], hit["train_row"]) for hit in overlap["tests"][0]["hits"]] == [(0, 1), (1, 3)]
    assert overlap["train_rows_overlapping"] == 3
    questions = QuestionFile(str(clean), prompt="question", answer="answer", source=None).load()
    assert [question.prompt for question in questions] == ["One apple?", "Three, “apples”?"]
    assert "level" in clean.read_bytes().decode(errors="ignore")
    again = script("--check-overlap", f"{clean}:question", *tests)
    assert "0 of 2 training rows overlap" in again.stdout


def test_wrong_arguments_of_the_overlap_check_say_what_to_do(sets, script):
    train, test, one = f"{sets / 'train.jsonl'}:question", sets / "test.jsonl", sets / "one.jsonl"
    for arguments, message in [
        ((sets / "train.jsonl", test), "train.jsonl: no column 'prompt', there are question, answer, level; give"),
        ((sets / "train.parquet", test), "no column 'prompt', there are question, answer, level; give"),
        ((train, sets / "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        ((train, "aime24", "--out", sets), "not prepared yet; run scripts/prepare_data.py --only aime24"),
        ((train, test, "--write-clean", sets / "clean.csv"), "its name ends in .jsonl"),
        ((train, test, "--write-clean", sets / "train.jsonl"), "is the training file itself"),
        ((one, one, "--write-clean", sets / "none.jsonl"), f"every row of {one} overlaps: {sets / 'none.jsonl'} would"),
    ]:
        done = script("--check-overlap", *arguments)
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
        assert "Traceback" not in done.stderr
    assert (sets / "train.jsonl").read_text().count("\n") == 5
    assert not (sets / "none.jsonl").exists()
    report = sets / "new" / "overlap.json"  # half a surrogate pair breaks no report
    assert script("--check-overlap", one, one, "--json", report).returncode == 0
    assert json.loads(report.read_text("ascii"))["tests"][0]["same_text"] == 1
    assert [path.name for path in report.parent.iterdir()] == ["overlap.json"]


@pytest.mark.parametrize("option", ["--write-clean", "--json"])
def test_no_set_that_is_read_is_written_to(sets, option, script):
    train, test, link = sets / "train.jsonl", sets / "test.jsonl", sets / "link.jsonl"
    link.symlink_to(test)
    before = {path: path.read_bytes() for path in sets.iterdir()}
    for written in (train, test, sets / ".." / sets.name / "test.jsonl", link):
        done = script("--check-overlap", f"{train}:question", test, option, written)
        role = "the training file itself" if written == train else "a test set that is compared"
        assert (done.returncode, f"{written} is {role}; give another name" in done.stderr) == (1, True)
        assert {path: path.read_bytes() for path in sets.iterdir()} == before
    new = sets / "new.jsonl"
    done = script("--check-overlap", f"{train}:question", test, "--write-clean", new, "--json", new)
    assert ("is the report too" in done.stderr, new.exists()) == (True, False)


def test_validation_questions_that_are_only_set_differently_are_refused():
    """T12: spaces and dollars do not make a question another one."""
    train = [Question.make("openr1", "Find $x^{2}$ for $x=2$.", "4")]
    validation = [
        Question.make("aime", (("system", "Think."), ("user", "Find $x^2$ for $x = 2$")), "4"),
        Question.make("aime", "Find $x^3$ for $x = 2$", "8"),
    ]

    def load(*held_out: Question):
        experiment = config.load(["toy.gin"], ["Verifier.kind = 'exact'", "Work.validation = None"])
        sources = [SimpleNamespace(load=lambda questions=questions: questions) for questions in (train, [*held_out])]
        return load_questions(replace(experiment, questions=sources[0], validation=sources[1]))

    with pytest.raises(ValueError, match=r"1 of 2 validation .*of aime, in training from openr1.*--write-clean"):
        load(*validation)
    assert load(validation[1]) == (train, validation[1:])
    assert load() == (train, [])
