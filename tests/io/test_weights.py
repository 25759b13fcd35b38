"""A model that is not whole is refused in one line before any engine starts, and a whole one of any kind is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from engine_builders import saved_model
from run_builders import set_words, small_bindings
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf.engines.lora import AdapterError
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.evaluation import evaluated_model
from exgrpo_orlhf.io import weights
from exgrpo_orlhf.selftest import tiny

UP = "model.layers.1.mlp.up_proj.weight"


def without(*parts: str):
    return lambda tensors: {name: one for name, one in tensors.items() if not any(part in name for part in parts)}


def spoiled(value: float, dtype: torch.dtype):
    def spoil(tensors):
        tensors = {name: one.to(dtype) for name, one in tensors.items()}
        tensors[UP][-1, -1] = value
        return tensors

    return spoil


DAMAGES = {  # what becomes of the tensors, what of config.json, what is said
    "the final norm": (without("model.norm"), {}, "lacks 1 of its weights, .*random numbers .model.norm.weight"),
    "the embedding": (without("embed_tokens"), {}, "lacks 2 of its weights"),
    "an untied head": (None, {"tie_word_embeddings": False}, "lacks 1 of its weights, .* .lm_head.weight"),
    "a layer": (without("layers.1"), {}, "lacks 12 of its weights"),
    "a prefix": (lambda all: {f"policy.{name}": one for name, one in all.items()}, {}, "lacks .* has 26 tensors that"),
    "a layer more": (
        None,
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "max_window_layers": 1},
        "has 12 tensors that the architecture has no place for .model.layers.1",
    ),
    "another width": (
        None,
        {"intermediate_size": 64},
        r"has 6 weights of another shape .*: \[32, 85\], not \[32, 64\]",
    ),
    "whole numbers": (lambda all: {name: one.int() for name, one in all.items()}, {}, "weights of whole numbers"),
    "NaN": (spoiled(float("nan"), torch.float32), {}, f"model.safetensors: 1 tensors hold NaN or infinity .{UP}"),
    "NaN in bfloat16": (spoiled(float("nan"), torch.bfloat16), {}, "NaN or infinity"),
    "infinity in float16": (spoiled(-float("inf"), torch.float16), {}, "NaN or infinity"),
    "another head that is tied": (
        lambda all: {**all, "lm_head.weight": all["model.embed_tokens.weight"] + 1},
        {},
        "has 1 weights beside those that config.json ties them to .lm_head.weight.",
    ),
    "a stray quantization_config": (
        None,
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "its weights are not quantized; remove quantization_config from config.json",
    ),
    "a small vocabulary": (
        lambda all: {**all, "model.embed_tokens.weight": all["model.embed_tokens.weight"][:10].contiguous()},
        {"vocab_size": 10},
        "the model has 10 tokens, and 8 of the tokenizer's are beyond them",
    ),
}


def copied(model: Path, folder: Path, change=None, config=None) -> Path:
    shutil.copytree(model, folder)
    file, about = folder / "model.safetensors", folder / "config.json"
    if change:
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
    about.write_text(json.dumps({**json.loads(about.read_text()), **(config or {})}))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_is_not_whole_is_refused_in_one_line(damage, raw_model, tmp_path):
    change, config, message = DAMAGES[damage]
    folder = copied(raw_model, tmp_path / "model", change, config)
    with pytest.raises(ValueError, match=message) as raised:
        PretrainedModel(str(folder)).prepare()
    assert str(raised.value).startswith(f"PretrainedModel.path = {str(folder)!r}: {folder}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("gin", [(), ("engines/openrlhf_cpu.gin",)], ids=["local", "openrlhf"])
@pytest.mark.parametrize("smoke", [(), ("--smoke",)], ids=["run", "smoke"])
@pytest.mark.parametrize("start", ["PretrainedModel", "SupervisedModel"])
def test_training_on_either_engine_ends_before_it_begins(gin, smoke, start, raw_model, tmp_path, run_script):
    folder = copied(raw_model, tmp_path / "model", without("model.norm"))
    work = [f"Work.model = @{start}()", "SupervisedModel.model = @PretrainedModel()"]
    work += ["SupervisedModel.examples = @ModularChains()", *[f"SupervisedModel.{name} = @{kind}()" for name, kind in (
        ("prompts", "Prompts"), ("sampling", "Sampling"), ("machine", "LocalEngine"))]]  # fmt: skip
    words = set_words(small_bindings(folder, *work))
    words += [word for file in ("toy.gin", *gin) for word in ("--gin", file)]
    done = run_script("train.py", *words, *smoke, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert f"error: PretrainedModel.path = {str(folder)!r}: {folder} lacks 1 of its weights" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_doctor_and_every_engine_of_the_evaluation_refuse_it_too(raw_model, tmp_path):
    folder = copied(raw_model, tmp_path / "model", without("model.norm"))
    with pytest.raises(ValueError, match="lacks 1 of its weights"):
        tiny.bound_model([], small_bindings(folder))
    with pytest.raises(evaluated_model.ModelError, match=f"--model {folder}: {folder} lacks 1 of its weights"):
        evaluated_model.load(str(folder))


def test_files_that_are_not_there_or_no_weights_are_named(raw_model, tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(ValueError, match=r"PretrainedModel\.path = ") as raised:
            PretrainedModel(str(folder)).prepare()
        return str(raised.value)

    none = copied(raw_model, tmp_path / "none")
    (none / "model.safetensors").unlink()
    assert f"{none}: its weights are not there: Error no file named model.safetensors" in refusal(none)
    (none / "pytorch_model.bin").write_bytes(b"no weights")
    assert f"{none}/pytorch_model.bin: it cannot be read" in refusal(none)
    shards = tmp_path / "shards"
    weights.save(AutoModelForCausalLM.from_pretrained(raw_model), shards, max_shard_size="40KB")
    AutoTokenizer.from_pretrained(raw_model).save_pretrained(shards)
    PretrainedModel(str(shards)).prepare()
    second = sorted(shards.glob("*.safetensors"))[1]
    data = second.read_bytes()
    second.write_bytes(data[:-8])
    assert f"{second}: it cannot be read, it is damaged or incomplete" in refusal(shards)
    second.unlink()
    assert f"{second}: the file is missing, and the index beside it names it" in refusal(shards)


SMALL = {"vocab_size": 18, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
KINDS = {
    "gpt2": {},  # transposed weights; files of old versions hold buffers, which have no place and are no finding
    "gemma2": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 1},  # its files hold experts one by one
    "qwen3_next": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16, "layer_types": None,
                   "linear_num_key_heads": 1, "linear_num_value_heads": 2, "shared_expert_intermediate_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_of_any_architecture_is_no_finding_and_a_missing_tensor_is(kind, tied, raw_model, tmp_path):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model(kind, **SMALL, **KINDS[kind], **tokens, tie_word_embeddings=tied)
    saved_model(config, raw_model, tmp_path)
    tokenizer, file = AutoTokenizer.from_pretrained(raw_model), tmp_path / "model.safetensors"
    weights.check_model_files(tmp_path, tokenizer)
    tensors = load_file(file)
    if kind == "gpt2":
        save_file({**tensors, "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file, metadata={"format": "pt"})
        weights.check_model_files(tmp_path, tokenizer)
    dropped = [*tensors][len(tensors) // 2]
    save_file(without(dropped)(tensors), file, metadata={"format": "pt"})
    with pytest.raises(weights.WeightsError):
        weights.check_model_files(tmp_path, tokenizer)


def test_weights_in_half_precision_in_a_pickle_or_with_a_tied_head_of_their_own_are_no_finding(raw_model, tmp_path):
    tokenizer, tensors = AutoTokenizer.from_pretrained(raw_model), load_file(raw_model / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    weights.check_model_files(copied(raw_model, tmp_path / "head", lambda all: {**all, **head}), tokenizer)
    weights.check_model_files(
        copied(raw_model, tmp_path / "half", lambda all: {k: v.half() for k, v in all.items()}), tokenizer
    )
    pickled = copied(raw_model, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    weights.check_model_files(pickled, tokenizer)
    torch.save(without("model.norm")(tensors), pickled / "pytorch_model.bin")
    with pytest.raises(weights.WeightsError, match="lacks 1 of its weights"):
        weights.check_model_files(pickled, tokenizer)
    torch.save({"epoch": 3, "state_dict": tensors}, pickled / "pytorch_model.bin")
    with pytest.raises(weights.WeightsError, match=r"model\.bin: 'epoch' is no tensor; the file must be"):
        weights.check_model_files(pickled, tokenizer)


@pytest.mark.slow
def test_a_whole_model_is_no_finding_in_a_forked_process(raw_model):
    tokenizer = AutoTokenizer.from_pretrained(raw_model)
    weights.check_model_files(raw_model, tokenizer)  # torch has its threads before the fork
    for _ in range(30):
        if not (child := os.fork()):
            status = 1
            try:
                weights.check_model_files(raw_model, tokenizer)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


def test_an_image_token_that_nothing_writes_may_lie_beyond_the_vocabulary_and_one_of_the_template_may_not(raw_model):
    """The first is so in Gemma 3 1B."""
    tokenizer = AutoTokenizer.from_pretrained(raw_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    weights.check_model_files(raw_model, tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}<image>"
    with pytest.raises(weights.WeightsError, match=r"1 of the tokenizer's are beyond them .'<image>'"):
        weights.check_model_files(raw_model, tokenizer)


# -- adapters, code and names ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(raw_model, tmp_path_factory) -> Path:
    """As peft and TRL save one: adapter and tokenizer, no config.json."""
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(raw_model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(raw_model).save_pretrained(folder)
    return folder


def test_training_starts_from_an_adapter_of_peft_merged_into_its_base(adapter, raw_model, tmp_path):
    folder = PretrainedModel(str(adapter), cache=str(tmp_path)).prepare()
    merged, base = (load_file(Path(path) / "model.safetensors") for path in (folder, raw_model))
    assert {name for name in base if not torch.equal(merged[name], base[name])} == {
        f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)
    }


def test_an_adapter_is_not_merged_into_a_base_that_is_not_whole(adapter, raw_model, tmp_path):
    base = copied(raw_model, tmp_path / "base", without("model.norm"))
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    about = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": str(base)}))
    with pytest.raises(ValueError, match=r"cannot be merged into its base model .* lacks 1 of its weights"):
        PretrainedModel(str(folder), cache=str(tmp_path / "cache")).prepare()


@pytest.mark.parametrize("text", ['{"peft_type": "LORA"', "[1]", "\xff"])
def test_the_damaged_settings_of_an_adapter_are_named(text, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(AdapterError, match=r"adapter/adapter_config\.json is damaged"):
        PretrainedModel(str(folder), cache=str(tmp_path / "cache")).prepare()


def test_an_adapter_beside_whole_weights_is_refused(adapter, raw_model, tmp_path):
    """transformers would load the adapter on its base model, vLLM the weights beside it."""
    folder = copied(raw_model, tmp_path / "both")
    for path in adapter.glob("adapter*"):
        shutil.copy(path, folder)
    with pytest.raises(ValueError, match=r"has config\.json and adapter_config\.json"):
        PretrainedModel(str(folder)).prepare()


def test_code_that_comes_with_a_model_is_never_run(raw_model, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers would ask
    strange = {"model_type": "strange", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    folder = copied(raw_model, tmp_path / "model", config=strange)
    (folder / "code.py").write_text("raise SystemExit('code of the model was run')\n")
    for load in (lambda path: PretrainedModel(path).prepare(), evaluated_model.load):
        with pytest.raises(ValueError, match="needs Python files of its own, which are not run here"):
            load(str(folder))


def test_no_call_leaves_it_to_the_library_whether_code_is_run():
    """`from_pretrained` of a tokenizer, a configuration or a model; peft's and a named class's have no such setting."""
    calls = re.compile(r"(?<!def init_model_)from_pretrained\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
    for path in (Path(weights.__file__).parents[1]).rglob("*.py"):
        for match in calls.finditer(path.read_text()):
            before = path.read_text()[: match.start()]
            if before.endswith(("PeftModel.", "super().init_model_", "init_model_", "PreTrainedTokenizerFast.")):
                continue
            assert "trust_remote_code=False" in match[1] or match[1] in ("**place", '**place, dtype="float32", '
                "output_loading_info=True"), f"{path}: {match[0]}"  # fmt: skip


def test_a_name_that_is_a_path_or_no_hub_id_is_refused_without_a_request(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/nope", "./nope", "/nope", "~/nope", "runs/x/checkpoint-9", str(tmp_path / "x")):
        with pytest.raises(evaluated_model.ModelError, match=f"--model {name}: "):
            evaluated_model.load(name)
    no_id = r"PretrainedModel\.path = 'a/b/c': no folder of that name, .*and no model from the hub: Repo id"
    with pytest.raises(ValueError, match=no_id):
        PretrainedModel("a/b/c").prepare()


def test_saving_a_model_does_not_import_deepspeed(raw_model, tmp_path, monkeypatch):
    """Which takes seconds in every process where it is installed."""

    class NoDeepSpeed:
        def find_spec(self, name: str, *_: object) -> None:
            assert name != "deepspeed"

    model = AutoModelForCausalLM.from_pretrained(raw_model)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoDeepSpeed(), *sys.meta_path])
    weights.save(model, tmp_path)
    assert {name for name, _ in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters()}
