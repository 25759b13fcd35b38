"""Whether a model is there and whole: its files of weights against the architecture that its config.json names.

transformers fills what the files lack with random numbers and ignores what it has no place for. Here names and shapes
are compared as it would load them, with its renaming and fusing of weights, but on the meta device: nothing is
allocated. The values are read once, which takes 0.1 s a GiB beside the time of the disk.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from . import files
from .lazy import torch, transformers

if TYPE_CHECKING:
    from torch import Tensor

_THREADS = 4  # tensors read, or files hashed, at a time


class WeightsError(ValueError):
    """A model that is not there, or whose weights or tokenizer do not fit its configuration."""


def save(model: Any, folder: Path, **more: Any) -> None:
    """`save_pretrained` of a model that nothing wraps. To find that out accelerate would import DeepSpeed, where it is
    installed, which takes 7 s of processor time in every process."""
    with patch("transformers.modeling_utils.unwrap_model", lambda model: model):
        model.save_pretrained(folder, **more)


def locate(name: str) -> str:
    """What `from_pretrained` takes for a folder, or for a hub id that is in the hub's cache or on the hub. The hub gets
    one short request: transformers would ask for each file again and again, half a minute long.
    Raises WeightsError for what is not there, at once where the name is that of a path.
    """
    import httpx
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    why = "there is no such folder"
    try:
        if not name.startswith(("/", ".", "~")):
            if isinstance(try_to_load_from_cache(name, "config.json"), str):
                return name
            local = folder.parent != Path() and folder.parent.is_dir()
            if not local and (constants.HF_HUB_OFFLINE or HfApi().model_info(name, timeout=10)):
                return name
    except (httpx.HTTPError, OSError, errors.HFValidationError) as error:
        answer = " ".join(str(error).split())[:400]
        why = f"no folder of that name, not in the cache (hf download {name}), and no model from the hub: {answer}"
    raise WeightsError(why)


def check_model_files(path: str | Path, tokenizer: Any) -> None:
    """Compare a model with its configuration and its tokenizer. Tied weights may be absent, and what its class in
    transformers lets be absent. A quantized model's weights have other names: only their values are looked at.

    path: a folder, or a hub id, which is downloaded unless it is in the hub's cache. Raises WeightsError.
    """
    transformers.utils.logging.disable_progress_bar()
    shards, loader = find(path), transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = loader.from_config(config, trust_remote_code=False)
    except Exception as error:  # of the model's class, for settings that contradict each other
        raise WeightsError(f"{path}: no causal language model of transformers: {first_line(error)}") from error
    dtypes = {tensor.dtype for shard in shards for tensor in _tensors(shard, "meta").values()}
    if getattr(config, "quantization_config", None) is None:
        _compare(path, shards, model)
    elif dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        raise WeightsError(f"{path}: its weights are not quantized; remove quantization_config from config.json")
    rows, added = model.get_input_embeddings().weight.shape[0], tokenizer.added_tokens_decoder
    # Special tokens that nothing writes may lie beyond it: of Gemma 3 1B it is the one that stands for images.
    written = f"{tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.pad_token} {tokenizer.chat_template}"
    if beyond := [
        token
        for token, number in tokenizer.get_vocab().items()
        if number >= rows and (number not in added or not added[number].special or token in written)
    ]:
        raise WeightsError(
            f"{path}: the model has {rows:,} tokens, and {len(beyond):,} of the tokenizer's are beyond them "
            f"({min(beyond)!r}): the tokenizer is another model's, or was extended without the model"
        )
    for shard in shards:
        _require_finite(shard)


def find(path: str | Path) -> list[Path]:
    """A model's files of weights. Raises WeightsError if there are none, or one is missing."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files as resolve

    if Path(path, "adapter_config.json").is_file():  # transformers would load it on its base, vLLM what is beside it
        raise WeightsError(f"{path} has config.json and adapter_config.json: remove the one that is not to be used")
    try:
        shards = [Path(name) for name in resolve(str(path), None, None, None, None, is_remote_code=False)[0] or ()]
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: its weights are not there: {first_line(error)}") from error
    if missing := [shard for shard in shards if not shard.is_file()]:
        raise WeightsError(f"{missing[0]}: the file is missing, and the index beside it names it")
    return shards


