"""Baselines from the literature: each says what it is and trains."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from run_builders import ROOT, small_bindings, timeless, train_in

from exgrpo_orlhf import config
from exgrpo_orlhf.testbed.modular_chains import ModularChains, right_reasoning
from exgrpo_orlhf.training import initial_buffer

FOLDER = ROOT / "gin" / "baselines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.gin"))
REPLAYING = {"luffy", "rlep", "prefix_sampling", "prefix_rl", "failure_prefix"}
STEPS = 5
REPO = [  # as the files say, for groups of 4 and questions that come in three of the five steps
    *("ModularChains.count = 12", "StoredGroup.rows = 4", "StoredGroup.least = 4"),
    "ReplayBuffer.per_question = 4",
]


def test_the_table_has_every_baseline():
    table = (ROOT / "docs" / "baselines.md").read_text()
    assert sorted(set(re.findall(r"^\| `(\w+)\.gin`", table, re.MULTILINE))) == NAMES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, r"but Work\.experience, which is None: bind it") for name in ("luffy", "rlep", "prefix_rl")),
        *((name, r"SupervisedModel\.model, .*\.examples must be bound") for name in ("sft", "sft_rl")),
    ],
)
def test_what_must_be_bound_is_said(name, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load([f"baselines/{name}.gin"])


PAPER_RUN = "paper/qwen2_5_math_7b.gin"
WITH_ITS_BONUS = {"on_policy", "sft", "sft_rl"}  # ExGRPO's own baselines: its objective, or training before it
SUPERVISED = ("SupervisedModel.model = @PretrainedModel()", "SupervisedModel.examples = @ModularChains()")


@pytest.mark.parametrize("file", [*(f"baselines/{name}.gin" for name in NAMES), "recipes/su01.gin"])
def test_behind_a_file_of_the_papers_a_baseline_has_its_own_loss(file):
    """ExGRPO's experiments had an entropy bonus and a rule for the clip, which a method from another paper has not. The
    rule has no effect where no batch has a stored row, or nothing is clipped."""
    name = Path(file).stem
    bound = ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions.parquet'"]
    bound += ["Work.experience = 'experts.jsonl'"] if name == "luffy" else []
    bound += ["Work.experience = 'checkpoint-5'"] if name in ("rlep", "prefix_rl") else []
    bound += SUPERVISED if name.startswith("sft") else []
    alone, behind = (config.load(files, bound) for files in ([file], [PAPER_RUN, file]))
    differs = {key for key, value in vars(alone.loss).items() if getattr(behind.loss, key) != value}
    mixed = alone.mixer.replays and alone.mixer.injection.prefix is None
    allowed = set() if mixed and alone.loss.clip(mixed=True) else {"clips_mixed"}
    assert differs <= allowed | ({"entropy_coef"} if name in WITH_ITS_BONUS else set())
    assert (behind.loss.entropy_coef > 0) == (name in WITH_ITS_BONUS | {"luffy", "remix"})


@pytest.mark.parametrize("file", ["ablations/in_place.gin", "recipes/su01.gin", "recipes/su01_one_step.gin"])
def test_behind_a_file_of_the_papers_a_success_in_the_place_of_a_rollout_counts_in_no_accuracy(file):
    experiment = config.load([PAPER_RUN, file])
    assert experiment.mixer.injection.replaces
    assert not experiment.buffer.counts_stored


def go(model: Path, run: Path, name: str, *more: str) -> list[dict]:
    """Without small_bindings' start of replay and steps: those are the baseline's to say."""
    small = [each for each in small_bindings(model) if not each.startswith(("ReplayMixer.", "train.steps"))]
    steps = [] if name == "sft" else [f"train.steps = {STEPS}"]
    files = [f"{name}.gin"] if name in ("base", "recipes/su01") else [f"baselines/{name}.gin"]
    train_in(run, [*small, *steps, "train.eval_every = 5", "train.save_every = 5", *more], files)
    return timeless(run)[1:]


@pytest.fixture(scope="module")
def brought(warm_model, tmp_path_factory) -> dict[str, list[str]]:
    """What a baseline starts with: experts for every question, another run's successes, or solutions to learn."""
    folder = tmp_path_factory.mktemp("experience")
    questions = ModularChains(count=24, operands=(2, 3)).load()
    initial_buffer.write_experts(folder / "experts.jsonl", [(q, right_reasoning(q.prompt)) for q in questions])
    go(
        warm_model,
        folder / "run",
        "base",
        "RetirementPolicy.at_accuracy = None",
        "ReplayMixer.start_at_accuracy = None",
    )
    supervised = [
        *("Work.model = @SupervisedModel()", "SupervisedModel.model = @PretrainedModel()"),
        *("SupervisedModel.examples = @ModularChains()", f"SupervisedModel.cache = {str(folder)!r}"),
    ]
    return {
        "luffy": [f"Work.experience = {str(folder / 'experts.jsonl')!r}"],
        **{key: [f"Work.experience = {str(folder / 'run/checkpoint-5/replay')!r}"] for key in ("rlep", "prefix_rl")},
        "arpo": ["ModularChains.count = 8"],  # each question in every step
        "sft": supervised,
        "sft_rl": supervised,
        **{name: REPO for name in NAMES if name.startswith("repo_")},
        "advantage_per": ["StoredRows.first_step = 3"],
        "remix": ["Reincarnation.after_step = 3", "ConvexKL.constant_steps = 2", "ConvexKL.every = 1"],
    }


