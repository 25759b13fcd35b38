"""Question files: what loads, and what is refused with which words."""

import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_orlhf.questions import QuestionFile, QuestionMix, fingerprint
from exgrpo_orlhf.questions.question_files import read_rows
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier


def verl_row(prompt="1+1?", answer="2", source="sums"):
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": prompt}]
    return {"data_source": source, "prompt": messages, "reward_model": {"ground_truth": answer, "style": "rule"}}


def parquet(path: Path, *rows, **fields) -> QuestionFile:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return QuestionFile(str(path), **fields)


def text(path: Path, content: str | bytes, **fields) -> QuestionFile:
    """A JSONL or CSV file with columns question and answer."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return QuestionFile(str(path), **{"prompt": "question", "answer": "answer", **fields})


def jsonl(path: Path, *rows: tuple[str, object], **fields) -> QuestionFile:
    lines = (json.dumps({"question": q, "answer": a}, ensure_ascii=False) for q, a in rows)
    return text(path, "".join(f"{line}\n" for line in lines), **fields)


def test_verl_parquet_gives_messages_answer_source_and_row(tmp_path):
    rows = [verl_row(), verl_row("2+2?", "4", "more")]
    first, second = parquet(tmp_path / "q.parquet", *rows).load()
    assert first.prompt == (("system", "Think."), ("user", "1+1?"))
    assert (first.answer, first.source, first.meta) == ("2", "sums", {"row": 0})
    assert (second.answer, second.source, second.meta) == ("4", "more", {"row": 1})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert QuestionFile(str(tmp_path / "q.jsonl")).load() == [first, second]


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    parquet(tmp_path / "q.parquet", verl_row())
    assert len(QuestionFile("~/q.parquet").load()) == 1


def test_messages_stored_by_pandas_as_arrays_load_too(tmp_path):
    pd = pytest.importorskip("pandas")
    pd.DataFrame([verl_row()]).to_parquet(tmp_path / "q.parquet")
    pd.read_parquet(tmp_path / "q.parquet").to_parquet(tmp_path / "again.parquet")  # lists are numpy arrays by now
    assert QuestionFile(str(tmp_path / "again.parquet")).load() == QuestionFile(str(tmp_path / "q.parquet")).load()


def test_only_the_needed_columns_are_read(tmp_path):
    config = parquet(tmp_path / "q.parquet", {**verl_row(), "images": "x" * 1000})
    (row,) = read_rows(Path(config.path), ("data_source", "prompt", "reward_model.ground_truth"))
    assert set(row) == {"data_source", "prompt", "reward_model"}
    assert set(row["reward_model"]) == {"ground_truth"}


def test_numbers_keep_their_type_and_in_json_lines_their_spelling(tmp_path):
    numbers = [27.0, 4.5e33, 1000, -1]
    written = ["27.0", "4.50e33", "1000", "-1"]
    lines = "".join(f'{{"question": "q{i}", "answer": {number}}}\n' for i, number in enumerate(written))
    questions = pickle.loads(pickle.dumps(text(tmp_path / "q.jsonl", lines).load()))
    assert [question.answer for question in questions] == numbers
    assert [isinstance(question.answer, float) for question in questions] == [True, True, False, False]
    assert [question.answer_text for question in questions] == written
    rows = [{"question": f"q{i}", "answer": number} for i, number in enumerate(numbers[2:], 2)]
    same = parquet(tmp_path / "q.parquet", *rows, prompt="question", answer="answer").load()
    assert [question.id for question in same] == [question.id for question in questions[2:]]
    assert {q.id for q in same}.isdisjoint(Question.make(q.source, q.prompt, q.answer_text).id for q in same)


@pytest.mark.slow
def test_a_function_gets_numbers_as_numbers_and_a_text_grader_as_text(tmp_path):
    """The reproduction: == was never true, and a column `answers` took the place of the gold answer."""
    row = {"prompt": "2+2?", "answer": 4, "info": {"scale": 0.5}, "answers": ["no"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    parquet(tmp_path / "q.parquet", row)
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, ground_truth, extra_info=None):\n"
        "    return float(int(solution_str) == ground_truth and extra_info['scale'] == 0.5)\n"
    )
    function = Verifier("function", function=f"{tmp_path / 'reward.py'}:compute_score")
    for suffix in ("jsonl", "parquet"):
        path = str(tmp_path / f"q.{suffix}")
        (question,) = QuestionFile(path, answer="answer", meta=("info.scale", "answers")).load()
        assert function.grade(question, "4").correct
        assert Verifier("exact").grade(question, "4").correct
        assert Verifier("math").grade(question, "\\boxed{4}").correct
        assert question.meta["answers"] == ["no"]


def test_a_line_separator_inside_a_question_does_not_end_its_line(tmp_path):
    prompt = "first\u2028second\x0bthird\x85fourth"
    assert jsonl(tmp_path / "q.jsonl", (prompt, "1")).load()[0].prompt == prompt


def test_csv_is_read_as_written_with_dots_in_names_and_a_byte_order_mark(tmp_path):
    content = 'question,answer\r\n"What is 1,000 + 1?",1001\n"He said ""two"".\nWhat did he say?",2.50\n'
    first, second = text(tmp_path / "sums.csv", content, source=None).load()
    assert (first.prompt, first.answer, first.source, first.meta) == ("What is 1,000 + 1?", "1001", "sums", {"row": 0})
    assert (second.prompt, second.answer) == ('He said "two".\nWhat did he say?', "2.50")
    (tmp_path / "q.csv").write_text("\ufeffprompt,reward_model.ground_truth,data_source\n1+1?,2,sums\n")
    (question,) = QuestionFile(str(tmp_path / "q.csv")).load()
    assert (question.prompt, question.answer, question.source) == ("1+1?", "2", "sums")


def test_source_is_the_files_name_where_there_is_no_field(tmp_path):
    path, lines = tmp_path / "sums.jsonl", '{"question": "a", "answer": "1"}\n'
    lines += '{"question": "b", "answer": "1", "data_source": "given"}\n'
    assert [q.source for q in text(path, lines).load()] == ["sums", "given"]
    assert [q.source for q in text(path, lines, source=None).load()] == ["sums", "sums"]
    assert parquet(tmp_path / "chains.parquet", verl_row(), source=None).load()[0].source == "chains"
    row = {name: value for name, value in verl_row().items() if name != "data_source"}
    assert parquet(tmp_path / "mine.parquet", row).load()[0].source == "mine", "as in JSONL"
    assert text(tmp_path / "other.csv", "question,answer\na,1\n").load()[0].source == "other"


LOOK_ALIKE = [
    ("Add 1 23", "Add 12 3"),
    ("Reverse: Ab", "Reverse: aB"),
    ("if a:\n    b()\nc()", "if a:\n    b()\n    c()"),
    ("$5 ~ 3", "5 3"),
    ("Find $x^{2}$ for $x=2$.", "Find $x^2$ for $x = 2$"),
]


@pytest.mark.parametrize("pair", LOOK_ALIKE)
def test_questions_that_look_alike_both_stay_with_their_own_answers_and_neither_is_held_out(pair, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [(prompt, str(i)) for i, prompt in enumerate([*pair, "What is 7?"])]
    repeated = (" What is 7?\n", "2")
    source = jsonl(tmp_path / "q.jsonl", *rows, repeated)
    assert [(question.prompt, question.answer) for question in source.load()] == rows
    assert "3 questions, 1 repetitions merged" in caplog.text
    more = jsonl(tmp_path / "q.jsonl", *rows, repeated, ("What is 8?", "8"))
    (apart,) = replace(more, held_out=1, part="validation").load()
    assert apart.prompt not in pair


def test_the_same_text_with_other_columns_is_another_question(tmp_path):
    """The second row's options were lost."""
    rows = [{"prompt": "Which is prime?", "answer": "A", "options": options} for options in (["7", "8"], ["5", "6"])]
    path = tmp_path / "q.parquet"
    questions = parquet(path, *rows, answer="answer", meta=("options",)).load()
    assert [question.meta["options"] for question in questions] == [["7", "8"], ["5", "6"]]
    assert questions[0].id == Question.make("q", "Which is prime?", "A").id != questions[1].id
    other = replace(QuestionFile(str(path), answer="answer", meta=("options",)), limit=1)
    assert len(QuestionMix((other, QuestionFile(str(path), answer="answer", meta=("options",)))).load()) == 2
    assert len(parquet(path, *rows, answer="answer").load()) == 1, "of these columns alone it is a repetition"


