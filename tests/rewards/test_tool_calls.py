"""Reward functions as the documents of OpenRLHF, TRL and verl show them give here what they give in their own tool.

The numbers stand here by hand. Where a tool is installed, its own reward step gives them too.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from other_tools import NotInstalled, check_installed, rewards_of
from run_builders import byte_tokenizer

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.grader.grade import Grade, Message
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question, Rollout, RolloutGroup
from exgrpo_orlhf.rewards import Verifier, Written, kinds
from exgrpo_orlhf.rewards.grading import written_to
from exgrpo_orlhf.rewards.pool import Pool
from exgrpo_orlhf.rewards.protocol import single
from exgrpo_orlhf.workers.fork_server import close_workers

# The gold answer stands in the question too.
TEXT, CHAT = "2+3, is it 5 or 6?", (("system", "Be brief."), ("user", "2+3, is it 5 or 6?"))
# Each ends in the end token, but for the last one, which was cut off: 2, 8, 15 and 4 tokens.
RESPONSES = ("5", "6 it is", "<b>5</b> it is", "so 5")
META = {"row": 0, "solution": "5", "level": 3, "weight": 0.5, "options": ["5", "6"], "spec": {"unit": "m"}}
META["extra_info"] = {"difficulty": 2, "index": 7}
NONE = None


class Case(NamedTuple):
    """rewards: by hand, of the four responses; meta: besides META; logs, verdicts: of the four too, where they are more
    than the reward says; alike: whether the tool itself gives the same"""

    source: str
    rewards: list[Any]
    gold: Any = "5"
    prompt: str | tuple[Message, ...] = TEXT
    meta: Mapping[str, Any] | None = None
    logs: Sequence[Mapping[str, float]] | None = None
    verdicts: list[str] | None = None
    alike: bool = True

    @property
    def question(self) -> Question:
        return Question.make("openai/gsm8k", self.prompt, self.gold, META if self.meta is None else self.meta)


OPENRLHF_HEAD = (
    "def reward_func(queries, prompts, labels):\n    query, prompt, label = queries[0], prompts[0], labels[0]\n"
)
OPENRLHF = {
    "the whole text": Case("    return {'rewards': [float(label in query)]}", [1, 1, 1, 1]),
    "behind the prompt": Case("    return {'rewards': [float(label in query[len(prompt):])]}", [1, 0, 1, 1]),
    "behind the assistant's mark": Case(
        "    return {'rewards': [float(label in query.split('<|assistant|>')[-1])]}", [1, 0, 1, 1]),
    "the prompt has its template": Case(
        "    return {'rewards': [float(prompt == '<|user|>2+3, is it 5 or 6?<|assistant|>')]}", [1, 1, 1, 1]),
    "the prompt has its messages": Case(
        "    return {'rewards': [float(prompt.startswith('<|system|>Be brief.<|user|>2+3'))]}", [1] * 4, prompt=CHAT),
    "an end token": Case("    return {'rewards': [0.0 if query.endswith('<|endoftext|>') else -1.0]}", [0, 0, 0, -1]),
    "equal to the label": Case(
        "    answer = query[len(prompt):].replace('<|endoftext|>', '').strip()\n"
        "    return {'rewards': [float(answer == label)]}", [1, 0, 0, 0]),
    "a label that is a number": Case(
        "    return {'rewards': [label + 0.5 if isinstance(label, int) else 0.0]}", [5.5] * 4, gold=5),
    "a label that is a list": Case(
        "    answer = query[len(prompt):].replace('<|endoftext|>', '')\n"
        "    return {'rewards': [float(answer in label)]}", [1, 0, 0, 1], gold=("5", "so 5")),
    "a label that is a float": Case("    return {'rewards': [float(str(label) == '4.5')]}", [1] * 4, gold=4.5),
    "scores beside rewards": Case(
        "    return {'rewards': [0.5], 'scores': [float('it' in query[len(prompt):])]}", [0.5] * 4,
        verdicts=["wrong", "correct", "correct", "wrong"]),
    "extra_logs": Case(
        "    return {'rewards': [1.0], 'scores': [1.0], 'extra_logs': {'length': [len(query) - len(prompt)]}}",
        [1] * 4, logs=[{"length": length} for length in (14.0, 20.0, 27.0, 4.0)]),
    "a tensor": Case(
        "    import torch\n    length = torch.tensor([float(len(query) - len(prompt))])\n"
        "    return {'rewards': length, 'scores': length / 100, 'extra_logs': {'length': length}}", [14, 20, 27, 4],
        logs=[{"length": length} for length in (14.0, 20.0, 27.0, 4.0)], verdicts=["wrong"] * 4),
    "an array": Case("    import numpy\n    return {'rewards': numpy.ones(len(queries)) / 4}", [0.25] * 4),
    "a list, which older versions took": Case("    return [float(label in query[len(prompt):])]", [1, 0, 1, 1],
                                              alike=False),
}  # fmt: skip
TRL = {
    "accuracy": Case(
        "def f(completions, solution, **kwargs):\n"
        "    return [1.0 if gold in text else 0.0 for text, gold in zip(completions, solution)]", [1, 0, 1, 1]),
    "accuracy of messages": Case(
        "def f(completions, solution, **kwargs):\n    contents = [turns[0]['content'] for turns in completions]\n"
        "    return [float(c == s) for c, s in zip(contents, solution)]", [1, 0, 0, 0], prompt=CHAT),
    "prompts of messages": Case(
        "def f(prompts, completions, **kwargs):\n"
        "    return [len(p) + len(p[-1]['content']) + (p[0]['role'] == 'system') for p in prompts]", [21] * 4,
        prompt=CHAT),
    "prompts": Case("def f(prompts, completions):\n    return [float(p == '2+3, is it 5 or 6?') for p in prompts]",
                    [1] * 4, alike=False),  # TRL gives more arguments, and fails
    "a column with floats": Case("def f(completions, weight, **_):\n    return [2 * w for w in weight]", [1] * 4),
    "a column with integers": Case(
        "def f(completions, level, **_):\n    return [n / 2 if type(n) is int else 0 for n in level]", [1.5] * 4),
    "a column with lists": Case(
        "def f(completions, options, **_):\n    return [options[0].index(c) if c in options[0] else -1 "
        "for c in completions]", [0, -1, -1, -1]),
    "a column with dicts": Case(
        "def f(completions, spec, **_):\n    return [float(each['unit'] == 'm') for each in spec]", [1] * 4),
    "columns by kwargs": Case(
        "def f(completions, **kwargs):\n    return [float(each['difficulty']) for each in kwargs['extra_info']]",
        [2] * 4),
    "the shortest of the group": Case(
        "def f(completions, **_):\n    least = min(map(len, completions))\n"
        "    return [float(len(c) == least) for c in completions]", [1, 0, 0, 0]),
    "ranks in the group": Case(
        "def f(prompts, completions, **_):\n    ranks = {}\n    for p in set(prompts):\n"
        "        own = sorted(len(c) for q, c in zip(prompts, completions) if q == p)\n"
        "        ranks |= {(p, n): own.index(n) for n in own}\n"
        "    return [ranks[p, len(c)] for p, c in zip(prompts, completions)]", [0, 2, 3, 1]),
    "length of ids": Case(
        "def f(completion_ids, **kwargs):\n    return [-len(ids) / 10 for ids in completion_ids]",
        [-0.2, -0.8, -1.5, -0.4]),
    "an object, as TRL's own overlong punishment": Case(
        "class Punishment:\n    def __init__(self, most):\n        self.most = most\n"
        "    def __call__(self, completion_ids, **kwargs):\n"
        "        return [min(0, self.most - len(ids)) for ids in completion_ids]\nf = Punishment(4)", [0, -4, -11, 0]),
    "an object that is awaited": Case(
        "import asyncio\nclass Judge:\n    async def __call__(self, prompts, completions, **kwargs):\n"
        "        await asyncio.sleep(0.01)\n        return [float(len(c)) for c in completions]\nf = Judge()",
        [1, 7, 14, 4]),
    "an end token": Case(
        "def f(completion_ids, completions, **_):\n    return [float(ids[-1] == 0) for ids in completion_ids]",
        [1, 1, 1, 0]),
    "a format": Case(
        "import re\ndef f(completions, **kwargs):\n"
        "    return [0.5 if re.match('^<b>.*?</b>', c) else 0.0 for c in completions]", [0, 0, 0.5, 0]),
    "a schedule": Case(
        "def f(completions, trainer_state, **_):\n"
        "    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)", [0.2] * 4),
    "some abstain": Case(
        "def f(completions, **_):\n    return [None if 'it' in c else 1.0 for c in completions]", [1, NONE, NONE, 1],
        verdicts=["correct", "error", "error", "correct"]),
    "log_metric": Case(
        "def f(completions, log_metric=None, **_):\n    log_metric('accuracy', 0.75)\n    return [0.0] * 4", [0] * 4,
        logs=[{"accuracy": 0.75}] * 4),
    "log_metric for each": Case(
        "def f(completions, log_metric, **_):\n    for c in completions:\n        log_metric('five', float('5' in c))\n"
        "    return [0.0] * 4", [0] * 4, logs=[{"five": 0.75}] * 4),
    "log_extra": Case(
        "def f(completions, log_extra, **_):\n    log_extra('length', [len(c) for c in completions])\n"
        "    log_extra('text', completions)\n    return [0.0] * 4", [0] * 4,
        logs=[{"length": length} for length in (1, 7, 14, 4)]),
    "a tensor": Case("import torch\ndef f(completions, **_):\n    return torch.arange(4) / 4", [0, 0.25, 0.5, 0.75]),
    "numpy's numbers": Case(
        "import numpy\ndef f(completions, **_):\n    return [numpy.float32(len(c)) for c in completions]",
        [1, 7, 14, 4]),
    "gathered": Case(
        "import asyncio\nasync def judge(c):\n    await asyncio.sleep(0.01)\n    return float(len(c))\n"
        "async def f(completions, **_):\n    return await asyncio.gather(*(judge(c) for c in completions))",
        [1, 7, 14, 4]),
    "a failure": Case("def f(completions, **_):\n    return [1 / (len(c) - 1) for c in completions]", [NONE] * 4),
    "too few": Case("def f(completions, **_):\n    return [1.0]", [NONE] * 4),
}  # fmt: skip
VERL_HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
LISTS = "def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):\n"
VERL = {
    "a text": Case(VERL_HEAD + "    return 1.0 if ground_truth in solution_str else 0.0", [1, 0, 1, 1]),
    "an integer": Case(VERL_HEAD + "    return ground_truth + 1", [6] * 4, gold=5),
    "a float": Case(VERL_HEAD + "    return float(str(ground_truth) == '4.5')", [1] * 4, gold=4.5),
    "a list": Case(VERL_HEAD + "    return float(solution_str in ground_truth)", [1, 0, 0, 1], gold=("5", "so 5")),
    "a truth value": Case(VERL_HEAD + "    return ground_truth in solution_str", [1, 0, 1, 1]),
    "extra_info": Case(VERL_HEAD + "    return extra_info.get('difficulty', 1) * (solution_str == '5')", [2, 0, 0, 0]),
    "extra_info by default": Case(VERL_HEAD + "    return (extra_info or {}).get('difficulty', 1)", [1] * 4, meta={}),
    "extra_info of all columns": Case(
        VERL_HEAD + "    return extra_info['level']", [3] * 4, meta={"level": 3}, alike=False),  # verl's has no columns
    "turns": Case(VERL_HEAD + "    return (extra_info['num_turns'] - 2) / 2 * 0.1", [0] * 4),
    "no scores of turns": Case(VERL_HEAD + "    return len(extra_info['rollout_reward_scores'])", [0] * 4),
    "a data source": Case(
        VERL_HEAD + "    if data_source == 'openai/gsm8k':\n        return 1.0\n    raise NotImplementedError()",
        [1] * 4),
    "a dict with NumPy's numbers": Case(
        "import numpy as np\n" + VERL_HEAD + "    return {'score': 1.0, 'acc': np.float32(0.5), 'n': np.int64(3)}",
        [1] * 4, logs=[{"acc": 0.5, "n": 3.0}] * 4),
    "a dict": Case(
        VERL_HEAD + "    right = ground_truth in solution_str\n"
        "    return {'score': 1.0 if right else -1.0, 'acc': float(right), 'pred': solution_str}", [1, -1, 1, 1],
        logs=[{"acc": acc} for acc in (1.0, 0.0, 1.0, 1.0)], verdicts=["correct", "wrong", "correct", "correct"]),
    "a choice of its own": Case(
        "def compute_score(solution_str, ground_truth, method='strict', format_score=0.1, **kwargs):\n"
        "    return 1.0 if solution_str == ground_truth else format_score", [1, 0.1, 0.1, 0.1]),
    "kwargs alone": Case(
        "def compute_score(solution_str, **kwargs):\n"
        "    assert {*kwargs} == {'data_source', 'ground_truth', 'extra_info'}\n"
        "    return len(kwargs['ground_truth']) + len(solution_str)",
        [2, 8, 15, 5]),
    "async": Case(
        "import asyncio\nasync " + VERL_HEAD + "    await asyncio.sleep(0.01)\n    return len(solution_str) / 2",
        [0.5, 3.5, 7, 2]),
    "lists": Case(
        LISTS + "    return [float(t in s) for s, t in zip(solution_strs, ground_truths)]", [1, 0, 1, 1]),
    "lists with dicts": Case(
        LISTS + "    assert {*data_sources} == {'openai/gsm8k'}\n"
        "    return [{'score': i + extra_infos[i]['index'], 'n': len(solution_strs)} for i in range(len(extra_infos))]",
        [7, 8, 9, 10], logs=[{"n": 4.0}] * 4),
    "a failure": Case(VERL_HEAD + "    return {'5': 1.0}[solution_str]", [1, NONE, NONE, NONE]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    close_workers()


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(Prompts("chat"), byte_tokenizer())


def rollouts(encoder: PromptEncoder) -> list[Rollout]:
    ids = [np.array(encoder.tokenizer(text)["input_ids"], np.int32) for text in RESPONSES]
    ended = [np.append(each, np.int32(encoder.tokenizer.eos_token_id)) for each in ids[:-1]]
    return [*(Rollout(each, "stop") for each in ended), Rollout(ids[-1], "length")]


def check_or_skip(tool: str) -> None:
    try:
        check_installed(tool)
    except NotInstalled as error:
        pytest.skip(str(error))


FUNCTIONS = [
    (tool, name, case)
    for tool, cases in (("openrlhf", OPENRLHF), ("trl", TRL), ("verl", VERL))
    for name, case in cases.items()
]
each_function = pytest.mark.parametrize(
    ("tool", "case"), [pytest.param(tool, case, id=f"{tool}: {name}") for tool, name, case in FUNCTIONS]
)


def file_of(tool: str, case: Case, folder: Path) -> str:
    (folder / "reward.py").write_text((OPENRLHF_HEAD if tool == "openrlhf" else "") + case.source)
    names = re.findall(r"^(?:async def |def |)(\w+)(?:\(| = \w+\()", (folder / "reward.py").read_text(), re.MULTILINE)
    return f"{folder}/reward.py:{names[-1]}"


class PoolHere(Pool):
    """A pool whose worker is this process: 60 processes would take a minute to start. The others here are real ones."""

    def check_columns(self, columns: Sequence[str] | None) -> None:
        self.grading = kinds.load(json.loads(json.dumps({**self.settings, "columns": columns})))
        self._calls = self.grading.calls

    def submit(self, answers: Sequence[Answer], times: float = 1.0, together: bool = False) -> list[Future[Grade]]:
        futures: list[Future[Grade]] = [Future() for _ in answers]
        calls = [answers] if together else [[answer] for answer in answers]
        graded = (each for call in calls for each in self.grading.grade(pickle.loads(pickle.dumps(call))))
        for future, each in zip(futures, graded, strict=True):
            future.set_result(each)
        return futures


@pytest.fixture
def function_of(tmp_path):
    """A verifier of the last function in this source. more: its settings"""

    def of(source: str, **more: Any) -> Verifier:
        return Verifier("function", file_of("", Case(source, []), tmp_path), **more)

    return of


def questions(count: int) -> list[Question]:
    return [Question.make("t", f"{i}?", "5") for i in range(count)]


@pytest.fixture
def here(monkeypatch) -> None:
    monkeypatch.setattr("exgrpo_orlhf.rewards.pool.Pool", PoolHere)


@each_function
@pytest.mark.usefixtures("here")
def test_a_function_gives_in_a_run_what_is_expected_by_hand(tool, case, tmp_path, encoder):
    verifier = Verifier("function", file_of(tool, case, tmp_path), max_failed_share=1.0)
    verifier.check_questions([case.question])
    groups = [RolloutGroup(case.question, tuple(rollouts(encoder)), planned_replay=False)]
    written = lambda question, rollouts: written_to(encoder, question, rollouts)
    [group] = verifier.grade_groups(groups, written, progress=(4, 20))
    grades = [one.grade for one in group.rollouts]
    assert [grade.reward for grade in grades] == pytest.approx(case.rewards), [grade.reason for grade in grades]
    assert [dict(grade.logs) for grade in grades] == [*(case.logs or [{}] * 4)]
    if case.verdicts is not None:
        assert [grade.verdict for grade in grades] == case.verdicts


@each_function
def test_the_tools_own_code_gives_the_same(tool, case, tmp_path, encoder):
    check_or_skip(tool)
    verifier = Verifier("function", file_of(tool, case, tmp_path))
    responses = written_to(encoder, case.question, rollouts(encoder))
    answers = [verifier.as_answer(case.question, response, (4, 20)) for response in responses]
    rewards = [reward for reward, _ in rewards_of(tool, verifier.function, [[answers]])]
    assert (rewards == pytest.approx(case.rewards)) is case.alike


@pytest.mark.parametrize("name", OPENRLHF)
def test_openrlhfs_executor_makes_the_same_texts_from_token_ids(name, tmp_path, encoder):
    check_or_skip("openrlhf")
    case = OPENRLHF[name]
    file_of("openrlhf", case, tmp_path)
    results = [
        generated_by_openrlhf(f"{tmp_path}/reward.py", case.question, rollout, encoder) for rollout in rollouts(encoder)
    ]
    if not case.alike:
        assert [each["reward"] for each in results] == [None] * 4
        return
    assert [single(each["reward"]) for each in results] == pytest.approx(case.rewards)
    logs = [{key: single(own) for key, own in each["extra_logs"].items()} for each in results]
    assert logs == [*(case.logs or [{}] * 4)]
    if case.verdicts is not None:
        assert ["correct" if single(each["scores"]) >= 1 else "wrong" for each in results] == case.verdicts


def generated_by_openrlhf(file: str, question: Question, rollout: Rollout, encoder: PromptEncoder) -> dict[str, Any]:
    """What OpenRLHF's executor makes of a prompt, with an engine that returns this response."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    class Engine:
        async def generate(self, prompt_ids, params, multi_modal_data=None):
            assert prompt_ids == encoder.encode(question)
            response = SimpleNamespace(token_ids=rollout.token_ids.tolist(), finish_reason="stop", logprobs=None)
            return SimpleNamespace(outputs=[response])

    label = [*question.answer] if isinstance(question.answer, tuple) else question.answer
    executor, params = SingleTurnAgentExecutor(file), SimpleNamespace(max_tokens=64, logprobs=None)
    text = encoder.render(question)
    return asyncio.run(executor.execute(text, label, params, 1024, encoder.tokenizer, Engine()))


