"""Nothing but a whole checkpoint of this run is resumed from, and what is wrong with another one is said in a line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from run_builders import flip, small_bindings, timeless, train_command, train_small

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.checkpoints import UnusableCheckpoint, folder, manifest
from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.evaluation import evaluated_model
from exgrpo_orlhf.io import files
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.training.validation import Validation


def go(model: Path, run: Path, *more: str, resume=True, resume_from=None):
    return train_small(model, run, "train.eval_every = None", *more, resume=resume, resume_from=resume_from)


@pytest.fixture(scope="module")
def original(warm_model, tmp_path_factory) -> Path:
    """A run of 4 steps with checkpoint-2 and checkpoint-4."""
    run = tmp_path_factory.mktemp("original") / "run"
    go(warm_model, run, resume=False)
    return run


@pytest.fixture
def run(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "run", symlinks=True)


def refused(model: Path, run: Path, *more: str, resume_from=None) -> str:
    """What the refusal says. It is one line, and it has changed nothing."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    with pytest.raises(UnusableCheckpoint) as raised:
        go(model, run, *more, resume_from=resume_from)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"} == before
    assert "\n" not in str(raised.value)
    return str(raised.value)


DAMAGE = {
    "flip": flip,
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "delete": Path.unlink,
}
SAYS = {  # of a file that the manifest names, and of the manifest
    "flip": ("the content is not what was saved", "the file is damaged"),
    "truncate": ("bytes instead of", "the file is damaged"),
    "empty": ("the file has 0 bytes instead of", "the file is damaged"),
    "delete": ("the file is missing", "the file is missing"),
}
FILES = [
    "config.json", "generation_config.json", "manifest.json", "model.safetensors", "replay/manifest.json",
    "replay/questions.parquet", "replay/trajectories.parquet", "tokenizer.json", "tokenizer_config.json",
    "trainer/optimizer.pt", "trainer/state.json",
]  # fmt: skip


def test_a_checkpoint_has_these_files(original):
    """So that the tests below leave none out."""
    newest = original / "checkpoint-4"
    assert sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()) == FILES


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_with_the_way_on(damage, original, warm_model, tmp_path):
    for name in FILES:
        run = shutil.copytree(original, tmp_path / "run")
        DAMAGE[damage](run / "checkpoint-4" / name)
        message = refused(warm_model, run)
        assert message.startswith(f"{run}/checkpoint-4/{name}: the "), message
        assert SAYS[damage][name == "manifest.json"] in message
        assert message.endswith("complete checkpoint with --resume-from checkpoint-2 instead of --resume"), message
        shutil.rmtree(run)


def test_a_file_of_another_checkpoint_is_refused(original, warm_model, tmp_path):
    for name in FILES:
        run = shutil.copytree(original, tmp_path / "run")
        here, there = run / "checkpoint-4" / name, run / "checkpoint-2" / name
        if here.read_bytes() != there.read_bytes():  # tokenizer and configuration are the same in both
            shutil.copy(there, here)
            assert refused(warm_model, run).startswith(f"{here}: ")
        shutil.rmtree(run)


def test_a_checkpoint_under_another_name_is_refused(run, warm_model):
    shutil.copytree(run / "checkpoint-4", run / "checkpoint-6")
    assert "this is the manifest of checkpoint-4" in refused(warm_model, run)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(run, warm_model, tmp_path):
    """Even if it has the same configuration and step; a folder that has no run yet takes it, and its identity."""
    go(warm_model, tmp_path / "other", resume=False)
    shutil.rmtree(run / "checkpoint-4")
    shutil.copytree(tmp_path / "other" / "checkpoint-4", run / "checkpoint-4")
    message = refused(warm_model, run)
    assert f"{run}/checkpoint-4 is of another run: its manifest.json names " in message
    (tmp_path / "new").mkdir()
    shutil.copytree(run / "checkpoint-4", tmp_path / "new" / "checkpoint-4")
    go(warm_model, tmp_path / "new", "train.steps = 6")
    newest = [manifest.read(tmp_path / name / "checkpoint-4") for name in ("new", "other")]
    assert newest[0].run == newest[1].run == manifest.read(tmp_path / "new" / "checkpoint-6").run


