"""Question files: what loads, and what is refused with which words."""

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_builders import DATA

from exgrpo_orlhf.questions import QuestionFile, fingerprint
from exgrpo_orlhf.questions.files import read_rows


def real(name: str) -> str:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not in {DATA} (EXGRPO_TEST_DATA)")
    return str(DATA / name)


def verl_row(prompt="1+1?", answer="2", source="sums"):
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": prompt}]
    return {"data_source": source, "prompt": messages, "reward_model": {"ground_truth": answer, "style": "rule"}}


def parquet(path: Path, rows) -> QuestionFile:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return QuestionFile(str(path))


def jsonl(path: Path, *lines: str, **fields) -> QuestionFile:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return QuestionFile(str(path), **{"prompt": "question", "answer": "answer", **fields})


def test_verl_parquet_gives_messages_answer_source_and_row(tmp_path):
    first, second = parquet(tmp_path / "q.parquet", [verl_row(), verl_row("2+2?", "4", "more")]).load()
    assert first.prompt == (("system", "Think."), ("user", "1+1?"))
    assert (first.answer, first.source, first.meta) == ("2", "sums", {"row": 0})
    assert (second.answer, second.source, second.meta) == ("4", "more", {"row": 1})


def test_messages_stored_by_pandas_as_arrays_load_too(tmp_path):
    pd = pytest.importorskip("pandas")
    pd.DataFrame([verl_row()]).to_parquet(tmp_path / "q.parquet")
    pd.read_parquet(tmp_path / "q.parquet").to_parquet(tmp_path / "again.parquet")  # lists are numpy arrays by now
    assert QuestionFile(str(tmp_path / "again.parquet")).load() == QuestionFile(str(tmp_path / "q.parquet")).load()


def test_parquet_and_jsonl_of_the_same_rows_are_the_same_questions(tmp_path):
    rows = [verl_row(), verl_row("2+2?", "4")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = QuestionFile(str(tmp_path / "q.jsonl")).load()
    assert lines == parquet(tmp_path / "q.parquet", rows).load()


def test_only_the_needed_columns_are_read(tmp_path):
    config = parquet(tmp_path / "q.parquet", [{**verl_row(), "images": "x" * 1000}])
    (row,) = read_rows(Path(config.path), lambda present: None, ("data_source", "prompt", "reward_model.ground_truth"))
    assert set(row) == {"data_source", "prompt", "reward_model"}
    assert set(row["reward_model"]) == {"ground_truth"}


def test_json_numbers_stay_as_they_are_written(tmp_path):
    rows = [f'{{"question": "q{i}", "answer": {number}}}' for i, number in enumerate(["27.0", "4.50e33", "1000", "-0"])]
    answers = [question.answer for question in jsonl(tmp_path / "q.jsonl", *rows).load()]
    assert answers == ["27.0", "4.50e33", "1000", "-0"]
    assert all(type(answer) is str for answer in answers)


def test_a_line_separator_inside_a_question_does_not_end_its_line(tmp_path):
    text = "first\u2028second\x0bthird\x85fourth"
    rows = [json.dumps({"question": text, "answer": "1"}, ensure_ascii=False)]
    assert jsonl(tmp_path / "q.jsonl", *rows).load()[0].prompt == text


def test_source_is_the_files_name_where_there_is_no_field(tmp_path):
    rows = ['{"question": "a", "answer": "1"}', '{"question": "b", "answer": "1", "data_source": "given"}']
    assert [q.source for q in jsonl(tmp_path / "sums.jsonl", *rows).load()] == ["sums", "given"]
    assert [q.source for q in jsonl(tmp_path / "sums.jsonl", *rows, source=None).load()] == ["sums", "sums"]
    parquet(tmp_path / "chains.parquet", [verl_row()])
    assert QuestionFile(str(tmp_path / "chains.parquet"), source=None).load()[0].source == "chains"


def test_repetitions_with_the_same_answer_are_merged_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [verl_row(), verl_row("2+2?", "4"), verl_row(), verl_row()]
    assert [q.meta["row"] for q in parquet(tmp_path / "q.parquet", rows).load()] == [0, 1]
    assert "2 questions, 2 repetitions merged" in caplog.text


def test_repetitions_with_different_answers_name_both_rows(tmp_path):
    rows = [verl_row(), verl_row("2+2?", "4"), verl_row(answer="3")]
    with pytest.raises(ValueError, match=r"q\.parquet: rows 0 and 2 .*'2' and '3'; remove the wrong one.*1\+1\?"):
        parquet(tmp_path / "q.parquet", rows).load()
    with pytest.raises(ValueError, match="lines 1 and 2"):
        jsonl(tmp_path / "q.jsonl", *(f'{{"question": "a", "answer": {n}}}' for n in (1, 2))).load()


def test_limit_counts_distinct_questions_and_looks_no_further(tmp_path):
    rows = ['{"question": "a", "answer": 1}'] * 2 + ['{"question": "b", "answer": 1}', "not JSON"]
    assert [q.prompt for q in jsonl(tmp_path / "q.jsonl", *rows, limit=2).load()] == ["a", "b"]
    with pytest.raises(ValueError, match=r"QuestionFile\.limit must be at least 1, or None for all; got 0"):
        QuestionFile("q.jsonl", limit=0)


def test_missing_files_and_unknown_suffixes_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        QuestionFile(str(tmp_path / "nowhere.jsonl")).load()
    with pytest.raises(ValueError, match=r"ends in \.parquet, \.jsonl or \.csv, not '\.txt'"):
        jsonl(tmp_path / "q.txt").load()


def test_a_torn_parquet_file_is_named(tmp_path):
    config = parquet(tmp_path / "q.parquet", [verl_row()])
    whole = Path(config.path).read_bytes()
    for torn in (whole[:-20], b"", b"PAR1 and no more", whole[:40] + bytes(200) + whole[240:]):
        Path(config.path).write_bytes(torn)
        with pytest.raises(ValueError, match=r"q\.parquet: cannot be read as parquet .*make it again"):
            config.load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answer": "gold"}, r"no column 'gold', there are .*prompt.*reward_model\.ground_truth.*\.answer"),
        ({"answer": "reward_model.gold"}, r"no column 'reward_model\.gold'"),
        ({"source": "set"}, r"no column 'set'.*QuestionFile\.source \(None: the set's own name\)"),
    ],
)
def test_a_missing_column_is_named_with_those_present(tmp_path, fields, message):
    parquet(tmp_path / "q.parquet", [verl_row()])
    with pytest.raises(ValueError, match=message):
        QuestionFile(str(tmp_path / "q.parquet"), **fields).load()


