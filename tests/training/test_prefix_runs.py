"""Runs whose groups continue stored responses, against a plain loop, and against a run that gives nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_builders import use_sgd, weights
from run_builders import small_bindings, timeless
from step_builders import begin, watched
from test_resume import CALCULATOR
from transformers import AutoModelForCausalLM

from exgrpo_orlhf import config
from exgrpo_orlhf.replay.prefix import FixedShare, Prefix
from exgrpo_orlhf.training.run import train

PREFIX = ("ReplayMixer.injection = @Prefix()", "ReplayBuffer.replays_unsolved = True", "Prefix.target = 0.9")
K, LENGTH = 4, 24


def plain_gradient(model, prompts, groups, normalizer):
    """Of the on-policy loss, row by row: the given tokens follow the prompt, and only what comes after them counts.

    groups: of each question its rows as (token ids, given tokens, reward)
    """
    n = sum(len(ids) - given for members in groups for ids, given, _ in members)
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, members in zip(prompts, groups, strict=True):
        mean = sum(reward for *_, reward in members) / len(members)
        for ids, given, reward in members:
            begin = len(prompt) + given
            tokens = torch.tensor([*prompt, *ids])
            logits = model(input_ids=tokens[None]).logits[0, begin - 1 : -1]
            logprobs = logits.log_softmax(1).gather(1, tokens[begin:, None]).squeeze(1)
            ratio = torch.exp(logprobs - logprobs.detach())
            length = len(ids) - given
            divisor = {"constant": len(groups) * K * LENGTH, "tokens": n, "sequences": len(groups) * K * length}
            loss = loss - (ratio * (reward - mean)).sum() / divisor[normalizer]
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("normalizer", ["constant", "tokens", "sequences"])
def test_loss_and_gradient_of_continued_groups_are_those_of_a_plain_loop(warm_model, tmp_path, monkeypatch, normalizer):
    settings = (f"MixedPolicyLoss.normalizer = {normalizer!r}", "Optimizer.max_grad_norm = 1e9")
    run = begin(warm_model, tmp_path, *PREFIX, *settings, "Optimizer.learning_rate = 1e-6")
    seen = watched(run, monkeypatch)
    run.step()
    before = weights(run.engine)
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    model.load_state_dict(run.engine.model.state_dict())
    use_sgd(run.engine, 1.0)
    metrics = run.step()
    batch = seen[-1][0]
    assert 0 < metrics["replay/continued_share"] <= 0.5
    told = [[(row.token_ids.tolist(), g.given, r.grade.reward) for row, r in zip(members, g.rollouts, strict=True)]
            for g, members in zip(batch.groups, batch.rows, strict=True)]  # fmt: skip
    assert any(members[0][1] and len({reward for *_, reward in members}) > 1 for members in told), "one has a signal"
    prompts = [run.engine.prompts.encode(g.question) for g in batch.groups]
    loss, gradient = plain_gradient(model, prompts, told, normalizer)
    assert metrics["policy/loss"] == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(before - weights(run.engine), gradient.float(), atol=1e-6, rtol=1e-4)
    for row, logprobs in zip(batch.flat_rows(), seen[-1][1].policy_logprobs, strict=True):
        assert len(logprobs) == len(row.token_ids) - row.response.given == row.length


def test_all_rollouts_of_a_continued_group_begin_with_what_is_stored_and_nothing_of_it_is_counted(
    warm_model, tmp_path, monkeypatch
):
    run = begin(warm_model, tmp_path, *PREFIX, "Prefix.of = 'both'", "ModularChains.count = 12")
    seen, generated = watched(run, monkeypatch), 0
    for _ in range(6):
        stored = {id: [*entry.stored] for id, entry in run.buffer.records.items()}
        failed = {id: [*entry.stored] for id, entry in run.buffer.failed.records.items()}
        accuracy = {id: (entry.accuracy, entry.observed_step) for id, entry in run.buffer.records.items()}
        metrics = run.step()
        batch = seen[-1][0]
        generated += sum(len(one.token_ids) - one.given for g in batch.groups for one in g.rollouts)
        plain = [one for g in batch.groups if not g.given for one in g.rollouts]
        assert metrics["reward/pass_at_1"] == pytest.approx(np.mean([one.grade.correct for one in plain]))
        for g in batch.groups:
            beginnings = {tuple(one.token_ids[: g.given].tolist()) for one in g.rollouts}
            if g.given:
                pool = [e.trajectory for e in (*stored.get(g.question.id, ()), *failed.get(g.question.id, ()))]
                assert beginnings <= {tuple(one.token_ids[: g.given].tolist()) for one in pool}
                assert len(beginnings) == 1
                assert all(len(one.token_ids) <= LENGTH for one in g.rollouts)
                if g.question.id in accuracy and g.question.id not in run.buffer.retired:
                    record = run.buffer.records[g.question.id]
                    assert (record.accuracy, record.observed_step) == accuracy[g.question.id]
                    assert {e.key for e in record.stored} == {e.key for e in stored[g.question.id]}
    assert metrics["cost/generated_tokens"] == generated
    kinds = run.buffer.failed.n_trajectories, metrics["replay/continued_share"]
    assert min(kinds) > 0


class AskedAgain(Prefix):
    """Questions are drawn as `Prefix` draws them, and nothing else."""

    prefix = None


def test_a_run_that_is_given_nothing_equals_to_the_byte_one_that_only_asks_again(warm_model, tmp_path):
    runs = []
    bindings = ("train.steps = 6", "TrajectorySelector.by = 'recency'", *PREFIX)
    for name, injection in (("given", Prefix(share=FixedShare(0.0))), ("again", AskedAgain())):
        experiment = config.load(["toy.gin"], small_bindings(warm_model, *bindings))
        experiment.mixer.injection = injection
        train(experiment, tmp_path / name, resume=False, tracking_uri="unused", tags={})
        files = ("checkpoint-6/model.safetensors", "checkpoint-6/replay/trajectories.parquet", "decisions.jsonl")
        runs.append(([(tmp_path / name / file).read_bytes() for file in files], timeless(tmp_path / name)))
    assert runs[0] == runs[1]
    assert any(row.get("replay/actual_share") for row in runs[0][1])


def test_episodes_go_on_from_a_turn_of_a_stored_one_and_the_environment_with_them(warm_model, tmp_path, monkeypatch):
    fixed = ("Prefix.share = @FixedShare()", "FixedShare.value = 0.9")
    run = begin(warm_model, tmp_path, *CALCULATOR, *PREFIX, *fixed, "RetirementPolicy.at_accuracy = None")
    seen, continued = watched(run, monkeypatch), 0
    for _ in range(6):
        stored = {id: [e.trajectory for e in entry.stored] for id, entry in run.buffer.records.items()}
        run.step()
        for g in seen[-1][0].groups:
            for one in g.rollouts if g.given else ():
                [begun] = {t.key: t for t in stored[g.question.id] if t.seed == one.seed}.values()
                n = one.given
                assert begun.token_ids[:n].tolist() == one.token_ids[:n].tolist()
                assert begun.actions[n - 1]
                assert not begun.actions[n], "a turn has ended"
                behind = n + int(np.argmax(begun.actions[n:]))
                assert one.token_ids[n:behind].tolist() == begun.token_ids[n:behind].tolist(), "it answers as it did"
                assert one.length == int(one.actions[n:].sum()) > 0
                assert run.engine.written(g.question, [one])[0].turns == one.turns > 1
                continued += 1
    assert continued > 8
