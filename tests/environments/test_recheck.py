"""Environment.recheck_every: stored episodes are played again, and what the environment would no longer say goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_builders import make_engine, questions
from run_builders import ROOT, rows, train_small

from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.io.files import sha256
from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import Plan, ReplayBuffer, RetirementPolicy, snapshot
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


def test_with_a_verifier_the_environments_reward_does_not_count(calculated, tmp_path):
    path = tmp_path / "changed.py"
    path.write_text(WORLD.format(step="pass", changed="{'rewards': 0.125}"))
    engine, stored = calculated
    engine.player.environment = replace(CALCULATOR, path=str(path), reward="verifier")
    assert not any(engine.outdated(stored))


@pytest.mark.slow
def test_a_run_forgets_what_its_changed_environment_would_not_say_and_goes_on(
    warm_model, tmp_path, caplog, monkeypatch
):
    """The world changes between two halves of a run. The resumed half has the stored seeds; a check without a change
    finds nothing. That the file itself was changed is said."""
    path, world, folder = tmp_path / "calculator.py", tmp_path / "world", tmp_path / "run"
    changed = f"({{'rewards': 0.125}} if pathlib.Path({str(world)!r}).exists() else {{}})"
    path.write_text(WORLD.format(step="pass", changed=changed))
    bindings = [f"Environment.path = {str(path)!r}", "Environment.stop = ('=',)", "Environment.timeout = 60.0"]
    bindings += ["Environment.recheck_every = 2", "train.save_every = 2", "RetirementPolicy.at_accuracy = None"]
    bindings += ["train.generate_ahead = True"]

    def run(steps: int) -> tuple[list[dict], list[Trajectory]]:
        train_small(warm_model, folder, *bindings, f"train.steps = {steps}", resume=steps > 4)
        saved = folder / f"checkpoint-{steps}" / "replay"
        buffer = snapshot.load(saved, ReplayBuffer(RetirementPolicy()), snapshot.fingerprint(saved))
        return rows(folder), [one.trajectory for record in buffer.records.values() for one in record.stored]

    steps, before = run(4)
    assert [row.get("replay/outdated") for row in steps] == [None, None, 0.0, None, 0.0]
    assert len(before) > 5
    world.touch()
    path.write_text(path.read_text() + "\n")
    tags, tracker = {}, preparation.MlflowTracker
    spy = lambda *args: tags.update(args[3].tags) or tracker(*args)
    monkeypatch.setattr(preparation, "MlflowTracker", spy)
    steps, after = run(6)
    assert tags["Environment.path sha256"] == sha256(path)
    text = f"Environment.path: this file is not that of {folder / 'checkpoint-4'}, from which the run goes on"
    assert [record.getMessage() for record in caplog.records].count(text) == 1
    assert steps[-1]["replay/outdated"] >= len(before)
    assert not {one.key for one in before} & {one.key for one in after}