GOOD = b'{"question": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "answer", "message"),
    [
        (GOOD + b'{"question": \n', "answer", r"line 2: not JSON"),
        (GOOD + b"\n" + GOOD, "answer", "line 2: not JSON"),
        (b'{"question": "a", "answer": NaN}\n', "answer", "line 1: not JSON: NaN is no JSON number"),
        (b"[1]\n", "answer", "line 1: a row is an object"),
        (GOOD + b'{"question": "\xff', "answer", r"line 2: not JSON.*was it written to the end"),
        (
            b'{"question": "a", "gold": "1"}\n',
            "answer",
            r"line 1: no field 'answer', there are question, gold; set QuestionFile\.answer",
        ),
        (
            b'{"question": "a", "gold": {"words": "1"}}\n',
            "gold.text",
            r"line 1: no field 'gold\.text', there are words",
        ),
        *(
            (f'{{"question": {prompt}, "answer": 1}}\n'.encode(), "answer", f"line 1: field 'question' .*{message}")
            for prompt, message in [
                ("7", "a prompt is text or a list"),
                ("null", "a prompt is text or a list"),
                ("[]", "a prompt is text or a list"),
                ('" "', "is empty"),
                ('["hello"]', "has the message 'hello'"),
                ('[{"role": "user"}]', "a message is"),
                ('[{"role": "user", "content": 7}]', "a message is"),
                ('[{"role": "user", "content": "a", "name": "b"}]', "a message is"),
                ('[{"role": "user", "content": ""}]', "ends in an empty message"),
            ]
        ),
        *(
            (
                f'{{"question": "a", "answer": {given}}}\n'.encode(),
                "answer",
                "line 1: field 'answer' is .* a gold answer is text",
            )
            for given in ("null", "true", '""', "[1]")
        ),
        (b"", "answer", "holds no questions"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, content, answer, message):
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"q\.jsonl(:|,)? {message}"):
        QuestionFile(str(tmp_path / "q.jsonl"), prompt="question", answer=answer).load()


def test_whole_numbers_in_parquet_are_answers_and_decimals_are_not(tmp_path):
    assert parquet(tmp_path / "q.parquet", [verl_row(answer=204)]).load()[0].answer == "204"
    for answer in (0.5, None):
        with pytest.raises(ValueError, match=r"row 0: field 'reward_model\.ground_truth' is"):
            parquet(tmp_path / "q.parquet", [verl_row(answer=answer)]).load()


def test_fingerprint_depends_on_the_questions_and_their_order(tmp_path):
    one, two = parquet(tmp_path / "q.parquet", [verl_row(), verl_row("2+2?", "4")]).load()
    assert fingerprint([one, two]) == fingerprint(iter([one, two])) != fingerprint([two, one])
    assert len({fingerprint(questions) for questions in ([], [one], [two])}) == 3


def test_the_papers_validation_set_loads(caplog):
    caplog.set_level(logging.INFO)
    questions = QuestionFile(real("exgrpo_valid.parquet")).load()
    assert len(questions) == len({question.id for question in questions}) == 1590
    assert "1590 questions, 669 repetitions merged" in caplog.text  # 2,259 rows
    assert {q.source for q in questions} == {"aime", "aime25", "amc", "math", "minerva", "olympiad_bench"}
    assert all(role in ("system", "user") for question in questions for role, _ in question.prompt)


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "count"),
    [
        ("gsm8k_test", "question", "answer", 1319),
        ("math500_test", "problem", "answer", 500),
        ("minerva_test", "problem", "solution", 272),
        ("amc23_test", "question", "answer", 40),
    ],
)
def test_benchmarks_load_whole(name, prompt, answer, count):
    questions = QuestionFile(real(f"{name}.jsonl"), prompt=prompt, answer=answer).load()
    assert len(questions) == count
    assert {question.source for question in questions} == {name}
    if name == "amc23_test":
        assert all(question.answer.endswith(".0") for question in questions)
