"""LoRA where a user meets it: binding, checkpoint, evaluation. What it computes is in engines/local/test_lora.py."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from engine_builders import saved_model
from run_builders import flip, small_bindings, train_small
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo_orlhf import config
from exgrpo_orlhf.engines import lora
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.evaluation import evaluated_model
from exgrpo_orlhf.io import weights


def go(model: Path, run: Path, *more: str, resume: bool = False) -> Path:
    done = train_small(model, run, "train.eval_every = None", *more, resume=resume)
    return run / f"checkpoint-{done.steps}"


@pytest.fixture(scope="module")
def checkpoint(warm_model, tmp_path_factory) -> Path:
    return go(warm_model, tmp_path_factory.mktemp("lora") / "run", "LoRA.rank = 2", "Optimizer.learning_rate = 1e-2")


def test_the_same_run_writes_the_same_adapter_config(checkpoint):
    """peft keeps the targets in a set, which has another order in each process."""
    targets = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    assert len(targets) == 14, "of two layers"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def adapter_like(checkpoint: Path, folder: Path, **settings) -> Path:
    """A copy of the checkpoint's adapter with other settings."""
    return with_settings(checkpoint / "adapter", folder, **settings)


def with_settings(adapter: Path, folder: Path, **settings) -> Path:
    file = shutil.copytree(adapter, folder) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


def test_an_adapter_is_evaluated_as_the_checkpoint_that_it_is_of(checkpoint):
    (adapter, prompts), (of_run, of_checkpoint) = (
        evaluated_model.load(str(path)) for path in (checkpoint / "adapter", checkpoint)
    )
    assert prompts == of_checkpoint == {"template": "plain", "system": None, "chat_template_kwargs": None}, (
        "with the prompts of training"
    )
    assert (adapter.run, adapter.step, adapter.metrics_log) == (of_run.run, of_run.step, of_run.metrics_log)
    merged, expected = load_file(Path(adapter.path) / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], expected[name], atol=1e-6, rtol=0) for name in expected)
    assert evaluated_model.load(str(checkpoint / "adapter"))[0].path == adapter.path, "it is merged once"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": "/no/such/x"}, r"cannot be merged into its base model .*/x"),
        ({"base_model_name_or_path": "some/model", "revision": "v1"}, "the base model is revision 'v1' of some/model"),
    ],
)
def test_an_adapter_whose_base_model_is_not_there_is_refused_by_name(checkpoint, tmp_path, settings, message):
    """Another revision has the same shapes."""
    with pytest.raises(evaluated_model.ModelError, match=message):
        evaluated_model.load(str(adapter_like(checkpoint, tmp_path / "a", **settings)))


def test_an_adapter_is_not_merged_into_another_model_than_the_one_it_was_trained_on(
    checkpoint, warm_model, raw_model, tmp_path
):
    """Of the same shape, under the same path: peft would not notice."""
    base = shutil.copytree(warm_model, tmp_path / "base")
    folder = adapter_like(checkpoint, tmp_path / "a", base_model_name_or_path=str(base), revision="of no folder")
    evaluated_model.load(str(folder))
    shutil.copy(raw_model / "model.safetensors", base)
    with pytest.raises(evaluated_model.ModelError, match=r"was trained on other weights than .* has now"):
        evaluated_model.load(str(folder))


