"""A setting that cannot be meant is refused where its object is made, and named as it is bound in gin."""

import math

import numpy as np
import pytest

from exgrpo_orlhf.engines.pretrained import PretrainedModel
from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.objective import ConvexKL, MixedPolicyLoss
from exgrpo_orlhf.questions import QuestionFile, QuestionHub, QuestionMix
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.replay import (
    DifficultyBuckets,
    QuestionSampler,
    ReplayBuffer,
    ReplayMixer,
    RetirementPolicy,
    TrajectorySelector,
)
from exgrpo_orlhf.replay.injection import Beside, LateInjection, UnlessSolved
from exgrpo_orlhf.replay.mixer import MixerParts
from exgrpo_orlhf.replay.share import Reincarnation
from exgrpo_orlhf.replay.store_rule import Successes
from exgrpo_orlhf.replay.stored_group import StoredGroup
from exgrpo_orlhf.replay.stored_rows import StoredRows
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.settings import LocalEngine, LoRA, Sampling
from exgrpo_orlhf.testbed.modular_chains import Beliefs, ModularChains
from exgrpo_orlhf.testbed.tiny_models import ChainModel, GymModel
from exgrpo_orlhf.testbed.word_problems import WordProblems
from exgrpo_orlhf.training.supervised_start import SupervisedFile, SupervisedModel

