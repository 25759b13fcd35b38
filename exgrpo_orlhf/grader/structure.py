"""The structure of an answer: lists, tuples, sets, intervals, matrices, equations, inequalities."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from .latex import number, plain_text

_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_RELATIONS = (
    r"\le", r"\ge", "<", ">", "=", r"\in", r"\approx", r"\ne", r"\to", r"\Leftrightarrow", r"\Rightarrow", r"\equiv",
)  # fmt: skip
_MATRIX = re.compile(r"\\begin\s*\{([pbB]|small)?(matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*?)\\end\s*\{\1\2\}", re.DOTALL)
_NAME = re.compile(
    r"\\?[A-Za-z]+'*(?:_(?:\{[^{}]*\}|\w))?(?:\s?\([^()]*\))?|\|\s?[A-Z]{1,3}\s?\||\\(?:angle|overline|triangle)\s?\{?[A-Z]{1,4}\}?"
    r"|[A-Za-z][A-Za-z ]*|[mP]\s?\\angle\s?[A-Z]{1,3}|\([A-Za-z](?:_\{?\w\}?)?(?:\s?,\s?[A-Za-z](?:_\{?\w\}?)?)*\)"
    r"|\\(?:frac|d)\s?\{d[A-Za-z]?\}\{d[A-Za-z]\}"
)

_BUILDER = re.compile(r"\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\s?\{?R\}?\s*)?[|:]\s*(.*\S)\s*\\\}", re.DOTALL)
_AND = re.compile(r"\\text\s*\{\s*(?:and|且|和|und|et|y)\s*\}|\s+and\s+|\\(?:land|wedge)\b")
_JOIN = r"(?:and|or|或者?|且|和|以及|または|oder|und|ou|et|o|y)"
_EXCEPT = re.compile(
    r"^(?:x\s?\\in\s)?(?:all )?(?:\\mathbb\{R\}|real numbers|reals|x),? (?:except|excluding)(?: for)? (?:x ?= ?)?"
)
_TRANSPOSED = re.compile(r"(.*[)\]}])\s*\^\s*(?:\{T\}|T)", re.DOTALL)
_LISTS = re.compile(r"(?:(?:np\.array|[Mm]atrix|array)\s?\()?(\[\s*\[.*\]\s*\])\)?", re.DOTALL)


class Interval(NamedTuple):
    """left, right: '[' or '(' and ']' or ')'"""

    left: str
    low: str
    high: str
    right: str


def split(text: str, separators: tuple[str, ...]) -> list[tuple[str, str]]:
    r"""(separator before, part) at the top level, outside all brackets. `\{` and `\}` are brackets, `]` closes `(`."""
    parts: list[tuple[str, str]] = []
    level, before, start = 0, "", 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _OPEN or token in ("\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin"):
            level += 1
        elif token in _CLOSE or token in ("\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end"):
            level -= 1
        elif level <= 0 and token in separators:
            parts.append((before, text[start : match.start()].strip()))
            before, start = token, match.end()
    parts.append((before, text[start:].strip()))
    return parts


def items(text: str) -> list[str]:
    """The parts of an enumeration: "3, 5", "3 and 5", "x=1 \\text{ or } x=2". One part for any other text."""
    text = re.sub(rf"\\(?:text|mathrm)\s*\{{\s*(?:,|,?\s*{_JOIN})\s*\}}|或者?|または", ",", text)
    text = re.sub(r"\\(?:lor|vee|wedge|land)\b", ",", text)
    text = re.sub(
        r"(?<![A-Za-z\\])\s*,?\s*\b(?:and|or)\b\s*(?![A-Za-z]{3})|(?<=\d|[)\]}])\s*,?\s*\b(?:and|or)\b\s*", ",", text
    )
    return [part for _, part in split(text, (",", ";")) if part]


def alternatives(text: str) -> str:
    r"""a \pm b as "a + b, a - b"; with several signs, all of them together."""
    if len(split(re.sub(r"(?<!\\)[{}]", " ", text), ("\\pm", "\\mp"))) == 1:
        return text  # none, or inside brackets
    plus = text.replace("\\pm", "+").replace("\\mp", "-")
    minus = text.replace("\\pm", "-").replace("\\mp", "+")
    return f"{plus}, {minus}"


def enclosed(text: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) if a pair of brackets, alike or not, encloses all: ( [ \{ \langle.

    Plain braces are { where they enclose an enumeration, and {} where they only group."""
    tokens = list(_TOKEN.finditer(text))
    if len(tokens) < 2:
        return None
    opening = {"(": "(", "[": "[", "]": "(", "\\{": "{", "\\langle": "<", "{": "{}"}.get(tokens[0][0])
    closing = {")": ")", "]": "]", "[": ")", "\\}": "}", "\\rangle": ">", "}": "{}"}.get(tokens[-1][0])
    if opening is None or closing is None:
        return None
    inside = text[tokens[0].end() : tokens[-1].start()]
    level = 1
    for match in tokens[1:-1]:
        if match[0] in _OPEN or match[0] in ("\\{", "\\langle"):
            level += 1
        elif match[0] in _CLOSE or match[0] in ("\\}", "\\rangle"):
            level -= 1
        if level <= 0:
            return None
    if opening == closing == "{}" and len(items(inside)) > 1:  # {1, 2}
        opening, closing = "{", "}"
    return opening, inside.strip(), closing


