"""From question to prompt tokens."""

from __future__ import annotations

import string
from dataclasses import replace
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_builders import ROOT, SWITCHED, THINKING, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.utils import chat_template_utils

from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.questions.prompts import TEMPLATES, PromptEncoder, Prompts
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.testbed.tiny_models import ChainModel

CHAT = "<{% for m in messages %}{{ m.content }}{% endfor %}>".replace("<", "#").replace(">", "=")
LETTERS_CHAT = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
BOXED = "\\boxed{}"
QUESTION = Question.make("s", "What is {1} + 2?", "3")
OWN_SYSTEM = Question.make("s", (("system", "Be brief."), ("user", "What is {1} + 2?")), "3")
WRITTEN = ("qwen_math", "simplerl", "think_answer")


@pytest.fixture
def tokenizer(raw_model):
    return AutoTokenizer.from_pretrained(raw_model)


@pytest.fixture
def letters() -> PreTrainedTokenizerFast:
    """One token per character, <s> before every text, the special tokens of Qwen; no chat template."""
    special = ["<s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*special, *string.printable])}, "<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", unk_token="<unk>", additional_special_tokens=special[2:]
    )


def written(settings: Prompts, tokenizer, question: Question = QUESTION) -> str:
    ids = PromptEncoder(settings, tokenizer).encode(question)
    assert tokenizer.unk_token_id not in ids
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_prompt_that_the_tokenizer_would_shorten_is_refused(tokenizer, letters):
    """The tiny model's tokenizer drops what it has no token for; others have one for the unknown."""
    right = Question.make("mine", "1+2=", "3")
    question = Question.make("mine", "What is 1+2=", "3")
    encoder = PromptEncoder(Prompts("plain"), tokenizer)
    encoder.check_prompts([right])
    with pytest.raises(ValueError, match=rf"question {question.id} of mine .*'s tokenizer has no token for W h"):
        encoder.check_prompts([right, question])
    PromptEncoder(Prompts("plain"), letters).check_prompts(
        [question, Question.make("mine", "a\u200bb", "3")]
    )  # no letter is lost
    with pytest.raises(ValueError, match="no token for ü; take another model"):
        PromptEncoder(Prompts("plain"), letters).check_prompts([Question.make("mine", (("user", "Füge 1 zu 2"),), "3")])


@pytest.mark.parametrize("chat_template", [None, LETTERS_CHAT])
@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "chat"])
def test_the_beginning_of_text_comes_once_and_our_templates_ask_for_a_boxed_answer(template, chat_template, letters):
    letters.chat_template = chat_template
    encoder = PromptEncoder(Prompts(template), letters)
    ids, text = encoder.encode(QUESTION), encoder.render(QUESTION)
    assert (BOXED in text) == (template in WRITTEN)
    assert ("<think>" in text) == (template == "think_answer")
    assert ids.count(letters.bos_token_id) == (0 if template == "qwen_math" else 1)
    assert letters.bos_token_id not in ids[1:]
    if template == "qwen_math":
        assert [ids.count(letters.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")] == [3, 2]
    if template == "think_answer" and chat_template:
        assert text == f"<s>[system]{TEMPLATES[template].system}[user]What is {{1}} + 2?[assistant]"


@pytest.mark.parametrize("template", ["chat", *WRITTEN])
def test_system_message_is_the_settings_or_the_questions_own_or_the_templates(template, letters):
    letters.chat_template = LETTERS_CHAT
    default = TEMPLATES[template].system
    assert default is None or default in written(Prompts(template), letters)
    own = written(Prompts(template), letters, OWN_SYSTEM)
    assert own.count("Be brief.") == 1
    assert default is None or default not in own
    for question in (QUESTION, OWN_SYSTEM):
        text = written(Prompts(template, system="Add it up."), letters, question)
        assert text.count("Add it up.") == 1
        assert "Be brief." not in text
        assert default is None or default not in text
        none = written(Prompts(template, system=""), letters, question)
        assert "Be brief." not in none
        assert "system" not in none


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "plain", "system": "x"}, r"Prompts\.system cannot be used with .* = 'plain'; got 'x'"),
        ({"template": "qwen"}, r"'plain', 'chat', 'qwen_math', 'simplerl', 'think_answer', got 'qwen'"),
        ({"template": "chat"}, r"Prompts\.template = 'chat'.* has no chat template"),
        ({"template": "User: {}"}, r"has \{question\} once and \{system\} at most once, or one of .* got 'User: \{\}'"),
        ({"template": "{question} {question}"}, r"has \{question\} once"),
        ({"template": "{system} {system} {question}"}, r"\{system\} at most once"),
        ({"template": "nowhere.txt"}, r"or a file with a text .* got 'nowhere\.txt'"),
        ({"template": "Says: {question}"}, r"a prompt is 'Says: 1', but the tokenizer of .* reads '1'"),
        ({"chat_template_from": "x"}, r"Prompts\.chat_template_from needs .*'chat' or 'think_answer', got 'plain'"),
        *(
            ({"thought_tags": tags}, r"Prompts\.thought_tags must be two different tags")
            for tags in (("<a>",), ("<a>", "<a>"), ("<a>", ""), ("<a>", "</a> "), ("<a>", "<b>", "<c>"))
        ),
        ({"template": "qwen_math"}, r"'qwen_math'.* does not have <\|im_start\|> and <\|im_end\|>; use"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(settings, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        PromptEncoder(Prompts(**settings), tokenizer)


def test_a_template_file_in_other_bytes_than_utf_8_is_named_with_its_binding(tmp_path):
    (tmp_path / "template.jinja").write_bytes("{{ 'größer' }}".encode("latin-1"))
    with pytest.raises(ValueError, match=r"template\.jinja, line 1: not UTF-8 \(Prompts\.chat_template_from\)"):
        Prompts("chat", chat_template_from=str(tmp_path / "template.jinja"))


def test_prompts_that_are_too_long_are_counted_and_the_first_is_named(tokenizer):
    questions = [Question.make("chains", prompt, "0") for prompt in ("1+2=", "1+2+3=", "1+2", "1+2+3+4=")]
    encoder = PromptEncoder(Prompts("plain", 4), tokenizer)
    encoder.check_prompts(questions[::2])
    counted = (
        r"^2 of 4 prompts are too long, up to 8 tokens \(Work\.questions = @LengthFilter\(\) leaves them out; .*\)"
    )
    named = rf"question {questions[1].id} of chains \('1\+2\+3='.*6 prompt tokens.*max_tokens = 4"
    with pytest.raises(ValueError, match=f"{counted}: {named}"):
        encoder.check_prompts(questions)


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


@pytest.mark.parametrize(
    ("template", "token"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}", "<|eot_id|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}", None),
        ("{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", None),
    ],
)
def test_the_token_that_closes_the_assistants_turn_is_found_where_there_is_one(template, token):
    """A base model's generation config does not name it, and its response would go on with the user's next turn."""
    tokenizer = ChainModel.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]})
    tokenizer.chat_template = template
    ends = PromptEncoder(Prompts(template="chat"), tokenizer).turn_ends()
    assert ends == (() if token is None else (tokenizer.convert_tokens_to_ids(token),))
    assert PromptEncoder(Prompts(template="qwen_math"), tokenizer).turn_ends() == (
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    assert PromptEncoder(Prompts(template="plain"), tokenizer).turn_ends() == ()


# -- texts of the user's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [False, True])
def test_the_answer_begins_behind_the_last_character_of_a_text_of_ones_own(letters, tmp_path, in_file):
    text = "{system}\nWrite \\boxed{} or {}.\nQ {question}\nA\n:"
    file = tmp_path / "mine.txt"
    file.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig") + b"\n")
    settings = Prompts(str(file) if in_file else text)
    file.unlink()
    assert settings == Prompts(text), "a file is read once"
    around = ("Write \\boxed{} or {}.\nQ What is {1} + 2?\nA\n:", OWN_SYSTEM.prompt[0][1])
    assert written(settings, letters) == f"<s>\n{around[0]}"
    assert written(settings, letters, OWN_SYSTEM) == f"<s>{around[1]}\n{around[0]}"
    braces = Question.make("s", (("system", "{question}"), ("user", "{system}")), "3")
    assert written(Prompts("{system}/{question}"), letters, braces) == "<s>{question}/{system}"
    assert written(replace(settings, system="x"), letters, OWN_SYSTEM) == f"<s>x\n{around[0]}"
    file.write_bytes(b"\xff {question}")
    with pytest.raises(ValueError, match=r"a text in UTF-8, .* got '.*mine\.txt'"):
        Prompts(str(file))


def test_a_message_that_a_template_has_no_place_for_is_named(letters):
    question = Question.make("tools", (("tool", "3"), ("user", "1+2")), "3")
    with pytest.raises(ValueError, match=rf"question {question.id} of tools has a message of role 'tool'"):
        PromptEncoder(Prompts("simplerl"), letters).encode(question)
    encoder = PromptEncoder(Prompts("Q {question} A"), letters)
    turns = (("user", "1"), ("assistant", "2"), ("user", "3"))
    for question in (OWN_SYSTEM, Question.make("s", turns, "3"), Question.make("s", turns[:2], "3")):
        with pytest.raises(ValueError, match=rf"question {question.id} of s has messages of .*\(Prompts\.system = ''"):
            encoder.encode(question)
    assert written(Prompts("Q {question} A", system=""), letters, OWN_SYSTEM) == "<s>Q What is {1} + 2? A"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        ("<|im_start|>{system}<|im_end|>{question} please<|im_end|><|im_start|>", "<|im_end|>"),
        ("<|im_start|>{question}<|im_end|>", None),  # it may be what opens the answer
        ("Q {question} A", None),
    ],
)
def test_special_tokens_of_a_text_of_ones_own_are_all_there_are_and_close_turns(letters, text, end):
    encoder = PromptEncoder(Prompts(text), letters)
    ids = encoder.encode(QUESTION)
    assert ids.count(letters.bos_token_id) == (not text.startswith("<"))
    for token in ("<|im_start|>", "<|im_end|>"):
        assert ids.count(letters.convert_tokens_to_ids(token)) == text.count(token)
    assert encoder.turn_ends() == (() if end is None else (letters.convert_tokens_to_ids(end),))


