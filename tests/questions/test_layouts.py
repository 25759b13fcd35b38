"""Question files as people have them, and the questions of a file that are kept apart for validation."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_orlhf import config
from exgrpo_orlhf.questions import QuestionFile, content_hash
from exgrpo_orlhf.questions.overlap import write_rows
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.training.load_questions import load_questions

ASKED = [("What is 1 + 1?", "2"), ("Ann has 1,000 pens;\nBen has 5. How many?", "1005")]
DAPO = "Solve the following math problem step by step.\n\n{}\n\nRemember to put your answer on its own line."


def gsm8k(question: str, answer: str) -> dict:
    """openai/gsm8k"""
    return {"question": question, "answer": f"They add <<1+1=2>> up.\n#### {int(answer):,}"}


def dapo(question: str, answer: str) -> dict:
    """BytedTsinghua-SIA/DAPO-Math-17k"""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"of {answer}"},
    }


def dapo_processed(question: str, answer: str) -> dict:
    """open-r1/DAPO-Math-17k-Processed"""
    row = dapo(question, answer)
    return {**row, "prompt": question, "solution": answer, "source_prompt": row["prompt"]}


def openr1(question: str, answer: str) -> dict:
    """open-r1/OpenR1-Math-220k"""
    worked = f"It is \\boxed{{{answer}}}."
    return {
        **{"problem": question, "solution": worked, "answer": answer, "problem_type": "Algebra", "source": "olympiads"},
        **{"question_type": "math-word-problem", "uuid": f"of {answer}", "is_reasoning_complete": [True, True]},
        **{"generations": [worked, worked], "correctness_math_verify": [True, False], "correctness_llama": None},
        **{"finish_reasons": None, "correctness_count": 1},
        "messages": [{"content": question, "role": "user"}, {"content": worked, "role": "assistant"}],
    }


def parquet(path: Path, make) -> None:
    pq.write_table(pa.Table.from_pylist([make(*pair) for pair in ASKED]), path)


def table(path: Path, delimiter: str, header=("question", "answer"), mark="") -> None:
    csv.writer(text := io.StringIO(newline=""), delimiter=delimiter).writerows([header, *ASKED])
    content = (mark + text.getvalue()).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def lines(path: Path, pack=bytes) -> None:
    path.write_bytes(pack("".join(json.dumps(dict(question=q, answer=a)) + "\n" for q, a in ASKED).encode()))


LAYOUTS = {
    "gsm8k.parquet": lambda path: parquet(path, gsm8k),
    "dapo.parquet": lambda path: parquet(path, dapo),
    "dapo_processed.parquet": lambda path: parquet(path, dapo_processed),
    "openr1.parquet": lambda path: parquet(path, openr1),
    "semicolon.csv": lambda path: table(path, ";", mark="\ufeff"),
    "list.json": lambda path: path.write_text(json.dumps([dict(question=q, answer=a) for q, a in ASKED], indent=2)),
    "capitals.csv": lambda path: table(path, ";", ("Question", "Answer")),
    "comma.csv.gz": lambda path: table(path, ","),
    "bar.csv": lambda path: table(path, "|"),
    "tabs.tsv": lambda path: table(path, "\t"),
    "tabs.csv": lambda path: table(path, "\t"),
    "lines.json": lines,
    "lines.jsonl.gz": lambda path: lines(path, gzip.compress),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_in_a_common_layout_needs_its_path_alone(name, tmp_path):
    LAYOUTS[name](tmp_path / name)
    questions = QuestionFile(str(tmp_path / name)).load()
    prompts = [DAPO.format(q) if name == "dapo.parquet" else q for q, _ in ASKED]
    shown = [q.prompt if isinstance(q.prompt, str) else q.prompt[-1][1] for q in questions]
    assert shown == prompts
    assert [question.answer for question in questions] == [answer for _, answer in ASKED]
    assert {q.source for q in questions} == {"math_dapo" if name.startswith("dapo") else name.partition(".")[0]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.json", '{"train": [\n{"question": "a", "answer": 1}]}', r"takes a list of objects .* got \{'train'"),
        ("q.json", '[{"question": "a", "answer": 1}, 5]', r"takes a list of objects .* got 5"),
        ("q.json", '[{"question": "a", "answer": 1}', r"q\.json: not JSON: .*written to the end"),
        ("q.json", '{"question": "a", "answer": 1}\n{"question"', r"q\.json, line 2: not JSON"),
        ("q.jsonl.gz", "plain", r"q\.jsonl\.gz: not a whole \.gz file \(Not a gzipped file .*copy or make it again"),
        ("q.csv", "question;answer\na;1;2\n", r"3 values for the 2 columns question, answer; a value with a semicolon"),
        ("q.tsv", "question,answer\na,1\n", r"there are question,answer; set QuestionFile\.prompt"),
    ],
)
def test_a_file_that_is_almost_in_such_a_layout_is_refused_with_its_place(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        QuestionFile(str(tmp_path / name)).load()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.json", '{"question": "a", "answer": "1"}\n'),
        ("q.csv", "question,answer\na,1\n\n"),
        ("q.csv", 'question;answer\r\na;"1"\r\n\r\n'),
    ],
)
def test_one_object_of_json_is_a_question_and_an_empty_last_line_of_csv_is_none(name, content, tmp_path):
    (tmp_path / name).write_text(content, newline="")
    assert [(one.prompt, one.answer) for one in QuestionFile(str(tmp_path / name)).load()] == [("a", "1")]


@pytest.mark.parametrize("name", ["semicolon.csv", "comma.csv.gz", "tabs.tsv", "list.json", "lines.jsonl.gz"])
def test_rows_are_written_as_the_file_has_them(name, tmp_path):
    """prepare_data.py --write-clean and --write-kept"""
    LAYOUTS[name](path := tmp_path / name)
    write_rows(path, [1], tmp_path / "out" / name, "pass_rate", [0.5])
    (kept,) = QuestionFile(str(tmp_path / "out" / name), meta=("pass_rate",)).load()
    assert (kept.prompt, kept.answer, float(kept.meta["pass_rate"])) == (*ASKED[1], 0.5)


def test_numbers_of_a_list_stay_as_they_are_written(tmp_path):
    (tmp_path / "q.json").write_text('[{"question": "a", "answer": 4.50},\n {"question": "b", "answer": 1e2}]')
    write_rows(tmp_path / "q.json", [1, 0], tmp_path / "out.json")
    assert [q.answer_text for q in QuestionFile(str(tmp_path / "out.json")).load()] == ["1e2", "4.50"]


# -- held_out ---------------------------------------------------------------------------------------------------------


def numbered(path: Path, order=range(40)) -> Path:
    path.write_text("".join(json.dumps({"question": f"What is {i} + 1?", "answer": i + 1}) + "\n" for i in order))
    return path


def loaded(path: Path, *bindings: str) -> tuple[set[str], set[str]]:
    """The prompts of training and of validation."""
    path_of = f"QuestionFile.path = {str(path)!r}"
    experiment = config.load(["base.gin"], [path_of, "PretrainedModel.path = 'model'", *bindings])
    training, validation = ({str(q.prompt) for q in questions} for questions in load_questions(experiment))
    return training, validation


@pytest.mark.parametrize(("held_out", "count"), [("6", 6), ("0.1", 4), ("0.001", 1)])
def test_held_out_alone_is_a_runs_validation_and_the_same_for_any_order_of_the_rows(held_out, count, tmp_path):
    bindings = f"QuestionFile.held_out = {held_out}"
    training, validation = loaded(numbered(tmp_path / "q.jsonl"), bindings)
    assert (len(validation), len(training & validation), len(training | validation)) == (count, 0, 40)
    assert loaded(numbered(tmp_path / "q.jsonl", range(39, -1, -1)), bindings) == (training, validation)
    assert loaded(tmp_path / "q.jsonl")[1] == set()


def test_a_mix_trains_on_no_question_that_one_of_its_sources_holds_out(tmp_path):
    numbered(tmp_path / "a.jsonl")
    numbered(tmp_path / "b.jsonl", range(20, 60))
    paths = [f"{name}/QuestionFile.path = {str(tmp_path / f'{name}.jsonl')!r}" for name in "ab"]
    mix = ("Work.questions = @QuestionMix()", "QuestionMix.sources = (@a/QuestionFile(), @b/QuestionFile())", *paths)
    training, validation = loaded(tmp_path, *mix, "b/QuestionFile.held_out = 0.9")
    assert len(validation) == 36
    assert training.isdisjoint(validation)
    assert len(training) + len(validation) == 60


def test_held_out_and_another_validation_are_refused(tmp_path):
    numbered(tmp_path / "q.jsonl")
    with pytest.raises(config.ConfigError, match=r"Work\.validation is bound, and .*Work\.validation = None, or"):
        loaded(tmp_path / "q.jsonl", "QuestionFile.held_out = 2", "Work.validation = @WordProblems()")


def test_the_layouts_are_those_that_the_page_lists():
    page = (Path(__file__).parents[2] / "docs" / "questions.md").read_text()
    rows = page[page.index("| format |") :].partition("\n\n")[0]
    assert {f".{name.split('.')[1]}" for name in LAYOUTS} == set(re.findall(r"`(\.\w+)`", rows)) - {".gz"}


def test_the_hash_of_questions_takes_any_column_and_is_the_same_for_equal_ones():
    class Board:
        pass

    def hashed(*values: object) -> str:
        return content_hash(
            [Question("1", "p", "a", "s", {"entry": value, "row": i}) for i, value in enumerate(values)]
        )

    mixed = lambda: {(0, 1): 2, "a": {3: Board()}}  # keys and values that JSON has not
    assert hashed(mixed()) == hashed(mixed())
    assert hashed({"tests": [1]}) != hashed({"tests": [2]})
