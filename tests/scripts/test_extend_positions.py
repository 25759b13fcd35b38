"""scripts/extend_positions.py: a copy of a model with more positions, and nothing else changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_the_copy_has_more_positions_and_the_same_weights(raw_model, tmp_path, run_script):
    before = json.loads((raw_model / "config.json").read_text())
    copy, positions = tmp_path / "copy", 4 * before["max_position_embeddings"]
    arguments = [raw_model, "--out", copy, "--positions", positions, "--rope-theta", 40000]
    assert run_script("extend_positions.py", *arguments).returncode == 0
    model = AutoModelForCausalLM.from_pretrained(copy)
    assert model.config.max_position_embeddings == positions
    width = model.config.hidden_size // model.config.num_attention_heads
    assert model.model.rotary_emb.inv_freq[-1].item() == pytest.approx(40000 ** -(1 - 2 / width), rel=1e-5)
    assert AutoTokenizer.from_pretrained(copy).model_max_length == positions
    weights, others = load_file(raw_model / "model.safetensors"), load_file(copy / "model.safetensors")
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    after = json.loads((copy / "config.json").read_text())
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"max_position_embeddings", "rope_parameters"}


def test_what_cannot_be_extended_is_refused_and_leaves_nothing(raw_model, tmp_path, run_script):
    again = run_script("extend_positions.py", raw_model, "--out", raw_model)
    assert (again.returncode, "exists; name another folder" in again.stderr) == (2, True)
    fewer = run_script("extend_positions.py", raw_model, "--out", tmp_path / "out", "--positions", 8)
    assert (fewer.returncode, "positions already" in fewer.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
    bare = shutil.copytree(raw_model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    weights = run_script("extend_positions.py", bare, "--out", tmp_path / "out")
    assert (weights.returncode, "has no weights" in weights.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == [bare]
