"""OpenRLHF's policy actor with the mixed-policy loss, and with a forward pass that makes no logits.

Import this module only where OpenRLHF can be imported: with CUDA, or after cpu.install().
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from openrlhf.models import Actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer, PolicyModelActor
from torch.utils.data import DataLoader

from ...io import tokenizer_file
from ...io.files import Files, record
from ...objective.token_stats import response_stats
from ...questions.prompts import PromptEncoder
from ...records import Measured
from ...settings import LoRA
from ..frozen_copy import FrozenCopy, begin_anew
from ..lora import FOLDER, Adapter
from ..model import mixing_of_rows
from ..rows import ForwardRow, padded
from ..schedule import scheduler
from . import packed_attention, patches, weight_sync
from .policy_loss import MixedLoss

COPIES = "frozen"  # folder of a checkpoint: frozen copies
KEEP_ALL = 10**9  # checkpoints, GiB: OpenRLHF removes none; checkpoints/folder.py removes old ones


class MixedActorTrainer(ActorPPOTrainer):  # type: ignore[misc]
    """OpenRLHF's actor trainer with MixedLoss as its loss; everything around the loss is OpenRLHF's."""

    actor_loss_fn: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experiment, train, rollout = self.args.exgrpo, self.args.train, self.args.rollout
        self.one_step = train.batch_size == rollout.batch_size * rollout.n_samples_per_prompt
        self.actor_loss_fn = MixedLoss(
            experiment.loss,
            rows=train.batch_size * experiment.settings.group_size // experiment.mixer.places,
            # With dynamic batches OpenRLHF decides when a step ends, and DeepSpeed does not divide the loss.
            gas=1 if train.dynamic_batch_enable else self.strategy.accumulated_gradient,
            single_step=self.one_step and train.max_epochs == 1,
            openrlhf_loss=self.actor_loss_fn,
            ahead=bool(experiment.settings.generate_ahead),
        )
        self.recorded: dict[int, Measured] = {}

    def go_through(self, passes: int) -> None:
        """How many times the batches that follow are gone through."""
        self.max_epochs = passes  # of OpenRLHF's own
        self.actor_loss_fn.single_step = self.one_step and passes == 1

    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> dict[str, Any]:
        self.actor_loss_fn.replayed = _flags(experience.info, "replayed")
        self.actor_loss_fn.weights = _values(experience.info, "weight")
        self.actor_loss_fn.mixed = bool(_flags(experience.info, "mixed").any())  # all rows say the same
        self.actor_loss_fn.reference = experience.base_action_log_probs
        self.actor_loss_fn.preceding, self.actor_loss_fn.before = experience.values, experience.returns
        shares = _values(experience.info, "base_share") if "base_share" in experience.info else [1.0]
        self.actor_loss_fn.base_share = float(shares[0])
        # No token of a row that could not be graded is in the loss, though the normaliser has counted them.
        in_loss = _flags(experience.info, "in_loss").to(experience.action_mask.device)
        experience.action_mask = experience.action_mask * in_loss[:, None].to(experience.action_mask.dtype)
        if self.args.train.dynamic_batch_enable:
            # With dynamic batches OpenRLHF 0.11.2 sets DeepSpeed's gradient_accumulation_steps to 1 and calls backward
            # once for each micro-batch. ZeRO-1 and 2 then take every backward pass for the last of its optimiser step
            # and overwrite the gradient: only the last micro-batch would count, and the loss would not show it
            # (OpenRLHF's issue 1131). So this line tells DeepSpeed which pass is the last.
            self.actor.model.set_gradient_accumulation_boundary(bool(self.replay_buffer.dynamic_optimizer_step[step]))
        # kl_ctl = 0: OpenRLHF measures its own KL term but does not add it. Ours is in the loss, with its normaliser.
        status = super().training_step(experience, 0.0, step, loss_batch_info)
        if self.actor_loss_fn.single_step or self.actor_loss_fn.ahead:
            self._record(experience)
        # OpenRLHF divides its metrics by the tokens of a micro-batch. There are none where it holds only an ungradable
        # row, or rows that fill up a group.
        if not status["num_action_tokens"] and "logprobs_diff" in status["metrics"]:
            status["metrics"]["logprobs_diff"] = 0.0
        return {**status, "num_action_tokens": max(status["num_action_tokens"], 1.0)}

    def broadcast_to_vllm(self) -> None:
        with weight_sync.in_buckets(self.actor.model.module, self.actor.adapter):
            super().broadcast_to_vllm()

    def _record(self, experience: Any) -> None:
        """Keeps the log-probs and the mean entropy of each row that has a token in the loss, from its first forward
        pass of the update. Rows that could not be graded and those that fill up a group have none."""
        in_loss = experience.action_mask.bool().cpu()  # (R, A)
        log_probs, entropies = (values.float().cpu() for values in self.actor.latest)
        for label, tokens, *values in zip(experience.labels, in_loss, log_probs, entropies, strict=True):
            if tokens.any() and int(label) not in self.recorded:
                row_log_probs, row_entropies = (row[tokens] for row in values)
                self.recorded[int(label)] = Measured(row_log_probs.numpy(), float(row_entropies.mean()))


def _values(info: dict[str, Any], name: str) -> torch.Tensor:
    """A number of each row, (R,). OpenRLHF turns it into a tensor or a list of tensors, one per row, on the way."""
    return torch.stack([torch.as_tensor(value) for value in info[name]])


def _flags(info: dict[str, Any], name: str) -> torch.Tensor:
    return _values(info, name).bool()


class MixedActor(Actor):  # type: ignore[misc]
    """OpenRLHF's model wrapper without logits: for N response tokens and a vocabulary of V, N × V floats never exist.

    The output layer computes the log-prob and entropy of each response token, and the model returns them instead of
    its logits. The layer is called like any other, so ZeRO-3 gathers its weight for both passes.

    adapter: in the model, with LoRA; else None
    """

    def __init__(self, pretrain: str, *args: Any, lora: LoRA, seed: int, **kwargs: Any) -> None:
        super().__init__(pretrain, *args, **kwargs)
        self.adapter: Adapter | None = None
        if lora.rank is not None:
            # Reentrant checkpoints have a gradient only where one of their inputs has.
            self.model.enable_input_require_grads()
            self.adapter = Adapter(self.model, lora, pretrain, seed)

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        return_output: bool = False,
        ring_attn_group: None = None,
        packed_seq_lens: None = None,
        return_entropy: bool = False,
    ) -> Any:
        """sequences and attention_mask (B, S); action_mask (B, S−1), 1 at t if token t+1 belongs to the response.

        Returns log-probs (B, S−1) at the sampling temperature, 0 outside the mask; with `return_output` also the
        model's output, whose `entropy` is (B, S−1) at temperature 1, with a gradient if `return_entropy`.
        """
        predicts = torch.nn.functional.pad(action_mask.bool(), (0, 1))  # (B, S)
        targets = sequences.roll(-1, dims=1)[predicts]
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        mask: torch.Tensor | None = attention_mask
        inside, lengths = predicts, {}
        if self.packing_samples:  # all rows in one; rows are kept apart by positions that begin again at 0
            real, mask, lengths = attention_mask.bool(), None, packed_attention.lengths_of(attention_mask)
            sequences, positions, inside = (x[real][None] for x in (sequences, positions, predicts))
        head = self.model.module.get_output_embeddings()  # of the model inside DeepSpeed's engine

        def stats(hidden: torch.Tensor) -> torch.Tensor:
            log_probs, entropies = response_stats(head, hidden[inside], targets, self.temperature)
            return torch.stack((log_probs, entropies if return_entropy else entropies.detach()), -1)  # (N, 2)

        with patch.object(head, "forward", stats):
            output = self.model(sequences, attention_mask=mask, position_ids=positions, use_cache=False, **lengths)
        values = output["logits"]  # what `stats` returned

        def spread(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(predicts.shape, device=values.device).masked_scatter(predicts, values)[:, :-1]

        log_probs = spread(values[:, 0])
        if not return_output:
            return log_probs
        output.entropy = spread(values[:, 1])
        self.latest = log_probs.detach(), output.entropy.detach()  # OpenRLHF's training step returns neither
        return log_probs, output


def in_order(*args: Any, **kwargs: Any) -> DataLoader[Any]:
    """A loader that keeps the order of the rows."""
    return DataLoader(*args, **{**kwargs, "shuffle": False})


class GradientGuard:
    """Checks the gradient norm of every optimiser step before the step is made.

    DeepSpeed skips a step whose gradients overflowed, but checks for that in float16 only. Its check is replaced here
    by one that also skips a norm above `limit`. A skipped step does not advance the learning rate's schedule.

    norms: of every step since `begin`, before clipping; skipped: number of steps that were skipped; rate: the learning
        rate of the last step
    """

    def __init__(self, optimizer: Any, zero_stage: int, limit: float | None) -> None:
        """optimizer: DeepSpeed's, of ZeRO stage 1, 2 or 3; limit: None for no limit but finiteness"""
        self.optimizer, self.limit = optimizer, limit
        self.norms: list[float] = []
        self.skipped, self.rate = 0, 0.0
        patches.overflow_check(optimizer, zero_stage, self._check_stage_2, self._check_stage_3)

    def begin(self) -> None:
        self.norms, self.skipped = [], 0

    def _check_stage_2(self, partition_gradients: bool = True) -> None:
        self.optimizer.overflow = self._skip(self.optimizer.scaled_global_norm())

    def _check_stage_3(self) -> bool:
        norm = torch.linalg.vector_norm(torch.stack(self.optimizer._get_norm_groups()))
        self.optimizer.overflow = self._skip(norm)
        if self.optimizer.overflow:
            self.optimizer._overflow_clean_up(self.optimizer.loss_scale)
        return bool(self.optimizer.overflow)

    def _skip(self, scaled_norm: Any) -> bool:
        # DeepSpeed reports a norm that is not finite as −1, so `has_overflow` is asked too.
        norm = math.nan if self.optimizer.has_overflow() else float(scaled_norm) / float(self.optimizer.loss_scale)
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        self.norms.append(norm)
        skip = not math.isfinite(norm) or (self.limit is not None and norm > self.limit)
        self.skipped += skip
        return skip


