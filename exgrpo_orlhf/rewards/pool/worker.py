"""A grading process. `pool.py` starts `main` with four arguments: settings as JSON, its parent's process id, and the
descriptors of a connection and of a file.

It loads the grader once (sympy and math-verify take a second) and then only forks: the fork grades, and when it is
killed at the limit or dies, the next fork takes milliseconds. So no answer is graded in a process that a killed answer
has left with a lock, a thread or a half-grown heap.

Messages. In, for the fork: the size of a chunk in the file, a pickled list of calls, each a pickled list of `Answer`s.
Out, of the fork: ("ready", its process id, `Grading.calls`), then for a chunk ("begun",) and for each call, in order,
("graded", a `Graded` of each answer, …); of its parent: ("died", how), or ("unusable", why) if the grader cannot be
loaded. In, after "died": 0 asks for the next fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...stopping import described
from ..answer import Graded, Grader, Grading
from ..sandbox.namespaces import end_with_parent

SHOWN = 200  # characters of an extracted answer or a reason
KILLED = "killed by SIGKILL"  # the "how" of a fork that was killed by the pool or from outside
_OUT_OF_MEMORY = 101  # exit status


def load(settings: Mapping[str, Any]) -> Grading:
    """The grader of a kind. Imports happen here, outside every answer's limit. Raises whatever is wrong with it."""
    if settings["kind"] == "function":
        from ..sandbox import function

        own = [settings.get(name) for name in ("tool", "gets", "columns")]
        return function.grading(settings["function"], settings["success_at"], *own)
    grader = _text_grader(settings)
    return Grading("response", lambda answers: [grader(answer) for answer in answers])


def _text_grader(settings: Mapping[str, Any]) -> Grader:
    kind = settings["kind"]
    if kind in ("math", "math_verify"):
        from ..text import math

        return math.warm_grader() if kind == "math" else math.grade_by_math_verify
    if kind == "choice":
        from ..text import choice

        return choice.grade
    if kind == "reasoning_gym":
        from ..text import gym

        return partial(gym.grade, success_at=settings["success_at"])
    from ..sandbox import code

    return code.grader(settings["timeout"], settings["memory"])


def main() -> None:
    """Load the grader, then fork, wait for the fork's end, and fork again when the pool asks for it."""
    settings = json.loads(sys.argv[1])
    parent, fd, answers = map(int, sys.argv[2:])
    end_with_parent(parent)
    for each in (fd, answers):  # not for what a user's function starts
        os.set_inheritable(each, False)
    pool: Connection[Any, Any] = Connection(fd)
    try:
        grading = load(settings)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is imported
        pool.send(("unusable", f"{type(error).__name__}: {error}"[: 2 * SHOWN]))
        return
    me = os.getpid()
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is closed
        while True:
            fork = os.fork()
            if fork == 0:
                try:
                    os.setpgid(0, 0)
                    end_with_parent(me)
                    _serve(grading, pool, answers, settings["memory"])
                finally:
                    os._exit(1)
            # Reaped only when the pool asks for the next one: until then it may kill it by its id.
            end = os.waitid(os.P_PID, fork, os.WEXITED | os.WNOWAIT)
            assert end is not None  # only with WNOHANG
            with contextlib.suppress(OSError):  # a sandboxed program of another user dies with its own parent
                os.killpg(fork, signal.SIGKILL)  # what it left behind
            while pool.poll() and os.read(fd, 2**16):  # what the dead fork has not read, or only half
                pass
            status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            pool.send(("died", "out of memory (Verifier.memory)" if status == _OUT_OF_MEMORY else described(status)))
            while pool.recv():
                pass  # what the dead fork has not read
            os.waitpid(fork, 0)


def _serve(grading: Grading, pool: Connection[Any, Any], answers: int, memory: int) -> None:
    """Grade until the pool is closed. memory: MiB beyond what the loaded grader takes already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # of address space in use
    limit = pages * resource.getpagesize() + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    me = os.getpid()
    pool.send(("ready", me, grading.calls))
    while True:
        chunk = pickle.loads(os.pread(answers, pool.recv(), 0))
        pool.send(("begun",))
        for pickled in chunk:
            call = pickle.loads(pickled)
            try:
                graded = grading.grade(call)
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)  # the heap may be fragmented: the next fork has a fresh one
            except Exception as error:
                graded = [Graded("error", None, reason=f"{type(error).__name__}: {error}")] * len(call)
            if os.getpid() != me:
                os._exit(0)  # a fork that a user's function made and that returned too: it must not reply
            # sympy and math-verify catch a MemoryError and go on without what they lack.
            if any(each.verdict != "correct" for each in graded):
                status = Path("/proc/self/status").read_text()  # VmPeak: the largest address space since the fork, KiB
                if int(status.split("VmPeak:", 1)[1].split(None, 1)[0]) * 1024 > 0.9 * limit:
                    os._exit(_OUT_OF_MEMORY)
            pool.send(("graded", *(tuple(each.shortened(SHOWN)) for each in graded)))
