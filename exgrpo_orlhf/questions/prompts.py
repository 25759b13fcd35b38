"""Turns a question into the token ids that the policy continues."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jinja2 import TemplateError

from ..checks import Constraint, Count, check_settings, require
from ..grader.grade import Message
from ..grader.thoughts import Tags, opening, opens_thought
from ..io.files import read_text
from ..io.weights import first_line
from ..records import Question
from .asked import asked_in_training
from .special_tokens import SpecialTokens
from .templates import TEMPLATES, Template, take_chat_template, template_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_are_tags = lambda tags: not tags or (len(tags) == len({*tags} - {""}) == 2 and [*map(str.strip, tags)] == [*tags])
_PROBE = Question.make("the first check", "1", "1")  # a digit, which even the tokenizers of the tiny models have


@dataclass(frozen=True)
class Prompts:
    """How prompts are written.

    template: 'plain', the prompt's text as it is (messages joined by blank lines)
        'chat', the tokenizer's own chat template (a plain text becomes one user message)
        'qwen_math', turns between <|im_start|> and <|im_end|>, asks for steps and a boxed answer
        'simplerl', Question: … Answer: … without special tokens, for base models
        'think_answer', asks for reasoning in <think></think>, then a boxed answer; by the tokenizer's chat template, or
        written as with 'simplerl' where it has none
        Or a text of your own, or a file with one: {question} is replaced by the question, {system} by its system
        message, and the response begins behind the text's last character (of a file, without its last line break)
        If a template writes turns, the token that closes a turn ends a response too
    max_tokens: the longest prompt allowed
    system: the system message of every question, which replaces its own; not for 'plain'. '': no system message, unless
        the tokenizer's chat template has a default. None: the question's own, else the template's
    chat_template_from: a tokenizer (folder or hub id) whose chat template takes the place of the model's own, or a file
        with one (scripts/chat_template.py writes it), also in the tokenizer of checkpoints; None: the model's own
    chat_template_kwargs: what the chat template takes besides the messages, such as {'enable_thinking': False}. Those
        of a question, in its column `chat_template_kwargs` (listed in QuestionFile.meta), win
    thought_tags: the opening and the closing tag of the model's thoughts, where they are none that docs/rewards.md
        names: ('<ponder>', '</ponder>')
    """

    template: str = "plain"
    max_tokens: Count = 1024
    system: str | None = None
    chat_template_from: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    thought_tags: Annotated[
        Tags, Constraint("must be two different tags, with no white space around them", _are_tags)
    ] = ()

    def __post_init__(self) -> None:
        check_settings(Prompts, vars(self))
        text, names = self.template, ", ".join(map(repr, TEMPLATES))
        if text not in TEMPLATES and "{question}" not in text and os.path.isfile(text):
            text = Path(text).read_bytes().decode("utf-8-sig", "replace").replace("\r\n", "\n").removesuffix("\n")
        counts = [text.count(part) for part in ("{question}", "{system}", "\ufffd")]
        require(
            text in TEMPLATES or counts in ([1, 0, 0], [1, 1, 0]),
            "Prompts.template must be a text, or a file with a text in UTF-8, that has {question} once and {system} at "
            f"most once, or one of {names}, got {self.template!r}",
        )
        object.__setattr__(self, "template", text)  # so that a file is read once
        if (file := self.chat_template_from) is not None and os.path.isfile(file):
            object.__setattr__(self, "chat_template_from", read_text(Path(file), "Prompts.chat_template_from"))
        chat = text in TEMPLATES and TEMPLATES[text].chat
        for name in ("chat_template_from", "chat_template_kwargs"):
            needs = f"Prompts.{name} needs Prompts.template = 'chat' or 'think_answer', got {text!r}"
            require(chat or getattr(self, name) is None, needs)
        require(
            self.system is None or self.template != "plain",
            f"Prompts.system cannot be used with Prompts.template = 'plain'; got {self.system!r}",
        )


class PromptEncoder:
    """Renders and encodes questions, once each."""

    def __init__(self, settings: Prompts, tokenizer: PreTrainedTokenizerBase) -> None:
        """The tokenizer gets the chat template of `Prompts.chat_template_from`, if that is bound.

        Raises ValueError if the tokenizer lacks the chat template or the special tokens that the template needs, or
        reads another text than the template writes.
        """
        if settings.chat_template_from is not None:
            take_chat_template(settings.chat_template_from, tokenizer)
        is_text = settings.template not in TEMPLATES
        template = Template({}) if is_text else TEMPLATES[settings.template]
        self._chat = tokenizer.chat_template if template.chat else None
        self._kwargs: dict[str, Any] = dict(settings.chat_template_kwargs or {})
        if not self._chat and (template.turns is None or self._kwargs):
            raise ValueError(
                f"Prompts.template = {settings.template!r}, but the tokenizer of {tokenizer.name_or_path} has no chat "
                "template; use Prompts.template = 'plain', or 'simplerl'"
            )
        if missing := [token for token in template.tokens if token not in tokenizer.get_vocab()]:
            raise ValueError(
                f"Prompts.template = {settings.template!r}, but the tokenizer of {tokenizer.name_or_path} does not "
                f"have {' and '.join(missing)}; use Prompts.template = 'chat', or 'simplerl'"
            )
        self.settings, self.tokenizer, self._template = settings, tokenizer, template
        self._encoded: dict[tuple[str, str], tuple[list[int], bool]] = {}  # and whether a thought is open
        self._observed: set[str] = set()  # questions with such an observation
        self._special = SpecialTokens(tokenizer)
        # The parts of the user's own text between its special tokens, and these.
        self._parts = re.split(f"({self._special.pattern.pattern})", settings.template) if is_text else []
        # A text with special tokens has all of them, including the beginning-of-text token: encoding must add none.
        self._adds = not (self._chat or template.tokens or len(self._parts) > 1)
        text, ids = self.render(_PROBE), self.token_ids(_PROBE)
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._adds and bare and ids[-len(bare) :] != bare:
            raise ValueError(
                f"Prompts.template = {settings.template!r}: the tokenizer of {tokenizer.name_or_path} appends "
                f"{tokenizer.decode(ids[-1:])!r} to a prompt; take that out of the post_processor in its tokenizer.json"
            )
        self._opened = opening(text, settings.thought_tags)
        self._space = text[len(text.rstrip()) :]  # behind it
        if not is_text and settings.chat_template_from is None:
            return
        decoded = str(tokenizer.decode(ids))
        if "".join(text.split()) not in "".join(decoded.split()):  # decoding may set other spaces
            raise ValueError(f"a prompt is {text!r}, but the tokenizer of {tokenizer.name_or_path} reads {decoded!r}")
        if list(tokenizer(f"{text}The", add_special_tokens=self._adds)["input_ids"][: len(ids)]) != ids:
            log.warning(
                "the prompt ends in %r, whose tokens change with an answer behind it; end it earlier", text[-20:]
            )

    def encode(self, question: Question) -> list[int]:
        """The prompt's token ids.

        Raises ValueError for a prompt longer than Prompts.max_tokens, or empty, or with a role it cannot write.
        """
        return self._encode(question)[0]

    def opens_thought(self, question: Question) -> bool:
        """As the function `opens_thought`, of its prompt. Raises as `encode`."""
        return self._encode(question)[1]

    def _encode(self, question: Question) -> tuple[list[int], bool]:
        if (key := (question.id, str(question.meta.get("chat_template_kwargs")))) not in self._encoded:
            ids = self.token_ids(question)
            if not 0 < len(ids) <= self.settings.max_tokens:
                raise ValueError(
                    f"{_name(question)} has {len(ids)} prompt tokens; allowed are 1 to Prompts.max_tokens = "
                    f"{self.settings.max_tokens}. Raise it, or leave the question out of the set"
                )
            own = self.settings.thought_tags
            self._encoded[key] = ids, opens_thought(self.render(question), self.turns(question), own)
        return self._encoded[key]

    def introduce(self, questions: Sequence[Question], validation: Sequence[Question]) -> dict[str, Any]:
        """`check_prompts` the questions of a run, those of training and those of validation, and log a prompt.

        Returns what a checkpoint records, so that benchmarks are asked as in training: `template`, if it is a text of
        the user's own, and what `asked_in_training` says.
        """
        self.check_prompts([*questions, *validation])
        prompt = repr(self.tokenizer.decode(self.encode(questions[0])))
        prompt = prompt if len(prompt) <= 1000 else f"{prompt[:500]} … {prompt[-500:]}"
        log.info("a prompt of training, template %.40r: %s", self.settings.template, prompt)
        first = [self.turns(question) for question in (questions[0], *validation[:1])]
        around = [self.render(Question.make("", (*turns[:-1], (turns[-1][0], "…")), "1")) for turns in first]
        if around[0] != around[-1]:
            log.warning("prompts of validation differ from those of training around the question: %.999r", around[-1])
        record = {} if self.settings.template in TEMPLATES else {"template": self.settings.template}
        return {**record, **asked_in_training([_messages(question) for question in questions], self.settings.system)}

    def check_prompts(self, questions: Sequence[Question]) -> None:
        """Encode all questions, so that a prompt that cannot be used stops the run before it starts.

        Raises ValueError as `encode`, and for a prompt with letters, digits or signs that the tokenizer has no token
        for: the model would read another prompt.
        """
        readable: dict[str, bool] = {}
        for i, question in enumerate(questions):
            try:
                self.encode(question)
            except ValueError as error:
                limit, lengths = self.settings.max_tokens, [len(self.token_ids(other)) for other in questions[i:]]
                if lengths[0] <= limit:
                    raise
                raise ValueError(
                    f"{sum(length > limit for length in lengths)} of {len(questions)} prompts are too long, up to "
                    f"{max(lengths)} tokens (Work.questions = @LengthFilter() leaves them out; --dry-run prints what "
                    f"it needs): {error}"
                ) from error
            text = _text(question)
            for character in set(text).difference(readable):
                readable[character] = unicodedata.category(character)[0] not in "LNPS" or self._has(character)
            if lost := [character for character in dict.fromkeys(text) if not readable[character]]:
                raise ValueError(
                    f"{_name(question)}: the model's tokenizer has no token for {' '.join(lost[:10])}; take another "
                    "model, or leave the question out of the set"
                )
        if marked := [_name(question) for question in questions if self._special.pattern.search(_text(question))]:
            log.warning("%d questions hold special tokens, encoded as text: %s", len(marked), "; ".join(marked[:5]))

    def _has(self, character: str) -> bool:
        ids = self.tokenizer(character, add_special_tokens=False)["input_ids"]
        return bool(ids) and (self.tokenizer.unk_token_id is None or self.tokenizer.unk_token_id not in ids)

    def turn_ends(self) -> tuple[int, ...]:
        """The token that closes the assistant's turn in the template; () if there is none.

        A base model's generation config may lack it, and then a response would go on with a turn of the user.
        """
        if self._chat:
            turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
            try:
                text = str(self.tokenizer.apply_chat_template(turns, tokenize=False, **self._kwargs))
            except TemplateError:  # the template cannot write a turn of the assistant
                return ()
            after = text.rpartition("answer")[2].strip() if "answer" in text else ""
        elif "<|im_end|>" in self._template.tokens:
            after = "<|im_end|>"
        else:  # in a text of the user's own, the token behind the question, if another one opens the answer's turn
            behind = next((i + 1 for i, part in enumerate(self._parts) if "{question}" in part), 0)
            after = self._parts[behind] if len(self._parts) > behind + 2 else ""
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        return (ids[0],) if ids and ids[0] in self.tokenizer.get_added_vocab().values() else ()

    @cached_property
    def _ends(self) -> list[int]:
        """The tokens that end a response; the first one closes a response that somebody else wrote, as the policy's own
        are closed: the one that closes the template's turn, or else the tokenizer's end token.

        Raises ValueError if there is none.
        """
        ends = [token for token in (*self.turn_ends(), self.tokenizer.eos_token_id) if token is not None]
        require(bool(ends), "neither the template nor the tokenizer names an end token to close a response with")
        return ends

    def encode_response(self, text: str, max_tokens: int) -> list[int]:
        """The token ids of a response that somebody else wrote, as it stands, and the token that closes it. Where the
        prompt opens a thought, the response's own opening tag is left out.

        max_tokens: Sampling.max_response_tokens
        Raises ValueError if that is exceeded, if the response has no token or holds an end token already, and if there
        is no end token.
        """
        if self._opened and text.startswith(self._opened):
            text = text.removeprefix(self._opened).removeprefix(self._space)
        ends, ids = self._ends, list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        require(bool(ids), f"the response has no token of this tokenizer: {text!r:.200}")
        require({*ends}.isdisjoint(ids), f"the response holds an end token, which is added here: {text!r:.200}")
        allowed = f"allowed are Sampling.max_response_tokens = {max_tokens}"
        require(len(ids) < max_tokens, f"the response has {len(ids) + 1} tokens with its end token; {allowed}")
        return [*ids, ends[0]]

    def fingerprint(self) -> str:
        """Hash of what gives token ids their meaning: the tokenizer, its chat template and ours."""
        template = [self.settings.template, self.settings.system, asdict(self._template)]
        identity = [template, self._chat, sorted(self.tokenizer.get_vocab().items())]
        if "strftime_now" in str(self._chat):  # it may write the date, which is part of every prompt
            identity.append(self.token_ids(_PROBE))
        identity += [self._kwargs] if self._kwargs else []
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def render(self, question: Question) -> str:
        """The text that is encoded. Raises ValueError for a role, or arguments, that the template cannot write."""
        turns, template = self.turns(question), self._template
        if self._chat or template.turns is None:
            return self._by_chat_template(turns, question)
        own = question.meta.get("chat_template_kwargs")
        if own:
            raise ValueError(f"{_name(question)} has chat_template_kwargs, {own!r:.80}, but no chat template takes it")
        if not template.turns:
            text, roles = self.settings.template, [role for role, _ in turns]
            if roles != ["user"] and (roles != ["system", "user"] or "{system}" not in text):
                raise ValueError(
                    f"question {question.id} of {question.source} has messages of {', '.join(roles)}; Prompts.template "
                    f"= {text!r} writes one of the user, and of the system at {{system}} (Prompts.system = '' drops it)"
                )
            contents = {"question": turns[-1][1], "system": turns[0][1] if turns[1:] else ""}
            return re.sub(r"\{(question|system)\}", lambda match: contents[match[1]], text)
        if unknown := [role for role, _ in turns if role not in template.turns]:
            raise ValueError(
                f"question {question.id} of {question.source} has a message of role {unknown[0]!r}; "
                f"Prompts.template = {self.settings.template!r} writes {', '.join(template.turns)}"
            )
        parts = [template.turns[role].format(content) for role, content in turns]
        if turns[-1][0] == "assistant":  # a prefill: the response goes on with it
            opening = template.turns["assistant"].partition("{}")[0]
            parts[-1] = f"{template.answer.removesuffix(opening.rstrip(' '))}{opening}{turns[-1][1]}"
        elif template.answer:
            parts.append(template.answer)
        return template.between.join(parts)

    def _by_chat_template(self, turns: list[Message], question: Question) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        ending: Any = {"continue_final_message" if turns[-1][0] == "assistant" else "add_generation_prompt": True}
        where = f"{_name(question)}: the chat template of {self.tokenizer.name_or_path}"
        kwargs = template_kwargs(self._kwargs, question.meta.get("chat_template_kwargs"), self.tokenizer, where)
        system = ["".join(content.split()) for role, content in turns if role == "system"]
        remedy = "; Prompts.system = '' leaves the system message out" if system else ""
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ending, **kwargs))
        except Exception as error:  # a template is a program, which can fail in any way
            raise ValueError(f"{where} fails: {first_line(error)}{remedy}") from error
        if any(content not in "".join(text.split()) for content in system):
            raise ValueError(f"{where} does not write its system message{remedy}")
        return text

    def token_ids(self, question: Question) -> list[int]:
        """The prompt's token ids, however many. The text of a special token in the question is no token."""
        text = self.render(question)
        if self._special.pattern.search(_text(question)):
            hidden = tuple((role, self._special.hide(content)) for role, content in _messages(question))
            return self._special.encode(self.render(replace(question, prompt=hidden)), self._adds)
        return list(self.tokenizer(text, add_special_tokens=self._adds)["input_ids"])

    def encode_observation(self, text: str, question: Question) -> list[int]:
        """The token ids of what is added to a question's prompt, encoded as the question is."""
        if self._special.pattern.search(text):
            if question.id not in self._observed:
                log.warning("an observation holds the text of a special token, encoded as text: %s", _name(question))
                self._observed.add(question.id)
            return self._special.encode(self._special.hide(text), False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def turns(self, question: Question) -> list[Message]:
        """The question's messages, with the system message that the settings ask for."""
        turns = _messages(question)
        has_system = turns[0][0] == "system"
        if self.settings.system is not None:
            system, turns = self.settings.system, turns[has_system:]
            return [("system", system), *turns] if system else turns
        return turns if has_system or self._template.system is None else [("system", self._template.system), *turns]


def _messages(question: Question) -> list[Message]:
    return [("user", question.prompt)] if isinstance(question.prompt, str) else list(question.prompt)


def _text(question: Question) -> str:
    return "".join(content for _, content in _messages(question))


def _name(question: Question) -> str:
    start = question.prompt if isinstance(question.prompt, str) else question.prompt[-1][1]
    return f"question {question.id} of {question.source} ({start[:60]!r} …)"
