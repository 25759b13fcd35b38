"""Runs with stored groups, against a plain loop over whole logits."""

from __future__ import annotations

import json

import pytest
import torch
from engine_builders import use_sgd, weights
from step_builders import begin, watched
from transformers import AutoModelForCausalLM

K, ROWS = 4, 3
STORED = (
    *("ReplayMixer.injection = @StoredGroup()", f"StoredGroup.rows = {ROWS}", "StoredGroup.least = 2"),
    *("ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.per_question = 8", "ReplayMixer.rho = 0"),
    *("RetirementPolicy.at_accuracy = None", "MixedPolicyLoss.shaping = False"),
    *("MixedPolicyLoss.clips_replayed = True", "GroupAdvantages.scale_by_std = True", "ModularChains.count = 12"),
    *("MixedPolicyLoss.normalizer = 'sequences'", "Optimizer.max_grad_norm = 1e9"),
)


def standardised(rewards: list[float]) -> list[float]:
    r = torch.tensor(rewards, dtype=torch.float64)
    return ((r - r.mean()) / (r.std() + 1e-6)).tolist() if len(r) > 1 and r.std() else [0.0] * len(r)


def plain_repo(model, prompts, groups):
    """−(J_on + J_off) of RePO's paper and its gradient. groups: of each question its fresh rows and its stored ones as
    (token ids, reward, log-probs of the policy that sampled them or None for this one)"""
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, (fresh, stored) in zip(prompts, groups, strict=True):
        for rows, places in ((fresh, K), (stored, ROWS)):
            for (ids, _, past), advantage in zip(rows, standardised([reward for _, reward, _ in rows]), strict=True):
                tokens = torch.tensor([*prompt, *ids])
                logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]
                now = logits.log_softmax(1).gather(1, tokens[len(prompt) :, None]).squeeze(1)
                ratio = torch.exp(now - (now.detach() if past is None else torch.from_numpy(past).double()))
                terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss - terms.sum() / len(ids) / places / len(groups)
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("rho", [0, 0.5])
def test_loss_and_gradient_are_those_of_the_papers_formulas(warm_model, tmp_path, monkeypatch, rho):
    run = begin(warm_model, tmp_path, *STORED, f"ReplayMixer.rho = {rho}", "ReplayBuffer.replays_unsolved = True")
    seen, generated = watched(run, monkeypatch), 0
    for _ in range(3):
        metrics = run.step()
        generated += sum(one.length for g in seen[-1][0].groups for one in g.rollouts)
        assert metrics["cost/generated_tokens"] == generated
    before = weights(run.engine)
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    model.load_state_dict(run.engine.model.state_dict())
    use_sgd(run.engine, 1.0)
    pool = {id: [e.trajectory for e in record.stored] for id, record in run.buffer.records.items()}
    metrics = run.step()
    batch, groups = seen[-1][0], []
    for g, rows in zip(batch.groups, batch.rows, strict=True):
        fresh = [(row.token_ids.tolist(), row.response.grade.reward, None) for row in rows[:K]]
        own = pool.get(g.question.id, [])
        newest = own[-ROWS:] if len(own) >= 2 else []
        assert [row.trajectory.key for row in rows[K:]] == [one.key for one in newest], "as before the step"
        groups.append((fresh, [(one.token_ids.tolist(), one.reward, one.behaviour_logprobs) for one in newest]))
        assert len(g.rollouts) == K
        assert g.accuracy == run.buffer.records[g.question.id].accuracy
    assert any(stored and len({reward for _, reward, _ in stored}) > 1 for _, stored in groups), "one has a signal"
    assert metrics["replay/added_rows"] == sum(len(stored) for _, stored in groups)
    prompts = [run.engine.prompts.encode(g.question) for g in batch.groups]
    loss, gradient = plain_repo(model, prompts, groups)
    assert metrics["policy/loss"] == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(before - weights(run.engine), gradient.float(), atol=1e-5, rtol=1e-4)
    assert metrics["replay/actual_share"] == rho


def test_the_log_of_decisions_has_every_stored_row(warm_model, tmp_path, monkeypatch):
    run = begin(warm_model, tmp_path, *STORED)
    seen = watched(run, monkeypatch)
    for _ in range(5):
        run.step()
    *_, last = map(json.loads, (tmp_path / "decisions.jsonl").read_text().splitlines()[-1:])
    stored = [row for row in seen[-1][0].flat_rows() if row.trajectory is not None]
    assert last["replays"]["trajectory"] == [row.trajectory.key.hex()[:12] for row in stored]
    assert last["replays"]["age"] == [5 - row.trajectory.step for row in stored]
    assert max(last["replays"]["of"]) == ROWS
    assert max(last["replays"]["place"]) == ROWS - 1
    assert "injected" in last["questions"]["as"]
    texts = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[-1])["questions"]
    [beside] = [text for text in texts if any(response["kind"] == "stored" for response in text["responses"])]
    assert all("now" in one and one["chosen"] for one in beside["responses"] if one["kind"] == "stored")
