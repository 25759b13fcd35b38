#!/usr/bin/env python
"""What an evaluation costs over the bare engine's generation of the very same requests. Goal: at most 5 %.

    python benchmarks/eval_throughput.py

Within one process, in turns: the bare engine (this project's sampling loop on the same chunks) and the whole of
`evaluate`: its folder, the graders' processes and their start, both graders, writing, and the results with their
intervals. Reported are the seconds of each round and the ratio of the medians. Other work on the cores shows.

The model is made here, its weights random; what it writes holds no answer. So that grading has its usual work, each
response is given the text of a solution, right in every second one, after it was generated; exactly those must be
graded right.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from command_line import DATA, finish, make_parser
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from exgrpo_orlhf.engines.local.placement import device_of, dtype_of, end_and_pad, load
from exgrpo_orlhf.evaluation import evaluated_model, sets
from exgrpo_orlhf.evaluation.bench_run import EvaluationPlan, evaluate
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, Definitions, override
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.records import Rollout
from exgrpo_orlhf.sampling import Portion, Request, Sampler, ServedRollout
from exgrpo_orlhf.sampling.torch_loop import LoopSampler, generate

GOAL = 0.05
BENCHMARK, SAMPLES, ROWS = "math500", 2, 64  # responses to a question; of transformers, at a time
SOLUTION = "Let x be what is asked for. Then {steps} and so on, step by step. The answer is $\\boxed{{{answer}}}$."


class Size(NamedTuple):
    """tokens: of a response, at most; width, layers: of the model; rounds: of each way"""

    questions: int
    tokens: int
    width: int
    layers: int
    rounds: int


FULL, SMALL = Size(100, 256, 256, 4, 3), Size(6, 16, 64, 1, 1)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with MATH-500 (default %(default)s)")
    arguments = parser.parse_args()
    size = SMALL if arguments.small else FULL
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_model(Path(folder) / "model", size.width, size.layers)
        model, _ = evaluated_model.load(str(model_path))
        sampling = {"samples": SAMPLES, "temperature": 1.0, "top_p": 1.0, "max_tokens": size.tokens}
        benchmark = override(Definitions((DEFINITIONS,)).benchmark(BENCHMARK), **sampling)
        questions = sets.load(benchmark, (arguments.data, sets.DATASETS), size.questions)
        asker = evaluated_model.RequestBuilder(model, Prompts(template="plain"), seed=0)
        evaluation = EvaluationPlan(
            builder=asker, sets=[questions], not_run={}, limit=size.questions, plain=True, timeout=5.0, workers=0,
            engine={"name": "transformers"}, groups={benchmark.group: [benchmark.name]}, suite=None,
            record={}, provenance={},
        )  # fmt: skip
        requests = asker.requests([questions])
        answers = {row: question.answer for row, question in questions.rows}
        place = device_of("auto")
        loaded = load(model_path, place, dtype_of("auto", place))
        engine = LoopSampler(loaded, model.tokenizer, *end_and_pad(loaded, model.tokenizer), ROWS)
        kept = Answering(engine, answers)
        try:
            list(engine.sample(requests[:ROWS]))  # what is slower the first time
            seconds: dict[str, list[float]] = {"bare": [], "evaluation": []}
            for round_ in range(size.rounds):
                begun = time.perf_counter()
                bare_transformers(engine, requests)
                seconds["bare"].append(time.perf_counter() - begun)
                begun = time.perf_counter()
                evaluate(evaluation, Path(folder) / str(round_), lambda: kept, SimpleNamespace(signal=None))
                seconds["evaluation"].append(time.perf_counter() - begun)
                print(f"round {round_ + 1}: " + ", ".join(f"{name} {all_[-1]:.2f} s" for name, all_ in seconds.items()))
            results = json.loads((Path(folder) / "0" / "results.json").read_text(encoding="utf-8"))
        finally:
            engine.close()
    result = results["benchmarks"][BENCHMARK]
    bare, ours = (statistics.median(seconds[name]) for name in ("bare", "evaluation"))
    tokens, graded, overhead = result["tokens"]["response"], result["avg"]["value"], ours / bare - 1
    right = sum(map(Answering.is_right, requests)) / len(requests)
    figures = {
        "seconds": seconds,
        "responses": len(requests),
        "tokens": tokens,
        "graded_right": graded,
        "overhead": overhead,
        "met": (arguments.small or overhead <= GOAL) and abs(graded - right) < 1e-9,
    }
    summary = (
        f"{len(requests)} responses, {tokens} tokens, {tokens / bare:.0f} tokens/s bare; graded "
        f"right {graded:.3f} (goal {right:.3f}); overhead {overhead:+.1%} (goal {GOAL:.0%}), "
        f"{1000 * (ours - bare) / len(requests):.1f} ms a response"
    )
    return finish(arguments, figures, summary)


class Answering(Sampler):
    """A sampler that stays open, and whose responses are solutions to be graded."""

    def __init__(self, engine: Sampler, answers: dict[int, str]) -> None:
        self._engine, self._answers, self.reproducible = engine, answers, engine.reproducible

    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        for portion in self._engine.sample(requests, done):
            yield [(i, [self._solution(requests[i], rollout)]) for i, (rollout,) in portion]

    @staticmethod
    def is_right(request: Request) -> bool:
        _, row, sample = request.key
        return (row + sample) % 2 == 1

    def _solution(self, request: Request, rollout: Rollout) -> Rollout:
        answer = self._answers[request.key[1]] if self.is_right(request) else str(rollout.length)
        steps = ", ".join(f"x_{i} = {i} \\cdot {rollout.length}" for i in range(40))
        text = SOLUTION.format(steps=steps, answer=answer)
        return ServedRollout(rollout.token_ids, rollout.finish, text=text, tokens=rollout.length)

    def describe(self) -> dict[str, Any]:
        return self._engine.describe()

    def close(self) -> None:
        """The next round needs it."""


def bare_transformers(engine: LoopSampler, requests: Sequence[Request]) -> None:
    for _, places in engine._chunks(requests):
        chunk = [request for *_, request in places]
        generate(engine.model, chunk, end=engine.end, pad=engine.pad, seeds=[one.seed_at(0) for one in chunk])


def make_model(folder: Path, width: int, layers: int) -> Path:
    """A byte is a token; the vocabulary is a real model's, so that sampling costs what it does there."""
    torch.manual_seed(0)
    vocabulary = {"<|endoftext|>": 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {name: "<|endoftext|>" for name in ("unk_token", "eos_token", "pad_token")}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], **special).save_pretrained(folder)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32_000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
            num_key_value_heads=2, intermediate_size=3 * width, max_position_embeddings=16_384,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


if __name__ == "__main__":
    sys.exit(main())
