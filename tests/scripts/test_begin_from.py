"""--from: a new run with the weights, and if asked the buffer, of a checkpoint of another one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from run_builders import rows, set_words, small_bindings, train_small
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def earlier(warm_model, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("earlier") / "run"
    train_small(warm_model, run, "train.eval_every = None")
    return run


@pytest.fixture
def train(run_script, warm_model, tmp_path):
    """train.py with the bindings of a small run, but for its model where the words say another one."""

    def go(*words: object, out: Path = tmp_path / "new", more: tuple[str, ...] = ()):
        model = ("PretrainedModel.path", "Work.model") if "--from" in words else ()
        bindings = [
            text for text in small_bindings(warm_model, "train.eval_every = None") if not text.startswith(model or "-")
        ]
        return run_script("train.py", "--gin", "toy.gin", *set_words([*bindings, *more]), "--out", out, *words)

    return go


@pytest.mark.parametrize(
    "change", ["Optimizer.learning_rate = 1e-4", "train.group_size = 6", "LocalEngine.generation_rows = 8"]
)
def test_the_advice_of_a_refused_resumption_begins_a_run_with_the_weights_and_the_buffer(
    change, train, earlier, tmp_path
):
    shutil.copytree(earlier, tmp_path / "run")
    refused = train("--resume", out=tmp_path / "run", more=(change,))
    assert refused.returncode == 2
    (checkpoint,) = re.findall(r"--from (\S+) \(--with-buffer for its buffer\)", refused.stderr)
    assert Path(checkpoint).name == "checkpoint-4"
    done = train("--from", checkpoint, "--with-buffer", more=(change, "train.steps = 1"))
    assert done.returncode == 0, done.stderr
    assert (
        f"from {checkpoint}: its weights, also as a KL term's reference, and its replay buffer; not its opti"
        in done.stderr
    )
    before, first = rows(tmp_path / "run")[-1], rows(tmp_path / "new")[1]
    assert first["step"] == 1
    assert first["replay/trajectories"] >= before["replay/trajectories"] > 0


def test_without_the_buffer_the_weights_alone_are_taken(train, earlier, tmp_path):
    done = train("--from", earlier / "checkpoint-4", more=("train.steps = 0",))
    assert done.returncode == 0, done.stderr
    assert "and the replay buffer (--with-buffer takes it)" in done.stderr
    mine, theirs = (
        load_file(run / "model.safetensors") for run in (tmp_path / "new" / "checkpoint-0", earlier / "checkpoint-4")
    )
    assert all(mine[name].equal(theirs[name]) for name in theirs)
    config = (tmp_path / "new" / "config.gin").read_text()
    assert str(earlier) in config
    assert "Work.experience = None" in config


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (["--from", "{run}"], (), "is the folder of a run; give one of its checkpoints: --from {run}/checkpoint-4"),
        (["--from", "{run}/none"], (), "error: --from: {run}/none"),
        (["--with-buffer"], (), "--with-buffer needs --from CHECKPOINT"),
        (["--from", "{run}/checkpoint-4"], ("PretrainedModel.path = 'x'",), "both say with which model the run begins"),
        (["--from", "{run}/checkpoint-4", "--with-buffer"], ("Work.experience = 'x'",), "with which buffer it begins"),
    ],
)
def test_what_no_run_can_begin_with_is_refused(words, more, message, train, earlier):
    done = train(*(word.format(run=earlier) for word in words), more=more)
    assert done.returncode == 2
    assert message.format(run=earlier) in done.stderr


def test_a_damaged_checkpoint_is_refused(train, earlier, tmp_path):
    shutil.copytree(earlier, tmp_path / "run")
    with (tmp_path / "run" / "checkpoint-4" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    done = train("--from", tmp_path / "run" / "checkpoint-4")
    assert (done.returncode, (tmp_path / "new").exists()) == (2, False)
    assert "error: --from: " in done.stderr
