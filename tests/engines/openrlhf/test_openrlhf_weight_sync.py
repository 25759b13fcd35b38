"""Weights on their way from an actor to vLLM, without Ray. Real engines get them in every test of a whole run."""

from __future__ import annotations

from types import SimpleNamespace

import openrlhf_on_cpu  # noqa: F401
import pytest
import ray
import torch
from engine_builders import move_adapter
from openrlhf.trainer.ray import ppo_actor
from transformers import AutoModelForCausalLM

from exgrpo_orlhf.engines.lora import Adapter
from exgrpo_orlhf.engines.openrlhf import weight_sync
from exgrpo_orlhf.engines.openrlhf.actor import MixedActorTrainer
from exgrpo_orlhf.settings import LoRA

pytestmark = pytest.mark.openrlhf


class Engine(weight_sync.WeightReceiver):
    """vLLM's worker and OpenRLHF's actor around it in one, in this process. sent: what the actor broadcasts"""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device, self.model_config = torch.device("cpu"), SimpleNamespace(dtype=dtype)
        self.calls, self.weights = 0, {}
        self.model_runner, self._model_update_with_ray = SimpleNamespace(model=self), False
        self._model_update_group = self

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        assert not self.weights.keys() & dict(weights).keys()
        self.weights |= {name: weight.clone() for name, weight in weights}

    def __getattribute__(self, name: str):
        method = super().__getattribute__(name)
        if name not in ("update_weight", "update_weight_cuda_ipc"):
            return method

        def remote(*names, empty_cache, **bucket):
            self.calls += 1
            return lambda: method(*names, **bucket)  # it runs where the actor waits for it

        return SimpleNamespace(remote=remote)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
        tensor.copy_(self.sent)


@pytest.fixture
def sent_by(monkeypatch):
    """Sends a model's weights to two engines and returns these. Rank 0 of one; Ray and CUDA's handles are replaced."""
    monkeypatch.setattr(ray, "get", lambda calls: [call() for call in calls])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda handles, own: handles.__setitem__(0, own))
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(ppo_actor, "get_physical_gpu_id", lambda: "GPU-0")
    monkeypatch.setattr(weight_sync, "get_physical_gpu_id", lambda: "GPU-0")
    of_cuda = lambda flat: (lambda *arguments: flat, tuple(range(15)))
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", of_cuda)

    def send(model, adapter=None, shares=False, dtype=torch.bfloat16):
        engines = [Engine(dtype), Engine(dtype)]

        def broadcast(flat, src, stream):
            for engine in engines:
                engine.sent = flat

        ds, vllm = SimpleNamespace(zero_stage=2, tensor_parallel_size=1), SimpleNamespace(enable_prefix_caching=False)
        trainer = MixedActorTrainer.__new__(MixedActorTrainer)
        trainer.actor = SimpleNamespace(adapter=adapter, model=SimpleNamespace(module=model))
        trainer.strategy = SimpleNamespace(args=SimpleNamespace(ds=ds, vllm=vllm))
        trainer.use_cuda_ipc, trainer.vllm_engines = shares, engines
        trainer._model_update_group = SimpleNamespace(broadcast=broadcast)
        trainer.broadcast_to_vllm()
        return engines

    return send


@pytest.fixture
def model(warm_model):
    return AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.bfloat16)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("bucket", [2, 5000, 2**30])
@pytest.mark.parametrize("tied", [True, False])
def test_every_engine_gets_every_weight_once_and_bit_identical(sent_by, model, monkeypatch, shares, bucket, tied):
    """By broadcast and by CUDA IPC; a bucket for each parameter, a few for all, one."""
    monkeypatch.setattr(weight_sync, "BUCKET", bucket)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    weights = dict(model.named_parameters())
    assert ("lm_head.weight" in weights) != tied
    for engine in sent_by(model, shares=shares):
        assert engine.weights.keys() == weights.keys()
        assert all(torch.equal(engine.weights[name], weight) for name, weight in weights.items())
        sizes = [weight.nbytes for weight in weights.values()]
        assert sum(sizes) > 2 * 5000 > max(sizes)
        calls = {2: len(weights), 2**30: 1}.get(bucket)
        assert engine.calls == calls if calls else 2 < engine.calls < len(weights)


def test_with_an_adapter_the_merged_weights_are_sent_under_the_names_of_the_base_model(sent_by, model, warm_model):
    names = [name for name, _ in model.named_parameters()]
    adapter = Adapter(model, LoRA(rank=4), warm_model, 0)
    move_adapter(model)
    merged = adapter.merged_state()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine, _ = sent_by(model, adapter)
    assert list(engine.weights) == names
    assert all(torch.equal(weight, merged[name]) for name, weight in engine.weights.items())
    assert any(not torch.equal(merged[name], before.get(name, merged[name] + 1)) for name in names)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_weights_of_another_dtype_than_the_engines_are_refused_by_name(sent_by, model):
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight … come as torch.bfloat16, .* torch.float16"):
        sent_by(model, dtype=torch.float16)
