"""LoRA: low-rank matrices beside frozen weights, by peft.

A layer computes W x + (alpha / rank) · B A x. W stays as it was, A and B learn. Merged, it computes W' x with the one
matrix W' = W + (alpha / rank) · B A.

A checkpoint's adapter/ holds the adapter as peft writes it, and base.json, by which another base model is refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints import cache, manifest
from ..io import files, tokenizer_file, weights
from ..io.lazy import torch, transformers
from ..settings import LoRA

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FOLDER = "adapter"  # of a checkpoint
CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
FORMAT = 3  # of merged adapters in the cache; raise it when the same adapter would give another folder
# Of vLLM 0.29: these compute logits with the embedding, whatever config.json and the files have.
_TIED_IN_VLLM = ("cohere", "gemma2", "gemma3n", "lfm2", "zamba2")
_NAME = "default"  # peft's name of a model's only adapter


class AdapterError(ValueError):
    """An adapter that cannot be made, or does not fit its base model."""


class Adapter:
    """The adapter of a model, whose layers it is in.

    Merging makes new matrices for a while and then puts the old ones back, so the frozen weights stay as they are to
    the bit. Adding B A and subtracting it again would change them a little each time.
    """

    def __init__(self, model: PreTrainedModel, settings: LoRA, base: str | Path, seed: int) -> None:
        """Puts an adapter into the model, with which it still computes what it did: B is 0. Its own weights no longer
        get a gradient.

        base: where the model comes from, for those who open the adapter later; seed: A is drawn from it
        Raises AdapterError for targets that the model does not have, or that cannot be merged.
        """
        self.model, self._base = model, {"model": str(base), "weights": weights.fingerprint(base)}
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            self._wrapped, self._layers = insert(model, settings, base)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within this context the layers have merged weights, which takes their memory once more."""
        with ExitStack() as stack:
            stack.enter_context(self.disabled())
            for layer in self._layers.values():
                stack.enter_context(self.merged_weight(layer.get_base_layer().weight))
            yield

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this context the layers compute without A and B: the model is the base model.

        peft skips A and B of a layer that names merged adapters. Its own switch would take `requires_grad` from
        A and B, between a forward pass and its backward pass too.
        """
        try:
            for layer in self._layers.values():
                layer.merged_adapters.append(_NAME)
            yield
        finally:
            for layer in self._layers.values():
                layer.merged_adapters.clear()

    @contextmanager
    def merged_weight(self, weight: Tensor) -> Iterator[None]:
        """Within this context a weight of the base model is merged, if an adapter is beside it, and not cut into
        ZeRO-3's shards. All ranks must enter it."""
        layer = next((wrapped for wrapped in self._layers.values() if wrapped.get_base_layer().weight is weight), None)
        # Not the layer's bias, which a bucket of vLLM's weights may hold beside it: nothing is gathered twice.
        parts = [*layer.lora_A.parameters(), *layer.lora_B.parameters()] if layer else []
        with gathered([weight, *parts]):
            before = weight.data
            if layer is not None:
                # Not peft's own product: on a CPU it would give A and B new memory, which DeepSpeed does not update.
                a, b = (part[_NAME].weight.data.float() for part in (layer.lora_A, layer.lora_B))
                product = b @ a * layer.scaling[_NAME]
                weight.data = (before.float() + (product.T if layer.fan_in_fan_out else product)).to(before.dtype)
            try:
                yield
            finally:
                weight.data = before

    def merged_parameters(self) -> Generator[tuple[str, Tensor]]:
        """The weights by the names that they have in the base model, merged one at a time: the weight that was yielded
        is the frozen one again when the next is asked for. All ranks must ask."""
        for name, weight in self.base_parameters():
            with self.merged_weight(weight):
                yield name, weight.data  # of a parameter whoever keeps it would see the frozen one

    def base_parameters(self) -> list[tuple[str, Any]]:
        """The parameters of the base model by the names that they have there."""
        return [(_base_name(name), tensor) for name, tensor in self.model.named_parameters() if ".lora_" not in name]

    def merged_state(self, keep: bool = True) -> dict[str, Tensor]:
        """Copies of the merged weights on the CPU, by the names that they have in the base model. All ranks must ask,
        and those that `keep` get them."""
        copies: dict[int, Tensor] = {}  # tied weights stay tied
        state = {name: value for name, value in self.model.state_dict(keep_vars=True).items() if ".lora_" not in name}
        for value in state.values():
            if id(value) not in copies:
                with self.merged_weight(value):
                    copies[id(value)] = value.detach().to("cpu", copy=True) if keep else value
        return {_base_name(name): copies[id(value)] for name, value in state.items()} if keep else {}

    def save(self, folder: Path, write: bool = True) -> None:
        """Writes the adapter into a new folder. All ranks must ask; one writes."""
        import peft
        from safetensors.torch import save_file

        with gathered([tensor for name, tensor in self.model.named_parameters() if ".lora_" in name]):
            # Without `save_embedding_layers` peft would ask the hub whether the vocabulary has grown.
            state = peft.get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
            state = {name: value.to("cpu", copy=True).contiguous() for name, value in state.items()}
        if not write:
            return
        folder.mkdir()
        config = copy.deepcopy(self._wrapped.peft_config[_NAME])
        config.inference_mode = True  # as peft writes it: whoever opens it does not train by default
        config.target_modules = sorted(config.target_modules)  # a set, whose order is another in each process
        config.save_pretrained(folder)
        save_file(state, folder / WEIGHTS)
        files.write_json(folder / BASE, self._base)

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote. Raises AdapterError for missing or further tensors."""
        import peft
        from safetensors.torch import load_file

        state = load_file(folder / WEIGHTS)
        now = peft.get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in now.items()}:
            raise AdapterError(f"{folder / WEIGHTS} is of another adapter: its tensors are not those of this run's")
        peft.set_peft_model_state_dict(self._wrapped, state)


def insert(model: PreTrainedModel, settings: LoRA, base: str | Path) -> tuple[Any, dict[str, Any]]:
    """Puts an adapter into the model. Returns peft's model around it, and the layers that have A and B. Raises
    AdapterError for targets that the model does not have, or that cannot be merged."""
    import peft  # seconds; only runs with LoRA need it

    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    assert settings.rank is not None  # else there is no adapter
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.scale_numerator,
        target_modules=targets,
        lora_dropout=0.0,  # log-probs with dropout are those of another policy
        base_model_name_or_path=str(base),
    )
    try:
        # By default A and B would be float32 beside bfloat16, which DeepSpeed refuses.
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise AdapterError(f"LoRA.targets = {settings.targets!r}: {str(error).splitlines()[0]}") from error
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}
    for target in [] if isinstance(targets, str) else targets:  # peft wants one of them to be there, not each
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise AdapterError(f"LoRA.targets = {settings.targets!r}: the model has no module {target!r}")
    ends = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    for name, layer in layers.items():
        if id(layer.get_base_layer().weight) in ends or type(layer) is not peft.tuners.lora.Linear:
            raise AdapterError(
                f"LoRA.targets = {settings.targets!r}: {name} is no linear layer between the embedding and the "
                "output layer; only those can be targets"
            )
    return wrapped, layers


def _require_complete(wrapped: Any, folder: Path, base: str) -> None:
    """Raises AdapterError if peft left out a part of the adapter, or took a base model's weights from its folder."""
    import peft
    from peft.utils.constants import EMBEDDING_LAYER_NAMES  # which may be saved with an adapter

    result = wrapped.load_adapter(folder, _NAME)  # once more, for what it returns
    others = {*map(_base_name, peft.load_peft_weights(str(folder), device="cpu"))}
    others -= {*map(_base_name, peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False))}
    others &= {_base_name(name) for name, _ in wrapped.named_parameters()}
    of_base = [name for name in others if not {*EMBEDDING_LAYER_NAMES} & {*name.split(".")}]
    problems = {"missing": result.missing_keys, "without a place": result.unexpected_keys, "of a base model": of_base}
    if texts := [f"{len(names)} tensors {problem} ({min(names)})" for problem, names in problems.items() if names]:
        raise AdapterError(f"{folder}: {', '.join(texts)}: it is incomplete, or no adapter of {base}")


