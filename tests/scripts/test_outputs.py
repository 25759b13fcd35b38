"""What the scripts refuse before the work: options, and outputs that cannot be written. What is no file stays what it
is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from argparse import ArgumentTypeError

import pytest
from run_builders import ROOT, environment

from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.io.terminal import output_file

OUTPUTS = [
    ("grade.py", ["--in", "rows.jsonl"], "--out"),
    *(("compare.py", [], option) for option in ("--out", "--markdown", "--csv", "--curves", "--png")),
    ("explore.py", ["run"], "--html"),
    *(("prepare_data.py", ["--check-overlap", "a.jsonl", "b.jsonl"], option) for option in ("--json", "--write-clean")),
]


@pytest.mark.parametrize(("script", "more", "option"), OUTPUTS, ids=[f"{name} {option}" for name, _, option in OUTPUTS])
def test_an_output_that_cannot_be_written_is_refused_with_the_reason(script, more, option, run_script, tmp_path):
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, f"{tmp_path} cannot be written: it is a folder; give the name of a file"),
        (tmp_path / "file" / "new" / "x", f"x cannot be written: {tmp_path / 'file'} is not a folder"),
    ):
        done = run_script(script, *more, option, path)
        assert done.returncode == 2
        assert done.stderr.strip().endswith(why)
        assert f"argument {option}: " in done.stderr
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_file_in_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    """It is replaced by a file that is written beside it."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ArgumentTypeError, match=f"no permission to write in {tmp_path}"):
        output_file(str(tmp_path / "file"))
    assert output_file("/dev/null").is_char_device()


def test_a_pipe_and_a_link_stay_and_get_what_is_written(tmp_path):
    """A file in the place of /dev/null would break the machine for root."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    texts = []
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    write(pipe, "text")
    reader.join(10)
    assert (texts, pipe.is_fifo()) == (["text"], True)
    link.symlink_to(tmp_path / "file")
    for text in ("first", "second"):
        write(link, text)
        assert (link.is_symlink(), (tmp_path / "file").read_text()) == (True, text)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("mode", ["w", "a"])
def test_what_is_written_to_an_open_file_stands_behind_what_was_printed(name, mode, tmp_path):
    program = "from pathlib import Path; from exgrpo_orlhf.io.files import write; print('table'); "
    program += f"write(Path({name!r}), 'a,b\\n'); print('end')"
    (tmp_path / "link").symlink_to("/dev/stdout")
    with (tmp_path / "out").open(mode) as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True, cwd=tmp_path, env=environment())
    assert (tmp_path / "out").read_text() == "table\na,b\nend\n"


CHOSEN = ["--measure", "m", "--questions", "q", "--keep", "0:1", "--write-kept", "k.jsonl"]
REFUSED = [
    *((name, [*words.split(), "0"], "'0' is not a number of 1 or more") for name, words in (
        ("measure.py", "judge run --concurrency"), ("prepare_data.py", "--samples"), ("ablate.py", "--jobs"))),
    ("compare.py", ["--metric", "m", "--dynamics"], "--dynamics: not allowed with argument --metric"),
    ("publish.py", ["nowhere", "--out", "card", "--license", "Apache 2"], "--license takes the hub's id, such as"),
    ("prepare_data.py", ["--only", "nothing"], "invalid choice: 'nothing'"),
    ("prepare_data.py", ["--write-clean", "x.jsonl"], "--write-clean"),
    ("prepare_data.py", ["--check-overlap", "a.jsonl"], "a training set and at least one test set"),
    ("prepare_data.py", ["--measure", "m"], "--measure, --questions, --keep and --write-kept belong together"),
    ("prepare_data.py", ["--list", "--", "--engine", "vllm"], "what stands behind -- is for --measure"),
    ("prepare_data.py", [*CHOSEN, "--list"], "--measure goes without --list, --only and --check-overlap"),
    ("prepare_data.py", [*CHOSEN, "--", "--out=x"], "--out behind --: --measure sets that, and measures every"),
    ("prepare_data.py", [*CHOSEN, "--", "--suite", "chains"], "--suite behind --: --measure sets that"),
    *(("prepare_data.py", ["--keep", text], f"argument --keep: invalid LOW:HIGH value: {text!r}")
      for text in ("0.9:0.1", "half")),
    ("train.py", ["--gin", "toy.gin", "--steps", "10"],
     "unrecognized arguments: --steps 10; a setting is bound by --set train.steps=10"),
    *(("train.py", ["--gin", "toy.gin", "--name", name], f"error: --name {name!r} is no folder in {ROOT}/runs")
      for name in ("..", ".", "../../x", "a/../..", "/x")),
]  # fmt: skip


@pytest.mark.parametrize(("script", "words", "message"), REFUSED)
def test_options_that_cannot_be_meant_are_refused_before_the_work(script, words, message, run_script):
    done = run_script(script, *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
