"""LoRA on the local engine: what is computed with an adapter is what its merged weights compute."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from engine_builders import (
    LOGPROB_ERROR,
    SMALL,
    SMALL_GPT2,
    behaviour_of,
    make_engine,
    mixed_batch,
    move_adapter,
    plain_update,
    questions,
    stored_responses,
    use_sgd,
)
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.lora import AdapterError
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.sampling.vllm_here import VllmSampler
from exgrpo_orlhf.settings import LocalEngine, LoRA, Optimizer

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler", "ignore:fan_in_fan_out")
LORA = LoRA(rank=3, alpha=5)
LARGE = {**SMALL, "hidden_size": 768, "num_hidden_layers": 1, "intermediate_size": 768}  # oneDNN's products


def lora_engine(path, lora=LORA, **more):
    engine = make_engine(path, lora=lora, **more)
    if "weights_path" not in more:
        move_adapter(engine.model)
    return engine


def trained(engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters() if p.requires_grad}


def frozen(engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters() if not p.requires_grad}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Merged:
    """A model of weights W + (alpha / rank) · B A, which autograd sees through. matrices: A and B by their names"""

    def __init__(self, base, matrices):
        self.base, self.matrices = base, matrices

    def __call__(self, **inputs):
        weights = {name: p.detach() for name, p in self.base.named_parameters()}
        for name, a in self.matrices.items():
            if ".lora_A." in name:
                b = self.matrices[name.replace(".lora_A.", ".lora_B.")]
                target = name.partition(".lora_A.")[0] + ".weight"
                weights[target] = weights[target] + LORA.scale_numerator / LORA.rank * (b @ a)
        return functional_call(self.base, weights, kwargs=inputs)


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch_tokens": 60}, {"micro_batch_tokens": 60, "gradient_checkpointing": True}]
)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_gradient_of_a_and_b_is_that_through_merged_weights(warm_model, settings, kl):
    """Of a batch with replayed rows, in the real update, with the base model as the reference. The base stays."""
    engine = lora_engine(
        warm_model,
        settings=LocalEngine(device="cpu", **settings),
        optimizer=Optimizer(learning_rate=1.0, max_grad_norm=1e9),
        reference=kl > 0,
    )
    batch = mixed_batch(engine)
    assert sum(row.trajectory is not None for row in batch.flat_rows()) == 3
    base = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    matrices = {name: value.double().requires_grad_() for name, value in trained(engine).items()}
    merged = Merged(base, matrices)
    behaviour = behaviour_of(merged, engine, batch)
    reference = {"reference": base, "kl_coef": kl} if kl else {}
    measured = plain_update(merged, engine, batch, behaviour, **reference)
    before, kept = trained(engine), frozen(engine)
    use_sgd(engine, 1.0)
    stats = engine.update(batch, MixedPolicyLoss(response_length=24, kl_coef=kl))
    after = trained(engine)
    largest = max(float(matrix.grad.abs().max()) for matrix in matrices.values())
    assert largest > 1e-3
    for name, matrix in matrices.items():
        assert matrix.grad.abs().max() > 1e-5, name
        torch.testing.assert_close((before[name] - after[name]).double(), matrix.grad, atol=1e-5 * largest, rtol=1e-4)
    for logprobs, expected in zip(stats.policy_logprobs, measured, strict=True):
        assert logprobs == pytest.approx(expected.numpy(), abs=LOGPROB_ERROR)
    assert_equal(frozen(engine), kept)


def test_only_the_adapter_is_trained_and_starts_as_the_base_model(warm_model):
    engine, full = make_engine(warm_model, lora=LORA), make_engine(warm_model)
    state = engine._update.optimizer.param_groups[0]["params"]
    assert sum(p.numel() for p in state) == sum(p.numel() for p in trained(engine).values())
    layers = 2 * 7  # q, k, v, o, gate, up, down
    assert len(state) == 2 * layers
    assert_equal(engine.adapter.merged_state(), full.model.state_dict())
    batch = mixed_batch(full)
    rows = full.forward_rows(batch)
    for ours, theirs in zip(engine.measure(rows), full.measure(rows), strict=True):
        assert np.array_equal(ours.logprobs, theirs.logprobs)
    before, kept = trained(engine), frozen(engine)
    for _ in range(2):  # A gets no gradient while B is 0
        engine.update(batch, MixedPolicyLoss(response_length=24))
    assert_equal(frozen(engine), kept)
    assert all(not torch.equal(value, before[name]) for name, value in trained(engine).items())


class TakesWeights:
    """Stands for vLLM's model, some of which keep what they were given. frozen: the engine's weights by their ids"""

    def __init__(self, engine, stop_after=None):
        self.engine, self.stop_after, self.taken, self.most = engine, stop_after, {}, 0
        self.frozen = self.addresses()

    def addresses(self):
        return {name: p.data_ptr() for name, p in self.engine.model.named_parameters()}

    def load_weights(self, weights):
        for name, weight in weights:
            self.taken[name] = weight
            now = self.addresses()
            self.most = max(self.most, sum(now[name] != before for name, before in self.frozen.items()))
            if len(self.taken) == self.stop_after:
                raise RuntimeError("of another shape")
        return self.taken.keys()

    def named_parameters(self):
        return self.taken.items()


def test_vllm_takes_weights_that_are_merged_one_at_a_time(warm_model):
    """Merged together they would need the memory of all adapted layers once more, in float32."""
    engine = lora_engine(warm_model)
    merged, kept = engine.adapter.merged_state(), frozen(engine)
    sampler = VllmSampler.__new__(VllmSampler)
    sampler._weights = engine._weights
    for stop_after in (None, 3):
        model = TakesWeights(engine, stop_after)
        sampler._llm = SimpleNamespace(apply_model=lambda load, m=model: [load(m)], reset_prefix_cache=lambda: None)
        with nullcontext() if stop_after is None else pytest.raises(RuntimeError, match="of another shape"):
            sampler._load()
        assert model.most == 1
        assert model.addresses() == model.frozen
        assert_equal(frozen(engine), kept)
        if stop_after is None:
            tied = {"lm_head.weight"} - model.taken.keys()
            assert_equal(model.taken, {name: value for name, value in merged.items() if name not in tied})


MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, SMALL),
    "tied": (Qwen2ForCausalLM, Qwen2Config, {**SMALL, "tie_word_embeddings": True}),
    "large": (Qwen2ForCausalLM, Qwen2Config, LARGE),
    "gpt2": (GPT2LMHeadModel, GPT2Config, SMALL_GPT2),  # its layers are Conv1D, with W transposed
}


@pytest.fixture(params=MODELS)
def any_model(request, warm_model, tmp_path):
    kind, config, values = MODELS[request.param]
    torch.manual_seed(0)
    folder = tmp_path / request.param
    kind(config(**values)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(warm_model).save_pretrained(folder)
    return folder


def test_every_path_computes_what_the_saved_merged_model_does(any_model, tmp_path):
    """Padded rows, packed rows, generation and greedy answers against a model that knows nothing of LoRA."""
    engine = lora_engine(any_model)
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint")
    plain = make_engine(tmp_path / "checkpoint")
    base = make_engine(any_model)
    chains = questions(6)
    stored = stored_responses(chains, np.random.default_rng(0), each=4)
    rows = [ForwardRow(engine.prompts.encode(q), t.token_ids) for q in chains for t in stored[q]]
    far = 0.0
    assert engine.forward.packs == plain.forward.packs
    for pack in (False, True)[: 1 + engine.forward.packs]:
        with torch.no_grad():
            (ours, ours_h), (theirs, theirs_h), (other, _) = (one.forward(rows, pack) for one in (engine, plain, base))
        torch.testing.assert_close(ours, theirs, atol=LOGPROB_ERROR, rtol=0)
        torch.testing.assert_close(ours_h, theirs_h, atol=LOGPROB_ERROR, rtol=0)
        far = max(far, float((ours - other).abs().max()))
    assert far > 0.01, "the adapter does something"
    plan = Plan(1, chains, [], {})
    for ours, theirs in zip(engine.rollout(plan, 4), plain.rollout(plan, 4), strict=True):
        assert [one.token_ids.tolist() for one in ours.rollouts] == [one.token_ids.tolist() for one in theirs.rollouts]
    greedy = [one.generate_for(chains, [[0]] * 6, 0.0, 1.0) for one in (engine, plain)]
    assert [one.token_ids.tolist() for [one] in greedy[0]] == [one.token_ids.tolist() for [one] in greedy[1]]


def test_merging_and_disabling_leave_the_weights_bit_identical(warm_model):
    engine = lora_engine(warm_model)
    kept, before = frozen(engine), trained(engine)
    places = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    for _ in range(20):
        with engine.adapter.merged():
            assert any(not torch.equal(p, kept[name]) for name, p in frozen(engine).items())
        with engine.adapter.disabled():
            pass
    with pytest.raises(RuntimeError, match="stop"), engine.adapter.merged():
        raise RuntimeError("stop")
    assert_equal(frozen(engine), kept)
    assert_equal(trained(engine), before)
    assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == places
    assert all(p.requires_grad == (".lora_" in name) for name, p in engine.model.named_parameters())


def test_a_is_drawn_from_the_runs_seed_and_no_other_generator_moves(warm_model):
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    first, again, other = (trained(make_engine(warm_model, lora=LORA, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), expected)
    assert_equal(first, again)
    assert any(not torch.equal(value, other[name]) for name, value in first.items())
    assert all(bool(value.any()) == (".lora_A." in name) for name, value in first.items())


def test_a_checkpoint_holds_merged_weights_and_the_adapter_that_the_run_goes_on_from(any_model, tmp_path):
    engine = lora_engine(any_model)
    engine.update(mixed_batch(engine), MixedPolicyLoss(response_length=24))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    engine.save(folder)
    base = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
    merged, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    opened = peft.PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    assert_equal(dict(merged.named_parameters()), dict(opened.named_parameters()))
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        any_model
    )
    resumed = make_engine(any_model, lora=LORA, weights_path=folder, seed=9)
    resumed.load(folder)
    assert_equal(dict(resumed.model.named_parameters()), dict(engine.model.named_parameters()))
    states = [one._update.optimizer.state_dict()["state"] for one in (resumed, engine)]
    for i, state in states[1].items():
        assert all(torch.equal(value, states[0][i][name]) for name, value in state.items())


def test_tensors_of_another_adapter_are_refused(warm_model, tmp_path):
    engine = lora_engine(warm_model)
    engine.save(tmp_path)
    with pytest.raises(AdapterError, match="is of another adapter"):
        make_engine(warm_model, lora=LoRA(rank=4), weights_path=tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="is of another adapter"):
        make_engine(warm_model, lora=LORA, weights_path=tmp_path)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("no_such_layer",), r"LoRA\.targets = \('no_such_layer',\): .*not found"),
        (("q_proj", "k_prj"), "the model has no module 'k_prj'"),
        (("lm_head",), "lm_head is no linear layer between"),
        (("q_proj", "embed_tokens"), "embed_tokens is no linear layer between"),
    ],
)
def test_targets_that_cannot_be_trained_are_refused(warm_model, targets, message):
    with pytest.raises(AdapterError, match=message):
        make_engine(warm_model, lora=LoRA(rank=2, targets=targets))
