"""Reward functions as the documents of OpenRLHF, TRL and verl show them give here what they give in their own tool.

The numbers stand here by hand. Where TRL or OpenRLHF is installed, its own reward step gives them too.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
from run_builders import byte_tokenizer

from exgrpo_orlhf.environments.playing import written_to
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.questions.reading import text_key
from exgrpo_orlhf.records import Question, Rollout
from exgrpo_orlhf.rewards import GradingError, Verifier, close_pools
from exgrpo_orlhf.rewards.other_tools import rewards_of
from exgrpo_orlhf.rewards.sandbox import function

# The gold answer stands in the question too.
TEXT, CHAT = "2+3, is it 5 or 6?", (("system", "Be brief."), ("user", "2+3, is it 5 or 6?"))
META = {"row": 0, "level": 3, "options": ["5", "6"], "extra_info": {"difficulty": 2, "index": 7}}
RESPONSES = ("5", "6 it is", "<b>5</b> it is")
TRUNCATED = "so 5"
NAN = None

OPENRLHF = {
    "the whole text": ("return [float('5' in queries[0])]", [1, 1, 1, 1]),
    "behind the prompt": ("return [float(labels[0] in queries[0][len(prompts[0]):])]", [1, 0, 1, 1]),
    "behind the assistant's mark": ("return [float('5' in queries[0].split('<|assistant|>')[-1])]", [1, 0, 1, 1]),
    "the prompt has its template": ("return [float(prompts[0].startswith('<|user|>2+3'))]", [1, 1, 1, 1]),
    "an end token": ("return [float(queries[0].endswith('<|endoftext|>'))]", [1, 1, 1, 0]),
    "equal to the label": (
        "return [float(queries[0][len(prompts[0]):].replace('<|endoftext|>', '') == labels[0])]", [1, 0, 0, 0]),
    "a length": ("return [len(queries[0]) - len(prompts[0])]", [14, 20, 27, 4]),
    "a dict with scores": ("return {'rewards': [0.5], 'scores': [float('it' in queries[0][40:])]}", [0.5] * 4),
    "a tensor": (
        "import torch; return {'rewards': torch.tensor([float(len(q)) for q in queries])}", [53, 59, 66, 43]),
    "keywords": ("import numpy; return {'rewards': numpy.ones(len(queries)) / 4}", [0.25] * 4),
}  # fmt: skip
TRL = {
    "a column": ("level, **_", "return [float(a in c) for a, c in zip(map(str, [5] * 4), completions)]", [1, 0, 1, 1]),
    "a number's column": ("level, **_", "return [float(x) / 2 for x in level]", [1.5] * 4),
    "a list's column": ("options, **_", "return [float(o[0] in c) for o, c in zip(options, completions)]",
                        [1, 0, 1, 1]),
    "a dict's column": ("extra_info, **_", "return [e['difficulty'] for e in extra_info]", [2] * 4),
    "the shortest of the group": (
        "**_", "m = min(map(len, completions)); return [float(len(c) == m) for c in completions]", [1, 0, 0, 0]),
    "a rank in the group": (
        "**_", "s = sorted(map(len, completions)); return [s.index(len(c)) for c in completions]", [0, 2, 3, 1]),
    "prompts": ("prompts, **_", "return [float(p == '2+3, is it 5 or 6?') for p in prompts]", [1] * 4),
    "ids": ("completion_ids, **_", "return [len(ids) for ids in completion_ids]", [2, 8, 15, 4]),
    "a schedule": ("trainer_state, **_", "return [trainer_state.global_step / 10] * len(completions)", [0.4] * 4),
    "some abstain": ("**_", "return [None if 'it' in c else 1.0 for c in completions]", [1, NAN, NAN, 1]),
    "a metric": ("log_metric, **_", "log_metric('words', 3.0); return [0.0] * len(completions)", [0] * 4),
    "a table": ("log_extra, **_", "log_extra('n', [len(c) for c in completions]); return [0.0] * 4", [0] * 4),
    "a format": ("**_", "import re; return [0.5 * bool(re.fullmatch('<b>.*</b>.*', c)) for c in completions]",
                 [0, 0, 0.5, 0]),
    "a regular number": ("**kwargs", "return [-len(set(c)) / 10 for c in completions]", [-0.1, -0.5, -0.9, -0.4]),
}  # fmt: skip
TRL_CHAT = {
    "messages": ("**_", "return [float('5' in c[0]['content']) for c in completions]", [1, 0, 1, 1]),
    "the system turn": ("prompts, **_", "return [float(p[0]['role'] == 'system') for p in prompts]", [1] * 4),
    "the last turn": ("prompts, **_", "return [len(p[-1]['content']) for p in prompts]", [18] * 4),
}
VERL = {
    "a text": ("float(ground_truth in solution_str)", "5", [1, 0, 1, 1]),
    "an integer": ("float(ground_truth + 1 == 6)", 5, [1] * 4),
    "a float": ("float(type(ground_truth) is float and str(ground_truth) == '4.5')", 4.5, [1] * 4),
    "a list": ("float(solution_str in ground_truth)", ("5", "so 5"), [1, 0, 0, 1]),
    "extra_info": ("extra_info.get('difficulty', 1)", "5", [2] * 4),
    "an index": ("extra_info['index']", "5", [7] * 4),
    "turns": ("float(extra_info['num_turns'] is None)", "5", [1] * 4),
    "a source": ("{'gsm8k': 1.0}.get(data_source, 0.5)", "5", [0.5] * 4),
    "a dict": ("{'score': float('5' in solution_str), 'acc': 0.25, 'pred': solution_str}", "5", [1, 0, 1, 1]),
    "a negative": ("-1 if '6' in solution_str else 1", "5", [1, -1, 1, 1]),
    "a truth": ("ground_truth in solution_str", "5", [1, 0, 1, 1]),
}
ASYNC = {
    "gathered": ("**_", "import asyncio\n"
                 "    async def one(c): await asyncio.sleep(0.01); return float(len(c))\n"
                 "    return await asyncio.gather(*(one(c) for c in completions))", [1, 7, 14, 4]),
    "a lock of its loop": ("**_", "async with LOCK: return [float(id(asyncio.get_running_loop()) == FIRST[0])"
                           " if FIRST else FIRST.append(id(asyncio.get_running_loop())) or 1.0] * len(completions)",
                           [1] * 4),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_pools()


def pairs(question: Question) -> list:
    """The group: three responses with their end token, and one without."""
    tokenizer = byte_tokenizer()
    encoder = PromptEncoder(Prompts("chat"), tokenizer)
    ids = [np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32) for text in RESPONSES]
    ids.append(np.array(tokenizer(TRUNCATED)["input_ids"], np.int32))
    return [(question, written_to(encoder, question, Rollout(each, "stop"))) for each in ids]


def check(path, question: Question, expected, tool=None) -> list:
    """Called as a worker calls it, in this process."""
    verifier = Verifier("function", str(path))
    answers = [verifier.as_answer(one, written, (4, 20)) for one, written in pairs(question)]
    call = function.grading(str(path))
    calls = [answers] if call.calls == "group" else [[answer] for answer in answers]
    graded = [each for answers in calls for each in call.grade(answers)]
    assert [each.reward for each in graded] == pytest.approx(expected), [each.reason for each in graded]
    if tool is not None and importlib.util.find_spec(tool) is not None:
        [theirs] = rewards_of(tool, str(path), [answers])
        assert theirs == pytest.approx(expected), f"{tool} itself"
    return graded


@pytest.mark.parametrize("name", OPENRLHF)
def test_of_openrlhf(name, tmp_path):
    body, expected = OPENRLHF[name]
    more = "**kwargs" if name == "keywords" else ""
    path = tmp_path / "reward.py"
    body = body.replace("return [", "return {'rewards': [") + ("}" if body.startswith("return [") else "")
    path.write_text(f"def reward_func(queries, prompts, labels, {more}):\n    {body}\n")
    ray = importlib.util.find_spec("ray") is not None
    grades = check(path, Question.make("t", TEXT, "5", META), expected, "openrlhf" if ray else None)
    if name == "a dict with scores":
        assert [grade.verdict for grade in check(path, Question.make("t", TEXT, "5"), expected)] == [
            "wrong", "correct", "correct", "wrong"
        ]  # fmt: skip
    assert len(grades) == 4


@pytest.mark.parametrize("name", [*TRL, *TRL_CHAT, *ASYNC])
def test_of_trl(name, tmp_path):
    more, body, expected = {**TRL, **TRL_CHAT, **ASYNC}[name]
    begin = "import asyncio\nFIRST, LOCK = [], asyncio.Lock()\nasync " if name in ASYNC else ""
    (tmp_path / "reward.py").write_text(f"{begin}def f(completions, {more}):\n    {body}\n")
    question = Question.make("t", CHAT if name in TRL_CHAT else TEXT, "5", META)
    grades = check(f"{tmp_path}/reward.py:f", question, expected, "trl")
    if name == "a metric":
        assert [grade.logs for grade in grades] == [(("words", 3.0),)] * 4
    if name == "a table":
        assert [dict(grade.logs)["n"] for grade in grades] == [1, 7, 14, 4]


@pytest.mark.parametrize("name", VERL)
def test_of_verl(name, tmp_path):
    body, gold, expected = VERL[name]
    path = tmp_path / "reward.py"
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    path.write_text(f"{head}    return {body}\n")
    grades = check(f"{path}:compute_score", Question.make("t", TEXT, gold, META), expected)
    if name == "a dict":
        assert grades[0].logs == (("acc", 0.25),)


@pytest.mark.parametrize(("gets", "sizes"), [(None, [3, 3, 3]), ("group", [2, 2, 1])])
def test_verls_batch_managers_get_a_step_at_a_time_or_a_group(gets, sizes, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def scores(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(data_sources) == len(ground_truths) == len(extra_infos)\n"
        "    return [{'score': len(solution_strs), 'n': i} for i in range(len(solution_strs))]\n"
    )
    a, b = (Question.make("t", f"{i}?", "5") for i in range(2))
    verifier = Verifier("function", f"{path}:scores", gets=gets)
    grades = verifier.grade_all([(a, "5"), (a, "6"), (b, "5")])
    assert [grade.reward for grade in grades] == sizes


def test_trls_get_the_whole_batch_where_that_is_bound_and_a_column_of_another_tools_name(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def f(queries, completions, **_):\n    return [len(completions) + q for q in queries]\n")
    questions = [Question.make("t", f"{i}?", "5", {"queries": i}) for i in range(3)]
    asked = [(question, "5") for question in questions]
    with pytest.raises(GradingError, match="takes queries, completions"):
        Verifier("function", f"{path}:f").grade_all(asked)
    for gets, sizes in ((None, [1, 2, 3]), ("batch", [3, 4, 5])):
        grades = Verifier("function", f"{path}:f", tool="trl", gets=gets).grade_all(asked)
        assert [grade.reward for grade in grades] == sizes


def test_what_a_function_keeps_between_its_calls_is_kept_and_a_module_beside_it_is_found(tmp_path):
    (tmp_path / "a_helper.py").write_text("def seen(found=[]):\n    found.append(1)\n    return len(found)\n")
    (tmp_path / "reward.py").write_text(
        "from a_helper import seen\ndef reward_func(queries, prompts, labels):\n    return {'rewards': [seen()]}\n"
    )
    verifier = Verifier("function", f"{tmp_path}/reward.py")
    asked = [(Question.make("t", f"{i}?", "5"), "5") for i in range(20)]
    grades = verifier.grade_all(asked) + verifier.grade_all(asked)
    assert [grade.reward for grade in grades] == list(range(1, 41))


def test_a_group_on_which_a_function_hangs_has_no_rewards_and_the_others_have_theirs(tmp_path, caplog):
    path = tmp_path / "reward.py"
    path.write_text(
        "import time\ndef f(completions, **_):\n    while 'spin' in completions: time.sleep(0.01)\n"
        "    return [1.0] * len(completions)\n"
    )
    a, b = (Question.make("t", f"{i}?", "5") for i in range(2))
    verifier = Verifier("function", f"{path}:f", timeout=0.5, max_failed_share=1.0)
    grades = verifier.grade_all([(a, "5"), (a, "spin"), (b, "5")])
    assert [grade.verdict for grade in grades] == ["timeout", "timeout", "correct"]
    assert "not graded within 1 s" in caplog.text, "half a second for each of two"


def test_a_files_extra_info_reaches_verls_functions_and_makes_no_two_questions_of_one(tmp_path):
    questions = []
    for i, more in enumerate(({}, {"extra_info": {"difficulty": 3}})):
        rows = [{"prompt": "1+1?", "answer": "2", **more}, {"prompt": "1+1?", "answer": "2"}]
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        questions += QuestionFile(path=str(tmp_path / f"{i}.jsonl"), answer="answer", source=None).load()
    plain, informed = (replace(each, source="") for each in questions)  # one of each: the second row is the first's
    assert text_key(plain) == text_key(informed)
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return extra_info.get('difficulty', 1)\n"
    )
    verifier = Verifier("function", f"{path}:compute_score")
    assert [verifier.grade(each, "2").reward for each in (plain, informed)] == [1, 3]
