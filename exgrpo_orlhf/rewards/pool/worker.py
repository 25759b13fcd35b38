"""A grading process. `process.py` starts `main` with two arguments: settings as JSON, and its parent's process id.

It loads the grader once (sympy and math-verify take a second) and then only forks: the fork grades, and when it passes
the limit or dies, the next fork takes milliseconds. So no answer is graded in a process that a killed answer has left
with a lock, a thread or a half-grown heap.

Protocol, both ways: four bytes of length and a pickle. In: a chunk, a list of pickled `Answer`s. Out, of the fork:
("ready",), then for each chunk ("begun",) and one ("grade", verdict, reward, extracted, reason) for each answer, in
order; of its parent: ("died", how), or ("unusable", why) if the grader cannot be loaded. Every reply is below PIPE_BUF
and so written whole or not at all. SIGUSR1 asks for the fork to be killed; after "died", SIGUSR2 asks for the next one.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..answer import Graded, Grader

SHOWN = 200  # characters of an extracted answer or a reason
_PR_SET_PDEATHSIG = 1
KILLED = "killed by SIGKILL"  # the "how" of a fork that was killed by the pool's request or from outside
_DONE, _OUT_OF_MEMORY = 100, 101  # exit statuses


def load(settings: Mapping[str, Any]) -> Grader:
    """The grader of a kind. Imports happen here, outside every answer's limit. Raises whatever is wrong with it."""
    match settings["kind"]:
        case "math":
            from ..text import math

            return math.warm_grader()
        case "math_verify":
            from ..text import math

            return math.grade_by_math_verify
        case "choice":
            from ..text import choice

            return choice.grade
        case "function":
            from ..sandbox import function

            return function.grader(settings["function"])
        case "code":
            from ..sandbox import code

            return code.grader(settings["timeout"], settings["memory"])
    raise ValueError(f"no grader of kind {settings['kind']!r} runs in a pool")


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if the parent is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Load the grader, then fork, wait for the fork's end, and fork again when the pool asks for it."""
    settings, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent)
    # The pipes get other descriptors, so that what a user's function prints does not end up between the replies.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    wanted = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        grader = load(settings)
    except Exception as error:  # whatever a user's file does when it is imported
        _send(replies, ("unusable", f"{type(error).__name__}: {error}"[: 2 * SHOWN]))
        return
    while True:
        _drain(requests)
        me = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                end_with_parent(me)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
                _serve(grader, requests, replies, settings["memory"])
            finally:
                os._exit(1)
        status = _wait(child)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _DONE:
            return  # the parent has closed the pipe
        _send(replies, ("died", _describe(status)))
        while signal.sigwaitinfo(wanted).si_signo != signal.SIGUSR2:
            pass  # a SIGUSR1 that came too late, or the SIGCHLD of the dead fork


def _wait(child: int) -> int:
    """Wait for the fork and return its exit status; kill it and what it has started on SIGUSR1."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if signal.sigwaitinfo({signal.SIGUSR1, signal.SIGCHLD}).si_signo == signal.SIGUSR1:
            _kill_group(child)
    _kill_group(child)  # what it left behind
    return status


def _kill_group(group: int) -> None:
    for kill in (os.killpg, os.kill):  # by its own id too: it may not have made its group yet
        try:
            kill(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
        except PermissionError:  # a sandboxed program of another user, which dies with its own parent
            continue


def _serve(grader: Grader, requests: int, replies: int, memory: int) -> None:
    """Grade until the pipe closes, then exit. memory: MiB beyond what the loaded grader takes already."""
    limit = _address_space() + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(replies, ("ready",))
    while True:
        try:
            size = struct.unpack("!I", _read(requests, 4))[0]
            chunk: list[bytes] = pickle.loads(_read(requests, size))
        except EOFError:
            os._exit(_DONE)
        _send(replies, ("begun",))
        for pickled in chunk:
            try:
                graded = grader(pickle.loads(pickled))
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)  # the heap may be fragmented: the next fork has a fresh one
            except Exception as error:
                graded = Graded("error", None, reason=f"{type(error).__name__}: {error}")
            if graded.verdict != "correct" and _largest_address_space() > 0.9 * limit:
                os._exit(_OUT_OF_MEMORY)  # sympy and math-verify catch a MemoryError and go on without
            shown = [None if text is None else text[:SHOWN] for text in (graded.extracted, graded.reason)]
            _send(replies, ("grade", graded.verdict, graded.reward, *shown))


def _address_space() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _largest_address_space() -> int:
    """Bytes of address space at its largest since the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmPeak:", 1)[1].split(None, 1)[0]) * 1024


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    if os.WEXITSTATUS(status) == _OUT_OF_MEMORY:
        return "out of memory (Verifier.memory)"
    return f"exit status {os.WEXITSTATUS(status)}"


def _send(fd: int, reply: tuple[Any, ...]) -> None:
    body = pickle.dumps(reply)
    os.write(fd, struct.pack("!I", len(body)) + body)


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _drain(fd: int) -> None:
    """Discard what a killed fork has not read."""
    while select.select([fd], [], [], 0)[0] and os.read(fd, 1 << 20):
        pass
