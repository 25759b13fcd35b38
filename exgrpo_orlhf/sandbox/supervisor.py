"""Runs a program, or what else `start` does, in process 1 of a sandbox, on each input. Standard library alone.

It starts as another user if possible, without capabilities, under limits and a system call filter.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

from .system_calls import filter_calls, libc

NOBODY = 65534
SCRATCH = 64  # MiB of files
_FILES = 2**16  # descriptors that a grading process may have
_PROCESSES = 8  # of a program, threads included
_NO_NEW_PRIVS, _DROP_BOUNDING = 38, 24


def results(
    orders: dict[str, Any], root: bool, empty_scratch: Callable[[], None], start: Callable[[], object]
) -> list[dict[str, Any]]:
    """A result for each input up to the first that fails: 'how' it ended, and its 'output'.

    how: 'exit <status>', 'signal <number>', 'timeout', 'memory' or 'output' (too much of it)
    """
    end = time.monotonic() + orders["timeout"]
    runs: list[dict[str, Any]] = []
    room = orders["most_output_of_all"]
    for text in orders["inputs"]:
        empty_scratch()
        runs.append(_run(orders, text, root, end, min(room, orders["most_output"]), start))
        room -= len(runs[-1]["output"].encode())
        if runs[-1]["how"] != "exit 0":
            break
    return runs


def _run(
    orders: dict[str, Any], text: str, root: bool, end: float, most_output: int, start: Callable[[], object]
) -> dict[str, Any]:
    (stdin, into), (out_of, stdout) = os.pipe(), os.pipe()
    if root:
        for fd in (stdin, stdout):
            os.fchown(fd, NOBODY, NOBODY)  # or the program cannot open /dev/stdin
    child = os.fork()
    if child == 0:
        try:
            for fd, other in enumerate((stdin, stdout, os.open("/dev/null", os.O_WRONLY))):
                os.dup2(other, fd)
            os.closerange(3, _FILES)
            os.setsid()
            _give_up_rights(orders, root)
            start()
        finally:
            os._exit(127)
    os.close(stdin)
    os.close(stdout)
    os.set_blocking(into, False)
    how, output = _watch(child, into, out_of, text.encode("utf-8", "replace"), orders["memory"], end, most_output)
    os.close(out_of)
    return {"how": _end_all(child, how), "output": output.decode("utf-8", "replace")}


def _end_all(child: int, how: str) -> str:
    """Kill all processes, in whatever session; process 1 itself is not signalled. Returns how the child ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return how
        if pid == child and how == "ended":
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _watch(
    child: int, into: int, out_of: int, text: bytes, memory: int, end: float, most_output: int
) -> tuple[str, bytes]:
    """Write the input and read the output until the child has ended or the program has exceeded a limit."""
    output, n_sent, how = bytearray(), 0, "timeout"
    ending = os.pidfd_open(child)
    reading, writing = [out_of, ending], [into]
    checked = 0.0
    while (now := time.monotonic()) < end and how == "timeout":
        if now > checked + 0.01:
            checked = now
            if _memory() > memory * 2**20:
                how = "memory"
                break
        readable, writable, _ = select.select(reading, writing, [], 0.01)
        if writable:
            try:
                n_sent += os.write(into, text[n_sent : n_sent + 65536])
            except BrokenPipeError:
                n_sent = len(text)
            if n_sent >= len(text):
                os.close(into)
                writing = []
        if out_of in readable:
            part = os.read(out_of, 65536)
            if not part:
                reading = [ending]
            output += part
        elif ending in readable:
            how = "ended"
            while len(output) <= most_output and select.select([out_of], [], [], 0)[0]:
                part = os.read(out_of, 65536)
                if not part:
                    break
                output += part
        if len(output) > most_output:
            how = "output"
    if writing:
        os.close(into)
    os.close(ending)
    return how, bytes(output[:most_output])


def _memory() -> int:
    """Bytes of all processes but this one, with their page tables, and of the files in the scratch folder.

    The kernel's buffers of pipes and socket pairs are not counted: the limits on open files and processes bound them.
    """
    scratch = os.statvfs("/tmp")
    total = (scratch.f_blocks - scratch.f_bfree) * scratch.f_frsize
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status") as file:
                    fields = dict(line.split(":", 1) for line in file if line.startswith(("VmRSS", "VmPTE")))
            except OSError:
                continue
            total += sum(int(field.split()[0]) for field in fields.values()) * 1024
    return total


def _give_up_rights(orders: dict[str, Any], root: bool) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, orders["memory"] * 2**20),
        (resource.RLIMIT_CPU, int(orders["timeout"]) + 1),
        (resource.RLIMIT_NPROC, _PROCESSES),
        (resource.RLIMIT_FSIZE, SCRATCH * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    for capability in range(64):
        libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        raise OSError("give up new privileges")
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if libc.capset(header, none) < 0:
        raise OSError("give up capabilities")
    filter_calls()
