import json
import multiprocessing
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from exgrpo_orlhf.tasks import chain_model
from exgrpo_orlhf.tasks.chain_model import END, PAD, VOCABULARY, ChainModel, chain_tokenizer
from exgrpo_orlhf.tasks.modular_chains import PRESETS, ModularChains, right_reasoning

TINY = ChainModel(operands=(2, 3), steps=3, batch_size=4, width=32, layers=1)
# Forked from a process that has imported everything and computed nothing: clean processes for one import's time.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["exgrpo_orlhf.tasks.chain_model"])


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


def test_every_text_survives_encoding_saving_and_decoding(prepared):
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    for tokenizer in (
        chain_tokenizer(),
        AutoTokenizer.from_pretrained(prepared),
        PreTrainedTokenizerFast.from_pretrained(prepared),
    ):
        for letters in product(VOCABULARY[2:], repeat=3):
            text = "".join(letters)
            assert tokenizer.encode(text) == [ids[letter] for letter in letters]
            assert tokenizer.decode(tokenizer.encode(text)) == text
        for question in ModularChains(count=20).load():
            text = question.prompt + right_reasoning(question.prompt)
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert tokenizer.decode([*tokenizer.encode(text), ids[END], ids[PAD]], skip_special_tokens=True) == text


def test_the_saved_tokenizer_pads_left_and_agrees_with_the_network(prepared):
    tokenizer, model = AutoTokenizer.from_pretrained(prepared), AutoModelForCausalLM.from_pretrained(prepared)
    assert tokenizer(["7+5=", "7+5*3="], padding=True)["attention_mask"] == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert len(tokenizer) == model.config.vocab_size == len(VOCABULARY)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.dtype == torch.float32


def test_the_default_network_has_a_third_of_a_million_parameters():
    assert sum(p.numel() for p in ChainModel()._fresh_network().parameters()) == 335_040


def test_the_same_settings_give_the_same_model_and_others_another(tmp_path, prepared):
    again = replace(TINY, cache=tmp_path).prepare()
    assert again.name == prepared.name
    assert weights(again) == weights(prepared)
    spelled_out = replace(TINY, preset="weak", false_share=0.30, strength=0.7, slip=0.03, cache=tmp_path)
    assert spelled_out.directory == again
    for changed in (dict(seed=1), dict(steps=4), dict(learning_rate=1e-3), dict(preset="weak"), dict(slip=0.5)):
        assert replace(TINY, cache=tmp_path, **changed).directory != again
    assert weights(replace(TINY, cache=tmp_path, seed=1).prepare()) != weights(again)


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


@pytest.mark.parametrize("moment", ["training", "saving"])
def test_an_interrupted_warm_up_leaves_nothing(tmp_path, monkeypatch, moment):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "training":
            patch.setattr(torch.optim.AdamW, "step", interrupt)
        else:
            patch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupt)  # the network is on disk by then
        with pytest.raises(KeyboardInterrupt):
            replace(TINY, cache=tmp_path).prepare()
    assert list(tmp_path.iterdir()) == []
    assert replace(TINY, cache=tmp_path).prepare().is_dir()


def exit_while_saving(model: ChainModel) -> None:
    chain_model.chain_tokenizer = lambda: os._exit(9)  # the network is on disk by then
    model.prepare()


def test_a_process_killed_while_it_saves_leaves_nothing_that_looks_finished(tmp_path):
    model = replace(TINY, cache=tmp_path)
    process = PROCESSES.Process(target=exit_while_saving, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not model.directory.exists()
    assert (model.prepare() / "tokenizer.json").is_file()


def test_two_processes_at_once_end_with_one_model(tmp_path, prepared):
    model = replace(TINY, cache=tmp_path)
    both = [PROCESSES.Process(target=ChainModel.prepare, args=(model,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert list(tmp_path.iterdir()) == [model.directory]
    assert {p.name for p in model.directory.iterdir()} == {p.name for p in prepared.iterdir()}


def test_the_second_of_two_warm_ups_is_thrown_away(tmp_path, monkeypatch):
    model, train = replace(TINY, cache=tmp_path), ChainModel._warmed_up

    def overtaken(self):
        monkeypatch.setattr(ChainModel, "_warmed_up", train)
        first = model.prepare()
        (first / "first").touch()
        return train(self)

    monkeypatch.setattr(ChainModel, "_warmed_up", overtaken)
    assert (model.prepare() / "first").is_file()
    assert list(tmp_path.iterdir()) == [model.directory]


def test_preparing_leaves_the_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    replace(TINY, cache=tmp_path).prepare()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_short_warm_up_teaches_the_format():
    model = replace(TINY, steps=80, batch_size=16, operands=(3,), learning_rate=5e-3)._warmed_up()
    ids = torch.tensor([chain_tokenizer().encode("7+5*3=7+5=2;2*3=6;#6")])
    with torch.no_grad():
        written = [VOCABULARY[i] for i in model(ids).logits.argmax(-1)[0, 5:]]
    assert {i: written[i] for i in (3, 5, 9, 11, 12, 14)} == {3: "=", 5: ";", 9: "=", 11: ";", 12: "#", 14: END}


def test_presets_and_overrides_say_what_is_taught():
    assert replace(TINY, preset="slips").beliefs == PRESETS["slips"]
    assert TINY.beliefs == PRESETS["normal"]
    assert replace(TINY, strength=0.5, seed=3).beliefs == replace(PRESETS["normal"], strength=0.5, seed=3)


def test_the_progress_line_says_step_loss_and_time_left(monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    TINY._warmed_up()
    assert "step 1 of 3, loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(preset="strong"), r"ChainModel\.preset must be one of normal, weak, slips, got 'strong'"),
        (dict(false_share=1.5), r"ChainModel\.false_share must be a number from 0 to 1, got 1\.5"),
        (dict(strength=-1), r"ChainModel\.strength must be a number from 0 to 1, got -1"),
        (dict(slip="a"), r"ChainModel\.slip must be a number from 0 to 1, got 'a'"),
        (dict(operands=(1,)), r"ChainModel\.operands .* at least 2.* got \(1,\)"),
        (dict(operands=(33,)), r"ChainModel\.operands .* at most 32, got \(33,\)"),
        (dict(steps=0), r"ChainModel\.steps must be a positive multiple of 1, got 0"),
        (dict(batch_size=1.5), r"ChainModel\.batch_size .* got 1\.5"),
        (dict(learning_rate=0.0), r"ChainModel\.learning_rate must be between 0 and 1, got 0\.0"),
        (dict(seed=-1), r"ChainModel\.seed .* at least 0, got -1"),
        (dict(width=100), r"ChainModel\.width must be a positive multiple of 32, got 100"),
        (dict(layers=0), r"ChainModel\.layers .* got 0"),
        (dict(cache=3), r"ChainModel\.cache must be a path or None, got 3"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ChainModel(**fields)


def test_the_saved_config_names_no_place_on_this_machine(prepared):
    for path in prepared.glob("*.json"):
        assert str(Path.home()) not in path.read_text()
        assert str(prepared.parent) not in json.dumps(json.loads(path.read_text()))
