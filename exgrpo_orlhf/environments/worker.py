"""The process that loads an environment's file and forks for each episode. `episodes.py` starts `main` with four
arguments: the file, MiB for an episode, its parent's process id, and the descriptor of a socket.

Messages on that socket. Out: "ready", or why the file cannot be used. In: a socket and a memory file, for a new
episode. Its end: the end of all episodes.

An episode writes the time at which it has begun at the start of its file; states and results come behind that.

Messages on an episode's socket. In, for the episode: the size of the states in the file, pickled. Out: the size of the
result in the file, JSON, with the fields of a `Reply` or with the "reason" why there is none; or, of the parent, how
the episode's process ended. Its end: the end of the episode.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from numpy import random as numpy_random  # takes 13 ms, which no episode should

from ..rewards.sandbox.function import placed
from ..rewards.sandbox.namespaces import end_with_parent
from ..stopping import described
from .agent import Agent, BadResult, load_agent
from .episodes import CONTENT

_OUT_OF_MEMORY = 101  # exit status
_SHOWN = 400  # characters of a reason


class _Child(NamedTuple):
    """An episode's process: its id, a descriptor of it, and its socket, which is kept to say how it ended."""

    pid: int
    pidfd: int
    socket: socket.socket


def main() -> None:
    """Load the file, then fork, kill and reap until the parent ends or closes the socket."""
    file = Path(sys.argv[1]).expanduser().absolute()  # as tracebacks name it
    memory, parent, fd = map(int, sys.argv[2:])
    end_with_parent(parent)
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)  # not for what a user's file starts
    try:
        agent = load_agent(file)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is imported
        control.send(_line(str(error) if isinstance(error, ValueError) else placed(error, file)).encode())
        return
    control.send(b"ready")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # from here on it has others to kill when its parent dies
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a user's file may have asked that none be reaped
    end_with_parent(parent, signal.SIGTERM)
    gc.freeze()  # a collection in a fork would copy all that is loaded here: 0.2 s with torch
    by_fd: dict[int, _Child] = {}
    try:
        _fork_episodes(control, by_fd, lambda own, states: _serve(agent, file, own, states, memory))
    finally:
        for child in by_fd.values():
            _kill(child.pid)


def _fork_episodes(control: socket.socket, by_fd: dict[int, _Child], serve: Any) -> None:
    """by_fd: the episodes, each under its process's descriptor and its socket's"""
    me = os.getpid()
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
                    _reap(child)
        # New ones come last: a descriptor of theirs may be one of `ready` that has just been closed.
        if control.fileno() in ready:
            message, fds, *_ = socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            own, states = socket.socket(fileno=fds[0]), fds[1]
            try:
                pid = os.fork()
            except OSError as error:  # a limit on processes, say
                with contextlib.suppress(OSError), own:
                    own.send(f"no process could be started: {error}".encode())
                os.close(states)
                continue
            if pid == 0:
                try:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.setpgid(0, 0)
                    end_with_parent(me)
                    control.close()
                    for fd, child in by_fd.items():
                        os.close(fd)
                        child.socket.detach()
                    serve(own, states)
                finally:
                    os._exit(1)
            os.setpgid(pid, pid)  # here too: it may be killed before it has done so
            os.close(states)
            child = _Child(pid, os.pidfd_open(pid), own)
            by_fd[child.pidfd] = by_fd[own.fileno()] = child
            poll.register(child.pidfd, select.POLLIN)
            poll.register(own, 0)  # tells when the other end is closed


def _kill(pid: int) -> None:
    """Kill a process that has not been reaped, and its group."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def _reap(child: _Child) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    ended = f"its process ended: {described(code)}"
    reason = "out of memory (Environment.memory)" if code == _OUT_OF_MEMORY else ended
    with contextlib.suppress(OSError):  # closed at the other end, or full of what the user's code wrote there
        child.socket.send(reason.encode(), socket.MSG_DONTWAIT)
    child.socket.close()
    os.close(child.pidfd)


def _serve(agent_class: type, file: Path, own: socket.socket, states_file: int, memory: int) -> NoReturn:
    """Answer requests until the episode is closed. memory: MiB beyond what the loaded file takes already"""
    os.pwrite(states_file, struct.pack("d", time.monotonic()), 0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # of address space in use
    limit = pages * resource.getpagesize() + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me, agent = os.getpid(), None
    while message := own.recv(64):
        try:
            states = pickle.loads(os.pread(states_file, int(message), CONTENT))
            if agent is None:
                _seed(states["seed"])
                agent = Agent(agent_class)
                result = agent.reset(states)
            else:
                result = agent.step(states)
            written = json.dumps(result).encode()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except BaseException as error:  # SystemExit and asyncio's CancelledError too
            reason = f"{file.name}: {error}" if isinstance(error, BadResult) else placed(error, file)
            written = json.dumps({"reason": _line(reason)}).encode()
        if os.getpid() != me:
            os._exit(0)  # a fork that the user's code made and that returned too: it must not reply
        os.pwrite(states_file, written, CONTENT)
        own.send(b"%d" % len(written))
    os._exit(0)


def _seed(seed: int) -> None:
    """Of the generators that a user's file may use without one of its own, so that an episode can be repeated."""
    random.seed(seed)
    numpy_random.seed(seed % 2**32)  # noqa: NPY002  (the global one)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