@pytest.mark.usefixtures("here")
def test_the_share_of_steps_made_is_0_outside_training(tmp_path):
    case = next(case for case in TRL.values() if "max_steps" in case.source)
    grade = Verifier("function", file_of("trl", case, tmp_path)).grade(case.question, "5")
    assert (grade.reward, grade.reason) == (0.0, None)


RANKS, SHORTEST = TRL["ranks in the group"].source, TRL["the shortest of the group"].source


@pytest.mark.parametrize(
    ("source", "gets", "expected"),
    [
        (RANKS, None, [0, 1, 1, 0]),  # it looks for its groups itself
        (RANKS, "batch", [0, 1, 1, 0]),
        (SHORTEST, None, [1, 0, 0, 1]),
        (SHORTEST, "batch", [1, 0, 0, 0]),  # TRL's own way: all that a process has in a step
    ],
)
@pytest.mark.usefixtures("here")
def test_trls_get_a_group_or_as_in_trl_the_whole_batch(function_of, source, gets, expected):
    verifier = function_of(source, gets=gets)
    texts = [*zip(questions(2), [("5", "seven"), ("eleven", "33")], strict=True)]
    pairs = [(question, text) for question, own in texts for text in own]
    assert [grade.reward for grade in verifier.grade_all(pairs)] == expected
    check_or_skip("trl")
    batch = [[verifier.as_answer(question, Written(text)) for text in own] for question, own in texts]
    assert [reward for reward, _ in rewards_of("trl", verifier.function, [batch], gets)] == expected


