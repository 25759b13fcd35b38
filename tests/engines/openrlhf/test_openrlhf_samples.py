"""Rollouts from OpenRLHF's engines. Ray and the graders are real; instead of vLLM there is an actor that answers when
it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import ray
from run_builders import wait_until
from transformers import AutoTokenizer

from exgrpo_orlhf.engines.engine import EngineLost
from exgrpo_orlhf.engines.openrlhf.samples import Request, Sampler
from exgrpo_orlhf.engines.openrlhf.trainer import MixedTrainer
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.settings import Sampling

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def make_engine(folder: Path):
    class Told:
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
            given = [SimpleNamespace(index=i, token_ids=prompt, finish_reason="stop") for i in range(params.n)]
            return SimpleNamespace(outputs=given[::-1])

    return ray.remote(num_cpus=0)(Told).remote()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def engines(folder) -> list:
    return [make_engine(folder) for _ in range(2)]


def sampler(engines: list) -> Sampler:
    return Sampler(engines, 24, False, 200.0, [])


def test_a_group_is_graded_while_others_are_being_generated_and_comes_back_in_its_place(warm_model, engines, folder):
    """The last question of the plan is answered first, the others after its responses have been graded."""
    tokenizer = AutoTokenizer.from_pretrained(warm_model)
    asked = [Question.make("test", f"{i}+{i}=", str(i)) for i in range(5)]
    trainer = object.__new__(MixedTrainer)
    trainer.prompts, trainer.tokenizer = PromptEncoder(Prompts(max_tokens=32), tokenizer), tokenizer
    trainer.sampler = sampler(engines)
    trainer.x = SimpleNamespace(sampling=Sampling(), settings=SimpleNamespace(seed=0))
    trainer.args = SimpleNamespace(vllm=SimpleNamespace(enable_sleep=False))
    names = ["-".join(map(str, trainer.prompts.encode(question))) for question in asked]
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
    plan = Plan(1, asked[:3], asked[3:], {})
    groups = plan.in_order(verifier.grade_groups(trainer.rollout(plan, 3), trainer.decode))
    assert [group.question for group in groups] == asked
    assert [(len(group.rollouts), group.replayed) for group in groups] == [(3, False)] * 3 + [(2, True)] * 2
    for group, name in zip(groups, names, strict=True):
        assert all("-".join(map(str, r.token_ids)) == name and r.grade.reward == 1.0 for r in group.rollouts)
    graded = [json.loads(line) for line in (folder / "graded").read_text().splitlines()]
    assert graded[0] == "4"
    assert len(graded) == 3 * 3 + 2 * 2


def test_stopping_early_cancels_the_remaining_requests(engines, folder):
    sampling = sampler(engines)([Request([i], 1, 1.0, i) for i in range(4)])
    (folder / "go-2").touch()
    position, (rollout,) = next(sampling)
    assert (position, rollout.token_ids.tolist()) == (2, [2])
    wait_until(lambda: all((folder / f"began-{i}").exists() for i in range(4)))
    sampling.close()
    wait_until(lambda: all((folder / f"cancelled-{i}").exists() for i in (0, 1, 3)))


def test_an_engine_that_dies_ends_the_requests_of_the_others(engines, folder):
    dying = make_engine(folder)
    sampling = sampler([dying, engines[0]])([Request([10 + i], 1, 1.0, i) for i in range(4)])
    (folder / "go-11").touch()
    assert next(sampling)[0] == 1
    wait_until(lambda: (folder / "began-13").exists())
    ray.kill(dying)
    with pytest.raises(EngineLost, match="vLLM engine 0 died"):
        next(sampling)
    wait_until(lambda: (folder / "cancelled-13").exists())
