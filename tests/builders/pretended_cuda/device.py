"""A CUDA device without a GPU: real values, computed on the CPU, under the name cuda:0.

An operation that CUDA would refuse because its tensors are on two devices raises a RuntimeError that names it.
Operations that make the host wait for the device are counted. The process must be started with the compiled guard.cpp
in LD_PRELOAD.

Internals of torch 2.13 are replaced permanently, for the whole process. Not tested by it: kernels and their own
requirements such as alignment, memory, streams. 0-dimensional CPU tensors are accepted by elementwise operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda:0")
COPIES = {"aten::copy_", "aten::_to_copy"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"}

waits: Counter[str] = Counter()  # operations that made the host wait for the device
_kernels = torch.library.Library("aten", "IMPL")  # what is registered lives as long


class CudaTensor(torch.Tensor):
    """raw: the CPU tensor with the values. All other attributes are those of a tensor on cuda:0."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> CudaTensor:
        about = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, raw.size(), **about, layout=raw.layout, device=DEVICE)

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))

    # With these two Module.to exchanges a parameter's contents: a tied one stays tied, as with CUDA.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> CudaTensor:
        return CudaTensor(inner["raw"])

    # For saving.
    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.raw.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.raw})"


class Pretended(TorchDispatchMode):
    """Within this mode the device 'cuda' is the pretended one, also for functions that create tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))


def dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One operation of ATen, below autograd and autocast: checked, counted, computed on the CPU."""
    name = func._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, CudaTensor)]
    others = [x for x in tensors if not isinstance(x, CudaTensor)]
    written = [
        kwargs.get(argument.name, args[i] if i < len(args) else None)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if ours and name not in COPIES:
        _require_one_device(func, args, ours, others, tree_leaves(written))
    device = kwargs.get("device")
    to_cuda = torch.device(device).type == "cuda" if device is not None else bool(ours)
    if ours:
        _count(name, args, kwargs, to_cuda)
    if device is not None and to_cuda:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    raw_args, raw_kwargs = tree_map(lambda x: x.raw if isinstance(x, CudaTensor) else x, (args, kwargs))
    result = func(*raw_args, **raw_kwargs)
    if written:  # the caller's own tensors come back
        for tensor in tree_leaves(written):
            if isinstance(tensor, CudaTensor) and tensor.shape != tensor.raw.shape:
                raise NotImplementedError(f"{func} changes the shape of a tensor in place: CudaTensor does not follow")
        return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
    if not to_cuda:
        return result
    return tree_map(lambda x: CudaTensor(x) if isinstance(x, torch.Tensor) else x, result)


def _require_one_device(func: Any, args: tuple, ours: list, others: list, written: list) -> None:
    """Raises for the CPU tensors that CUDA would not take."""
    name = func._schema.name
    refused = [x for x in others if x.dim() or torch.Tag.pointwise not in func.tags or any(x is w for w in written)]
    if name in INDEXED and isinstance(args[0], CudaTensor):  # indices may be on the CPU, and a value of no dimension
        allowed = [*tree_leaves(args[1]), *(x for x in args[2:3] if x.dim() == 0)]
        refused = [x for x in refused if not any(x is y for y in allowed)]
    if refused:
        shapes = ", ".join(str(tuple(x.shape)) for x in refused)
        raise RuntimeError(
            f"{func}: tensors on two devices, cuda:0 {', '.join(str(tuple(x.shape)) for x in ours)} and cpu {shapes}"
        )


def _count(name: str, args: tuple, kwargs: dict[str, Any], to_cuda: bool) -> None:
    if name == "aten::copy_":
        to_cuda = isinstance(args[0], CudaTensor)
    by_mask = name in INDEXED and any(x is not None and x.dtype == torch.bool for x in tree_leaves(args[1]))
    lengths = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
    if name in WAITS or (name in COPIES and not to_cuda) or by_mask or lengths:
        waits[name.removeprefix("aten::")] += 1


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Attention with the kernels that the CPU would use; torch would look for CUDA's."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    raw = [x if x is None else x.raw for x in (query, key, value, attn_mask)]
    flash = torch._fused_sdp_choice(*raw, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa) == 1
    if flash:
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return call(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    call = torch.ops.aten._scaled_dot_product_attention_math
    return call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def install() -> None:
    """Makes torch treat the device as available. Its random numbers come from the CPU's generator."""
    calls = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda device=None: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, call in calls.items():
        setattr(torch.cuda, name, call)
    _kernels.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    make = torch.tensor

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> torch.Tensor:
        """Replaces torch.tensor, which reads tensors in `data` and copies to a device with all modes switched off."""
        made = make(tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) else x, data), dtype=dtype, **more)
        return made if device is None else made.to(device)

    torch.tensor = tensor


def messages_of(faults: dict[str, tuple[Any, str, Callable[..., Any], Callable[[], Any]]]) -> dict[str, str]:
    """The error message of each work while a function of a module is replaced by a wrong one.

    faults: by name (module, function, wrong, work)
    """
    messages = {}
    for name, (module, function, wrong, work) in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, function, wrong)
            try:
                work()
                messages[name] = "nothing"
            except RuntimeError as error:
                messages[name] = str(error)
    return messages
