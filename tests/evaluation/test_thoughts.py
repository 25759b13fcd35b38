"""A response that begins inside a thought, and tags that are special tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from eval_builders import HERE, definition, samples, train_on_rows
from replay_builders import rollout
from run_builders import byte_tokenizer, rows
from thought_builders import OWN, TAGS

from exgrpo_orlhf.engines.engine import Engine
from exgrpo_orlhf.evaluation import responses
from exgrpo_orlhf.evaluation.responses import Response
from exgrpo_orlhf.grader.thoughts import opens_thought
from exgrpo_orlhf.io import tokenizer_file
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.questions.special_tokens import decoder, response_text
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier, Written, grading
from exgrpo_orlhf.sampling import Request
from exgrpo_orlhf.testbed.reasoning_gym import ReasoningGym

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
        *(("math", f"\\boxed{{3}}{end}{BOX}", "correct") for _, end in TAGS),
        ("math", f"\\boxed{{3}}{OWN[1]}{BOX}", "correct"),
    ],
)
def test_behind_a_prompt_that_opens_a_thought_the_answer_begins_after_it(kind, response, verdict):
    question = Question.make("t", "1+1?", "2")
    verifier = Verifier(kind, workers=1, format="boxed" if kind == "math" else None)
    [opened, closed] = verifier.grade_all([(question, Written(response, inside, tags=OWN)) for inside in (True, False)])
    assert opened.verdict == verdict
    assert closed == verifier.grade(question, Written(response, tags=OWN))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["math", "choice", "reasoning_gym"])
@pytest.mark.parametrize(("begin", "end"), [*TAGS, OWN, ("analysis", "assistantfinal")])
def test_nothing_before_a_thoughts_end_counts_and_a_cut_thought_has_no_answer(kind, begin, end):
    """("analysis", "assistantfinal"): what is left of gpt-oss' channels without special tokens."""
    right, wrong, question = "<answer>B</answer>", "<answer>A</answer>", Question.make("t", "?", "B")
    if kind == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        [question] = ReasoningGym("chain_sum", count=1).load()
        right = f"<answer>{question.answer}</answer>"
    verifier = Verifier(kind, workers=1)
    texts = (f"{begin}So {wrong}{end}{right}", f"{begin}So {right}{end}{wrong}", f"{begin}So {right}")
    grades = verifier.grade_all([(question, Written(text, tags=OWN)) for text in texts])
    assert [grade.verdict for grade in grades] == ["correct", "wrong", "no_answer"]


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
    for begin, end in [*TAGS, OWN]:
        assert opens_thought(f"1+1?{begin}\n", (), OWN)
        assert not opens_thought(f"1+1?{begin}\n\n{end}\n", (), OWN)
        assert opens_thought("", [("assistant", f"{begin}One and")], OWN)
        assert not opens_thought("", [("assistant", f"{begin}One and one.{end} It is")], OWN)
    assert not opens_thought(f"1+1?{OWN[0]}")


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "end"), [("<think>", "</think>"), OWN])
@pytest.mark.parametrize(("thought", "verdict"), [(None, "no_answer"), ("so", "correct")])
def test_training_validation_and_benchmarks_see_no_answer_in_an_unfinished_thought(
    begin, end, thought, verdict, byte_model, thinking, bench, tmp_path, monkeypatch
):
    text = BOX if thought is None else f"{thought}{end}{BOX}"
    monkeypatch.setattr(Engine, "decode", lambda self, ids: text)
    monkeypatch.setattr(responses, "response_text", lambda tokenizer, ids, *own: text)
    monkeypatch.setattr(grading, "response_texts", lambda tokenizer, several, *own: [text for _ in several])
    for name, sign in (("rows", "+"), ("validation", "-")):
        lines = [{"prompt": f"{i}{sign}1?", "answer": "2"} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    bindings = [
        *("Work.validation = @validation/QuestionFile()", "Verifier.kind = 'math'", "train.eval_every = 1"),
        *(f"validation/QuestionFile.path = '{tmp_path}/validation.jsonl'", "Evaluation.disjoint_from = None"),
    ]
    if begin == "<think>":
        bindings += ["Prompts.template = 'chat'", f"Prompts.chat_template_from = '{thinking}'"]
    else:
        bindings += [f"Prompts.template = '{{question}} {begin}'", f"Prompts.thought_tags = ('{begin}', '{end}')"]
    train_on_rows(byte_model, tmp_path / "run", rows(tmp_path / "rows.jsonl"), *bindings)
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
    own = ("--template", f"{{question}} {begin}", "--thought-tags", begin, end)  # of a model trained elsewhere
    bench("--model", byte_model, *own, *words[:-1], tmp_path / "other")
    assert samples(tmp_path / "other", "mine")[0]["verdict"] == verdict


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        *((begin.strip(), end) for begin, end in TAGS if "_solution|>" not in end and "_RESPONSE|>" not in end),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        OWN,
    ],
)
def test_tags_that_are_special_tokens_are_seen_and_end_and_padding_are_not(begin, end, tmp_path):
    own = OWN if (begin, end) == OWN else ()
    text = f"{begin}1+1{end}<answer>2</answer>"
    tokenizer = byte_tokenizer()
    parts = re.findall(r"<\|\w+\|>", begin + end) or [begin.removesuffix("thought"), end]
    tokens = dict.fromkeys([*parts, "<answer>", "</answer>", "<x>"])
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    ids = np.array([*tokenizer(f"{text}<x>")["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id], np.int32)
    tokenizer.save_pretrained(tmp_path)
    response = Response.of(Request((), 0, 1, 1.0), rollout("wrong", ids), tokenizer, tags=own)
    shown = re.sub(r"<\|(?:end|constrain)\|>", "", text)  # no part of gpt-oss' tags
    assert shown == response.text == response.written.text
    assert own or shown == decoder(tokenizer_file.load(tmp_path))(ids)
    assert Verifier("exact", format="think_answer").grade(Question.make("t", "", shown), response.written).correct
    plain = byte_tokenizer()
    assert response_text(plain, ids[:-5]) == plain.decode(ids[:-5].tolist(), skip_special_tokens=True)
