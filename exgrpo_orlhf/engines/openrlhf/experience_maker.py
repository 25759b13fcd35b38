"""From an assembled batch to OpenRLHF's experience."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from ...records import MixedBatch
from ..rows import ForwardRow


def as_experience(
    batch: MixedBatch, rows: Sequence[ForwardRow], measured: Sequence[np.ndarray | None]
) -> list[Experience]:
    """One experience a row, complete: grades and advantages are known. A group of fewer than K rows is filled up to K.

    rows: of the flattened batch, prompt and response of each
    measured: log-probs of each, float32 (T,), by the policy that sampled the fresh ones; None for a fresh row whose
        log-probs come from the training pass. A replayed row enters with the stored ones, to the bit
    `labels` has the row's place in the flattened batch, by which `MixedActorTrainer.recorded` names it.
    Raises ValueError for a fresh rollout without a grade: it must not be trained on as if it were wrong.
    """
    sampled = [rollout for group in batch.groups for rollout in (*group.rollouts, *([None] * group.replayed))]
    experiences = []
    for i, (row, forward, now, rollout) in enumerate(zip(batch.flat_rows(), rows, measured, sampled, strict=True)):
        if rollout is not None and rollout.grade is None:
            raise ValueError(f"question {row.question.id}: a rollout has no grade")
        grade = None if rollout is None else rollout.grade
        stored = 0.0 if row.replayed is None else row.replayed.reward
        reward = stored if grade is None else (grade.reward or 0.0)
        truncated = rollout is not None and rollout.finish == "length"
        sampler = None if rollout is None else rollout.sampler_logprobs
        behaviour = now if row.replayed is None else row.replayed.behaviour_logprobs
        logprobs = 0 if behaviour is None else behaviour
        prompt, length = len(forward.prompt), len(forward)

        def spread(values: Any, start: int = prompt - 1, width: int = length - 1) -> torch.Tensor:
            """A number per response token at the position that predicts it, 0 elsewhere: (1, P + T − 1)."""
            row_values = np.zeros((1, width), np.float32)
            row_values[0, start:] = values
            return torch.from_numpy(row_values)

        experiences.append(
            Experience(
                sequences=torch.from_numpy(np.concatenate([forward.prompt, forward.response]).astype(np.int64))[None],
                attention_mask=torch.ones(1, length, dtype=torch.long),
                action_mask=spread(1).long(),
                action_log_probs=spread(logprobs),
                # A replayed row has none of its own: equal ones make a correction of 1, and it is not corrected anyway.
                rollout_log_probs=spread(logprobs if sampler is None else sampler),
                advantages=spread(row.advantage),
                rewards=torch.tensor([reward]),
                response_length=torch.tensor([float(len(forward.response))]),
                truncated=torch.tensor([truncated]),
                total_length=torch.tensor([float(length)]),
                prompts=[row.question.id],
                labels=[str(i)],
                info={
                    "reward": torch.tensor([reward]),
                    "replayed": torch.tensor([float(row.replayed is not None)]),
                    "in_loss": torch.tensor([float(row.in_loss)]),
                },
            )
        )
    of_rows = iter(experiences)
    return [
        experience
        for members in batch.rows
        for experience in (*itertools.islice(of_rows, len(members)), *_fillers(batch.width - len(members)))
    ]


def _fillers(n: int) -> list[Experience]:
    """Rows that change nothing, for OpenRLHF takes whole groups of K: two tokens, the fewest of which one predicts
    another, and no response. No loss and no normaliser by tokens sees them. OpenRLHF's own means over rows, in its
    loggers, count them as rows of reward and length 0."""
    return [
        Experience(
            sequences=torch.zeros(1, 2, dtype=torch.long),
            attention_mask=torch.ones(1, 2, dtype=torch.long),
            action_mask=torch.zeros(1, 1, dtype=torch.long),
            action_log_probs=torch.zeros(1, 1),
            rollout_log_probs=torch.zeros(1, 1),
            advantages=torch.zeros(1, 1),
            rewards=torch.zeros(1),
            response_length=torch.zeros(1),
            truncated=torch.tensor([False]),
            total_length=torch.tensor([2.0]),
            prompts=[""],
            labels=[""],
            info={name: torch.zeros(1) for name in ("reward", "replayed", "in_loss")},
        )
        for _ in range(n)
    ]


def deal(lengths: Sequence[int], width: int, steps: int, ranks: int) -> list[int]:
    """The order in which OpenRLHF must get the rows: a part for each rank, and in it a part for each optimiser step.

    lengths: of the rows, prompt included; width: K, rows of a group
    Groups are dealt to the steps like cards, as on the local engine: a step has whole groups, whose advantages sum to
    0, and fresh and replayed ones in the batch's proportion. Inside a step the rows go to the ranks by length, there
    and back, so that all have the same work; on which rank a row is changes nothing.
    """
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    for step in range(steps):
        rows = [g * width + k for g in range(step, len(lengths) // width, steps) for k in range(width)]
        rows.sort(key=lambda row: (-lengths[row], row))
        for rank in range(ranks):
            there, back = rows[rank :: 2 * ranks], rows[2 * ranks - 1 - rank :: 2 * ranks]
            parts[rank].append(there + back)
    return [row for part in parts for rows in part for row in rows]


def keep_order(experiences: list[Experience], args: Any) -> list[Experience]:
    """In the place of OpenRLHF's balance_experiences, which sorts a batch by length, and so its optimiser steps too.

    Returns one experience a rank, with its rows in the order in which they were handed in.
    """
    rows = [pair for e in experiences for pair in zip(list(e.index), split_experience_batch(e), strict=True)]
    rows.sort(key=lambda pair: pair[0])
    size = len(rows) // (args.actor.num_nodes * args.actor.num_gpus_per_node)
    return [make_experience_batch([row for _, row in rows[i : i + size]]) for i in range(0, len(rows), size)]


class MixedExperienceMaker(RemoteExperienceMaker):
    """Everything is in the experience already but the reference model's log-probs, for a KL term.

    OpenRLHF's own would overwrite behaviour log-probs with the current policy's, and compute advantages from rewards
    that a stored success does not have.
    """

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        reference: list[Any] = [None] * len(samples_list)
        if self.initial_model_group is not None:
            refs = self._dispatch_forward(
                self.initial_model_group,
                self.args.train.colocate_all or self.args.train.colocate_actor_ref,
                sequences=[sample.sequences for sample in samples_list],
                action_mask=[sample.action_mask for sample in samples_list],
                attention_mask=[sample.attention_mask for sample in samples_list],
            )
            reference = self._flatten_results(refs, 1)
        for sample, logprobs in zip(samples_list, reference, strict=True):
            sample.base_action_log_probs = logprobs
        return samples_list

    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        return experiences
