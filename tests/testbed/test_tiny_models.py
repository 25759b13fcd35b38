"""The tiny models of chains and of reasoning-gym: their tokenizer, cache and warm-up."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from exgrpo_orlhf.testbed.modular_chains import PRESETS, ModularChains, right_reasoning
from exgrpo_orlhf.testbed.reasoning_gym import ReasoningGym
from exgrpo_orlhf.testbed.tiny_models import END, PAD, ChainModel, GymModel

VOCABULARY = ChainModel.vocabulary
SMALL = dict(steps=3, batch_size=4, width=32, layers=1)
TINY = ChainModel(operands=(2, 3), **SMALL)
GYM = GymModel(tasks="spell_backward", settings={"max_word_len": 6}, count=40, **SMALL)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, on every machine
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return replace(TINY, cache=tmp_path_factory.mktemp("cache")).prepare()


@pytest.fixture(scope="module")
def prepared_gym(tmp_path_factory) -> Path:
    pytest.importorskip("reasoning_gym", reason="make reasoning-gym")
    return replace(GYM, cache=tmp_path_factory.mktemp("cache")).prepare()


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_every_text_survives_encoding_saving_and_decoding(prepared):
    made = [*ModularChains(count=20).load(), *ModularChains(count=20, together=4).load()]
    chains = [question.prompt + right_reasoning(question.prompt) for question in made]
    chains += ["".join(letters) for letters in product(VOCABULARY[2:], repeat=3)]
    for tokenizer, vocabulary, texts in (
        (ChainModel.tokenizer(), VOCABULARY, chains),
        (AutoTokenizer.from_pretrained(prepared), VOCABULARY, chains),
        (PreTrainedTokenizerFast.from_pretrained(prepared), VOCABULARY, chains),
    ):
        ids = {token: i for i, token in enumerate(vocabulary)}
        for text in texts:
            assert tokenizer.encode(text) == [ids[letter] for letter in text]
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode([*tokenizer.encode(text), ids[END], ids[PAD]], skip_special_tokens=True) == text


@pytest.mark.parametrize(("fixture", "vocabulary"), [("prepared", VOCABULARY), ("prepared_gym", GymModel.vocabulary)])
def test_the_saved_tokenizers_agree_with_the_networks(request, fixture, vocabulary):
    folder = request.getfixturevalue(fixture)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == len(vocabulary)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.dtype == torch.float32
    padded = tokenizer(["2+3", "1"], padding=True)
    assert padded["attention_mask"] == [[1, 1, 1], [0, 0, 1]]


def test_a_gym_model_reads_every_printable_character(prepared_gym):
    tokenizer, text = AutoTokenizer.from_pretrained(prepared_gym), "".join(map(chr, range(32, 127))) + "\n"
    assert len(tokenizer.encode(text)) == len(text) == len(GymModel.vocabulary) - 2
    assert tokenizer.decode(tokenizer.encode(text)) == text


CHAIN_CHANGES = [dict(seed=1), dict(steps=4), dict(learning_rate=1e-3), dict(preset="weak"), dict(together=2)]
GYM_CHANGES = [dict(seed=1), dict(settings={}), dict(count=41), dict(width=64)]
GYM_CHANGES += [dict(tasks={"spell_backward": 1.0}, settings={})]


@pytest.mark.parametrize(
    ("tiny", "fixture", "changes"),
    [(TINY, "prepared", CHAIN_CHANGES), (GYM, "prepared_gym", GYM_CHANGES)],
    ids=["chain", "gym"],
)
def test_the_same_settings_give_the_same_model_and_others_another(tmp_path, request, tiny, fixture, changes):
    expected = request.getfixturevalue(fixture)
    again = replace(tiny, cache=tmp_path).prepare()
    assert again.name == expected.name
    assert again.name.startswith(f"{tiny.task}-model-")
    assert weights(again) == weights(expected)
    changed = [replace(tiny, cache=tmp_path, **change) for change in changes]
    assert again not in [model.directory for model in changed]
    assert weights(changed[0].prepare()) != weights(again)
    for path in expected.glob("*.json"):
        assert str(Path.home()) not in path.read_text(), "no place on this machine"


def test_a_model_in_the_cache_is_not_trained_again(prepared, monkeypatch):
    monkeypatch.setattr(ChainModel, "_warmed_up", lambda self: pytest.fail("trained again"))
    before = {path: path.stat().st_mtime_ns for path in prepared.iterdir()}
    assert replace(TINY, cache=prepared.parent).prepare() == prepared
    assert {path: path.stat().st_mtime_ns for path in prepared.iterdir()} == before


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path))
    assert TINY.directory.parent == tmp_path
    assert replace(TINY, cache="elsewhere").directory.parent == Path("elsewhere")
    monkeypatch.delenv("EXGRPO_CACHE")
    assert TINY.directory.parent == Path.home() / ".cache" / "exgrpo_orlhf"


def test_the_second_of_two_warm_ups_is_thrown_away(tmp_path, monkeypatch):
    model, train = replace(TINY, cache=tmp_path), ChainModel._warmed_up

    def overtaken(self):
        monkeypatch.setattr(ChainModel, "_warmed_up", train)
        first = model.prepare()
        (first / "first").touch()
        return train(self)

    monkeypatch.setattr(ChainModel, "_warmed_up", overtaken)
    assert (model.prepare() / "first").is_file()
    assert {*tmp_path.iterdir()} == {model.directory, tmp_path / ".lock"}


def test_preparing_leaves_the_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    replace(TINY, cache=tmp_path).prepare()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 20])
def test_a_warm_up_may_have_any_number_of_steps(steps):
    replace(TINY, steps=steps)._warmed_up()


def test_a_short_warm_up_teaches_the_format():
    model = replace(TINY, steps=80, batch_size=16, operands=(3,), learning_rate=5e-3)._warmed_up()
    ids = torch.tensor([ChainModel.tokenizer().encode("7+5*3=7+5=2;2*3=6;#6")])
    with torch.no_grad():
        written = [VOCABULARY[i] for i in model(ids).logits.argmax(-1)[0, 5:]]
    assert {i: written[i] for i in (3, 5, 9, 11, 12, 14)} == {3: "=", 5: ";", 9: "=", 11: ";", 12: "#", 14: END}


@pytest.mark.slow
def test_a_warm_up_teaches_the_form_of_chains_asked_together():
    """Greedy responses are the reasoning of each chain, with the model's own values, then all results."""
    model = replace(TINY, steps=600, batch_size=32, width=96, layers=3, operands=(2,), together=3, preset="weak")
    network, tokenizer = model._warmed_up(), ChainModel.tokenizer()
    questions = ModularChains(count=40, operands=(2,), together=3).load()
    prompts = tokenizer([question.prompt for question in questions], return_tensors="pt")  # of one length
    written = network.generate(**prompts, max_new_tokens=32, do_sample=False)
    responses = tokenizer.batch_decode(written[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    formed = 0
    for question, response in zip(questions, responses, strict=True):
        values = re.findall(r"=([0-9]);", response)
        chains = question.prompt[:-1].split(";")
        form = [f"{chain}={value};#{value};" for chain, value in zip(chains, values, strict=False)]
        formed += response == "".join(form) + "#" + "".join(values)
    assert formed >= 38


def test_presets_say_what_is_taught():
    assert replace(TINY, preset="slips", seed=3).beliefs == replace(PRESETS["slips"], seed=3)
    assert replace(TINY, strength=0.5).beliefs == replace(PRESETS["normal"], strength=0.5)
    assert replace(TINY, strength=0.7).directory == TINY.directory


def test_only_responses_of_training_questions_are_learnt(prepared_gym):
    ids, labels, shortest = replace(GYM, batch_size=64)._batch(np.random.default_rng(0))
    tokenizer = AutoTokenizer.from_pretrained(prepared_gym)
    solutions = {q.prompt: answer for q, answer in ReasoningGym(GYM.tasks, GYM.settings, GYM.count).examples()}
    assert ids.shape == labels.shape
    lengths = set()
    for row, label in zip(ids, labels, strict=True):
        prompt = tokenizer.decode(row[: int((label >= 0).int().argmax())])
        learnt = tokenizer.decode(label[label >= 0])
        assert learnt == solutions[prompt] + END
        assert tokenizer.decode(row) == prompt + learnt + PAD * int((row == tokenizer.pad_token_id).sum())
        lengths.add(len(prompt))
    assert len(lengths) > 1
    assert min(lengths) == shortest


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("propositional_logic", r"ReasoningGym\.tasks: propositional_logic has no answers"),
        ("zebra_puzzles", r"GymModel\.tasks: a text has \d+ characters, at most 512"),
    ],
)
def test_questions_that_a_gym_model_cannot_read_are_refused(prepared_gym, task, message):
    with pytest.raises(ValueError, match=rf"^{message}"):
        GymModel(tasks=task, count=8).prepare()
