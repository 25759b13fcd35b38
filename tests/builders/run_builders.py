"""Where the project and the data are, and builders of small runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kills import first_difference
from kills import timeless as timeless
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer

from exgrpo_orlhf import config
from exgrpo_orlhf.experiment import Outcome
from exgrpo_orlhf.training.run import train

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = Path(__file__).parent
DATA = Path(os.environ.get("EXGRPO_TEST_DATA", ROOT.parent / "shared" / "data"))


CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
# Brings a system message unless the question has one, writes words around the question, and opens the thought.
THINKING = """\
{%- set own = messages[0].role == 'system' -%}
{{ messages[0].content if own else 'Sort it out in two parts, and put the result in \\\\boxed{}.' }}
{% for m in messages[own:] %}{{ 'Somebody wonders: ' + m.content + '\\n' if m.role == 'user' else m.content + '|' }}\
{%- endfor %}{{ 'Helper: <think>\\n' if add_generation_prompt }}"""
SWITCHED = (  # as Qwen3's: without thinking the prompt ends in an empty thought
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'assistant: ' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}"
)
STEPS = 12
FRESH_PHASE = ["ReplayMixer.start_at_accuracy = 0.95"]  # never reached
MIXED_PHASE = ["ReplayMixer.start_at_accuracy = None"]


def small_bindings(model: Path, *more: str) -> list[str]:
    """--set bindings of a run that takes seconds: 8 questions × 4 rollouts of at most 24 tokens, no tracking.

    On the CPU: runs are bit-identical there only.
    """
    return [
        "LocalEngine.device = 'cpu'",
        "Work.model = @PretrainedModel()",
        f"PretrainedModel.path = {str(model)!r}",
        "Work.questions = @ModularChains()",
        "Work.validation = @validation/ModularChains()",
        "Verifier.kind = 'modular_chain'",
        "Prompts.template = 'plain'",
        "Prompts.max_tokens = 32",
        "validation/ModularChains.split = 'validation'",
        "ModularChains.count = 24",
        "ModularChains.operands = (2, 3)",
        "validation/ModularChains.count = 10",
        "validation/ModularChains.operands = (2, 3)",
        "MAX_RESPONSE_TOKENS = 24",
        "train.steps = 4",
        "train.questions_per_step = 8",
        "train.group_size = 4",
        "train.eval_every = 2",
        "train.save_every = 2",
        "Optimizer.learning_rate = 1e-3",
        "ReplayMixer.start_at_accuracy = None",
        "Tracking.enabled = False",
        *more,
    ]


def train_in(run: Path, bindings: Sequence[str], files=("toy.gin",), resume=False, **options) -> Outcome:
    """A run in this process."""
    return train(config.load(files, bindings), run, resume=resume, tracking_uri="unused", tags={}, **options)


def train_small(model: Path, run: Path, *more: str, files=("toy.gin",), resume=False, **options) -> Outcome:
    """A run in this process that takes seconds. more: further bindings"""
    return train_in(run, small_bindings(model, *more), files, resume, **options)


def train_command(run: Path, bindings: Sequence[str], file: str = "toy.gin") -> list[str]:
    """The words of the same run in a process of its own."""
    script = str(ROOT / "scripts" / "train.py")
    return [sys.executable, script, "--gin", file, "--out", str(run), *set_words(bindings)]


def environment(**more: str) -> dict[str, str]:
    """Variables of a process that imports the project and the builders. A PYTHONPATH among `more` is searched first."""
    paths = [more.pop("PYTHONPATH", ""), ROOT, BUILDERS, ROOT / "benchmarks"]
    path = os.pathsep.join(str(one) for one in paths if one)
    return {**os.environ, **more, "PYTHONPATH": path}


def python(
    *words: object, env: Mapping[str, str] | None = None, timeout=1800.0, **options
) -> subprocess.CompletedProcess[str]:
    """A Python process to its end, with what it wrote. env: variables beside this process's"""
    command = [sys.executable, *map(str, words)]
    own = environment(**(env or {}))
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=own, **options)


def free_port() -> int:
    """A port on which nothing listens. It is below those that the system and Ray hand out (from 32768, and 10002 to
    19999): another program that asks for any port does not get it before the caller has taken it, or between a
    server's stop and its restart."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("a hundred ports between 20000 and 32000 are taken")


def set_words(bindings: Sequence[str]) -> list[str]:
    return [word for binding in bindings for word in ("--set", binding)]


def ends_by_its_template(model: Path, folder: Path) -> Path:
    """The model with a chat template that closes turns with the token it ends responses with. Its configuration and its
    tokenizer name another one, as those of base models do."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    template = "{% for m in messages %}{{ m.content }}{{ END if m.role == 'assistant' }}{% endfor %}"
    tokenizer.chat_template = template.replace("END", repr(end))
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        settings["eos_token_id"] = tokenizer.pad_token_id
        (folder / name).write_text(json.dumps(settings), encoding="utf-8")
    return folder


def flip(path: Path) -> None:
    """A bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def wait_until(condition, seconds=600.0, process: subprocess.Popen | None = None, every=0.02):
    """While the process runs, if there is one. every: seconds between two looks"""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, f"it ended too early: {process.communicate()}"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(every)


def byte_tokenizer(size: int = 0) -> Qwen2Tokenizer:
    """Qwen2's byte-level tokenizer without merges: any text, one token per byte. size: of its vocabulary, the rest of
    which only a model writes"""
    vocabulary = {"<|endoftext|>": 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"token{i}": i for i in range(len(vocabulary), size)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def bindings(model: Path, phase: list[str]) -> list[str]:
    # 24 questions and 8 a step: an epoch ends every third step at the latest, never at a checkpoint in between only
    return small_bindings(model, f"train.steps = {STEPS}", "train.save_every = 2", "train.eval_every = 5", *phase)


def run_here(model: Path, phase: list[str], run: Path, resume: bool) -> None:
    outcome = train_in(run, bindings(model, phase), resume=resume)
    assert outcome.steps == STEPS
    assert outcome.stopped_by is None


def assert_same_ending(run: Path, straight: Path) -> None:
    assert first_difference(run, straight, STEPS) is None


def rows(path: Path) -> list[dict]:
    """Of a file with one JSON object a line, or of the metrics of a run's folder."""
    path = path / "metrics.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def rows_so_far(run: Path) -> list[dict]:
    """The metrics of a run that may not have begun, and may be writing its last line."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []
