"""The estimates of what a layout needs, against the sums that were made by hand for GPUs of 80 GB. No GPU was there."""

from __future__ import annotations

import re

import pytest
from layouts import MODELS
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from exgrpo_orlhf import config
from exgrpo_orlhf.engines import lora as adapters
from exgrpo_orlhf.engines.openrlhf import estimates
from exgrpo_orlhf.settings import LocalEngine, LoRA

H100 = 81559 * 2**20  # bytes, as nvidia-smi reports them
QWEN_7B, QWEN_1B = MODELS["7B"], MODELS["1.5B"]
KL, CONVEX = "MixedPolicyLoss.kl_coef = 0.001", "MixedPolicyLoss.kl_convex = @ConvexKL()"
APART = {"train.colocate_all": False, "vllm.enable_sleep": False, "ds.enable_sleep": False}


def load(layout: str, *bindings: str, recipe: str = "toy.gin", **flags):
    more = [f"OpenRLHF.more_flags = {flags!r}", *bindings]
    return config.load([recipe, f"engines/openrlhf_{layout}.gin"], more)


NAMED = ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions.parquet'"]


def papers(layout: str, *bindings: str):
    return load(layout, *NAMED, "train.steps = 700", *bindings, recipe="recipes/paper.gin")


def sums(experiment, model, total=80e9):
    return estimates.memory_of(experiment, model, total)


def short_of(experiment, model, total=H100):
    return estimates.too_little_memory(experiment, sums(experiment, model, total), total)


# Made by hand, in GB: model, update, before the update with a KL term (0: not made), rollout, host, cache in tokens.
BY_HAND = {
    "8gpu": (QWEN_7B, 29.6, 38.9, 29.6 + 30.1, 63.2, 228, 484_000),
    "1gpu": (QWEN_1B, 25.7, 30.9, 25.7 + 18.0, 51.1, 0, 1_392_000),
    "8gpu_ahead": (QWEN_7B, 42.9, 52.2, 73.0, 68.0, 0, 833_000),
    "multinode": (QWEN_7B, 19.6, 28.9, 0, 63.2, 149, 484_000),
    "multinode_ahead": (QWEN_7B, 22.9, 32.2, 0, 68.0, 0, 833_000),
}


@pytest.mark.parametrize("layout", BY_HAND)
def test_the_sums_are_those_that_were_made_by_hand(layout):
    """To their rounding: 0.05 GB, and for the update 0.15, where two of its terms were rounded to half a GB."""
    model, states, update, reference, rollout, host, cache = BY_HAND[layout]
    estimate = sums(papers(layout), model)
    assert estimate.model / 1e9 == pytest.approx(states, abs=0.05)
    assert estimate.update / 1e9 == pytest.approx(update, abs=0.15)
    assert estimate.reference == 0
    assert estimate.rollout / 1e9 == pytest.approx(rollout, abs=0.05)
    assert estimate.cache == pytest.approx(cache, abs=500)
    if host:
        assert estimate.host / 1e9 == pytest.approx(host, abs=0.6)
    if reference:
        assert sums(papers(layout, KL), model).reference / 1e9 == pytest.approx(reference, abs=0.1)


@pytest.mark.parametrize(("gpu", "total", "days"), [("A100", 550, 69), ("H100", 210, 27)])
def test_the_hours_are_those_that_were_made_by_hand(gpu, total, days):
    """The sum of docs/cluster.md, whose totals are rounded to tens."""
    seconds, gpus = estimates.step_of(papers("8gpu"), 7_615_616_512, estimates.CARDS[gpu])
    assert gpus == 8
    assert seconds * 700 / 3600 == pytest.approx(days, abs=0.5)
    assert seconds * 700 * 8 / 3600 == pytest.approx(total, abs=5)


TWO_STEPS, AHEAD = "Optimizer.steps_per_batch = 2", "train.generate_ahead = True"
AROUND = [
    "MixedPolicyLoss.shaping = False",
    "MixedPolicyLoss.clips_replayed = True",
    "MixedPolicyLoss.clip_around = 'policy'",
]


@pytest.mark.parametrize(
    ("engine", "bindings", "forward"),
    [
        ("openrlhf_8gpu", [], 0),
        ("openrlhf_8gpu", [TWO_STEPS], 1),
        ("openrlhf_8gpu", ["Optimizer.passes_per_batch = 2"], 4),  # and 3 of the second pass
        ("openrlhf_8gpu_ahead", [], 0),
        ("openrlhf_8gpu_ahead", [TWO_STEPS], 0),  # vLLM's
        ("openrlhf_8gpu_ahead", [TWO_STEPS, *AROUND], 1),
        ("local_gpu", [], 0),
        ("local_gpu", [TWO_STEPS], 1),
        ("local_gpu", [AHEAD], 1),
        ("local_gpu", [AHEAD, TWO_STEPS], 1),
    ],
)
def test_the_passes_that_measure_log_probs_before_an_update_are_in_the_hours(engine, bindings, forward, monkeypatch):
    """By the operations of one forward pass of all rows, where training takes longer than generation."""
    experiment = config.load(["base.gin", f"engines/{engine}.gin"], [*NAMED, "OpenRLHF.gpu = 'A100'", *bindings])
    card = estimates.Card(80e9, 312e12, 1e9)  # generates in no time
    monkeypatch.setattr(LocalEngine, "samples_by_vllm", lambda *_: True)  # also where it is not installed
    seconds, gpus = estimates.step_of(experiment, 10**9, card)
    ranks = gpus // 2 if experiment.settings.generate_ahead and gpus > 1 else gpus
    share = estimates.TRAIN_SHARE if experiment.local is None else estimates.LOCAL_TRAIN_SHARE
    per_pass = 1024 * 2 * 10**9 * (estimates.RESPONSE + estimates.PROMPT) / (card.flops * share) / ranks
    scored = 64 * estimates.CANDIDATES / 1024
    assert seconds / (1 + estimates.OTHER) / per_pass == pytest.approx(3 + scored + forward, abs=0.05)


