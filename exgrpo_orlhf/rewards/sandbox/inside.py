"""Runs between a grading process and an untrusted program. Standard library alone; started by `sandbox.py` as a plain
file: `python -I -S inside.py <pid of the parent>`, with the orders as JSON on standard input.

Three processes. The first makes the namespaces (user, mount, process, network, IPC, host name) and waits. The second is
process 1 of the new ones: it builds a root directory of read-only system folders and a small scratch folder, unmounts
everything else, and starts the third, the program, for each input: under another user if possible, without
capabilities, under limits and a system call filter. When process 1 ends, the kernel kills all processes that are left.

It works for root and for other users. For root, limits on processes do not hold, so the program runs as the machine's
user `nobody`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

# Imported now: once the root has changed, only the interpreter's own folders are there.
NOBODY = 65534
_NEW = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # user, mount, pid, net, ipc, uts
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _RDONLY, _REMOUNT, _NOEXEC = 4096, 16384, 1 << 18, 2, 4, 1, 32, 8
_DETACH = 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_PDEATHSIG, _DUMPABLE, _SECCOMP, _NO_NEW_PRIVS, _DROP_BOUNDING = 1, 4, 22, 38, 24
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Denied: sockets other than pairs, new namespaces, mounts, tracing, kernel keys and other calls that no program needs.
_DENIED = {
    "x86_64": (41, 101, 155, 161, 165, 166, 169, 175, 246, 248, 249, 250, 272, 298, 304, 308, 310, 311, 313, 321, 323,
               425, 428, 429, 430, 431, 432, 433, 442),
    "aarch64": (198, 117, 41, 51, 40, 39, 142, 105, 104, 217, 218, 219, 97, 241, 265, 268, 270, 271, 273, 280, 282,
                425, 428, 429, 430, 431, 432, 433, 442),
}  # fmt: skip
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435

libc = ctypes.CDLL(None, use_errno=True)
machine = platform.machine()


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(libc.mount(*arguments, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")


def _read_only(target: str) -> None:
    """Make a mount, and all mounts below it, read-only."""
    attributes = struct.pack("QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    result = libc.syscall(_MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, len(attributes))
    _check(result, f"make {target} read-only")


def main() -> None:
    orders = json.load(sys.stdin)
    _end_with(int(sys.argv[1]))
    try:
        outside_id, group = os.geteuid(), os.getegid()
        with open("/proc/self/uid_map") as file:
            # The root of a container that maps its users is like any other user: limits hold for it.
            root = outside_id == 0 and file.read().split() == ["0", "0", "4294967295"]
        asked, ask = os.pipe()
        helper = os.fork() if root else None
        if helper == 0:  # writes the map of users from outside: more than one needs the outer capabilities
            try:
                os.close(ask)
                for name in ("uid_map", "gid_map") if os.read(asked, 1) else ():
                    with open(f"/proc/{os.getppid()}/{name}", "w") as file:
                        file.write(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
                os._exit(0)
            finally:
                os._exit(1)
        _check(libc.unshare(_NEW), "make namespaces")
        if helper:
            os.write(ask, b"x")
            if os.waitpid(helper, 0)[1]:
                raise OSError(errno.EPERM, "map users")
        else:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {outside_id} 1"), ("gid_map", f"0 {group} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        os.close(asked)
        os.close(ask)
        first = os.fork()
    except OSError as error:
        _report({"unavailable": str(error)})
    if first == 0:
        _process_one(orders, root)
    _end_with(int(sys.argv[1]))
    os.waitpid(first, 0)


def _process_one(orders: dict[str, Any], root: bool) -> NoReturn:
    try:
        # The parent is outside the new process namespace: its id reads 0 while it lives, and it cannot be checked.
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _build_root(orders["folders"], orders["scratch"])
        libc.prctl(_DUMPABLE, 0, 0, 0, 0)
    except OSError as error:
        _report({"unavailable": str(error)})
    results: list[dict[str, Any]] = []
    end = time.monotonic() + orders["timeout"]
    for text in orders["inputs"]:
        results.append(_run(orders, text, root, end))
        if results[-1]["how"] != "exit 0":
            break
    _report({"results": results})


def _build_root(folders: list[str], scratch: int) -> None:
    """scratch: MiB"""
    _mount(None, "/", None, _REC | _PRIVATE)
    # The root changes twice: the first time so that no mount can hide a folder that is still to be bound.
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "mode=755")
    os.chdir("/tmp")
    os.mkdir("new")
    os.mkdir("old")
    _pivot(".", "old")
    os.chdir("/")
    new = "/new"
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
            _read_only(new + folder)
    os.mkdir(f"{new}/dev")
    for device in ("null", "zero", "urandom", "random"):
        os.close(os.open(f"{new}/dev/{device}", os.O_CREAT))
        _mount(f"/old/dev/{device}", f"{new}/dev/{device}", None, _BIND)
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{i}", f"{new}/dev/{name}")
    os.mkdir(f"{new}/proc")
    _mount("proc", f"{new}/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "hidepid=2,subset=pid")
    os.mkdir(f"{new}/tmp")
    _mount("tmpfs", f"{new}/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={scratch}m,nr_inodes=4096")
    os.chdir(new)
    _pivot(".", ".")
    _check(libc.umount2(b".", _DETACH), "leave the old root")
    os.chdir("/tmp")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _pivot(new: str, old: str) -> None:
    _check(libc.syscall(_PIVOT_ROOT[machine], new.encode(), old.encode()), "change the root")


def _run(orders: dict[str, Any], text: str, root: bool, end: float) -> dict[str, Any]:
    """One run of the program. how: 'exit <status>', 'signal <number>', 'timeout', 'memory' or 'output'."""
    given, taken = os.pipe(), os.pipe()
    if root:
        for fd in (given[0], taken[1]):
            os.fchown(fd, NOBODY, NOBODY)  # or the program cannot open /dev/stdin
    child = os.fork()
    if child == 0:
        try:
            os.dup2(given[0], 0)
            os.dup2(taken[1], 1)
            os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
            os.closerange(3, 256)
            os.setsid()
            _give_up_rights(orders, root)
            os.execve(orders["command"][0], orders["command"], orders["environment"])
        finally:
            os._exit(127)
    os.close(given[0])
    os.close(taken[1])
    os.set_blocking(given[1], False)
    how, output = _watch(child, given[1], taken[0], text.encode("utf-8", "replace"), orders, end)
    os.close(taken[0])
    # All of its processes, in whatever session; process 1 itself is not signalled.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == child and how == "ended":
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    return {"how": how, "output": output.decode("utf-8", "replace")}


def _watch(child: int, given: int, taken: int, text: bytes, orders: dict[str, Any], end: float) -> tuple[str, bytes]:
    """Write the input and read the output until the program has ended or exceeded a limit."""
    output, sent, writing, reading, how = bytearray(), 0, [given], True, "timeout"
    while time.monotonic() < end:
        readable, writable, _ = select.select([taken] if reading else [], writing, [], 0.01)
        if writable:
            try:
                sent += os.write(given, text[sent : sent + 65536])
            except BrokenPipeError:
                sent = len(text)
            if sent >= len(text):
                os.close(given)
                writing = []
        if readable:
            part = os.read(taken, 65536)
            reading = bool(part)
            output += part
            if len(output) > orders["most_output"]:
                how = "output"
                break
            if part:
                continue
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            how = "ended"
            while select.select([taken], [], [], 0)[0] and (part := os.read(taken, 65536)):
                output += part
            break
        if _resident() > orders["memory"] * 2**20:
            how = "memory"
            break
    if writing:
        os.close(given)
    return how, bytes(output[: orders["most_output"]])


def _resident() -> int:
    """Bytes of memory of all processes but this one."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    total += int(file.read().split()[1])
            except (OSError, IndexError):
                continue
    return total * resource.getpagesize()


