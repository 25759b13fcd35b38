"""What Ctrl-C, SIGTERM and a closed terminal do to a program that saves before it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest
from run_builders import ROOT

from exgrpo_orlhf.io.stopping import StopRequest

PROGRAM = """
import fcntl, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with nohup
from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.stopping import StopRequest
terminal.messages()
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.signal:
        exec(sys.argv[2])
    signal.raise_signal(signal.SIGHUP)  # the shell's, after the kernel's
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
    with open(sys.argv[1], "w") as file:
        file.write("saved")
sys.exit(128 + stop.signal)
"""
PROGRAM = f"""
import sys, traceback
try:
{textwrap.indent(PROGRAM, "    ")}
except Exception:
    with open(sys.argv[1], "w") as file:
        file.write(traceback.format_exc())
    sys.exit(1)
"""


@pytest.mark.parametrize("loop", ["time.sleep(0.01)", "print('x' * 30, flush=True)", "print('x', file=sys.stderr)"])
def test_a_closed_terminal_ends_a_program_in_order_although_it_goes_on_writing(tmp_path, loop):
    """Also where it closes while a line is being written: the write fails before the signal is handled."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoint"), loop],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    assert os.read(ours, 5) == b"ready"  # its line break may not be written yet
    os.close(ours)
    status = process.wait(timeout=600)
    assert (tmp_path / "checkpoint").read_text() == "saved"
    assert status == 128 + signal.SIGHUP


def test_sighup_ends_once_and_is_left_alone_where_nohup_ignores_it(caplog):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal == signal.SIGHUP
        assert caplog.messages == ["SIGHUP: a step under way is finished and saved, then the run ends"]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_ends_a_process_of_the_background_too():
    """Its shell has it ignore Ctrl-C; once it has promised to end at the second one, it must."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
