"""A separate Ray for tests, started as on a node: it has the variables of its start, not a driver's later ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_builders import free_port


@contextlib.contextmanager
def running_ray(tmp_path: Path, cpus: int, gpus: int, **more: str) -> Iterator[str]:
    """The address of a Ray with this many CPUs and pretended GPUs that has none of this process's OMP_, NCCL_ and RAY_
    variables. more: variables that it has"""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "NCCL_", "RAY_"))}
    log = tmp_path / "ray.log"
    for _ in range(3):  # Ray gives a node 30 s to start, which a busy machine may not keep
        folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a short path: Ray makes sockets in it
        command = [*_head_node(folder), f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        with log.open("w") as output:
            head = subprocess.Popen(command, stdout=output, stderr=output, env=own | more, start_new_session=True)
        try:
            written, end = folder / "ray_current_cluster", time.monotonic() + 600
            while not written.exists() and head.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
            if written.exists():
                yield written.read_text().strip()
                return
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
    pytest.fail(log.read_text())


def _head_node(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += [f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
    command += ["--object-store-memory=80000000", f"--temp-dir={folder}"]
    return [*command, "--include-dashboard=false", "--disable-usage-stats"]
