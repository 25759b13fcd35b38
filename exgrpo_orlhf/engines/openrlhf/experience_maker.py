"""Turns an assembled batch into OpenRLHF's experience, and decides which row goes to which rank and step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from ...attention.packing import PackedRow
from ...grader.grade import Grade
from ...records import MixedBatch, Question, Rollout, Row, Trajectory
from ..engine import LogProbs
from ..rows import ForwardRow, behaviour_logprobs
from .rank_passes import passes_by_rank

# A row that fills up a group: the fewest tokens of which one predicts another, and no response.
_FILLER = (
    Row(Question("", "", "", ""), Rollout(np.zeros(0, np.int32), "stop", Grade("wrong", 0.0)), 0.0, False),
    ForwardRow([0, 0], np.zeros(0, np.int32)),
)


def as_experience(
    batch: MixedBatch,
    rows: Sequence[PackedRow],
    measured: Sequence[LogProbs | None],
    references: Mapping[str, Sequence[LogProbs]] = {},
) -> list[Experience]:
    """One complete experience per row: grades and advantages are known. Groups with fewer rows than places are filled
    up, because OpenRLHF takes whole groups.

    A row that fills up a group has no response, so neither the loss nor a normaliser counts its tokens. OpenRLHF's own
    means over rows, in its loggers, count it as a row of reward and length 0. `labels` holds a row's position in the
    flattened batch, by which `MixedActorTrainer.recorded` names it.

    Args:
        rows: prompt and response of each row of the flattened batch
        measured: log-probs of each row, float32 (A,), by the policy that sampled the fresh ones; None for a row that
            came with its own, and for a fresh row whose log-probs come from the training pass. A replayed row gets its
            stored ones, bit-identical.
        references: log-probs of each row, by a field of `Experience`: `base_action_log_probs`, under the reference of a
            KL term, where that is no model of its own; under names of what a critic would need, `values`, under
            π_{k−1}, and `returns`, under π_k
    """
    of_rows = [{name: values[i] for name, values in references.items()} for i in range(len(rows))]
    of_filler = dict.fromkeys(references, np.zeros(0, np.float32))
    numbered = enumerate(list(zip(batch.flat_rows(), rows, measured, of_rows, strict=True)))
    experiences = []
    for members in batch.rows:
        experiences += [_experience(str(i), *row) for i, row in itertools.islice(numbered, len(members))]
        empty = batch.group_size + batch.added_size - len(members)
        experiences += [_experience("", *_FILLER, None, of_filler) for _ in range(empty)]
    mixed = torch.tensor([float(any(row.trajectory is not None for row in batch.flat_rows()))])
    for experience in experiences:
        experience.info["mixed"] = mixed
        if batch.base_share < 1:
            experience.info["base_share"] = torch.tensor([batch.base_share], dtype=torch.float64)
    return experiences


def _experience(
    label: str, row: Row, forward: PackedRow, measured: LogProbs | None, references: Mapping[str, LogProbs]
) -> Experience:
    prompt, length = len(forward.prompt), len(forward)
    predicts = np.zeros(length - 1, np.bool_)  # which tokens predict an action
    predicts[prompt - 1 :] = True if forward.actions is None else forward.actions
    behaviour = behaviour_logprobs(row, measured)
    logprobs = 0 if behaviour is None else behaviour
    # Without log-probs of the sampler, as for a replayed row, equal ones make a correction of 1.
    sampler, reward, truncated = logprobs, 0.0, False
    if isinstance(row.response, Trajectory):
        reward = row.response.reward
    else:
        assert row.response.grade is not None  # ReplayMixer.assemble takes graded groups only
        reward, truncated = row.response.grade.reward or 0.0, row.response.finish == "length"
        if row.response.sampler_logprobs is not None:
            sampler = row.response.sampler_logprobs

    def spread(values: Any) -> torch.Tensor:
        """A number per action at the position that predicts it, 0 elsewhere: (1, P + T − 1)."""
        row_values = np.zeros((1, length - 1), np.float32)
        row_values[0, predicts] = values
        return torch.from_numpy(row_values)

    return Experience(
        sequences=torch.from_numpy(np.concatenate([forward.prompt, forward.token_ids]).astype(np.int64))[None],
        attention_mask=torch.ones(1, length, dtype=torch.long),
        action_mask=spread(1).long(),
        action_log_probs=spread(logprobs),
        rollout_log_probs=spread(sampler),
        advantages=spread(row.advantage),
        rewards=torch.tensor([reward]),
        response_length=torch.tensor([float(len(forward.targets))]),
        truncated=torch.tensor([truncated]),
        total_length=torch.tensor([float(length)]),
        prompts=[row.question.id],
        labels=[label],
        info={
            "reward": torch.tensor([reward]),
            "replayed": torch.tensor([float(row.trajectory is not None)]),
            "in_loss": torch.tensor([float(row.in_loss)]),
            "weight": torch.tensor([row.weight], dtype=torch.float64),
        },
        **{name: spread(values) for name, values in references.items()},
    )


def deal(lengths: Sequence[int], group_size: int, steps: int, ranks: int) -> list[int]:
    """The order in which OpenRLHF must get the rows: a part for each rank, and in it a part for each optimiser step.

    Every n-th group goes to the same step, as on the local engine: a step has whole groups, whose advantages sum to 0,
    and fresh and replayed groups in the batch's proportion. Within a step the rows go to the ranks by length, forwards
    and backwards, so that all ranks have the same amount of work. The rank of a row does not change the result.

    lengths: of the rows, prompt included; group_size: rows of a group, with those that fill it up
    """
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    for step in range(steps):
        rows = [g * group_size + k for g in range(step, len(lengths) // group_size, steps) for k in range(group_size)]
        rows.sort(key=lambda row: (-lengths[row], row))
        for rank in range(ranks):
            forth, back = rows[rank :: 2 * ranks], rows[2 * ranks - 1 - rank :: 2 * ranks]
            parts[rank].append(forth + back)
    return [row for part in parts for rows in part for row in rows]


def keep_order(experiences: list[Experience], args: Any) -> list[Experience]:
    """One experience per rank, with its rows in the order in which they were given. OpenRLHF's balance_experiences, for
    which it stands, sorts a batch by length and so changes its optimiser steps."""
    rows = [pair for e in experiences for pair in zip(list(e.index), split_experience_batch(e), strict=True)]
    rows.sort(key=lambda pair: pair[0])
    size = len(rows) // (args.actor.num_nodes * args.actor.num_gpus_per_node)
    return [make_experience_batch([row for _, row in rows[i : i + size]]) for i in range(0, len(rows), size)]


class MixedExperienceMaker(RemoteExperienceMaker):  # type: ignore[misc]
    """Adds the reference model's log-probs, for a KL term. Everything else is in the experience already.

    OpenRLHF's own experience maker would overwrite behaviour log-probs with the current policy's, and compute
    advantages from rewards that a stored success does not have.
    """

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """The rows in the reference model's passes, as many on each rank, a rank's one after another. `index` holds the
        positions of a pass's rows.

        With dynamic batches a pass has at most rollout.max_tokens_per_gpu, or one row. OpenRLHF 0.11.2 rounds the
        number of passes down to a multiple of the ranks, and its passes are up to twice as large.
        """
        args = self.args
        if not args.train.dynamic_batch_enable:
            passes: list[Experience] = super().split_rollout_samples(rollout_samples)
            return passes
        for i, sample in enumerate(rollout_samples):
            sample.index = [i]
        rows = [range(int(sample.total_length)) for sample in rollout_samples]
        ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
        dealt = passes_by_rank(rows, args.rollout.max_tokens_per_gpu, ranks, args.ds.packing_samples)
        pad = self.tokenizer.pad_token_id
        return [
            Experience.concat_experiences([rollout_samples[i] for i in part], pad) for part in itertools.chain(*dealt)
        ]

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        if self.initial_model_group is not None:
            refs = self._dispatch_forward(
                self.initial_model_group,
                self.args.train.colocate_all or self.args.train.colocate_actor_ref,
                sequences=[sample.sequences for sample in samples_list],
                action_mask=[sample.action_mask for sample in samples_list],
                attention_mask=[sample.attention_mask for sample in samples_list],
            )
            for sample, logprobs in zip(samples_list, self._flatten_results(refs, 1), strict=True):
                sample.base_action_log_probs = logprobs
        return samples_list

    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        return experiences
