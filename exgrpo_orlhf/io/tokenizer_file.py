"""A model's tokenizer, as its tokenizer.json says.

transformers 5.15.0 builds many tokenizers anew from the file's vocabulary and what their class is known for (its issues
45488, 48206): with LlamaTokenizerFast a byte-level file loses every space. So what it reads is compared with the file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .lazy import transformers
from .weights import WeightsError

log = logging.getLogger(__name__)
FILE = "tokenizer.json"
_PROBES = (
    "user\nWhat is 3 + 4?",
    "  two  spaces, a\ttab,\r\n\n\n lines 1234567890 12,345.67 1e-5 x1y22 I'LL ",
    "def f(x):\n    return x**2  # it's f_1[0] != {'a': \"B\"}\n\\frac{1}{2}$x^2$ <b>&amp;</b> CamelCase",
    "naïve cafe\u0301 Größe 汉字、かな。한국어 русский 🙂 \ufb01 \uff21\u2460 \u00bd \u2581 \u0120 \u00a0 \u3000",
)
_REPORTED: set[str] = set()


def load(path: str | Path) -> Any:
    """The tokenizer of a folder or a hub id. Where transformers reads another one than tokenizer.json's, the file wins,
    which is said once; without that file transformers alone reads it. Raises WeightsError if that is impossible, and
    what transformers raises."""
    from transformers.utils.hub import cached_file

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if file := cached_file(str(path), FILE, _raise_exceptions_for_missing_entries=False):
        content = Path(file).read_bytes()
        if misread := _difference(tokenizer, content):
            misreader, tokenizer = tokenizer, transformers.PreTrainedTokenizerFast.from_pretrained(path)
            if still := _difference(tokenizer, content):
                raise WeightsError(f"{path}: tokenizer_config.json needs another {FILE} than the one there: {still}")
            for name, token in misreader.special_tokens_map.items():  # those that its class names, if they exist
                if getattr(tokenizer, name, "") is None and str(token) in tokenizer.get_vocab():
                    setattr(tokenizer, name, token)
            if str(path) not in _REPORTED:
                log.warning("%s: read as its %s says, not as transformers reads it: %s", path, FILE, misread)
                _REPORTED.add(str(path))
        tokenizer.file_content = content  # for `save`; the folder may change or vanish meanwhile
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives the text of the tokens, its spaces too
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that was loaded here into a folder, with its tokenizer.json byte for byte."""
    tokenizer.save_pretrained(folder)
    if content := getattr(tokenizer, "file_content", None):  # not where transformers read other files
        (folder / FILE).write_bytes(content)


def _difference(tokenizer: Any, content: bytes) -> str | None:
    """What a tokenizer reads or writes otherwise than the file's, or None."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_buffer(content)
    reference.no_truncation()
    reference.no_padding()
    special = "".join(f"a{token.content} b" for token in reference.get_added_tokens_decoder().values())
    for text in (*_PROBES, special):
        for around in (False, True):  # without and with what is added around a text
            expected = reference.encode(text, add_special_tokens=around).ids
            try:
                ids = list(tokenizer(text, add_special_tokens=around)["input_ids"])
                words = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            except Exception as error:  # of tokenizers, for a class whose special tokens the file lacks
                ids, words = [], str(error)
            if ids != expected or words != reference.decode(expected, skip_special_tokens=False):
                return f"{text!r:.80} is read as {words!r:.80}, {len(ids)} tokens for {len(expected)}"
    names = sorted(name for name, _ in tokenizer.get_vocab().items() ^ reference.get_vocab().items())
    return f"{len({*names})} tokens are not in it, or have other ids: {', '.join(names[:3])}" if names else None
