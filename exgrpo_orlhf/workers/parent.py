"""A process that ends with its parent. Standard library alone: the sandbox imports it too.

As a program it runs a command that is killed when the parent dies; arguments: the parent's process id, the command. A
preexec function of Popen would not be safe, because the parent has threads (MLflow's). The request to be killed
survives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def end_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal to this process when its parent dies; exit at once if the parent is dead already."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """What a process of this tree has started, in whatever session, becomes a child of this one when that ends."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Of this process, by their ids."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {*map(int, file.read().split())}
    except OSError:  # a kernel that does not list them
        return set()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
