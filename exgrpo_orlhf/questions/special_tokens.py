"""The texts of special tokens: tokens where a template writes them, text where a question or an observation holds them.

A tokenizer reads `<|im_end|>` as that token wherever it stands, so that a question could end its own turn.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

_MARK = "\ue000\uf8ff\ue000"  # private-use characters, which no text has in this order


class SpecialTokens:
    """Those of a tokenizer of the library tokenizers. pattern: finds their texts"""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = sorted((token.content for token in self._tokens), key=len, reverse=True)  # the longest that fits
        self.pattern = re.compile("|".join(map(re.escape, names)) or "$^")

    def hide(self, text: str) -> str:
        """A text for `encode`, which reads its special tokens as text."""
        return self.pattern.sub(lambda found: f"{_MARK}{found[0].encode().hex()}{_MARK}", text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text: what was hidden is text, other special tokens are tokens."""
        text = self.pattern.sub(rf"{_MARK}\g<0>{_MARK}", text)
        text = re.sub(f"{_MARK}([0-9a-f]+){_MARK}", lambda found: bytes.fromhex(found[1]).decode(), text)
        encoding = self._reader.encode(text, add_special_tokens=add_special_tokens)
        pairs = zip(encoding.ids, encoding.tokens, strict=True)
        return [self._reader.token_to_id(name.strip(_MARK)) if name[:3] == _MARK else i for i, name in pairs]

    @cached_property
    def _reader(self) -> Any:
        """The tokenizer with special tokens as text, and with a marked token for each of them."""
        from tokenizers import AddedToken, Tokenizer

        reader = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        reader.encode_special_tokens = True
        for token in self._tokens:
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
            reader.add_tokens([AddedToken(f"{_MARK}{token.content}{_MARK}", special=False, normalized=False, **flags)])
        return reader
