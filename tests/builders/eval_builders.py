"""What tests of the evaluation share: models that take any text, requests to engines, what an evaluation left."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from run_builders import ROOT, byte_tokenizer, train_small
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.evaluation.responses import Key, Response, respond
from exgrpo_orlhf.io.weights import save as save_model
from exgrpo_orlhf.sampling import Request, Sampler
from exgrpo_orlhf.sampling.torch_loop import generate

RUN_BENCH = ROOT / "evals" / "run_bench.py"
HERE = ("--engine", "transformers", "--no-mlflow")
CHAINS = ("--benchmarks", "chains", *HERE, "--max-tokens", 24)

CONTEXT = 512  # of published_model
END, ALSO_END = 0, 65  # the tokenizer's end token; one that a generation config names beside it
TOKENS = 95  # of byte_tokenizer: its end token and what ASCII prints, so that a token is a character


def needs_vllm(test):
    """Importing it takes 15 s."""
    return pytest.mark.openrlhf(pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")(test))


def byte_model(folder: Path, heads: int = 1, layers: int = 1, vocabulary: int = 260, context: int = 8192) -> Path:
    """A model of bytes that has learnt nothing: any text goes in, and it writes nonsense, peaked but varied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary, hidden_size=32 * heads, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=1, intermediate_size=64 * heads, max_position_embeddings=context,
                tie_word_embeddings=True, bos_token_id=None, eos_token_id=END, initializer_range=0.08,
            )
        )  # fmt: skip
    save_model(model, folder)
    byte_tokenizer(vocabulary if vocabulary > 260 else 0).save_pretrained(folder)
    return folder


def published_model(folder: Path) -> Path:
    """Two layers with heads of 32, the least that vLLM's CPU kernels take, and what a published model may bring along:
    sampling by its generation config would be seen at once, because top_k = 1 is greedy."""
    byte_model(folder, heads=2, layers=2, vocabulary=TOKENS, context=CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.update(eos_token_id=[END, ALSO_END], do_sample=True, top_k=1, repetition_penalty=1.5)
    save_model(model, folder)
    return folder


def request(i: int, temperature: float = 1.0, max_tokens: int = 100) -> Request:
    """Prompts of 3 to 240 tokens; every second one begins with the same 200, which the cache then holds."""
    rng = random.Random(i)
    ids = [1 + (7 * k) % 90 for k in range(200)] if i % 2 else []
    ids += [rng.randrange(1, TOKENS) for _ in range(rng.randrange(3, 40))]
    messages = (("user", f"question-{i}"),)
    top_p = 1.0 if i % 3 else 0.9
    key = ("set", i // 2, i % 2)
    return Request(ids, rng.getrandbits(31), max_tokens, temperature, top_p, key=key, messages=messages)


def greedy_by_transformers(folder: Path, requests: Sequence[Request]) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    greedy = [replace(request, temperature=0.0, top_p=1.0, max_tokens=requests[0].max_tokens) for request in requests]
    rollouts = generate(model, greedy, end=[END, ALSO_END], pad=END)
    return [tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True) for rollout in rollouts]


def all_responses(
    sampler: Sampler, requests: Sequence[Request], done: Collection[Key] = (), **episodes: Any
) -> dict[Key, Response]:
    portions = respond(sampler, requests, done, byte_tokenizer(), **episodes)
    responses = [response for portion in portions for response in portion]
    assert len({response.request.key for response in responses}) == len(responses), "an answer came twice"
    return {response.request.key: response for response in responses}


def texts(answers: dict[Key, Response]) -> dict[Key, str]:
    return {key: response.text for key, response in answers.items()}


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def timeless_results(folder: Path) -> dict:
    """results.json without its times, its name and what was typed."""
    content = results(folder)
    for name in ("finished", "command"):
        del content["record"][name]
    for benchmark in content["benchmarks"].values():
        del benchmark["seconds"]
    del content["name"]
    return content


def samples(folder: Path, benchmark: str = "chains") -> list[dict]:
    return [json.loads(line) for line in (folder / benchmark / "samples.jsonl").read_bytes().split(b"\n") if line]


def definition(folder: Path, **more: str) -> Path:
    """A benchmark of twelve sums, as a file of definitions."""
    rows = [{"problem": f"What is {i} + {i + 3}?", "answer": str(2 * i + 3)} for i in range(12)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "title": '"Mine"',
        "verifier": '"exact"',  # graded in this process
        "files": '[{ name = "mine.jsonl", question = "problem", answer = "answer" }]',
        **more,
    }
    path = folder / "mine.toml"
    path.write_text("[mine]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    return path


def train_on_rows(model: Path, run: Path, rows: Sequence[dict], *more: str, resume: bool = False) -> None:
    """One step on questions of a file beside the run, answers of two tokens. rows: its lines"""
    path = run.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bindings = [
        "Work.questions = @QuestionFile()",
        "Work.validation = None",
        f"QuestionFile.path = '{path}'",
        "QuestionFile.answer = 'answer'",
        "QuestionFile.source = None",
        "Verifier.kind = 'exact'",
        "Prompts.max_tokens = 400",
        "MAX_RESPONSE_TOKENS = 2",
        "train.steps = 1",
        "train.questions_per_step = 2",
        "train.group_size = 2",
        "train.eval_every = None",
    ]
    train_small(model, run, *bindings, *more, resume=resume)
