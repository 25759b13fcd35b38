"""Two-step runs which together take every value that names a kind, and the registry of those values."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import torch
from engine_builders import ADDING
from eval_builders import byte_model
from run_builders import ROOT, small_bindings
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf import config
from exgrpo_orlhf.config import build
from exgrpo_orlhf.io.entry_points import entry_points_of
from exgrpo_orlhf.io.weights import save as save_model
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.templates import TEMPLATES
from exgrpo_orlhf.settings import LocalEngine
from exgrpo_orlhf.study.suite import of_suite
from exgrpo_orlhf.testbed.modular_chains import PRESETS

GIN = ROOT / "gin"
# Kinds that a text names. The others are annotated: Literal and bool.
NAMES = {
    "Prompts.template": tuple(TEMPLATES),
    "ChainModel.preset": tuple(PRESETS),
    "Environment.path": ("chain_calculator.py", "word_calculator.py"),
    "LocalEngine.device": ("auto", "cpu", "cuda"),
    "LoRA.targets": ("all-linear",),
    "Verifier.kind": tuple(entry_points_of("exgrpo_orlhf.graders")),
}
# What no run on a CPU can have, and why.
WITHOUT_A_RUN = {
    ("LocalEngine.device", "cuda"): "needs a GPU",
    ("OpenRLHF.cpu_bench", False): "needs a GPU",
    ("Suite", None): "of a study, not of a run: scripts/ablate.py reads it",
}
# Whole answers, one token each: a model that draws them at random is right now and then.
ANSWERS = ("\\boxed{4}", "\\boxed{A}", "<think>x</think><answer>4</answer>", "```python\nprint(4)\n```")
REWARD = """import zlib


def reward_func(queries, prompts, labels):
    return {"rewards": [float(zlib.crc32(query.encode()) % 2) for query in queries]}
"""

STYLES = """
def ranked(completions, **kwargs):
    lengths = sorted(map(len, completions))
    return [1.0 - lengths.index(len(text)) / len(completions) for text in completions]


def scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(len(text) % 2), "words": len(text)} for text in solution_strs]
"""


FEW = ("train.steps = 2", "ModularChains.count = 8", "validation/ModularChains.count = 4", "Verifier.workers = 1")


STORED_GROUP = (*ADDING, "ReplayMixer.rho = 0")
REINCARNATED = (
    *("MixedPolicyLoss.clip_around = 'policy'", "MixedPolicyLoss.kl_coef = 0.01"),
    *("MixedPolicyLoss.kl_convex = @ConvexKL()", "ConvexKL.constant_steps = 0", "ConvexKL.every = 1"),
    *("ReplayMixer.reincarnation = @Reincarnation()", "Optimizer.passes_per_batch = 2"),
)


def by_chance(folder: Path) -> list[str]:
    return ["Verifier.kind = 'function'", f"Verifier.function = '{folder}/reward.py'"]


def values_of(hint: Any) -> tuple[Any, ...]:
    """The values of an annotation that names kinds."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if hint is bool:
        return (False, True)
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    return tuple(value for part in parts for value in values_of(part))


def kinds() -> set[tuple[str, Any]]:
    """(setting, value) of all that gin binds, and (class, None) of every class."""
    pairs = {(name, None) for name in build._TARGETS} | {(name, v) for name, values in NAMES.items() for v in values}
    for name, target in build._TARGETS.items():
        hints = typing.get_type_hints(inspect.getattr_static(target, "__init__"))
        for parameter in set(inspect.signature(target).parameters) - set(build._SUPPLIED.get(name, ())):
            pairs |= {(f"{name}.{parameter}", value) for value in values_of(hints.get(parameter))}
    return pairs


def kinds_in(files: tuple[str, ...], bindings: list[str]) -> set[tuple[str, Any]]:
    """Those of an experiment, defaults included."""
    pairs = set()
    for name, text in config.load(files, bindings).params.items():
        setting = name.rpartition("/")[2]  # without its scope
        pairs.add((setting.partition(".")[0], None))
        pairs |= {(referred, None) for referred in re.findall(r"@(?:\w+/)*(\w+)\(\)", text)}  # one without settings too
        try:
            pairs.add((setting, build.ast.literal_eval(text)))
        except (ValueError, SyntaxError, TypeError):  # a reference; a dict
            continue
    return pairs


