"""Stored episodes are played again, and what the environment would no longer say is noticed."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from engine_builders import make_engine, questions
from run_builders import ROOT, rows, train_small

from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.io.files import sha256
from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.replay.prefix import Prefix
from exgrpo_orlhf.settings import Sampling
from exgrpo_orlhf.training import preparation

CALCULATOR = Environment(str(ROOT / "benchmarks" / "slipping_calculator.py"), stop=("=",), timeout=60.0)
WORLD = """
import pathlib
from exgrpo_orlhf.testbed.chain_calculator import Calculator as Base

class Calculator(Base):
    def step(self, states):
        {step}
        return {{**super().step(states), **{changed}}}
"""


def trajectories(environment, model):
    """An engine, and episodes of it as they are stored, with those that were wrong too."""
    engine = make_engine(model, environment=environment, sampling=Sampling(max_response_tokens=24))
    groups = engine.rollout(Plan(1, questions(6), [], {}), 4)
    played = [(group.question, one) for group in groups for one in group.rollouts if one.finish == "stop"]
    return engine, [
        (
            question,
            Trajectory(
                *(one.token_ids, np.full(one.length, -0.5, np.float32), one.grade.reward, 1),
                **{"actions": one.actions, "seed": one.seed},
            ),
        )
        for question, one in played
    ]


@pytest.fixture(scope="module")
def calculated(warm_model):
    return trajectories(replace(CALCULATOR, path="chain_calculator.py"), warm_model)


def test_what_a_random_environment_said_it_says_again_with_the_episodes_seed_alone(warm_model):
    engine, stored = trajectories(CALCULATOR, warm_model)
    assert len(stored) > 15
    assert sum(not one.actions.all() for _, one in stored) > 10, "it was asked"
    assert not any(engine.outdated(stored))
    other = [(question, replace(one, seed=one.seed + 1)) for question, one in stored]
    assert 3 < sum(engine.outdated(other)) < len(stored)


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        ("pass", "{'environment_feedback': '77'}"),  # longer than before
        ("pass", "{'environment_feedback': ''}"),
        ("pass", "{'rewards': 0.125}"),
        ("pass", "{'done': False}"),  # the policy's last turn is followed by another
        ("pass", "{'done': True}"),
        ("1 / 0", "{}"),
    ],
)
def test_an_environment_that_answers_rewards_or_ends_otherwise_or_fails_is_noticed(step, changed, calculated, tmp_path):
    engine, stored = calculated
    pairs = [pair for pair in stored if not pair[1].actions.all()]
    path = tmp_path / "changed.py"
    path.write_text(WORLD.format(step=step, changed=changed))
    engine.player.environment = replace(CALCULATOR, path=str(path))
    assert all(engine.outdated(pairs))


@pytest.mark.parametrize("changed", ["{'environment_feedback': '77'}", "{'done': True}"])
def test_a_given_part_that_is_not_answered_as_it_was_makes_an_ungradable_rollout_without_a_given_token(
    changed, calculated, tmp_path
):
    """Or tokens of the stored episode would be trained on as the policy's."""
    engine, stored = calculated
    path = tmp_path / "changed.py"
    path.write_text(WORLD.format(step="pass", changed=changed))
    engine.player.environment = replace(CALCULATOR, path=str(path))
    prefix, turns = Prefix(), lambda one: prefix.given(one, 0.99, 24, None)
    question, episode = next(pair for pair in stored if turns(pair[1]))
    plan = Plan(1, [], [question], {question: [episode]}, rollouts_per_replayed=4, given={question.id: turns(episode)})
    [group] = engine.rollout(plan, 4)
    for one in group.rollouts:
        assert one.grade.verdict == "error"
        assert (one.reward, one.given, one.length) == (None, 0, 1)


def test_with_a_verifier_the_environments_reward_does_not_count(calculated, tmp_path):
    path = tmp_path / "changed.py"
    path.write_text(WORLD.format(step="pass", changed="{'rewards': 0.125}"))
    engine, stored = calculated
    engine.player.environment = replace(CALCULATOR, path=str(path), reward="verifier")
    assert not any(engine.outdated(stored))


@pytest.mark.slow
def test_a_run_continues_no_episode_that_its_changed_environment_would_not_play(
    warm_model, tmp_path, caplog, monkeypatch
):
    """The world changes between two halves of a run. The resumed half has the stored seeds. That the file itself was
    changed is said."""
    path, world, folder = tmp_path / "calculator.py", tmp_path / "world", tmp_path / "run"
    changed = f"({{'rewards': 0.125}} if pathlib.Path({str(world)!r}).exists() else {{}})"
    path.write_text(WORLD.format(step="pass", changed=changed))
    bindings = [f"Environment.path = {str(path)!r}", "Environment.stop = ('=',)", "Environment.timeout = 60.0"]
    bindings += ["ReplayMixer.injection = @Prefix()", "Prefix.share = @FixedShare()", "FixedShare.value = 0.9"]
    bindings += ["train.save_every = 2", "RetirementPolicy.at_accuracy = None", "Prefix.target = 0.9"]

    def run(steps: int) -> list[float]:
        train_small(warm_model, folder, *bindings, f"train.steps = {steps}", resume=steps > 4)
        return [row.get("replay/continued_share", 0) for row in rows(folder)]

    assert max(run(4)) > 0
    assert not [text for text in caplog.messages if "are not continued" in text]
    world.touch()
    path.write_text(path.read_text() + "\n")
    tags, tracker = {}, preparation.MlflowTracker
    spy = lambda *args: tags.update(args[3].tags) or tracker(*args)
    monkeypatch.setattr(preparation, "MlflowTracker", spy)
    assert run(5)[-1] == 0
    assert [text for text in caplog.messages if re.search(r"[1-9] stored episodes are not continued", text)]
    assert tags["Environment.path sha256"] == sha256(path)
    text = f"Environment.path: this file is not that of {folder / 'checkpoint-4'}, from which the run goes on"
    assert [record.getMessage() for record in caplog.records].count(text) == 1
