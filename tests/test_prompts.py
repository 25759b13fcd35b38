"""From question to prompt tokens."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from exgrpo_orlhf.prompts import PromptEncoder, Prompts
from exgrpo_orlhf.replay import Question

CHAT = "<{% for m in messages %}{{ m.content }}{% endfor %}>".replace("<", "#").replace(">", "=")


@pytest.fixture
def tokenizer(raw_model):
    return AutoTokenizer.from_pretrained(raw_model)


def test_plain_prompt_is_the_text(tokenizer):
    encoder = PromptEncoder(Prompts("plain", 32), tokenizer)
    assert tokenizer.decode(encoder.encode(Question.make("s", "1+2=", "3"))) == "1+2="


def test_chat_template_is_the_models_own_and_special_tokens_come_once(tokenizer):
    tokenizer.chat_template = CHAT
    encoder = PromptEncoder(Prompts("chat", 32), tokenizer)
    for prompt in ("1+2", (("user", "1+2"),)):
        assert tokenizer.decode(encoder.encode(Question.make("s", prompt, "3"))) == "#1+2="


def test_a_chat_template_that_is_not_there_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"Prompts\.template = 'chat'.* has no chat template"):
        PromptEncoder(Prompts("chat", 32), tokenizer)


def test_a_question_longer_than_the_prompt_limit_is_named(tokenizer):
    encoder = PromptEncoder(Prompts("plain", 4), tokenizer)
    encoder.check([Question.make("s", "1+2=", "3")])
    long = Question.make("chains", "1+2+3=", "6")
    with pytest.raises(
        ValueError, match=rf"question {long.id} of chains \('1\+2\+3='.*6 prompt tokens.*max_tokens = 4"
    ):
        encoder.check([Question.make("s", "1+2=", "3"), long])


def test_fingerprint_changes_with_tokenizer_and_template(tokenizer):
    tokenizer.chat_template = CHAT
    plain = PromptEncoder(Prompts("plain", 32), tokenizer).fingerprint()
    assert PromptEncoder(Prompts("plain", 64), tokenizer).fingerprint() == plain
    chat = PromptEncoder(Prompts("chat", 32), tokenizer).fingerprint()
    tokenizer.chat_template = CHAT + "="
    other_chat = PromptEncoder(Prompts("chat", 32), tokenizer).fingerprint()
    tokenizer.add_tokens(["x"])
    other_tokens = PromptEncoder(Prompts("plain", 32), tokenizer).fingerprint()
    assert len({plain, chat, other_chat, other_tokens}) == 4