def test_edited_counters_are_refused(run, warm_model):
    """Though the file is well-formed and of the same size."""
    path = run / "checkpoint-4" / "trainer" / "state.json"
    state = path.read_text()
    path.write_text(state.replace('"step": 4', '"step": 3'))
    assert path.read_text() != state
    assert f"{path}: the content is not what was saved" in refused(warm_model, run, "train.verify_checkpoint = False")


def test_a_file_more_is_refused_unless_it_is_hidden(run, warm_model):
    (run / "checkpoint-4" / "replay" / ".nfs1").touch()
    assert go(warm_model, run).steps == 4
    (run / "checkpoint-4" / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: the file is not part of the checkpoint; move it elsewhere" in refused(warm_model, run)


def test_all_damaged_files_are_counted(run, warm_model):
    for name in ("model.safetensors", "trainer/optimizer.pt", "config.json"):
        flip(run / "checkpoint-4" / name)
    assert "(and 2 more files are not as saved)" in refused(warm_model, run)


def test_without_hashing_sizes_and_the_state_are_compared_all_the_same(run, warm_model):
    skip = "train.verify_checkpoint = False"
    flip(run / "checkpoint-4" / "tokenizer.json")
    assert go(warm_model, run, skip).steps == 4
    os.truncate(run / "checkpoint-4" / "trainer" / "optimizer.pt", 99)
    assert "optimizer.pt: the file has 99 bytes instead of" in refused(warm_model, run, skip)


def test_an_older_checkpoint_that_is_not_complete_is_not_recommended(run, warm_model):
    flip(run / "checkpoint-4" / "model.safetensors")
    (run / "checkpoint-2" / "config.json").unlink()
    assert refused(warm_model, run).endswith(
        "no older checkpoint is complete: begin the run again under another --name"
    )


def test_an_older_checkpoint_that_was_named_is_verified_in_turn(run, warm_model):
    flip(run / "checkpoint-2" / "model.safetensors")
    assert "checkpoint-2/model.safetensors: the content" in refused(warm_model, run, resume_from="checkpoint-2")
    message = refused(warm_model, run, resume_from="checkpoint-3")
    assert message == f"--resume-from checkpoint-3: {run} has no such checkpoint; it has checkpoint-2, checkpoint-4"


def test_resumed_from_an_older_checkpoint_the_run_is_the_same_and_the_damaged_one_is_kept_aside(
    run, original, warm_model
):
    flip(run / "checkpoint-4" / "model.safetensors")
    damaged = (run / "checkpoint-4" / "model.safetensors").read_bytes()
    go(warm_model, run, resume_from="checkpoint-2")
    assert list(checkpoints.find(run)) == [2, 4]
    assert (run / "checkpoint-4.set-aside" / "model.safetensors").read_bytes() == damaged
    ours, theirs = (folder / "checkpoint-4" / "model.safetensors" for folder in (run, original))
    assert ours.read_bytes() == theirs.read_bytes()
    assert timeless(run) == timeless(original)
    assert go(warm_model, run, "train.steps = 5").steps == 5


def test_what_is_refused_after_an_older_checkpoint_was_verified_leaves_the_newer_one_and_the_logs(
    run, warm_model, monkeypatch
):
    (run / "checkpoint-5.partial").mkdir()
    keeps = [path for path in run.rglob("*") if path.name not in (".lock", "metrics.id", "rollouts.jsonl")]
    before = {path: path.stat().st_mtime_ns for path in keeps}
    load = ModularChains.load
    monkeypatch.setattr(ModularChains, "load", lambda self: load(self)[:-1])
    with pytest.raises(ValueError, match="another validation set"):
        go(warm_model, run, resume_from="checkpoint-2")
    monkeypatch.undo()
    (run / "rollouts.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 1"):
        go(warm_model, run, resume_from="checkpoint-2")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_what_is_set_aside_replaces_nothing_and_the_dropped_rows_are_kept_with_it(run, warm_model, caplog):
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "checkpoint-4" / ".mine").touch()
    for _ in range(2):
        go(warm_model, run, resume_from="checkpoint-2")
    assert (run / "checkpoint-4.set-aside" / ".mine").exists()
    assert (run / "checkpoint-4.set-aside-2" / "model.safetensors").exists()
    assert (run / "metrics.set-aside.jsonl").read_text().splitlines() == rows[3:]
    assert len((run / "metrics.set-aside-2.jsonl").read_text().splitlines()) == 2
    text = "decisions.jsonl: its 2 rows after step 2 are dropped, and kept as decisions.set-aside.jsonl"
    assert text in caplog.text


