"""Runs untrusted Python programs: without network, with no files but their own, within limits, leaving nothing behind.

It uses Linux namespaces and a system call filter (`namespaces.py`), for root and for other users; nothing needs to be
installed. It needs Linux 5.14 on x86-64 or ARM64, and permission to make user namespaces, which containers often lack.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..workers.forking import memory_used
from . import namespaces

# Runs namespaces.py in packages that have nothing but their folders.
_START = """
import os, sys
for name in ("exgrpo_orlhf", "exgrpo_orlhf.sandbox"):
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [os.path.join(sys.argv[1], *name.split("."))]
from exgrpo_orlhf.sandbox import namespaces
namespaces.main(int(sys.argv[2]))
"""
_ROOT = Path(__file__).resolve().parents[2]
MOST_DIGITS = 50_000  # of an integer that is read or printed, as in LiveCodeBench; Python's own limit is 4,300
_MOST_OUTPUT = 4 * 2**20  # bytes
_LIBRARIES = ("bin", "sbin", "lib", "lib64", "lib32")  # of the system and of Python; not src, where a project may lie
_SYSTEM = (*(f"{of}/{own}" for of in ("", "/usr") for own in _LIBRARIES), "/usr/libexec", "/etc/ld.so.cache")
_FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # a program's verdict is the same each time
_GRACE = 1.5  # seconds for making and unmaking the namespaces


class NoSandbox(RuntimeError):
    """This machine has no sandbox, so no program is run."""


class Run(NamedTuple):
    """One run of a program.

    how: 'exit 0', 'exit <status>', 'signal <number>', 'timeout', 'memory' or 'output' (too much of it)
    """

    how: str
    output: str


def run(
    program: Sequence[str], inputs: Sequence[str], timeout: float, memory: int, expected_output: int = 0
) -> list[Run]:
    """Run `python <program…>` on each input, in order, up to the first run that does not exit with 0. Each has a new
    process and an empty /tmp.

    timeout: seconds for all of them; memory: MiB, of each process and of all together; expected_output: bytes of all
    runs; they may print 4 MiB more, and one run 4 MiB
    The interpreter is this one's base, with its standard library; no virtual environment. Raises NoSandbox.
    """
    interpreter = _interpreter()
    orders = {
        "command": [interpreter, "-s", "-P", "-B", "-X", f"int_max_str_digits={MOST_DIGITS}", *program],
        "environment": {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **_FIXED},
        **_orders(inputs, timeout, memory),
        "most_output_of_all": expected_output + _MOST_OUTPUT,
    }
    command = [interpreter, "-I", "-S", "-B", "-c", _START, str(_ROOT), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, complaint = process.communicate(json.dumps(orders).encode(), timeout + _GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [Run("timeout", "")]
    return _reported(out, complaint.decode(errors="replace").strip()[-300:] or process.returncode)


def call(function: Callable[[], str], timeout: float, memory: int, folders: Sequence[str]) -> Run:
    """Call a function in a fork of this process; its result is the output, and it exits with 127 where it raises. What
    it calls may change the result, and nothing else.

    timeout: seconds; memory: MiB beyond that of this process; folders: of modules that it may import. Raises NoSandbox.
    """

    def start() -> None:
        result = os.dup(1)
        os.dup2(2, 1)  # what it prints is not kept
        os.write(result, function().encode())
        os._exit(0)

    orders = _orders([""], timeout, memory + memory_used("VmSize") // 2**20, folders)
    me, (reading, writing) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writing, 1)
            os.close(writing)
            namespaces.start_in_sandbox(orders, me, start)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        out = file.read()
    return _reported(out, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))[0]


def _orders(inputs: Sequence[str], timeout: float, memory: int, folders: Sequence[str] = ()) -> dict[str, Any]:
    prefixes = (sys.base_prefix, sys.base_exec_prefix, str(Path(_interpreter()).resolve().parents[1]))
    python = [f"{prefix}/{own}" for prefix in prefixes for own in _LIBRARIES]
    more = {folder for folder in (*python, *folders) if not any(Path(folder).is_relative_to(own) for own in _SYSTEM)}
    limits = {"timeout": timeout, "memory": memory, "most_output": _MOST_OUTPUT, "most_output_of_all": _MOST_OUTPUT}
    return {"inputs": list(inputs), "folders": [*_SYSTEM, *more], **limits}  # folders: visible inside


def _interpreter() -> str:
    """The base one: a virtual environment's folder may lie beside files that must stay hidden."""
    path = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(path if path.exists() else Path(sys.executable).resolve())


def _reported(out: bytes, why: object) -> list[Run]:
    """The runs that `namespaces.py` reports. why: it failed, where it reports nothing. Raises NoSandbox."""
    if not out:
        raise NoSandbox(f"the sandbox failed: {why}")
    answer = json.loads(out)
    if "unavailable" in answer:
        raise NoSandbox(
            f"this machine allows no sandbox ({answer['unavailable']}), and kinds 'code' and 'reasoning_gym' run "
            "nothing without one. It needs Linux 5.14 or newer with seccomp, and user namespaces (sysctl "
            "user.max_user_namespaces; in a container, a seccomp and AppArmor profile that allows them)"
        )
    return [Run(**result) for result in answer["results"]]


def check_available() -> None:
    """Raises NoSandbox if programs cannot be run here."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{sys.platform} on {platform.machine()}"
        raise NoSandbox(f"no sandbox for {here}: kinds 'code' and 'reasoning_gym' need Linux on x86-64 or ARM64")
    runs = run(["-c", "print(6 * 7)"], [""], 10.0, 512)
    if runs != [Run("exit 0", "42\n")]:
        raise NoSandbox(f"the sandbox does not run a simple program: {runs}")
