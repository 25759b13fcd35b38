"""A file that cannot be written is named, whatever the system says of it."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from full_disk import full_disk

from exgrpo_orlhf.io import files
from exgrpo_orlhf.io.json_lines import StepLog

LARGE = "x" * 1000


def replace(path: Path) -> None:
    with files.replacing(path) as partial, partial.open("w") as file:
        file.write(LARGE)


WRITERS = {
    "write": lambda path: files.write(path, LARGE),
    "write_json": lambda path: files.write_json(path, [LARGE]),
    "replacing": replace,
    "a row": lambda path: StepLog(path).add({"step": 1, "text": LARGE}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_reported_with_the_file(writer, tmp_path):
    path = tmp_path / "file"
    with full_disk(100), pytest.raises(OSError, match=str(path)) as raised:
        WRITERS[writer](path)
    assert raised.value.filename == str(path)
    assert not path.exists() or path.read_bytes() == b""


def test_several_writers_of_one_file_come_one_after_the_other_and_leave_nothing_behind(tmp_path):
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as threads:
        with files.replacing(path) as partial:
            partial.write_text("first")
            second = threads.submit(files.write, path, "second")
            assert not wait([second], timeout=0.5).done
            assert not path.exists()
        second.result()
        assert path.read_text() == "second"
        texts = [f"{i}{LARGE}" for i in range(200)]
        for written in [threads.submit(files.write, path, text) for text in texts]:
            written.result()
    assert path.read_text() in texts
    assert [*tmp_path.iterdir()] == [path]


def test_a_disk_that_is_full_when_a_file_is_synced_is_reported_with_the_file(tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/\.unfinished-file'"):
        files.write(tmp_path / "file", LARGE)
    with pytest.raises(OSError, match="Bad file descriptor"), files.naming(tmp_path):
        os.close(99999)