def test_an_async_function_keeps_what_belongs_to_its_event_loop(function_of):
    """Such as a client with open connections: it is made at the first call, and used at the next ones."""
    verifier = function_of(
        "import asyncio\nKEPT = []\nasync def f(completions, **_):\n"
        "    loop = asyncio.get_running_loop()\n"
        "    if not KEPT:\n        KEPT.append((loop, asyncio.Queue(), asyncio.Event()))\n"
        "    made, queue, event = KEPT[0]\n"
        "    asyncio.get_running_loop().call_later(0.01, event.set)\n"
        "    await event.wait()\n    event.clear()\n"
        "    await queue.put(1)\n    return [float(loop is made) + queue.qsize()] * len(completions)\n"
    )
    assert [grade.reward for grade in verifier.grade_all([(one, "5") for one in questions(3)])] == [2, 3, 4]


@pytest.mark.parametrize(("gets", "sizes"), [(None, [3, 3, 3]), ("group", [2, 2, 1])])
@pytest.mark.usefixtures("here")
def test_verls_batch_managers_get_a_step_at_a_time_or_a_group(gets, sizes, function_of):
    verifier = function_of(
        "def scores(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(data_sources) == len(ground_truths) == len(extra_infos)\n"
        "    return [{'score': len(solution_strs), 'n': i} for i in range(len(solution_strs))]\n",
        gets=gets,
    )
    a, b = questions(2)
    assert [grade.reward for grade in verifier.grade_all([(a, "5"), (a, "6"), (b, "5")])] == sizes


