"""A real MLflow server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from run_builders import free_port, wait_until


class Server:
    """`mlflow server` on a port of its own; a restart keeps port and data."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.uri, self.folder, self.process = f"http://127.0.0.1:{self.port}", folder, None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "server-artifacts")]
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command,
                **{"stdout": output, "stderr": output, "start_new_session": True, "cwd": self.folder},
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        wait_until(self._answers)

    def _answers(self):
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        except OSError:
            return False

    def stop(self):
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
