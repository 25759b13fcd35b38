"""From gin files to a built experiment. Only this module and gin_files.py import gin.

The classes are registered from outside and stay plain: what gin builds here pickles, and another process gets the
objects, never the bindings (a spawned process would silently see Python's defaults).

How files combine. Every file is read once. What a file merely includes comes before all files that were named, so
`--gin layout.gin --gin ablation.gin` and the other order give the same experiment although only the ablation includes
base.gin; among the others that are named the later one wins, also over one that includes it, and a `--set` over all.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gin
import numpy as np
from gin import config_parser

from ..checks import ConfigError, check_settings
from ..engines.openrlhf import flags
from ..engines.pretrained import PretrainedModel
from ..environments.environment import Environment
from ..experiment import Experiment
from ..io.entry_points import entry_points_of, loaded
from ..io.files import read_text
from ..io.redaction import redacted
from ..objective import ConvexKL, GroupAdvantages, MixedPolicyLoss
from ..questions import LengthFilter, QuestionFile, QuestionHub, QuestionMix
from ..questions.derived import validation_of
from ..questions.fresh import FreshSampler
from ..questions.prompts import Prompts
from ..questions.test_sets import sets_of
from ..replay import DifficultyBuckets, QuestionSampler, ReplayBuffer, ReplayMixer, RetirementPolicy, TrajectorySelector
from ..replay.injection import Beside
from ..replay.mixer import MixerParts
from ..replay.plan import DynamicSampling
from ..replay.variants import VARIANTS
from ..rewards import Verifier
from ..settings import Evaluation, LocalEngine, LoRA, OpenRLHF, Optimizer, Sampling, Tracking, TrainSettings, Work
from ..training.supervised_start import SupervisedFile, SupervisedModel
from . import gin_files, other_tools
from .gin_files import GIN_FOLDER, RENAMED, find_all, flatten, includes, name_of, place_of, redact, resolved, statements

# Known in gin by their own names; TrainSettings is `train`. What stands beside the trainer (the test bed, studies), and
# what another distribution brings, is an entry point of the group `exgrpo_orlhf.gin`, as in pyproject.toml.
_CLASSES: tuple[type, ...] = (
    *(TrainSettings, Work, Prompts, Sampling, Optimizer, LoRA, LocalEngine, OpenRLHF, Evaluation, Tracking),
    *(Verifier, Environment, QuestionFile, QuestionHub, QuestionMix, LengthFilter),
    *(PretrainedModel, SupervisedModel, SupervisedFile),
    *(DifficultyBuckets, QuestionSampler, TrajectorySelector, DynamicSampling, RetirementPolicy),
    *VARIANTS,
    *(ReplayBuffer, ReplayMixer, GroupAdvantages, MixedPolicyLoss, ConvexKL, FreshSampler),
    *map(loaded, entry_points_of("exgrpo_orlhf.gin").values()),
)
_TARGETS = {"train" if target is TrainSettings else target.__name__: target for target in _CLASSES}
log = logging.getLogger(__name__)

BASE, TOY = GIN_FOLDER / "base.gin", GIN_FOLDER / "toy.gin"
# Parameters that only the program can supply.
_SUPPLIED = {"ReplayBuffer": ["retirement"], "ReplayMixer": ["parts"]}
_GIN: dict[str, Callable[..., Any]] = {
    name: gin.external_configurable(target, name=name, module="exgrpo", denylist=_SUPPLIED.get(name))
    for name, target in _TARGETS.items()
}
_NAMES = tuple(_GIN)
_PARTS = {  # of an experiment, the fields that are objects of one class without arguments
    **{"prompts": "Prompts", "sampling": "Sampling", "optimizer": "Optimizer", "verifier": "Verifier"},
    **{"selector": "TrajectorySelector", "dynamic_sampling": "DynamicSampling", "advantages": "GroupAdvantages"},
    **{"loss": "MixedPolicyLoss", "evaluation": "Evaluation", "tracking": "Tracking", "fresh": "FreshSampler"},
}
# Of the verifier and of retirement: settings that do nothing where another one is None.
_NEEDS = {"tries": "url", "times_in_a_row": "at_accuracy", "revisited_share": "revisits_every"}


def load(
    files: Sequence[str | Path] | str | Path, overrides: Sequence[str] = (), seed: int | None = None
) -> Experiment:
    """Read gin files and `--set` bindings and build the experiment they describe.

    Files are looked up as given, then in the project's gin/ folder, then in the project's folder. Where nothing but
    base.gin binds a model or questions, the toy (gin/toy.gin) is read after base.gin.
    files, overrides: several, or one; seed: takes the place of train.seed
    Raises ConfigError.
    """
    files = [files] if isinstance(files, str | Path) else files
    overrides = [overrides] if isinstance(overrides, str) else overrides
    experiment: Experiment = _load(_build, files, overrides, seed)
    return experiment


def load_suite(file: str | Path) -> Any:
    """The `study.suite.Suite` that a gin file binds. Raises ConfigError."""
    return _load(lambda _: _make("Suite"), [file], (), None)


def _load(
    build: Callable[[Mapping[str, str]], Any], files: Sequence[str | Path], overrides: Sequence[str], seed: int | None
) -> Any:
    """build: gets where each binding of a named file, not of an included one, or of a --set was made"""
    gin.clear_config()
    named = find_all(files)
    paths = gin_files.in_order(named, _NAMES)
    tasks = [path for path in paths if path != BASE and gin_files.BINDS_A_TASK.search(read_text(path))]
    if not tasks and not any(map(gin_files.BINDS_A_TASK.search, overrides)):
        paths = [*includes(TOY, _NAMES), TOY, *paths]
        log.info("nothing binds a model or questions: the toy of gin/toy.gin is trained")
    gin_files.warn_of_order([path for path in dict.fromkeys(paths) if path in named and path != BASE], tasks, _NAMES)
    made_at: dict[str, str] = {}  # where each binding was last made
    used_macros: set[str] = set()  # macros that a binding refers to, also one that a later file replaces
    for path in dict.fromkeys(paths):
        made_at |= _bind(read_text(path), name_of(path), used_macros, allow_include=True)
    for override in overrides:
        made_at |= _bind(override, f"--set {override!r}", used_macros, allow_include=False)
    _check_macros(made_at, used_macros)
    if seed is not None:
        if (where := made_at.get("train.seed", "")).startswith("--set"):
            raise ConfigError(f"{where}: --seed, or a study's --seeds, replaces it by {seed}; give the seed there")
        gin.bind_parameter("train.seed", seed)
        made_at["train.seed"] = "--seed"
    prefixes = (*map(name_of, named), "--set")
    try:
        return build({binding: where for binding, where in made_at.items() if where.startswith(prefixes)})
    except RecursionError as error:
        raise ConfigError("a reference or a macro refers to itself, directly or through others") from error
    except (ValueError, TypeError, FileNotFoundError) as error:
        message = str(error).split("\n  In call to configurable")[0].strip()  # which gin adds
        named_there = {} if isinstance(error, ConfigError) else made_at
        places = gin_files.taken_back(named, message, _NAMES)
        places += [
            f"{name} is {place_of(name, made_at)}"
            for name in named_there
            if re.search(rf"(?<!\w){re.escape(name.rpartition('/')[2])}(?!\w)", message)
        ]
        raise ConfigError(message + (f" ({'; '.join(places)})" if places else "")) from error


def _make(name: str, *args: Any, **kwargs: Any) -> Any:
    """An object of a class by its bindings."""
    _check_required(f"exgrpo.{name}", _TARGETS[name], [])
    return _GIN[name](*args, **kwargs)


def _check_required(selector: str, target: Callable[..., Any], scope: list[str]) -> None:
    """Raises ConfigError for a parameter without value and default, of this class or of what it is bound to."""
    with gin.config_scope(scope):
        bindings = gin.get_bindings(selector, resolve_references=False)
    name = selector.rpartition(".")[2]
    values = {p: bindings.get(p, declared.default) for p, declared in inspect.signature(target).parameters.items()}
    missing = [
        f"{'/'.join([*scope, name])}.{parameter}"
        for parameter, value in values.items()
        if repr(value) == "%gin.REQUIRED"
        or (value is inspect.Parameter.empty and parameter not in _SUPPLIED.get(name, ()))
    ]
    if missing and selector == "gin.macro":
        macro = "/".join(scope)
        raise ConfigError(f"%{macro} is used, but no file gives it a value: add {macro} = …")
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be bound: add it to a gin file, or give it with --set")
    for reference in gin.config.iterate_references(bindings):
        configurable = reference.configurable
        _check_required(configurable.selector, configurable.wrapped, reference.scopes or scope)


def may_change(binding: str) -> bool:
    """Whether a binding may differ when a run is continued: its class names the setting in MAY_CHANGE."""
    name, _, parameter = binding.rpartition("/")[2].partition(".")
    return parameter in getattr(_TARGETS.get(name), "MAY_CHANGE", ())


def _warn_of_no_effect(mixer: ReplayMixer, loss: MixedPolicyLoss, made_at: Mapping[str, str]) -> None:
    """An ablation of a part that this run never asks is its control under another name."""
    injection, late = mixer.injection, mixer.injection.late_injection
    used = {type(x).__name__ for x in (injection, late, getattr(injection.prefix, "share", None), mixer.store_rule)}
    bound = f"ReplayMixer.injection is {injection}, .store_rule {mixer.store_rule}"
    reasons = {variant.__name__: bound for variant in VARIANTS if variant.__name__ not in used}
    if mixer.share.largest == 0:
        unused = {"QuestionSampler"} | (set() if late and late.choice == "selected" else {"TrajectorySelector"})
        unused |= set() if mixer.replays else {"RetirementPolicy"}  # paper.gin's ReplayBuffer is of its control too
        why = f"with ReplayMixer.rho = 0 and ReplayMixer.injection = {injection} a run never asks"
        reasons |= {name: f"{why} {name}" for name in unused}
    elif injection.added_rows or (injection.prefix and injection.prefix.choice == "newest"):
        reasons["TrajectorySelector"] = f"with {injection} as it is bound a run never asks it"
    optional = {"Reincarnation": mixer.reincarnation, "ConvexKL": loss.kl_convex}
    reasons |= {name: f"no setting refers to @{name}()" for name in optional}
    reasons = {name: why for name, why in reasons.items() if optional.get(name) is None}
    for binding, where in made_at.items():
        name, _, parameter = binding.partition(".")
        value = resolved(gin.query_parameter(binding)) if name in reasons else None
        default = inspect.signature(_TARGETS[name]).parameters[parameter].default if name in reasons else None
        if value != default and str(value) != repr(default):  # a reference is compared by its name
            log.warning("%s = %r has no effect (%s): %s", binding, value, where, reasons[name])
    if (place := made_at.get("ReplayMixer.injection")) and not mixer.replays and not isinstance(injection, Beside):
        log.warning("ReplayMixer.injection = %s has no effect (%s): ReplayMixer.rho is 0", injection, place)


def _build(made_at: Mapping[str, str]) -> Experiment:
    settings, work, sampler, buckets = map(_make, ("train", "Work", "QuestionSampler", "DifficultyBuckets"))
    replay_rng, fresh_rng = (np.random.default_rng(np.random.SeedSequence([settings.seed, i])) for i in (1, 2))
    sizes = settings.group_size, settings.questions_per_step
    mixer = _make("ReplayMixer", MixerParts(sampler, buckets, *sizes, replay_rng))
    built = _common_parts(made_at) | _optional_parts(settings.engine, made_at)
    _warn_of_no_effect(mixer, built["loss"], made_at)
    if (prefix := mixer.injection.prefix) and prefix.of != "successes":
        built["buffer"].keep_failures(prefix.failures)
    redact()
    params = flatten(text := gin.operative_config_str())
    gin_files.warn_of_unused(params, made_at, [variant.__name__ for variant in VARIANTS])
    identity = {n: value for n, value in params.items() if not may_change(n)}
    if built["openrlhf"] is not None:
        identity["OpenRLHF.flags"] = repr(redacted("OpenRLHF.flags", flags.identity(built["openrlhf"])))
    return Experiment(
        settings=settings,
        questions=work.questions,
        validation=validation_of(work.questions, work.validation),
        experience=work.experience,
        model=work.model,
        mixer=mixer,
        fresh_rng=fresh_rng,
        config_text=text,
        config_hash=hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest(),
        params=params,
        identity=identity,
        defaults=all_settings(),
        **built,
    )


def _common_parts(made_at: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an experiment whose classes every run has, but for its work and its mixer."""
    built = {field: _make(name) for field, name in _PARTS.items()}
    built["buffer"] = _make("ReplayBuffer", _make("RetirementPolicy"))
    evaluation = built["evaluation"]
    if evaluation.temperature == 0 and evaluation.top_p < 1:
        log.warning("Evaluation.top_p = %r has no effect: Evaluation.temperature = 0 is greedy", evaluation.top_p)
    lengths = built["loss"].response_length, built["sampling"].max_response_tokens
    if built["loss"].normalizer == "constant" and lengths[0] != lengths[1]:
        text = "MixedPolicyLoss.response_length = %d, Sampling.max_response_tokens = %d: MAX_RESPONSE_TOKENS binds both"
        log.warning(text, *lengths)
    if (suite := evaluation.disjoint_from) is not None:
        sets_of(suite)  # said now if there is no such suite, not after the model is made
    for part in (built["verifier"], built["buffer"].retirement):
        for field, needed in _NEEDS.items():
            setting, value = f"{type(part).__name__}.{field}", getattr(part, field, None)
            if setting in made_at and getattr(part, needed) is None and value != getattr(type(part), field):
                log.warning("%s has no effect (%s): %s is None", setting, made_at[setting], needed)
    return built


