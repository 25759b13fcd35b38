"""train.generate_ahead = True: each batch is planned and sampled one update early, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_builders import LOGPROB_ERROR, K, float32_error, plain_stats, questions, trajectory, use_sgd, weights
from run_builders import rows, timeless, train_small
from step_builders import begin, decide_verdicts

from exgrpo_orlhf.config import ConfigError
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.records import Rollout, RolloutGroup
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.training import ahead
from exgrpo_orlhf.training.step import _NextBatch

AHEAD = "train.generate_ahead = True"
ON_POLICY = ["ReplayMixer.rho = 0.0"]


class Watched:
    """A run whose weights before each step, batches and updates are kept."""

    def __init__(self, model: Path, folder: Path, *more: str) -> None:
        self.run = begin(model, folder, AHEAD, "train.eval_every = None", *more)
        self.engine = self.run.engine
        self.models, self.batches, self.stats, self.metrics, self.considered = [], [], [], [], []
        update, choose = self.engine.update, self.run._choose

        def watched(batch, loss):
            self.batches.append(batch)
            self.stats.append(update(batch, loss))
            return self.stats[-1]

        def choosing(selector, candidates):
            choices = choose(selector, candidates)
            if len(self.considered) == len(self.batches):  # the first choice of a step; then there are late ones
                self.considered.append(choices)
            return choices

        self.engine.update, self.run._choose = watched, choosing

    def step(self) -> None:
        self.models.append(copy.deepcopy(self.engine.model).double())
        self.metrics.append(self.run.step())

    def logprobs(self, model, row) -> torch.Tensor:
        return plain_stats(model, self.engine.prompts.encode(row.question), row.token_ids)[0]


@pytest.fixture(scope="module")
def watched(warm_model, tmp_path_factory) -> Watched:
    # A rate at which one update moves the log-probs by far more than the rounding error.
    run = Watched(
        warm_model,
        tmp_path_factory.mktemp("ahead"),
        "Optimizer.learning_rate = 0.005",
        "Optimizer.max_grad_norm = 1e9",
        "RetirementPolicy.at_accuracy = None",
    )
    for _ in range(6):
        run.step()
    return run


def test_a_batch_is_sampled_and_measured_by_the_weights_of_one_update_earlier(watched):
    for t, (batch, stats) in enumerate(zip(watched.batches, watched.stats, strict=True)):
        sampled_by, current = watched.models[max(t - 1, 0)], watched.models[t]  # models[t] has made t updates
        differ = 0.0
        for i, row in enumerate(batch.flat_rows()):
            if row.trajectory is not None:
                assert stats.behaviour_logprobs[i] is row.trajectory.behaviour_logprobs
                continue
            expected = watched.logprobs(sampled_by, row)
            np.testing.assert_allclose(stats.behaviour_logprobs[i], expected, atol=LOGPROB_ERROR, rtol=0)
            now = watched.logprobs(current, row)
            np.testing.assert_allclose(stats.policy_logprobs[i], now, atol=LOGPROB_ERROR, rtol=0)
            differ = max(differ, float((now - expected).abs().max()))
            assert row.response.policy_step == max(t, 1)
        assert (differ > 100 * LOGPROB_ERROR) == (t > 0)
    assert [row["rollout/age_mean"] for row in watched.metrics] == [0, 1, 1, 1, 1, 1]


def test_what_is_stored_has_the_version_and_the_log_probs_of_the_policy_that_sampled_it(watched):
    stored = [(q, t) for q in watched.run.buffer.records for t in watched.run.buffer.trajectories(q)]
    versions = {one.step for _, one in stored}
    assert len(versions) > 2
    assert max(versions) == 5, "the sixth batch was sampled in the fifth step"
    for question_id, one in stored:
        prompt = watched.engine.prompts.encode(watched.run.fresh.question(question_id))
        expected = plain_stats(watched.models[one.step - 1], prompt, one.token_ids)[0]
        np.testing.assert_allclose(one.behaviour_logprobs, expected, atol=LOGPROB_ERROR, rtol=0)


def test_the_trajectory_is_chosen_by_its_entropy_under_the_policy_that_is_about_to_be_updated(watched):
    several = 0
    for model, batch, considered in zip(watched.models, watched.batches, watched.considered, strict=True):
        for group, members in zip(batch.groups, batch.rows, strict=True):
            if not group.planned_replay:
                continue
            prompt, stored = watched.engine.prompts.encode(group.question), considered[group.question.id].stored
            entropies = [float(plain_stats(model, prompt, one.token_ids)[1].mean()) for one in stored]
            several += len(stored) > 1
            assert members[-1].trajectory is stored[int(np.argmin(entropies))]
    assert several > 2


@pytest.mark.parametrize("clipped", [True, False])
def test_the_update_on_rows_of_age_1_is_that_of_the_equations_in_float64(clipped, warm_model, tmp_path):
    """−min(w·A, clip(w)·A) or −min(w, c)·A, w = π_θ/π_old with π_old one update earlier; replayed −f(w*)·A."""
    off = ("MixedPolicyLoss.clip_low = None", "MixedPolicyLoss.clip_high = None")
    more = () if clipped else (*off, "MixedPolicyLoss.max_fresh_weight = 1.05")
    run = Watched(
        warm_model,
        tmp_path,
        "Optimizer.learning_rate = 0.005",
        "Optimizer.max_grad_norm = 1e9",
        "RetirementPolicy.at_accuracy = None",
        *more,
    )
    run.step()
    run.step()
    start = weights(run.engine)
    use_sgd(run.engine, 1.0)
    run.step()
    sampled_by, model = run.models[1:]
    total, outside = torch.zeros((), dtype=torch.float64), 0
    trained = run.batches[2].flat_rows()
    assert sum(row.trajectory is not None and row.advantage != 0 for row in trained) > 2
    for row in trained:
        prompt = run.engine.prompts.encode(row.question)
        ids = torch.tensor([*prompt, *row.token_ids.tolist()])
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(1).gather(1, ids[len(prompt) :, None]).squeeze(1)
        if row.trajectory is not None:
            w = torch.exp(logprobs - torch.from_numpy(row.trajectory.behaviour_logprobs).double())
            terms = w / (w + 0.1) * row.advantage
        else:
            w = torch.exp(logprobs - run.logprobs(sampled_by, row))
            if clipped:
                outside += int(((w > 1.2) | (w < 0.8)).sum())
                terms = torch.minimum(w * row.advantage, w.clamp(0.8, 1.2) * row.advantage)
            else:
                outside += int((w > 1.05).sum())
                terms = (w.detach().clamp(max=1.05) / w.detach()) * w * row.advantage
        total = total + terms.sum() / (len(run.batches[2].rows) * K * 24)
    total.backward()
    moved = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).float()
    assert outside > 3, "the bound is reached"
    assert moved.abs().max() > 1e-3
    change = weights(run.engine) - start
    torch.testing.assert_close(change, moved, atol=float32_error(start, run.batches[2], moved, steps=1), rtol=0)


@pytest.mark.slow
def test_the_next_batch_is_planned_before_this_one_is_observed_and_replay_starts_one_step_later(warm_model, tmp_path):
    """The first batch's Pass@1 ends the delayed start; without `generate_ahead` the second batch would replay. The one
    that replays first has the first ρ of a schedule, which ends with the next."""
    shares = {}
    for name in ("synchronous", "ahead"):
        start = ["ReplayMixer.start_at_accuracy = 0.0", "RetirementPolicy.at_accuracy = None", "train.steps = 4"]
        start += ["ReplayMixer.rho_end = 0.0", "ReplayMixer.rho_steps = 1"]
        run_steps(warm_model, [*start, f"train.generate_ahead = {name == 'ahead'}"], tmp_path / name)
        shares[name] = [row["replay/actual_share"] for row in timeless(tmp_path / name)[1:]]
    assert [share > 0 for share in shares["synchronous"]] == [False, True, False, False]
    assert [share > 0 for share in shares["ahead"]] == [False, False, True, False]


def test_an_age_of_2_is_the_least_with_which_something_is_replayed(warm_model, tmp_path):
    with pytest.raises(ConfigError, match=r"max_age = 1 .* replays nothing.* bind 2 or more"):
        begin(warm_model, tmp_path, AHEAD, "ReplayBuffer.max_age = 1")
    run = Watched(warm_model, tmp_path, "ReplayBuffer.max_age = 2", "RetirementPolicy.at_accuracy = None")
    for _ in range(4):
        run.step()
    assert run.metrics[-1]["replay/actual_share"] > 0


@pytest.fixture
def verdict(monkeypatch) -> dict[str, bool]:
    """Every response is correct while `right`, else none is."""
    say = {"right": True}
    decide_verdicts(monkeypatch, lambda *_: say["right"])
    return say


EVERY_STEP = "ModularChains.count = 8"  # a step has all eight questions


def test_a_question_that_retires_in_a_step_is_still_replayed_in_the_next_which_was_planned_before(
    verdict, warm_model, tmp_path
):
    run = Watched(warm_model, tmp_path, EVERY_STEP, "ReplayMixer.rho = 0.5", "RetirementPolicy.times_in_a_row = 2")
    for _ in range(5):
        run.step()
    replayed = [[group.question.id for group in batch.groups if group.planned_replay] for batch in run.batches]
    retired = [metrics["replay/retired"] for metrics in run.metrics]
    # Solved in steps 1 and 2, all retire in step 2. Step 2 was planned before anything was stored; step 3 before that
    # retirement, step 4 after it.
    assert [len(ids) for ids in replayed] == [0, 0, 4, 0, 0]
    assert retired == [0, 8, 8, 8, 8]


def test_a_question_may_be_in_two_consecutive_batches_but_in_none_twice(watched):
    batch_ids = [[group.question.id for group in batch.groups] for batch in watched.batches]
    assert all(len({*ids}) == len(ids) for ids in batch_ids)
    assert any({*one} & {*next_one} for one, next_one in itertools.pairwise(batch_ids))


def test_rollouts_of_further_rounds_are_sampled_by_the_weights_that_train_on_them(verdict, warm_model, tmp_path):
    """No group has a signal: dynamic sampling asks further questions in the step that trains."""
    verdict["right"] = False
    run = Watched(warm_model, tmp_path, *ON_POLICY, "DynamicSampling.max_rounds = 1")
    observed, observe = [], run.run.fresh.observe
    run.run.fresh.observe = lambda groups, step: observed.append(groups) or observe(groups, step)
    for _ in range(3):
        run.step()
    for step, groups in enumerate(observed, start=1):
        versions = [rollout.policy_step for group in groups for rollout in group.rollouts]
        assert versions == [max(step - 1, 1)] * 8 * K + [step] * 8 * K


def run_steps(model: Path, more: list[str], folder: Path) -> None:
    resume = (folder / "metrics.jsonl").exists()
    train_small(model, folder, "train.eval_every = None", *more, resume=resume)


def question_ids(run: Path) -> list[list[str]]:
    return [row["questions"]["id"] for row in rows(run / "decisions.jsonl")]


@pytest.mark.slow
def test_no_question_is_skipped_or_doubled_however_often_the_run_is_resumed(warm_model, tmp_path):
    """On-policy, so that what is drawn depends on nothing that was learned: the same questions in the same order."""
    run_steps(warm_model, [*ON_POLICY, "train.steps = 9"], tmp_path / "synchronous")
    for steps in (2, 3, 7, 9):
        run_steps(warm_model, [*ON_POLICY, AHEAD, f"train.steps = {steps}"], tmp_path / "ahead")
    assert question_ids(tmp_path / "ahead") == question_ids(tmp_path / "synchronous")


def test_a_batch_is_read_as_it_was_written(tmp_path):
    rng, chains = np.random.default_rng(0), questions(4)
    grades = [Grade("correct", 1.0, True, "7"), Grade("timeout", None), Grade("wrong", 0.25, None, None)]

    def rollout(i: int) -> Rollout:
        made = trajectory(rng, 3 + i)
        finish = "length" if i == 1 else "stop"
        of_sampler = None if i else made.behaviour_logprobs + np.float32(1e-6)  # of vLLM on the local engine
        return Rollout(made.token_ids, finish, grades[i], of_sampler, made.behaviour_logprobs, 6)

    groups = [RolloutGroup(q, tuple(rollout(i) for i in range(3 - (n > 1))), n > 1) for n, q in enumerate(chains)]
    candidates = {
        chains[2]: [trajectory(rng, 5, 3), replace(trajectory(rng, 4, 2), sound=False)],
        chains[3]: [trajectory(rng, 3)],
    }
    batch = ahead.BatchAhead(Plan(7, chains[:2], chains[2:], candidates, rollouts_per_replayed=2), groups)
    ahead.save(batch, tmp_path / "ahead")
    loaded = ahead.load(tmp_path / "ahead", {q.id: q for q in chains}.__getitem__, 7, 2)
    assert loaded.plan.rollout_counts(3) == batch.plan.rollout_counts(3) == [3, 3, 2, 2]
    np.testing.assert_equal(plain(loaded), plain(batch))


def plain(batch: ahead.BatchAhead) -> list:
    """What can be compared: arrays as such, records as tuples."""
    plan, stored, rollouts = batch.plan, [], []
    for question, trajectories in plan.stored.items():
        for t in trajectories:
            stored.append((question, t.token_ids, t.behaviour_logprobs, t.reward, t.step, t.finish, t.sound))
    for g in batch.groups:
        for r in g.rollouts:
            origin = (r.sampler_logprobs, r.behaviour_logprobs, r.policy_step)
            rollouts.append((g.question, g.planned_replay, r.token_ids, r.finish, r.grade, *origin))
    counts = plan.rollout_counts(3)
    return [plan.step, plan.fresh, plan.replayed, plan.round, counts, list(plan.stored), stored, rollouts]


def test_what_fails_beside_an_update_is_raised_where_it_is_waited_for():
    def fails():
        raise ValueError("an engine died")

    future = ahead.start(fails, in_thread=True)
    with pytest.raises(ValueError, match="an engine died"):
        future.result()
    with pytest.raises(ValueError, match="an engine died"):
        ahead.start(fails, in_thread=False)
    assert ahead.start(threading.get_ident, in_thread=True).result() != threading.get_ident()
    assert ahead.start(threading.get_ident, in_thread=False).result() == threading.get_ident()


def test_where_the_update_fails_what_failed_beside_it_is_said_too(warm_model, tmp_path, caplog):
    run = Watched(warm_model, tmp_path)
    run.step()

    def failing_update(batch, loss):
        raise RuntimeError("an actor died")

    def failing_beside(*_):
        future = Future()
        future.set_exception(ValueError("an engine died"))
        return _NextBatch(future, None)

    run.engine.update, run.run._begin_next = failing_update, failing_beside
    with pytest.raises(RuntimeError, match="an actor died"):
        run.step()
    assert "beside this update failed too: an engine died" in caplog.text
