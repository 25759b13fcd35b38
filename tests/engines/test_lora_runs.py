"""LoRA where a user meets it: binding, checkpoint, evaluation. What it computes is in engines/local/test_lora.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from run_builders import flip, small_bindings, train_small
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from exgrpo_orlhf import config
from exgrpo_orlhf.checkpoints import UnusableCheckpoint
from exgrpo_orlhf.engines import lora
from exgrpo_orlhf.evaluation import evaluated_model
from exgrpo_orlhf.models.pretrained import PretrainedModel


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
    file = shutil.copytree(checkpoint / "adapter", folder) / "adapter_config.json"
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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["norm"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_every_kind_of_whole_adapter_that_peft_writes_is_merged(kind, warm_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float32)
    named = {"base_model_name_or_path": str(warm_model), "task_type": "CAUSAL_LM", "init_lora_weights": False}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"], **named, **kind}))
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = load_file(lora.merge(tmp_path / "adapter", tmp_path / "cache") / "model.safetensors")
    expected = wrapped.merge_and_unload().state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-6, rtol=0) for name, value in merged.items())


def test_another_rank_is_another_run(checkpoint, warm_model):
    with pytest.raises(UnusableCheckpoint, match=r"LoRA\.rank"):
        go(warm_model, checkpoint.parent, "LoRA.rank = 4", "Optimizer.learning_rate = 1e-2", resume=True)


def test_what_is_bound_of_lora_does_not_count_where_it_is_off(warm_model):
    plain, bound = (config.load(["toy.gin"], small_bindings(warm_model, *more)) for more in ((), ("LoRA.alpha = 8",)))
    assert bound.lora.rank is None
    assert bound.config_hash == plain.config_hash
