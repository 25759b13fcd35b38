"""Worker processes: how one starts, and who closes them."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

_ROOT = Path(__file__).resolve().parents[3]

Owner = TypeVar("Owner")


def start_worker(
    module: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """A process that runs the module's main() with these arguments, this process's id and the descriptors, which it
    inherits. environment: more variables"""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = f"from {module} import main; main()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", command, *arguments, *map(str, (os.getpid(), *fds))],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a user's file prints
        pass_fds=fds,
        start_new_session=True,  # Ctrl-C goes to the caller alone
        env={**os.environ, **threads, **environment, "PYTHONPATH": os.pathsep.join(paths)},
    )


class Owned(Generic[Owner]):
    """This process's owners of worker processes, one for each key, made at their first use.

    They are closed when it ends. A fork of it has none: no threads of theirs, and the workers belong to its parent.
    """

    def __init__(self, close: Callable[[Owner], None]) -> None:
        self._close, self._owners = close, dict[Any, Owner]()
        self._forget()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def get(self, key: Any, make: Callable[[], Owner], usable: Callable[[Owner], bool] = lambda owner: True) -> Owner:
        with self._lock:
            if key not in self._owners or not usable(self._owners[key]):
                self._owners[key] = make()
            return self._owners[key]

    def close(self) -> None:
        """Kill every worker. The next use starts new ones."""
        with self._lock:
            owners = list(self._owners.values())
            self._owners.clear()
        for owner in owners:
            self._close(owner)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._owners.clear()
