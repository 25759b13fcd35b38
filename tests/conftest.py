"""What several test files share: where the data is, and small models made here."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("EXGRPO_TEST_DATA", ROOT.parent / "shared" / "data"))

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real questions, or skip."""
    if not DATA.is_dir():
        pytest.skip(f"no shared data at {DATA}; set EXGRPO_TEST_DATA")
    return DATA


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory) -> Path:
    """A chain model after a very short warm-up on 2 and 3 operands: it answers, and is right now and then."""
    from exgrpo_orlhf.tasks.chain_model import ChainModel

    cache = tmp_path_factory.mktemp("models")
    return ChainModel(operands=(2, 3), steps=150, width=32, layers=2, cache=str(cache)).prepare()


@pytest.fixture(scope="session")
def raw_model(tmp_path_factory) -> Path:
    """A chain model that has seen next to nothing."""
    from exgrpo_orlhf.tasks.chain_model import ChainModel

    cache = tmp_path_factory.mktemp("models")
    return ChainModel(operands=(2, 3), steps=1, width=32, layers=2, cache=str(cache)).prepare()


def small_bindings(model: Path, *more: str) -> list[str]:
    """--set bindings of a run that takes seconds: 8 questions × 4 rollouts of at most 24 tokens, no tracking."""
    return [
        "Work.model = @PretrainedModel()",
        f"PretrainedModel.path = {str(model)!r}",
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


@pytest.fixture
def run_script(capsys, monkeypatch):
    """Runs a script's main() in this process: (name, arguments …) → status, stdout and stderr.

    It saves the imports of a process for each call.
    """

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            status = runpy.run_path(str(ROOT / "scripts" / name))["main"]()
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return run