def _optional_parts(engine: str, made_at: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an experiment that depend on what is switched on: engine, LoRA, environment."""
    # Only the engine that runs: what is bound of the other one neither counts nor can be wrong.
    local = engine == "local"
    built = {"local": _make("LocalEngine") if local else None, "openrlhf": None if local else _make("OpenRLHF")}
    # Nor what is bound of LoRA, or of an environment, where there is none: such a run's identity stays what it was.
    for name, target, switch in (("lora", LoRA, "rank"), ("environment", Environment, "path")):
        on = gin.get_bindings(f"exgrpo.{target.__name__}", resolve_references=False).get(switch) is not None
        built[name] = _make(target.__name__) if on else target()
        for binding, where in made_at.items():
            if not on and binding.startswith(f"{target.__name__}.") and binding != f"{target.__name__}.{switch}":
                log.warning("%s has no effect (%s): %s.%s is None", binding, where, target.__name__, switch)
    return built


def overrides_as_bound(overrides: Sequence[str]) -> list[str]:
    """The --set bindings of the experiment that was loaded last, as they may be written."""
    bindings = {}
    for text in overrides:
        for scope, selector, parameter, *_ in statements(text, "--set", _NAMES):
            name = (f"{scope}/" if scope else "") + selector + (f".{parameter}" if parameter else "")
            bindings[name] = gin.query_parameter(name if parameter else f"%{name}")
    return [f"{name} = {value!r}" for name, value in bindings.items()]


def variant_of(params: Mapping[str, str]) -> dict[str, str]:
    """Those of a run's params by which two runs are of different variants, once the seed is left out: all but those
    that may change when a run is continued. OpenRLHF's flags are told apart one by one."""
    settings = {name: text for name, text in params.items() if not may_change(name)}
    values: dict[str, Any] = {}
    for name in ("OpenRLHF.flags", "OpenRLHF.more_flags"):
        try:
            values |= ast.literal_eval(params.get(name, "{}"))
        except (ValueError, SyntaxError):  # so long that it was cut
            settings[name] = params[name]
    return settings | {f"OpenRLHF {flag}": repr(v) for flag, v in flags.identity(OpenRLHF(flags=values)).items()}


# -- reading ----------------------------------------------------------------------------------------------------------


def _bind(text: str, name: str, used_macros: set[str], allow_include: bool) -> dict[str, str]:
    """Make the bindings of one file or one --set. Returns where each was made; adds the macros that they refer to."""
    made_at = {}
    for statement in statements(text, name, _NAMES):
        where = name if name.startswith("--set") else f"{name}, line {statement.location.line_num}"
        if isinstance(statement, config_parser.IncludeStatement) and allow_include:
            continue
        if not isinstance(statement, config_parser.BindingStatement):
            raise ConfigError(f"{where}: only bindings such as ReplayMixer.rho = 0.25 can stand here")
        scope, selector, parameter, value = statement[:4]
        prefix = f"{scope}/" if scope else ""
        references = [*gin.config.iterate_references(value)]
        used_macros |= {"/".join(ref.scopes) for ref in references if ref.selector.endswith("gin.macro")}
        if not parameter:
            made_at[f"%{prefix}{selector}"] = where
            gin.bind_parameter((f"{prefix}{selector}", "gin.macro", "value"), value)
            continue
        _check_name(selector, parameter, where)
        if not references:  # else it is checked where the object is made
            try:
                check_settings(_TARGETS[selector], {parameter: value}, f"{selector}.")
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from error
        gin.bind_parameter((scope, selector, parameter), value)
        made_at[f"{prefix}{selector}.{parameter}"] = where
    return made_at


@cache
def all_settings() -> dict[str, str]:
    """All that can be bound, with the text of its default; 'not bound' where it has none."""
    parameters = [(name, p) for name in _GIN for p in inspect.signature(_TARGETS[name]).parameters.values()]
    parameters = [(name, p) for name, p in parameters if p.name not in _SUPPLIED.get(name, ())]
    return {f"{name}.{p.name}": "not bound" if p.default is p.empty else repr(p.default) for name, p in parameters}


def _check_name(selector: str, parameter: str, where: str) -> None:
    settings, setting = all_settings(), f"{selector}.{parameter}"
    if setting in settings:
        return
    if instead := RENAMED.get(setting):
        raise ConfigError(f"{where}: {setting} is now {instead}")
    other_tools.refuse(setting, where)
    near = [name for name in settings if name.endswith(f".{parameter}")]
    near = near or difflib.get_close_matches(setting, settings, n=3, cutoff=0.5)
    near = near or [name for name in settings if selector in _GIN and name.startswith(f"{selector}.")]
    raise ConfigError(f"{where}: there is no setting {setting}; nearest: {', '.join(near or sorted(_GIN))}")


def _check_macros(made_at: dict[str, str], used_macros: set[str]) -> None:
    """A name without a class is a macro. One that nothing refers to is a setting whose class was left out."""
    for macro, where in made_at.items():
        name = macro.removeprefix("%")
        if macro.startswith("%") and name not in used_macros:
            other_tools.refuse(name, where)
            near = [setting for setting in all_settings() if setting.endswith(f".{name}")]
            near = near or difflib.get_close_matches(name, [*sorted(used_macros), *all_settings()], n=3, cutoff=0.5)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ConfigError(f"{where}: {name} = … sets nothing, because no binding refers to {macro}{hint}")
