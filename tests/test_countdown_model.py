import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf import config
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.run import train
from exgrpo_orlhf.tasks.countdown import Countdown, Hunches, grade
from exgrpo_orlhf.tasks.countdown_model import CountdownModel
from exgrpo_orlhf.tasks.warm_up import END, PAD

TINY = CountdownModel(operands=(2, 3), steps=3, batch_size=4, width=32, layers=1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, on every machine
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return replace(TINY, cache=tmp_path_factory.mktemp("cache")).prepare()


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_questions_and_answers_survive_encoding_saving_and_decoding(prepared):
    tokenizer, model = AutoTokenizer.from_pretrained(prepared), AutoModelForCausalLM.from_pretrained(prepared)
    assert len(tokenizer) == model.config.vocab_size == len(CountdownModel.vocabulary)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    for question in Countdown(count=50).load():
        text = f"{question.prompt}-3*7=21"
        assert len(tokenizer.encode(text)) == len(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_settings_give_the_same_model_and_others_another(tmp_path, prepared):
    again = replace(TINY, cache=tmp_path).prepare()
    assert again.name == prepared.name
    assert again.name.startswith("countdown-model-")
    assert weights(again) == weights(prepared)
    for changed in (dict(seed=1), dict(steps=4), dict(share=0.5), dict(strength=0.5), dict(largest=8), dict(width=64)):
        assert replace(TINY, cache=tmp_path, **changed).directory != again
    assert weights(replace(TINY, cache=tmp_path, share=1.0).prepare()) != weights(again)


def test_a_model_in_the_cache_is_not_trained_again(prepared, monkeypatch):
    monkeypatch.setattr(CountdownModel, "_warmed_up", lambda self: pytest.fail("trained again"))
    assert replace(TINY, cache=prepared.parent).prepare() == prepared


def test_only_responses_of_training_questions_are_learnt():
    rng, vocabulary = np.random.default_rng(0), CountdownModel.vocabulary
    model = replace(TINY, operands=(3,), batch_size=64, share=0.0)
    validation = {question.prompt for question in Countdown(150, (3,), split="validation").load()}
    ids, labels, shortest = model._batch(rng)
    assert ids.shape == labels.shape
    lengths = set()
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        prompt, _, response = "".join(vocabulary[i] for i in row).partition("=")
        learnt = "".join(vocabulary[i] for i in label if i >= 0)
        assert response == learnt + PAD * response.count(PAD)
        assert learnt.endswith(END)
        assert len(prompt) + 1 >= shortest
        assert f"{prompt}=" not in validation
        question = Question.make("countdown", f"{prompt}=", "")
        assert grade(question, learnt.removesuffix(END)).sound
        lengths.add(len(prompt) + 1)
    assert len(lengths) > 1
    assert min(lengths) == shortest


def test_what_is_taught_is_what_the_fields_say():
    assert replace(TINY, share=0.2, strength=0.9, seed=3).hunches == Hunches(0.2, 0.9, seed=3)


def test_the_whole_algorithm_runs_with_its_layout(tmp_path):
    small = [
        *("CountdownModel.operands = (2,)", "CountdownModel.share = 0.0", "CountdownModel.steps = 200"),
        *("CountdownModel.width = 32", "CountdownModel.layers = 2", f"CountdownModel.cache = '{tmp_path}'"),
        *("Countdown.operands = (2,)", "Countdown.count = 24"),
        *("validation/Countdown.operands = (2,)", "validation/Countdown.count = 8"),
        *("train.steps = 4", "train.questions_per_step = 8", "train.group_size = 4", "train.eval_every = 4"),
        *("ReplayMixer.start_at_accuracy = None", "Tracking.enabled = False"),
    ]
    experiment = config.load(["base.gin", "models/countdown.gin"], small)
    train(experiment, tmp_path / "run", resume=False, tracking_uri="unused", tags={})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().split("\n") if line]
    assert rows[-1]["eval/greedy_accuracy_2_operands"] == rows[-1]["eval/greedy_accuracy"] > 0
    assert rows[-1]["reward/pass_at_1"] > 0
    assert rows[-1]["replay/actual_share"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(share=1.5), r"CountdownModel\.share must be a number from 0 to 1, got 1\.5"),
        (dict(strength="a"), r"CountdownModel\.strength must be a number from 0 to 1, got 'a'"),
        (dict(operands=(7,)), r"CountdownModel\.operands must be at most 6, got \(7,\)"),
        (dict(largest=0), r"CountdownModel\.largest must be an integer from 2 to 20, got 0"),
        (dict(steps=0), r"CountdownModel\.steps must be a positive multiple of 1, got 0"),
        (dict(width=100), r"CountdownModel\.width must be a positive multiple of 32, got 100"),
        (dict(learning_rate=0.0), r"CountdownModel\.learning_rate must be between 0 and 1, got 0\.0"),
        (dict(seed=-1), r"CountdownModel\.seed .* at least 0, got -1"),
        (dict(cache=3), r"CountdownModel\.cache must be a path or None, got 3"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        CountdownModel(**fields)
