"""Episodes that the local engine plays with real environments: what they hold, how they end, and what fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from engine_builders import make_engine, questions
from generated import generated
from run_builders import ROOT, small_bindings

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local import torch_engine
from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.environments.playing import Play, Player
from exgrpo_orlhf.records import Rollout
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.rewards import GradingError, Verifier
from exgrpo_orlhf.settings import LocalEngine, Sampling
from exgrpo_orlhf.training.run import train

CALCULATOR = Environment(str(ROOT / "benchmarks" / "slipping_calculator.py"), stop=("=",), timeout=60.0)
FILE = """
class Own:
    def reset(self, states):
        {reset}
        return {{"observation": states["observation"] + {added!r}}}

    def step(self, states):
        {step}
        return {{"rewards": 0.25, "environment_feedback": {feedback!r}, "done": {done},
                "extra_logs": {{"mark": 2}}}}
"""


@pytest.fixture
def own(tmp_path):
    def write(reset="pass", step="pass", added="", feedback="1;", done=False, **settings) -> Environment:
        path = tmp_path / f"own{len(list(tmp_path.glob('own*')))}.py"  # a file is loaded once
        path.write_text(FILE.format(reset=reset, step=step, added=added, feedback=feedback, done=done))
        return Environment(str(path), timeout=60.0, **settings)

    return write


def played(model, environment, n=4, tokens=24, step=1, rows=256):
    settings, sampling = LocalEngine(device="cpu", generation_rows=rows), Sampling(max_response_tokens=tokens)
    engine = make_engine(model, environment=environment, settings=settings, sampling=sampling)
    plan = Plan(step, questions(n), [], {})
    return engine, plan.in_order(engine.rollout(plan, 4))


def parts(engine, rollout: Rollout) -> list[tuple[bool, str]]:
    """Whether the policy wrote it, and the text."""
    pairs = zip(rollout.actions.tolist(), rollout.token_ids.tolist(), strict=True)
    return [
        (own, engine.decode(np.array([i for _, i in tokens], np.int32)))
        for own, tokens in groupby(pairs, lambda pair: pair[0])
    ]


def test_an_episode_holds_each_turn_of_the_policy_and_what_the_calculator_answered_to_it(warm_model):
    engine, groups = played(warm_model, CALCULATOR)
    rollouts = [(group.question, one) for group in groups for one in group.rollouts]
    turns = [one.turns for _, one in rollouts]
    assert {*turns} >= {1, 2, 3}
    for question, one in rollouts:
        texts = parts(engine, one)
        assert [own for own, _ in texts] == [True, False] * (one.turns - 1) + [True]
        assert all(text.endswith("=") and "=" not in text[:-1] for own, text in texts[:-1] if own)
        assert all(len(text) == 1 for own, text in texts if not own)
        right = texts[-1][1].rpartition("#")[2] == question.answer
        assert (one.grade.correct, one.grade.reward, one.finish) == (right, float(right), "stop")
        assert len(one.token_ids) - one.length == sum(not own for own, _ in texts)


def test_the_same_seed_and_step_play_the_same_episodes_and_another_step_others(warm_model):
    """Also a few at a time."""
    plays = (played(warm_model, CALCULATOR, step=step, rows=rows)[1] for step, rows in ((1, 256), (1, 3), (2, 256)))
    ids = [[one.token_ids.tobytes() for group in groups for one in group.rollouts] for groups in plays]
    assert ids[0] == ids[1] != ids[2]


def test_a_turn_computes_its_new_tokens_alone_and_a_few_episodes_are_played_at_a_time(warm_model, monkeypatch):
    """A model that could not go on from what was computed is refused."""
    checked, alive, plays, widths = [], [], [], []
    check, begin = torch_engine.check_rows, Play.__init__

    def check_rows(model, pad, turns):
        checked.append(turns)
        check(model, pad, turns)

    def count(self, *args):
        begin(self, *args)
        plays.append(self)
        alive.append(sum(play.going for play in plays))

    monkeypatch.setattr(torch_engine, "check_rows", check_rows)
    monkeypatch.setattr(Play, "__init__", count)
    engine = make_engine(warm_model, environment=CALCULATOR, settings=LocalEngine(device="cpu", generation_rows=3))
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    list(engine.rollout(Plan(1, questions(2), [], {}), 4))
    assert checked == [True]
    assert len(plays) == 8
    assert max(alive) == 3
    shortest = min(len(play.prompt) for play in plays)
    assert sum(width >= shortest for width in widths) == 3, "the prompts, of three times some episodes"
    assert sum(play.turns for play in plays) > 12
    assert engine.sampler.kept == {}


def test_an_observation_without_room_for_a_turn_after_it_is_left_out_and_the_episode_truncated(warm_model, own):
    _, groups = played(warm_model, own(feedback="1+1=2;" * 3), tokens=30)
    for group in groups:
        for one in group.rollouts:
            assert one.finish == "length"
            assert one.actions[-1]
            assert len(one.token_ids) <= 30
            assert (~one.actions).sum() % 18 == 0, "whole observations only"
    assert not all(one.actions.all() for group in groups for one in group.rollouts), "some had room"


def test_turns_are_limited_and_their_rewards_add_up(warm_model, own):
    _, groups = played(warm_model, own(max_turns=3, feedback="", success_at=0.75), tokens=60)
    rollouts = [one for group in groups for one in group.rollouts]
    assert {(one.finish, one.grade.reward, one.grade.correct) for one in rollouts} == {("length", 0.75, True)}
    assert {one.grade.logs for one in rollouts} == {(("mark", 2.0),)}


@pytest.mark.slow
def test_what_a_reset_adds_to_the_prompt_is_the_environments(warm_model, own):
    engine, groups = played(warm_model, own(added="1+2=", done=True))
    for one in groups[0].rollouts:
        assert parts(engine, one)[0] == (False, "1+2=")
    for wrong in (own(reset="states['observation'] = 'another'"), own(added="1+" * 40)):  # the second leaves no room
        _, groups = played(warm_model, wrong)
        assert {one.grade.verdict for one in groups[0].rollouts} == {"error"}


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_episode_that_fails_is_ungradable_and_named_and_the_others_go_on(warm_model, own, where, caplog):
    environment = own(**{where: "if states['label'] in '01234': 1 / 0"}, done=True)
    with caplog.at_level(logging.WARNING):
        engine, groups = played(warm_model, environment, n=8)
    failed = [group for group in groups if group.question.answer in "01234"]
    assert 0 < len(failed) < len(groups)
    for group in groups:
        assert {one.grade.reward for one in group.rollouts} == {None if group in failed else 0.25}
        assert all(one.length >= 1 for one in group.rollouts)
    assert caplog.text.count("own0.py, line") == 4 * len(failed)
    assert "ZeroDivisionError" in caplog.text
    graded = Verifier("modular_chain", max_failed_share=1.0).grade_groups(groups, engine.written)
    assert graded == groups, "it has nothing to add"
    with pytest.raises(GradingError, match="could not be graded"):
        Verifier("modular_chain", max_failed_share=0.1).grade_groups(groups, engine.written)


def test_a_verifier_grades_what_the_policy_wrote_and_the_observations_only_if_it_is_asked_to(warm_model, own):
    engine, groups = played(warm_model, own(feedback="5;", added="4;", max_turns=3, reward="verifier"))
    environment = engine.player.environment
    rollouts = [one for group in groups for one in group.rollouts]
    assert max(one.turns for one in rollouts) > 1
    for question, one in [(group.question, one) for group in groups for one in group.rollouts]:
        assert one.grade is None
        engine.player.environment = environment
        (written,) = engine.written(question, [one])
        assert written.text == "\n".join(text for mine, text in parts(engine, one) if mine)
        assert written.token_ids == one.token_ids[one.actions].tolist()
        prompt, query = written.read()
        assert query == prompt + engine.tokenizer.decode(written.token_ids), "a function sees no observation either"
        engine.player.environment = replace(environment, reward="verifier_with_observations")
        assert engine.written(question, [one])[0].text == engine.decode(one.token_ids) != ""


@pytest.mark.slow
def test_training_goes_on_with_failing_episodes_and_evaluates_by_episodes(warm_model, own, tmp_path):
    environment = own(step="if len(states['observation_text']) % 3 == 0: raise KeyError('gone')", done=True)
    bindings = [
        f"Environment.path = {environment.path!r}",
        "Environment.timeout = 60.0",
        "Verifier.max_failed_share = 0.9",
        "train.steps = 2",
    ]
    experiment = config.load(["toy.gin"], small_bindings(warm_model, *bindings))
    assert train(experiment, tmp_path / "run", resume=False, tracking_uri="unused", tags={}).steps == 2
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"reward/error_share": 0.0' not in text.splitlines()[1]
    samples = (tmp_path / "run" / "evaluation" / "2" / "validation").glob("*")
    assert any('"verdict": "error"' in file.read_text() for file in samples if file.suffix == ".jsonl")


def test_a_text_that_ends_a_turn_can_be_a_special_tokens_and_then_the_environment_sees_it(warm_model, own):
    engine = make_engine(warm_model)
    special = engine.tokenizer.eos_token
    prompts = [engine.prompts.encode(question) for question in questions(4)]
    settings = {"pad": engine.pad, "max_new_tokens": 24, "temperature": None, "tokenizer": engine.tokenizer}
    by_text = generated(engine.model, prompts, end=[], stop=(special,), **settings)
    by_token = generated(engine.model, prompts, end=[engine.tokenizer.eos_token_id], **settings)
    assert [one.token_ids.tolist() for one in by_text] == [one.token_ids.tolist() for one in by_token]
    assert all(one.finish == "stop" for one in by_text)
    environment, turn = own(), by_token[0]
    hidden = Player(environment, engine.prompts, 24).text(turn)
    seen = Player(replace(environment, stop=(special,)), engine.prompts, 24).text(turn)
    assert seen == hidden + special


def test_a_text_that_ends_a_turn_is_not_found_inside_the_end_tokens_own_text(warm_model, own):
    engine = make_engine(warm_model)
    end, ids = engine.tokenizer.eos_token, engine.tokenizer("1+2=", add_special_tokens=False)["input_ids"]
    turn = Rollout(np.array([*ids, engine.tokenizer.eos_token_id], np.int32), "stop")
    stops = {(): "1+2=", (end[-1],): "1+2=", (end[1:-1], "+"): "1+", (end[0], "=" + end): f"1+2={end}"}
    environment = own()
    for stop, text in stops.items():
        assert Player(replace(environment, stop=stop), engine.prompts, 24).text(turn) == text, stop


def test_a_turn_ends_with_its_stop_text_whatever_else_its_last_token_has(warm_model, own):
    engine = make_engine(warm_model)
    ids = np.array(engine.tokenizer("1+2=", add_special_tokens=False)["input_ids"], np.int32)
    player = Player(own(stop=("7", "+2")), engine.prompts, 24)
    assert player.text(Rollout(ids, "stop")) == "1+2"


def test_an_evaluation_in_which_most_episodes_fail_ends_the_run(warm_model, own, tmp_path):
    environment = own(step="1 / 0", done=True)
    bindings = [f"Environment.path = {environment.path!r}", "Environment.timeout = 60.0"]
    experiment = config.load(["toy.gin"], small_bindings(warm_model, *bindings))
    with pytest.raises(GradingError, match="10 of 10 answers could not be graded"):
        train(experiment, tmp_path / "run", resume=False, tracking_uri="unused", tags={})