def test_an_adapter_of_a_damaged_checkpoint_is_refused(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    file = copy / "adapter" / "adapter_model.safetensors"
    flip(file)
    with pytest.raises(evaluated_model.ModelError, match=rf"{file}: the content is not what was saved"):
        evaluated_model.load(str(copy / "adapter"))


A, B, PREFIX = ".layers.0.self_attn.q_proj.lora_A.weight", ".layers.1.mlp.up_proj.lora_B.weight", "base_model.model."
NORM = "base_model.model.model.layers.0.input_layernorm.weight"
FOREIGN = {  # what is done to the tensors (by name), and to the configuration → what is said
    "without an A": (lambda s: {n: t for n, t in s.items() if not n.endswith(A)}, {}, r"1 tensors missing \(.*q_proj"),
    "without a B": (lambda s: {n: t for n, t in s.items() if not n.endswith(B)}, {}, r"1 tensors missing \(.*up_proj"),
    "without a layer": (lambda s: {n: t for n, t in s.items() if ".layers.1." not in n}, {}, "14 tensors missing"),
    "empty": (lambda s: {}, {}, "28 tensors missing"),
    "of another class": (
        lambda s: {n.replace(PREFIX, "module."): t for n, t in s.items()},
        {},
        "28 .* without a place",
    ),
    "without a prefix": (lambda s: {n.removeprefix(PREFIX): t for n, t in s.items()}, {}, "28 tensors without a place"),
    "of more layers": (
        lambda s: s | {n.replace(".1.", ".2."): t + 0 for n, t in s.items()},
        {},
        "14 .* without a place",
    ),
    "of fewer targets": (lambda s: s, {"target_modules": ["q_proj"]}, "24 tensors without a place"),
    "of other targets": (lambda s: {n: t for n, t in s.items() if "q_proj" in n}, {}, "24 tensors missing"),
    "of another rank": (lambda s: s, {"r": 3}, "size mismatch"),
    "with a norm": (lambda s: s | {NORM: torch.ones(32)}, {}, "1 tensors of a base model"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_incomplete_or_foreign_adapter_is_neither_merged_nor_kept_in_the_cache(name, checkpoint, cache, tmp_path):
    change, settings, message = FOREIGN[name]
    folder = adapter_like(checkpoint, tmp_path / "foreign", **settings)
    save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    for load in (evaluated_model.load, lambda path: PretrainedModel(path).prepare()):
        with pytest.raises(ValueError, match=rf"{folder}: .*{message}"):
            load(str(folder))
    assert not [*cache.glob("merged-*")]


KINDS = {  # of an adapter beside a base model that ties its embedding to its output layer → whether it still does
    "plain": ({}, True),
    "DoRA": ({"use_dora": True}, True),
    "biases": ({"bias": "all"}, True),
    "a saved norm": ({"modules_to_save": ["norm"]}, True),
    "all-linear": ({"target_modules": "all-linear"}, True),
    "the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "the head": ({"target_modules": ["lm_head"]}, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "the head by a pattern": ({"target_modules": ".*(q_proj|lm_head)"}, False),
    "DoRA of the head": ({"target_modules": ["lm_head"], "use_dora": True}, False),
    "the head's parameter": ({"target_modules": [], "target_parameters": ["lm_head.weight"]}, False),
    "a saved embedding": ({"modules_to_save": ["embed_tokens"]}, False),
    "a saved head": ({"modules_to_save": ["lm_head"]}, False),
    "tied adapters": ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, True),
    "a saved head that is tied": ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "rows of both": ({"trainable_token_indices": [1, 3]}, True),
    "rows of the head": ({"trainable_token_indices": {"lm_head": [1, 3]}}, False),
}


def adapter_of(base: Path, folder: Path, **settings) -> peft.PeftModel:
    """A base model with a new adapter beside it, which is saved."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    named = {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", "init_lora_weights": False}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"], **named, **settings}))
    for weight in wrapped.parameters():
        if weight.requires_grad:
            weight.data += 0.3 * torch.randn_like(weight)
    wrapped.save_pretrained(folder)
    return wrapped


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 18)[None]).logits


def assert_merged_exactly(folder, wrapped) -> None:
    merged, expected = logits_of(AutoModelForCausalLM.from_pretrained(folder)), logits_of(wrapped)
    with wrapped.disable_adapter():
        change = (expected - logits_of(wrapped)).abs().max()
    assert change > 0
    torch.testing.assert_close(merged, expected, atol=1e-3 * float(change), rtol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_whole_adapter_that_peft_writes_is_merged(kind, warm_model, tmp_path):
    """The folder computes what the base model computes with the adapter beside it."""
    settings, tied = KINDS[kind]
    wrapped = adapter_of(warm_model, tmp_path / "adapter", **settings)
    folder = PretrainedModel(str(tmp_path / "adapter"), cache=str(tmp_path / "cache")).prepare()
    assert_merged_exactly(folder, wrapped)
    assert json.loads((Path(folder) / "config.json").read_text())["tie_word_embeddings"] is tied


SIZES = {"vocab_size": 18, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
REPEATED = {"layer_replication": [[0, 2], [1, 2]]}
ARCHITECTURES = {
    "llama": (REPEATED, None),
    "qwen2": (REPEATED, r"repeats layers of it, layer_replication = \[\[0, 2\], \[1, 2\]\]: .*num_hidden_layers"),
    "gemma2": ({"target_modules": ["lm_head"]}, "ties the embedding and the output layer. With .*vLLM cannot compute"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_that_changes_the_architecture_is_merged_exactly_or_refused(architecture, warm_model, tmp_path):
    """transformers cannot compute Qwen 2 with repeated layers. vLLM computes Gemma 2's logits with the embedding."""
    settings, message = ARCHITECTURES[architecture]
    more = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model(architecture, **SIZES, **more, tie_word_embeddings=True)
    saved_model(config, warm_model, tmp_path / "base")
    wrapped = adapter_of(tmp_path / "base", tmp_path / "adapter", **settings)
    if message is None:
        assert_merged_exactly(lora.merge(tmp_path / "adapter", tmp_path / "cache"), wrapped)
        return
    with pytest.raises(lora.AdapterError, match=message):
        lora.merge(tmp_path / "adapter", tmp_path / "cache")
    assert not [*(tmp_path / "cache").glob("merged-*")]


def another_scale(file: Path) -> None:
    """Other weights in a file of the same size and date."""
    before, tensors = file.stat(), load_file(file)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def other_ends(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, 2]}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", another_scale),
        ("generation_config.json", other_ends),
        ("chat_template.jinja", lambda file: file.write_text("{{ messages[0].content }}")),
    ],
)
def test_an_adapter_is_merged_again_when_a_file_of_its_base_has_another_content(name, change, warm_model, tmp_path):
    base = shutil.copytree(warm_model, tmp_path / "base")
    adapter_of(base, tmp_path / "adapter")
    folders = [lora.merge(tmp_path / "adapter", tmp_path / "cache") for _ in range(2)]
    assert folders[0] == folders[1]
    change(base / name)
    folders.append(lora.merge(tmp_path / "adapter", tmp_path / "cache"))
    assert folders[2] != folders[0]
    before, after = ((folder / name).read_bytes() if (folder / name).exists() else b"" for folder in folders[1:])
    assert before != after


