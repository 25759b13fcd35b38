"""Builders for tests of OpenRLHF's actor trainers with several ranks in this process: threads instead of processes, a
table of log-probs instead of a model, and only the arithmetic of DeepSpeed. The rest is the real code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from openrlhf.utils.deepspeed import DeepspeedStrategy
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import launch
from exgrpo_orlhf.engines.openrlhf.actor import MixedActorTrainer, MixedPolicyActor
from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience, keep_order
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.experiment import Experiment
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import MixedPolicyLoss, TokenBatch
from exgrpo_orlhf.records import MixedBatch, Question, Rollout, RolloutGroup, Row, Trajectory

K = 4
PAD = 0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Table:
    """A model with a free log-prob and entropy for every position of every row. A row's first token is its number."""

    def __init__(self, values: np.ndarray) -> None:
        """values: (R, W), of the token that each position predicts"""
        self.values = torch.tensor(values, device=DEVICE, requires_grad=True)
        self.model = SimpleNamespace(set_gradient_accumulation_boundary=lambda last: None)  # DeepSpeed's engine

    def train(self) -> None: ...

    def __call__(self, sequences: torch.Tensor, action_mask: torch.Tensor, **_: Any) -> tuple[torch.Tensor, Any]:
        values = self.values[sequences[:, 0], : sequences.shape[1] - 1]
        log_probs, entropies = values * action_mask.float(), entropy_of(values)
        self.latest = log_probs.detach(), entropies.detach()
        return log_probs, SimpleNamespace(entropy=entropies)


def entropy_of(values: torch.Tensor) -> torch.Tensor:
    return values.square() + 0.1


class Strategy(DeepspeedStrategy):
    """DeepSpeed's arithmetic: divides the loss of every micro-batch by gas, and makes a step after gas of them."""

    def __init__(self, args: Any, ranks: int, model: Table, norms: list[float]) -> None:
        super().__init__(
            micro_train_batch_size=args.train.micro_batch_size, train_batch_size=args.train.batch_size, args=args
        )
        self.world_size, self.model, self.norms = ranks, model, norms
        self.accumulated_gradient = args.train.batch_size // args.train.micro_batch_size // ranks
        self.gas = 1 if args.train.dynamic_batch_enable else self.accumulated_gradient
        self.ds_device_mesh = {"dp": SimpleNamespace(get_group=lambda: dist.group.WORLD)}
        self.micro_steps, self.gradients = 0, []

    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        (loss / self.gas).backward()

    def optimizer_step(self, *_: Any, **__: Any) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.gas == 0:
            self.gradients.append(self.model.values.grad.clone())
            self.model.values.grad = None
            self.norms.append(1.0)

    def get_grad_norm(self, model: Any) -> float:
        return 1.0


def mixed_batch(
    seed: int = 0,
    groups: int = 8,
    *,
    replay: bool = True,
    ungraded: bool = True,
    empty: bool = False,
    beside: int = K - 1,
):
    """Groups of K rows of 1 to 9 tokens, and their prompts, by which a Table identifies a row.

    replay: the groups of the second half have a stored row, beside `beside` others
    ungraded: a few rows, and a whole group, could not be graded
    empty: one response has no token
    """
    rng = np.random.default_rng(seed)
    all_groups, all_rows, forward = [], [], []
    for g in range(groups):
        question = Question.make("test", f"question {g}", "1")
        replayed = replay and g >= groups // 2
        rows = []
        for k in (*range(beside), K - 1) if replayed else range(K):
            length = 0 if empty and (g, k) == (0, 1) else int(rng.integers(1, 10))
            ids = rng.integers(2, 18, length).astype(np.int32)
            logprobs = rng.normal(-1.5, 0.5, length).astype(np.float32)
            stored = replayed and k == K - 1
            missing = ungraded and not stored and (g == 1 or (g + k) % 7 == 3)
            grade = Grade("timeout", None) if missing else Grade("wrong", 0.0)
            member = Trajectory(ids, logprobs, 1.0, 0) if stored else Rollout(ids, "stop", grade, logprobs)
            # Ungradable rows have an advantage too, so that the loss would show if one of their tokens entered it.
            rows.append(Row(question, member, float(rng.normal()), not missing))
            forward.append(ForwardRow([len(forward), *[1] * int(rng.integers(1, 4))], ids))
        rollouts = tuple(row.response for row in rows if row.trajectory is None)
        all_groups.append(RolloutGroup(question, rollouts, replayed))
        all_rows.append(rows)
    return MixedBatch(all_groups, all_rows, K), forward


