"""The process that loads what answers calls and forks the workers. `fork_server.py` starts `main` with four arguments,
'module:function', the class of the limits, its parent's process id, and the descriptor of a socket, and with the
function's settings as JSON on stdin.

Messages on that socket. Out: JSON, a pair of what is said of the loaded and, if it cannot be used, why. In: a socket
and a memory file, for a new worker. Its end: the end of all workers.

Messages on a worker's socket. In, for the worker: the size of what is in the file, a pickled tuple of pickled calls.
Out, for each call in order: the size of the reply, which follows in the file, a pickled pair of the result and, where
there is none, why; or, of the parent, how the worker ended. Its end: the end of the worker. When a worker takes up a
call, it writes the time at the start of its file.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..io.stopping import described
from .fork_server import CONTENT
from .parent import adopt_orphans, children, end_with_parent
from .user_file import UserFileError

_OUT_OF_MEMORY = 101  # exit status
_SHOWN = 400  # characters of a reason


class _Child(NamedTuple):
    """A worker: its id, a descriptor of its process, and its socket, which is kept to say how it ended."""

    pid: int
    pidfd: int
    socket: socket.socket


def main() -> None:
    """Load, then fork, kill and reap until the parent ends or closes the socket."""
    module, _, name = sys.argv[1].partition(":")
    settings, owner = json.load(sys.stdin), sys.argv[2]
    parent, fd = map(int, sys.argv[3:])
    end_with_parent(parent)
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)  # not for what a user's file starts
    try:
        info, answer = getattr(importlib.import_module(module), name)(settings)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is imported
        control.send(json.dumps(["", _reason(error)]).encode())
        return
    control.send(json.dumps([info, ""]).encode())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # from here on it has others to kill when its parent dies
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a user's file may have asked that none be reaped
    end_with_parent(parent, signal.SIGTERM)
    gc.freeze()  # a collection in a fork would copy all that is loaded here: 0.2 s with torch
    by_fd: dict[int, _Child] = {}
    try:
        _fork_workers(control, by_fd, owner, lambda channel, file: _serve(answer, channel, file, settings["memory"]))
    finally:
        for child in by_fd.values():
            _kill(child.pid)
        for pid in {child.pid for child in by_fd.values()}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if by_fd:
            _end_orphans(set())


def _fork_workers(control: socket.socket, by_fd: dict[int, _Child], owner: str, serve: Any) -> None:
    """by_fd: the workers, each under its process's descriptor and its socket's"""
    me = os.getpid()
    adopt_orphans()
    own = children()  # of what was loaded
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        for fd in ready:
            if child := by_fd.get(fd):
                _kill(child.pid)  # of the dead: what they left behind
                poll.unregister(fd)
                if fd == child.pidfd:
                    del by_fd[child.pidfd], by_fd[child.socket.fileno()]
                    with contextlib.suppress(KeyError):
                        poll.unregister(child.socket)
                    _reap(child, owner)
                    _end_orphans(own | {child.pid for child in by_fd.values()})
        # New ones come last: a descriptor of theirs may be one of `ready` that has just been closed.
        if control.fileno() in ready:
            message, fds, *_ = socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            channel, file = socket.socket(fileno=fds[0]), fds[1]
            try:
                pid = os.fork()
            except OSError as error:  # a limit on processes, say
                with contextlib.suppress(OSError), channel:
                    channel.send(f"no process could be started: {error}".encode())
                os.close(file)
                continue
            if pid == 0:
                try:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.setpgid(0, 0)
                    end_with_parent(me)
                    adopt_orphans()
                    control.close()
                    for fd, child in by_fd.items():
                        os.close(fd)
                        child.socket.detach()
                    serve(channel, file)
                finally:
                    os._exit(1)
            os.setpgid(pid, pid)  # here too: it may be killed before it has done so
            os.close(file)
            child = _Child(pid, os.pidfd_open(pid), channel)
            by_fd[child.pidfd] = by_fd[channel.fileno()] = child
            poll.register(child.pidfd, select.POLLIN)
            poll.register(channel, 0)  # tells when the other end is closed


def _kill(pid: int) -> None:
    """Kill a process that has not been reaped, and its group."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def _end_orphans(known: set[int]) -> None:
    """Kill and reap what ended workers have started in sessions of their own, and what that has started."""
    while orphans := children() - known:
        for pid in orphans:
            _kill(pid)
            os.waitpid(pid, 0)


def _reap(child: _Child, owner: str) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    cause = f"out of memory ({owner}.memory)" if code == _OUT_OF_MEMORY else described(code)
    with contextlib.suppress(OSError):  # closed at the other end, or full of what the user's code wrote there
        child.socket.send(f"its process ended: {cause}".encode(), socket.MSG_DONTWAIT)
    child.socket.close()
    os.close(child.pidfd)


def _serve(answer: Callable[[Any], Any], channel: socket.socket, file: int, memory: int) -> NoReturn:
    """Answer calls until the worker is closed. memory: MiB beyond what is loaded already"""
    limit = memory_used("VmSize") + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me, reason = os.getpid(), ""
    while message := channel.recv(64):
        at = CONTENT + int(message)
        _note_time(file)
        for call in pickle.loads(os.pread(file, int(message), CONTENT)):
            try:
                reply = pickle.dumps((answer(pickle.loads(call)), ""))
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)  # the heap may be fragmented: the next worker has a fresh one
            except BaseException as error:
                reason = _reason(error)
                reply = pickle.dumps((None, reason))
            if os.getpid() != me:
                os._exit(0)  # a fork that the user's code made and that returned too: it must not reply
            os.pwrite(file, reply, at)
            at += len(reply)
            _note_time(file)  # the next call is taken up, before the caller can look for that
            channel.send(b"%d" % len(reply))
            if reason:
                break  # the caller ends this worker
    os._exit(0)


def _note_time(file: int) -> None:
    os.pwrite(file, struct.pack("d", time.monotonic()), 0)


def check_memory() -> None:
    """In a worker: raises MemoryError if it was close to its limit. sympy and math-verify catch that error and go on
    without what they lack."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and memory_used("VmPeak") > 0.9 * limit:
        raise MemoryError


def memory_used(name: str) -> int:
    """Bytes of address space: VmSize, now, or VmPeak, the largest since the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:", 1)[1].split(None, 1)[0]) * 1024


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, UserFileError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_SHOWN]
