"""gin: every file loads, says what it says, combines in any order, and a wrong line is named."""

from __future__ import annotations

import itertools
import pickle
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.config import gin_files
from exgrpo_orlhf.replay.store_rule import AboveMean

GIN = ROOT / "gin"
ALL = sorted(str(path.relative_to(GIN)) for path in GIN.rglob("*.gin"))
ABLATIONS = [name for name in ALL if name.startswith(("ablation_", "ablations/"))]
LAYOUTS = [name for name in ALL if name.startswith(("engines/", "models/", "evaluation/", "recipes/lora.gin"))]
# What a file leaves to the user, who has to say it.
LEFT_OPEN = {
    "paper/openr1": ["PretrainedModel.path = 'some/model'"],
    "baselines/luffy": ["Work.experience = 'experts.jsonl'"],
    "baselines/sft": [
        *("SupervisedModel.model = @PretrainedModel()", "PretrainedModel.path = 'some/model'"),
        *("SupervisedModel.examples = @ModularChains()", "QuestionFile.path = 'questions.parquet'"),
    ],
    "recipes/code": ["PretrainedModel.path = 'some/model'", "QuestionFile.path = 'tasks.jsonl'"],
    "baselines/rlep": ["Work.experience = 'run/checkpoint-200/replay'"],
    "baselines/prefix_rl": ["Work.experience = 'run/checkpoint-200/replay'"],
}


# What an ablation states for a file of gin/paper/ before it; base.gin has it too.
BEHIND_THE_PAPERS = {"ablations/in_place.gin": "ReplayBuffer.counts_stored"}
VARIANTS = {variant.__name__ for variant in config.build.VARIANTS}  # those that are not bound have no settings


def left_open(name: str) -> list[str]:
    return [b for prefix, open_ones in LEFT_OPEN.items() if name.startswith(prefix) for b in open_ones]


def load(name: str, *more: str):
    files = ["base.gin", name] if name in LAYOUTS or name == "paper/openr1.gin" else [name]
    return config.load(files, [*left_open(name), *more])


def included(name: str) -> str:
    """By its second line, the first being what it is for."""
    return re.findall(r"^include '(.+)'", (GIN / name).read_text(), re.M)[0]


@cache
def stated(name: str) -> dict[str, str]:
    """The bindings in the file's own text, macros aside, written as params has them."""
    statements = gin_files.statements((GIN / name).read_text(), name, config.build._NAMES)
    bindings = [s for s in statements if getattr(s, "arg_name", None)]
    return {f"{s.scope}/{s.selector}.{s.arg_name}".removeprefix("/"): repr(s.value) for s in bindings}


@pytest.mark.parametrize("name", ALL)
def test_every_gin_file_builds_an_experiment_with_what_it_states(name):
    """Apart from macros, and from base.gin, which toy.gin fills in where nothing else does."""
    experiment = load(name)
    assert experiment.params["train.group_size"]
    own = {key: value for key, value in stated(name).items() if "%" not in value and key[:6] != "Suite."}
    assert name == "base.gin" or {key: experiment.params[key] for key in own} == own
    assert len(experiment.config_hash) == 16


def test_base_does_not_repeat_a_default_of_a_class():
    defaults = config.all_settings()
    same = {key: value for key, value in stated("base.gin").items() if defaults[key] == value}
    by_reference = {"ReplayMixer.injection", "ReplayMixer.store_rule", "Prefix.share"}  # to be bound themselves
    assert same.keys() == by_reference


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_differs_from_what_it_includes_in_exactly_what_it_states(name):
    base, ablation = load(included(name)).params, load(name).params
    unread = config.all_settings()  # until it is bound, a variant's settings are in no run
    changed = {key: ablation[key] for key in ablation if ablation[key] != base.get(key, unread.get(key))}
    assert {key.partition(".")[0] for key in set(base) ^ set(ablation)} <= VARIANTS
    assert changed == {key: value for key, value in stated(name).items() if key != BEHIND_THE_PAPERS.get(name)}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_one_include_one_hypothesis_and_at_most_three_bindings(name):
    lines = [line for line in (GIN / name).read_text().split("\n") if line]
    assert lines[0].startswith("# Hypothesis: ")
    assert lines[1] in ("include 'base.gin'", "include 'recipes/prefixes.gin'")
    assert 1 <= len(lines[2:]) <= 3
    assert not any("max_bytes" in line for line in lines), "an ablation is for runs of any size"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_includes_at_most_what_all_layouts_of_its_engine_have(name):
    assert {*re.findall(r"^include '(.+)'", (GIN / name).read_text(), re.M)} <= {"engines/openrlhf.gin"}


