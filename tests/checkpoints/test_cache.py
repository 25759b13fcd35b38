"""A model in the cache is used as it was made or made again; what a kill leaves is removed; a full disk is one line."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from run_builders import flip, set_words, small_bindings

from exgrpo_orlhf.checkpoints import cache, manifest
from exgrpo_orlhf.io.files import locked
from exgrpo_orlhf.testbed.tiny_models import ChainModel

SMALL = ChainModel(operands=(2, 3), steps=1, batch_size=4, width=32, layers=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return ChainModel(**{**vars(SMALL), "cache": str(tmp_path_factory.mktemp("cache"))}).prepare()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


DAMAGES = {  # two of those that test_manifest.py finds in every file
    "a flipped bit": flip,
    "a file more": lambda path: shutil.copy(path, path.with_name("more.json")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_model_is_to_be_made_again(damage, made, tmp_path, caplog):
    names = [path.name for path in made.iterdir()]
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "manifest.json"} <= {*names}
    for name in names:
        folder = shutil.copytree(made, tmp_path / made.name)
        assert cache.has(folder)
        DAMAGES[damage](folder / name)
        caplog.clear()
        assert not cache.has(folder), name
        [line] = caplog.messages
        assert str(folder / ("more.json" if damage == "a file more" else name)) in line
        assert line.endswith("; it is made again")
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_file_that_cannot_be_read_for_a_moment_costs_no_model(name, made, tmp_path, monkeypatch):
    """A network file system that has lost its server, say."""
    folder = shutil.copytree(made, tmp_path / made.name)

    def stale(read):
        def fails(path, *more, **options):
            if path == folder / name:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return read(path, *more, **options)

        return fails

    monkeypatch.setattr(manifest, "sha256", stale(manifest.sha256))
    monkeypatch.setattr(Path, "read_text", stale(Path.read_text))
    with pytest.raises(cache.CacheError, match=rf"{name}: the file cannot be read .*try again, or remove {folder}"):
        cache.has(folder)
    monkeypatch.undo()
    assert cache.has(folder)
    assert files(folder) == files(made)


def test_a_damaged_model_is_made_again_as_it_was(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / made.name)
    flip(folder / "model.safetensors")
    assert ChainModel(**{**vars(SMALL), "cache": str(tmp_path)}).prepare() == folder
    assert files(folder) == files(made)


def test_another_models_folder_under_its_name_is_not_used(made, tmp_path):
    assert not cache.has(shutil.copytree(made, tmp_path / "chain-model-of-other-settings"))


def test_what_a_killed_process_left_is_removed_when_the_next_model_is_made(tmp_path):
    left, at_work = tmp_path / ".unfinished-left", tmp_path / ".unfinished-at-work"
    for folder in (left, at_work):
        folder.mkdir()
        (folder / "model.safetensors").touch()
        (folder / ".lock").touch()
    with locked(at_work / ".lock"), cache.making(tmp_path / "model") as unfinished:
        (unfinished / "config.json").write_text("{}")
        assert not (tmp_path / "model").exists(), "what is killed now leaves nothing that looks finished"
    assert {path.name for path in tmp_path.iterdir()} == {"model", at_work.name, ".lock"}
    assert cache.has(tmp_path / "model")


def test_a_folder_is_not_removed_before_its_process_holds_the_lock_of_it(tmp_path):
    """Whatever another machine's clock says: until then the process holds the cache's lock."""
    with locked(tmp_path / ".lock"):
        begun = tmp_path / ".unfinished-begun"
        begun.mkdir()
        os.utime(begun, (time.time() - 60,) * 2)
        other = threading.Thread(target=lambda: cache.making(tmp_path / "model").__enter__())
        other.start()
        other.join(0.5)
        with locked(begun / ".lock"):
            pass
    other.join()
    assert not begun.exists(), "nobody holds it any more"


def test_a_full_disk_is_one_line_that_names_the_path(tmp_path, run_script):
    words = small_bindings("unused", "Work.model = @ChainModel()", f"ChainModel.cache = {str(tmp_path / 'cache')!r}")
    words += [f"ChainModel.{name} = {getattr(SMALL, name)!r}" for name in ("operands", "steps", "width", "layers")]
    with full_disk(20_000):
        done = run_script("train.py", "--gin", "toy.gin", *set_words(words), "--out", tmp_path / "x")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: {tmp_path / 'cache'}/chain-model-")
    assert "could not be written" in last
    assert "MiB free: make room" in last
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_full_disk_while_a_state_of_torch_is_saved_is_named_too(tmp_path):
    """torch raises a RuntimeError without a path."""
    with (
        full_disk(20_000),
        pytest.raises(cache.CacheError, match=rf"{tmp_path}/state-1 could not be written"),
        cache.making(tmp_path / "state-1") as unfinished,
    ):
        torch.save(torch.zeros(10_000), unfinished / "state.pt")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
