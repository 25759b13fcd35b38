"""A file that a script cannot write is refused before the work, with the reason."""

from __future__ import annotations

import pytest

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
