"""Rollouts from OpenRLHF's engines.

The fast tests need no Ray: engines of this process answer at once, with vLLM's own classes. In the slow ones Ray and
the graders are real; instead of vLLM there is an actor that answers when it is told to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import ray
from run_builders import rows, wait_until
from transformers import AutoTokenizer
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from exgrpo_orlhf.engines.openrlhf.openrlhf_engine import OpenRLHFEngine
from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.environments.playing import Player, turns
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.sampling import EngineLost, Request, StepSeed, ray_engines
from exgrpo_orlhf.sampling.ray_engines import RaySampler
from exgrpo_orlhf.settings import Sampling
from exgrpo_orlhf.testbed.tiny_models import ChainModel

pytestmark = pytest.mark.openrlhf


# -- without Ray ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Answer:
    outputs: list[CompletionOutput]


class Engine:
    """Answers at once. Its responses come back in descending order, each its index + 1 tokens long, all of them 7.

    requests: the prompts and parameters that it got; change: applied to each response
    """

    def __init__(self, change=lambda response: None) -> None:
        self.requests, self.generate, self.change = [], SimpleNamespace(remote=self._generate), change

    def _generate(self, prompt, params) -> Answer:
        self.requests.append((prompt, params))
        outputs = []
        for i in reversed(range(params.n)):
            logprobs = [{7: Logprob(-0.5 * i), 8: Logprob(-9.0)}] * (i + 1)
            outputs.append(CompletionOutput(i, "", [7] * (i + 1), None, logprobs, finish_reason="stop"))
        for output in outputs:
            self.change(output)
        return Answer(outputs)


@pytest.fixture
def without_ray(monkeypatch) -> list:
    """Replaces Ray by a list of answers, the latest first. Returns the requests that were cancelled."""
    cancelled: list = []
    calls = {
        "wait": lambda references, num_returns, timeout: ([references[-1]], references[:-1]),
        "get": lambda reference, timeout: reference,
        "cancel": cancelled.append,
    }
    monkeypatch.setattr(ray_engines, "ray", SimpleNamespace(**calls))
    return cancelled


def ask(prompt, n, seed, temperature=1.0, **more) -> Request:
    return Request(prompt, seed, 24, temperature, n=n, **more)


def sampled(engines, requests, **settings) -> list[tuple]:
    return [each for portion in sampler(engines, **settings).sample(requests) for each in portion]


def test_requests_go_to_vllm_as_they_are_asked_for(without_ray):
    engine = Engine()
    more = {"end": (9,), "logprobs": True}
    requests = [ask([3, 4], 2, 11, 0.7, top_p=0.8, **more), ask([5], 1, 12, 0.0, **more), ask([6], 1, StepSeed(1, 2))]
    sampled([engine], requests)
    (prompt, random), (_, greedy), (_, of_step) = engine.requests
    assert prompt == [3, 4]
    assert (random.n, random.temperature, random.top_p, random.seed) == (2, 0.7, 0.8, 11)
    assert (random.max_tokens, random.stop_token_ids, random.logprobs) == (24, [9], 1)
    assert (greedy.temperature, greedy.top_p, greedy.seed) == (0.0, 1.0, None)
    assert not random.detokenize
    assert random.output_kind is RequestOutputKind.FINAL_ONLY
    assert (of_step.logprobs, of_step.seed) == (None, StepSeed(1, 2).of_request(2)), "by its position"


def test_responses_come_back_by_index_with_the_log_probs_of_their_own_tokens(without_ray):
    answers = dict(sampled([Engine()], [ask([3], 3, 0, logprobs=True), ask([4], 1, 1, logprobs=True)]))
    assert [len(rollout.token_ids) for rollout in answers[0]] == [1, 2, 3]
    assert [rollout.sampler_logprobs.tolist() for rollout in answers[0]] == [[0.0], [-0.5] * 2, [-1.0] * 3]
    assert [len(rollout.token_ids) for rollout in answers[1]] == [1]


def test_a_request_goes_to_the_engine_with_the_fewest_responses_to_generate(without_ray):
    """Counted in responses: the first request is as much work as eight of the others."""
    first, second = Engine(), Engine()
    sampled([first, second], [ask([3], 8, 0), *(ask([4], 1, i) for i in range(9))])
    assert [params.n for _, params in first.requests] == [8, 1]
    assert [params.n for _, params in second.requests] == [1] * 8


def ended_by(reason):
    return Engine(lambda response: vars(response).update(finish_reason=reason))


def without_one() -> Engine:
    engine = Engine()
    engine.generate.remote = lambda prompt, params: Answer(engine._generate(prompt, params).outputs[1:])
    return engine


@pytest.mark.parametrize(
    ("engine", "message"),
    [(ended_by(reason), f"vLLM engine 0 ended it by {reason!r}") for reason in ("abort", None)]
    + [(without_one(), "vLLM engine 0 gave 1 of 2 responses")],
)
def test_a_response_that_did_not_end_or_come_is_an_error_and_all_requests_are_cancelled(without_ray, engine, message):
    with pytest.raises(EngineLost, match=message):
        sampled([engine], [ask([3], 2, i) for i in range(3)])
    assert len(without_ray) == 3, "the one that has ended too"


@pytest.fixture
def silent(without_ray, monkeypatch) -> list:
    """No engine answers. Returns the requests that were cancelled."""
    monkeypatch.setattr(ray_engines.ray, "wait", lambda references, num_returns, timeout: ([], references))
    return without_ray


def test_an_engine_that_does_not_answer_is_lost(silent):
    with pytest.raises(EngineLost, match=r"vLLM engine 0, 1: no answer for 200 s \(OpenRLHF\.timeout\)"):
        sampled([Engine(), Engine()], [ask([3], 1, i) for i in range(2)])
    assert len(silent) == 2


@pytest.fixture
def player(tmp_path) -> Player:
    """Of an environment that answers '1;' twice and then ends the episode; of a prompt with a 9 it raises."""
    path = tmp_path / "twice.py"
    path.write_text(
        """