def test_repetitions_with_different_answers_name_both_rows(tmp_path):
    rows = [verl_row(), verl_row("2+2?", "4"), verl_row(answer="3")]
    with pytest.raises(ValueError, match=r"q\.parquet: rows 0 and 2 .*'2' and '3'; remove the wrong one.*1\+1\?"):
        parquet(tmp_path / "q.parquet", *rows).load()
    with pytest.raises(ValueError, match="lines 1 and 2"):
        jsonl(tmp_path / "q.jsonl", ("a", 1), (" a ", 2)).load()


def test_held_out_questions_are_never_trained_on_and_are_the_same_in_whatever_order_they_come(tmp_path):
    """T12: the validation set is disjoint by construction."""
    rows = [(f"q{i}", "1") for i in range(20)]
    parts = {}
    for folder, order in ((tmp_path / "a", rows), (tmp_path / "b", rows[::-1])):
        folder.mkdir()
        for part in ("train", "validation"):
            source = replace(jsonl(folder / "q.jsonl", *order), held_out=6, part=part)
            parts[folder.name, part] = [question.prompt for question in source.load()]
    assert len(parts["a", "validation"]) == 6
    assert sorted(parts["a", "train"] + parts["a", "validation"]) == sorted(prompt for prompt, _ in rows)
    assert parts["a", "validation"] != [f"q{i}" for i in range(6)]
    assert sorted(parts["a", "validation"]) == sorted(parts["b", "validation"])
    with pytest.raises(ValueError, match=r"20 questions; QuestionFile\.held_out = 20 leaves none to train on"):
        replace(jsonl(tmp_path / "q.jsonl", *rows), held_out=20, part="train").load()


