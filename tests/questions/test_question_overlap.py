"""What two question sets have in common: normalised text, runs of 13 words, the script's report and clean subset."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_orlhf import config
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.overlap import COMMON, WORDS, TrainingTexts
from exgrpo_orlhf.questions.text import normalised, normalised_answer, words
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.training.load_questions import load_questions


@pytest.fixture
def script(run_script):
    return partial(run_script, "prepare_data.py")


def sentence(*numbers: int) -> str:
    return " ".join(f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in numbers)


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
    assert words(one) == words(other)


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


def test_a_run_of_thirteen_words_is_an_overlap_and_twelve_are_none():
    train = TrainingTexts([sentence(*range(40)), sentence(*range(100, 130))])
    thirteen, twelve = sentence(200, *range(5, 5 + WORDS), 201), sentence(200, *range(5, 4 + WORDS), *range(300, 310))
    overlap = train.overlap([twelve, thirteen, sentence(*range(100, 130))])
    assert [(hit.test_row, hit.train_row, hit.kind) for hit in overlap.hits] == [(1, 0, "13-gram"), (2, 1, "exact")]
    assert overlap.hits[0].share == pytest.approx(1 / 3)  # 15 words: three runs, one of them known
    assert overlap.train_rows == {0, 1}
    assert (overlap.questions, overlap.short) == (3, 0)


@pytest.mark.parametrize(
    ("train", "test", "hits"),
    [
        ([sentence(*range(10)), sentence(*range(10, 20))], [sentence(*range(20))], []),
        ([sentence(*range(20))], [sentence(*range(10)), sentence(*range(10, 20))], []),
        (["What is 6 times 7?", ""], ["what is 6 times 7", "What is 6 times 8?"], [(0, "exact")]),
    ],
)
def test_runs_stay_within_a_question_and_short_questions_are_compared_by_their_text(train, test, hits):
    overlap = TrainingTexts(train).overlap(test)
    assert [(hit.test_row, hit.kind) for hit in overlap.hits] == hits
    assert overlap.short == sum(len(text.split()) < WORDS for text in test)


def test_a_phrase_of_many_questions_is_no_overlap_but_a_repeated_question_is():
    phrase = sentence(*range(WORDS))
    train = [f"{phrase} {sentence(100 + i)}" for i in range(COMMON + 1)]
    test = [f"{phrase} {sentence(600)}"]
    assert TrainingTexts(train).overlap(test).hits == ()
    assert TrainingTexts(train).common == 1
    assert TrainingTexts(train[:-1]).overlap(test).count("13-gram") == 1
    repeated = TrainingTexts([phrase + " again"] * 500)
    assert repeated.overlap(test).train_rows == set(range(500))


def test_hashed_runs_find_what_comparing_word_by_word_finds():
    rng = np.random.default_rng(0)
    pieces = [range(start, start + length) for start, length in zip(*rng.integers(4, 26, (2, 600)), strict=True)]
    texts = [sentence(*pieces[i], *pieces[i + 1]) for i in range(0, 600, 2)]
    train, test = texts[:200], texts[200:]

    def runs(text):
        parts = text.split()
        return {tuple(parts[i : i + WORDS]) for i in range(len(parts) - WORDS + 1)}

    trained = [runs(text) for text in dict.fromkeys(train)]
    expected = set()
    for row, text in enumerate(test):
        rare = {run for run in runs(text) if 0 < sum(run in other for other in trained) <= COMMON}
        if text in train or rare:
            expected.add(row)
    assert {hit.test_row for hit in TrainingTexts(train).overlap(test).hits} == expected
    assert 10 < len(expected) < 90


def test_the_official_validation_set_is_found_to_be_the_test_sets(shared_data):
    """T12, on real questions that were set by different hands."""
    train = TrainingTexts([q.prompt for q in QuestionFile(str(shared_data / "exgrpo_valid.parquet")).load()])

    def overlap(name, prompt):
        lines = (shared_data / name).read_text().split("\n")
        return train.overlap([json.loads(line)[prompt] for line in lines if line])

    for name, prompt, questions in [
        ("math500_test.jsonl", "problem", 500),
        ("minerva_test.jsonl", "problem", 272),
        ("amc23_test.jsonl", "question", 40),
    ]:
        assert overlap(name, prompt).count("exact") == questions
    assert len(overlap("aime24_test.jsonl", "problem").hits) == 30
    assert len(overlap("aime25_test.jsonl", "problem").hits) >= 29
    assert overlap("gsm8k_test.jsonl", "question").hits == ()


# -- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path):
    """A training file of four rows in each form, and a test file that shares the second and the fourth."""
    rows = [
        ("One apple?", "1"),
        ("Two\u2028apples, or $2$?", "2"),
        ("Three, “apples”?", "3"),
        (sentence(*range(20)), "4"),
    ]
    records = [{"question": q, "answer": a, "level": 5} for q, a in rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer", "level"])
        writer.writeheader()
        writer.writerows(records)
    test = [{"prompt": "two apples, or 2?"}, {"prompt": sentence(500, *range(3, 18))}, {"prompt": "Nine pears?"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in test))
    (tmp_path / "clean_test.jsonl").write_text(json.dumps(test[2]) + "\n")
    return tmp_path


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_the_clean_subset_keeps_the_form_and_all_columns_and_overlaps_no_more(sets, form, script):
    train, clean, report = sets / f"train.{form}", sets / f"clean.{form}", sets / "overlap.json"
    tests = [sets / "test.jsonl", f"{sets / 'clean_test.jsonl'}:prompt"]
    done = script("--check-overlap", f"{train}:question", *tests, "--json", report, "--write-clean", clean)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 training rows overlap, 2 are clean" in done.stdout
    overlap = json.loads(report.read_text())
    assert [(t["questions"], t["exact"], t["ngram"], t["short"]) for t in overlap["tests"]] == [
        (3, 1, 1, 2),
        (1, 0, 0, 1),
    ]
    assert [(hit["test_row"], hit["train_row"]) for hit in overlap["tests"][0]["hits"]] == [(0, 1), (1, 3)]
    assert overlap["train_rows_overlapping"] == 2
    questions = QuestionFile(str(clean), prompt="question", answer="answer", source=None).load()
    assert [question.prompt for question in questions] == ["One apple?", "Three, “apples”?"]
    assert "level" in clean.read_bytes().decode(errors="ignore")
    again = script("--check-overlap", f"{clean}:question", *tests)
    assert "0 of 2 training rows overlap" in again.stdout


def test_wrong_arguments_of_the_overlap_check_say_what_to_do(sets, script):
    train, test = f"{sets / 'train.jsonl'}:question", sets / "test.jsonl"
    for arguments, status, message in [
        ((sets / "train.jsonl", test), 1, "train.jsonl: no column 'prompt', there are question, answer, level; give"),
        ((sets / "train.parquet", test), 1, "no column 'prompt', there are question, answer, level; give"),
        ((train, sets / "nowhere.jsonl"), 1, "nowhere.jsonl: no such file"),
        ((train, "aime24", "--out", sets), 1, "not prepared yet; run scripts/prepare_data.py --only aime24"),
        ((train, test, "--write-clean", sets / "clean.csv"), 1, "its name ends in .jsonl"),
        ((train, test, "--write-clean", sets / "train.jsonl"), 1, "is the training file itself"),
        ((train,), 2, "a training set and at least one test set"),
    ]:
        done = script("--check-overlap", *arguments)
        assert done.returncode == status, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert script("--write-clean", "x.jsonl").returncode == 2
    assert (sets / "train.jsonl").read_text().count("\n") == 4


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


def test_a_subset_without_a_row_is_not_made(sets, script):
    train, clean = sets / "one.jsonl", sets / "clean.jsonl"
    train.write_text(json.dumps({"prompt": "Two apples?"}) + "\n")
    (sets / "same.jsonl").write_bytes(train.read_bytes())
    done = script("--check-overlap", train, sets / "same.jsonl", "--write-clean", clean)
    assert (done.returncode, clean.exists()) == (1, False)
    assert f"error: every row of {train} overlaps: {clean} would be empty" in done.stderr


def test_half_a_surrogate_pair_breaks_no_report(sets, script):
    train, test, report = sets / "half.jsonl", sets / "half_test.jsonl", sets / "new" / "overlap.json"
    train.write_text(json.dumps({"prompt": "Two \ud800 apples?"}) + "\n")
    test.write_text(json.dumps({"prompt": "Two \ud800 apples?"}) + "\n")
    done = script("--check-overlap", train, test, "--json", report)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text("ascii"))["tests"][0]["exact"] == 1
    assert [path.name for path in report.parent.iterdir()] == ["overlap.json"]


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
