"""The texts of special tokens: tokens where a template writes them, text where a question or an observation holds them.

A tokenizer reads `<|im_end|>` as that token wherever it stands, so that a question could end its own turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any

from ..grader.thoughts import TAG

_MARK, _OPEN, _CLOSE = "\ue000\uf8ff\ue000", "\ue001\uf8ff\ue001", "\ue002\uf8ff\ue002"  # of no text: private use
_TAG = re.compile(rf"{TAG.pattern}|<\|(?:start|message)\|>|</?answer>", re.IGNORECASE)


def response_text(tokenizer: Any, ids: Iterable[int], *own: str) -> str:
    """A response as graders and readers see it: without special tokens, but with the tags of a thought and an answer,
    which are special tokens of some tokenizers. own: those of Prompts.thought_tags"""
    return response_texts(tokenizer, [ids], *own)[0]


def response_texts(tokenizer: Any, responses: Iterable[Iterable[int]], *own: str) -> list[str]:
    """As `response_text`, of each response."""
    hidden = _hidden(tokenizer, own)
    if hidden is None:
        return [str(tokenizer.decode([*ids], skip_special_tokens=True)) for ids in responses]
    shown = ([token for token in ids if token not in hidden] for ids in responses)
    return [str(tokenizer.decode(ids, skip_special_tokens=False)) for ids in shown]


def decoder(tokenizer: Any) -> Callable[[Any], str]:
    """From an array of token ids to `response_text`."""
    return lambda ids: response_text(tokenizer, ids.tolist())


@lru_cache(maxsize=8)
def _hidden(tokenizer: Any, own: tuple[str, ...]) -> set[int] | None:
    """The special tokens that are no tags; None where no tag is a special token."""
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tags = {i for i, text in special.items() if _TAG.fullmatch(text) or text in own}
    return {*special} - tags if tags else None


class SpecialTokens:
    """Those of a tokenizer of the library tokenizers. pattern: finds their texts"""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.pattern = re.compile("|".join(map(re.escape, sorted(self._names, key=len, reverse=True))) or "$^")

    def hide(self, text: str) -> str:
        """A text for `encode`, which reads its special tokens as text."""
        return self.pattern.sub(lambda found: f"{_OPEN}{found[0].encode().hex()}{_CLOSE}", text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text: what was hidden is text, other special tokens are tokens."""
        text = self.pattern.sub(lambda found: self._marked(found[0]), text)
        text = re.sub(f"{_OPEN}([0-9a-f]+){_CLOSE}", lambda found: bytes.fromhex(found[1]).decode(), text)
        return list(self._reader.encode(text, add_special_tokens=add_special_tokens).ids)

    @cached_property
    def _reader(self) -> Any:
        """The tokenizer with marks in the names of its special tokens: their text without marks is text."""
        from tokenizers import Tokenizer

        renamed = lambda pairs: {self._marked(key): self._marked(value) for key, value in pairs}
        state = json.loads(self._tokenizer.backend_tokenizer.to_str(), object_pairs_hook=renamed)
        if isinstance(vocabulary := state["model"]["vocab"], list):  # Unigram's, with scores
            state["model"]["vocab"] = [(self._marked(name), score) for name, score in vocabulary]
        return Tokenizer.from_str(json.dumps(state))

    def _marked(self, name: Any) -> Any:
        return f"{_MARK}{name}{_MARK}" if isinstance(name, str) and name in self._names else name