def test_including_base_a_second_time_does_not_undo_an_ablation():
    together = config.load(["ablation_no_entropy.gin", "ablations/no_difficulty.gin", "base.gin"])
    assert (together.selector.by, together.mixer.sampler.method) == ("random", "uniform")


@pytest.mark.parametrize(("ablation", "layout"), list(itertools.product(ABLATIONS, LAYOUTS)))
def test_ablation_and_layout_keep_their_bindings_in_both_orders(ablation, layout):
    """Although only the ablation includes base.gin, which binds the layout's settings too."""
    experiments = [config.load(files, left_open(layout)) for files in ([ablation, layout], [layout, ablation])]
    for experiment in experiments:
        for key, value in {**stated(ablation), **stated(layout)}.items():
            assert experiment.params[key] == value or "%" in value
    assert experiments[0].params == experiments[1].params
    assert experiments[0].config_hash == experiments[1].config_hash


def test_the_toy_stands_in_only_where_nothing_binds_a_model_or_questions(tmp_path):
    assert config.load(["base.gin"]).params == config.load(["toy.gin"]).params
    own = tmp_path / "own.gin"
    own.write_text("include 'base.gin'\nPretrainedModel.path = 'some/model'\n")
    for files, more in (
        [["base.gin"], ["PretrainedModel.path = 'some/model'"]],
        [["ablation_no_entropy.gin"], ["Work.model = @PretrainedModel()", "PretrainedModel.path = 'some/model'"]],
        [[own], []],
    ):
        with pytest.raises(config.ConfigError, match=r"^QuestionFile\.path must be bound"):
            config.load(files, more)
        experiment = config.load(files, [*more, "QuestionFile.path = 'questions.parquet'"])
        assert (experiment.optimizer.learning_rate, experiment.verifier.kind) == (1e-6, "math")
        assert experiment.sampling.max_response_tokens == 8192
    with pytest.raises(config.ConfigError, match=r"^PretrainedModel\.path must be bound"):
        config.load(["base.gin"], ["QuestionFile.path = 'questions.parquet'"])


def test_among_named_files_the_later_wins_and_set_wins_over_all(tmp_path):
    a, b = str(tmp_path / "a.gin"), str(tmp_path / "b.gin")
    Path(a).write_text("include 'base.gin'\nReplayMixer.rho = 0.1\nTrajectorySelector.prefer = 'highest'\n")
    Path(b).write_text("include 'base.gin'\nReplayMixer.rho = 0.2\n")
    assert config.load([a, b]).params["ReplayMixer.rho"] == "0.2"
    assert config.load([b, a]).params["ReplayMixer.rho"] == "0.1"
    both = config.load([a, b], ["ReplayMixer.rho = 0.3", "ReplayMixer.rho = 0.4"])
    assert both.params["ReplayMixer.rho"] == "0.4"
    assert both.selector.prefer == "highest"


def test_a_file_that_is_named_last_wins_over_one_that_includes_it(tmp_path, caplog):
    """Also where a warning advises that. What lies between them stays behind it if it is named first."""
    for name, include, binding in (
        *(("inner", "base", "train.steps = 5"), ("between", "TMP/inner", "train.steps = 6")),
        ("outer", "TMP/between", "PretrainedModel.path = 'm'\nQuestionFile.path = 'q.csv'\ntrain.steps = 7"),
    ):
        text = f"include '{include.replace('TMP', str(tmp_path))}.gin'\n{binding}\n"
        (tmp_path / f"{name}.gin").write_text(text)
    steps = lambda *names: config.load([tmp_path / f"{name}.gin" for name in names]).settings.steps
    assert (steps("inner", "outer"), steps("between", "outer"), steps("inner", "between", "outer")) == (7, 7, 7)
    earlier = re.search(r"; name (\S+)/inner.gin last if that is meant", caplog.text)
    assert earlier, caplog.text
    assert (steps("outer", "inner"), steps("outer", "between"), steps("between", "outer", "inner")) == (5, 6, 5)
    base = config.load([tmp_path / "outer.gin", "base.gin"])
    assert base.settings.steps == 7


