"""Finds the answer in a response: the last box, the content of <answer>, a statement, or the bare response.

All of it is one pass or a plain search: a response of 100,000 characters or 5,000 open brackets takes milliseconds.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .boxes import BOX, last_box
from .thoughts import visible

LONGEST = 5_000  # characters; a longer text is no answer

_ANSWER = re.compile(r"<answer>", re.IGNORECASE)
OTHER_LANGUAGES = "réponse|respuesta|resposta|risposta|antwort|lösung|ответ|jawaban"  # that write 3,5 for 3.5
_STATEMENT = re.compile(
    r"(?:\b(?:final\s+)?answers?\b(?:\s+(?:choice|option))?\**\s*(?:is|are|=|:)\s*(?:that\s+|therefore\s+|simply\s+|just\s+)?"
    r"|\banswer\b\**\s*[:=]|####|答案(?:是|为|:|：)|(?:答え|正解|정답|답)(?:は|은|:|：)|\b(?:we|I)\s+get\s+(?:the\s+)?(?:final\s+)?answer\s*(?:of|:)?"
    rf"|\b(?:{OTHER_LANGUAGES})\b(?:\s+[^\W\d]+)?\**\s*(?:\b(?:est|es|é|è|ist|lautet)\b|[:=]))"
    r"[\s:*=]*",
    re.IGNORECASE,
)
_NEGATED = re.compile(  # "the answer is not 5 but 6", "the answer isn't $x$."
    r"(answers?\b\W{0,4}\s*(?:is|are))(?:\s+not|n['’]t)\s+(?:simply\s+|just\s+)?(?:\$[^$\n]+\$|\\\([^\n]{1,200}?\\\)|[-−]?\d[\d.,/]*%?)"
    r"(?:[\s,;]*\bbut\b)?",
    re.IGNORECASE,
)
_RULED_OUT = re.compile(  # before a number: it is not 5
    r"(?:\b(?:can)?not|n['’]t)(?:\s+(?:be|equal)(?:\s+to)?)?[\s$*(\\]*$", re.IGNORECASE
)
_REMARK = re.compile(
    r"[,.;]?\s+(?:because|since|which|where|when|as\s+(?:required|desired|requested|shown)|so\s+that|I\s+hope)\b|,\s+(?:so|as|and\s+so)\s",
    re.IGNORECASE,
)
_SPAN = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\\\n])+)\$", re.DOTALL)
_JOIN = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or|&)\s*", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.])[-−+]?\$?(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?|(?<![\w.])[-−+]?\.\d+"
)
_SENTENCE_END = re.compile(r"(?<!\\)(?<!\bi\.e)(?<!\be\.g)[.!?。](?:\s|$)|\n")


class Extracted(NamedTuple):
    """A possible answer.

    text: the answer
    marked: whether it was boxed, tagged or stated; otherwise it was found in a place where answers usually are
    prose: whether words may surround it
    """

    text: str
    marked: bool
    prose: bool


def answer_part(response: str) -> tuple[str, str | None]:
    """(the text in which to look for the answer, the content of the last <answer>, to its end tag or the end of the
    text, or None without one). A box is looked for in all of the text, before and after the tags."""
    text = visible(response)
    inside = None
    if tags := [*_ANSWER.finditer(text)]:
        inside = re.split(r"</answer>", text[tags[-1].end() :], maxsplit=1, flags=re.IGNORECASE)[0].strip()
    return text if inside is None or last_box(text) is not None else inside, inside


def answer_in(response: str) -> list[Extracted]:
    """Possible answers, best first; more than one only where none is boxed, tagged or stated. Empty: no answer."""
    text, inside = answer_part(response)
    box = last_box(text)
    if box is not None:
        return [Extracted(box, True, False)] if len(box) <= LONGEST else []
    text = re.sub(BOX.pattern + r"\{\s*\}", "", text)  # an empty box
    text = re.split(BOX.pattern + r"\{", text)[0]  # a box that is never closed: the answer was cut off
    if inside and "\n" not in inside:
        return [Extracted(inside[:LONGEST], True, True)]
    text = _NEGATED.sub(r"\1 ", text)
    stated = last_statement(text)
    return [Extracted(stated, True, True)] if stated else _unmarked(text)


def last_statement(text: str) -> str | None:
    """What follows the last "the answer is": a formula if there is one, else the words up to the sentence's end."""
    matches = [found for found in _STATEMENT.finditer(text) if text[found.end() : found.end() + 500].strip(" \n.*")]
    if not matches:
        return None
    match = matches[-1]
    rest = text[match.end() :][: 2 * LONGEST].lstrip().removeprefix("**").lstrip()
    first_line = rest.split("\n", 1)[0]
    span = _SPAN.search(rest)
    if span and (span.start() < len(first_line) or not first_line.strip(" :*$\\[(")):
        before = rest[: span.start()]
        if not re.search(r"\d", before) and not _SENTENCE_END.search(before.strip() + "x"):
            return _joined_spans(rest, span)
    phrase = first_line
    if remark := _REMARK.search(phrase, 1):
        phrase = phrase[: remark.start()]
    end = next((m for m in _SENTENCE_END.finditer(phrase) if not re.match(r"\b[A-J]$", phrase[: m.start()][-2:])), None)
    if end and phrase[: end.start()].strip():
        phrase = phrase[: end.start()]
    return re.sub(r"(?:です|である|입니다)$", "", phrase.strip(" *_`")) or None


def _joined_spans(text: str, span: re.Match[str]) -> str:
    """Formulas joined by an enumeration ("$3$ and $5$") as one answer."""
    parts = [_content(span)]
    while join := _JOIN.match(text, span.end()):
        following = _SPAN.match(text, join.end())
        if following is None:
            break
        parts.append(_content(following))
        span = following
    return ", ".join(parts)


def _content(span: re.Match[str]) -> str:
    return next(group for group in span.groups() if group is not None).strip()


def _unmarked(text: str) -> list[Extracted]:
    """The whole of a short response, and the last formula or number of any; nothing where that is ruled out."""
    answers = []
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    if not lines:
        return []
    if len(text.strip()) <= 200 and len(lines) == 1:
        answers.append(Extracted(lines[0], False, True))
    tail = text[-2 * LONGEST :]
    spans, numbers = [*_SPAN.finditer(tail)], [*_NUMBER.finditer(tail)]
    span, number = spans[-1] if spans else None, numbers[-1] if numbers else None
    if span is not None and (number is None or number.start() < span.end() or not _content(span)):
        last, content = span, _content(span)
    elif number is not None:
        last, content = number, number[0]
    else:
        return answers
    return [] if _RULED_OUT.search(tail[: last.start()][-40:]) else [*answers, Extracted(content, False, False)]