def fingerprint(path: str | Path) -> str:
    """A hash of a model's weights and config.json: a resumed run needs the same base model. Raises WeightsError."""
    shards = find(path)
    with ThreadPoolExecutor(_THREADS) as threads:
        hashes = threads.map(files.sha256, [*shards, shards[0].parent / "config.json"])
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]


def first_line(error: Exception) -> str:
    """What a library says, as one line; of code that came with a model, what is to be done instead."""
    if "custom code" in str(error):
        return "it needs Python files of its own, which are not run here; take a model that transformers has itself"
    return " ".join(str(error).strip().split("\n")[0].split())[:400]


def _tensors(shard: Path, device: str) -> dict[str, Tensor]:
    """A file's tensors: on 'meta' their shapes, on 'cpu' mapped into memory. Raises WeightsError."""
    from transformers.modeling_utils import load_state_dict

    try:
        tensors: dict[str, Tensor] = load_state_dict(shard, map_location=device)
    except Exception as error:  # SafetensorError, and whatever unpickling leads to
        raise WeightsError(f"{shard}: it cannot be read, it is damaged or incomplete: {first_line(error)}") from error
    if others := [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]:
        raise WeightsError(f"{shard}: {others[0]!r} is no tensor; the file must be the state_dict itself")
    return tensors


def _compare(path: str | Path, shards: list[Path], model: Any) -> None:
    """Raises WeightsError for a tensor that is missing, has no place or another shape."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    tensors = {name: tensor for shard in shards for name, tensor in _tensors(shard, "meta").items()}
    settings = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]  # as from_pretrained passes it
    )
    load: Any = convert_and_load_state_dict_in_model
    if "tp_plan" in inspect.signature(load).parameters:  # gone in a later transformers than 5.15.0
        load = partial(load, tp_plan=None)
    loaded, _ = load(model, tensors, settings)
    for pair in model.all_tied_weights_keys.items():
        if not {*pair} <= loaded.missing_keys:
            loaded.missing_keys.difference_update(pair)
    model._adjust_missing_and_unexpected_keys(loaded)
    values = {name: tensor for shard in shards for name, tensor in _tensors(shard, "cpu").items()}
    tied = {name: pair for name, *pair in model.all_tied_weights_keys.items() if {name, *pair} <= values.keys()}
    shapes = [f"{name}: {[*saved]}, not {[*built]}" for name, saved, built in loaded.mismatched_keys]
    wrong = {
        "lacks {} of its weights, which would be random numbers": loaded.missing_keys,
        "has {} tensors that the architecture has no place for": loaded.unexpected_keys,
        "has {} weights of another shape": shapes,
        "has {} weights beside those that config.json ties them to": [
            name for name, [source] in tied.items() if not torch.equal(values[name], values[source])
        ],
        "has {} weights of whole numbers": [name for name, tensor in tensors.items() if not tensor.is_floating_point()],
    }
    if problems := [f"{problem.format(len(names))} ({min(names)})" for problem, names in wrong.items() if names]:
        raise WeightsError(f"{path} {', '.join(problems)}: weights and config.json are not of the same model")


def _require_finite(shard: Path) -> None:
    """Raises WeightsError for a NaN or an infinity. Formats of a byte or less, of quantized models, are left out."""

    def is_bad(tensor: Tensor) -> bool:
        if not tensor.is_floating_point() or tensor.element_size() == 1 or not tensor.numel():
            return False
        return not all(map(torch.isfinite, tensor.aminmax()))  # one pass, and no copy as isfinite() of it makes

    tensors = _tensors(shard, "cpu")
    # In a forked process torch replaces its pool of threads at the first use; two threads at once would race for it.
    torch.set_num_threads(torch.get_num_threads())
    with ThreadPoolExecutor(_THREADS) as threads:
        if bad := list(itertools.compress(tensors, threads.map(is_bad, tensors.values()))):
            raise WeightsError(f"{shard}: {len(bad)} tensors hold NaN or infinity ({min(bad)})")
