"""A response that begins inside a thought, and tags that are special tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from eval_builders import HERE, definition, samples
from replay_builders import rollout
from run_builders import byte_tokenizer, rows, train_small

from exgrpo_orlhf.engines.engine import Engine
from exgrpo_orlhf.environments import playing
from exgrpo_orlhf.evaluation import responses
from exgrpo_orlhf.evaluation.responses import Response
from exgrpo_orlhf.explore.run_page import decoder
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts, opens_thought
from exgrpo_orlhf.questions.special_tokens import response_text
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier, Written
from exgrpo_orlhf.sampling import Request

BOX = "\\boxed{2}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "response", "verdict"),
    [
        ("math", BOX, "no_answer"),
        ("math", f"{BOX}</think>", "no_answer"),
        ("math", f"so</think>{BOX}", "correct"),
        ("math", f"3</think><think>\\boxed{{3}}</think> {BOX}", "correct"),
        ("math_verify", BOX, "no_answer"),
        ("math_verify", f"\\boxed{{3}}</think>{BOX}", "correct"),
        ("exact", "2", "no_answer"),
        ("exact", "so</thinking>\n2", "correct"),
    ],
)
def test_behind_a_prompt_that_opens_a_thought_the_answer_begins_after_it(kind, response, verdict):
    question = Question.make("t", "1+1?", "2")
    verifier = Verifier(kind, workers=1, format="boxed" if kind == "math" else None)
    [opened, closed] = verifier.grade_all([(question, Written(response, inside)) for inside in (True, False)])
    assert opened.verdict == verdict
    assert closed == verifier.grade(question, response)


def test_a_users_function_gets_the_thought_too(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [len(queries[0])]\n")
    verifier = Verifier("function", function=f"{tmp_path}/reward.py", workers=1)
    assert verifier.grade_all([(Question.make("t", "", "2"), Written("still thinking", True))])[0].reward == 14


def test_a_prompt_opens_a_thought_at_its_end_or_in_the_turn_that_the_response_goes_on_with(thinking):
    encoder = PromptEncoder(Prompts("chat", chat_template_from=str(thinking)), byte_tokenizer())
    assert encoder.opens_thought(Question.make("t", "1+1?", "2"))
    assert not PromptEncoder(Prompts("chat"), byte_tokenizer()).opens_thought(Question.make("t", "Use <think>.", "2"))
    begun = lambda text: opens_thought(text, [("user", "1+1?"), ("assistant", text)])
    assert begun("<think>\nOne and")
    assert not begun("<think>\nOne and one.</think> It is")
    assert not opens_thought("Use <think> and </think>. Answer:")


@pytest.mark.slow
@pytest.mark.parametrize(("text", "verdict"), [(BOX, "no_answer"), (f"so</think>{BOX}", "correct")])
def test_training_validation_and_benchmarks_see_no_answer_in_an_unfinished_thought(
    text, verdict, byte_model, thinking, bench, tmp_path, monkeypatch
):
    monkeypatch.setattr(Engine, "decode", lambda self, ids: text)
    for module in (responses, playing):
        monkeypatch.setattr(module, "response_text", lambda tokenizer, ids: text)
    for name, sign in (("rows", "+"), ("validation", "-")):
        lines = [{"prompt": f"{i}{sign}1?", "answer": "2"} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    bindings = (
        *("Work.questions = @QuestionFile()", "Work.validation = @validation/QuestionFile()", "Verifier.kind = 'math'"),
        f"validation/QuestionFile.path = '{tmp_path}/validation.jsonl'",
        *(f"QuestionFile.path = '{tmp_path}/rows.jsonl'", "QuestionFile.answer = 'answer'"),
        *("QuestionFile.source = None", "Prompts.max_tokens = 400", "MAX_RESPONSE_TOKENS = 2"),
        *("train.steps = 1", "train.questions_per_step = 2", "train.group_size = 2", "train.eval_every = 1"),
        *("Prompts.template = 'chat'", f"Prompts.chat_template_from = '{thinking}'", "Evaluation.disjoint_from = None"),
    )
    train_small(byte_model, tmp_path / "run", *bindings)
    right = float(verdict == "correct")
    assert rows(tmp_path / "run")[-1]["reward/pass_at_1"] == right
    assert {each["verdict"] for each in samples(tmp_path / "run" / "evaluation" / "1", "validation")} == {verdict}
    block = definition(tmp_path, verifier='"math"')
    (tmp_path / "mine.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    words = ("--definitions", block, "--benchmarks", "mine", *HERE, "--max-tokens", 2, "--out", tmp_path / "out")
    bench("--model", tmp_path / "run" / "checkpoint-1", *words)
    [line] = samples(tmp_path / "out", "mine")
    assert (line["verdict"], line["plain"], line["response"]) == (verdict, verdict, text)
    bench("regrade", tmp_path / "out")
    assert samples(tmp_path / "out", "mine") == [line]


def test_tags_that_are_special_tokens_are_seen_and_end_and_padding_are_not(tmp_path):
    text = "<think>1+1</think><answer>2</answer>"
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<answer>", "</answer>", "<x>"]})
    ids = np.array([*tokenizer(f"{text}<x>")["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id], np.int32)
    assert len(ids) == 4 + 3 + 1 + 3
    tokenizer.save_pretrained(tmp_path)
    response = Response.of(Request((), 0, 1, 1.0), rollout("wrong", ids), tokenizer)
    assert text == response.text == response.written.text == decoder(tmp_path)(ids)
    assert Verifier("exact", format="think_answer").grade(Question.make("t", "", text), response.text).correct
    plain = byte_tokenizer()
    assert response_text(plain, ids[:-5]) == plain.decode(ids[:-5].tolist(), skip_special_tokens=True)
