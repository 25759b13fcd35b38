"""The sandbox's limits hold: memory, files, output and time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from exgrpo_orlhf.sandbox import sandbox

MEMORY = 256  # MiB
pytestmark = pytest.mark.usefixtures("needs_sandbox")


def ran(program: str, inputs=("",), timeout: float = 30.0, **settings) -> list[sandbox.Run]:
    return sandbox.run(["-c", textwrap.dedent(program)], inputs, timeout, MEMORY, **settings)


# Each prints how many MiB it holds outside its own memory, or what stopped it.
CALLS = (
    "import ctypes, errno, platform\nlibc = ctypes.CDLL(None, use_errno=True)\nx86 = platform.machine() == 'x86_64'\n"
)
HOLDS = {
    "memfd_create": """
        import os
        files = []
        for i in range(48):
            files.append(os.memfd_create(str(i)))
            os.write(files[-1], bytes(64 << 20))
        """,
    **{
        name: f"""
        if libc.syscall({x86} if x86 else {arm}, {arguments}) < 0:
            raise OSError(ctypes.get_errno(), "denied")
        """
        for name, x86, arm, arguments in (
            ("memfd_secret", 447, 447, "0"),
            ("shmget", 29, 194, "0, ctypes.c_size_t(64 << 20), 0o1600"),
            ("msgget", 68, 186, "0, 0o1600"),
            ("semget", 64, 190, "0, 32000, 0o1600"),
            ("mq_open", 240, 180, "b'a', 0o102, 0o600, None"),
            ("io_uring_setup", 425, 425, "8, None"),
            ("io_setup", 206, 0, "1000, None"),
            ("userfaultfd", 323, 282, "1"),
            ("process_vm_readv", 310, 270, "0, 0, 0, 0, 0, 0"),
            ("ptrace", 101, 117, "0, 0, 0, 0"),
            ("inotify_init1", 294, 26, "0"),
            ("vmsplice", 278, 75, "1, None, 0, 0"),
        )
    },
    "a shared mapping": "import mmap\nmemory = mmap.mmap(-1, 64 << 20)",
    "a shared mapping of zeros": """
        import mmap, os
        memory = mmap.mmap(os.open("/dev/zero", os.O_RDWR), 64 << 20, mmap.MAP_SHARED)
        """,
    "large pages": "import mmap\nmemory = mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "/dev/shm": "import os\nopen('/dev/shm/x', 'w')",
    "a socket's buffer": """
        import socket
        one, other = socket.socketpair()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
        """,
}


@pytest.mark.parametrize("name", HOLDS)
def test_memory_outside_the_processes_is_denied(name):
    program = f"{CALLS}try:\n{textwrap.indent(textwrap.dedent(HOLDS[name]), '    ')}\n    print('held')\n"
    (run,) = ran(program + "except OSError as error:\n    print(errno.errorcode[error.errno])")
    assert (run.how, run.output) in {("exit 0", "EPERM\n"), ("exit 0", "ENOENT\n")}


OVER = {
    "files without a name": """
        import tempfile
        files = [tempfile.TemporaryFile() for i in range(8)]
        for file in files:
            file.write(bytes(32 << 20))
        """,
    "many files": "for i in range(5000): open(str(i), 'w')",
    "files and memory": """
        import time
        open("x", "wb").write(bytes(60 << 20))
        memory = bytearray(b"x") * (210 << 20)
        time.sleep(5)
        """,
    "memory, while it prints": """
        import os, threading, time
        def talk():
            while True: os.write(1, b"x"); time.sleep(0.001)
        threading.Thread(target=talk, daemon=True).start()
        os.fork()
        memory = bytearray(b"x") * (180 << 20)
        time.sleep(5)
        """,
    "tables of pages that it never had": """
        import os, time
        for i in range(2): os.fork()
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        for i in range(30000):
            at = libc.mmap((1 << 40) + (i << 30), 4096, 1, 0x22, -1, 0)
            ctypes.string_at(at, 1)
        time.sleep(5)
        """,
}


@pytest.mark.parametrize("name", OVER)
def test_what_is_too_much_ends_the_program(name):
    (run,) = ran(OVER[name])
    assert run.how in ("memory", "exit 1"), "exit 1: the call failed"


def test_each_run_has_an_empty_scratch_folder_and_new_processes():
    program = """
    import os
    print(sorted(os.listdir(".")), os.listdir("/dev"))
    open("left", "w").write("x" * 1000000)
    os.mkdir("folder")
    os.chdir("folder")
    if os.fork() == 0:
        import time
        while True: time.sleep(1)
    """
    first, second = ran(program, ["", ""])
    assert first.how == second.how == "exit 0"
    assert first.output.startswith("[] ")
    assert first == second


def test_the_output_of_all_runs_is_limited():
    three = "print('x' * 3_000_000)"
    assert [run.how for run in ran(three, "abcdef")] == ["exit 0", "output"]
    assert [run.how for run in ran(three, "abcdef", expected_output=18_000_000)] == ["exit 0"] * 6
    endless = "import os\nif os.fork() == 0:\n    while True: os.write(1, b'x' * 60000)"
    begun = time.monotonic()
    assert ran(endless)[0].how in ("output", "exit 0"), "a child that prints on does not delay the end"
    assert time.monotonic() - begun < 60


def test_asyncio_and_multiprocessing_work_in_the_sandbox():
    program = """
    import asyncio, multiprocessing, subprocess, tempfile, threading
    async def main():
        await asyncio.sleep(0.01)
        return 1
    if __name__ == "__main__":
        one, other = multiprocessing.Pipe()
        process = multiprocessing.Process(target=other.send, args=([2],))
        process.start()
        print(asyncio.run(main()), one.recv(), subprocess.check_output(["echo", "3"]))
        process.join()
    """
    assert ran(program) == [sandbox.Run("exit 0", "1 [2] b'3\\n'\n")]


def test_without_a_system_call_filter_nothing_is_run():
    """As on a kernel without seccomp: a filter that denies prctl stands for it."""
    code = """
    import sys
    from exgrpo_orlhf.sandbox import sandbox, system_calls
    system_calls.libc.prctl(38, 1, 0, 0, 0)
    system_calls._DENIED.clear()
    system_calls._DENIED["prctl"] = (157, 167)
    system_calls.filter_calls()
    try:
        sandbox.check_available()
    except sandbox.NoSandbox as error:
        print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert "it has no system call filter (seccomp)" in done.stdout, done.stderr
    assert "run nothing without one" in done.stdout
