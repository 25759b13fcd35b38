"""A tokenizer reads and writes what its tokenizer.json says, at every door and in every checkpoint, or is refused."""

from __future__ import annotations

import json
import logging
import random
import re

import pytest
from run_builders import ROOT, set_words, small_bindings, train_small
from tokenizer_builders import MISREAD, NAMED, READ, byte_level, misread_llama, sentencepiece, write
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from exgrpo_orlhf.engines import lora
from exgrpo_orlhf.evaluation import evaluated_model
from exgrpo_orlhf.io import tokenizer_file
from exgrpo_orlhf.io.weights import WeightsError
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question


def texts() -> list[str]:
    """Others than those that are compared at loading."""
    draw = random.Random(0)
    pieces = [*"abcXYZ 0123456789\n\t.,+=()é汉ﬁ½▁", "  ", "is", "<|im_end|>", "<s>", "<think>", "CamelCase", "e\u0301"]
    return ["".join(draw.choices(pieces, k=40)) for _ in range(50)]


def differs(tokenizer, reference: Tokenizer) -> bool:
    reference.no_truncation()
    reference.no_padding()
    for text in texts():
        for added in (False, True):
            ids = reference.encode(text, add_special_tokens=added).ids
            try:
                if tokenizer(text, add_special_tokens=added)["input_ids"] != ids:
                    return True
            except Exception:  # of tokenizers
                return True
            if tokenizer.decode(ids) != reference.decode(ids, skip_special_tokens=False):
                return True
    return False


@pytest.mark.parametrize("name", [*MISREAD, *READ])
def test_what_is_read_and_written_is_the_files(name, tmp_path, caplog):
    make, *kind = (MISREAD | READ)[name]
    folder = write(tmp_path / "model", make(), *kind)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    misread = differs(AutoTokenizer.from_pretrained(folder), reference)
    assert misread == (name in MISREAD) or name == "bytes as Llama", "which a later transformers than 5.15.0 may read"
    for _ in range(2):
        tokenizer = tokenizer_file.load(folder)
        assert not differs(tokenizer, reference)
        assert tokenizer.get_vocab() == reference.get_vocab()
        assert {key: getattr(tokenizer, key) for key in NAMED} == NAMED
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in said if "read as its tokenizer.json says" in line]) == misread, "once"


@pytest.mark.parametrize("name", ["bytes as Llama", "digits in threes", "Llama 2's own", "bytes"])
def test_a_checkpoint_has_the_file_byte_for_byte_and_is_read_as_the_model_was(name, tmp_path):
    make, model_type, kind = (MISREAD | READ)[name]
    folder = write(tmp_path / "model", make(), model_type, kind)
    saved = write(tmp_path / "saved", byte_level(), model_type, None)
    content = (folder / "tokenizer.json").read_bytes()
    tokenizer = tokenizer_file.load(folder)
    tokenizer.chat_template = "{{ messages[0].content }}"
    (folder / "tokenizer.json").unlink()  # a run outlives the folder that it began with
    tokenizer_file.save(tokenizer, saved)
    assert (saved / "tokenizer.json").read_bytes() == content
    again = tokenizer_file.load(saved)
    assert not differs(again, Tokenizer.from_str(content.decode()))
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.chat_template == tokenizer.chat_template


def test_a_run_its_checkpoint_and_its_samples_have_the_files_tokens(tmp_path, run_script, monkeypatch):
    llama = misread_llama(tmp_path / "llama")
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path / "cache"))
    examples = tmp_path / "examples.jsonl"
    examples.write_text(json.dumps({"prompt": "What is 3 + 4?", "response": "3 + 4 = 7"}), encoding="utf-8")
    bindings = [
        *(
            "Work.model = @SupervisedModel()",
            "SupervisedModel.model = @PretrainedModel()",
            "SupervisedModel.epochs = 1",
        ),
        *("SupervisedModel.examples = @SupervisedFile()", f"SupervisedFile.path = {str(examples)!r}"),
        *("SupervisedModel.prompts = @Prompts()", "SupervisedModel.sampling = @Sampling()"),
        *("SupervisedModel.machine = @LocalEngine()", "Prompts.template = 'Say  it:\\n{question}'", "train.steps = 1"),
        *("train.eval_every = 1", "LoRA.rank = 2"),
    ]
    train_small(llama, tmp_path / "run", *bindings)
    checkpoint, content = tmp_path / "run" / "checkpoint-1", (llama / "tokenizer.json").read_bytes()
    merged = lora.merge(checkpoint / "adapter", tmp_path / "cache")
    for folder in (*(tmp_path / "cache").glob("supervised-*[0-9a-f]"), checkpoint, merged):
        assert (folder / "tokenizer.json").read_bytes() == content
        assert not differs(evaluated_model.load(str(folder))[0].tokenizer, Tokenizer.from_buffer(content))
    [sample, *_] = (tmp_path / "run" / "evaluation" / "1" / "validation" / "samples.jsonl").read_text().splitlines()
    prompt = json.loads(sample)["prompt"]
    assert prompt.startswith("<s>Say  it:\n"), "as the ids say it: with the token that begins a text"
    done = run_script("train.py", "--gin", "toy.gin", *set_words(small_bindings(llama, *bindings)), "--dry-run")
    assert f"\n{' ' * 12}<s>Say  it:\n{' ' * 12}" in done.stdout


def test_a_name_of_the_class_stays_where_the_file_has_the_token(tmp_path):
    folder = write(tmp_path / "model", sentencepiece(legacy=True), "llama", "LlamaTokenizer", **dict.fromkeys(NAMED))
    assert tokenizer_file.load(folder).eos_token == "</s>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<|done|>"}, r"1 tokens are not in it, or have other ids: <\|done\|>"),
        ({"extra_special_tokens": ["<|a|>", "<|b|>"]}, r"2 tokens .*: <\|a\|>, <\|b\|>"),
        ({"pad_token": "[PAD]"}, r"1 tokens .*: \[PAD\]"),
    ],
)
def test_a_token_that_the_file_does_not_have_is_refused(config, message, tmp_path):
    folder = write(tmp_path / "model", byte_level(), "llama", "LlamaTokenizerFast", **config)
    with pytest.raises(WeightsError, match=rf"{folder}: tokenizer_config.json needs another .*: {message}"):
        tokenizer_file.load(folder)


def test_one_place_loads_tokenizers():
    """A GGUF file has no tokenizer.json: its tokenizer is converted once, and loaded from the folder that is made."""
    files = [*(ROOT / "exgrpo_orlhf").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "evals").glob("*.py")]
    pattern = re.compile(r"Tokenizer\w*\.from_pretrained|llm\.get_tokenizer|utils import get_tokenizer")
    places = {path.name for path in files if pattern.search(path.read_text(encoding="utf-8"))}
    assert places == {"tokenizer_file.py", "pretrained.py"}


@pytest.mark.parametrize("template", ["plain", "simplerl"])
def test_a_tokenizer_that_appends_an_end_token_is_refused(template, tmp_path):
    inner = byte_level()
    ids = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    for single, refused in (("<s> $A", False), ("<s> $A </s>", True)):
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
        tokenizer = tokenizer_file.load(write(tmp_path / "model", inner, "llama", "PreTrainedTokenizerFast"))
        if refused:
            with pytest.raises(ValueError, match=r"appends '</s>' to a prompt.* post_processor in its tokenizer\.json"):
                PromptEncoder(Prompts(template), tokenizer)
        else:
            encoder = PromptEncoder(Prompts(template), tokenizer)
            assert encoder.encode(Question.make("s", "1", "1"))[0] == tokenizer.bos_token_id