class Twice:
    asked = 0

    def step(self, states):
        self.asked += 1
        assert "9" not in states["observation_text"]
        return {"rewards": 0.5, "environment_feedback": "1;", "done": self.asked == 3}
"""
    )
    return Player(Environment(str(path), stop=("=",)), PromptEncoder(Prompts("plain"), ChainModel.tokenizer()), 24)


CHAINS = [Question.make("test", prompt, "1") for prompt in ("1+2=", "9+2=", "3+4=")]


def test_a_turn_of_an_episode_is_a_request_for_what_is_left_of_it(without_ray, player):
    first, second = Engine(), Engine()
    like = ask((), 1, 0, 0.7, end=(9,), logprobs=True)
    with player.episodes(CHAINS, [11, 12, 13]) as plays:
        wait_until(lambda: all(play.answered for play in plays))  # the first turns go to both engines
        assert sorted(turns(sampler([first, second]), plays, like)) == [0, 1, 2]
        rollouts = [play.rollout() for play in plays]
    turn, answer = [7], [3, 16]  # the engine's token; '1;'
    for rollout in rollouts[::2]:
        assert rollout.token_ids.tolist() == [*turn, *answer, *turn, *answer, *turn]
        assert rollout.actions.tolist() == [True, False, False, True, False, False, True]
        assert rollout.sampler_logprobs.tolist() == [0.0] * 3
        assert (rollout.turns, rollout.grade.reward) == (3, 1.5)
    assert (rollouts[1].grade.verdict, rollouts[1].token_ids.tolist()) == ("error", turn)
    assert first.requests
    assert second.requests
    requests = sorted(first.requests + second.requests, key=lambda request: len(request[0]))
    own = [(prompt, params) for prompt, params in requests if prompt[:4] == plays[0].prompt]
    assert [prompt[4:] for prompt, _ in own] == [[], [*turn, *answer], 2 * [*turn, *answer]]
    assert [params.max_tokens for _, params in own] == [24, 21, 18]
    assert own[0][1].seed == 11
    assert len({params.seed for _, params in requests}) == len(requests) == 7
    for _, params in requests:
        assert (params.n, params.temperature, params.stop, params.include_stop_str_in_output) == (1, 0.7, ["="], True)
        assert params.detokenize


def test_an_engine_that_does_not_answer_to_a_turn_is_lost(silent, player):
    with (
        player.episodes(CHAINS, [1, 2, 3]) as plays,
        pytest.raises(EngineLost, match=r"vLLM engine 0: no answer for 0 s \(OpenRLHF\.timeout\)"),
    ):
        list(turns(sampler([Engine()], timeout=0.2), plays, ask((), 1, 0)))
    assert silent, "what was sent is cancelled"


# -- with Ray ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def make_engine(folder: Path):
    class Echo:
        """Answers a prompt with its own tokens when there is a file go-<tokens>."""

        async def generate(self, prompt, params):
            import asyncio
            from types import SimpleNamespace

            name = "-".join(map(str, prompt))
            (folder / f"began-{name}").touch()
            try:
                while not (folder / f"go-{name}").exists():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                (folder / f"cancelled-{name}").touch()
                raise
            outputs = [SimpleNamespace(index=i, token_ids=prompt, finish_reason="stop") for i in range(params.n)]
            return SimpleNamespace(outputs=outputs[::-1])

    return ray.remote(num_cpus=0)(Echo).remote()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def engines(folder, cluster) -> list:
    return [make_engine(folder) for _ in range(2)]


def sampler(engines: list, timeout=200.0) -> RaySampler:
    return RaySampler(engines, timeout, sleeps=False)


@pytest.mark.slow
def test_a_group_is_graded_while_others_are_being_generated_and_comes_back_in_its_place(warm_model, engines, folder):
    """The last question of the plan is answered first, the others after its responses have been graded."""
    tokenizer = AutoTokenizer.from_pretrained(warm_model)
    questions = [Question.make("test", f"{i}+{i}=", str(i)) for i in range(5)]
    engine = object.__new__(OpenRLHFEngine)
    engine.prompts, engine.tokenizer = PromptEncoder(Prompts(max_tokens=32), tokenizer), tokenizer
    engine.sampler = sampler(engines)
    engine.player = None
    engine.sampling, engine.seed = Sampling(), 0
    names = ["-".join(map(str, engine.prompts.encode(question))) for question in questions]
    (folder / f"go-{names[-1]}").touch()
    reward = folder / "reward.py"
    reward.write_text(
        "import json, pathlib\n"
        f"folder, others = pathlib.Path({str(folder)!r}), {names[:-1]!r}\n"
        "def reward_func(queries, prompts, labels):\n"
        "    with (folder / 'graded').open('a') as file: file.write(json.dumps(labels[0]) + '\\n')\n"
        "    if labels[0] == '4':\n"
        "        for name in others: (folder / f'go-{name}').touch()\n"
        "    return [1.0]\n"
    )
    verifier = Verifier("function", function=str(reward), timeout=60.0)
    plan = Plan(1, questions[:3], questions[3:], {})
    groups = plan.in_order(verifier.grade_groups(engine.rollout(plan, 3), engine.written))
    assert [group.question for group in groups] == questions
    assert [(len(group.rollouts), group.planned_replay) for group in groups] == [(3, False)] * 3 + [(2, True)] * 2
    for group, name in zip(groups, names, strict=True):
        assert all("-".join(map(str, r.token_ids)) == name and r.grade.reward == 1.0 for r in group.rollouts)
    graded = rows(folder / "graded")
    assert graded[0] == "4"
    assert len(graded) == 3 * 3 + 2 * 2


@pytest.mark.slow
def test_stopping_early_cancels_the_remaining_requests(engines, folder):
    sampling = sampler(engines).sample([ask([i], 1, i) for i in range(4)])
    (folder / "go-2").touch()
    [(position, (rollout,))] = next(sampling)
    assert (position, rollout.token_ids.tolist()) == (2, [2])
    wait_until(lambda: all((folder / f"began-{i}").exists() for i in range(4)))
    sampling.close()
    wait_until(lambda: all((folder / f"cancelled-{i}").exists() for i in (0, 1, 3)))


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_requests_of_the_others(engines, folder):
    dying = make_engine(folder)
    sampling = sampler([dying, engines[0]]).sample([ask([10 + i], 1, i) for i in range(4)])
    (folder / "go-11").touch()
    [(position, _)] = next(sampling)
    assert position == 1
    wait_until(lambda: (folder / "began-13").exists())
    ray.kill(dying)
    with pytest.raises(EngineLost, match="vLLM engine 0 died"):
        next(sampling)
    wait_until(lambda: (folder / "cancelled-13").exists())
