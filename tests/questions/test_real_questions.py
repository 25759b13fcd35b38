"""Real questions, a full vocabulary and long responses: replayed steps run, and memory stays bounded."""

from __future__ import annotations

import re
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest
from eval_builders import byte_model
from run_builders import rows, train_command

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import manifest
from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy, snapshot

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, K = 151_936, 1_000, 4
# Runs a script and leaves what the kernel knows of the process in a file. (What a parent is told of its child's memory
# has its own in it, from before the exec.)
MEASURED = """
import atexit, runpy, sys
import pytest
from pathlib import Path
seen, sys.argv = sys.argv[1], sys.argv[2:]
atexit.register(lambda: Path(seen).write_text(Path("/proc/self/status").read_text()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_replayed_steps_on_real_questions_stay_within_bounded_memory(shared_data, tmp_path):
    """The logits of the replayed group's rows alone would take 2.4 GB, in float32 and once; training on them without
    chunks takes about three times that. The whole process stays below 1.5 GB.
    """
    byte_model(tmp_path / "model", layers=2, vocabulary=VOCABULARY, context=4096)
    bindings = [
        "Work.model = @PretrainedModel()",
        f"PretrainedModel.path = {str(tmp_path / 'model')!r}",
        "Work.questions = @QuestionFile()",
        "Work.validation = None",
        f"QuestionFile.path = {str(shared_data / 'exgrpo_valid.parquet')!r}",
        "QuestionFile.limit = 20",
        "Verifier.kind = 'exact'",
        "Prompts.template = 'chat'",
        "Prompts.max_tokens = 3000",
        f"MAX_RESPONSE_TOKENS = {LENGTH}",
        "train.questions_per_step = 2",
        f"train.group_size = {K}",
        "train.eval_every = None",
        "train.save_every = 1",
        "ReplayMixer.start_at_accuracy = None",
        "LocalEngine.device = 'cpu'",
        "Tracking.enabled = False",
    ]
    run = tmp_path / "run"
    command = [*train_command(run, bindings), "--resume"]

    subprocess.run([*command, "--set", "train.steps = 1"], check=True)
    seed_buffer(run, bindings)
    seen = tmp_path / "status"
    subprocess.run([command[0], "-c", MEASURED, seen, *command[1:], "--set", "train.steps = 3"], check=True)

    measured = rows(run)
    assert [row["replay/actual_share"] for row in measured[1:]] == [0, 0.5, 0.5]
    for row in measured[2:]:
        assert row["replay/candidates_scored"] == 3
        assert row["replay/response_tokens"] == LENGTH
        assert row["rollout/response_tokens"] > LENGTH / 2
        assert row["policy/grad_norm"] > 0, "the stored success is a signal beside wrong answers"
    peak = 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", seen.read_text())[1])
    logits = K * LENGTH * VOCABULARY * 4
    print(f"peak {peak / 1e9:.2f} GB, the logits of one group {logits / 1e9:.2f} GB")
    assert peak < 0.6 * logits  # half of it are the libraries that transformers finds and imports


def seed_buffer(run, bindings) -> None:
    """Give five questions three stored successes each, so that replay happens on a model that knows nothing."""
    folder = checkpoints.find(run)[1] / "replay"
    experiment = config.load(["toy.gin"], bindings)
    questions = QuestionFile(experiment.questions.path, limit=20).load()
    engine = TorchEngine(LocalParts.of(experiment), model_path=experiment.model.path)
    fingerprint = engine.prompts.fingerprint()
    buffer = snapshot.load(folder, ReplayBuffer(RetirementPolicy()), fingerprint)
    rng = np.random.default_rng(0)
    for question in questions[:5]:
        buffer.record(question.id, Fraction(1, 2), 1)
        for _ in range(3):
            ids = np.append(rng.integers(1, 200, LENGTH - 1), 0).astype(np.int32)
            logprobs = np.full(LENGTH, -np.log(VOCABULARY), np.float32)
            buffer.store([(question.id, Trajectory(ids, logprobs, 1.0, 1))])
    shutil.rmtree(folder)
    snapshot.save(buffer, folder, fingerprint)
    saved = manifest.read(folder.parent)
    manifest.seal(folder.parent, saved.step, saved.run, {})