NAN, INF = math.nan, math.inf
NEEDED = {
    ReplayBuffer: dict(retirement=RetirementPolicy()),
    ReplayMixer: dict(
        parts=MixerParts(QuestionSampler(), DifficultyBuckets(), 4, 8, np.random.default_rng(0)),
        start_at_accuracy=None,
    ),
    Beliefs: dict(false_share=0.1, strength=0.1, slip=0.1),
    QuestionFile: dict(path="q.jsonl"),
    QuestionHub: dict(id="owner/set"),
    SupervisedFile: dict(path="q.jsonl"),
    PretrainedModel: dict(path="owner/model"),
    SupervisedModel: dict(
        **dict(model=PretrainedModel("owner/model"), examples=ModularChains()),
        **dict(prompts=Prompts(), sampling=Sampling(), machine=LocalEngine()),
    ),
}
PAIRS = [(0.75, 0.25), (0.5, 0.5), (0.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5,), (0.2, 0.5, 0.8), (NAN, 0.5)]
MADE_QUESTIONS = [
    (dict(count=0), r"count .* at least 1, got 0"),
    (dict(count=2.0), r"count takes int, got 2\.0"),
    (dict(count=True), r"count .* got True"),
    (dict(seed=-1), r"seed .* at least 0, got -1"),
    (dict(split="test"), r"split .* 'train', 'validation'; got 'test'"),
]
QUESTION_RECORDS = [
    (dict(limit=0), "limit must be at least 1, or None; got 0"),
    (dict(limit=2.5), r"limit takes int \| None, got 2\.5"),  # by a macro, with which it is not compared before
    (dict(limit=True), r"limit takes int \| None, got True"),
    (dict(meta="tests"), r"meta takes tuple\[str, \.\.\.\], got 'tests'"),
    *((dict(meta=meta), "meta: .* is taken") for meta in (("a.options", "b.options"), ("row",))),
    (dict(part="test", held_out=5), "part must be one of 'all', 'train', 'validation'; got 'test'"),
    (dict(part="train"), "part is 'train' or 'validation' with"),
    *((dict(held_out=wrong), "held_out must be a number of questions, or a share below 1, got") for wrong in (-1, 2.5)),
]
LEVELS = r"steps must be a non-empty tuple of distinct integers of at least 1, got "
REFUSED = {
    ReplayMixer: [
        (dict(rho=-0.1), r"rho must lie in \[0, 1\], got -0\.1"),
        (dict(rho=1.1), "rho"),
        (dict(rho=NAN), "rho"),
        (dict(rho=0.1), r"rho · train\.questions_per_step = 0\.8 is rounded down to 0"),
        (dict(rho_end=0.5), r"rho_end and ReplayMixer\.rho_steps are both .* got 0\.5 and None"),
        (dict(rho_steps=5), r"rho_end and ReplayMixer\.rho_steps are both .* got None and 5"),
        (dict(rho_end=1.5, rho_steps=5), r"rho_end must lie in \[0, 1\].* got 1\.5"),
        (dict(rho_end=0.5, rho_steps=0), r"rho_steps must be at least 1.* got 0"),
        (dict(start_at_accuracy=1.0), r"start_at_accuracy must lie in \[0, 1\)"),
        (dict(start_at_accuracy=-0.1), "start_at_accuracy"),
        (dict(injection=LateInjection()),
         r"injection = @LateInjection\(\) plans no .*\.rho must be 0 .* got 0\.5 and None"),
        (dict(injection=LateInjection(), rho=0, rho_end=0.5, rho_steps=3),
         r"injection = @LateInjection\(\) .* got 0 and 0\.5"),
        *(
            (dict(injection=wrong), r"injection must be a reference such as @Beside\(\)")
            for wrong in ("newest", Beside)
        ),
        (dict(store_rule="all"), r"store_rule must be a reference such as @Successes\(\)"),
    ],
    Beside: [
        (dict(rollouts=0), "rollouts must be at least 1, or None; got 0"),
        (dict(rollouts=1.5), "rollouts takes int"),
    ],
    UnlessSolved: [(dict(late=Beside()), r"late takes LateInjection \| None, got @Beside\(\)")],
    LateInjection: [(dict(choice="oldest"), "choice must be one of 'newest', 'selected'; got 'oldest'")],
    StoredGroup: [
        (dict(rows=0), "rows must be at least 1, got 0"),
        (dict(least=0), "least must be at least 1, got 0"),
        (dict(choice="oldest"), "choice must be one of 'all', 'newest', 'best', 'spread'; got 'oldest'"),
    ],
    StoredRows: [
        (dict(by="luck"), "by must be one of 'advantage', 'reward'; got 'luck'"),
        (dict(alpha=-0.5), "alpha"),
        (dict(decay_steps=0.0), r"decay_steps must be positive and finite, or None; got 0\.0"),
        (dict(first_step=0), "first_step must be at least 1, got 0"),
        (dict(share=1.0), r"share must lie in \[0, 1\), or None; got 1\.0"),
    ],
    Reincarnation: [
        *((settings, r"after_step and Reincarnation\.at_accuracy: one must be bound, .*got ")
          for settings in (dict(), dict(after_step=5, at_accuracy=0.5))),
        (dict(after_step=0), "after_step must be at least 1, or None; got 0"),
        (dict(at_accuracy=1.0), "at_accuracy"),
    ],
    ConvexKL: [
        (dict(constant_steps=-1), "constant_steps must be at least 0, got -1"),
        (dict(every=0), "every must be at least 1, got 0"),
        (dict(fall=1.5), r"fall must lie in \[0, 1\], got 1\.5"),
        (dict(lowest=-0.1), "lowest"),
    ],
    Successes: [(dict(up_to=up_to), r"up_to must lie in \(0, 1\], or None; got ") for up_to in (0.0, 1.5, NAN)],
    QuestionSampler: [
        (dict(sigma=0), "sigma must be a positive number"),
        *((dict(sigma=sigma), "sigma") for sigma in (-1, NAN, INF)),
        (dict(mu=1.5), r"mu must lie in \[0, 1\]"),
        (dict(mu=-0.1), "mu"),
        (dict(mu=NAN), "mu"),
        (dict(mu=-1, unit="successes"), r"mu must lie in \[0, K\]"),
        (dict(method="normal"), "method must be one of 'gaussian', 'uniform'; got 'normal'"),
        (dict(unit="count"), "unit must be one of 'accuracy', 'successes'"),
        (dict(weight="group"), "weight"),
        (dict(partition="third"), "partition"),
    ],
    TrajectorySelector: [
        (dict(by="luck"), "by must be"),
        (dict(prefer="middle"), "prefer must be"),
        (dict(by="priority", prefer="highest", decay_steps=0.0), "decay_steps must be positive and finite, got 0"),
        (dict(decay_steps=5.0), r"decay_steps is of TrajectorySelector\.by = 'priority', not 'entropy'"),
    ],
    DifficultyBuckets: [(dict(thresholds=pair), "thresholds .* 0 < low < high < 1") for pair in PAIRS],
    ReplayBuffer: [
        ({name: 0}, f"{name} must be at least 1, or None; got 0") for name in ("per_question", "max_age", "max_bytes")
    ],
    RetirementPolicy: [
        *((dict(at_accuracy=wrong), r"at_accuracy must lie in \(0, 1\]") for wrong in (0, -0.5, 1.01, NAN)),
        (dict(leaves_fresh=True, at_accuracy=None), "leaves_fresh .* needs retirement"),
        (dict(times_in_a_row=0), "times_in_a_row must be at least 1"),
        (dict(revisits_every=5, at_accuracy=None), "revisits_every = 5 needs retirement"),
    ],
    MixedPolicyLoss: [
        (dict(kl_convex=ConvexKL()), r"kl_convex needs MixedPolicyLoss\.kl_coef above 0, got 0\.0"),
        (dict(kl_convex=0.5, kl_coef=0.1), r"kl_convex must be a reference such as @ConvexKL\(\)"),
        *((dict(clip_around="policy", **more), r"clip_around = 'policy' needs MixedPolicyLoss\.clips_replayed = True")
          for more in (dict(), dict(shaping=False, clips_replayed=True, dual_clip=3.0))),
        (dict(beta=0), "beta must be positive and finite, got 0"),
        (dict(beta=INF), "beta"),
        (dict(beta=NAN), "beta"),
        (dict(max_weight=0.0), r"max_weight must be positive and finite, or None; got 0\.0"),
        (dict(max_weight=INF), "max_weight"),
        (dict(max_weight=NAN), "max_weight"),
        (dict(max_weight=2.0, importance_weights=False),
         r"max_weight must be None where MixedPolicyLoss\.importance_weights = False.* got 2\.0"),
        (dict(clip_low=None), r"clip_low and MixedPolicyLoss\.clip_high are both"),
        (dict(clip_high=None), ".* are both numbers, or both None"),
        (dict(clip_low=1.5), r"clip_low must lie in \[0, 1\]"),
        (dict(clip_high=-0.1), "clip_high"),
        (dict(clip_high=NAN), "clip_high"),
        (dict(dual_clip=1.1), r"dual_clip must be at least 1 \+ MixedPolicyLoss\.clip_high"),
        (dict(dual_clip=3.0, clip_low=None, clip_high=None), r"dual_clip .* 1 \+ MixedPolicyLoss\.clip_high"),
        (dict(normalizer="mean"), "normalizer must be .* got 'mean'"),
        (dict(divisors="own"), "divisors must be .* got 'own'"),
        (dict(clips_replayed=True), r"clips_replayed needs .*clip_low .* shaping = False; got .* and True"),
        *(
            (dict(clips_replayed=True, shaping=False, **wrong), "clips_replayed needs")
            for wrong in (
                dict(clip_low=None, clip_high=None), dict(clips_mixed=False), dict(importance_weights=False),
            )
        ),
        (dict(response_length=0), "response_length"),
        (dict(entropy_coef=-0.1), "entropy_coef"),
        (dict(kl_coef=NAN), "kl_coef"),
    ],
    LoRA: [
        (dict(rank=0), "rank must be at least 1, or None; got 0"),
        (dict(rank=2, alpha=0), "alpha must be at least 1, or None; got 0"),
        *((dict(rank=2, targets=targets), "targets must be 'all-linear' or a tuple") for targets in ("q_proj", ())),
    ],
    Verifier: [
        (dict(kind="maths"), "kind must be one of"),
        (dict(kind="function"), "function"),
        (dict(kind="math", function="x.py"), "function"),
        (dict(timeout=0.0), "timeout"),
        (dict(memory=1), "memory"),
        (dict(workers=-1), "workers"),
        (dict(max_failed_share=2.0), "max_failed_share"),
        (dict(format="xml"), "format"),
        *((dict(success_at=value), "success_at must be a finite number") for value in (NAN, INF)),
        *((dict(success_at=value), "success_at takes float, got ") for value in ("1", None, True)),
        *(
            (dict(kind="http", url=url), r"url \(an address, or a tuple of several\) must be set")
            for url in ("localhost:5000", "", ("ftp://a/b",), None)
        ),
        (dict(kind="chain_steps", success_at=0.5),
         "success_at = 0.5 is read by the kinds function, http, reasoning_gym"),
        (dict(kind="http", url=("http://a/b", 3)), r"url takes str \| tuple\[str, \.\.\.\] \| None, got"),
        (dict(url="http://a/b"), r"url .* got \['http://a/b'\] with Verifier\.kind = 'exact'"),
        *((dict(rewards=wrong), "rewards has a weight for each") for wrong in ({}, {"math": True}, {"math": INF})),
        (dict(rewards={"maths": 1.0}), "rewards: 'maths' is no kind"),
        (dict(rewards={"math": 1.0}, success_at=0.5), "success_at = 0.5 is read by the kinds .* of math a correct"),
        (dict(rewards={"math": 1.0}, kind="function", function="a.py"), ".* make the function one of the rewards"),
        (dict(rewards={"math": 1.0}, success_by="brief"), "success_by .* none of Verifier.rewards: math"),
        (dict(rewards={"a.py:f": 1.0, "b.py:f": 1.0}), ".*two rewards are called 'f'"),
        (dict(success_by="math"), "success_by .* Verifier.rewards, which is not set"),
        (dict(rewards={"http": 1.0}), "url"),
        *((dict(rewards={"math": 1.0}, **more), "tool and .gets are of functions, .url of 'http': .* no such reward")
          for more in (dict(url="http://a/b"), dict(gets="batch"))),
    ],
    Environment: [
        (dict(path="game"), "path must be the name of a .py file"),
        (dict(reward="both"), "reward must be one of 'environment', 'verifier'"),
        (dict(max_turns=0), "max_turns must be at least 1"),
        (dict(stop="</call>"), r"stop takes tuple\[str, \.\.\.\], got '</call>'"),
        (dict(stop=("",)), "stop must be a tuple of texts, none of them empty"),
        (dict(timeout=INF), "timeout must be positive and finite"),
        (dict(memory=32), "memory must be at least 64"),
    ],
    QuestionFile: [*QUESTION_RECORDS, (dict(path=3), "path takes str, got 3")],
    QuestionHub: [*QUESTION_RECORDS, (dict(split=None), "split takes str, got None")],
    SupervisedFile: [(dict(response=None), "response takes str, got None")],
    SupervisedModel: [
        (dict(epochs=0), "epochs must be at least 1, got 0"),
        (dict(learning_rate=0.0), r"learning_rate must be positive and finite, got 0\.0"),
        (dict(schedule="constant"), "schedule must be one of 'linear', 'cosine'; got 'constant'"),
        (dict(warmup=1.0), r"warmup must lie in \[0, 1\), got 1\.0"),
        *(
            (dict(examples=wrong), rf"examples must be a reference such as @SupervisedFile\(\) .*, got {wrong!r}")
            for wrong in (None, "examples.jsonl")
        ),
        (dict(model="foo/bar"), r"model must be a reference such as @PretrainedModel\(\) .*, got 'foo/bar'"),
        (dict(prompts=Verifier()), r"prompts takes Prompts, got Verifier\("),
        (dict(sampling=Prompts()), r"sampling takes Sampling, got Prompts\("),
        (dict(machine="cpu"), "machine takes LocalEngine, got 'cpu'"),
    ],
    PretrainedModel: [(dict(path=3), "path takes str, got 3")],
    QuestionMix: [
        *(
            (dict(sources=sources), r"sources must be a tuple of references such as \(@a/QuestionFile\(\), ")
            for sources in ((), ModularChains(), ("a.jsonl",), (ModularChains,))
        ),
        (dict(sources=(ModularChains(),), weights=("1",)), r"weights takes tuple\[float, \.\.\.\] .* got \('1',\)"),
        (dict(sources=(ModularChains(),), seed=-1), "seed must be at least 0, got -1"),
        (dict(sources=(ModularChains(),), weights=(1, 2)), r"weights has 2 numbers for 1 QuestionMix\.sources"),
        (dict(sources=(ModularChains(),), weights=(0,)), "weights must be positive"),
        (dict(sources=(ModularChains(),), size=5), r"size = 5 needs QuestionMix\.weights"),
        (dict(sources=(ModularChains(),) * 2, weights=(1, 1), size=1), "size must be at least 1 for each source"),
    ],
    ModularChains: [
        *MADE_QUESTIONS,
        (dict(operands=()), r"operands .* got \(\)"),
        (dict(operands=(1, 3)), r"operands .* at least 2.* got \(1, 3\)"),
        (dict(operands=(3, 3)), r"operands .* distinct .* got \(3, 3\)"),
        (dict(operands=[3, 4]), r"operands takes tuple\[int, \.\.\.\], got \[3, 4\]"),
        (dict(operands=3), "operands .* got 3"),
        (dict(together=0), "together must be at least 1, got 0"),
        (dict(count=136, operands=(2,)), "count .* at most 135 distinct train .* got 136"),
        (dict(count=16, operands=(2,), split="validation"), "count .* at most 15 distinct validation"),
    ],
    Beliefs: [
        ({name: value}, f"{name} {message}, got ")
        for name in ("false_share", "strength", "slip")
        for message, values in ((r"must lie in \[0, 1\]", (-0.1, 1.1, NAN)), ("takes float", ("0.5", None, True)))
        for value in values
    ],
    WordProblems: [
        *MADE_QUESTIONS,
        *((dict(steps=steps), LEVELS) for steps in ((0,), (), (2, 2))),
        *((dict(steps=steps), r"steps takes tuple\[int, \.\.\.\], got ") for steps in ([1], 2, (1.0,))),
        (dict(steps=(1, 5)), r"steps must be at most 4, got \(1, 5\)"),
        (
            dict(count=100_001, steps=(1,)),
            r"count must be at most 100,000 \(100,000 for each of .*steps\), got 100,001",
        ),
    ],
    ChainModel: [
        (dict(steps=0), r"steps must be at least 1, got 0$"),
        (dict(batch_size=1.5), r"batch_size .* got 1\.5$"),
        (dict(learning_rate=0.0), r"learning_rate must be between 0 and 1, got 0\.0$"),
        (dict(seed=-1), r"seed .* at least 0, got -1$"),
        (dict(width=100), r"width must be a positive multiple of 32, got 100$"),
        (dict(layers=0), r"layers .* got 0$"),
        (dict(cache=3), r"cache takes str \| Path \| None, got 3$"),
        (dict(operands=(1,)), r"operands .* at least 2.* got \(1,\)$"),
        (dict(preset="strong"), "preset must be one of normal, weak, slips, got 'strong'$"),
        (dict(strength=1.5), r"strength must lie in \[0, 1\], or None; got 1\.5$"),
        (dict(operands=(33,)), r"operands .* at most 32 .*, got \(33,\)$"),
        (dict(operands=(11,), together=3), r"operands .* at most 10 where ChainModel\.together is 3, got \(11,\)$"),
        (dict(together=0), "together must be at least 1, got 0$"),
    ],
    GymModel: [
        (dict(tasks={}), r"tasks must be a task's name or positive weights by name, got \{\}$"),
        (dict(tasks=3), "tasks must be a task's name or positive weights by name, got 3$"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "settings", "message"), [(made, *row) for made, rows in REFUSED.items() for row in rows]
)
def test_a_setting_without_a_meaning_is_refused_with_its_binding_named(made, settings, message):
    with pytest.raises(ValueError, match=rf"^{made.__name__}\.{message}"):
        made(**{**NEEDED.get(made, {}), **settings})
