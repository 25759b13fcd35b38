"""From a question to the token ids the policy continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from .replay import Question
from .settings import require


@dataclass(frozen=True)
class Prompts:
    """template: 'plain', the prompt's text as it stands (messages joined by blank lines), or 'chat', the tokenizer's
        own chat template (a plain text becomes one user message)
    max_tokens: the longest prompt allowed
    """

    template: Literal["plain", "chat"] = "plain"
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        require(
            self.template in ("plain", "chat"), f"Prompts.template must be 'plain' or 'chat', got {self.template!r}"
        )
        require(self.max_tokens >= 1, f"Prompts.max_tokens must be at least 1, got {self.max_tokens!r}")


class PromptEncoder:
    """Renders and encodes questions, once each."""

    def __init__(self, settings: Prompts, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if the chat template is asked for and the tokenizer has none."""
        if settings.template == "chat" and not tokenizer.chat_template:
            raise ValueError(
                f"Prompts.template = 'chat', but the tokenizer of {tokenizer.name_or_path} has no chat template; "
                "use Prompts.template = 'plain'"
            )
        self.settings, self.tokenizer = settings, tokenizer
        self._encoded: dict[str, list[int]] = {}

    def encode(self, question: Question) -> list[int]:
        """Raises ValueError for a prompt longer than Prompts.max_tokens, or empty."""
        if question.id not in self._encoded:
            ids = self._encode(question)
            if not 0 < len(ids) <= self.settings.max_tokens:
                start = question.prompt if isinstance(question.prompt, str) else question.prompt[-1][1]
                raise ValueError(
                    f"question {question.id} of {question.source} ({start[:60]!r} …) has {len(ids)} prompt tokens; "
                    f"allowed are 1 to Prompts.max_tokens = {self.settings.max_tokens}. Raise it, or leave the "
                    "question out of the set"
                )
            self._encoded[question.id] = ids
        return self._encoded[question.id]

    def check(self, questions: Iterable[Question]) -> None:
        """Encode them all now, so that a prompt that is too long stops the run before it starts."""
        for question in questions:
            self.encode(question)

    def fingerprint(self) -> str:
        """What token ids mean here: changes with the tokenizer, its chat template or ours."""
        chat = self.tokenizer.chat_template if self.settings.template == "chat" else None
        identity = [self.settings.template, chat, sorted(self.tokenizer.get_vocab().items())]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def _encode(self, question: Question) -> list[int]:
        if self.settings.template == "plain":
            text = question.prompt if isinstance(question.prompt, str) else "\n\n".join(t for _, t in question.prompt)
            return list(self.tokenizer(text)["input_ids"])
        turns = (("user", question.prompt),) if isinstance(question.prompt, str) else question.prompt
        messages = [{"role": role, "content": content} for role, content in turns]
        # Rendered to text first: apply_chat_template writes its own beginning-of-text token, encoding must not add one.
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])