@pytest.mark.parametrize(
    ("layout", "bindings", "flags", "model", "named"),
    [
        ("8gpu", [], {}, QWEN_7B, None),
        ("8gpu", [KL], {}, QWEN_7B, "the reference model"),
        ("8gpu", [KL], {"vllm.gpu_memory_utilization": 0.45}, QWEN_7B, None),
        ("8gpu", [KL, CONVEX], {"vllm.gpu_memory_utilization": 0.45}, QWEN_7B, "the copy of the preceding policy"),
        ("8gpu", [KL, CONVEX], {"vllm.gpu_memory_utilization": 0.3}, QWEN_7B, None),
        ("8gpu", [KL, CONVEX, "LoRA.rank = 16"], {}, QWEN_7B, None),  # the adapter's alone
        ("8gpu", [KL], {"ds.zero_stage": 3}, QWEN_7B, None),  # an eighth of the weights on each GPU
        ("8gpu", [], {"ds.enable_sleep": False, "vllm.gpu_memory_utilization": 0.7}, QWEN_7B, "the optimiser, awake"),
        ("multinode", [], {}, QWEN_7B, None),
        ("multinode", [KL], {}, QWEN_7B, "the reference model"),
        ("1gpu", [], {"vllm.gpu_memory_utilization": 0.95}, QWEN_1B, "at most 0.9"),
        ("8gpu", [KL], APART, QWEN_7B, None),  # nothing is shared
    ],
)
def test_vllms_share_is_weighed_against_the_weights_that_stay_on_the_gpu(layout, bindings, flags, model, named):
    reason = short_of(load(layout, *bindings, **flags), model)
    assert (reason is None) == (named is None), reason
    assert named is None or named in reason


def test_the_optimiser_states_of_an_adapter_are_small():
    flags = {"ds.enable_sleep": False, "vllm.gpu_memory_utilization": 0.7}
    assert "the optimiser, awake" in short_of(load("8gpu", **flags), QWEN_7B)
    assert short_of(load("8gpu", "LoRA.rank = 16", **flags), QWEN_7B) is None


def test_an_update_and_a_cache_that_do_not_fit_are_said_with_what_helps():
    bindings = ["Prompts.max_tokens = 1024", "MAX_RESPONSE_TOKENS = 8192"]
    all_weights = load("1gpu_24gb", *bindings)
    assert re.match(r"30\.8 GB of an update on 24\.0 GB .*gin/recipes/lora\.gin", short_of(all_weights, QWEN_1B, 24e9))
    assert short_of(load("1gpu_24gb", "LoRA.rank = 16", *bindings), QWEN_1B, 24e9) is None
    assert short_of(load("4gpu_24gb", *bindings), QWEN_1B, 24e9) is None
    reason = short_of(load("4gpu_24gb", KL, *bindings), QWEN_1B, 24e9)
    assert re.match(r"21\.0 GB of a reference pass on 24\.0 GB .*rollout\.max_tokens_per_gpu", reason)
    assert short_of(load("4gpu_24gb", KL, bindings[0], "MAX_RESPONSE_TOKENS = 5120"), QWEN_1B, 24e9) is None
    small = load("1gpu_24gb", "LoRA.rank = 16", *bindings, **{"vllm.gpu_memory_utilization": 0.34})
    assert "a cache of 2,5" in short_of(small, QWEN_1B, 24e9)


def test_parameters_are_counted_without_loading_any(tmp_path):
    assert estimates.parameters_of(QWEN_7B, LoRA()) == (7_615_616_512,) * 2
    assert estimates.parameters_of(QWEN_1B, LoRA()) == (1_543_714_304,) * 2
    for tied in (True, False):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        small = Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=50, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(small)
        model.save_pretrained(tmp_path / str(tied))
        count = sum(weight.numel() for weight in model.parameters())
        assert estimates.parameters_of(small, LoRA()) == (count, count)
        for lora in (LoRA(rank=4), LoRA(rank=2, targets=("q_proj", "down_proj"))):
            adapter = adapters.Adapter(AutoModelForCausalLM.from_config(small), lora, str(tmp_path / str(tied)), seed=0)
            trained = sum(weight.numel() for weight in adapter.model.parameters() if weight.requires_grad)
            assert estimates.parameters_of(small, lora) == (count, trained)
        assert estimates.parameters_of(small, LoRA(rank=2, targets=("self_attn.q_proj",)))[1] == 2 * 2 * (32 + 32)
        with pytest.raises(adapters.AdapterError, match=r"LoRA\.targets = \('q_prj',\): .*q_prj"):
            estimates.parameters_of(small, LoRA(rank=2, targets=("q_prj",)))


@pytest.mark.parametrize(
    ("targets", "outputs"), [(("c_attn",), [(32, 96)]), ("all-linear", [(32, 96), (32, 32), (32, 128), (128, 32)])]
)
def test_the_adapter_of_a_model_without_linear_modules_is_counted(targets, outputs):
    """GPT-2's layers are of a class of their own."""
    small = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16)
    trained = 2 * 4 * sum(map(sum, outputs))  # of both layers, with rank 4
    assert estimates.parameters_of(small, LoRA(rank=4, targets=targets))[1] == trained


def test_the_smallest_gpu_counts_and_a_machine_without_any_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert estimates.gpu_bytes() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    program.chmod(0o755)
    assert estimates.gpu_bytes() == 40960 * 2**20
