"""Turns a question into the token ids that the policy continues."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from jinja2 import TemplateError

from ..records import Message, Question
from ..settings import require
from .chat_template import refuse_endless

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Template:
    """How a prompt is written.

    turns: role → the format of its message, with {} for the content; None: only the tokenizer's chat template writes
    between: separates the turns, and the last turn from `answer`
    answer: the text that the response continues
    system: the system message for a question that has none; None: no system message
    chat: use the tokenizer's chat template if it has one
    tokens: special tokens in the text, which the tokenizer must have
    """

    turns: Mapping[str, str] | None
    between: str = "\n"
    answer: str = ""
    system: str | None = None
    chat: bool = False
    tokens: tuple[str, ...] = ()


_ROLES = ("system", "user", "assistant")
_TEXT = {"system": "{}\n", "user": "Question: {}", "assistant": "Answer: {}\n"}

TEMPLATES: dict[str, Template] = {
    "plain": Template({role: "{}" for role in _ROLES}, between="\n\n"),
    "chat": Template(None, chat=True),
    "qwen_math": Template(
        {role: f"<|im_start|>{role}\n{{}}<|im_end|>" for role in _ROLES},
        answer="<|im_start|>assistant\n",
        system="Solve the problem one step at a time and say why each step holds. Close with the final answer, written "
        "once, in \\boxed{}.",
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "simplerl": Template(
        _TEXT, answer="The answer is worked out step by step, and its result stands in \\boxed{}.\nAnswer:"
    ),
    "think_answer": Template(
        _TEXT,
        answer="Answer:",
        system="Think before you answer. Put all of your reasoning between <think> and </think>: take the problem "
        "apart, try another way where one leads nowhere, and check what you found. After </think> write a short "
        "solution and give the final answer in \\boxed{}.",
        chat=True,
    ),
}


@dataclass(frozen=True)
class Prompts:
    """How prompts are written.

    template: 'plain', the prompt's text as it is (messages joined by blank lines)
        'chat', the tokenizer's own chat template (a plain text becomes one user message)
        'qwen_math', turns between <|im_start|> and <|im_end|>, asks for steps and a boxed answer
        'simplerl', Question: … Answer: … without special tokens, for base models
        'think_answer', asks for reasoning in <think></think>, then a boxed answer; by the tokenizer's chat template, or
        written as with 'simplerl' where it has none
        If a template writes turns, the token that closes a turn ends a response too
    max_tokens: the longest prompt allowed
    system: the system message of every question, which replaces its own; not for 'plain'. '': no system message, unless
        the tokenizer's chat template has a default. None: the question's own, else the template's
    """

    template: Literal["plain", "chat", "qwen_math", "simplerl", "think_answer"] = "plain"
    max_tokens: int = 1024
    system: str | None = None

    def __post_init__(self) -> None:
        known = ", ".join(map(repr, TEMPLATES))
        require(self.template in TEMPLATES, f"Prompts.template must be one of {known}, got {self.template!r}")
        require(self.max_tokens >= 1, f"Prompts.max_tokens must be at least 1, got {self.max_tokens!r}")
        require(
            self.system is None or self.template != "plain",
            f"Prompts.system cannot be used with Prompts.template = 'plain'; got {self.system!r}",
        )


class PromptEncoder:
    """Renders and encodes questions, once each."""

    def __init__(self, settings: Prompts, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if the tokenizer lacks the chat template or the special tokens that the template needs, and
        as `refuse_endless`."""
        template = TEMPLATES[settings.template]
        self._chat = tokenizer.chat_template if template.chat else None
        if not self._chat and template.turns is None:
            raise ValueError(
                f"Prompts.template = {settings.template!r}, but the tokenizer of {tokenizer.name_or_path} has no chat "
                "template; use Prompts.template = 'plain', or 'simplerl'"
            )
        if missing := [token for token in template.tokens if token not in tokenizer.get_vocab()]:
            raise ValueError(
                f"Prompts.template = {settings.template!r}, but the tokenizer of {tokenizer.name_or_path} does not "
                f"have {' and '.join(missing)}; use Prompts.template = 'chat', or 'simplerl'"
            )
        if self._chat:
            refuse_endless(tokenizer)
        self.settings, self.tokenizer, self._template = settings, tokenizer, template
        self._encoded: dict[str, list[int]] = {}
        self._ends: list[int] = []

    def encode(self, question: Question) -> list[int]:
        """The prompt's token ids.

        Raises ValueError for a prompt longer than Prompts.max_tokens, or empty, or with a role it cannot write.
        """
        if question.id not in self._encoded:
            ids = self.token_ids(question)
            if not 0 < len(ids) <= self.settings.max_tokens:
                start = question.prompt if isinstance(question.prompt, str) else question.prompt[-1][1]
                raise ValueError(
                    f"question {question.id} of {question.source} ({start[:60]!r} …) has {len(ids)} prompt tokens; "
                    f"allowed are 1 to Prompts.max_tokens = {self.settings.max_tokens}. Raise it, or leave the "
                    "question out of the set"
                )
            self._encoded[question.id] = ids
        return self._encoded[question.id]

    def check(self, questions: Sequence[Question]) -> None:
        """Encode all questions, so that a prompt that cannot be used stops the run before it starts.

        Raises ValueError as `encode`, and for a prompt with letters, digits or signs that the tokenizer has no token
        for: the model would read another prompt.
        """
        readable: dict[str, bool] = {}
        for done, question in enumerate(questions):
            try:
                self.encode(question)
            except ValueError as error:
                limit, lengths = self.settings.max_tokens, [len(self.token_ids(each)) for each in questions[done:]]
                if lengths[0] <= limit:
                    raise
                raise ValueError(
                    f"{sum(each > limit for each in lengths)} of {len(questions)} prompts are too long, up to "
                    f"{max(lengths)} tokens (Work.questions = @LengthFilter() leaves them out): {error}"
                ) from error
            text = question.prompt if isinstance(question.prompt, str) else "".join(each for _, each in question.prompt)
            for character in set(text).difference(readable):
                readable[character] = unicodedata.category(character)[0] not in "LNPS" or self._has(character)
            if lost := [character for character in dict.fromkeys(text) if not readable[character]]:
                raise ValueError(
                    f"question {question.id} of {question.source} ({text[:60]!r} …): the model's tokenizer has no "
                    f"token for {' '.join(lost[:10])}; take another model, or leave the question out of the set"
                )

    def _has(self, character: str) -> bool:
        ids = self.tokenizer(character, add_special_tokens=False)["input_ids"]
        return bool(ids) and (self.tokenizer.unk_token_id is None or self.tokenizer.unk_token_id not in ids)

    def turn_ends(self) -> tuple[int, ...]:
        """The token that closes the assistant's turn in the template; () if there is none.

        A base model's generation config may lack it, and then a response would go on with a turn of the user.
        """
        if self._chat:
            said = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
            try:
                _, found, after = str(self.tokenizer.apply_chat_template(said, tokenize=False)).rpartition("answer")
            except TemplateError:  # the template cannot write a turn of the assistant
                return ()
            after = after.strip() if found else ""
        else:
            after = "<|im_end|>" if "<|im_end|>" in self._template.tokens else ""
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        added = self.tokenizer.get_added_vocab().values()
        return (ids[0],) if ids and ids[0] in added else ()

    def ends(self) -> list[int]:
        """The tokens that end a response; the first one closes a response that somebody else wrote, as the policy's own
        are closed: the one that closes the template's turn, or else the tokenizer's end token.

        Raises ValueError if there is none.
        """
        if not self._ends:
            self._ends = [token for token in (*self.turn_ends(), self.tokenizer.eos_token_id) if token is not None]
        if not self._ends:
            raise ValueError("neither the template nor the tokenizer names an end token to close a response with")
        return self._ends

    def encode_response(self, text: str, max_tokens: int) -> list[int]:
        """The token ids of a response that somebody else wrote, as it stands, and the token that closes it.

        max_tokens: Sampling.max_response_tokens
        Raises ValueError if that is exceeded, if the response has no token or holds an end token already, and as
        `ends`.
        """
        ends, ids = self.ends(), list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise ValueError(f"the response has no token of this tokenizer: {text!r:.200}")
        if not {*ends}.isdisjoint(ids):
            raise ValueError(f"the response holds an end token, which is added here: {text!r:.200}")
        if len(ids) + 1 > max_tokens:
            raise ValueError(
                f"the response has {len(ids) + 1} tokens with its end token; allowed are "
                f"Sampling.max_response_tokens = {max_tokens}"
            )
        return [*ids, ends[0]]

    def fingerprint(self) -> str:
        """Hash of what gives token ids their meaning: the tokenizer, its chat template and ours."""
        ours = [self.settings.template, self.settings.system, asdict(self._template)]
        identity = [ours, self._chat, sorted(self.tokenizer.get_vocab().items())]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def render(self, question: Question) -> str:
        """The text that is encoded. Raises ValueError for a role that the template cannot write."""
        turns, template = self.turns(question), self._template
        if self._chat or template.turns is None:
            messages = [{"role": role, "content": content} for role, content in turns]
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if unknown := [role for role, _ in turns if role not in template.turns]:
            raise ValueError(
                f"question {question.id} of {question.source} has a message of role {unknown[0]!r}; "
                f"Prompts.template = {self.settings.template!r} writes {', '.join(template.turns)}"
            )
        parts = [template.turns[role].format(content) for role, content in turns]
        return template.between.join([*parts, template.answer] if template.answer else parts)

    def token_ids(self, question: Question) -> list[int]:
        """The prompt's token ids, however many."""
        # A text with special tokens has all of them, including the beginning-of-text token: encoding must add none.
        complete = bool(self._chat or self._template.tokens)
        return list(self.tokenizer(self.render(question), add_special_tokens=not complete)["input_ids"])

    def turns(self, question: Question) -> list[Message]:
        """The question's messages, with the system message that the settings ask for."""
        turns = [("user", question.prompt)] if isinstance(question.prompt, str) else list(question.prompt)
        own = turns[0][0] == "system"
        if self.settings.system is not None:
            system, turns = self.settings.system, turns[own:]
            return [("system", system), *turns] if system else turns
        return turns if own or self._template.system is None else [("system", self._template.system), *turns]