def sum_of_tokens(rows: list[dict]) -> float:
    """Of the fresh rollouts, 8 groups of 4 in each step."""
    return pytest.approx(sum(8 * 4 * row["rollout/response_tokens"] for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_trains_and_does_what_it_is_named_for(name, brought, warm_model, tmp_path):
    rows = go(warm_model, tmp_path, name, *brought.get(name, []))
    assert len(rows) == (0 if name == "sft" else STEPS)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    assert any(row.get("replay/actual_share", 0) > 0 for row in rows) == (name in REPLAYING)
    assert all(row.get("replay/retired", 0) == 0 for row in rows)
    if name == "dapo":
        assert any(row["rollout/rounds"] > 1 for row in rows)
    elif name == "gpg":
        assert all(row["policy/approx_kl"] == row["policy/clip_share"] == 0 for row in rows), "every ratio is 1"
    elif name in ("luffy", "rlep"):
        assert all(row["replay/actual_share"] == min(1, row["replay/candidates"] / 8) for row in rows)
        assert len({row["replay/trajectories"] for row in rows}) == 1
    elif name == "prefix_rl":
        assert all(0.3 < row["replay/given_share"] < 0.8 for row in rows), "of 4 to 24 tokens"
        assert len({row["replay/trajectories"] for row in rows}) == 1
    elif name in ("prefix_sampling", "failure_prefix"):
        assert any(row["replay/given_tokens"] > 0 for row in rows)
        assert rows[-1]["replay/failures"] > 0
    elif name == "remix":
        assert [row["replay/over"] for row in rows] == [0, 0, 0, 1, 1]
        assert [row["policy/base_share"] for row in rows] == pytest.approx([1, 1, 0.9, 0.8, 0.7])
        stored = [row["replay/trajectories"] for row in rows]
        assert [row["replay/added_rows"] for row in rows] == [0, *(min(21, n) for n in stored[:2]), 0, 0]
        assert max(row["replay/age_max"] for row in rows) == 2
        assert [row["policy/approx_kl"] > 0 for row in rows] == [True] * 3 + [False] * 2, "two passes, then one"
    elif name.endswith("_per"):
        first, rows_each = (3, 4) if name == "advantage_per" else (2, 8)
        added = [row["replay/added_rows"] for row in rows]
        assert not any(added[: first - 1])
        stored = [row["replay/trajectories"] for row in rows]
        assert added[first - 1 :] == [min(8 * rows_each, n) for n in stored[first - 2 : -1]]
        assert all(row["replay/added_with_signal"] == 1 for row in rows[first:]) == (name == "advantage_per")
    elif name.startswith("repo"):
        assert rows[0]["replay/added_rows"] == 0, "what a step samples is not stored yet"
        assert any(row["replay/added_whole"] > 0 and row["replay/age_mean"] > 0 for row in rows)
        assert rows[-1]["replay/trajectories"] <= 4 * 12
        assert all(row["cost/generated_tokens"] == sum_of_tokens(rows[: i + 1]) for i, row in enumerate(rows))
    assert any(row.get("replay/injected", 0) > 0 for row in rows) == (name == "arpo")


@pytest.mark.slow
def test_the_recipe_of_su01_trains_and_does_what_it_says(warm_model, tmp_path):
    """K = 4 here: retirement from 3 of 4 on."""
    rows = go(warm_model, tmp_path, "recipes/su01", "ModularChains.count = 60")
    assert len(rows) == STEPS
    assert any(row["replay/actual_share"] > 0 for row in rows)
    assert any(row["rollout/rounds"] > 1 for row in rows)
    assert all(row["replay/actual_share"] <= 0.25 and row["policy/approx_kl"] > 0 for row in rows)
    assert rows[-1]["replay/retired"] > 0
    folder = tmp_path / f"checkpoint-{STEPS}" / "replay"
    stored = pq.read_table(folder / "trajectories.parquet").to_pydict()
    assert len(stored["question_id"]) > 4
    groups = list(zip(stored["question_id"], stored["step"], strict=True))
    assert len(set(groups)) == len(groups), "no group has given two"
    records = pq.read_table(folder / "questions.parquet").to_pydict()
    accuracies = zip(records["accuracy_numerator"], records["accuracy_denominator"], strict=True)
    assert max(n / d for n, d in accuracies if n is not None) < 0.625
