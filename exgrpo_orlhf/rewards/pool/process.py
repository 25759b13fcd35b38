"""A grading process as the pool sees it: started, written to, read from and killed. `worker.py` is its other side."""

from __future__ import annotations

import json
import os
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

START_TIMEOUT = 180.0  # seconds that a worker may take to import what it needs, on a busy machine

_ROOT = Path(__file__).resolve().parents[3]
_COMMAND = "from exgrpo_orlhf.rewards.pool.worker import main; main()"

Reply = tuple[Any, ...]  # see worker.py


class Broken(Exception):
    """The grading process itself has failed and must be replaced."""


class GradingProcess:
    """One worker process and the two pipes to it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Starts the process. settings: what `worker.load` takes, as JSON."""
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, json.dumps(settings), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the caller alone
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)},
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # both are pipes, see above
        assert stdout is not None
        self._stdin, self._stdout, self.pid = stdin, stdout, self._process.pid
        os.set_blocking(stdin.fileno(), False)

    def signal(self, number: Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """The fork that grades, and every process it has started, die with it."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the killed process and close the pipes."""
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def send(self, body: bytes) -> Reply | None:
        """Write all of a message. Returns the worker's reply if one comes before the message is written to the end.

        Raises Broken if the process does not read.
        """
        view, end = memoryview(struct.pack("!I", len(body)) + body), time.monotonic() + START_TIMEOUT
        poller = select.poll()
        poller.register(self._stdin, select.POLLOUT)
        poller.register(self._stdout, select.POLLIN)
        while view:
            ready = dict(poller.poll(max(0.0, end - time.monotonic()) * 1000))
            if not ready:
                raise Broken("it does not read")
            if self._stdout.fileno() in ready:
                return self.receive(0)
            view = view[os.write(self._stdin.fileno(), view) :]
        return None

    def receive(self, timeout: float) -> Reply | None:
        """The next reply, or None if there is none within `timeout` seconds. Raises Broken if the process is gone."""
        if not self.has_reply(timeout):
            return None
        fd = self._stdout.fileno()
        head = os.read(fd, 4)
        if len(head) < 4:
            raise Broken("it is gone")
        reply: Reply = pickle.loads(os.read(fd, struct.unpack("!I", head)[0]))
        return reply

    def has_reply(self, timeout: float = 0) -> bool:
        """Whether a reply, or the end of the pipe, can be read within `timeout` seconds."""
        poller = select.poll()  # select.select has a limit of 1,024 open files
        poller.register(self._stdout, select.POLLIN)
        # Polled twice, because this thread itself may have been kept from running for all of the timeout.
        return bool(poller.poll(timeout * 1000) or poller.poll(0))
