"""The metrics log: whole rows, in order, whatever was cut short."""

import json
import time

import numpy as np
import pytest

from exgrpo_orlhf.tracking.metrics_log import MetricsLog


def fill(log, steps):
    for step in steps:
        log.append(step, {"reward/mean": float(step)})


def test_rows_are_on_disk_when_append_returns(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    for step in (0, 1, 5):
        log.append(step, {"reward/mean": 0.5, "cost/generated_tokens": np.int64(7), "time/step": np.float32(0.25)})
        rows = [json.loads(line) for line in log.path.read_text().split("\n")[:-1]]
        assert rows[-1].pop("time") == pytest.approx(time.time(), abs=300)
        assert rows[-1] == {"step": step, "reward/mean": 0.5, "cost/generated_tokens": 7, "time/step": 0.25}
    assert [row["step"] for row in log.rows()] == [0, 1, 5]
    assert [row["step"] for row in log.rows(after=0)] == [1, 5]
    assert [row["step"] for row in MetricsLog(log.path).rows(after=3)] == [5]
    assert list(log.rows(after=5)) == []


def test_steps_must_increase(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, [3])
    for step in (3, 2, -1, 4.0):
        with pytest.raises(ValueError, match="after step 3; steps are increasing integers"):
            log.append(step, {})
    with pytest.raises(ValueError, match="step 3 after step 3"):
        MetricsLog(log.path).append(3, {})


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        *(
            ({"reward/mean": 1.0, "policy/loss": value}, r"metric 'policy/loss' of step 0 is .*finite")
            for value in (float("nan"), float("inf"), -float("inf"), None, "3", [1.0])
        ),
        *(
            ({name: 1.0}, f"cannot name a metric.*write '{better}'")
            for name, better in [
                *(("pass@1", "pass_at_1"), ("eval/a:b", "eval/a_b"), ("/a", "a")),
                *(("a//b", "a/b"), ("../a", "a"), ("", "a name")),
            ]
        ),
        *(({name: 1.0}, "is reserved") for name in ("step", "time", "train/step")),
    ],
)
def test_metrics_that_mlflow_would_refuse_are_refused_and_not_written(tmp_path, metrics, message):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=message):
        log.append(0, metrics)
    fill(log, [0])
    assert len(list(log.rows())) == 1


def test_a_log_killed_at_any_byte_goes_on_after_cut_back(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, range(4))
    content = log.path.read_bytes()
    lines = content.splitlines(keepends=True)
    for size in range(0, len(content) + 1, 3):
        log.path.write_bytes(content[:size])
        log, complete = MetricsLog(log.path), content[:size].count(b"\n")
        assert len(list(log.rows())) == complete
        if content[:size] != b"".join(lines[:complete]):
            with pytest.raises(ValueError, match="incomplete line; call cut_back"):
                fill(log, [5])
        assert log.cut_back(1) == max(complete - 2, 0)
        assert log.path.read_bytes() == b"".join(lines[: min(complete, 2)])
        assert log.cut_back(1) == 0
        fill(log, range(min(complete, 2), 3))
        assert [row["step"] for row in MetricsLog(log.path).rows()] == [0, 1, 2]
    assert MetricsLog(log.path).cut_back(-1) == 3
    assert list(tmp_path.iterdir()) == [log.path]
    assert log.path.read_bytes() == b""


@pytest.mark.parametrize(
    "line", [b"\0\0\0", b'{"step": 1', b"[1]", b'{"step": 0, "time": 1.0}', b'{"time": 1.0}', b"", b"[" * 10**5]
)
def test_a_corrupt_line_in_the_middle_is_named(tmp_path, line):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, [0])
    log.path.write_bytes(log.path.read_bytes() + line + b'\n{"step": 2, "time": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a row of metrics"):
        MetricsLog(log.path)


def test_two_programs_on_one_log_are_noticed(tmp_path):
    one, two = MetricsLog(tmp_path / "metrics.jsonl"), MetricsLog(tmp_path / "metrics.jsonl")
    fill(one, [0])
    with pytest.raises(ValueError, match="changed by another program"):
        fill(two, [0])


def test_a_log_keeps_its_identity_before_and_after_its_first_row(tmp_path):
    """The tracker and the checkpoints ask for it at different times."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    first = log.identity
    assert log.identity == first
    fill(log, [0])
    assert log.identity == MetricsLog(log.path).identity == first
    log.path.unlink()
    assert MetricsLog(log.path).identity != first, "it begins again"
    assert MetricsLog(log.path, first).identity == first
