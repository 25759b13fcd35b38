"""A memory control group around a sandbox, where one can be made: the kernel then counts its own buffers too.

Making one needs write access to a group with the memory controller: root on the host or in a privileged container, or
a delegated group of systemd (version 2). Without it, the other limits hold and only pipes and socket pairs escape them.
"""

from __future__ import annotations

import contextlib
import os

_ROOT = "/sys/fs/cgroup"
_NAME = "exgrpo-sandbox-"


class ControlGroup:
    """A group of processes with a limit on all their memory, the kernel's for them included."""

    def __init__(self, above: str, limit: int) -> None:
        """Makes it in the group `above`. limit: MiB. Raises OSError where that is not possible."""
        for left in os.listdir(above):
            if left.startswith(_NAME) and not os.path.exists(f"/proc/{left.removeprefix(_NAME)}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{above}/{left}")  # of a sandbox that was killed
        self._name = f"{_NAME}{os.getpid()}"
        folder = f"{above}/{self._name}"
        os.mkdir(folder)
        try:
            first = "memory.max" if os.path.exists(f"{folder}/memory.max") else "memory.limit_in_bytes"
            with open(f"{folder}/{first}", "w") as file:
                file.write(str(limit * 2**20))
            self._members = os.open(f"{folder}/cgroup.procs", os.O_WRONLY)
            self._above = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            os.rmdir(folder)
            raise

    @classmethod
    def make(cls, limit: int) -> ControlGroup | None:
        """limit: MiB. None where no group can be made."""
        for above in _groups():
            with contextlib.suppress(OSError):
                return cls(above, limit)
        return None

    def join(self) -> None:
        """Move this process into the group. The limit is an extra one: nothing is said where it fails."""
        with contextlib.suppress(OSError):
            os.write(self._members, b"0")
        os.close(self._members)

    def remove(self) -> None:
        """When its processes have ended. By then this process's root is the sandbox's, where there is no such path."""
        with contextlib.suppress(OSError):
            os.rmdir(self._name, dir_fd=self._above)


def _groups() -> list[str]:
    """This process's own group with the memory controller, or (version 2) it and those above it that hand it down."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, own = line.strip().split(":", 2)
            if "memory" in controllers.split(","):
                return [f"{_ROOT}/memory{own}"]
            while not controllers:
                with contextlib.suppress(OSError), open(f"{_ROOT}{own}/cgroup.subtree_control") as control:
                    if "memory" in control.read().split():
                        found.append(f"{_ROOT}{own}")
                if own == "/":
                    break
                own = os.path.dirname(own)
    return found