def test_a_text_whose_last_tokens_an_answer_would_change_is_warned_of(caplog):
    vocabulary = byte_tokenizer().get_vocab()
    tokenizer = Qwen2Tokenizer(vocab={**vocabulary, "ĠT": len(vocabulary)}, merges=[("Ġ", "T")])
    for text, warned in (("Q {question} A:", False), ("Q {question} A: ", True)):
        PromptEncoder(Prompts(text), tokenizer)
        assert ("whose tokens change with an answer behind it; end it earlier" in caplog.text) == warned


# -- another tokenizer's chat template --------------------------------------------------------------------------------


def test_the_chat_template_of_another_tokenizer_is_used_and_saved(thinking, tmp_path):
    settings = Prompts("chat", chat_template_from=str(thinking))
    tokenizer = byte_tokenizer()
    ending = "Somebody wonders: What is {1} + 2?\nHelper: <think>\n"
    default = "Sort it out in two parts, and put the result in \\boxed{}.\n"
    assert written(settings, tokenizer) == default + ending
    assert written(settings, tokenizer, OWN_SYSTEM) == f"Be brief.\n{ending}"
    assert written(replace(settings, system=""), tokenizer, OWN_SYSTEM) == default + ending
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert written(Prompts("chat"), again, OWN_SYSTEM) == f"Be brief.\n{ending}"
    prints = [PromptEncoder(*each).fingerprint() for each in ((settings, byte_tokenizer()), (Prompts("chat"), again))]
    assert prints[0] == prints[1] != PromptEncoder(Prompts("chat"), byte_tokenizer()).fingerprint()


def test_a_chat_template_that_does_not_fit_is_refused(thinking, tmp_path, letters, raw_model):
    def refused(source, tokenizer, message):
        with pytest.raises(ValueError, match=message):
            PromptEncoder(Prompts("chat", chat_template_from=str(source)), tokenizer)

    refused(tmp_path / "nowhere", letters, r"chat_template_from = '.*nowhere': no chat template from there \(")
    refused(raw_model, letters, r"no chat template from there \(.*chat_template is not set")
    refused(
        thinking, AutoTokenizer.from_pretrained(raw_model), r"a prompt is 'Sort it .*, but the tokenizer of .* reads"
    )
    letters.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    letters.save_pretrained(tmp_path / "marks")
    refused(tmp_path / "marks", byte_tokenizer(), r"writes <\|im_start\|> and <\|im_end\|>, which the tokenizer")
    letters.add_special_tokens({"additional_special_tokens": ["<|system|>"]})
    letters.chat_template = "{% for m in messages %}{{ '<|system|>' if m.role == 'system' }}{{ m.content }}{% endfor %}"
    letters.save_pretrained(tmp_path / "of a system turn")
    refused(tmp_path / "of a system turn", byte_tokenizer(), r"its chat template writes <\|system\|>, which the")