def _give_up_rights(orders: dict[str, Any], root: bool) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, orders["memory"] * 2**20),
        (resource.RLIMIT_CPU, int(orders["timeout"]) + 1),
        (resource.RLIMIT_NPROC, orders["processes"]),
        (resource.RLIMIT_FSIZE, orders["scratch"] * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    for capability in range(64):
        libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(header, none), "give up capabilities")
    _filter_calls()


def _filter_calls() -> None:
    """Install a seccomp filter: denied calls fail with EPERM; another architecture's calls kill the process."""

    def op(code: int, jump_true: int, jump_false: int, k: int) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    load, equal, bits, done = 0x20, 0x15, 0x45, 0x06
    allow, deny, unknown, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    program = [op(load, 0, 0, 4), op(equal, 1, 0, _ARCHITECTURE[machine]), op(done, 0, 0, kill), op(load, 0, 0, 0)]
    if machine == "x86_64":
        program += [op(0x35, 0, 1, 0x40000000), op(done, 0, 0, kill)]  # the x32 calls
    for number in _DENIED[machine]:
        program += [op(equal, 0, 1, number), op(done, 0, 0, deny)]
    program += [op(equal, 0, 1, _CLONE3), op(done, 0, 0, unknown)]  # its flags are in memory; clone is used instead
    program += [op(equal, 0, 4, _CLONE[machine]), op(load, 0, 0, 16), op(bits, 0, 1, 0x7E020000), op(done, 0, 0, deny)]
    program += [op(done, 0, 0, allow), op(done, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    whole = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _check(libc.prctl(_SECCOMP, 2, whole, 0, 0), "filter system calls")


def _end_with(parent: int) -> None:
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _report(message: dict[str, Any]) -> NoReturn:
    print(json.dumps(message), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
