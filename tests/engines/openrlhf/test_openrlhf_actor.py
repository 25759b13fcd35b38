"""OpenRLHF's policy actor in this process: what it refuses at its start, and what it measures."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
from engine_builders import SMALL, move_adapter, saved_model
from openrlhf_actor import make_actor
from tokenizer_builders import misread_llama
from transformers import BambaConfig

from exgrpo_orlhf.engines.rows import probe_rows
from exgrpo_orlhf.io import tokenizer_file

pytestmark = pytest.mark.openrlhf


@pytest.fixture(scope="module")
def hybrid_model(raw_model, tmp_path_factory) -> Path:
    """A layer of Mamba and one of attention."""
    shape = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    return saved_model(BambaConfig(**SMALL, **shape), raw_model, tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("flag", ["ds.packing_samples", "train.dynamic_batch_enable"])
def test_packing_is_refused_for_a_model_whose_rows_it_would_mix(hybrid_model, flag):
    message = (
        r"ds\.packing_samples cannot be used with BambaForCausalLM and ds\.attn_implementation = 'sdpa': .* nats; "
        r"leave out ds\.packing_samples, and train\.dynamic_batch_enable"
    )
    with pytest.raises(ValueError, match=message):
        make_actor(hybrid_model, **{flag: True, "train.max_tokens_per_gpu": 64})


def test_padded_rows_of_such_a_model_have_the_log_probs_of_the_rows_alone(hybrid_model):
    actor = make_actor(hybrid_model)
    rows = probe_rows(18, ((2, 9), (3, 4), (1, 6)), step=5)
    for row, together in zip(rows, actor.measure(rows), strict=True):
        assert together.logprobs == pytest.approx(actor.measure([row])[0].logprobs, abs=0.05)


@pytest.mark.parametrize("lora", [None, 2])
def test_a_checkpoint_has_the_tokenizer_of_the_models_file(lora, tmp_path):
    """transformers reads another one; LoRA's checkpoints are written by us."""
    model, folder = misread_llama(tmp_path / "model"), tmp_path / "checkpoint-1"
    folder.mkdir()
    actor = make_actor(model, f"LoRA.rank = {lora}")
    ids = actor.tokenizer("What is 3 + 4?")["input_ids"]
    assert actor.tokenizer.decode(ids) == "<s>What is 3 + 4?"
    written = actor.save_state(str(folder), 1)
    content = (model / "tokenizer.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == content
    assert written["tokenizer.json"].sha256 == hashlib.sha256(content).hexdigest()
    assert tokenizer_file.load(folder)("What is 3 + 4?")["input_ids"] == ids


def test_the_reference_of_a_kl_term_is_the_base_model_and_the_adapter_is_back_after_it(warm_model):
    """The log-probs are bit-identical to the base model's, and differ with the adapter before and after."""
    rows = probe_rows(18, ((4, 8), (3, 5)))
    base = [one.logprobs for one in make_actor(warm_model).measure(rows)]
    actor = make_actor(warm_model, "LoRA.rank = 4")
    move_adapter(actor.actor.model.module)  # it begins as the base model
    policy, reference, again = (
        [one.logprobs for one in measure(rows)] for measure in (actor.measure, actor.measure_base, actor.measure)
    )
    for ours, plain, before, after in zip(reference, base, policy, again, strict=True):
        assert ours.tobytes() == plain.tobytes()
        assert before.tobytes() == after.tobytes()
        assert np.abs(before - plain).max() > 0.05
