"""Which rows form an optimiser step and on which rank, and the state of a resumed run."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import openrlhf_on_cpu  # noqa: F401
import pytest
import torch
from engine_builders import K, sampled_batch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf_actor import experience_of, fit, make_actor

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.engines.openrlhf import universal
from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, deal, keep_order
from exgrpo_orlhf.engines.openrlhf.rank_passes import passes_by_rank
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.sampling import StepSeed

pytestmark = pytest.mark.openrlhf


@pytest.mark.parametrize(("groups", "steps", "ranks"), [(8, 1, 1), (8, 2, 1), (8, 2, 2), (12, 3, 4), (128, 2, 8)])
def test_every_step_has_whole_groups_dealt_as_on_the_local_engine_and_every_rank_as_many_rows(groups, steps, ranks):
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 9000, groups * K).tolist()
    order = deal(lengths, K, steps, ranks)
    assert sorted(order) == list(range(groups * K))
    parts = np.array(order).reshape(ranks, steps, -1)  # equal parts, or this fails
    for step in range(steps):
        assert set(parts[:, step].ravel() // K) == set(range(step, groups, steps))
        work = [sum(lengths[row] for row in part) for part in parts[:, step]]
        assert groups < 100 or max(work) < 1.1 * min(work)


def rows_of(n: int, seed: int) -> list[ForwardRow]:
    """Prompts of 300 tokens; lognormal responses of 2,000 tokens on average, at most 8,192."""
    lengths = np.random.default_rng(seed).lognormal(math.log(2000) - 0.7**2 / 2, 0.7, n)
    return [ForwardRow(range(300), np.zeros(max(1, min(int(length), 8192)), np.int32)) for length in lengths]


def costs(dealt: list, rows: list[ForwardRow], packed: bool) -> np.ndarray:
    """(ranks, passes)"""
    lengths = [[[len(rows[i]) for i in part] for part in passes] for passes in dealt]
    return np.array([[sum(p) if packed else len(p) * max(p) for p in passes] for passes in lengths])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("n", "ranks"), [(1, 1), (3, 2), (5, 8), (40, 1), (40, 3), (40, 32), (256, 32), (1024, 8)])
@pytest.mark.parametrize("budget", [4000, 32768, 10**7])
def test_passes_have_every_row_once_within_the_budget_and_equally_many_on_each_rank(packed, n, ranks, budget):
    rows = rows_of(n, seed=n)
    dealt = passes_by_rank(rows, budget, ranks, packed)
    assert len(dealt) == ranks
    assert len({len(passes) for passes in dealt}) == 1
    shortest = min(range(n), key=lambda i: len(rows[i]))
    again = [shortest] * (-n % ranks) if all(len(part) == 1 for part in itertools.chain(*dealt)) else []
    assert sorted(i for passes in dealt for part in passes for i in part) == sorted([*range(n), *again])
    for cost, part in zip(costs(dealt, rows, packed).ravel(), itertools.chain(*dealt), strict=True):
        assert cost <= budget or len(part) == 1


@pytest.mark.parametrize(
    ("packed", "n", "ranks", "most"), [(True, 256, 32, 1.05), (True, 1024, 8, 1.02), (False, 1024, 8, 1.1)]
)
def test_passes_cost_the_ranks_much_the_same(packed, n, ranks, most):
    """Of an even share of the tokens; with ZeRO-3 the ranks wait in every pass. Of 256 packed rows the slowest of 32
    ranks has 1.02; as padded rows it had 1.76."""
    for seed in range(10):
        rows = rows_of(n, seed)
        cost = costs(passes_by_rank(rows, 32768, ranks, packed), rows, packed)
        assert cost.max(0).sum() < most * sum(map(len, rows)) / ranks
        assert cost.shape[1] > (5 if n > 1000 else 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_reach_the_ranks_in_the_order_in_which_they_were_dealt(warm_model, dynamic):
    """After they were split into passes of the reference model, with dynamic batches by length."""
    batch = sampled_batch(warm_model)
    actor = make_actor(warm_model)
    rows = experience_of(actor, batch)
    args = actor.strategy.args
    args.train.dynamic_batch_enable, args.rollout.max_tokens_per_gpu = dynamic, 128
    args.actor.num_gpus_per_node = 2
    maker = MixedExperienceMaker(None, None, None, None, None, SimpleNamespace(args=args), actor.tokenizer)
    split = maker.split_rollout_samples(rows)
    experiences = keep_order(split, args)
    assert [len(e.sequences) for e in experiences] == [16, 16]
    token_ids = [ids[mask.bool()] for e in experiences for ids, mask in zip(e.sequences, e.attention_mask, strict=True)]
    assert all(torch.equal(one, row.sequences[0]) for one, row in zip(token_ids, rows, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1050, 80])
def test_no_pass_of_the_reference_model_exceeds_its_budget(budget, packed):
    """32 groups of 8 rows on 8 ranks. Of 1,050 tokens 14 passes are needed at least: OpenRLHF makes 8, the largest of
    1.7 times the budget. A row above a budget of 80 has a pass of its own."""
    lengths = np.random.default_rng(0).integers(8, 100, 256).tolist()
    assert 13 < sum(lengths) / 1050 <= 14
    rows = [
        Experience(
            sequences=torch.full((1, n), i), action_mask=torch.ones(1, n - 1), total_length=torch.tensor([float(n)])
        )
        for i, n in enumerate(lengths)
    ]
    flags = {"train": {"dynamic_batch_enable": True}, "rollout": {"max_tokens_per_gpu": budget}}
    flags |= {"actor": {"num_nodes": 2, "num_gpus_per_node": 4}, "algo": {}}
    flags |= {"ds": {"packing_samples": packed, "ring_attn_size": 1, "tensor_parallel_size": 1}}
    args = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in flags.items()})
    args.algo.advantage = SimpleNamespace(estimator="reinforce")
    strategy, tokenizer = SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    passes = MixedExperienceMaker(None, None, None, None, None, strategy, tokenizer).split_rollout_samples(rows)
    assert len(passes) % 8 == 0
    for one in passes:
        tokens = one.total_length if packed else one.total_length.max() * len(one.index)
        assert int(tokens.sum()) <= budget or len(one.index) == 1
    of_ranks = keep_order(passes, args)
    assert [len(e.sequences) for e in of_ranks] == [32] * 8
    assert [int(ids[0]) for e in of_ranks for ids in e.sequences] == [*range(256)]


def test_every_request_of_every_step_and_round_has_a_seed_of_its_own_and_always_the_same():
    of_steps = [StepSeed(0, step, round) for step in (1, 2, 3) for round in range(4)]
    seeds = [seed.of_request(position) for seed in of_steps for position in range(8)]
    assert len(set(seeds)) == 3 * 4 * 8
    assert seeds[:2] == [StepSeed(0, 1).of_request(0), StepSeed(0, 1, 0).of_request(1)]
    assert seeds[0] == int(np.random.SeedSequence([0, 4, 1, 0]).generate_state(1)[0]) >> 1, "as it always was"


@pytest.mark.slow
def test_a_checkpoint_becomes_whole_tensors_for_another_number_of_ranks(warm_model, tmp_path):
    actor, saved = make_actor(warm_model), tmp_path / "checkpoint-1"
    fit(actor, sampled_batch(warm_model))
    saved.mkdir()
    actor.save_state(str(saved), 1)
    sizes, flags, path = (SimpleNamespace(**values) for values in ({"num_nodes": 1}, {}, {"path": str(saved)}))
    args = SimpleNamespace(actor=sizes, ds=flags, ckpt=path)
    sizes.num_gpus_per_node = 2
    universal.convert(args, saved, tmp_path)
    folder = tmp_path / "universal"
    assert (args.ckpt.path, args.ds.use_universal_ckpt) == (str(folder), True)
    assert (folder / "config.json").resolve() == saved / "config.json"
    tag = (folder / "_actor" / "latest_universal").read_text()
    whole = folder / "_actor" / tag / "zero"
    for name, weight in actor.actor.model.module.named_parameters():
        tensor = torch.load(whole / name / "fp32.pt", weights_only=False)["param"]
        assert torch.equal(tensor.to(weight.dtype), weight.detach().cpu()), name
        assert (whole / name / "exp_avg.pt").exists()
    sizes.num_gpus_per_node, args.ckpt.path = 1, str(saved)
    universal.convert(args, saved, tmp_path)
    assert (folder.exists(), args.ckpt.path) == (False, str(saved))
    (part,) = (saved / "_actor" / tag).glob("*_optim_states.pt")
    part.write_bytes(part.read_bytes()[:-1000])
    sizes.num_gpus_per_node = 4
    with pytest.raises(checkpoints.CheckpointError, match="cannot be converted for 4 actors instead of 1:\n"):
        universal.convert(args, saved, tmp_path)


def test_flags_of_execution_and_the_number_of_ranks_may_differ_in_a_resumed_run_and_another_stage_is_named(
    tmp_path,
):
    def of(**more):
        file = "engines/openrlhf_8gpu.gin"
        return dict(config.load(["toy.gin", file], [f"OpenRLHF.more_flags = {more!r}"]).identity)

    state = {"step": 1, "identity": of()}
    saved = checkpoints.save(tmp_path, 1, "an id", lambda folder: checkpoints.write_state(folder, state) or {}, keep=1)
    ranks = {"actor.num_gpus_per_node": 4, "ref.num_gpus_per_node": 4, "vllm.num_engines": 4}
    assert of(**{"train.max_tokens_per_gpu": 9216, "vllm.gpu_memory_utilization": 0.5}) == state["identity"]
    assert checkpoints.read_state(saved, of(**ranks))["step"] == 1
    with pytest.raises(checkpoints.UnusableCheckpoint, match=r"'ds\.zero_stage': 2.* in the checkpoint, .*stage': 3"):
        checkpoints.read_state(saved, of(**ranks, **{"ds.zero_stage": 3}))