def test_a_chat_template_takes_what_is_bound_and_a_questions_own_wins():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SWITCHED
    own = {name: replace(QUESTION, meta={"chat_template_kwargs": {"enable_thinking": name}}) for name in (True, False)}
    bound = {None: None, **{value: {"enable_thinking": value} for value in (True, False)}}
    for value, kwargs in bound.items():
        encoder = PromptEncoder(Prompts("chat", chat_template_kwargs=kwargs), tokenizer)
        for question, thinks in ((QUESTION, value is not False), (own[True], True), (own[False], False)):
            assert encoder.render(question).endswith("assistant: " if thinks else "assistant: <think>\n\n</think>\n\n")
            assert tokenizer.decode(encoder.encode(question)) == encoder.render(question), "of one id, and not mixed up"
            assert not encoder.opens_thought(question)
    settings = [Prompts("chat", chat_template_kwargs=kwargs) for kwargs in (*bound.values(), {})]
    prints = [PromptEncoder(each, tokenizer).fingerprint() for each in settings]
    assert len({*prints}) == 3
    assert prints[0] == prints[-1]


def test_what_a_row_of_parquet_has_only_because_of_others_leaves_what_is_bound(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SWITCHED
    rows = [{"enable_thinking": True}, {}, {"enable_thinking": False}]
    table = [{"prompt": f"{i}+1?", "answer": "2", "chat_template_kwargs": row} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "q.parquet")
    questions = QuestionFile(str(tmp_path / "q.parquet"), answer="answer", meta=("chat_template_kwargs",)).load()
    for bound in (True, False):
        encoder = PromptEncoder(Prompts("chat", chat_template_kwargs={"enable_thinking": bound}), tokenizer)
        silent = [encoder.render(question).endswith("</think>\n\n") for question in questions]
        assert silent == [False, not bound, True]


@pytest.mark.parametrize("kwargs", [{"enable_thinkin": False}, {"messages": []}, {"add_generation_prompt": False}])
def test_what_the_chat_template_does_not_take_is_refused_bound_or_of_a_row(kwargs):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SWITCHED
    message = f"the chat template of .* does not take '{next(iter(kwargs))}'; chat_template_kwargs are "
    with pytest.raises(ValueError, match=message):
        PromptEncoder(Prompts("chat", chat_template_kwargs=kwargs), tokenizer)
    encoder = PromptEncoder(Prompts("chat"), tokenizer)
    with pytest.raises(ValueError, match=f"question .*{message}"):
        encoder.check_prompts([replace(QUESTION, meta={"chat_template_kwargs": kwargs})])
    with pytest.raises(ValueError, match="chat_template_kwargs is 'no thoughts', not an object with names and values"):
        encoder.check_prompts([replace(QUESTION, meta={"chat_template_kwargs": "no thoughts"})])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"question .* has chat_template_kwargs, \{.*, but no chat template takes"):
        PromptEncoder(Prompts("think_answer"), tokenizer).check_prompts(
            [replace(QUESTION, meta={"chat_template_kwargs": kwargs})]
        )
    with pytest.raises(ValueError, match=r"'think_answer', but the tokenizer of .* has no chat template"):
        PromptEncoder(Prompts("think_answer", chat_template_kwargs={"enable_thinking": False}), tokenizer)


@pytest.mark.parametrize(
    ("opening", "response", "rest"),
    [
        ("<think>\n", "<think>\nso</think>3", "so</think>3"),
        ("<think>\n", "<think> so</think>3", " so</think>3"),
        ("<think>", "<think>\nso</think>3", "\nso</think>3"),
        ("<think>\n", "so</think>3", "so</think>3"),
        ("", "<think>so</think>3", "<think>so</think>3"),
        ("[THINK]", "[THINK]so[/THINK]3", "so[/THINK]3"),
        ("<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>so", "so"),
        ("<ponder>\n", "<ponder>\nso</ponder>3", "so</ponder>3"),
    ],
)
def test_an_opened_thought_is_not_opened_again_by_a_response_of_somebody_else(opening, response, rest):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING.replace("<think>\\n", opening.replace("\n", "\\n"))
    encoder = PromptEncoder(Prompts("chat", thought_tags=("<ponder>", "</ponder>")), tokenizer)
    assert encoder.render(QUESTION).endswith(f"\nHelper: {opening}")
    assert tokenizer.decode(encoder.encode_response(response, 99)[:-1]) == rest