def guesser(folder: Path) -> Path:
    """A model of bytes that writes one of ANSWERS, another one, or its end token, at random."""
    byte_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([*ANSWERS, "<|im_start|>", "<|im_end|>"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    weight = model.get_input_embeddings().weight.data
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(weight))
    weight[:, 0] = 10.0  # so that every hidden state is nearly the same
    model.lm_head.weight.data[:, 0] = -2.0
    model.lm_head.weight.data[[tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ANSWERS))], 0] = 2.0
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_files(folder: Path) -> None:
    """Questions in files, worked answers to those that are trained on, and a reward function."""
    tests = json.dumps({"inputs": ["", " "], "outputs": ["4", "4"]})
    (folder / "set").mkdir()
    for name, prompt, gold in (
        ("sums", "2 + 2 = ?", "4"),
        ("choices", "2 + 2 = ?", "A"),
        ("boxes", "2 + 2 = ?", ANSWERS[0]),
        ("set/more", "1 + 3 = ?", "4"),
    ):
        about = {"gold": gold, "options": ["4", "5"], "tests": tests}
        lines = [json.dumps({"prompt": f"{prompt} ({i})", **about}) + "\n" for i in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    path = str(folder / "sums.jsonl")
    trained = QuestionFile(path=path, answer="gold", source=None, held_out=4, part="train").load()
    lines = [json.dumps({"prompt": question.prompt, "response": ANSWERS[0]}) + "\n" for question in trained]
    (folder / "worked.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD)
    (folder / "styles.py").write_text(STYLES)


# What OpenRLHF's own processes read, or do in another way than the local engine.
OF_OPENRLHF = ("train.", "Optimizer.", "LoRA.", "MixedPolicyLoss.", "Environment.reward", "OpenRLHF")
ON_OPENRLHF = "OpenRLHF: "  # the beginning of these runs' names; each takes a minute


def files_of(name: str) -> tuple[str, ...]:
    """The gin files of a run."""
    more = {"code": ("recipes/code.gin",)}
    return ("toy.gin", "engines/openrlhf_cpu.gin") if name.startswith(ON_OPENRLHF) else ("toy.gin", *more.get(name, ()))


def runs(chain: Path, text: Path, folder: Path, url: str) -> dict[str, list[str]]:
    """Bindings by name. chain: a chain model that is right now and then; text: `guesser`; folder: of `write_files`;
    url: of a reward server"""

    def small(model: Path, *more: str) -> list[str]:
        return small_bindings(model, *FEW, *more)

    def chains(*more: str) -> list[str]:
        return small(chain, *by_chance(folder), *more)

    def texts(file: str, kind: str, *more: str) -> list[str]:
        about = ["answer = 'gold'", "source = None", "meta = ('options', 'tests')", "held_out = 4"]
        about += [f"path = '{folder}/{file}.jsonl'"]
        return small(
            text,
            "Work.questions = @QuestionFile()",
            "Work.validation = @validation/QuestionFile()",
            *(f"QuestionFile.{each}" for each in about),
            "QuestionFile.part = 'train'",
            "validation/QuestionFile.part = 'validation'",
            f"Verifier.kind = {kind!r}",
            "Prompts.max_tokens = 600",
            "MAX_RESPONSE_TOKENS = 8",
            *more,
        )

    hub = [f"QuestionHub.{each}" for each in (f"id = '{folder}/set'", "answer = 'gold'", "meta = ('options',)")]
    supervised = [
        "Work.model = @SupervisedModel()",
        "SupervisedModel.model = @PretrainedModel()",
        "SupervisedModel.examples = @SupervisedFile()",
        f"SupervisedFile.path = '{folder}/worked.jsonl'",
        "SupervisedModel.prompts = @Prompts()",
        "SupervisedModel.sampling = @Sampling()",
        "SupervisedModel.machine = @LocalEngine()",
        f"SupervisedModel.cache = '{folder}/cache'",
        "SupervisedModel.epochs = 1",
    ]
    made = [f"ChainModel.{each}" for each in (f"cache = '{folder}/cache'", "steps = 1", "width = 32", "layers = 1")]
    made += ["Work.model = @ChainModel()"]
    calculator = ["Environment.path = 'chain_calculator.py'", "Environment.stop = ('=',)"]
    gym = ["tasks = 'spell_backward'", "settings = {'min_word_len': 4, 'max_word_len': 9}"]
    samplers = values_of(typing.get_type_hints(LocalEngine).get("sampler"))
    return {
        **{f"sampler {name}": chains(f"LocalEngine.sampler = {name!r}") for name in samplers if name != "auto"},
        # The algorithm, on questions that half of the responses solve
        "plain": chains("Verifier.tool = 'openrlhf'", "LocalEngine.device = 'auto'"),
        "http": small(chain, "Verifier.kind = 'http'", f"Verifier.url = ({url!r}, {url!r})"),
        "ahead": chains(
            "train.generate_ahead = True", "train.verify_checkpoint = False", "Optimizer.schedule = 'linear'",
            "Optimizer.decay_steps = 9", "MixedPolicyLoss.normalizer = 'tokens'",
            "ReplayMixer.start_at_accuracy = 0.0",
            "ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.per_question = 4",
            "TrajectorySelector.by = 'priority'",
            "TrajectorySelector.decay_steps = 5.0",
        ),
        "sequences": chains(
            "MixedPolicyLoss.ratio = 'sequence'", "MixedPolicyLoss.normalizer = 'sequences'",
            "GroupAdvantages.scale_by_std = True", "GroupAdvantages.std_over = 'batch'",
            "Optimizer.schedule = 'cosine'", "Optimizer.decay_steps = 9", "TrajectorySelector.by = 'length'",
            "TrajectorySelector.prefer = 'highest'", "QuestionSampler.partition = 'level'",
            "FreshSampler.by = 'accuracy'", "RetirementPolicy.leaves_fresh = True",
            "ReplayBuffer.counts_stored = True",
        ),
        "weights": chains(
            "MixedPolicyLoss.shaping = False", "MixedPolicyLoss.importance_weights = False",
            "GroupAdvantages.baseline = 'leave_one_out'", "TrajectorySelector.by = 'recency'",
            "QuestionSampler.method = 'uniform'", "ReplayMixer.injection = @InPlace()",
            "ReplayBuffer.replays_unsolved = True",
            "LocalEngine.dtype = 'bfloat16'", "LocalEngine.gradient_checkpointing = True",
        ),
        "spread": chains(
            "ReplayBuffer.difficulty = 'reward_spread'", "ReplayMixer.store_rule = @AboveMean()",
            "TrajectorySelector.by = 'random'", "LocalEngine.dtype = 'float32'", "LoRA.rank = 4",
            "LoRA.targets = 'all-linear'",
        ),
        "revisits": chains(
            "ReplayMixer.injection = @UnlessSolved()", "UnlessSolved.late = @LateInjection()",
            "LateInjection.choice = 'selected'",
            "ReplayMixer.store_rule = @OneSuccess()", "DynamicSampling.masks = True",
            "DynamicSampling.min_reward = 0.1", "Tracking.enabled = True", "Tracking.system_metrics = True",
            f"Tracking.uri = 'sqlite:///{folder}/mlflow.db'",
        ),
        "continued": chains(
            "ReplayMixer.injection = @Prefix()", "Prefix.of = 'both'", "Prefix.share = @AdaptiveShare()",
            "Prefix.cut = 'line'", "ReplayBuffer.replays_unsolved = True",
        ),
        "continued, one share": chains(
            "ReplayMixer.injection = @Prefix()", "Prefix.share = @AdaptiveShare()", "AdaptiveShare.shared = True",
            "ReplayBuffer.replays_unsolved = True",
        ),
        "continued failures": chains(
            "ReplayMixer.injection = @Prefix()", "Prefix.of = 'failures'", "Prefix.share = @UniformShare()",
            "Prefix.choice = 'selected'", "Prefix.cut = 'sentence'",
        ),
        "continued episodes": small(
            chain, *calculator, "ReplayMixer.injection = @Prefix()", "Prefix.share = @FixedShare()",
            "FixedShare.value = 0.9", "ReplayBuffer.replays_unsolved = True",
        ),
        **{
            f"stored group, {choice}": chains(*STORED_GROUP, f"StoredGroup.choice = {choice!r}", *more)
            for choice, more in (
                ("all", ("MixedPolicyLoss.divisors = 'together'", "ReplayBuffer.per_question = 4")),
                ("best", ("ReplayMixer.rho = 0.5", "ReplayBuffer.replays_unsolved = True")),
                ("spread", ("MixedPolicyLoss.normalizer = 'tokens'",)),
            )
        },
        **{
            f"stored rows, {by}": chains(
                *STORED_GROUP, "ReplayMixer.injection = @StoredRows()", "ReplayMixer.store_rule = @WithSignal()",
                "StoredRows.rows = 2", f"StoredRows.by = {by!r}", "MixedPolicyLoss.normalizer = 'tokens'",
            )
            for by in ("advantage", "reward")
        },
        **{
            f"mixed policies, {name}": chains(
                *STORED_GROUP, "ReplayMixer.injection = @StoredRows()", "StoredRows.share = 0.4", "StoredRows.rows = 4",
                *REINCARNATED, *more,
            )
            for name, more in (("weights", ("Reincarnation.after_step = 1",)),
                               ("adapter", ("Reincarnation.at_accuracy = 0.0", "LoRA.rank = 4")))
        },
        "steps": small(
            chain, "Verifier.kind = 'chain_steps'", "ReplayMixer.rho = 0", "ReplayMixer.injection = @LateInjection()",
            "MixedPolicyLoss.clips_mixed = False",
        ),
        "several rewards": small(
            chain, f"Verifier.rewards = {{'modular_chain': 1.0, '{folder}/styles.py:ranked': 0.5}}",
            "Verifier.tool = 'trl'", "Verifier.gets = 'group'",
            "GroupAdvantages.scale_by_std = True", "GroupAdvantages.of_each_reward = True",
        ),
        "verl": small(
            chain, "Verifier.kind = 'function'", f"Verifier.function = '{folder}/styles.py:scores'",
            "Verifier.tool = 'verl'", "Verifier.gets = 'batch'",
        ),
        # Models that are made, and episodes
        **{preset: small(chain, *made, f"ChainModel.preset = {preset!r}") for preset in PRESETS},
        "episodes": small(chain, *calculator),
        "whole episodes": small(chain, *calculator, "Environment.reward = 'verifier_with_observations'"),
        # Text
        "exact": texts("boxes", "exact"),
        "choice": texts("choices", "choice", "Prompts.template = 'chat'"),
        "math": texts("sums", "math", "Prompts.template = 'qwen_math'", "Verifier.format = 'boxed'"),
        "math_verify": texts("sums", "math_verify", "Prompts.template = 'simplerl'"),
        "code": small(
            text, "Work.questions = @QuestionFile()", f"QuestionFile.path = '{folder}/sums.jsonl'",
            "QuestionFile.held_out = 4", "QuestionFile.part = 'train'", "Work.validation = @validation/QuestionFile()",
            "validation/QuestionFile.part = 'validation'", "Verifier.kind = 'code'", "Prompts.max_tokens = 600",
            "MAX_RESPONSE_TOKENS = 8",
        ),
        "thoughts": texts(
            "sums", "math", "Verifier.format = 'think_answer'", "ReplayMixer.rho = 0",
            "Prompts.template = 'think_answer'",
        ),
        "experts": texts(
            "sums", "math", f"Work.experience = '{folder}/worked.jsonl'", "ReplayMixer.collects = False",
            "TrajectorySelector.by = 'perplexity'", "QuestionSampler.unit = 'successes'",
            "QuestionSampler.weight = 'question'",
        ),
        "supervised": texts("sums", "math", *supervised),
        "supervised_linear": texts(
            "sums", "math", *supervised, "SupervisedModel.schedule = 'linear'",
            "Work.questions = @LengthFilter()", "LengthFilter.questions = @QuestionMix()",
            "LengthFilter.model = @PretrainedModel()", "LengthFilter.prompts = @Prompts()",
            "QuestionMix.sources = (@QuestionFile(), @QuestionHub())",
            *hub,
        ),
        "hub": texts(
            "sums", "math", "Work.questions = @QuestionHub()", "Work.validation = @validation/QuestionHub()",
            *hub, "QuestionHub.held_out = 4", "QuestionHub.part = 'train'",
            "validation/QuestionHub.part = 'validation'",
        ),
        "all": texts(
            "sums", "math", "Work.validation = None", "QuestionFile.part = 'all'", "QuestionFile.held_out = 0"
        ),
        "word_problem": small(
            text, "Work.questions = @WordProblems()", "Work.validation = @validation/WordProblems()",
            "WordProblems.count = 8", "WordProblems.calls = True", "validation/WordProblems.calls = False",
            "validation/WordProblems.split = 'validation'",
            "Verifier.kind = 'word_problem'", "Environment.path = 'word_calculator.py'",
            "Environment.reward = 'verifier'", "Environment.stop = ('</calc>',)", "Prompts.max_tokens = 600",
        ),
        "gym": small(
            text, "Work.model = @GymModel()", "Work.questions = @ReasoningGym()",
            "Work.validation = @validation/ReasoningGym()", "ReasoningGym.count = 8",
            "validation/ReasoningGym.split = 'validation'", "Verifier.kind = 'reasoning_gym'",
            *(f"{name}.{each}" for name in ("GymModel", "ReasoningGym", "validation/ReasoningGym") for each in gym),
            *(f"GymModel.{each}" for each in (f"cache = '{folder}/cache'", "steps = 1", "count = 50", "layers = 1")),
            "Prompts.max_tokens = 400",
        ),
        # On OpenRLHF
        f"{ON_OPENRLHF}A100": small(
            chain, *by_chance(folder), "train.generate_ahead = True", "train.verify_checkpoint = False",
            "Optimizer.schedule = 'linear'", "Optimizer.decay_steps = 9", "MixedPolicyLoss.normalizer = 'tokens'",
            "MixedPolicyLoss.importance_weights = False", "MixedPolicyLoss.clips_mixed = False",
            "GroupAdvantages.scale_by_std = True", "GroupAdvantages.std_over = 'batch'",
            "ReplayMixer.injection = @InPlace()", *calculator, "Environment.reward = 'verifier'",
        ),
        f"{ON_OPENRLHF}H100": small(
            chain, "Verifier.kind = 'http'", f"Verifier.url = {url!r}", "OpenRLHF.gpu = 'H100'",
            "Optimizer.schedule = 'cosine'", "Optimizer.decay_steps = 9", "MixedPolicyLoss.normalizer = 'sequences'",
            "MixedPolicyLoss.ratio = 'sequence'", "GroupAdvantages.baseline = 'leave_one_out'", "LoRA.rank = 4",
            "ReplayBuffer.difficulty = 'reward_spread'", "ReplayMixer.store_rule = @AboveMean()",
            "TrajectorySelector.by = 'perplexity'",
        ),
        f"{ON_OPENRLHF}RTX 4090": small(
            chain, "OpenRLHF.gpu = 'RTX 4090'", *calculator, "Environment.reward = 'verifier_with_observations'",
            f"Verifier.rewards = {{'modular_chain': 1.0, '{folder}/styles.py:ranked': 0.5}}",
            "MixedPolicyLoss.shaping = False", "ReplayMixer.injection = @UnlessSolved()",
            "UnlessSolved.late = @LateInjection()",
            "LateInjection.choice = 'selected'", "ReplayMixer.store_rule = @OneSuccess()",
        ),
        f"{ON_OPENRLHF}continued": small(
            chain, *by_chance(folder), "ReplayMixer.injection = @Prefix()", "Prefix.share = @FixedShare()",
            "ReplayBuffer.replays_unsolved = True", "RetirementPolicy.at_accuracy = None", "Prefix.target = 0.9",
        ),
        f"{ON_OPENRLHF}stored group": small(chain, *by_chance(folder), *STORED_GROUP, "StoredGroup.choice = 'newest'",
            "MixedPolicyLoss.divisors = 'together'",
        ),
        f"{ON_OPENRLHF}stored rows": small(
            chain, *by_chance(folder), *STORED_GROUP, "ReplayMixer.injection = @StoredRows()",
            "StoredRows.rows = 2", "ReplayMixer.store_rule = @WithSignal()",
        ),
        f"{ON_OPENRLHF}mixed policies": small(
            chain, *by_chance(folder), *STORED_GROUP, "ReplayMixer.injection = @StoredRows()", *REINCARNATED,
            "Reincarnation.after_step = 1",
        ),
        f"{ON_OPENRLHF}its environment's rewards": small(chain, *calculator, "Environment.reward = 'environment'"),
    }  # fmt: skip


# The rows of the paper's tables by name: a row of the same name is the same run in every table.
PAPER_ROWS = {
    f"paper {variant.name}": (table.stem, variant)
    for table in sorted((GIN / "paper").glob("table*.gin"), reverse=True)
    for variant in of_suite(config.load_suite(table), str(table))
}


ABLATIONS = ("ablation_no_entropy.gin", *(f"ablations/{path.name}" for path in sorted((GIN / "ablations").iterdir())))


def run_of_files(name: str, chain: Path) -> tuple[tuple[str, ...], list[str]]:
    """Gin files and bindings at a small size: of an ablation, or of a table's row by the recipe as it was trained."""
    if name in ABLATIONS:
        return (name,), small_bindings(chain, "train.steps = 2")
    table, variant = PAPER_ROWS[name]
    revisits = ["RetirementPolicy.revisits_every = 2"] if table == "table7" else []
    return (*variant.files, "testbed/rare.gin"), [
        *variant.bindings,
        *small_bindings(chain, "train.steps = 2", *revisits),
    ]
