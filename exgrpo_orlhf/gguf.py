"""A GGUF file as a model: converted once to a Hugging Face folder of float32 weights in the cache.

transformers reads the weights, the vocabulary and the chat template, but not every special token as the file has it
(of SmolLM2 it takes the beginning of a turn for its end). They are set from the file's own fields here.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import files

FORMAT = 1  # raise it when the same file would give another folder
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


class GGUFError(ValueError):
    """A file that cannot be converted, and why."""


def find(name: str) -> Path | None:
    """The GGUF file that `name` stands for: a path that ends in .gguf, or an installed package that ships one such file.

    None if it is neither. Raises FileNotFoundError for a path without a file, GGUFError for a package with several.
    """
    if name.endswith(".gguf"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{name}: there is no such file")
        return path
    if not name or set(name) & set("/\\~") or name.startswith("."):
        return None
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) > 1:
        raise GGUFError(f"the package {name} has several GGUF files; give the path of one: {', '.join(map(str, found))}")
    return found[0] if found else None


def convert(path: Path, cache: Path) -> Path:
    """A folder with the model and its tokenizer, which is made first unless the cache has it.

    Raises ImportError without the gguf package, GGUFError for a file that is damaged, of an architecture that
    transformers does not read, or without an end token or a chat template that ends a turn with it.
    """
    folder = cache / f"gguf-{path.stem}-{files.sha256(path)[:16]}-{FORMAT}"
    if folder.is_dir():
        return folder
    fields = _fields(path)
    model, tokenizer = _load(path, fields)
    tokens = fields.get("tokenizer.ggml.tokens", [])
    for attribute, field in _SPECIAL.items():
        number = fields.get(f"tokenizer.ggml.{field}_token_id")
        if number is not None:
            setattr(tokenizer, attribute, tokens[number])
    if "tokenizer.ggml.eos_token_id" not in fields:
        raise GGUFError(f"{path}: its tokenizer has no end token (field tokenizer.ggml.eos_token_id)")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update(ends)
    model.generation_config.update(**ends)
    with files.making(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def _fields(path: Path) -> dict[str, Any]:
    """The file's metadata by name."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{path}: reading GGUF files needs the package gguf (pip install gguf)") from error
    try:
        return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    except Exception as error:  # the reader raises whatever a damaged file leads it to: ValueError, IndexError, struct.error …
        raise GGUFError(f"{path} is damaged, or no GGUF file: {error}") from error


def _load(path: Path, fields: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        return AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32), tokenizer
    except Exception as error:
        architecture = fields.get("general.architecture")
        raise GGUFError(f"transformers cannot read {path} (architecture {architecture!r}): {error}") from error