def _base_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


@contextmanager
def gathered(weights: list[Any]) -> Iterator[None]:
    """Within this context weights that ZeRO-3 has cut into shards are whole."""
    if not any(hasattr(weight, "ds_id") for weight in weights):
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(weights):
        yield


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter alone."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def merge(folder: Path, directory: Path) -> Path:
    """The folder in the cache `directory` with an adapter merged into its base model, in float32, and the tokenizer;
    made first unless it is there, of exactly these files of both.

    folder: as peft writes it, of any kind of adapter that peft can merge; the tokenizer may be in it
    Raises AdapterError.
    """
    base, layers = _base_of(folder)
    # The adapter's own tokenizer, or that of the checkpoint around it, which has the chat template of its training.
    places = [folder, *([folder.parent] if folder.name == FOLDER else [])]
    source = next((place for place in places if any(place.glob("tokenizer*"))), None)
    try:
        base = weights.locate(base)
        tokenizer = tokenizer_file.load(source or base)
        content = _content(folder, base, tokenizer)
        name = hashlib.sha256(json.dumps([base, *content]).encode()).hexdigest()[:16]
        target = directory / f"merged-{name}-{FORMAT}"
        if cache.has(target):
            return target
        manifest.verify_model(folder.parent, folder.name)
        weights.check_model_files(base, tokenizer)
        origin = json.loads((folder / BASE).read_text(encoding="utf-8")) if (folder / BASE).is_file() else None
        if origin and origin["weights"] != content[0]:
            raise AdapterError(f"{folder} was trained on other weights than {base} has now: give it that model again")
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of peft, on what is checked here
            merged = _merged(folder, base)
        with cache.making(target) as unfinished:
            weights.save(merged, unfinished)
            tokenizer_file.save(tokenizer, unfinished)
            if weights.fingerprint(base) != content[0]:
                raise AdapterError(f"{base} was changed while {folder} was merged into it: start again")
    except (AdapterError, cache.CacheError):
        raise
    except Exception as error:  # of transformers, peft and safetensors, of any kind for files that are not theirs
        message = " ".join(str(error).split())[:300]
        why = f"the adapter repeats layers of it, layer_replication = {layers}: " if layers else ""
        raise AdapterError(f"{folder}: it cannot be merged into its base model {base} ({why}{message})") from error
    return target


