"""Questions whose prompt holds their solution are refused, and the remedy that the message names works."""

from __future__ import annotations

import json
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.catalogue import PUBLIC_SETS
from exgrpo_orlhf.questions.prepare import convert, prepare
from exgrpo_orlhf.questions.question_files import read_rows

USER, DONE, FORM = "What is {i}*100 + 37?", "<think>\n{i}00 and 37</think>\n", "Put the answer in \\boxed{{}}."
RIGHT, WRONG = "{gold}", "{other}"


def rows(turns, n, solved):
    """n rows in OpenR1's columns. turns: contents of the messages, of the user and of the assistant by turns, in which
    {sign} is the gold answer in the first `solved` rows and another number in the others."""
    table = []
    for i in range(1, n + 1):
        gold, other = 100 * i + 37, 100 * i + 38
        values = {"i": i, "gold": gold, "sign": gold if i <= solved else other}
        contents = [turn.format(**values) for turn in turns]
        messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(contents)]
        table.append({"problem": USER.format(i=i), "answer": str(gold), "messages": messages})
    return table


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("turns", "n", "solved"),
    [
        ((USER, DONE + "So it is \\boxed{{{sign}}}."), 1, 1),
        ((USER, DONE + "So it is \\boxed{{{sign}}}."), 9, 9),
        ((USER, DONE + "So it is \\boxed{{{sign}}}.\n\nAnything else?"), 9, 6),  # of the others the solution is wrong
        ((USER, "The answer is {sign}."), 9, 9),
        ((USER, "{sign}"), 9, 9),
        ((USER, "{i}00 + 37 = <<{i}00+37={sign}>>{sign}\n#### {sign}"), 9, 9),
        ((f"{USER} {FORM}", "It is {sign}, because {i}00 + 37 is that.\n\nAnything else?"), 9, 9),
        ((USER + "\n\nSolution: that is \\boxed{{{sign}}}.",), 9, 9),
        (
            (f"{USER} {FORM} For example \\boxed{{{{5}}}}.\nIt is \\fbox{{{{sign}}}}".replace("{{sign}}", "{sign}"),),
            9,
            9,
        ),
        ((USER + "\n#### {sign}",), 9, 9),
        ((USER, "That is $\\boxed{{{sign}}}$.", "Are you sure?"), 9, 9),
    ],
)
def test_a_solution_in_the_prompt_is_refused_and_the_remedies_work(turns, n, solved, suffix, tmp_path):
    path, table = tmp_path / f"q.{suffix}", rows(turns, n, solved)

    def load(table, prompt) -> list:
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(table), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table))
        return QuestionFile(str(path), prompt=prompt, answer="answer", source=None).load()

    with pytest.raises(
        ValueError, match=rf"(line 1|row 0): {solved} of {n} prompts, this one first, (end|have)"
    ) as error:
        load(table, "messages")
    binding, column = re.search(r"set (\S+) = '(\w+)', or leave that part of 'messages' out", str(error.value)).groups()
    assert binding == "QuestionFile.prompt"
    assert len(load(table, column)) == n
    for row in table:
        row["messages"] = [{"role": "user", "content": row["problem"]}]
    assert len(load(table, "messages")) == n


@pytest.mark.parametrize(
    ("turns", "n", "solved"),
    [
        ((USER,), 9, 0),
        ((f"{USER} {FORM}",), 9, 0),
        ((USER, "<think>\n"), 9, 0),  # a response that has begun
        ((USER, "Step 137:"), 9, 0),
        ((USER, DONE + "\\boxed{{"), 9, 0),
        ((USER, "Of 137, 237, 337, 437, 537, 637, 737, 837 and 937 it is"), 9, 0),  # the same one for every question
        ((USER, DONE + "It is {sign}."), 9, 2),  # a hint that ends in the answer now and then
        ((USER, "{i}00 + 30 is"), 9, 0),
        ((USER + " Fill in \\boxed{{{sign}}}!",), 9, 3),  # a few rows
        ((USER + " Fill in \\boxed{{{sign}}}!",), 30, 10),
        (("What is 130 + 7?", "\\boxed{{137}}", USER), 9, 0),  # an example with the answer of the first row
        ((USER + " For example \\boxed{{137}}, or #### 237.",), 9, 0),
    ],
)
def test_what_a_prompt_may_hold_is_read(turns, n, solved, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(turns, n, solved)))
    assert len(QuestionFile(str(path), prompt="messages", answer="answer", source=None).load()) == n


@pytest.mark.parametrize(
    "form", ["Write \\boxed{yes} or \\boxed{no}.", "For example \\boxed{yes}.", "#### yes\n#### no"]
)
def test_labels_that_every_prompt_names_are_no_solution(form, tmp_path):
    def load(shown) -> list:
        golds = ["yes" if i % 3 else "no" for i in range(30)]
        table = [{"prompt": f"Is {i}^2 even? {shown(gold)}", "answer": gold} for i, gold in enumerate(golds)]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        return QuestionFile(str(tmp_path / "q.jsonl"), answer="answer").load()

    assert len(load(lambda gold: form)) == 30
    with pytest.raises(ValueError, match=r"30 of 30 prompts, this one first, have in a box"):
        load(lambda gold: f"\\boxed{{{gold}}}")


@pytest.mark.parametrize(
    ("gold", "shown"),
    [
        ("1234567", "1,234,567"), ("1,234", "1234"), ("\\frac12", "\\frac 12"), ("$\\boxed{135}$", "135"),
        ("It is 135.\n#### 135", "135"), (135.0, "135"),
    ],
)  # fmt: skip
def test_another_spelling_of_the_answer_is_the_answer_too(gold, shown, tmp_path):
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": f"\\boxed{{{shown}}}"}]
    (tmp_path / "q.jsonl").write_text(json.dumps({"messages": messages, "answer": [gold, "7"]}) + "\n")
    with pytest.raises(ValueError, match="line 1: 1 of 1 prompts, this one first, end in a turn of the assistant"):
        QuestionFile(str(tmp_path / "q.jsonl"), prompt="messages", answer="answer", source=None).load()


def test_a_public_set_whose_questions_hold_the_solution_is_not_prepared(tmp_path, monkeypatch):
    table = [
        {"prompt": f"{row['problem']} \\boxed{{{row['answer']}}}", "solution": row["answer"]} for row in rows((), 9, 9)
    ]
    monkeypatch.setattr("exgrpo_orlhf.questions.prepare.load_table", lambda *_: datasets.Dataset.from_list(table))
    (copies := tmp_path / "copies" / PUBLIC_SETS["dapo"].id).mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"by the entry 'dapo' in exgrpo_orlhf/questions/catalogue.py: .*9 of 9 prompts"
    ):
        prepare(PUBLIC_SETS["dapo"], tmp_path / "out", tmp_path / "copies", any_rows=True)
    assert copies.exists()
    assert not [*(tmp_path / "out").glob("*.parquet")]


def test_what_is_prepared_holds_no_solution(tmp_path):
    """Of rows in verl's layout the user's last message is the question, whatever follows."""
    table = rows((USER, "It is \\boxed{{{sign}}}."), 9, 9)
    verl = [{"prompt": row["messages"], "reward_model": {"ground_truth": row["answer"]}} for row in table]
    prepared, _ = convert(PUBLIC_SETS["openr1"], verl)
    pq.write_table(pa.Table.from_pylist(prepared), tmp_path / "q.parquet")
    assert [row["prompt"][-1]["role"] for row in read_rows(tmp_path / "q.parquet", ())] == ["user"] * 9
    assert len(QuestionFile(str(tmp_path / "q.parquet")).load()) == 9
