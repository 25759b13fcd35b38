"""The evaluation's own engine loads a model as the trainer's does: one loader, with one set of checks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engine_builders import make_engine
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from exgrpo_orlhf.evaluation.backends import EngineFailure
from exgrpo_orlhf.evaluation.backends.transformers_engine import TransformersEngine
from exgrpo_orlhf.settings import LocalEngine


def evaluate(model: Path, device: str = "cpu") -> None:
    TransformersEngine(
        str(model), AutoTokenizer.from_pretrained(model), device=device, dtype="float32", threads=1, rows=4
    )


def train(model: Path, device: str = "cpu") -> None:
    make_engine(model, settings=LocalEngine(device=device))


@pytest.mark.parametrize("load", [evaluate, train])
def test_a_model_without_some_of_its_weights_and_a_device_that_is_not_there_are_refused(load, warm_model, tmp_path):
    model = Path(shutil.copytree(warm_model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, EngineFailure), match=r"model lacks 1 of its weights \(model\.norm\.weight\)"):
        load(model)
    for device, reason in (("cuda:99", r"torch sees (no|\d+) GPU here"), ("moon", "Expected one of cpu, cuda")):
        with pytest.raises((ValueError, EngineFailure), match=rf"device = '{device}'.*{reason}"):
            load(warm_model, device)