def test_the_best_checkpoint_is_one_that_is_there(warm_model, tmp_path):
    """Also after the best one was set aside, and after a kill between its save and its mark."""
    best = ("train.best_metric = 'eval/lucky_guess_rate'", "train.eval_every = 1", "train.save_every = 1")
    go(warm_model, tmp_path, *best, "train.steps = 1", resume=False)
    (tmp_path / "best").unlink()
    go(warm_model, tmp_path, *best, "train.steps = 2")
    assert (tmp_path / "best").resolve().name in ("checkpoint-1", "checkpoint-2")
    checkpoints.mark_best(tmp_path, 2)
    go(warm_model, tmp_path, *best, "train.steps = 1", resume_from="checkpoint-1")
    assert (tmp_path / "best").resolve().name == "checkpoint-1"


LINKS = {  # what stands in a run's folder after a disk was full, or a copy has followed links
    "a checkpoint": lambda run, aside: (run / "checkpoint-2").symlink_to(shutil.move(run / "checkpoint-2", aside)),
    "the newest checkpoint": lambda run, aside: (run / "checkpoint-4").symlink_to(
        shutil.move(run / "checkpoint-4", aside)
    ),
    "an unfinished one": lambda run, aside: (run / "checkpoint-5.partial").symlink_to(aside),
    "an unfinished file": lambda run, _: (run / "checkpoint-5.partial").touch(),
    "best as a folder": lambda run, _: [
        (run / "best").unlink(missing_ok=True), shutil.copytree(run / "checkpoint-2", run / "best"),
        shutil.copytree(run / "checkpoint-2", run / "best.set-aside"),
    ],
    "best as a file": lambda run, _: [(run / "best").unlink(missing_ok=True), (run / "best").touch()],
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_a_link_or_a_folder_in_the_place_of_another_ends_no_run(name, original, warm_model, tmp_path):
    run, aside = shutil.copytree(original, tmp_path / "run", symlinks=True), tmp_path / "aside"
    aside.mkdir()
    LINKS[name](run, aside)
    kept = sorted(aside.rglob("*"))
    best = ("train.best_metric = 'eval/lucky_guess_rate'", "train.eval_every = 1", "train.keep = 1")
    assert train_small(warm_model, run, "train.steps = 5", *best, resume=True).steps == 5
    assert train_small(warm_model, run, "train.steps = 6", *best, resume=True).steps == 6
    assert (run / "best").is_symlink()
    assert (run / "best").resolve().parent == run
    assert not [*run.glob("*.partial")]
    assert sorted(aside.rglob("*")) == kept, "what a link leads to stays"


def test_a_file_system_without_links_ends_no_run(original, warm_model, tmp_path, monkeypatch, caplog):
    def refused(self, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(self))

    run = shutil.copytree(original, tmp_path / "run")
    monkeypatch.setattr(Path, "symlink_to", refused)
    best = ("train.best_metric = 'eval/lucky_guess_rate'", "train.eval_every = 1", "train.keep = 1")
    rates = iter([0.1, 0.2])
    monkeypatch.setattr(Validation, "evaluate", lambda *_: {"eval/lucky_guess_rate": next(rates)})
    assert train_small(warm_model, run, "train.steps = 6", *best, resume=True).steps == 6
    assert "could not be made a link to checkpoint-5" in caplog.text
    assert [*checkpoints.find(run)] == [5, 6], "the state of the newest names the best, which is kept"


@pytest.mark.parametrize("marked", [True, False])
def test_a_folder_in_the_place_of_the_best_is_kept_whether_or_not_another_is_marked(marked, tmp_path):
    for _ in range(2):
        (tmp_path / "best").mkdir()
        (tmp_path / "best" / "model.safetensors").touch()
        if marked:
            checkpoints.mark_best(tmp_path, 1)
            (tmp_path / "best").unlink()
        else:
            checkpoints.unmark_best(tmp_path)
    assert [*tmp_path.glob("*")] == [*tmp_path.glob("best.set-aside*")]
    assert len([*tmp_path.glob("*/model.safetensors")]) == 2
    (tmp_path / "best").symlink_to("checkpoint-1")
    checkpoints.unmark_best(tmp_path)
    assert not (tmp_path / "best").is_symlink()


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_save_but_that_of_its_own_step(tmp_path, monkeypatch, caplog):
    rmtree = shutil.rmtree

    def refused(path, **more):
        if Path(path).name == "checkpoint-1.partial":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        rmtree(path, **more)

    monkeypatch.setattr(shutil, "rmtree", refused)
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, step, "id", lambda folder: {}, keep=1)
    assert list(checkpoints.find(tmp_path)) == [3]
    assert caplog.text.count("checkpoint-1.partial'") == 2, "the save that replaced it, and the next"
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: None if more else refused(path))
    with pytest.raises(checkpoints.CheckpointError, match=r"checkpoint-1 could not be written \(FileExistsError"):
        checkpoints.save(tmp_path, 1, "id", lambda folder: {}, keep=1)


