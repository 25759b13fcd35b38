"""Runs between a grading process and untrusted code. Standard library alone; started by `sandbox.py` in a process of
its own, with the orders as JSON on standard input, or in a fork of the grading process.

The first process makes the namespaces (user, mount, process, network, IPC, host name) and waits. The second is process
1 of the new ones: it builds a root directory of read-only system folders and a scratch folder, unmounts everything
else, and starts the code (`supervisor.py`). When process 1 ends, the kernel kills all processes that are left.

It works for root and for other users. For root, limits on processes do not hold, so the program runs as the machine's
user `nobody`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ..workers.parent import end_with_parent
from . import supervisor
from .system_calls import check_filter, libc, machine

_NEW = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # user, mount, pid, net, ipc, uts
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _RDONLY, _REMOUNT, _NOEXEC = 4096, 16384, 1 << 18, 2, 4, 1, 32, 8
_DETACH = 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_DUMPABLE = 4


def _check(result: int, action: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(libc.mount(*arguments, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")


def main(parent: int) -> None:
    """Run the program of the orders. parent: the process with which this one ends"""
    orders = json.load(sys.stdin)
    start_in_sandbox(orders, parent, lambda: os.execve(orders["command"][0], orders["command"], orders["environment"]))


def start_in_sandbox(orders: dict[str, Any], parent: int, start: Callable[[], object]) -> None:
    """Call `start` in a process of the sandbox for each input, and report on standard output how each ended. For a
    process with one thread that does nothing else. parent: the process with which this one ends"""
    end_with_parent(parent)
    try:
        check_filter()
        outside_id, outside_group = os.geteuid(), os.getegid()
        with open("/proc/self/uid_map") as file:
            # The root of a container that maps its users is like any other user: limits hold for it.
            root = outside_id == 0 and file.read().split() == ["0", "0", "4294967295"]
        signal_read, signal_write = os.pipe()
        helper = os.fork() if root else None
        if helper == 0:  # writes the map of users from outside: more than one needs the outer capabilities
            try:
                os.close(signal_write)
                for name in ("uid_map", "gid_map") if os.read(signal_read, 1) else ():
                    with open(f"/proc/{os.getppid()}/{name}", "w") as file:
                        file.write(f"0 0 1\n{supervisor.NOBODY} {supervisor.NOBODY} 1\n")
                os._exit(0)
            finally:
                os._exit(1)
        _check(libc.unshare(_NEW), "make namespaces")
        if helper:
            os.write(signal_write, b"x")
            if os.waitpid(helper, 0)[1]:
                raise OSError(errno.EPERM, "map users")
        else:
            maps = (("setgroups", "deny"), ("uid_map", f"0 {outside_id} 1"), ("gid_map", f"0 {outside_group} 1"))
            for name, text in maps:
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        os.close(signal_read)
        os.close(signal_write)
        first = os.fork()
    except OSError as error:
        _report({"unavailable": str(error)})
    if first == 0:
        _process_one(orders, root, start)
    end_with_parent(parent)
    os.waitpid(first, 0)


def _process_one(orders: dict[str, Any], root: bool, start: Callable[[], object]) -> NoReturn:
    try:
        end_with_parent(0)  # the parent is outside the new process namespace: its id reads 0 while it lives
        _build_root(orders["folders"])
        libc.prctl(_DUMPABLE, 0, 0, 0, 0)
        results = supervisor.results(orders, root, _empty_scratch, start)
    except OSError as error:
        _report({"unavailable": str(error)})
    _report({"results": results})


def _build_root(folders: list[str]) -> None:
    _mount(None, "/", None, _REC | _PRIVATE)
    # The root changes twice: the first time so that no mount can hide a folder that is still to be bound.
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "mode=755")
    os.chdir("/tmp")
    os.mkdir("new")
    os.mkdir("old")
    _check(libc.syscall(_PIVOT_ROOT[machine], b".", b"old"), "change the root")
    os.chdir("/")
    new, read_only = "/new", struct.pack("QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    _mount("tmpfs", new, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    for folder in sorted(folders, key=len):
        source = f"/old{folder}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), new + folder)
        elif os.path.exists(source) and not os.path.exists(new + folder):
            os.makedirs(os.path.dirname(new + folder), exist_ok=True)
            if os.path.isdir(source):
                os.mkdir(new + folder)
            else:
                os.close(os.open(new + folder, os.O_CREAT))
            _mount(source, new + folder, None, _BIND | _REC)
            # All mounts below it too.
            result = libc.syscall(_MOUNT_SETATTR, -100, (new + folder).encode(), 0x8000, read_only, len(read_only))
            _check(result, f"make {folder} read-only")
    os.mkdir(f"{new}/dev")
    # Not /dev/zero: a shared mapping of it is memory that no limit counts.
    for device in ("null", "urandom", "random"):
        os.close(os.open(f"{new}/dev/{device}", os.O_CREAT))
        _mount(f"/old/dev/{device}", f"{new}/dev/{device}", None, _BIND)
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{i}", f"{new}/dev/{name}")
    os.mkdir(f"{new}/proc")
    _mount("proc", f"{new}/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "hidepid=2,subset=pid")
    os.mkdir(f"{new}/tmp")
    os.chdir(new)
    _check(libc.syscall(_PIVOT_ROOT[machine], b".", b"."), "change the root")
    _check(libc.umount2(b".", _DETACH), "leave the old root")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _empty_scratch() -> None:
    """A new scratch folder, empty, in place of the old one."""
    os.chdir("/")
    libc.umount2(b"/tmp", _DETACH)  # fails the first time: nothing is mounted yet
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={supervisor.SCRATCH}m,nr_inodes=4096")
    os.chdir("/tmp")


def _report(message: dict[str, Any]) -> NoReturn:
    with os.fdopen(1, "w") as file:  # a fork's sys.stdout may hold what its parent has not written yet
        file.write(json.dumps(message))
    os._exit(0)
