"""What is replaced in the code of others, each with the version in which it was read.

OpenRLHF 0.11.2 has no hooks for these: it looks its own classes up as globals of its modules. Beside them there is the
CPU test layout, whose replacements are in cpu.py alone because no other run has them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module's first import."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._pending = functions

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._pending:
            return None
        function = self._pending.pop(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


@contextmanager
def parser_alone(arguments: Sequence[str], parsed: Callable[[Any], None]) -> Iterator[None]:
    """OpenRLHF 0.11.2 parses its arguments under `if __name__ == "__main__"` and then trains. Within this context the
    first function that it calls with them is `parsed`, which raises. arguments: sys.argv"""
    import openrlhf.utils
    import ray

    with (
        patch.object(sys, "argv", [*arguments]),
        patch.object(openrlhf.utils, "get_strategy", parsed),
        patch.object(ray, "is_initialized", lambda: True),
    ):
        yield


def program_classes(policy: Any, trainer: Any, engine: Any) -> None:
    """Actor classes of Ray that OpenRLHF 0.11.2's program (cli/train_ppo_ray.py) makes instead of its own."""
    from openrlhf.cli import train_ppo_ray
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import vllm_engine

    train_ppo_ray.PolicyModelActor, ppo_trainer.PPOTrainer, vllm_engine.RolloutRayActor = policy, trainer, engine


def balancing(balance: Callable[..., Any]) -> None:
    """What OpenRLHF 0.11.2's train_step spreads experience over the ranks by: its own changes the order of rows."""
    from openrlhf.trainer import ppo_trainer

    ppo_trainer.balance_experiences = balance


def policy_parts(
    *, trainer: type, model: Any, loader: Any, scheduler: Callable[[Any], Any], tokenizer: Callable[[Any], Any]
) -> None:
    """What OpenRLHF 0.11.2's policy actor is made of.

    loader: in the order of rows; OpenRLHF shuffles them, with a generator that is not checkpointed
    scheduler: of an optimiser; OpenRLHF's schedules begin at 0: a first step would train nothing
    tokenizer: by its path
    """
    from openrlhf.trainer.ray import ppo_actor
    from openrlhf.utils import utils as openrlhf_utils
    from openrlhf.utils.deepspeed import deepspeed as strategies

    strategies.get_scheduler = lambda name, optimizer, **_: scheduler(optimizer)
    ppo_actor.ActorPPOTrainer, ppo_actor.Actor, ppo_actor.DataLoader = trainer, model, loader
    openrlhf_utils.AutoTokenizer = SimpleNamespace(from_pretrained=lambda path, **_: tokenizer(path))


def overflow_check(optimizer: Any, zero_stage: int, stage_2: Callable[..., None], stage_3: Callable[[], bool]) -> None:
    """Of DeepSpeed 0.19.6's optimiser, which checks gradients in float16 only. stage_2: of stages 1 and 2"""
    if zero_stage == 3:
        optimizer._overflow_check_and_loss_scale_update = stage_3
    else:
        optimizer.check_grad_overflow = True
        optimizer.check_overflow = stage_2


@contextmanager
def sent_parameters(
    model: Any, parameters: Iterable[tuple[Any, Any]], gathered: Callable[[Any], AbstractContextManager[None]]
) -> Iterator[None]:
    """Within this context OpenRLHF 0.11.2's `broadcast_to_vllm` sends these instead of the model's parameters, one at a
    time, each while it is `gathered`; its own way is DeepSpeed 0.19.6's GatheredParameters."""
    import deepspeed  # not in vLLM's processes

    with (
        patch.object(model, "named_parameters", lambda: parameters),
        patch.object(deepspeed.zero, "GatheredParameters", lambda parameters, enabled: gathered(parameters[0])),
    ):
        yield


def ring_attention(module: ModuleType, after: Callable[[ModuleType], None]) -> None:
    """Put a module where OpenRLHF 0.11.2 imports models/ring_attn_utils.py, which imports flash_attn. after: called
    when its models/actor.py has been imported. Called again, it does nothing."""
    name = "openrlhf.models.ring_attn_utils"
    if name not in sys.modules:
        sys.modules[name] = module
        sys.meta_path.insert(0, AfterImport({"openrlhf.models.actor": after}))
