r"""Finds the last \boxed{…} of a text: in the solutions of data sets, and in responses."""

from __future__ import annotations

import re

BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_FRAME = re.compile(rf"{BOX.pattern}.*\}}", re.DOTALL).fullmatch  # a box that holds nothing but another box


def last_box(text: str) -> str | None:
    """The content of the last box that is closed and not empty; the innermost where boxes are nested."""
    starts = {match.end(): match for match in BOX.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    inside: tuple[int, int] | None = None
    bare: str | None = None
    for match in re.finditer(r"\\?[{}]|\\\\", text):  # an escaped brace is a character, not a bracket
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            start = opened.pop()
            content = text[start + 1 : match.start()].strip()
            if start in starts and content and not (inside and inside[0] > start and _FRAME(content.strip("$ "))):
                inside = (start + 1, match.start())
    for end, match in starts.items():  # \boxed 5 and \boxed5
        if (short := re.match(r"[^\s{}$\\]+", text[end : end + 40])) and match.start() > (inside[0] if inside else -1):
            bare = short[0]
    return bare if bare is not None else text[inside[0] : inside[1]].strip() if inside else None
