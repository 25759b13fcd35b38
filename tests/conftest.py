"""What several test files share: where the data is, and small models made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

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
