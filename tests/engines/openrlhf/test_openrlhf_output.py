"""What reaches the terminal while OpenRLHF trains, and what the files in the run's folder."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("ray", reason="needs make openrlhf-cpu")

PROGRAM = """
import logging, os, sys
from pathlib import Path
from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.engines.openrlhf.output import MARK, output_in
from ray._private.ray_logging import global_worker_stdstream_dispatcher as ray_lines

terminal.messages()
ours, theirs = logging.getLogger("exgrpo_orlhf.training.loop"), logging.getLogger("vllm")

def actor(lines, pid="17", ip="10.0.0.1", name="PolicyActor"):
    ray_lines.emit({"pid": pid, "ip": ip, "actor_name": name, "task_name": None, "lines": lines, "is_err": True})

with output_in(Path(sys.argv[1])) as output:
    output.take_lines()
    print("printed by a library")
    os.system("echo printed by a child")
    theirs.warning("said by a library")
    ours.info("said by us")
    actor(["before it has a name"], name=None)
    actor(["MixedActor(", MARK + "12:00:00 step 1/3"])
    actor(["of another node"], ip="10.0.0.2")
    actor(["Node status"], pid="autoscaler", name=None)
    assert {*output.last_lines(17, 9)} >= {MARK + "12:00:00 step 1/3", "of another node"}, output.last_lines(17, 9)
    BODY
logging.getLogger("exgrpo_orlhf.training.run").info("after it")
print("printed after it")
"""


def run(folder, body):
    program = PROGRAM.replace("BODY", body)
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program), folder], capture_output=True, text=True)


def test_only_our_own_messages_reach_the_terminal_and_all_else_is_in_files(tmp_path):
    done = run(tmp_path / "logs", "pass")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "printed after it\n"
    messages = [line.split(" ", 1)[1] for line in done.stderr.splitlines()]
    assert messages == [
        f"the output of OpenRLHF, Ray and vLLM goes to {tmp_path / 'logs'}",
        "said by us",
        "step 1/3",
        "after it",
    ]
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "logs").iterdir()}
    driver = "\n".join(files.pop("driver.log"))
    assert files == {
        "worker-10.0.0.1-17.log": ["before it has a name"],
        "PolicyActor-10.0.0.1-17.log": ["MixedActor(", "[exgrpo] 12:00:00 step 1/3"],
        "PolicyActor-10.0.0.2-17.log": ["of another node"],
    }
    assert all(f"{what} by a {who}" in driver for what, who in [("printed", "library"), ("printed", "child")])
    assert "said by a library" in driver
    assert "after it" not in driver


def test_the_end_of_what_was_printed_is_shown_when_the_run_fails(tmp_path):
    (tmp_path / "driver.log").write_text("of an earlier run\n")
    done = run(tmp_path, "[print(f'line {i}', flush=True) for i in range(30)]; raise RuntimeError('no GPU')")
    assert done.returncode == 1
    assert "line 29" in done.stderr
    assert "line 19" not in done.stderr
    assert f"last lines of {tmp_path / 'driver.log'}" in done.stderr
    assert "of an earlier run" not in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: no GPU")
    quiet = run(tmp_path, "raise KeyboardInterrupt")
    assert "last lines" not in quiet.stderr
