"""The texts of special tokens: tokens where a template writes them, text where a question or an observation holds them.

A tokenizer reads `<|im_end|>` as that token wherever it stands, so that a question could end its own turn.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ue000\uf8ff\ue000"  # private-use characters: in no template, and in no other text


class SpecialTokens:
    """Those of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        tokens = [token for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._tokens = sorted(tokens, key=lambda token: -len(token.content))  # the longest that fits is meant
        self._numbers = {token.content: i for i, token in enumerate(self._tokens)}
        self._pattern = re.compile("|".join(map(re.escape, self._numbers)) or "$^")

    def found_in(self, text: str) -> list[str]:
        return self._pattern.findall(text)

    def split(self, text: str) -> list[str]:
        """The parts of a text between special tokens, and these, in turn."""
        return re.split(f"({self._pattern.pattern})", text)

    def hide(self, text: str) -> str:
        """A text for `encode`, which reads its special tokens as text."""
        return self._pattern.sub(lambda found: f"{_MARK}{self._numbers[found[0]]}{_MARK}", text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text: what was hidden is text, other special tokens are tokens.

        Raises ValueError for a tokenizer that is not of the library tokenizers.
        """
        if not self._tokenizer.is_fast:
            raise ValueError(f"{self._tokenizer.name_or_path} has no tokenizer.json: it cannot read them as text")
        text = self._pattern.sub(lambda found: f"{_MARK}{found[0]}{_MARK}", text)
        text = re.sub(f"{_MARK}(\\d+){_MARK}", lambda found: self._tokens[int(found[1])].content, text)
        ids = self._reader.encode(text, add_special_tokens=add_special_tokens).ids
        return [self._ids.get(token, token) for token in ids]

    @cached_property
    def _reader(self) -> Any:
        """The tokenizer with special tokens as text, and with a marked text for each of them."""
        from tokenizers import AddedToken, Tokenizer

        reader = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        reader.encode_special_tokens = True
        reader.add_tokens(
            [
                AddedToken(
                    f"{_MARK}{token.content}{_MARK}",
                    special=False,
                    normalized=False,
                    **{flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "single_word")},
                )
                for token in self._tokens
            ]
        )
        return reader

    @cached_property
    def _ids(self) -> dict[int, int]:
        return {
            self._reader.token_to_id(f"{_MARK}{name}{_MARK}"): self._reader.token_to_id(name) for name in self._numbers
        }
