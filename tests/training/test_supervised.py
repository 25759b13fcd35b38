"""A supervised start: what is learnt, from which tokens, where it is kept, and what an interruption leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_builders import plain_stats
from run_builders import ends_by_its_template, wait_until
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf.engines.local.placement import load
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.settings import LocalEngine, Sampling
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.training import supervised_start, supervised_training
from exgrpo_orlhf.training.supervised_start import CURVE, SupervisedModel
from exgrpo_orlhf.training.supervised_training import SupervisedTraining

CHAINS = ModularChains(count=20, operands=(2, 3))
CPU = LocalEngine(device="cpu", micro_batch_tokens=256)


def supervised(base: Path, cache: Path, **more) -> SupervisedModel:
    """5 steps an epoch, two epochs."""
    settings = {"model": PretrainedModel(str(base)), "examples": CHAINS, "prompts": Prompts(max_tokens=16)}
    settings |= {"sampling": Sampling(max_response_tokens=24), "machine": CPU, "cache": str(cache)}
    return SupervisedModel(**{**settings, "epochs": 2, "batch_size": 4, "learning_rate": 1e-3, **more})


def rows_of(model: Path) -> list[ForwardRow]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        ForwardRow(tokenizer.encode(q.prompt), np.array([*tokenizer.encode(r), tokenizer.eos_token_id], np.int32))
        for q, r in CHAINS.examples()
    ]


def training_on(model: Path, rows, machine=CPU, batch_size=8, **more) -> SupervisedTraining:
    settings = supervised(model, model, machine=machine, batch_size=batch_size, **more)
    return SupervisedTraining(load(model, torch.device("cpu")), rows, settings)


def gradients(training: SupervisedTraining) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in training.model.named_parameters() if p.grad is not None}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def curve(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name not in ("time", "supervised/tokens_per_second")}
        for row in MetricsLog(folder / CURVE).rows()
    ]


# -- what is learnt ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine",
    [
        replace(CPU, micro_batch_tokens=10_000),
        replace(CPU, micro_batch_tokens=1),  # a mean of the micro-batches' means would differ in the second digit
        replace(CPU, micro_batch_tokens=10_000, gradient_checkpointing=True),
    ],
    ids=["at once", "row by row", "recomputed"],
)
def test_loss_and_gradient_are_those_of_transformers_with_the_prompt_masked(warm_model, machine):
    """transformers' own mean over the labels that are not −100, of one padded batch."""
    rows = rows_of(warm_model)
    training = training_on(warm_model, rows, machine)
    loss = training.gradient(1)
    ours = gradients(training)
    batch = [rows[i] for i in training.batch(1)]
    longest = max(map(len, batch))
    ids, labels = torch.zeros(len(batch), longest, dtype=torch.long), torch.full((len(batch), longest), -100)
    for i, row in enumerate(batch):
        ids_of_row = torch.tensor([*row.prompt, *row.token_ids.tolist()])
        ids[i, : len(row)], labels[i, len(row.prompt) : len(row)] = ids_of_row, ids_of_row[len(row.prompt) :]
    plain = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float32)
    mask = (torch.arange(longest) < torch.tensor([[len(row)] for row in batch])).long()
    expected = plain(input_ids=ids, attention_mask=mask, labels=labels).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-5)
    assert max(float(grad.abs().max()) for grad in ours.values()) > 0.01


def test_each_epoch_has_every_example_once_in_another_order(raw_model):
    training = training_on(raw_model, rows_of(raw_model), batch_size=6)  # 4 steps an epoch, of 6, 6, 6 and 2
    epochs = [[i for step in range(first, first + 4) for i in training.batch(step)] for first in (1, 5)]
    assert [len(training.batch(step)) for step in (1, 2, 3, 4)] == [6, 6, 6, 2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]


@pytest.mark.slow
def test_the_examples_become_more_likely_and_the_curve_says_so(raw_model, tmp_path):
    folder = supervised(raw_model, tmp_path, epochs=8).prepare()
    logprobs = [
        np.mean([float(plain_stats(model, row.prompt, row.token_ids)[0].mean()) for row in rows_of(raw_model)])
        for model in (AutoModelForCausalLM.from_pretrained(path) for path in (raw_model, folder))
    ]
    assert logprobs[1] > logprobs[0] + 0.5
    rows = list(MetricsLog(folder / CURVE).rows())
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[-1]["supervised/loss"] < rows[0]["supervised/loss"] - 0.5
    assert rows[-1]["supervised/tokens"] == 8 * sum(len(row.token_ids) for row in rows_of(raw_model))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(raw_model).get_vocab()
    assert rows[0]["supervised/learning_rate"] == 1e-3 / 4, "of 40 steps a tenth is warm-up"
    assert rows[3]["supervised/learning_rate"] == max(row["supervised/learning_rate"] for row in rows) == 1e-3