def matrix(text: str) -> list[list[str]] | None:
    """Rows of cells, if the whole text is one matrix, a list of lists, or one of these or a tuple transposed."""
    if match := _TRANSPOSED.fullmatch(text.strip()):
        brackets = enclosed(match[1])
        rows = matrix(match[1]) or ([items(brackets[1])] if brackets and brackets[0] in "([" else [])
        return [[*column] for column in zip(*rows, strict=True)] if sum(map(len, rows)) > 1 else None
    if match := _LISTS.fullmatch(text.strip()):
        parts = [enclosed(part) for part in items(match[1][1:-1])]
        rows = [items(part[1]) if part and part[0] + part[2] == "[]" else [] for part in parts]
        return rows if len({len(row) for row in rows}) == 1 and sum(map(len, rows)) > 1 else None
    wrapped = re.fullmatch(r"[(\[]\s*(\\begin\s*\{array\}.*\\end\s*\{array\})\s*[)\]]", text.strip(), re.DOTALL)
    match = _MATRIX.fullmatch(wrapped[1] if wrapped else text.strip())
    if match is None or "\\begin" in match[3]:
        return None
    lines = re.split(r"\\\\(?:\[[^\]]*\])?|\\cr\b", match[3])
    cells = [[cell.strip() for cell in line.split("&")] for line in lines if line.replace("\\hline", "").strip()]
    return cells if cells and len({len(row) for row in cells}) == 1 else None


def without_points(text: str) -> str:
    r"""0 < x < 9, x \ne 3, or all real numbers except 3, as a union of intervals; any other text as it is."""
    match = _BUILDER.fullmatch(text)
    points: list[str] = []
    others: list[str] = []
    for part in items(_AND.sub(",", match[2] if match else _EXCEPT.sub(r"x \\ne ", plain_text(text).strip()))):
        sides = relation(part)
        if sides[-1][0] == "\\ne" or (points and len(sides) == 1):  # x \ne 2, 3
            points += items(alternatives(sides[-1][1]))
        elif not re.fullmatch(r"[a-z]\s?\\in\s?\\mathbb\s?\{R\}", part):
            others.append(part)
    base = interval(" and ".join(others) or "(-\\infty,\\infty)")
    if not points or base is None:
        return text
    points.sort(key=lambda point: value.value if (value := number(point)) else 0)
    pieces = [f"({low},{high})" for low, high in pairwise([base.low, *points, base.high])]
    return base.left + " \\cup ".join(pieces)[1:-1] + base.right


def relation(text: str) -> list[tuple[str, str]]:
    """(relation before, side) of a chain of equations or inequalities; one pair for any other text."""
    return split(text, _RELATIONS)


def is_name(text: str) -> bool:
    r"""Whether a text may name a quantity: x, f(x), |AB|, \angle ABC, x_1, (x, y), Area."""
    text = re.sub(r"\\(?:text|mathrm|operatorname)\s*\{([^{}]*)\}", r"\1", text).strip()
    return bool(text) and len(text) <= 40 and _NAME.fullmatch(text) is not None


def interval(text: str) -> Interval | None:
    """[a, b), also written as an inequality: a < x <= b, x > a."""
    if match := _BUILDER.fullmatch(text):  # \{x | x > 0\}
        return interval(match[2]) if re.search(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", match[2]) else None
    if len(both := _AND.split(text)) == 2 or len(both := [part for _, part in split(text, (",",))]) == 2:
        return _both(*both)
    sides = relation(text)
    if len(sides) == 2 and re.fullmatch(r"\|\s?[a-z]\s?\|", sides[0][1]) and sides[1][0] in ("<", "\\le"):
        brackets, right = ("()" if sides[1][0] == "<" else "[]"), sides[1][1]
        left = f"-{right}" if re.fullmatch(r"[\d.]+|[a-z]|\\[a-z]+", right) else f"-({right})"
        return Interval(brackets[0], left, right, brackets[1])
    if len(sides) == 2 and sides[1][0] == "\\in" and is_name(sides[0][1]):
        return interval(sides[1][1])
    if len(sides) == 1:
        enclosure = enclosed(text)
        if enclosure is None or enclosure[0] not in "([" or enclosure[2] not in ")]":
            return None
        ends = [part for _, part in split(enclosure[1], (",", ";"))]
        return Interval(enclosure[0], ends[0], ends[1], enclosure[2]) if len(ends) == 2 and all(ends) else None
    if any(sign not in ("<", ">", "\\le", "\\ge") for sign, _ in sides[1:]):
        return None
    if len(sides) == 3 and is_name(sides[1][1]):
        (_, low), (first, _), (second, high) = sides
        if first in (">", "\\ge"):
            low, high, first, second = high, low, _turned(second), _turned(first)
        if second in (">", "\\ge"):
            return None
        return Interval("(" if first == "<" else "[", low, high, ")" if second == "<" else "]")
    if len(sides) == 2:
        (_, left), (sign, right) = sides
        if not is_name(left):
            left, right, sign = right, left, _turned(sign)
        if not is_name(left):
            return None
        if sign in ("<", "\\le"):
            return Interval("(", "-\\infty", right, ")" if sign == "<" else "]")
        return Interval("(" if sign == ">" else "[", right, "\\infty", ")")
    return None


def _both(first: str, second: str) -> Interval | None:
    """x > 1 and x < 2."""
    a, b = interval(first), interval(second)
    names = {next((side for _, side in relation(part) if is_name(side)), part) for part in (first, second)}
    if a is None or b is None or {a.low, b.low}.isdisjoint({"-\\infty"}) or len(names) > 1:
        return None
    low, high = (a, b) if b.low == "-\\infty" else (b, a)
    return Interval(low.left, low.low, high.high, high.right) if low.high == "\\infty" else None


def _turned(sign: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[sign]