@pytest.mark.parametrize("moves", range(1, 5))
def test_what_was_logged_before_a_restart_is_set_aside_whenever_that_is_killed(moves, tmp_path, monkeypatch):
    names = ("decisions.jsonl", "rollouts.jsonl", "metrics.jsonl")
    for name in (*names, "evaluation/0/results.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old\n")
    rename, left = Path.rename, iter(range(moves - 1))

    def killed(self, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.set_aside(tmp_path, "")
    monkeypatch.undo()
    checkpoints.set_aside(tmp_path, "")
    checkpoints.set_aside(tmp_path, "")
    assert not [name for name in (*names, "evaluation") if (tmp_path / name).exists()]
    kept = [f"{Path(name).stem}.before-restart.jsonl" for name in names]
    (tmp_path / "metrics.jsonl").write_text("newer\n")
    checkpoints.set_aside(tmp_path, "")
    assert (tmp_path / "metrics.before-restart-2.jsonl").read_text() == "newer\n"
    assert {(tmp_path / name).read_text() for name in (*kept, "evaluation.before-restart/0/results.json")} == {"old\n"}


@pytest.mark.parametrize("damage", ["delete", "empty"])
def test_without_its_metrics_a_resumed_run_measures_no_false_first_row(damage, run, warm_model):
    DAMAGE[damage](run / "metrics.jsonl")
    go(warm_model, run, "train.steps = 6")
    assert [row["step"] for row in timeless(run)] == [5, 6]


def test_a_file_that_changes_after_it_was_hashed_ends_the_save(tmp_path):
    def fill(folder: Path) -> files.Files:
        (folder / "a").write_bytes(b"123")
        written = files.record(folder, [folder / "a"])
        (folder / "a").write_bytes(b"12")
        return written

    with pytest.raises(checkpoints.CheckpointError, match="a: the file has 2 bytes instead of 3"):
        checkpoints.save(tmp_path, 1, "id", fill, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_power_failure_leaves_a_whole_checkpoint_or_none(warm_model, tmp_path, monkeypatch):
    """The calls of a save in their order: each file and folder is synced after its last change, then comes the rename,
    and then a sync of the folder in which it took place."""
    synced: dict[int, tuple[int, int]] = {}  # by inode: time of the last change and size, when it was last synced
    calls, late, fsync, rename = [], [], os.fsync, os.rename

    def traced_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = (status.st_mtime_ns, status.st_size)
        calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def traced_rename(source, target, **more) -> None:
        if str(target) == str(tmp_path / "run" / "checkpoint-2"):
            for path in (Path(source), *Path(source).rglob("*")):
                status = path.stat()
                if synced.get(status.st_ino) != (status.st_mtime_ns, status.st_size):
                    late.append(str(path))
            calls.append(("rename", str(target)))
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced_rename)
    go(warm_model, tmp_path / "run", "train.steps = 2", resume=False)
    assert late == []
    at = calls.index(("rename", str(tmp_path / "run" / "checkpoint-2")))
    assert calls[at + 1] == ("sync", str(tmp_path / "run"))
    assert ("sync", str(tmp_path / "run" / "metrics.jsonl")) in calls[:at], "rows that are never written again"
    assert calls.index(("sync", str(tmp_path))) < at, "the run's folder itself"
    paths = [path for _, path in calls[:at] if ".partial" in path]
    assert len(paths) == len(set(paths)), "each is synced once"
    assert {Path(path).name for path in paths} >= {Path(name).name for name in FILES} | {"trainer", "replay"}


@pytest.mark.slow
def test_the_command_line_ends_with_one_line_and_status_2(run, warm_model):
    flip(run / "checkpoint-4" / "trainer" / "optimizer.pt")
    command = train_command(run, small_bindings(warm_model, "train.eval_every = None"))
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {run}/checkpoint-4/trainer/optimizer.pt: the content")
    assert "Traceback" not in done.stderr
    done = subprocess.run([*command, "--resume-from", "checkpoint-2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-4 is newer than checkpoint-2: it is renamed to checkpoint-4.set-aside" in done.stderr


# -- a checkpoint as a model, and the base model of a run --------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_damaged_checkpoint_is_neither_evaluated_nor_trained_from(name, run):
    checkpoint = run / "checkpoint-4"
    for load in (lambda path: PretrainedModel(path).prepare(), evaluated_model.load):
        load(str(checkpoint))
    flip(checkpoint / name)
    for load in (lambda path: PretrainedModel(path).prepare(), evaluated_model.load):
        with pytest.raises(
            ValueError, match=rf"{checkpoint}/{name}: the content is not .* on purpose, remove"
        ) as raised:
            load(str(checkpoint))
        assert "\n" not in str(raised.value)
    (checkpoint / manifest.NAME).unlink()
    if name == "generation_config.json":
        evaluated_model.load(str(checkpoint))


def test_a_checkpoint_may_be_copied_without_what_only_training_needs_and_under_another_name(run, tmp_path):
    copy = shutil.copytree(run / "checkpoint-4", tmp_path / "mine", ignore=shutil.ignore_patterns("trainer", "replay"))
    (copy / "README.md").write_text("mine")
    assert PretrainedModel(str(copy)).prepare() == str(copy)
    hashes = [evaluated_model.load(str(path))[0].hash for path in (copy, run / "checkpoint-4")]
    assert hashes[0] == hashes[1] == evaluated_model.hash_of(copy)
    (copy / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"generation_config\.json: the file is missing"):
        PretrainedModel(str(copy)).prepare()


def test_a_manifest_of_another_program_is_none_of_ours(warm_model, tmp_path):
    folder = shutil.copytree(warm_model, tmp_path / "model")
    (folder / manifest.NAME).write_text('{"files": []}')
    assert PretrainedModel(str(folder)).prepare() == str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "binding", ["LoRA.rank = 2", "MixedPolicyLoss.kl_coef = 0.01"], ids=["the base of an adapter", "the reference"]
)
def test_a_run_is_not_resumed_on_a_base_model_of_which_one_value_has_changed(binding, warm_model, tmp_path):
    model = shutil.copytree(warm_model, tmp_path / "model")
    go(model, tmp_path / "run", binding, "train.steps = 2", resume=False)
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4095] ^= 1  # a small change of one value
    file.write_bytes(data)
    message = refused(model, tmp_path / "run", binding)
    assert message.startswith(f"{tmp_path / 'run' / 'checkpoint-2'}: the base model has changed since")
    data[-4095] ^= 1
    file.write_bytes(data)
    assert go(model, tmp_path / "run", binding).steps == 4


def test_a_run_copied_from_a_folder_that_cannot_be_read_is_a_copy(tmp_path, monkeypatch):
    checkpoints.note_identity(tmp_path, "name")
    [name, own] = checkpoints.identities(tmp_path)
    assert (name, own, checkpoints.original_of(tmp_path)) == ("name", str(tmp_path), None)
    (tmp_path / "metrics.id").write_text("name\n/private/run\n")
    assert checkpoints.original_of(tmp_path) is None, "it has moved"
    real, private = Path.exists, Path("/private/run")

    def exists(self):
        if self.parent == private:
            raise PermissionError
        return real(self)

    monkeypatch.setattr(Path, "exists", exists)
    assert checkpoints.original_of(tmp_path) == private


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_may_be_in_use_and_is_left_alone(number, tmp_path, monkeypatch):
    """Its page is made all the same (scripts/explore.py), and MLflow calls its run what it called it."""
    (tmp_path / "metrics.id").write_text("x")
    assert not checkpoints.in_use(tmp_path)

    def refused(*_, **__):
        raise OSError(number, os.strerror(number), str(tmp_path / ".lock"))

    monkeypatch.setattr(folder, "locked", refused)
    assert checkpoints.in_use(tmp_path)