def test_responses_are_closed_as_the_policys_own_are(warm_model, tmp_path, monkeypatch):
    """By the token that closes a turn in the template, where tokenizer and configuration name another one."""
    model = ends_by_its_template(warm_model, tmp_path / "model")
    seen = []
    monkeypatch.setattr(
        supervised_training, "SupervisedTraining", lambda model, rows, *_, **__: seen.extend(rows) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        supervised(model, tmp_path, prompts=Prompts("chat", max_tokens=16)).prepare()
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == "<pad>"
    for row, (question, response) in zip(seen, CHAINS.examples(), strict=True):
        assert tokenizer.convert_ids_to_tokens(row.token_ids) == [*response, "<end>"]
        assert tokenizer.decode(row.prompt) == question.prompt


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(raw_model, tmp_path_factory) -> Path:
    return supervised(raw_model, tmp_path_factory.mktemp("cache")).prepare()


def key(model: SupervisedModel, monkeypatch) -> str:
    """The name of the folder that would be made."""
    with monkeypatch.context() as patch:
        patch.setattr(SupervisedModel, "_make", lambda self, folder, *_: folder.mkdir())
        folder = model.prepare()
    folder.rmdir()
    return folder.name


def test_weight_decay_leaves_biases_and_norms_as_in_the_run(raw_model):
    training = training_on(raw_model, rows_of(raw_model), weight_decay=0.1)
    taken, left = training._optimiser.param_groups
    assert (taken["weight_decay"], left["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in taken["params"]} == {2}
    assert {parameter.dim() for parameter in left["params"]} == {1}


@pytest.mark.slow
def test_the_name_says_what_makes_a_model_not_where_it_lies(raw_model, warm_model, made, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in raw_model.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    (moved / CURVE).write_text("the curve of an earlier start is no part of a model")
    machine = replace(CPU, micro_batch_tokens=512, threads=2, gradient_checkpointing=True)
    for same_model in (supervised(moved, tmp_path), supervised(moved, tmp_path, machine=machine)):
        assert key(same_model, monkeypatch) == made.name
    changes = [
        {"model": PretrainedModel(str(warm_model))},
        *({"examples": replace(CHAINS, seed=1)}, {"epochs": 3}, {"batch_size": 5}, {"learning_rate": 2e-3}),
        *({"schedule": "linear"}, {"warmup": 0.2}, {"weight_decay": 0.1}, {"max_grad_norm": 0.5}, {"seed": 1}),
        *({"machine": replace(CPU, dtype="bfloat16")}, {"prompts": Prompts("simplerl", max_tokens=256)}),
    ]
    names = [key(supervised(raw_model, tmp_path, **change), monkeypatch) for change in changes]
    assert len({made.name, *names}) == len(changes) + 1


def test_a_finished_model_is_not_made_again(made, raw_model, monkeypatch):
    monkeypatch.setattr(SupervisedModel, "_make", lambda *_: pytest.fail("made again"))
    assert supervised(raw_model, made.parent).prepare() == made
    assert [path.name for path in made.parent.iterdir() if not path.name.startswith(".")] == [made.name]


def test_bfloat16_computation_trains_float32_weights(raw_model, tmp_path):
    folder = supervised(raw_model, tmp_path, machine=replace(CPU, dtype="bfloat16")).prepare()
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.float32}
    assert curve(folder)[-1]["supervised/loss"] < curve(folder)[0]["supervised/loss"]


# -- interruptions ----------------------------------------------------------------------------------------------------


def prepare_in(cache: Path, model: Path, kill_at: int | str | None = None, hold: Path | None = None) -> None:
    """What a process of its own does: make the model; it is killed after that step, or waits there for a file."""
    # A forked process makes torch's thread pool anew at its first use: two threads at once then find none.
    torch.set_num_threads(1)
    run = SupervisedTraining.run

    def interrupted(training):
        for step, metrics in run(training):
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 2 and hold:
                (cache / "held").touch()
                wait_until(hold.exists)
            yield step, metrics

    SupervisedTraining.run = interrupted
    if kill_at == "saving":  # the weights are written, and what the folder needs besides is not
        supervised_start.name_end_tokens = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    supervised(model, cache).prepare()


PROCESSES = multiprocessing.get_context("fork")


def run_process(*arguments) -> multiprocessing.Process:
    process = PROCESSES.Process(target=prepare_in, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_a_killed_start_leaves_no_model_and_begins_again_to_the_same_bits(made, raw_model, tmp_path):
    for kill_at in (5, 10, "saving"):
        process = run_process(tmp_path, raw_model, kill_at)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (tmp_path / made.name).exists()
    folder = supervised(raw_model, tmp_path).prepare()
    assert folder.name == made.name
    assert same(weights(folder), weights(made))
    assert curve(folder) == curve(made)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [made.name]


@pytest.mark.slow
def test_two_processes_at_once_make_it_once(made, raw_model, tmp_path):
    first = run_process(tmp_path, raw_model, None, tmp_path / "go")
    wait_until(lambda: (tmp_path / "held").exists() or not first.is_alive())
    second = run_process(tmp_path, raw_model, 1)  # killed if it trained a step
    second.join(1.0)
    assert second.is_alive(), "waits for the first"
    (tmp_path / "go").touch()
    for process in (first, second):
        process.join()
        assert process.exitcode == 0
    assert same(weights(tmp_path / made.name), weights(made))


def test_progress_says_step_loss_and_time_left(raw_model, tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    supervised(raw_model, tmp_path).prepare()
    output = capsys.readouterr().err
    assert "supervised start: 20 examples, 10 steps of 4 on cpu" in output
    assert "supervised start: step 1 of 10, loss " in output
    assert "54 s left" in output