class MixedPolicyActor(PolicyModelActor.__ray_metadata__.modified_class):  # type: ignore[misc]
    """OpenRLHF's policy actor. Ray forbids subclassing an actor class, but not the class under it."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        experiment, ds = strategy.args.exgrpo, strategy.args.ds
        patches.policy_parts(
            trainer=MixedActorTrainer,
            model=partial(MixedActor, lora=experiment.lora, seed=experiment.settings.seed),
            loader=in_order,
            scheduler=lambda optimizer: scheduler(optimizer, experiment.optimizer),
            tokenizer=tokenizer_file.load,
        )
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        PromptEncoder(experiment.prompts, self.tokenizer)  # which gives it the chat template that is saved with it
        self.copies = {name: FrozenCopy(self.actor.model.module) for name in experiment.copies}
        if strategy.args.ckpt.load_enable:
            self._load_copies(Path(strategy.args.ckpt.path) / COPIES)
        self.guard = GradientGuard(self.actor.model.optimizer, ds.zero_stage, experiment.optimizer.skip_above_grad_norm)
        model = self.actor.model.module
        size = model.config.get_text_config().vocab_size
        if ds.packing_samples and (mixed := mixing_of_rows(self.measure, size)):
            raise ValueError(
                f"OpenRLHF.flags: ds.packing_samples cannot be used with {type(model).__name__} and "
                f"ds.attn_implementation = {ds.attn_implementation!r}: the row before a row changes its log-probs by "
                f"{mixed:.2g} nats; leave out ds.packing_samples, and train.dynamic_batch_enable, which packs rows too"
            )

    def measure(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        """Each row under the current policy, in one forward pass without gradient."""
        ids, actions = padded(rows)  # (R, W)
        attention = np.arange(ids.shape[1]) < np.array([[len(row)] for row in rows])
        device = torch.cuda.current_device()
        sequences, mask, attended = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (ids, actions, attention))
        self.actor.eval()
        with torch.no_grad():
            log_probs, output = self.actor(sequences, mask[:, 1:], attended, return_output=True)
        self.actor.train()
        of_rows = zip(log_probs, output.entropy, mask[:, 1:].bool(), strict=True)
        return [Measured(logprob[at].cpu().numpy(), float(entropy[at].mean())) for logprob, entropy, at in of_rows]

    def measure_base(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        """Each row under the base model: with LoRA the reference of a KL term."""
        with self.actor.adapter.disabled():
            return self.measure(rows)

    # -- frozen copies ------------------------------------------------------------------------------------------------

    def exchange(self, name: str) -> None:
        """The policy and a copy change places."""
        self.copies[name].exchange()

    def take(self, name: str) -> None:
        self.copies[name].take()

    def go_through(self, passes: int) -> None:
        self.trainer.go_through(passes)

    def reincarnate(self) -> None:
        if "base" in self.copies:
            self.take("base")
        begin_anew(self.actor.model.optimizer.optimizer)

    def _file_of(self, name: str) -> str:
        """Of a copy in a checkpoint: with ZeRO-3 each rank has its shards, else all have the same."""
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        return f"{name}_{rank}_of_{ranks}.pt" if self.strategy.args.ds.zero_stage == 3 else f"{name}.pt"

    def _load_copies(self, folder: Path) -> None:
        for name, kept in self.copies.items():
            if not (file := folder / self._file_of(name)).exists():
                raise ValueError(f"{file} is missing: with ds.zero_stage = 3 as many actors go on as have saved it")
            kept.load(file)

    def fit(self, kl_ctl: float = 0) -> dict[str, Any]:
        """OpenRLHF's update with the batch that was appended. Returns its status and our metrics, the same on every
        rank."""
        loss = self.trainer.actor_loss_fn
        loss.begin()
        self.guard.begin()
        self.trainer.recorded = {}
        status = super().fit(kl_ctl)
        totals = self.strategy.all_reduce(dict(loss.totals), op="sum")
        return {
            **status,
            **loss.metrics(totals, self.strategy.world_size, len(self.guard.norms)),
            "policy/grad_norm": float(np.mean(self.guard.norms)),
            "policy/skipped_updates": float(self.guard.skipped),
            "policy/learning_rate": self.guard.rate,
        }

    def recorded(self) -> dict[int, Measured]:
        """What the latest `fit` recorded, by a row's position in the batch, for the rows of this rank. Empty where
        the batch is measured before the update: with several optimiser steps or passes, unless generated ahead."""
        return dict(self.trainer.recorded)

    def save_state(self, folder: str, step: int) -> Files:
        """Writes Hugging Face files into `folder` and DeepSpeed's into its subfolder _actor, as OpenRLHF expects.

        Returns the hashes of this rank's own files.
        """
        parts, tag, first = Path(folder) / "_actor", f"global_step{step}", self.strategy.is_rank_0()
        self.strategy.save_ckpt(self.actor.model, str(parts), tag, KEEP_ALL, KEEP_ALL, {"global_step": step})
        # As DeepSpeed names them
        patterns = [f"*pp_rank_{torch.distributed.get_rank()}_*", *(["mp_rank_*"] if first else [])]
        written = [path for pattern in patterns for path in (parts / tag).glob(pattern)]
        for name, kept in self.copies.items():
            if first or self.strategy.args.ds.zero_stage == 3:
                written.append(Path(folder) / COPIES / self._file_of(name))
                written[-1].parent.mkdir(exist_ok=True)
                kept.save(written[-1])
        if self.actor.adapter is None:
            self.strategy.save_model(self.actor, self.tokenizer, folder)
        else:
            state = self.actor.adapter.merged_state(keep=first)
            self.actor.adapter.save(Path(folder) / FOLDER, write=first)
            if first:
                self.actor.adapter.model.save_pretrained(folder, state_dict=state)
        if first:
            tokenizer_file.save(self.tokenizer, Path(folder))
            written += [path for path in Path(folder).iterdir() if path.is_file()]
        return record(Path(folder), written)

    def save_model(self) -> None:
        """Nothing: OpenRLHF would save the model at the end of a run, but the last checkpoint already holds it."""