def test_an_include_is_found_beside_the_file_that_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "inner.gin").write_text("include 'base.gin'\nReplayMixer.rho = 0.25\n")
    (tmp_path / "mine" / "outer.gin").write_text("include 'inner.gin'\n")
    assert config.load(["mine/outer.gin"]).params["ReplayMixer.rho"] == "0.25"
    (tmp_path / "mine" / "toy.gin").write_text("ReplayMixer.rho = 0.1\n")
    (tmp_path / "mine" / "outer.gin").write_text("include 'toy.gin'\n")
    assert config.load(["mine/outer.gin"]).params["ReplayMixer.rho"] == "0.5", "the project's come first"
    (tmp_path / "mine" / "inner.gin").unlink()
    (tmp_path / "mine" / "outer.gin").write_text("include 'inner.gin'\n")
    with pytest.raises(config.ConfigError, match=rf"inner\.gin'.* \(it is not at .*, {tmp_path}/mine/inner\.gin\)"):
        config.load(["mine/outer.gin"])


def test_a_file_that_leaves_to_the_user_what_the_users_own_has_bound_is_named_and_the_other_order_is_right(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("PretrainedModel.path = 'model'\nQuestionFile.path = 'tasks.jsonl'\n")
    said = (
        "QuestionFile.path must be bound: add it to a gin file, or give it with --set (gin/recipes/code.gin, line 5, "
        f"takes back 'tasks.jsonl' of {mine}, line 2: name that file after this one)"
    )
    with pytest.raises(config.ConfigError, match=f"^{re.escape(said)}$"):
        config.load([mine, "recipes/code.gin"])
    assert config.load(["recipes/code.gin", mine]).questions.path == "tasks.jsonl"
    with pytest.raises(config.ConfigError, match=r"or give it with --set$"):
        config.load(["recipes/code.gin"])


@pytest.mark.parametrize("name", ["luffy", "rlep", "prefix_rl"])
def test_what_a_baseline_begins_with_may_be_bound_in_a_file_before_it(name, tmp_path):
    mine = tmp_path / "mine.gin"
    experience = "experts.jsonl" if name == "luffy" else "run/checkpoint-200"
    mine.write_text(f"Work.experience = {experience!r}\n")
    assert config.load([mine, f"baselines/{name}.gin"]).experience == experience


LATE, ON_POLICY, NO_ENTROPY = "recipes/late_injection.gin", "baselines/on_policy.gin", "ablation_no_entropy.gin"
NOT_ASKED = "TrajectorySelector.by = 'random' has no effect (gin/ablation_no_entropy.gin, line 4)"
NEVER_COLLECTS = "with ReplayMixer.rho = 0 and ReplayMixer.injection = @Beside() a run never asks RetirementPolicy"
TWICE = "ablations/twice_in_a_row.gin"
NO_EFFECT = [  # files, bindings, what is said of each that has none
    ([LATE, NO_ENTROPY], ["ReplayMixer.injection = @LateInjection()"], [NOT_ASKED]),
    ([LATE, NO_ENTROPY], ["LateInjection.choice = 'selected'"], []),
    ([NO_ENTROPY, ON_POLICY], ["train.seed = 1"], [NOT_ASKED]),
    ([NO_ENTROPY], ["ReplayMixer.rho = 0.25"], []),
    (["smollm2.gin"], ["TrajectorySelector.by = 'entropy'"], []),  # as base.gin has it
    (["smollm2.gin"], ["QuestionSampler.mu = 0.25"], ["QuestionSampler.mu = 0.25 has no effect (--set"]),
    ([ON_POLICY], ["RetirementPolicy.leaves_fresh = True"], [NEVER_COLLECTS]),
    ([LATE], ["RetirementPolicy.leaves_fresh = True"], []),
    ([ON_POLICY], ["ReplayBuffer.counts_stored = True"], []),  # recipes/paper.gin, whose control has no replay
    ([ON_POLICY], ["RetirementPolicy.at_accuracy = 1.0"], []),  # the default
    (["base.gin"], ["Verifier.tries = 5"], ["Verifier.tries has no effect (--set 'Verifier.tries = 5'): url is None"]),
    (["base.gin"], ["Verifier.tries = 3"], []),  # the default, which a run's config.gin binds
    ([TWICE], ["RetirementPolicy.at_accuracy = None"], ["times_in_a_row has no effect (gin/abl"]),
    ([TWICE], ["RetirementPolicy.at_accuracy = 0.9"], []),
    (["base.gin"], ["RetirementPolicy.revisited_share = 0.5"], ["revisited_share has no effect"]),
    (["ablations/small_groups.gin"], ["ReplayMixer.injection = @InPlace()"],
     ["Beside.rollouts = 1 has no effect (gin/abl"]),
    (["base.gin", "ablations/in_place.gin"], ["Beside.rollouts = None"], []),  # the default
    (["ablations/one_success.gin"], ["Successes.up_to = 0.5"],
     ["ReplayMixer.injection is @Beside(), .store_rule @One"]),
    (["ablations/in_place.gin"], ["ReplayMixer.rho = 0.0"], ["@InPlace() has no effect (gin/ablations/in_place.gin"]),
    (
        ["toy.gin"],
        ["LoRA.alpha = 64", "LoRA.targets = ('q_proj',)"],
        [f"LoRA.{name} has no effect (--set" for name in ("alpha", "targets")],
    ),
    (["toy.gin"], ["LoRA.alpha = 64", "LoRA.rank = 8"], []),
    (["toy.gin"], ["LoRA.rank = None"], []),
    (["toy.gin"], ["Environment.timeout = 3.0"], ["Environment.timeout has no effect (--set"]),
    (["toy.gin"], ["Reincarnation.after_step = 5", "ConvexKL.fall = 0.2"],
     [f"has no effect (--set '{name}'): no setting refers to @{name.partition('.')[0]}()"
      for name in ("Reincarnation.after_step = 5", "ConvexKL.fall = 0.2")]),
    (["baselines/remix.gin"], ["Reincarnation.after_step = 5", "ConvexKL.fall = 0.2"], []),
    (["toy.gin"], ["Environment.timeout = 3.0", "Environment.path = 'chain_calculator.py'"], []),
    (["toy.gin"], ["Evaluation.temperature = 0.0", "Evaluation.top_p = 0.9"], ["Evaluation.top_p = 0.9 has no effect"]),
    (["toy.gin"], ["Evaluation.temperature = 0.6", "Evaluation.top_p = 0.9"], []),
    (["smollm2.gin"], ["QuestionFile.path = 'mine.jsonl'", "QuestionFile.limit = 9"],
     ["QuestionFile.path (--set \"QuestionFile.path = 'mine.jsonl'\"), QuestionFile.limit (--set 'QuestionFile.limit = "
      "9'): no effect, because nothing that is used refers to @QuestionFile()"]),
    (["toy.gin"], ["val/ModularChains.count = 9"], ["nothing that is used refers to @val/ModularChains()"]),
    (["toy.gin"], ["validation/ModularChains.count = 9", "ModularChains.seed = 3"], []),
    (["toy.gin"], ["Evaluation.temperature = 0.0", "Evaluation.top_p = 1.0"], []),
    (["toy.gin"], ["Sampling.max_response_tokens = 99"],
     ["MixedPolicyLoss.response_length = 64, Sampling.max_response_tokens = 99: MAX_RESPONSE_TOKENS binds both"]),
    (["toy.gin"], ["MAX_RESPONSE_TOKENS = 99"], []),
    (["baselines/grpo.gin"], ["Sampling.max_response_tokens = 99"], []),  # another normaliser
]  # fmt: skip


@pytest.mark.parametrize(("files", "overrides", "said"), NO_EFFECT)
def test_a_binding_that_the_run_never_reads_is_named(files, overrides, said, caplog):
    config.load(files, overrides)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True)), warnings


