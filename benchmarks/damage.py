"""What the campaign does to the files of a checkpoint or of a model."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.checkpoints import cache, manifest
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.testbed.tiny_models import ChainModel

Outcome = Literal["silent", "lost"]
Problem = tuple[Outcome, str]  # and what the run has printed
Trial = Callable[[], Problem | None]  # None: the damage was detected
CACHED: dict[str, Any] = {"operands": (3, 4), "steps": 2, "width": 32, "layers": 2}
FILES = ("flip", "truncation", "emptying", "deletion", "swap")
FOLDERS = ("another name", "another's replay/", "another run", "edited counters")


def damage_file(rng: random.Random, newest: Path, older: Path, how: str, name: str) -> Path:
    """newest, older: checkpoints; the damage is to the newest. Returns what the message must name."""
    path = newest / name
    data = path.read_bytes()
    if how == "flip":
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    elif how == "truncation":
        os.truncate(path, rng.randrange(len(data)))
    elif how == "emptying":
        os.truncate(path, 0)
    elif how == "deletion":
        path.unlink()
    else:  # the same file of the older checkpoint; where that is equal, another file of this one
        same = older / name
        others = [file for file in newest.rglob("*") if file.is_file() and file.read_bytes() != data]
        shutil.copy(same if same.is_file() and same.read_bytes() != data else rng.choice(sorted(others)), path)
    return path


def damage_folder(rng: random.Random, newest: Path, older: Path, how: str, other: Path) -> Path:
    """As `damage_file`. other: another run"""
    if how == "another name":
        return shutil.copytree(newest, newest.with_name("checkpoint-99"))
    if how == "another's replay/":
        shutil.copytree(older / "replay", newest / "replay", dirs_exist_ok=True)
        return newest / "replay"
    if how == "another run":
        shutil.rmtree(newest)
        return shutil.copytree(other / newest.name, newest)
    path = newest / "trainer" / "state.json"
    state = json.loads(path.read_text())
    state["generated_tokens"] += rng.choice((-1, 1))
    path.write_text(json.dumps(state, indent=1) + "\n")
    return path


def model_trials(
    folder: Path, rng: random.Random, train: Callable[[Path], int], small: bool
) -> Iterator[tuple[str, str, Trial]]:
    """Kind of damage, what is damaged, and the trial. train: trains or resumes a run that adapts folder/base; small:
    one kind of damage to a tensor of an adapter instead of all"""
    made = ChainModel(**CACHED, cache=str(folder / "cache")).prepare()
    base, run = folder / "base", folder / "lora"
    shutil.copytree(made, base, ignore=shutil.ignore_patterns(manifest.NAME))
    if train(run):
        raise RuntimeError(run.with_suffix(".log").read_text())

    def cached(how: str, name: str) -> Problem | None:
        copy, lines = folder / "damaged" / made.name, []
        shutil.copytree(made, copy)
        damage_file(rng, copy, folder / "none", how, name)
        with mock.patch.object(cache.log, "warning", side_effect=lambda text, *values: lines.append(text % values)):
            ChainModel(**CACHED, cache=str(copy.parent)).prepare()
        same = all((copy / path.name).read_bytes() == path.read_bytes() for path in made.iterdir())
        shutil.rmtree(copy.parent)
        if not lines:
            return "silent", ""
        return None if same and str(copy / name) in lines[0] else ("lost", f"{lines}, made as it was: {same}")

    def adapted(how: str, name: str) -> Problem | None:
        data = (base / name).read_bytes()
        damage_file(rng, base, folder / "none", how, name)
        status, log = train(run), run.with_suffix(".log").read_text().strip()
        (base / name).write_bytes(data)
        last = log.rpartition("\n")[2]
        if status == 2 and (str(base) in last or "the base model has changed" in last):
            return None
        return "lost" if status else "silent", log

    for how in FILES:
        for name in sorted(path.name for path in made.iterdir()):
            yield f"cached model: {how}", name, partial(cached, how, name)
        for name in ("model.safetensors", "config.json"):
            yield f"base of an adapter: {how}", name, partial(adapted, how, name)
    trained = [*checkpoints.find(run).values()][-1] / "adapter"
    adapter = shutil.copytree(trained, folder / "adapter")  # where no manifest is beside it
    yield from incomplete("adapter", adapter / "adapter_model.safetensors", small)
    yield from incomplete("model", base / "model.safetensors", False)


def incomplete(kind: str, file: Path, small: bool) -> Iterator[tuple[str, str, Trial]]:
    """Each tensor of a file of weights changed, one at a time; then the file is as it was."""
    tensors, content = load_file(file), file.read_bytes()
    changes: dict[str, Callable[[str], dict[str, torch.Tensor]]] = {
        "a tensor missing": lambda name: {},
        "another name": lambda name: {f"x.{name}": tensors[name]},
        "a dimension less": lambda name: {name: tensors[name][:-1].clone()},
        "a NaN": lambda name: {name: torch.where(tensors[name] == tensors[name].max(), torch.nan, tensors[name])},
    }
    for i, (what, change) in enumerate(changes.items()):
        for name in [*tensors][i :: len(changes)] if small else tensors:
            changed = {other: one for other, one in tensors.items() if other != name} | change(name)
            save_file(changed, file, metadata={"format": "pt"})
            yield f"incomplete {kind}: {what}", name, partial(refused, file.parent)
    file.write_bytes(content)


def refused(folder: Path) -> Problem | None:
    """Also where it was to be made in the cache, which must not keep it."""
    cached = folder.parent / "cache"
    there = {*cached.glob("*")}
    try:
        PretrainedModel(str(folder), cache=str(cached)).prepare()
    except ValueError as error:
        left = {*cached.glob("*")} - there
        return ("lost", f"{error}, in the cache: {left}") if "\n" in str(error) or left else None
    return "silent", ""
