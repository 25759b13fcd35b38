"""The tags between which models think: the one place that knows them.

A closing tag ends a thought of its own family alone. Without an opening one, which may be part of the prompt, it ends a
thought that began with the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .grade import Message

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]|[\ud800-\udfff]"
)
CHAT_TOKEN = re.compile(r"<[|｜][^<>|｜\n]{1,40}[|｜]>|</?s>|\[/?INST\]")
Tags = tuple[str, ...]  # as Prompts.thought_tags: a user's own opening and closing tag, or none

_THINK = r"(?:\w+[:_])?think(?:ing)?(?::\w+)?>"
_CHANNEL = r"(?:\|start\|>\w*\s*<)?\|channel\|>"
_FINAL = rf"{_CHANNEL}\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_FAMILIES = (  # the first character, how an opening tag goes on, and a closing one
    ("<", _THINK, f"/{_THINK}"),  # <think> of DeepSeek-R1 and Qwen3, <thinking>, <seed:think>, <longcat_think>, …
    ("<", "thoughts?>", "/thoughts?>"),  # EXAONE Deep, Marco-o1
    ("<", "reasoning>", "/reasoning>"),
    (r"\[", r"think\]", r"/think\]"),  # Magistral
    ("◁", "think▷", "/think▷"),  # Kimi
    ("<", r"\|begin_of_thought\|>", r"\|end_of_thought\|>"),  # Sky-T1, OpenThinker
    ("<", r"\|start_thinking\|>", r"\|end_thinking\|>"),  # Command A Reasoning
    ("<", r"\|channel>(?:thought\b)?", r"channel\|>"),  # Gemma 4
    ("<", rf"{_CHANNEL}(?!\s*final\b)[^<]*(?:<\|message\|>)?", _FINAL),  # gpt-oss: all channels but the final one
)
_EITHER = (f"(?<={c})(?:(?P<open{i}>{begin})|(?P<shut{i}>{end}))" for i, (c, begin, end) in enumerate(_FAMILIES, 1))
# With the first characters before the alternatives, a response of 40,000 characters takes 0.1 ms on one core, not 30.
TAG = re.compile(rf"[<\[◁](?=[/a-z|])(?:{'|'.join(_EITHER)})", re.IGNORECASE)
BEHIND = r"(?<=think[>\]▷])|(?<=(?:thinking|thoughts)>)|(?<=thought>)|(?<=reasoning>)|(?<=[|｜]>)"  # a tag or a token
_ANALYSIS = re.compile(r"\s*analysis(?=[A-Z0-9\"'*\\$(])")  # of gpt-oss, decoded without its special tokens


def tag_of(match: re.Match[str]) -> tuple[int, bool]:
    """(the family, from 1, whether it closes). match: of a pattern that contains TAG's"""
    group = next(name for name, text in match.groupdict().items() if text is not None and name[:4] in ("open", "shut"))
    return int(group[4:]), group.startswith("shut")


def outside(text: str) -> tuple[list[str], bool]:
    """(the parts of a text that are in no thought, in order; whether a thought is open at its end)"""
    parts, start, inside = list[str](), 0, 0
    for tag in TAG.finditer(text):
        family, closes = tag_of(tag)
        if closes and inside in (0, family):
            start, inside = tag.end(), 0
        elif not closes and not inside:
            parts.append(text[start : tag.start()])
            inside = family
    return (parts, True) if inside else ([*parts, text[start:]], False)


def visible(response: str) -> str:
    """The response without its thoughts, chat tokens and invisible characters.

    What is behind the last thought counts. A thought that is never closed hides the rest. The text before a thought
    counts if there is none after it, and the thought has an opening tag.
    """
    parts = [CHAT_TOKEN.sub(" ", part).strip() for part in outside(_INVISIBLE.sub("", response))[0]]
    return next(filter(None, reversed(parts)), "")


def behind(text: str) -> str | None:
    """What follows the end of the thought in which a text begins; None: it has no end."""
    return next((text[tag.end() :] for tag in TAG.finditer(text) if tag_of(tag)[1]), None)


def opening(prompt: str, own: Tags = ()) -> str:
    """The opening tag at the end of a prompt, white space behind it aside; '' if there is none."""
    text = prompt.rstrip()
    if own and text.endswith(own[0]):
        return own[0]
    return next((tag[0] for tag in TAG.finditer(text) if tag.end() == len(text) and not tag_of(tag)[1]), "")


def opens_thought(prompt: str, turns: Sequence[Message] = (), own: Tags = ()) -> bool:
    """Whether a response begins inside a thought: its prompt ends in an opening tag, or in a turn of the assistant (the
    last of `turns`) with a thought that is not closed. own: as Prompts.thought_tags"""
    if turns and turns[-1][0] == "assistant":
        return outside(in_known_tags(turns[-1][1], own))[1]
    return bool(opening(prompt, own))


def in_known_tags(text: str, own: Tags = ()) -> str:
    """The text with <think> and </think> for a user's own tags, and for what is left of gpt-oss' channels where special
    tokens were not decoded ("analysis… assistantfinal…")."""
    for tag in sorted(own, key=len, reverse=True):  # one may be a part of the other
        text = text.replace(tag, "<think>" if tag == own[0] else "</think>")
    if name := _ANALYSIS.match(text):
        text = f"<think>{text[name.end() :].replace('assistantfinal', '</think>', 1)}"
    return text


def in_think_tags(text: str) -> str:
    """The text with <think> and </think> for the tags of the family that it has first, and without other families'."""
    family = tag_of(first)[0] if (first := TAG.search(text)) else 0
    plain = {(family, False): "<think>", (family, True): "</think>"}
    return TAG.sub(lambda tag: plain.get(tag_of(tag), ""), text)
