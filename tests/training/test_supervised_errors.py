"""What a supervised start cannot use is named: files, lines, settings, models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_supervised import supervised
from transformers import AutoTokenizer

from exgrpo_orlhf.checkpoints.cache import CacheError
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.sampling import EngineLost
from exgrpo_orlhf.selftest import tiny
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.training.supervised_start import SupervisedFile, SupervisedModel
from exgrpo_orlhf.training.supervised_training import SupervisedTraining


def write(path: Path, *lines: object) -> SupervisedFile:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return SupervisedFile(str(path))


RIGHT = {"prompt": "7+5=", "response": "7+5=2;#2"}
BAD_LINES = [
    ({"prompt": "7+5="}, "no field 'response', there are prompt; set SupervisedFile.response"),
    ({"response": "#2"}, "no field 'prompt', there are response; set SupervisedFile.prompt"),
    ({**RIGHT, "response": " "}, "field 'response' is ' '; a response is text, not empty"),
    ({**RIGHT, "response": 2}, "field 'response' is 2; a response is text, not empty"),
    ({**RIGHT, "prompt": ""}, "field 'prompt' is empty; remove the row"),
    ("{", "not JSON"),
    ({**RIGHT, "response": "1" * 24}, "the response has 25 tokens with its end token; allowed are "
     "Sampling.max_response_tokens = 24"),
    ({**RIGHT, "response": "7+5=2;#2<end>"}, "the response holds an end token, which is added here"),
    ({**RIGHT, "response": "abc"}, "the response has no token of this tokenizer: 'abc'"),
    ({**RIGHT, "prompt": "1+" * 8 + "1="}, "has 18 prompt tokens; allowed are 1 to Prompts.max_tokens = 16"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_line_that_cannot_be_used_is_named_with_what_is_wrong(line, message, raw_model, tmp_path):
    examples = write(tmp_path / "examples.jsonl", RIGHT, line)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        supervised(raw_model, tmp_path, examples=examples).prepare()
    assert str(caught.value).startswith(f"{tmp_path / 'examples.jsonl'}, line 2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def without_end_token(model: Path, folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    shutil.copytree(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_what_is_missing_is_said(raw_model, tmp_path):
    """Of models that are not whole: test_weights.py."""
    endless = PretrainedModel(str(without_end_token(raw_model, tmp_path / "endless")))
    text, empty = write(tmp_path / "examples.txt", RIGHT), write(tmp_path / "empty.jsonl")
    cases = [
        ({"examples": empty}, r"SupervisedModel\.examples has no examples"),
        ({"examples": text}, r"ends in \.parquet, .* or \.tsv, not '\.txt' \(SupervisedFile\.path\)"),
        ({"examples": SupervisedFile("no.jsonl")}, r"no\.jsonl: no such file \(SupervisedFile\.path\)"),
        ({"prompts": Prompts(max_tokens=250)}, r"Prompts\.max_tokens \+ .* = 274 exceeds the"),
        ({"model": endless}, r"example 1: neither the template nor the tokenizer names an end token"),
    ]
    for change, message in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            supervised(raw_model, tmp_path / "cache", **change).prepare()


def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(raw_model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"could not be written .* name another cache by EXGRPO_CACHE"):
        supervised(raw_model, tmp_path / "file" / "cache").prepare()


def test_too_little_memory_is_said_with_the_settings_that_need_less(raw_model, tmp_path, monkeypatch):
    def gradient(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(SupervisedTraining, "gradient", gradient)
    with pytest.raises(EngineLost, match=r"CUDA out of memory.*lower LocalEngine\.micro_batch_tokens"):
        supervised(raw_model, tmp_path).prepare()


def test_a_learning_rate_that_blows_up_is_said(raw_model, tmp_path):
    with pytest.raises(ArithmeticError, match=r"supervised start: step \d+ is not finite .*; lower its"):
        supervised(raw_model, tmp_path, learning_rate=1e38, warmup=0.0, epochs=4).prepare()


def test_files_of_every_kind_and_chat_messages_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = {"ask": [{"role": "user", "content": "7+5="}], "say": "#2"}
    pq.write_table(pa.Table.from_pylist([chat]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "a.csv").write_text("ask,say\n7+5=,#2\n")
    for suffix, prompt in (("parquet", (("user", "7+5="),)), ("jsonl", (("user", "7+5="),)), ("csv", "7+5=")):
        [(question, response)] = SupervisedFile(str(tmp_path / f"a.{suffix}"), "ask", "say").examples()
        assert (question.prompt, question.source, response) == (prompt, "a", "#2")


def test_the_questions_taught_are_those_of_all_starts_one_upon_another(raw_model, tmp_path):
    first = supervised(raw_model, tmp_path, examples=ModularChains(count=3, seed=1))
    second = supervised(raw_model, tmp_path, model=first, examples=ModularChains(count=4, seed=2))
    expected = [q for chains in (first.examples, second.examples) for q in chains.load()]
    assert isinstance(second, SupervisedModel)
    assert second.training_questions() == expected


def test_the_doctor_finds_the_pretrained_model_below_two_starts(raw_model):
    bindings = [
        *("Work.model = @second/SupervisedModel()", "second/SupervisedModel.model = @first/SupervisedModel()"),
        *("first/SupervisedModel.model = @PretrainedModel()", f"PretrainedModel.path = {str(raw_model)!r}"),
        "SupervisedModel.examples = @ModularChains()",
    ]
    assert tiny.bound_model(["baselines/sft.gin"], bindings)[0] == str(raw_model)
