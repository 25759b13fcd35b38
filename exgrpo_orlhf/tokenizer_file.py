"""A model's tokenizer, as its tokenizer.json says.

transformers 5.15.0 builds many tokenizers anew from the file's vocabulary, with the normaliser, the pre-tokenizer and
the decoder that their class is known for (its issues 45488 and 48206). Of a byte-level file beside a configuration that
names LlamaTokenizerFast it loses every space and line break. So what it reads is compared with the file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .lazy import transformers
from .weights import WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)
FILE = "tokenizer.json"
_PROBES = (
    "user\nWhat is 3 + 4?",
    "  two  spaces, a\ttab,\r\n\n\n lines ",
    "1234567890 12,345.67 1e-5 x1y22",
    "def f(x):\n    return x**2  # it's f_1[0] != {'a': \"B\"}\n",
    "\\frac{1}{2}$x^2$ <b>&amp;</b> don't I'LL CamelCase",
    "naïve café cafe\u0301 Übergröße \ufb01 \uff21\u2460 \u00bd",
    "汉字、かな。한국어 русский العربية 🙂",
    "\u2581 \u0120 \u00a0 \u200b \u3000",
)
_REPORTED: set[str] = set()


def load(path: str | Path) -> Any:
    """The tokenizer of a folder or a hub id. Where transformers reads another one than the file's, the file wins, which
    is said once. A tokenizer without tokenizer.json is read by transformers alone.

    Raises WeightsError if transformers cannot be made to read the file, and what transformers raises.
    """
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # decoding gives the text of the tokens, its spaces too
    file = transformers.utils.cached_file(
        str(path), FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    if file is None:
        return tokenizer
    from tokenizers import Tokenizer

    content = Path(file).read_bytes()
    reference = Tokenizer.from_buffer(content)
    if misread := _difference(tokenizer, reference):
        misreader, tokenizer = tokenizer, transformers.PreTrainedTokenizerFast.from_pretrained(path)
        tokenizer.clean_up_tokenization_spaces = False
        if still := _difference(tokenizer, reference):
            raise WeightsError(f"{path}: transformers does not read the tokenizer that {FILE} describes: {still}")
        for name, token in misreader.special_tokens_map.items():  # those that its class names, if they exist
            if getattr(tokenizer, name, "") is None and reference.token_to_id(str(token)) is not None:
                setattr(tokenizer, name, token)
        if str(path) not in _REPORTED:
            _REPORTED.add(str(path))
            kind = type(misreader).__name__
            log.warning("%s: read as %s says, not as %s of transformers reads it: %s", path, FILE, kind, misread)
    tokenizer.file_content = content  # for `save`; the folder may change or vanish meanwhile
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that was loaded here into a folder, with its tokenizer.json byte for byte."""
    tokenizer.save_pretrained(folder)
    if content := getattr(tokenizer, "file_content", None):  # not where transformers read other files
        (folder / FILE).write_bytes(content)


def _difference(tokenizer: Any, reference: Tokenizer) -> str | None:
    """What a tokenizer reads or writes otherwise than the file's, or None."""
    reference.no_truncation()
    reference.no_padding()
    special = (token.content for token in reference.get_added_tokens_decoder().values())
    for text in (*_PROBES, "".join(f"a{token} b" for token in special)):
        for around in (False, True):  # without and with what is added around a text
            expected = reference.encode(text, add_special_tokens=around).ids
            try:
                ids = list(tokenizer(text, add_special_tokens=around)["input_ids"])
            except Exception as error:  # of tokenizers, for a class whose special tokens the file lacks
                return f"{text!r:.80} cannot be encoded ({error})"
            if ids != expected or tokenizer.decode(ids) != reference.decode(expected, skip_special_tokens=False):
                words = f"{text!r:.80} is read as {tokenizer.decode(ids)!r:.80}"
                return f"{words}, {len(ids)} tokens for {len(expected)}"
    vocabulary, own = tokenizer.get_vocab(), reference.get_vocab()
    foreign = sorted(token for token in vocabulary.keys() | own if vocabulary.get(token) != own.get(token))
    if not foreign:
        return None
    return (
        f"{len(foreign)} tokens have other ids, or are not in the file ({', '.join(foreign[:5])}); what "
        "tokenizer_config.json names must be in the file too"
    )