SPREAD = "ReplayBuffer.difficulty = 'reward_spread'"
LATE_ALONE = ["ReplayMixer.rho = 0.0", "ReplayMixer.injection = @LateInjection()"]


@pytest.mark.parametrize(
    "more", [["ReplayMixer.injection = @InPlace()", SPREAD], [*LATE_ALONE, SPREAD], ["Beside.rollouts = 3"]]
)
def test_what_is_above_the_mean_may_take_the_place_of_what_is_above_that_groups_mean(more):
    experiment = config.load(["base.gin"], ["ReplayMixer.store_rule = @AboveMean()", *more])
    assert experiment.mixer.store_rule == AboveMean()


def test_the_operative_config_of_a_run_gives_the_same_run(tmp_path):
    experiment = config.load(["ablation_no_entropy.gin"], ["ReplayMixer.rho = 0.25"], seed=5)
    (tmp_path / "config.gin").write_text(experiment.config_text)
    again = config.load([tmp_path / "config.gin"])
    assert again.params == experiment.params
    assert again.config_hash == experiment.config_hash


def test_the_hash_changes_with_the_algorithm_and_not_with_length_or_places():
    base = config.load(["base.gin"]).config_hash
    for binding in ("train.steps = 999", "train.keep = 9", "Tracking.experiment = 'other'", "ChainModel.cache = 'x'"):
        assert config.load(["base.gin"], [binding]).config_hash == base, binding
    for binding in ("ReplayMixer.rho = 0.4", "train.seed = 1", "ModularChains.count = 100", "MAX_RESPONSE_TOKENS = 60"):
        assert config.load(["base.gin"], [binding]).config_hash != base, binding


