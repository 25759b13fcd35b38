"""The replacements that let OpenRLHF run without CUDA, tested without starting Ray."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed")
if torch.cuda.is_available():
    pytest.skip("the CPU test layout does nothing where there is CUDA", allow_module_level=True)

from exgrpo_orlhf.engines.openrlhf import cpu

LENGTHS = [(3, 9), (0, 5), (4, 1), (1, 11)]  # padding on the left, tokens; the rest of 13 is padding on the right
WIDTH = 13


@pytest.fixture
def in_new_process(monkeypatch):
    """Calls a function in a process of its own: install() changes torch, and how this process imports."""
    for name, value in cpu.environment().items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=900)


def test_packing_takes_real_tokens_only_and_values_return_to_their_places():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]])
    rows = torch.arange(15).view(3, 5) + 100
    tokens, positions, labels, ring_padding, places = cpu.unpad_and_slice_tensor(rows, mask, None)

    assert tokens.tolist() == [[102, 103, 104, 105, 106, 111, 112, 113, 114]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert labels.tolist() == [[103, 104, 100, 106, 107, 112, 113, 114, 110]]  # the next in the padded row
    assert torch.equal(cpu.gather_and_pad_tensor(tokens, None, ring_padding, places, 3, 5), rows * mask)
    logits = torch.randn(1, 9, 7)
    assert torch.equal(cpu.gather_and_pad_tensor(logits, None, 0, places, 3, 5)[mask.bool()], logits[0])


def test_ring_attention_is_refused():
    rows = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="ring attention"):
        cpu.unpad_and_slice_tensor(rows, rows, object())


def install_twice() -> dict:
    cpu.install()
    first = list(sys.meta_path), torch.cuda.current_device, torch.cuda.synchronize
    cpu.install()
    return {
        "same": first == (sys.meta_path, torch.cuda.current_device, torch.cuda.synchronize),
        "heavy": sorted({"deepspeed", "openrlhf.utils", "ray", "transformers", "vllm"} & sys.modules.keys()),
        "device": str(torch.zeros(1).to(torch.cuda.current_device()).device),
        "index": str(torch.device(f"cuda:{torch.cuda.current_device()}")),
    }


def test_install_is_idempotent_and_imports_nothing_heavy(in_new_process):
    assert in_new_process(install_twice) == {"same": True, "heavy": [], "device": "cpu", "index": "cuda:0"}


def install_after_openrlhf() -> str:
    import openrlhf.utils.distributed_util

    try:
        cpu.install()
    except RuntimeError as error:
        return f"{error}, {'openrlhf.models.ring_attn_utils' in sys.modules}"
    return openrlhf.__name__


@pytest.mark.slow
def test_install_after_openrlhf_is_an_error_that_leaves_nothing_behind(in_new_process):
    message = in_new_process(install_after_openrlhf)
    assert "must come before" in message
    assert message.endswith("False")


def policy_values(path: str, rows: list[list[int]], mask: list[list[int]]) -> dict[str, list[np.ndarray]]:
    """Log-probs and entropies by OpenRLHF's actor, packed and padded, with the gradient of the embedding."""
    cpu.install()
    from openrlhf.models import Actor

    torch.set_num_threads(1)
    actor = Actor(path, attn_implementation=cpu.FLAGS["ds.attn_implementation"], packing_samples=True)
    actor.model.float()
    values = {}
    for name, packed in (("packed", True), ("padded", False)):
        actor.packing_samples = packed
        actor.zero_grad()
        tokens, attention_mask = torch.tensor(rows), torch.tensor(mask)
        logprobs, output = actor(
            tokens, attention_mask=attention_mask, return_logprobs=True, return_output=True, return_entropy=True
        )
        real = attention_mask[:, :-1] * attention_mask[:, 1:]  # a row's last token has no label
        ((logprobs + output.entropy) * real).sum().backward()
        gradient = actor.model.get_input_embeddings().weight.grad
        values[name] = [x.detach().numpy() for x in (logprobs * real, output.entropy * real, gradient)]
    return values


def padded_rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows, mask = np.zeros((len(LENGTHS), WIDTH), int), np.zeros((len(LENGTHS), WIDTH), int)
    for row, live, (left, length) in zip(rows, mask, LENGTHS, strict=True):
        row[left : left + length] = rng.integers(2, 18, size=length)
        live[left : left + length] = 1
    return rows, mask


@pytest.mark.slow
def test_packed_rows_get_the_padded_rows_log_probs_and_gradient_and_do_not_see_each_other(raw_model, in_new_process):
    rows, mask = padded_rows(seed=0)
    values = in_new_process(policy_values, str(raw_model), rows.tolist(), mask.tolist())
    for packed, padded in zip(values["packed"], values["padded"], strict=True):
        assert np.abs(padded).max() > 0.1
        np.testing.assert_allclose(packed, padded, atol=1e-5)

    other, _ = padded_rows(seed=1)
    changed = np.concatenate([other[:1], rows[1:-1], other[-1:]])
    after = in_new_process(policy_values, str(raw_model), changed.tolist(), mask.tolist())
    for kind in (0, 1):  # log-probs, entropies
        assert np.abs(after["packed"][kind][0] - values["packed"][kind][0]).max() > 0.1
        np.testing.assert_allclose(after["packed"][kind][1:-1], values["packed"][kind][1:-1], atol=1e-6)
