"""Where a script writes: what it cannot write is refused before the work, and what is no file stays what it is."""

from __future__ import annotations

import os
import threading
from argparse import ArgumentTypeError

import pytest

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


@pytest.mark.parametrize(
    ("script", "more"),
    [("measure.py", ["judge", "run", "--concurrency"]), ("prepare_data.py", ["--samples"]), ("ablate.py", ["--jobs"])],
)
def test_a_number_below_1_is_refused_before_the_work(script, more, run_script):
    done = run_script(script, *more, "0")
    assert (done.returncode, "'0' is not a number of 1 or more" in done.stderr) == (2, True)
