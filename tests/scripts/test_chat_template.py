"""scripts/chat_template.py: a file for Prompts.chat_template_from, with the layout of the paper's prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_builders import byte_tokenizer

from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question

SYSTEM, QUESTION = "Think «aloud»,\nthen \\boxed{1}.", 'Here "is" it: {question}\nHelper: <think>\n'
ROW = Question.make("", (("system", "Be brief."), ("user", "1 + 1 {x}?")), "2")


@pytest.fixture
def write_template(run_script, tmp_path):
    def write(question: str, encoding: str = "utf-8"):
        (tmp_path / "system.txt").write_text(f"{SYSTEM}\n", encoding=encoding)
        (tmp_path / "question.txt").write_text(f"{question}\n", encoding=encoding)
        words = ["--system", tmp_path / "system.txt", "--question", tmp_path / "question.txt"]
        return run_script("chat_template.py", *words, "--out", tmp_path / "paper.jinja")

    return write


def test_the_file_writes_the_texts_around_a_question_as_they_stand(write_template, tmp_path):
    assert write_template(QUESTION).returncode == 0
    settings, tokenizer = Prompts("chat", chat_template_from=str(tmp_path / "paper.jinja")), byte_tokenizer()
    (tmp_path / "paper.jinja").rename(tmp_path / "elsewhere")  # it is read once, so no other machine needs it
    encoder = PromptEncoder(settings, tokenizer)
    ending = 'Here "is" it: 1 + 1 {x}?\nHelper: <think>\n'
    assert encoder.render(ROW) == f"Be brief.\n{ending}"
    assert encoder.render(replace(ROW, prompt="1 + 1 {x}?")) == f"{SYSTEM}\n{ending}"
    assert tokenizer.decode(encoder.encode(ROW)) == f"Be brief.\n{ending}"
    assert encoder.turn_ends() == (tokenizer.eos_token_id,)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert PromptEncoder(Prompts("chat"), tokenizer).fingerprint() == encoder.fingerprint()


@pytest.mark.parametrize("question", ["no place", "{question} {question}"])
def test_a_text_without_one_place_for_the_question_is_refused(write_template, tmp_path, question):
    done = write_template(question)
    assert (done.returncode, r"question.txt: a text with {question} once is needed" in done.stderr) == (2, True)
    assert not (tmp_path / "paper.jinja").exists()


def test_a_byte_order_mark_is_no_part_of_a_text_and_other_bytes_are_refused_with_their_file(write_template, tmp_path):
    assert write_template(QUESTION, "utf-8-sig").returncode == 0
    assert "\ufeff" not in (tmp_path / "paper.jinja").read_text(encoding="utf-8")
    (tmp_path / "paper.jinja").unlink()
    done = write_template(QUESTION, "latin-1")
    assert (done.returncode, "system.txt, line 1: not UTF-8" in done.stderr) == (2, True)


def test_a_file_whose_template_leaves_the_question_out_is_refused(tmp_path):
    (tmp_path / "mine.jinja").write_text("{# nothing #} Hello", encoding="utf-8")
    with pytest.raises(ValueError, match=r"chat_template_from = .* it leaves the question out"):
        PromptEncoder(Prompts("chat", chat_template_from=str(tmp_path / "mine.jinja")), byte_tokenizer())
