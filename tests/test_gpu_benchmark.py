"""The GPU benchmark is right where there is no GPU: its local sections, tiny, on the CPU."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_local_sections_meet_their_goals_of_correctness_on_a_cpu():
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--section", "1", "2", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 7