def arguments(loss: MixedPolicyLoss, *bindings: str, groups: int = 8, **flags: Any) -> Any:
    """OpenRLHF's arguments for a batch of this many groups of K, from its own parser."""
    flags = {"actor.num_gpus_per_node": 1, "vllm.num_engines": 1, **flags}
    more = [f"train.questions_per_step = {groups}", f"train.group_size = {K}", "train.engine = 'openrlhf'", *bindings]
    more += [f"OpenRLHF.flags = {flags!r}", "OpenRLHF.cpu_bench = True"]
    for name in ("entropy_coef", "kl_coef"):
        more.append(f"MixedPolicyLoss.{name} = {getattr(loss, name)}")
    experiment = _loaded(tuple(more))
    args = launch.parse(experiment, "model", Path("nowhere"), resume=False)
    args.exgrpo = replace(experiment, loss=loss)
    return args


@cache
def _loaded(bindings: tuple[str, ...]) -> Experiment:
    return config.load(["toy.gin"], bindings)


def experiences_of(
    args: Any, batch: MixedBatch, forward: list[ForwardRow], behaviour: list[np.ndarray | None]
) -> list[Any]:
    """The experiences that OpenRLHF's train_step gives to its ranks."""
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    maker = MixedExperienceMaker(None, None, None, None, None, SimpleNamespace(args=args), tokenizer)
    experiences = maker.make_experience_batch(as_experience(batch, forward, behaviour))
    return keep_order(experiences, args) if args.train.dynamic_batch_enable else experiences