def test_fingerprints_are_those_of_earlier_runs(letters):
    """The buffers of earlier checkpoints bear them."""
    seen = {name: PromptEncoder(Prompts(name), letters).fingerprint()[:8] for name in ("plain", *WRITTEN)}
    letters.chat_template = LETTERS_CHAT
    seen["chat"] = PromptEncoder(Prompts("chat"), letters).fingerprint()[:8]
    seen["chat think_answer"] = PromptEncoder(Prompts("think_answer"), letters).fingerprint()[:8]
    assert seen == {
        **{"plain": "f2d8f064", "qwen_math": "6064a2c3", "simplerl": "bf37eb2d", "think_answer": "61fc4dcc"},
        **{"chat": "43b5da02", "chat think_answer": "51809f0f"},
    }


def test_the_page_shows_every_built_in_template_as_it_is_written(letters):
    page = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")
    question = Question.make("s", "What is 1 + 2?", "3")
    for name in ("plain", *WRITTEN):
        text = PromptEncoder(Prompts(name), letters).render(question)
        assert f"## `{name}`" in page
        assert f"```\n{text.rstrip(chr(10))}\n```" in page, name
    assert "## `chat`" in page


# -- what a chat template cannot write --------------------------------------------------------------------------------

TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }};{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)
PREFILLED = Question.make("s", (("system", "Be brief."), ("user", "1 + 2?"), ("assistant", "It is \\boxed{")), "3")


def test_a_last_message_of_the_assistant_is_continued(letters):
    letters.chat_template = TURNS
    for template in ("chat", "qwen_math", "think_answer"):
        text = written(Prompts(template), letters, PREFILLED)
        assert text.endswith("It is \\boxed{"), template
        assert text.count("assistant") == 1, "no second turn is opened"
    end = "<|im_start|>assistant\nIt is \\boxed{"
    assert written(Prompts("qwen_math"), letters, PREFILLED).endswith(f"1 + 2?<|im_end|>\n{end}")
    letters.chat_template = None
    end = "\nAnswer: It is \\boxed{"
    assert written(Prompts("simplerl"), letters, PREFILLED).endswith(f"its result stands in {BOXED}.{end}")
    assert written(Prompts("think_answer"), letters, PREFILLED).endswith(f"Question: 1 + 2?{end}")
    assert written(Prompts("plain"), letters, PREFILLED) == "<s>Be brief.\n\n1 + 2?\n\nIt is \\boxed{"


@pytest.mark.parametrize(
    ("template", "question", "message"),
    [
        (TURNS.replace("m.content", "m.content | upper"), PREFILLED, "fails: continue_final_message is set but .* not"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", OWN_SYSTEM, "does not write its "),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}[assistant]",
            OWN_SYSTEM,
            "fails: No system role; Prompts.system = '' leaves the system message out",
        ),
        ("{{ messages[1].content + 1 if messages[1] else 'x' }}", OWN_SYSTEM, "fails: can only concatenate str"),
        (
            "{{ messages[1].nothing.content if messages[1] else 'x' }}",
            OWN_SYSTEM,
            "fails: .* has no attribute 'nothing'",
        ),
    ],
)
def test_what_a_chat_template_does_not_write_is_refused_with_row_and_remedy(template, question, message, letters):
    letters.chat_template, letters.name_or_path = template, "owner/model"
    encoder = PromptEncoder(Prompts("chat"), letters)
    row = rf"^question {question.id} of s \(.*\): the chat template of owner/model"
    with pytest.raises(ValueError, match=f"{row} {message}") as raised:
        encoder.check_prompts([question])
    assert ("Prompts.system = ''" in str(raised.value)) == (question.prompt[0][0] == "system")
    PromptEncoder(Prompts("chat", system=""), letters).check_prompts([QUESTION])


def test_a_bound_system_message_that_the_chat_template_drops_is_refused_at_once(letters):
    letters.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    for settings in (Prompts("chat", system="Be brief."), Prompts("think_answer")):
        with pytest.raises(ValueError, match=r"does not write its system message; Prompts\.system = '' leaves"):
            PromptEncoder(settings, letters)


@pytest.mark.parametrize(("dated", "same"), [("{{ strftime_now('%d %b %Y') }}", False), ("26 Jul 2024", True)])
def test_a_template_that_writes_the_date_has_another_fingerprint_tomorrow(dated, same, letters, monkeypatch):
    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    letters.chat_template = f"{dated}{TURNS}"
    today = [PromptEncoder(Prompts("chat"), letters).fingerprint() for _ in range(2)]
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    tomorrow = PromptEncoder(Prompts("chat"), letters).fingerprint()
    assert today[0] == today[1]
    assert (tomorrow == today[0]) == same