def test_an_adapter_is_merged_again_into_another_commit_of_its_base_on_the_hub(warm_model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    of_model = tmp_path / "hub" / "models--some--model"
    (of_model / "refs").mkdir(parents=True)
    for commit in ("1", "2"):
        snapshot = shutil.copytree(warm_model, of_model / "snapshots" / commit)
    another_scale(snapshot / "model.safetensors")
    adapter_of(warm_model, tmp_path / "of_folder")
    adapter = with_settings(tmp_path / "of_folder", tmp_path / "adapter", base_model_name_or_path="some/model")
    merged = []
    for commit in ("1", "2", "1"):
        (of_model / "refs" / "main").write_text(commit)
        merged.append(lora.merge(adapter, tmp_path / "cache"))
    assert merged[0] == merged[2] != merged[1]
    first, second = (load_file(folder / "model.safetensors")["model.norm.weight"] for folder in merged[:2])
    assert torch.equal(second, 2 * first)


def test_a_base_that_changes_while_it_is_merged_leaves_nothing_in_the_cache(warm_model, tmp_path, monkeypatch):
    base = shutil.copytree(warm_model, tmp_path / "base")
    adapter_of(base, tmp_path / "adapter")
    save = weights.save
    monkeypatch.setattr(weights, "save", lambda *given: (save(*given), another_scale(base / "model.safetensors")))
    with pytest.raises(lora.AdapterError, match=rf"{base} was changed while .* start again"):
        lora.merge(tmp_path / "adapter", tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == [tmp_path / "cache" / ".lock"]


def test_what_is_bound_of_lora_does_not_count_where_it_is_off(warm_model):
    plain, bound = (config.load(["toy.gin"], small_bindings(warm_model, *more)) for more in ((), ("LoRA.alpha = 8",)))
    assert bound.lora.rank is None
    assert bound.config_hash == plain.config_hash
