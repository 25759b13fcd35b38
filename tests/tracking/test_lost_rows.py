"""Rows that were lost from a run's logs are noticed when the run is resumed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from run_builders import train_small

from exgrpo_orlhf.training.supervised_start import CURVE, copy_curve

LOGS = ("decisions.jsonl", "rollouts.jsonl", "metrics.jsonl")
SIX_STEPS = ("train.steps = 6", "train.eval_every = None", "train.save_every = 6")


@pytest.fixture(scope="module")
def finished(warm_model, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train_small(warm_model, run, *SIX_STEPS)
    return run


def without_row(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[len(lines) // 2]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("damage", [None, Path.unlink, lambda path: path.write_bytes(b""), without_row])
def test_logs_that_are_deleted_emptied_or_lack_a_row_are_noticed(damage, finished, warm_model, tmp_path, caplog):
    """And nothing is said of whole ones."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for name in LOGS if damage else ():
        damage(run / name)
    with caplog.at_level(logging.WARNING):
        train_small(warm_model, run, *SIX_STEPS, resume=True)
    lines = [message for message in caplog.messages if "rows are missing" in message]
    assert [line.partition(": ")[0] for line in lines] == [str(run / name) for name in LOGS if damage]
    if damage is without_row:
        assert all(
            f": 1 rows are missing (steps {step}): " in line for line, step in zip(lines, (4, 5, 3), strict=True)
        )


def test_a_curve_of_the_supervised_start_that_was_changed_is_copied_again(tmp_path, caplog):
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    (model / CURVE).write_text('{"step": 1}\n{"step": 2}\n')
    copy_curve(model, run, resumed=False)
    copy_curve(model, run, resumed=True)
    assert caplog.messages == []
    for damage in (Path.unlink, lambda path: path.write_bytes(b""), without_row):
        caplog.clear()
        damage(run / CURVE)
        copy_curve(model, run, resumed=True)
        assert (run / CURVE).read_bytes() == (model / CURVE).read_bytes()
        assert "was changed or deleted: it is copied again" in caplog.text
    (model / CURVE).unlink()
    copy_curve(model, run, resumed=True)
    assert (run / CURVE).exists(), "the model's folder is not there any more: the run keeps what it has"