@pytest.mark.parametrize(
    ("tool", "source"),
    [
        ("trl", "def f(**kwargs):\n    return [float(c == s) for c, s in zip(kwargs['completions'], kwargs['gold'])]"),
        ("trl", "def f(gold, **kwargs):\n    return [float(c == s) for c, s in zip(kwargs['completions'], gold)]"),
        ("verl", "def f(**kwargs):\n    return float(kwargs['solution_str'] == kwargs['ground_truth'])"),
        ("trl", "def f(queries, completions, **_):\n    return [float(c == q) for c, q in zip(completions, queries)]"),
        ("openrlhf", "def f(**kwargs):\n    return {'rewards': [float(kwargs['queries'][0].endswith('?5'))]}"),
    ],
)
@pytest.mark.usefixtures("here")
def test_where_names_do_not_tell_the_tool_a_function_is_called_as_the_bound_tool_calls_it(function_of, tool, source):
    question = Question.make("t", "2+3?", "5", {"gold": "5", "queries": "5"})
    with pytest.raises(ValueError, match="accepted are"):
        function_of(source).grade(question, "5")
    grades = function_of(source, tool=tool).grade_all([(question, "5"), (question, "6")])
    assert [grade.reward for grade in grades] == [1, 0]


def test_what_a_function_keeps_between_its_calls_is_kept_and_a_module_beside_it_is_found(tmp_path, function_of):
    (tmp_path / "a_helper.py").write_text("def seen(found=[]):\n    found.append(1)\n    return len(found)\n")
    call = "from a_helper import seen\ndef f(queries, prompts, labels):\n    return {'rewards': [seen()]}\n"
    verifier, asked = function_of(call), [(one, "5") for one in questions(20)]
    grades = verifier.grade_all(asked) + verifier.grade_all(asked)
    assert [grade.reward for grade in grades] == list(range(1, 41))


