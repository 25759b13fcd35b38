"""A grading process: `python -m exgrpo_orlhf.rewards.worker '<settings as JSON>' <pid of the parent>`.

It loads the grader once (sympy and math-verify take a second) and then only forks: the fork grades, and when it passes
the limit or dies, the next one is there in milliseconds. A process that has a lock, a thread or a half-grown heap left
from a killed answer is never used again.

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

from .answer import Graded, Grader

SHOWN = 200  # characters of an extracted answer or a reason
_PR_SET_PDEATHSIG = 1
KILLED = "killed by SIGKILL"  # how a fork died that was killed from outside, unless the pool asked for it
_DONE, _OUT_OF_MEMORY = 100, 101  # exit statuses


def load(settings: Mapping[str, Any]) -> Grader:
    """The grader of a kind. Imports happen here, outside every answer's limit. Raises whatever is wrong with it."""
    kind = settings["kind"]
    if kind == "math":
        from . import math

        return math.grader()
    if kind == "math_verify":
        from . import plain

        return plain.grade
    if kind == "choice":
        from . import choice

        return choice.grade
    if kind == "function":
        from . import function

        return function.grader(settings["function"])
    if kind == "code":
        from . import code

        return code.grader(settings["timeout"], settings["memory"])
    raise ValueError(f"no grader of kind {kind!r} runs in a pool")


def end_with_parent(parent: int) -> None:
    """This process is killed when its parent dies, also if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    settings, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent)
    # The pipes get numbers of their own: what a user's function prints must not end up between the replies.
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
            pass  # a SIGUSR1 that came too late, and the SIGCHLD of the one that is gone


def _wait(child: int) -> int:
    """The fork's exit status; kills it and what it started when asked to."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if signal.sigwaitinfo({signal.SIGUSR1, signal.SIGCHLD}).si_signo == signal.SIGUSR1:
            _kill_group(child)
    _kill_group(child)  # what it left behind
    return status


def _kill_group(group: int) -> None:
    for kill in (os.killpg, os.kill):  # by its id too, if it has not come to making its group
        try:
            kill(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
        except PermissionError:  # a sandboxed program under another user: it dies with its own parent
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
                os._exit(_OUT_OF_MEMORY)  # its heap may be full of fragments: the next fork has a fresh one
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
    """Throw away what a killed fork has not read."""
    while select.select([fd], [], [], 0)[0] and os.read(fd, 1 << 20):
        pass


if __name__ == "__main__":
    # As a module of its package, not as __main__: the pickles name it so.
    from exgrpo_orlhf.rewards import worker

    worker.main()
