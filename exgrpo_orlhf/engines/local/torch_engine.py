"""The local engine, in one process on one CPU or one GPU: it generates, scores, updates and saves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from ... import tokenizer_file
from ...checkpoints import name_end_tokens
from ...environments.environment import Environment
from ...environments.playing import Play, episode_seeds, play, player_of
from ...files import Files
from ...objective import MixedPolicyLoss
from ...questions.prompts import PromptEncoder, Prompts
from ...records import Measured, MixedBatch, Question, Rollout, RolloutGroup
from ...replay import Plan
from ...settings import LocalEngine, LoRA, Optimizer, Sampling
from ..engine import Engine, UpdateStats
from ..lora import FOLDER, Adapter
from ..rows import ForwardRow
from .forward import PolicyForward, measure
from .generation import check_rows, chunk_seed, generate
from .placement import check, device_of, dtype_of, end_and_pad, load
from .update import PolicyUpdate, Reference

_FULL = LoRA()  # training of all weights


class TorchEngine(Engine):
    """The engine with transformers and torch, in this process."""

    whole_batches = overlaps_update = False

    def __init__(
        self,
        settings: LocalEngine,
        optimizer: Optimizer,
        sampling: Sampling,
        prompts: Prompts,
        lora: LoRA = _FULL,
        environment: Environment | None = None,
        *,
        model_path: str | Path,
        weights_path: str | Path | None = None,
        seed: int = 0,
        reference: bool = False,
        generates: bool = True,
    ) -> None:
        """model_path: a Hugging Face causal LM with its tokenizer; weights_path: a checkpoint of it to continue from;
        reference: whether there is a KL term to the model at `model_path`: a frozen copy of it, or with LoRA the same
        model without its adapter; generates: False for an engine that only scores and trains

        Raises ValueError for a device that is not there, and for a model that this engine cannot train.
        """
        torch.set_num_threads(settings.threads)
        self.device = device_of(settings.device)
        self.model_path = model_path
        self.settings, self.sampling, self.seed = settings, sampling, seed
        self.tokenizer = tokenizer_file.load(model_path)
        self.prompts = PromptEncoder(prompts, self.tokenizer)
        self.adapter: Adapter | None = None
        if lora.rank is None:
            self.model = load(weights_path or model_path, self.device)
        else:
            self.model = load(model_path, self.device)
            self.adapter = Adapter(self.model, lora, model_path, seed)
            if weights_path is not None:
                self.adapter.load(Path(weights_path) / FOLDER)
        check(self.model, model_path, prompts.max_tokens + sampling.max_response_tokens)
        self.end, self.pad = end_and_pad(self.model, self.tokenizer, self.prompts.turn_ends())
        if generates:
            check_rows(self.model, self.pad, turns=bool(environment and environment.path))
        self.player = player_of(environment, self.prompts, sampling.max_response_tokens)
        self.forward = PolicyForward(self.model, sampling.temperature, dtype_of(settings.dtype, self.device))
        self._update = PolicyUpdate(self.forward, self._reference() if reference else None, optimizer, settings)

    def _reference(self) -> Reference:
        adapter, forward = self.adapter, self.forward
        if adapter is None:
            frozen = load(self.model_path, self.device).requires_grad_(False)
            return PolicyForward(frozen, forward.temperature, forward.compute_dtype)

        def base(rows: Sequence[ForwardRow], pack: bool) -> tuple[torch.Tensor, torch.Tensor]:
            with adapter.disabled():
                return forward(rows, pack)

        return base

    # -- generate -----------------------------------------------------------------------------------------------------

    def rollout(self, plan: Plan, group_size: int) -> list[RolloutGroup]:
        """As many fresh responses as `plan.rollout_counts` says; groups in plan order, ungraded."""
        questions = [*plan.fresh, *plan.replayed]
        owners = [i for i, count in enumerate(plan.rollout_counts(group_size)) for _ in range(count)]
        rollout_questions, temperature = [questions[i] for i in owners], self.sampling.temperature
        if self.player:
            seeds = episode_seeds(self.seed, plan.step, plan.round, len(rollout_questions))
            sampled = self.play(rollout_questions, seeds, temperature, 1.0)
        else:
            sampled = self._generate([*map(self.prompts.encode, rollout_questions)], temperature, plan.step, plan.round)
        rollouts: list[list[Rollout]] = [[] for _ in questions]
        for owner, rollout in zip(owners, sampled, strict=True):
            rollouts[owner].append(rollout)
        return [
            RolloutGroup(question, tuple(group), planned_replay=i >= len(plan.fresh))
            for i, (question, group) in enumerate(zip(questions, rollouts, strict=True))
        ]

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        return self._generate(prompts, temperature or None, 0, top_p=top_p, seeds=seeds)

    def play(
        self, questions: Sequence[Question], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        """As many at a time as are generated at a time: their keys and values are kept from turn to turn."""

        def turn(plays: Sequence[Play]) -> list[Rollout]:
            contexts, own = [one.context for one in plays], [one.turn_seed for one in plays]
            return self._generate(contexts, temperature or None, 0, top_p=top_p, seeds=own, plays=plays)

        assert self.player is not None
        order = sorted(range(len(questions)), key=lambda i: (len(self.prompts.encode(questions[i])), i))
        rollouts: dict[int, Rollout] = {}
        for begin in range(0, len(order), self.settings.generation_rows):
            part = order[begin : begin + self.settings.generation_rows]
            with self.player.episodes([questions[i] for i in part], [seeds[i] for i in part]) as plays:
                rollouts.update(zip(part, play(plays, turn), strict=True))
        return [rollouts[i] for i in range(len(questions))]

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float | None,
        step: int,
        round: int = 0,
        top_p: float = 1.0,
        seeds: Sequence[int] | None = None,
        plays: Sequence[Play] | None = None,
    ) -> list[Rollout]:
        """temperature: None is greedy; seeds: None samples from torch's global generator, seeded by `chunk_seed`

        plays: the episodes of which these are turns
        """
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))  # little padding within a chunk
        rollouts: dict[int, Rollout] = {}
        rows = self.settings.generation_rows
        # Sampling uses torch's global generator: it is seeded here, and its state is restored afterwards.
        devices = [self.device] if self.device.type == "cuda" else []
        # As fast with merged weights as without an adapter, and faster for small models (benchmarks/lora.py).
        merged = nullcontext() if self.adapter is None else self.adapter.merged()
        with merged, torch.random.fork_rng(devices=devices), self.forward.autocast():
            for chunk, begin in enumerate(range(0, len(order), rows)):
                part = order[begin : begin + rows]
                torch.manual_seed(chunk_seed(self.seed, step, chunk, round))
                limits = [plays[i].room for i in part] if plays else None
                responses = generate(
                    self.model,
                    [prompts[i] for i in part],
                    end=self.end,
                    pad=self.pad,
                    max_new_tokens=max(limits) if limits else self.sampling.max_response_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    seeds=None if seeds is None else [seeds[i] for i in part],
                    limits=limits,
                    stop=self.player.environment.stop if self.player else (),
                    tokenizer=self.tokenizer,
                    contexts=[plays[i] for i in part] if plays else (),
                    last=all(one.last_turn for one in plays or ()),
                )
                rollouts.update(zip(part, responses, strict=True))
        return [rollouts[i] for i in range(len(prompts))]

    # -- score and update ---------------------------------------------------------------------------------------------

    def measure(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        return measure(self.forward, rows, self.settings.micro_batch_tokens)

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more optimiser steps on a batch (see PolicyUpdate)."""
        return self._update(batch, self.forward_rows(batch), loss)

    def sync(self) -> None:
        """Nothing: it generates with the weights that it trains."""

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Files:
        """Hugging Face files in `folder`, optimiser and schedule in its subfolder trainer/, hashed as it is written.

        With LoRA the weights are merged, and the adapter is in the subfolder adapter/: the run goes on from that.
        """
        state = None if self.adapter is None else self.adapter.merged_state()
        self.model.save_pretrained(folder, state_dict=state)
        if self.adapter is not None:
            self.adapter.save(folder / FOLDER)
        tokenizer_file.save(self.tokenizer, folder)
        name_end_tokens(folder, self.prompts.turn_ends())
        (folder / "trainer").mkdir(exist_ok=True)
        self._update.save(folder / "trainer" / "optimizer.pt")
        return {}

    def load(self, folder: Path) -> None:
        """Loads optimiser and schedule. The weights come with the constructor's `weights_path`."""
        self._update.load(folder / "trainer" / "optimizer.pt")