@pytest.mark.parametrize(
    ("binding", "values"),
    [
        ("MAX_RESPONSE_TOKENS = %A", ("60", "61")),
        ("DifficultyBuckets.thresholds = (%A, 0.75)", ("0.25", "0.5")),
        ("ModularChains.operands = (3, %A)", ("4", "5")),
        ("Verifier.rewards = {'exact': %A, 'modular_chain': 1.0}", ("1.0", "2.0")),
    ],
)
def test_a_macro_behind_another_or_inside_a_value_counts_as_what_it_stands_for(binding, values):
    """In the identity of a run, which else would go on with another value unseen."""
    by_macro = [config.load(["toy.gin"], [binding, f"A = {value}"]) for value in values]
    written = [config.load(["toy.gin"], [binding.replace("%A", value)]) for value in values]
    assert [one.config_hash for one in by_macro] == [one.config_hash for one in written]
    assert [one.params for one in by_macro] == [one.params for one in written]
    assert by_macro[0].config_hash != by_macro[1].config_hash


def test_a_spawned_process_gets_the_objects_not_pythons_defaults():
    """gin's bindings do not travel: only what was built from them does."""
    experiment = config.load(["base.gin"], ["ReplayMixer.rho = 0.125", "MixedPolicyLoss.beta = 0.7", "train.seed = 4"])
    script = (
        "import pickle, sys; x = pickle.load(sys.stdin.buffer); "
        "print(float(x.mixer.share.rho), x.loss.beta, x.settings.seed, x.config_hash, x.mixer.rng.random(), "
        "'gin' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=pickle.dumps(experiment), capture_output=True, check=True)
    rho, beta, seed, digest, drawn, gin_imported = done.stdout.decode().split()
    assert (float(rho), float(beta), int(seed), digest) == (0.125, 0.7, 4, experiment.config_hash)
    assert float(drawn) == experiment.mixer.rng.random()
    assert gin_imported == "False"


def test_two_layouts_of_openrlhf_in_one_command_are_refused():
    first, second = "engines/openrlhf_1gpu.gin", "engines/openrlhf_8gpu.gin"
    message = f"{first} and gin/{second} are layouts of OpenRLHF, and a run has one"
    with pytest.raises(config.ConfigError, match=message):
        config.load(["base.gin", first, second])
    config.load(["base.gin", first, first])


def test_only_config_and_gin_files_import_gin():
    importing = re.compile(r"^\s*(import gin\b|from gin\b)", re.MULTILINE)
    folders = ("exgrpo_orlhf", "scripts", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert sorted(path.name for path in files if importing.search(path.read_text())) == ["build.py", "gin_files.py"]


def test_gin_and_datasets_hold_no_code():
    assert not [path for folder in ("gin", "datasets") for path in (ROOT / folder).rglob("*.py")]


BAD = [
    ("ReplayMixr.rho = 0.5", "there is no setting ReplayMixr.rho; nearest: ReplayMixer.rho"),
    *(
        (f"ReplayMixer.{name} = None", rf"ReplayMixer.{name} is now ReplayMixer.{where}")
        for name, where in (
            ("fresh_beside", "injection: @Beside() with Beside.rollouts for a number"),
            ("late_injection", "injection = @LateInjection() with LateInjection.choice"),
            ("store_up_to", "store_rule: @Successes() with Successes.up_to"),
            ("stores", "store_rule: @Successes(), @AboveMean() for 'above_mean'"),
        )
    ),
    ("ReplayMixer.injection = @LateInjection()\nReplayMixer.store_rule = @AllFinished()\nReplayMixer.rho = 0.0",
     "would put"),
    ("train.group_size = 4\nBeside.rollouts = 4",
     "Beside.rollouts must lie in [1, train.group_size − 1] = [1, 3], or be None; got 4"),
    ("ReplayMixer.roh = 0.5", "there is no setting ReplayMixer.roh; nearest: ReplayMixer.rho"),
    ("ReplayMixer.rng = 0.5", "there is no setting ReplayMixer.rng"),
    ("rho = 0.5", "rho = … sets nothing, because no binding refers to %rho; nearest: ReplayMixer.rho"),
    ("MAX_TOKENS = 9", "sets nothing, because no binding refers to %MAX_TOKENS; nearest: MAX_RESPONSE_TOKENS"),
    ("Verifir/kind = 'math'", "sets nothing, because no binding refers to %Verifir/kind"),
    ("ReplayMixer.rho = 1.5", "ReplayMixer.rho must lie in [0, 1], got 1.5"),
    ("ReplayMixer.rho = 'half'", "ReplayMixer.rho takes float, got 'half'"),
    ("ReplayMixer.rho", "expected ':' or '='"),
    ("ReplayMixer.rho = (0.5", "not closed"),
    ("train.steps: 10", "this is YAML, not gin: a binding is written as train.steps = 200"),
    ("Verifier.kind = math", "math is no value; a text needs quotes ('math'), True, False and None a capital"),
    ("Prompts.template = my file.txt", "my file.txt is no value; a text needs quotes ('my file.txt'), True, False"),
    ("MAX_RESPONSE_TOKENS = 0", "got 0 (Sampling.max_response_tokens is %MAX_RESPONSE_TOKENS, bound in "),
    ("ReplayMixer.rho = %NOWHERE", "%NOWHERE is used, but no file gives it a value"),
    ("ReplayMixer.rho = %no/where", "%no/where is used, but no file gives it a value: add no/where"),
    ("train.keep = 0", "train.keep must be at least 1, got 0"),
    ("ReplayMixer.rho = %gin.REQUIRED", "ReplayMixer.rho must be bound"),
    ("DifficultyBuckets.thresholds = ('0.2', 0.7)", "thresholds takes tuple[float, float], got ('0.2', 0.7)"),
    ("Optimizer.betas = ('0.9', 0.999)", "Optimizer.betas takes tuple[float, float], got ('0.9', 0.999)"),
    ("Optimizer.betas = (%W, 0.999)\nW = '0.9'", "Optimizer.betas takes tuple[float, float], got ('0.9', 0.999)"),
    ("QuestionFile.meta = (1, 2)", "QuestionFile.meta takes tuple[str, ...], got (1, 2)"),
    ("ReplayMixer.rho_steps = 0.5", "ReplayMixer.rho_steps takes int"),
    ("Optimizer.passes_per_batch = 0", "Optimizer.passes_per_batch must be at least 1, got 0"),
    ("Optimizer.steps_per_batch = 33", "Optimizer.steps_per_batch = 33 exceeds train.questions_per_step = 32"),
    ("train.group_size = 1", "train.group_size (K) must be at least 2, got 1"),
    ("train.group_size = 8.0", "train.group_size takes int, got 8.0"),
    ("train.steps = -1", "train.steps must be at least 0"),
    ("FreshSampler.by = 'luck'", "FreshSampler.by must be one of 'epoch', 'accuracy'"),
    ("FreshSampler.floor = 0.0", "FreshSampler.floor must be positive"),
    ("FreshSampler.cooldown = 2", "FreshSampler.cooldown belongs to FreshSampler.by = 'accuracy'"),
    ("MixedPolicyLoss.ratio = 'group'", "MixedPolicyLoss.ratio must be one of 'token', 'sequence'"),
    ("Optimizer.schedule = 'cosine'", "Optimizer.schedule = 'cosine' needs Optimizer.decay_steps"),
    ("Optimizer.decay_steps = 7\nOptimizer.schedule = 'linear'\ntrain.steps = 4\nOptimizer.passes_per_batch = 2",
     "Optimizer.decay_steps = 7: after that optimiser step the rate is 0, and train.steps = 4 makes 8"),
    ("Optimizer.decay_steps = 9", "Optimizer.decay_steps = 9 belongs to Optimizer.schedule = 'linear' or 'cosine'"),
    ("Sampling.top_p = 0.9", "there is no setting Sampling.top_p"),
    ("Work.questions = @QuestionFile()", "PretrainedModel.path must be bound"),
    ("Work.questions = @ModularChains\nWork.model = @ChainModel()",
     "Work.questions must be a reference such as @ModularChains() (with its parentheses), got <class"),
    *(
        (f"Work.{name} = {value}", f"Work.{name} must be a reference such as @")
        for name in ("questions", "model", "validation")
        for value in ("'foo/bar'", "None")[: 2 if name == "questions" else 1]
    ),
    ("A = %B\nB = %A\nReplayMixer.rho = %A", "a reference or a macro refers to itself"),
    ("Work.questions = @Questions()", "No configurable matching reference '@Questions()'"),
    ("train.group_size = 100000000", "train.questions_per_step · train.group_size = 3,200,000,000 rows in a batch"),
    ("import os", "only bindings"),
    ("DynamicSampling.max_rounds = -1", "DynamicSampling.max_rounds must be at least 0"),
    ("DynamicSampling.max_rounds = 0\nDynamicSampling.max_reward = 0.5",
     "leave no group out with DynamicSampling.max_rounds = 0"),
    ("DynamicSampling.max_reward = 0.5\nDynamicSampling.min_reward = 0.6\nDynamicSampling.max_rounds = 1",
     "min_reward must be at most DynamicSampling.max_reward, got 0.6 and 0.5"),
    ("DynamicSampling.masks = True", "masks needs DynamicSampling.min_reward or max_reward"),
    ("DynamicSampling.masks = True\nDynamicSampling.min_reward = 0.5\nDynamicSampling.max_rounds = 2",
     "DynamicSampling.max_rounds = 0"),
    ("ReplayBuffer.max_age = 1\ntrain.generate_ahead = True",
     "ReplayBuffer.max_age = 1 with train.generate_ahead replays nothing"),
    ("ReplayMixer.injection = @InPlace()\nReplayBuffer.counts_stored = True",
     "injection = @InPlace() puts it in the place of one, which counts already; it must be False"),
    ("ReplayMixer.collects = False", "ReplayMixer.collects = False leaves nothing to replay but Work.experience"),
    ("ReplayMixer.rho = 0.0\nWork.experience = 'a.jsonl'",
     "ReplayMixer.rho = 0 with ReplayMixer.injection = @Beside() never replays Work.experience"),
    ("ReplayMixer.collects = False\nReplayBuffer.max_age = 2\nWork.experience = 'a.jsonl'",
     "ReplayBuffer.max_age = 2 would empty"),
    *(
        (
            f"ReplayMixer.store_rule = @AboveMean()\n{more}",
            "ReplayMixer.store_rule = @AboveMean() stores failures too, which",
        )
        for more in (
            *(f"ReplayMixer.injection = @{name}()" for name in ("InPlace", "UnlessSolved")),
            "ReplayMixer.rho = 0.0\nReplayMixer.injection = @LateInjection()",
            "ReplayBuffer.counts_stored = True",
            "ReplayBuffer.counts_stored = True\nReplayBuffer.difficulty = 'reward_spread'",
        )
    ),
    *(
        (
            f"ReplayMixer.store_rule = @AllFinished()\n{more}",
            "ReplayMixer.store_rule = @AllFinished() needs ReplayBuffer.per_question or .max_bytes",
        )
        for more in (
            "ReplayBuffer.per_question = None",
            *(
                f"ReplayBuffer.max_bytes = 1000000\nReplayBuffer.{other}"
                for other in ("counts_stored = True", "difficulty = 'reward_spread'")
            ),
        )
    ),
    ("Verifier.format = 'boxed'\nEnvironment.path = 'x.py'",
     "Verifier.format, .rewards and .function need Environment.reward = 'verifier'"),
    ("Environment.success_at = 0.5\nEnvironment.reward = 'verifier'\nEnvironment.path = 'x.py'",
     "Environment.success_at = 0.5 is read with Environment.reward = 'environment' alone"),
    ("Work.experience = 'experts.jsonl'\nEnvironment.path = 'x.py'",
     "a text does not say which of its tokens are an environment's"),
    ("Evaluation.top_p = 0.0", "Evaluation.top_p must lie in (0, 1]"),
    ("Evaluation.disjoint_from = 'papers'", "there is no suite 'papers'; did you mean paper"),
    ("QuestionSampler.partition = 'level'\nReplayBuffer.difficulty = 'reward_spread'",
     "'reward_spread' has levels of its own"),
    *((f"train.generate_ahead = {value}", f"train.generate_ahead takes bool, got {value}") for value in (1, 2, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("binding", "message"), BAD)
def test_a_wrong_binding_is_refused_by_its_name_and_in_a_file_with_its_line(binding, message, tmp_path):
    with pytest.raises(config.ConfigError, match=re.escape(message)):
        config.load(["base.gin"], binding.split("\n"))
    (tmp_path / "mine.gin").write_text(f"include 'base.gin'\n\n# a comment\n{binding}\n")
    with pytest.raises(config.ConfigError) as caught:
        config.load([tmp_path / "mine.gin"])
    assert message in str(caught.value)
    nowhere = ("must be bound", "refers to itself", "no file gives it a value", "there is no suite")  # what is missing
    assert "mine.gin, line 4" in str(caught.value) or any(text in str(caught.value) for text in nowhere)


TEXTS = [
    ("Prompts.template", "chat"),
    *(("Work.experience", text) for text in ("runs/a-1/checkpoint-2", "~/it's=mine.jsonl", "~/experts.jsonl")),
    ("Tracking.experiment", "my runs"),
]


@pytest.mark.parametrize(("binding", "value"), TEXTS)
def test_a_text_without_quotes_is_refused_with_a_binding_that_works_also_behind_a_shell(binding, value):
    with pytest.raises(config.ConfigError) as caught:
        config.load("toy.gin", f"{binding}={value}")
    command = str(caught.value).partition("; in a shell ")[2].rpartition(": ")[0]
    option, override = shlex.split(command)
    assert option == "--set"
    assert config.load("toy.gin", override).params[binding] == repr(value)


def test_one_file_and_one_override_need_no_list():
    one, listed = config.load("toy.gin", "train.seed = 3"), config.load(["toy.gin"], ["train.seed = 3"])
    assert one.config_text == listed.config_text == config.load(Path("toy.gin"), ("train.seed = 3",)).config_text


def test_a_wrong_seed_of_the_command_line_is_not_blamed_on_a_file():
    with pytest.raises(config.ConfigError, match=r"at least 0, got -1 \(train.seed is bound in --seed\)"):
        config.load(["base.gin"], seed=-1)


def test_a_refusal_names_where_its_setting_is_bound_in_every_scope_and_no_other_setting(tmp_path):
    (tmp_path / "mine.gin").write_text(
        "include 'toy.gin'\nModularChains.count = 24\nvalidation/ModularChains.count = 10000000000\n"
        "ReplayMixer.rho = 0.5\nReplayMixer.rho_end = 0.3\n"
    )
    at = rf"{tmp_path}/mine\.gin, line"
    places = rf"\(ModularChains\.count is bound in {at} 2; validation/ModularChains\.count is bound in {at} 3\)$"
    with pytest.raises(config.ConfigError, match=rf"^ModularChains\.count must ask for at most .* {places}"):
        config.load([tmp_path / "mine.gin"], ["ReplayMixer.rho_steps = 5"])
    with pytest.raises(config.ConfigError, match=rf"got 0\.3 and None \(ReplayMixer\.rho_end is bound in {at} 5\)$"):
        config.load([tmp_path / "mine.gin"], ["validation/ModularChains.count = 10"])


def test_a_missing_file_names_the_nearest():
    with pytest.raises(config.ConfigError, match=r"no gin file 'gin/quikstart.gin'; did you mean quickstart.gin"):
        config.load(["gin/quikstart.gin"])


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "mine.gin").write_bytes("include 'base.gin'\nReplayMixer.rho = 0.25  # ρ\n".encode("utf-8-sig"))
    assert config.load([tmp_path / "mine.gin"]).params["ReplayMixer.rho"] == "0.25"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("include 'base.gin'\n# größer\n", r"not UTF-8; save the file as UTF-8"),
        ("\ninclude 'bse.gin'\n", r"there is no gin file 'bse.gin'"),
        # An include there would silently undo what stands above it.
        ("ReplayMixer.rho = 0.1\ninclude 'base.gin'\n", r"an include must stand before the bindings"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(content, message, tmp_path):
    (tmp_path / "mine.gin").write_bytes(content.encode("latin-1"))
    with pytest.raises(config.ConfigError, match=rf"mine\.gin, line 2: {message}"):
        config.load([tmp_path / "mine.gin"])


def test_files_and_includes_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.gin").write_text("ReplayMixer.rho = 2.0\n")  # a file of that name elsewhere is not the one included
    expected = config.load(["quickstart.gin"]).config_hash
    for file in ("gin/quickstart.gin", GIN / "quickstart.gin", "quickstart.gin"):
        assert config.load([file]).config_hash == expected
    assert config.load(["ablation_no_entropy.gin"]).params["ReplayMixer.rho"] == "0.5"
