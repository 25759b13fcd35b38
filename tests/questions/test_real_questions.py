"""Real questions, a full vocabulary and long responses: replayed steps run, and memory stays bounded."""

from __future__ import annotations

import json
import random
import re
import string

import pytest
from eval_builders import byte_model
from run_builders import python, rows, train_command

from exgrpo_orlhf.questions import QuestionFile

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, K = 151_936, 1_000, 4
REWARD = "def reward_func(queries, prompts, labels):\n    return [float('right' in queries[0][len(prompts[0]) :])]\n"
# Runs a script and leaves what the kernel knows of the process in a file. (What a parent is told of its child's memory
# has its own in it, from before the exec.)
MEASURED = """
import atexit, runpy, sys
from pathlib import Path
seen, sys.argv = sys.argv[1], sys.argv[2:]
atexit.register(lambda: Path(seen).write_text(Path("/proc/self/status").read_text()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_replayed_steps_on_real_questions_stay_within_bounded_memory(shared_data, tmp_path):
    """The logits of the replayed group's rows alone would take 2.4 GB, in float32 and once; training on them without
    chunks takes about three times that. The whole process stays below 1.5 GB. Five questions have three stored
    successes each, so that replay happens on a model that knows nothing.
    """
    byte_model(tmp_path / "model", layers=2, vocabulary=VOCABULARY, context=4096)
    questions, draw = shared_data / "exgrpo_valid.parquet", random.Random(0)
    (tmp_path / "reward.py").write_text(REWARD)
    with (tmp_path / "experts.jsonl").open("w") as file:
        for question in QuestionFile(str(questions), limit=5).load() * 3:
            response = "".join(draw.choices(string.ascii_letters, k=LENGTH - 6)) + "right"
            file.write(json.dumps({"id": question.id, "response": response}) + "\n")
    bindings = [
        "Work.model = @PretrainedModel()",
        f"PretrainedModel.path = {str(tmp_path / 'model')!r}",
        "Work.questions = @QuestionFile()",
        "Work.validation = None",
        f"Work.experience = {str(tmp_path / 'experts.jsonl')!r}",
        f"QuestionFile.path = {str(questions)!r}",
        "QuestionFile.limit = 20",
        "ReplayBuffer.per_question = 3",
        "Verifier.kind = 'function'",
        f"Verifier.function = {str(tmp_path / 'reward.py')!r}",
        "Prompts.template = 'chat'",
        "Prompts.max_tokens = 3000",
        f"MAX_RESPONSE_TOKENS = {LENGTH}",
        "train.steps = 2",
        "train.questions_per_step = 2",
        f"train.group_size = {K}",
        "train.eval_every = None",
        "ReplayMixer.start_at_accuracy = None",
        "LocalEngine.device = 'cpu'",
        "Tracking.enabled = False",
    ]
    run, seen = tmp_path / "run", tmp_path / "status"
    done = python("-c", MEASURED, seen, *train_command(run, bindings)[1:])
    assert done.returncode == 0, done.stderr

    measured = rows(run)[1:]
    assert [row["replay/actual_share"] for row in measured] == [0.5, 0.5]
    for row in measured:
        assert row["replay/candidates_scored"] == 3
        assert row["replay/response_tokens"] == LENGTH
        assert row["rollout/response_tokens"] > LENGTH / 2
        assert row["policy/grad_norm"] > 0, "the stored success is a signal beside wrong answers"
    peak = 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", seen.read_text())[1])
    logits = K * LENGTH * VOCABULARY * 4
    print(f"peak {peak / 1e9:.2f} GB, the logits of one group {logits / 1e9:.2f} GB")
    assert peak < 0.6 * logits  # half of it are the libraries that transformers finds and imports