def _base_of(folder: Path) -> tuple[str, Any]:
    """An adapter's base model, and the layers of it that the adapter repeats. Raises AdapterError."""
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base, revision = about.get("base_model_name_or_path"), about.get("revision") or "main"
    except (ValueError, AttributeError) as error:
        raise AdapterError(f"{folder / CONFIG} is damaged: it holds no settings of an adapter ({error})") from error
    if not base:
        raise AdapterError(f"{folder / CONFIG}: base_model_name_or_path is missing, so its base model is not known")
    if revision != "main" and not Path(base).is_dir():  # another would fit too, unseen
        raise AdapterError(
            f"{folder / CONFIG}: the base model is revision {revision!r} of {base}; download that one (hf download "
            "--revision), and put its folder into base_model_name_or_path"
        )
    return base, about.get("layer_replication")


def _content(folder: Path, base: str, tokenizer: Any) -> list[str]:
    """Hashes of all that a merged model is made of; the first is that of the base model's weights."""
    from transformers.utils.hub import cached_file

    names = ("config.json", "generation_config.json")
    of_base = [cached_file(base, name, _raise_exceptions_for_missing_entries=False) for name in names]
    with tempfile.TemporaryDirectory() as saved:
        tokenizer_file.save(tokenizer, Path(saved))
        paths = [*folder.iterdir(), *Path(saved).rglob("*"), *(Path(path) for path in of_base if path)]
        hashes = sorted(f"{path.name} {files.sha256(path)}" for path in paths if path.is_file())
    return [weights.fingerprint(base), *hashes]


def _merged(folder: Path, base: str) -> Any:
    """The base model with the adapter merged into it. Raises AdapterError, and what peft and transformers raise."""
    import peft

    loading: Any = transformers.AutoModelForCausalLM
    model = loading.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    wrapped = peft.PeftModel.from_pretrained(model, folder)
    _require_complete(wrapped, folder, base)
    # What an adapter does beside the embedding alone must not be merged into the output layer that is tied to it.
    owners: dict[int, Any] = {}
    for module in wrapped.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if owners.setdefault(id(weight), module) is not module:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone(), requires_grad=False))
    merged: Any = wrapped.merge_and_unload(safe_merge=True)
    if not tied:
        return merged
    embedding, head, config = merged.get_input_embeddings(), merged.get_output_embeddings(), merged.config
    if equal := torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight
    elif config.get_text_config().model_type.startswith(_TIED_IN_VLLM):
        raise AdapterError(
            f"{folder}: {base} ties the embedding and the output layer. With this adapter they differ, which vLLM "
            "cannot compute for this architecture: train an adapter without embed_tokens and lm_head"
        )
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = equal
    return merged