class Case:
    """A batch (see `mixed_batch`) with log-probs close to each other, but far enough apart for the clip.

    forward: prompt and response of each row; places: where its log-probs are in a table (R, W)
    now, reference: (R, W), under the current policy and under the reference model's
    behaviour: of each row float32 (T,), stored ones of stored rows
    """

    def __init__(self, **options: Any) -> None:
        self.batch, self.forward = mixed_batch(**options)
        self.rows = self.batch.flat_rows()
        self.places = [slice(len(f.prompt) - 1, len(f) - 1) for f in self.forward]
        rng = np.random.default_rng(1)
        shape = len(self.forward), max(map(len, self.forward)) - 1
        self.now = rng.normal(-1.5, 0.5, shape)
        old = self.now + rng.normal(0, 0.3, shape)
        self.behaviour = [
            old[i, place].astype(np.float32) if row.trajectory is None else row.trajectory.behaviour_logprobs
            for i, (row, place) in enumerate(zip(self.rows, self.places, strict=True))
        ]
        self.reference = self.now + rng.normal(0, 0.3, shape)

    def of_policy(self, i: int) -> np.ndarray:
        """Log-probs of row i under the current policy, (T,)."""
        return self.now[i, self.places[i]]

    def plain(self, loss: MixedPolicyLoss, behaviour: list[np.ndarray] | None = None) -> tuple[float, torch.Tensor]:
        """Loss and gradient (R, W) of the same rows, computed as one optimiser step of the local engine without
        micro-batches."""
        values = torch.tensor(self.now, requires_grad=True)
        lengths = torch.tensor([len(row.token_ids) for row in self.rows])

        def tokens(table: torch.Tensor) -> torch.Tensor:  # (R, W) → (T,)
            return torch.cat([table[i, place] for i, place in enumerate(self.places)])

        def spread(per_row: list[Any]) -> torch.Tensor:
            return torch.tensor(per_row).repeat_interleave(lengths)

        mine = tokens(values)
        value = loss(
            TokenBatch(
                logprobs=mine,
                entropies=entropy_of(mine),
                behaviour_logprobs=torch.from_numpy(np.concatenate(behaviour or self.behaviour)),
                advantages=spread([np.float32(row.advantage) for row in self.rows]),
                replayed=spread([row.trajectory is not None for row in self.rows]),
                in_loss=spread([row.in_loss for row in self.rows]),
                row_weights=loss.row_weights(lengths, rows=K * len(self.batch.rows)).repeat_interleave(lengths),
                token_weight=1 / int(lengths.sum()),
                row_of=spread(list(range(len(self.rows)))),
                mixed=any(row.trajectory is not None for row in self.batch.flat_rows()),
                reference_logprobs=tokens(torch.from_numpy(self.reference)) if loss.kl_coef else None,
            )
        )
        value.backward()
        return float(value.detach()), values.grad

    def fit(
        self,
        loss: MixedPolicyLoss,
        *bindings: str,
        behaviour: list[np.ndarray | None] | None = None,
        forward: Callable[..., Any] | None = None,
        recorded: list[tuple[int, Any]] | None = None,
        **flags: Any,
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Runs MixedPolicyActor.fit on every rank. Returns the status of rank 0, and for each optimiser step the
        gradient (R, W) with respect to the log-probs `now`, averaged over the ranks as DeepSpeed does.

        forward: called instead of MixedLoss.forward; recorded: gets what all ranks have recorded, by row
        """
        args = arguments(loss, *bindings, **flags)
        experiences = experiences_of(args, self.batch, self.forward, behaviour or self.behaviour)
        ranks, each = args.actor.num_gpus_per_node, len(experiences) // args.actor.num_gpus_per_node
        assert each * ranks == len(experiences)

        def rank_fit(rank: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
            table, norms = Table(self.now), []
            actor = assembled_actor(table, Strategy(args, ranks, table, norms), norms)
            if forward is not None:
                actor.trainer.actor_loss_fn.forward = forward
            for experience in experiences[rank * each : (rank + 1) * each]:
                if loss.kl_coef:
                    width = experience.sequences.shape[1] - 1
                    reference = torch.from_numpy(self.reference)
                    experience.base_action_log_probs = reference[experience.sequences[:, 0], :width]
                actor.append(experience)
            status = actor.fit(args.algo.kl.init_coef)
            if recorded is not None:
                recorded.extend(actor.recorded().items())
            return status, actor.strategy.gradients

        results = on_ranks(ranks, rank_fit)
        steps = zip(*(gradients for _, gradients in results), strict=True)
        return results[0][0], [torch.stack(parts).mean(0).cpu() for parts in steps]


def assembled_actor(policy: Any, strategy: Any, norms: list[float]) -> MixedPolicyActor:
    """A policy actor with this model wrapper and this strategy, without Ray and DeepSpeed.

    norms: gradient norms that the strategy measures
    """
    actor = object.__new__(MixedPolicyActor)
    actor.actor, actor.strategy = policy, strategy
    actor.guard = SimpleNamespace(begin=lambda: None, norms=norms, skipped=0, rate=0.0)
    actor.trainer = MixedActorTrainer(
        strategy,
        policy,
        None,
        None,
        SimpleNamespace(get_last_lr=lambda: [0.0]),
        micro_train_batch_size=strategy.args.train.micro_batch_size,
        dataloader_pin_memory=False,
    )
    return actor


def on_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Calls `work` on each rank of a process group of threads and returns its results. Raises the first error."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        dist.init_process_group("threaded", rank=number, world_size=ranks, store=store)
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # so that the others do not wait
        finally:
            dist.destroy_process_group()

    with _threads_as_ranks():
        store = dist.HashStore()
        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
        assert not any(thread.is_alive() for thread in threads), "the ranks wait for one another"
    if errors:
        raise errors[0]
    return results


@contextmanager
def _threads_as_ranks():
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        isolate(False)
