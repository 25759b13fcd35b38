"""With replay off the trainer is on-policy GRPO: compared with a plain loop that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from run_builders import rows, small_bindings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf import config
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.training.run import train

STEPS, B, K, LENGTH, SEED = 5, 6, 4, 24, 11
# Adam divides by the gradient's size: where that is rounding error (1e-9), two right programs take steps that differ by
# a share of the learning rate. At this rate every weight moves fifty times the tolerance.
RATE = 1e-5


def plain_loop(model_path):
    """GRPO in forty lines: sample K, reward 0 or 1, subtract the group's mean, one AdamW step per batch."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    questions = ModularChains(count=24, operands=(3,)).load()
    rng = np.random.default_rng(np.random.SeedSequence([SEED, 2]))
    queue, sampled, rewards_by_step = [], [], []
    for step in range(1, STEPS + 1):
        if len(queue) < B:
            queue += rng.permutation(len(questions)).tolist()
        batch, queue = [questions[i] for i in queue[:B]], queue[B:]
        prompts = tokenizer([q.prompt for q in batch for _ in range(K)], return_tensors="pt")  # all of one length
        torch.manual_seed(int(np.random.SeedSequence([SEED, step, 0]).generate_state(1, np.uint64)[0]))
        ids = prompts["input_ids"]
        start = ids.shape[1]
        for _ in range(LENGTH):  # inverse sampling: the first token whose cumulative probability exceeds the number
            with torch.no_grad():
                cumulative = model(input_ids=ids).logits[:, -1].softmax(-1).double().cumsum(-1)
            number = torch.rand(B * K, 1, dtype=torch.float64) * cumulative[:, -1:]
            ids = torch.cat([ids, (cumulative <= number).sum(-1, keepdim=True)], 1)
        responses = [row[: row.index(1) + 1] if 1 in row else row for row in ids[:, start:].tolist()]
        texts = [tokenizer.decode(r, skip_special_tokens=True) for r in responses]
        rewards = torch.tensor(
            [
                float("#" in t and t.rpartition("#")[2] == q.answer)
                for t, q in zip(texts, [q for q in batch for _ in range(K)], strict=True)
            ]
        )
        advantages = (rewards.view(B, K) - rewards.view(B, K).mean(1, keepdim=True)).flatten()
        loss = 0.0
        for i, response in enumerate(responses):
            row = torch.cat([prompts["input_ids"][i], torch.tensor(response)])[None]
            logits = model(input_ids=row).logits[0, start - 1 : -1]
            logprobs = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
            ratio = torch.exp(logprobs - logprobs.detach())
            loss = loss - (ratio * advantages[i]).sum() / (B * K * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sampled.append(responses)
        rewards_by_step.append(float(rewards.mean()))
    return model.state_dict(), sampled, rewards_by_step


def test_replay_off_samples_the_same_tokens_and_ends_at_the_same_weights_as_a_plain_loop(
    warm_model, tmp_path, monkeypatch
):
    bindings = small_bindings(
        warm_model,
        "ModularChains.operands = (3,)",
        f"train.steps = {STEPS}",
        f"train.questions_per_step = {B}",
        f"train.group_size = {K}",
        "train.eval_every = None",
        f"Optimizer.learning_rate = {RATE}",
    )
    experiment = config.load(["baselines/on_policy.gin"], bindings, seed=SEED)
    sampled = []
    collect = experiment.mixer.collect

    def watch(batch, *measured):
        sampled.append([row.token_ids.tolist() for row in batch.flat_rows()])
        return collect(batch, *measured)

    monkeypatch.setattr(experiment.mixer, "collect", watch)
    train(experiment, tmp_path, resume=False, tracking_uri="unused", tags={})
    expected_weights, expected_tokens, expected_rewards = plain_loop(warm_model)
    assert any(rewards > 0 for rewards in expected_rewards), "nothing was learned from"
    assert sampled == expected_tokens
    measured = rows(tmp_path)[1:]
    assert [row["reward/mean"] for row in measured] == pytest.approx(expected_rewards)
    assert not any(name.startswith("replay/") for row in measured for name in row)
    start = load_file(warm_model / "model.safetensors")
    weights = load_file(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors")
    for name, tensor in weights.items():
        assert (tensor - start[name]).abs().max() > 2e-5, f"{name} has hardly moved"
        assert torch.allclose(tensor, expected_weights[name], atol=1e-6, rtol=0), name
