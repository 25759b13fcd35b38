"""vLLM in the trainer's process, on a CPU: the policy's distribution and weights, kills, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from eval_builders import needs_vllm
from run_builders import (
    BUILDERS,
    MIXED_PHASE,
    STEPS,
    assert_same_ending,
    bindings,
    environment,
    python,
    rows,
    rows_so_far,
    train_command,
    train_small,
    wait_until,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.sampling import EngineLost
from exgrpo_orlhf.sampling.request import Request
from exgrpo_orlhf.sampling.vllm_here import VllmSampler

BY_VLLM = "LocalEngine.sampler = 'vllm'"


@pytest.fixture(scope="module")
def findings(warm_model, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(warm_model), AutoTokenizer.from_pretrained(warm_model)
    for name in ("tied", "untied"):
        assert model.config.tie_word_embeddings == (name == "tied")
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach().clone())
    program = python(BUILDERS / "vllm_sampler.py", folder)
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads(program.stdout.split("\n")[-2])


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("model", ["tied", "untied", "lora"])
def test_vllm_samples_with_the_weights_of_the_last_update(findings, model):
    """A tied output layer is where a stale copy hides, an untied one where it is left out."""
    found = findings[model]
    assert found["moved"] > 1e-2, "the updates do something"
    assert found["stale"] == []
    assert "model.embed_tokens.weight" in found["compared"]
    assert ("lm_head.weight" in found["compared"]) == (model == "untied")
    assert max(found["before"], found["after"], found["metric"]) < 1e-4


@pytest.mark.slow
@needs_vllm
def test_first_tokens_have_the_policys_distribution_and_come_again(findings):
    """10^4 of them; Pearson's statistic over the tokens expected at least five times, within six of its deviations."""
    first = findings["first"]
    counts, expected = np.array(first["counts"]), 10_000 * np.array(first["probabilities"])
    assert counts.sum() == 10_000
    often = expected >= 5
    statistic, freedom = ((counts - expected) ** 2 / expected)[often].sum(), often.sum() - 1
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom) + 6
    assert first["repeats"]


@pytest.mark.slow
@needs_vllm
def test_greedy_responses_and_episodes_are_those_of_the_loop(findings):
    """Nearly: where two logits are all but equal, the two may disagree."""
    answers = findings["loop"]["answers"]
    for name, least in (("", 19), (" episodes", 11)):
        pairs = zip(answers[f"vllm{name}"], answers[f"loop{name}"], strict=True)
        assert sum(ours == theirs for ours, theirs in pairs) >= least
    assert max(findings["loop"]["turns"]) > 1
    assert findings["loop"]["logprobs_of_actions"]


@pytest.mark.slow
@needs_vllm
def test_a_response_ends_with_its_end_token_or_at_its_limit_also_after_a_caller_stopped_early(findings):
    assert ["stop", True] in findings["loop"]["ends"]
    assert ["stop", False] not in findings["loop"]["ends"]


@pytest.mark.slow
@needs_vllm
def test_a_killed_run_resumes_and_ends_as_an_undisturbed_one(warm_model, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    words = bindings(warm_model, [*MIXED_PHASE, BY_VLLM])
    assert python(*train_command(straight, words)[1:]).returncode == 0
    process = subprocess.Popen(train_command(killed, words), env=environment(), stdout=subprocess.DEVNULL)
    wait_until(lambda: len(rows_so_far(killed)) > 5, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert STEPS not in checkpoints.find(killed)
    assert python(*train_command(killed, words)[1:], "--resume").returncode == 0
    assert_same_ending(killed, straight)
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in rows(straight)[1:])
    assert {"eval/greedy_accuracy"} <= rows(straight)[-1].keys()


def test_memory_that_vllm_cannot_take_back_is_said_with_the_settings_that_need_less():
    def wake_up():
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")

    sampler = VllmSampler.__new__(VllmSampler)
    sampler._asleep, sampler._llm = True, SimpleNamespace(wake_up=wake_up)
    with pytest.raises(EngineLost, match=r"out of memory.*LocalEngine\.sampler_memory"), sampler.awake():
        pass


@pytest.mark.parametrize("asleep", [False, True])
def test_memory_that_is_too_small_for_the_weights_is_said_too_and_another_error_is_not_taken_for_it(asleep):
    def takes(error):
        def apply_model(load):
            raise error

        sampler = VllmSampler.__new__(VllmSampler)
        sampler._asleep, sampler._llm = asleep, SimpleNamespace(wake_up=lambda: None, apply_model=apply_model)
        return sampler.awake()

    with (
        pytest.raises(EngineLost, match=r"out of memory.*LocalEngine\.sampler_memory"),
        takes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"^of another shape$"), takes(RuntimeError("of another shape")):
        pass


@pytest.mark.parametrize("sleeps", [False, True])
def test_samples_that_nobody_waits_for_are_cancelled_and_then_vllm_sleeps(sleeps):
    """Its memory is the trainer's, whose update follows."""
    calls = []
    sampler = VllmSampler.__new__(VllmSampler)
    sampler._asleep, sampler._sleeps, sampler.outdated = False, sleeps, False
    sampler._llm = SimpleNamespace(
        abort_request=lambda names: calls.append(f"cancelled {names}"), sleep=lambda level: calls.append("asleep")
    )
    sampler._send = lambda request, seed: f"request {len(request.prompt_ids)}"
    sampler._arrived = lambda pending, wait: [(next(iter(pending)), [])]
    samples = sampler.sample([Request([2] * length, 0, 4, 1.0) for length in (1, 2)])
    assert next(samples) == [(0, [])]
    assert calls == []
    samples.close()
    assert calls == ["cancelled ['request 2']", *["asleep"] * sleeps]
    assert sampler._asleep == sleeps


def test_without_vllm_the_message_says_how_to_get_it_and_what_to_bind_instead(warm_model, tmp_path, monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.sampling.vllm_requests.find_spec", lambda name: None)
    with pytest.raises(EngineLost, match=r"pip install -e '\.\[vllm\]', or bind LocalEngine.sampler = 'loop'"):
        train_small(warm_model, tmp_path / "run", BY_VLLM)