def test_limit_counts_distinct_questions_and_looks_no_further(tmp_path):
    lines = '{"question": "a", "answer": 1}\n' * 2 + '{"question": "b", "answer": 1}\nnot JSON\n'
    assert [q.prompt for q in text(tmp_path / "q.jsonl", lines, limit=2).load()] == ["a", "b"]


def test_a_torn_parquet_file_is_named(tmp_path):
    config = parquet(tmp_path / "q.parquet", verl_row())
    content = Path(config.path).read_bytes()
    for torn in (content[:-20], b"", b"PAR1 and no more", content[:40] + bytes(200) + content[240:]):
        Path(config.path).write_bytes(torn)
        with pytest.raises(ValueError, match=r"q\.parquet: cannot be read as parquet .*make it again"):
            config.load()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("prompt", ["question", "problem", "prompt", "input"])
@pytest.mark.parametrize("answer", ["answer", "solution", "final_answer", "ground_truth", "gold"])
def test_common_columns_are_recognised_and_said(suffix, prompt, answer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path, row = tmp_path / f"q.{suffix}", {prompt: "1+1?", answer: "1 and 1 are 2\n#### 2,000", "level": "1"}
    if suffix == "parquet":
        parquet(path, row)
    elif suffix == "jsonl":
        path.write_text(f"\ufeff{json.dumps(row)}\n")
    else:
        path.write_text(f'{prompt},{answer},level\n1+1?,"{row[answer]}",1\n')
    (question,) = QuestionFile(str(path)).load()
    assert (question.prompt, question.answer, question.source) == ("1+1?", "2000", "q")
    assert f"questions are read from column {prompt!r} and answers from {answer!r}; QuestionFile.prompt" in caplog.text
    (as_bound,) = QuestionFile(str(path), prompt=prompt, answer=answer).load()
    assert as_bound.answer == row[answer]


SEVERAL = {"problem": "1+1?", "question": "1+1?", "gold": "2", "answer": "2"}
MISSING = (
    r"q\.parquet: no column 'prompt' and no 'reward_model\.ground_truth' and no 'tests', there are problem, question, "
    r"gold, answer; set QuestionFile\.prompt \(problem or question\) and "
    r"QuestionFile\.answer \(gold or answer\) and QuestionFile\.meta"
)
GOOD = b'{"question": "a", "answer": "1"}\n'
BOUND = {"prompt": "question", "answer": "answer"}
FOLDER = object()
PROMPTS = {
    "7": "a prompt is text or a list",
    "null": "a prompt is text or a list",
    "[]": "a prompt is text or a list",
    '" "': "is empty",
    '["hello"]': "has the message 'hello'",
    '[{"role": "user"}]': "a message is",
    '[{"role": "user", "content": 7}]': "a message is",
    '[{"role": "user", "content": "a", "name": "b"}]': "a message is",
    '[{"role": "user", "content": ""}]': "ends in an empty message",
}
NO_FIELD = r"no column 'answer', there are question, gold; set QuestionFile\.answer"
LINES = [  # what a line holds, and what is said of it
    (GOOD + b'{"question": \n', "line 2: not JSON"),
    (GOOD + b"\n" + GOOD, "line 2: an empty line is no row; remove it"),
    (b'{"question": "a", "answer": "0", "answer": "1"}\n', "line 1: not JSON: 'answer' stands twice in an object"),
    (GOOD + b"[" * 10**5 + b"]" * 10**5 + b"\n", "line 2: not JSON"),
    (b'{"question": "a", "answer": NaN}\n', "line 1: not JSON: NaN is no JSON number"),
    (b"[1]\n", "line 1: a row is an object"),
    (GOOD + b'{"question": "\xff', r"line 2: not UTF-8.*was it written to the end"),
    (b'{"question": "a", "gold": "1"}\n', NO_FIELD),
    *(
        (f'{{"question": {prompt}, "answer": 1}}\n'.encode(), f"line 1: field 'question' .*{message}")
        for prompt, message in PROMPTS.items()
    ),
    *(
        (f'{{"question": "a", "answer": {gold}}}\n'.encode(), "line 1: field 'answer' is .* a gold answer is text")
        for gold in ("null", "true", '""', "[null]", "1e999")
    ),
    (b"", "holds no questions"),
    (GOOD + b'{"question": "b\\ud800", "answer": "1"}\n', r"line 2: '\\ud800' is half a character"),
    (GOOD + b'{"question": "b", "answer": "\\udfff"}\n', r"line 2: '\\udfff' is half a character"),
]
CSV = [
    (b"question,answer\na,1\nb,2,3\n", r", row 1 \(ends in line 3\): 3 values for the 2 columns"),
    (b"question,gold\na,1\n", f": {NO_FIELD}"),
    (b'question,answer\n"a,1\n', r", row 0 .*not CSV.*was it written to the end"),
    (b"question,question\na,1\n", ": the header names a column twice"),
    (b"question,answer\na,\n", r", row 0: field 'answer' is ''; a gold answer is text"),
    (b"question,answer\n", " holds no questions"),
    (b"", ": the file has no header"),
    (b"\n", ": the file has no header"),
    (b"question,answer\nna\xefve?,1\n", r", line 2: not UTF-8; save the file as UTF-8"),
]
REFUSED = [  # the file; its bytes, a row of a parquet file, FOLDER or None (no such file); settings; what is said
    ("q.parquet", verl_row(), {"answer": "gold"}, r"no column 'gold', there are .*prompt.*ground_truth.*\.answer"),
    ("q.parquet", verl_row(), {"answer": "reward_model.gold"}, r"no column 'reward_model\.gold'"),
    ("q.parquet", verl_row(), {"source": "set"}, r"no column 'set'.*QuestionFile\.source \(None: the set's own name\)"),
    ("q.parquet", SEVERAL, {"meta": ("tests",)}, MISSING),
    *(
        ("q.parquet", verl_row(answer=gold), {}, r"row 0: field 'reward_model\.ground_truth' is")
        for gold in (float("nan"), None)
    ),
    ("folder", FOLDER, {}, r"/folder: this is a folder, not a file \(QuestionFile\.path\)"),
    ("folder.jsonl", FOLDER, {}, r"/folder\.jsonl: this is a folder, not a file"),
    ("nowhere.jsonl", None, {}, r"nowhere\.jsonl: no such file"),
    ("q.parquet.gz", b"", {}, r"q\.parquet\.gz: a file .* ends in .*, not '\.gz'; unpack it with gunzip"),
    ("q.txt", b"", {}, r"ends in \.parquet, \.jsonl, \.json, \.csv or \.tsv, not '\.txt'"),
    (
        "openai",
        None,
        {},
        r"no such file .*; a set of the hub is Work\.questions = @QuestionHub\(\) with QuestionHub\.id",
    ),
    *(("q.jsonl", content, BOUND, rf"q\.jsonl(:|,)? {message}") for content, message in LINES),
    *(("q.csv", content, {**BOUND, "source": None}, rf"q\.csv{message}") for content, message in CSV),
]


@pytest.mark.parametrize(("name", "content", "fields", "message"), REFUSED)
def test_a_file_that_cannot_be_used_is_named_with_its_line_or_column(tmp_path, name, content, fields, message):
    path = tmp_path / name
    if content is FOLDER:
        path.mkdir()
    elif isinstance(content, dict):
        pq.write_table(pa.Table.from_pylist([content]), path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        QuestionFile(str(path), **fields).load()


def test_numbers_in_parquet_are_answers(tmp_path):
    assert [parquet(tmp_path / "q.parquet", verl_row(answer=x)).load()[0].answer for x in (204, 0.5)] == [204, 0.5]


def test_fingerprint_depends_on_the_questions_and_their_order(tmp_path):
    one, two = parquet(tmp_path / "q.parquet", verl_row(), verl_row("2+2?", "4")).load()
    assert fingerprint([one, two]) == fingerprint(iter([one, two])) != fingerprint([two, one])
    assert len({fingerprint(questions) for questions in ([], [one], [two])}) == 3


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_fields_kept_as_meta_reach_the_verifier(suffix, tmp_path):
    """Options by their texts: without them 'Paris' is no letter."""
    path = tmp_path / f"cities.{suffix}"
    row = {"question": "Capital of France?", "answer": "B", "extra": {"options": ["Rome", "Paris"]}}
    path.write_text(json.dumps(row) + "\n") if suffix == "jsonl" else parquet(path, row)
    fields = {"prompt": "question", "answer": "answer", "source": None}
    (question,) = QuestionFile(str(path), **fields, meta=("extra.options",)).load()
    assert question.meta["options"] == ["Rome", "Paris"]
    assert Verifier("choice").grade(question, "The answer is \\boxed{Paris}.").correct
    with pytest.raises(ValueError, match=r"no (field|column) 'extra\.tests'.*QuestionFile\.meta"):
        QuestionFile(str(path), **fields, meta=("extra.tests",)).load()


def test_the_papers_validation_set_loads(caplog, shared_data):
    caplog.set_level(logging.INFO)
    questions = QuestionFile(str(shared_data / "exgrpo_valid.parquet")).load()
    assert len(questions) == len({question.id for question in questions}) == 1590
    assert "1590 questions, 669 repetitions merged" in caplog.text  # 2,259 rows
    assert {q.source for q in questions} == {"aime", "aime25", "amc", "math", "minerva", "olympiad_bench"}
    assert all(role in ("system", "user") for question in questions for role, _ in question.prompt)
