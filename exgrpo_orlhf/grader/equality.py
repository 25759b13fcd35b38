"""Whether two answers are the same: compared as text, then as numbers, then by their parts, and symbolically last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_letters

from . import symbolic
from .latex import canonical, clean, number, plain_text, same_number, with_commands, words
from .notations import same_notation
from .structure import alternatives, enclosed, interval, is_name, items, matrix, relation, split, without_points
from .units import qualified, without_unit

_BASE = re.compile(
    r"\(?\s*(?P<digits>[0-9A-Fa-f]+)\s*\)?\s*_\s*\{?\s*(?P<base>\d{1,2}|[a-z]{3,7}|\\?(?:text|mathrm)\s*\{[^{}]*\})\s*\}?"
)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "decimal": 10, "hex": 16,
}  # fmt: skip
_SUBJECT = r"(?:(?:this|given) )?(?:system|equation|inequality|problem|it|x)s?(?: of (?:linear )?equations)?"
_NOTHING = re.compile(  # in `words`
    r"(?:(?:so|thus|therefore|hence) )?(?:there (?:is|are|exists?)|(?:SUBJECT )?(?:has|have))? ?"
    r"no (?:such )?(?:real )?(?:solutions?|roots?|values?(?: of [a-z])?)(?: exists?)?(?: in reals)?|none(?: exists?)?"
    r"|(?:SUBJECT is )?inconsistent(?: system)?|dne|(?:limit )?does not exist|(?:solution set is )?empty ?set"
    r"|solution set is empty|emptyset".replace("SUBJECT", _SUBJECT)
)
_REMARK = re.compile(  # 7 \text{ (since } x > 0)
    r"(?<=[\w)}\]])\s*[,;]?\s*(?:\\text\s*\{)?\s*[,;]?\s*\(?\s*(?:\\text\s*\{\s*)?\b(?:since|because|reject(?:ing)?|discard(?:ing)?)\b.*",
    re.DOTALL,
)
_ABOUT = r"(?:about|approximately|approx\.?|roughly|(?:the )?(?:final )?answer(?: is|\s?:))"
_LEAD = re.compile(  # \approx 5, \text{about } 5, \text{Final Answer: } 5
    rf"^\s*(?:\\(?:approx|sim)(?![a-z])|\\text\s*\{{\s*{_ABOUT}\s*\}}|(\\text\s*\{{\s*)?{_ABOUT}\s)\s*(?=[-+.\d$(]|\\(?!text))",
    re.IGNORECASE,
)
_ALSO = re.compile(r"\s*(?:\\text\s*\{\s*)?\(\s*(?:\\text\s*\{\s*)?or\s+\}?([^()]*)\)\s*\}?$")  # 1/2 (or 0.5)
_PARAMETER = re.compile(  # k\pi, k \in \mathbb{Z}; k\pi (where k is an integer)
    r"(?:(\()|[\s,;])\s*(?:(?:where|for|with)\s)?\s*(?:(?:any|all|an|each)\s)?\s*"
    r"(?:integers?\s+([a-z])|([a-z])\s*(?:\\in\s*\\mathbb\{Z\}|\sis (?:an|any) integer|\san integer))\s*(?(1)\))$"
)
_REALS = {
    r"\mathbb{R}", "R", "allrealnumbers", "allreals", r"(-\infty,\infty)", r"(-\infty,+\infty)",
    r"x\in\mathbb{R}",
}  # fmt: skip
_WITHOUT = re.compile(r"\\ne\b|\bexcept\b|\bexcluding\b")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d|\.\d)")
_MOST_PARTS = 40
_DEEPEST = 40


def same(gold: str, answer: str) -> bool:
    """Whether two answers, as written, are the same.

    Not symmetric: a gold "x = 5" is answered by 5, but a gold that is an equation is not answered by its right side.
    """
    gold, answer = (_without_range(_LEAD.sub(r"\1", clean(text))) for text in (gold, answer))
    answer = _ALSO.sub(r" or \1", _REMARK.sub("", answer))
    answer += "}" * (answer.count("{") - answer.count("}"))  # of the \text{ whose end was part of a remark
    if not gold or not answer:
        return False
    if canonical(gold) == canonical(answer):
        return True
    if len(answer) > 300 + 4 * len(gold) or symbolic.depth(answer) > _DEEPEST or symbolic.depth(gold) > _DEEPEST:
        return False
    return _same(with_commands(gold), with_commands(answer), 0)


def is_words(text: str) -> bool:
    r"""An answer in words (Evelyn, \text{east}, no solution), not in symbols."""
    plain = re.sub(r"\\[ ,;]", " ", plain_text(text)).strip()
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z'’.\- ]*", plain)) and bool(
        re.search(r"[A-Za-z]{3}", plain) or "\\text" in text or re.fullmatch(r"[Nn]o|NO", plain)
    )


def says_nothing(text: str) -> bool:
    """No solution, in words or as the empty set."""
    if is_words(text.replace(",", " ")):
        return _NOTHING.fullmatch(words(text)) is not None
    return canonical(re.sub(r"^[a-zA-Z] ?(?:=|\\in) ?", "", text)) in (r"\emptyset", r"\{\}", "{}")


def _without_range(text: str) -> str:
    """Without the remark that a parameter of the answer, which no inequality limits, is an integer."""
    match = _PARAMETER.search(plain_text(text))
    rest = match.string[: match.start()].rstrip(" ,;") if match else ""
    if match is None or re.search(r"[<>]|\\(?:le|ge|in|ne)(?![a-z])", rest):
        return text
    return rest if re.search(rf"(?<![A-Za-z\\]){match[2] or match[3]}", rest) else text


def _same(gold: str, answer: str, level: int) -> bool:
    a, b = canonical(gold), canonical(answer)
    if a == b:
        return True
    if level > 4 or not gold or not answer:
        return False
    for compare in (_same_numbers, same_notation):
        if (verdict := compare(gold, answer)) is not None:
            return verdict
    if says_nothing(gold) and says_nothing(answer):
        return True
    if all((re.sub(r"[\s\\]", "", text).lower() if is_words(text) else text) in _REALS for text in (a, b)):
        return True
    if is_words(gold):
        return words(gold) == words(_value(answer)) or words(gold) == words(answer)
    for compare_parts in (_same_structure, _same_relation):
        if (verdict := compare_parts(gold, answer, level)) is not None:
            return verdict
    (x, unit_x), (y, unit_y) = without_unit(gold), without_unit(answer)
    if unit_x or unit_y:
        # A unit may be left out; a different unit is a different answer.
        if unit_x and unit_y and unit_x != unit_y:
            return False
        if x and y and (x, y) != (gold, answer):
            return _same(x, y, level + 1)
    return qualified(gold) == qualified(answer) and symbolic.equal(gold, answer)


def _same_numbers(gold: str, answer: str) -> bool | None:
    """None where they are not both numbers."""
    (digits_a, base_a), (digits_b, base_b) = (
        _based(text) or (re.sub(r"\s", "", text), None) for text in (gold, answer)
    )
    if (base_a, base_b) != (None, None):  # where the response says none, the question gives it
        return digits_a == digits_b and base_b in (base_a or 10, None)
    a, b = number(gold), number(answer)
    if a and b:
        return same_number(a, b)
    if a is None and b is None:
        return None
    (x, unit_x), (y, unit_y) = without_unit(gold), without_unit(answer)
    if unit_x and unit_y and unit_x != unit_y:
        return None
    if (unit_x and b and b.percent) or (unit_y and a and a.percent):  # 25 cm is not 25 %
        return False
    a, b = a or number(x), b or number(y)
    return same_number(a, b) if a and b else None


def _based(text: str) -> tuple[str, int] | None:
    match = _BASE.fullmatch(text.strip().strip("{}") if text.startswith("{") else text.strip())
    if match is None:
        return None
    base = re.sub(r"\\?(?:text|mathrm)|[{}\s\\]", "", match["base"])
    value = int(base) if base.isdigit() else _BASES.get(base.lower())
    return None if value is None or not re.search(r"\d", match["digits"]) else (match["digits"].upper(), value)


def _same_structure(gold: str, answer: str, level: int) -> bool | None:
    """Compare enumerations, tuples, sets, intervals, unions and matrices. None where neither has parts."""
    if len({bool(_WITHOUT.search(text)) for text in (gold, answer)}) == 2:
        gold, answer = without_points(gold), without_points(answer)
    rows, answer_rows = matrix(gold), matrix(answer)
    if rows and answer_rows:
        same_shape = len(rows) == len(answer_rows)
        return same_shape and all(_in_order(a, b, level) for a, b in zip(rows, answer_rows, strict=True))
    if rows or answer_rows:
        return _vector(rows or answer_rows or [], answer if rows else gold, bool(rows), level)
    unions = [[part for _, part in split(text, ("\\cup",))] for text in (gold, answer)]
    if len(unions[0]) > 1 or len(unions[1]) > 1:
        parts = [u if len(u) > 1 else items(_value(text)) for u, text in zip(unions, (gold, answer), strict=True)]
        parts = [[re.sub(r"^\\?[A-Za-z]+ ?\\in ?", "", part) for part in side] for side in parts]
        return _any_order(parts[0], parts[1], level) or symbolic.equal(gold, answer)
    if (a := interval(gold)) and (b := interval(answer)):
        kinds = a.left == b.left and a.right == b.right
        if kinds and _in_order([a.low, a.high], [b.low, b.high], level):
            return True
        return False if len(relation(gold)) == 1 or len(relation(answer)) == 1 else None
    if "," in gold and number(gold) and len(relation(answer)) == 1:  # 1,234 is no list
        brackets = enclosed(answer)
        is_list = len(items(alternatives(brackets[1] if brackets else answer))) > 1
        return re.sub(r"\s", "", gold) == re.sub(r"\s", "", answer) if is_list else None
    gold, answer = _without_thousands(gold), _without_thousands(answer)
    lists = [items(alternatives(text)) for text in (gold, answer)]
    if len(lists[0]) == 1 and len(lists[1]) == 1:
        return _same_brackets(gold, answer, level)
    if len(lists[0]) > 1 and len(lists[1]) > 1:
        return _any_order(lists[0], lists[1], level) or _named_values(lists[0], lists[1], level)
    # One enumerates and the other encloses: 1, 2 and {1, 2}; x=1, y=2 and (1, 2).
    single, several = (answer, lists[0]) if len(lists[0]) > 1 else (gold, lists[1])
    brackets = enclosed(_value(single))
    if brackets is None:  # 5/4 or 1.25
        names = {side for part in lists[1] if is_name(side := relation(part)[0][1])}
        if single == answer or "or" not in answer or len(names) > 1 or re.search(r"[,;]|\band\b", answer):
            return False
        return all(_same(gold, part, level + 1) for part in lists[1])
    inside = items(alternatives(brackets[1]))
    gold_parts, answer_parts = (several, inside) if len(lists[0]) > 1 else (inside, several)
    if brackets[0] == "{":
        return _any_order(gold_parts, answer_parts, level)
    return _in_order(_values(gold_parts, _names(answer)), _values(answer_parts, _names(gold)), level)


def _names(text: str) -> list[str]:
    """x and y of "(x, y) = (1, 2)"."""
    brackets = enclosed(relation(text)[0][1]) if _value(text) != text else None
    return items(brackets[1]) if brackets else []


def _values(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """The values of y = 2, x = 1 in the order of these names, else of letters that follow each other in the alphabet;
    of other parts as they stand."""
    values = {relation(part)[0][1]: _value(part) for part in parts if _value(part) != part}
    alphabetical = "".join(sorted(values))
    if len(values) == len(parts):
        if set(names) == values.keys():
            return [values[name] for name in names]
        if len(alphabetical) == len(parts) and alphabetical in ascii_letters:
            return [values[name] for name in alphabetical]
    return [_value(part) for part in parts]


def _without_thousands(text: str) -> str:
    """1,500, 2,500 and (1,000, 2) without the commas that separate no items: others have a space behind them."""
    plain = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return plain if re.search(r",\s|;|\band\b|\bor\b", plain) else text


def _same_brackets(gold: str, answer: str, level: int) -> bool | None:
    a, b = enclosed(_value(gold)), enclosed(_value(answer))
    if a and b:
        parts_a, parts_b = items(alternatives(a[1])), items(alternatives(b[1]))
        if len(parts_a) == 1 and len(parts_b) == 1 and a[0] != "{" and b[0] != "{":
            return _same(parts_a[0], parts_b[0], level + 1)
        if a[0] == b[0] == "{":
            return _any_order(parts_a, parts_b, level)
        if a[0] == "{" or b[0] == "{":  # {(1, 2)} is (1, 2)
            one = parts_a if a[0] == "{" else parts_b
            sides = (one[0], answer) if a[0] == "{" else (gold, one[0])
            return len(one) == 1 and _same(*sides, level + 1)
        if len(parts_a) != len(parts_b):
            return False
        if len(parts_a) == 2 and (a[0], a[2]) != (b[0], b[2]) and {a[0], b[0]} <= {"(", "["}:
            return False  # (1, 2) and [1, 2) are different intervals
        return _in_order(parts_a, parts_b, level)
    brackets = a or b
    if brackets and brackets[0] in ("{", "{}") and len(items(alternatives(brackets[1]))) == 1:
        return _same(brackets[1] if a else gold, brackets[1] if b else answer, level + 1)
    if brackets and len(items(brackets[1])) > 1:
        return False if brackets[0] in "([{<" else None
    return None


def _vector(cells: list[list[str]], other: str, gold_is_matrix: bool, level: int) -> bool | None:
    """A row or a column of a matrix may be written as a tuple."""
    brackets = enclosed(_value(other))
    if brackets is None or brackets[0] not in "([<" or (len(cells) > 1 and len(cells[0]) > 1):
        return None
    flat, parts = [cell for row in cells for cell in row], items(brackets[1])
    return _in_order(flat, parts, level) if gold_is_matrix else _in_order(parts, flat, level)


def _in_order(gold: Sequence[str], answer: Sequence[str], level: int) -> bool:
    if len(gold) != len(answer) or len(gold) > _MOST_PARTS:
        return False
    return all(_same(a, b, level + 1) for a, b in zip(gold, answer, strict=True))


def _any_order(gold: Sequence[str], answer: Sequence[str], level: int) -> bool:
    """Compare as sets: each part of one side equals one part of the other; values of unknowns with different names,
    of which the answer repeats none, in their order."""
    gold, answer = ([*dict.fromkeys(p for part in side for p in items(alternatives(part)))] for side in (gold, answer))
    named = [relation(part)[0][1] for part in gold if _value(part) != part]
    names = {re.sub(r"_(?:\{[^{}]*\}|\w)", "", name).strip() for name in named}  # x_1 and x_2 are both x
    if len(gold) == len(names) > 1 and not any(len(relation(part)) > 1 for part in answer):
        return _in_order([_value(part) for part in gold], answer, level)
    if len(gold) != len(answer) or len(gold) > _MOST_PARTS:
        return False
    unmatched = list(answer)
    for part in gold:
        alike = (other for other in unmatched if canonical(part) == canonical(other))
        match = next(alike, None) or next((other for other in unmatched if _same(part, other, level + 1)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _named_values(gold: Sequence[str], answer: Sequence[str], level: int) -> bool:
    """Compare "x = 1, y = 2" with "1, 2"."""
    named = [[len(relation(part)) > 1 for part in side] for side in (gold, answer)]
    if all(named[0]) == all(named[1]):
        return False
    return _in_order([_value(part) for part in gold], [_value(part) for part in answer], level)


def _value(text: str) -> str:
    r"""The right side of "name = value" or "x \in value"; any other text as it is."""
    sides = relation(text)
    if len(sides) > 1 and is_name(sides[0][1]) and all(sign in ("=", "\\in", "\\to") for sign, _ in sides[1:]):
        return sides[-1][1]
    return text


def _same_relation(gold: str, answer: str, level: int) -> bool | None:
    """Compare equations, assignments, approximations and inequalities. None where neither is one."""
    a, b = relation(gold), relation(answer)
    if len(a) == 1 and len(b) == 1:
        return None
    if any(sign == "\\approx" for sign, _ in b):
        return _same_approximation(gold, b, level)
    if any(sign == "\\approx" for sign, _ in a):
        exact = [side for i, (_, side) in enumerate(a) if i == 0 or a[i][0] == "\\approx"]
        return any(_same(side, answer, level + 1) for side in exact)
    if len(a) == 1:
        if all(sign == "=" for sign, _ in b[1:]) or (b[1][0] == "\\in" and len(b) == 2):
            if any(symbolic.far_apart(side, b[-1][1]) for _, side in b[:-1]):
                return False
            if len(b) == 2 and is_name(b[1][1]) and not is_name(b[0][1]) and not is_name(gold):
                return _same(gold, b[0][1], level + 1)  # 5 = x
            return _same(gold, b[-1][1], level + 1)
        return symbolic.equal(gold, answer)
    if len(b) == 1:
        if a[1][0] == "=" and _is_equation(a[0][1]):
            return False
        return _same(_value(gold), answer, level + 1) if _value(gold) != gold else symbolic.equal(gold, answer)
    if all(sign == "=" for sign, _ in a[1:] + b[1:]):
        left_a, left_b = a[0][1], b[0][1]
        if canonical(left_a) == canonical(left_b) or (len(a) > 2 and is_name(left_a)):
            return _same(a[-1][1], b[-1][1], level + 1)
        names = [side for side in (left_a, left_b) if is_name(side)]
        if len(names) == 2 and _same(a[-1][1], b[-1][1], level + 1):
            # y = 2x is f(x) = 2x, but x = 1 is not y = 1.
            return number(a[-1][1]) is None and any(re.fullmatch(r"y|.*\(.*", name) for name in names)
    return symbolic.equal(gold, answer)


def _is_equation(left: str) -> bool:
    """Whether an equation with this left side is the answer itself (x + y, xy, \\sin x), not a name with its value."""
    if len(split(left, ("+", "-"))) > 1 or re.fullmatch(r"[abc]{2,3}|[xyz]{2,3}|[mn]{2}|[pq]{2}|[uv]{2}", left):
        return True
    return bool(re.fullmatch(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp)\b.*[a-z]\W*|\d.*[a-z].*|[a-z]\^\{?\d\}?", left))


def _same_approximation(gold: str, sides: list[tuple[str, str]], level: int) -> bool:
    r"""Given "exact \approx rounded": either may be right if they are close; two different answers are no answer."""
    exact, rounded = sides[0][1], sides[-1][1]
    if len(sides) > 2:
        exact = next(sides[i - 1][1] for i, (sign, _) in enumerate(sides) if sign == "\\approx")
    plain, decimal = (without_unit(side)[0] for side in (exact, rounded))
    a, b = number(plain), number(decimal)
    if a and b and abs(a.value - b.value) * 50 > max(abs(a.value), abs(b.value)):
        return False
    if _same(gold, exact, level + 1):
        return True
    # An exact value whose distance from twice the rounded one is not known is no calculation.
    is_known = bool(a) or is_name(exact) or symbolic.far_apart(plain, f"2 \\cdot ({decimal})")
    return is_known and not symbolic.far_apart(plain, decimal) and _same(gold, rounded, level + 1)