@pytest.mark.slow
def test_a_group_on_which_a_function_hangs_has_no_rewards_and_the_others_have_theirs(function_of, caplog):
    spins = "    while 'spin' in completions: time.sleep(0.01)\n    return [1.0] * len(completions)\n"
    verifier = function_of(f"import time\ndef f(completions, **_):\n{spins}", timeout=3.0, max_failed_share=1.0)
    a, b = questions(2)
    grades = verifier.grade_all([(a, "5"), (a, "spin"), (b, "5")])
    assert [grade.verdict for grade in grades] == ["timeout", "timeout", "correct"]
    assert "no answer within 6 s" in caplog.text, "three seconds for each of two"
    assert grades[0].reason == "no answer within 6 s (Verifier.timeout)"


def test_a_files_extra_info_reaches_verls_functions_without_a_binding_and_changes_no_id(tmp_path):
    questions = []
    for i, more in enumerate(({}, {"extra_info": {"difficulty": 3}})):
        path = tmp_path / f"{i}.jsonl"
        rows = [{"prompt": f"{n}+1?", "answer": "2", "data_source": "here", **more} for n in (1, 1, 2)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        questions.append(QuestionFile(path=str(path), answer="answer").load())
    plain, informed = questions
    assert [each.id for each in plain] == [each.id for each in informed]
    assert len({each.id for each in plain}) == 2
    path = tmp_path / "reward.py"
    path.write_text(VERL_HEAD + "    return extra_info.get('difficulty', 1)\n")
    verifier = Verifier("function", f"{path}:compute_score")
    verifier.check_questions(informed)
    assert [verifier.grade(each, "2").reward for each in (plain[0], informed[0])] == [1, 3]
