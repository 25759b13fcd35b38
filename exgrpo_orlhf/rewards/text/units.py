"""Units at the end of an answer: removed, and given one name each."""

from __future__ import annotations

import re

# The names of each unit, between commas; the first one is compared. A counted thing (apples) is a unit without a name.
_NAMES = """
cm centimeter centimeters centimetre centimetres, mm millimeter millimeters millimetre millimetres,
m meter meters metre metres, km kilometer kilometers kilometre kilometres,
in inch inches, ft foot feet, yd yard yards, mi mile miles,
s sec secs second seconds, ms millisecond milliseconds, min mins minute minutes, h hr hrs hour hours,
day days, week weeks, month months, year years yr yrs,
g gram grams, kg kilogram kilograms, mg milligram milligrams, lb lbs pound pounds, oz ounce ounces,
l liter liters litre litres, ml milliliter milliliters, deg degree degrees °, rad radian radians,
$ dollar dollars usd, cent cents ¢,
j joule joules, n newton newtons, w watt watts, v volt volts, a ampere amperes amp amps, hz hertz, k kelvin kelvins,
pa pascal pascals, mph, erg ergs, ev
"""
_UNITS = {name: names.split()[0] for names in _NAMES.split(",") for name in names.split()}
_TEXT_END = re.compile(
    r"^(.*?\S)\s*(\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}(?:\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}"
    r"|\^\s*\{?\s*-?\d\s*\}?|/|\\cdot|\*|\s|(?<=[\s}/*])[A-Za-zµ]{1,3}(?=[\s/^{]|$))*)$",
    re.DOTALL,
)
_WORDS_END = re.compile(
    r"^([-+]?[\d.,/]*\d(?:\s?(?:\\times|\\cdot|\*|x)\s?10\s?\^\s?(?:\{[-+\d ]+\}|\d+)|[eE][-+]?\d+)?%?|.*\})"
    r"\s*([A-Za-zµ][A-Za-zµ./^{}\-\d ]*)$"
)
_LETTERS = dict(zip("KNJVWAmshglL", "knjvwamshgll", strict=True))  # units of one letter: 5 K, but not 5 k
_NO_UNIT = re.compile(
    r"\b(?:and|or|to|if|not|remainder|factorial|squared|cubed|dozen|pi|sqrt|sin|cos|tan|log|ln|exp|mod|base)\b",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"^(.*\S)\s*\^\{\\circ\}\s*(?:\\(?:text|mathrm)\s*\{\s*)?([CFK])?\s*\}?$")


def without_unit(text: str) -> tuple[str, str]:
    """(the answer without its unit, the unit's name); the name is '' without a unit, or for a unit not listed here."""
    text = text.strip()
    if re.fullmatch(r"[-+]?\$\s?\S.*", text):
        return re.sub(r"^([-+]?)\$\s?", r"\1", text), "$"
    if match := _DEGREES.match(text):
        return match[1], f"deg{match[2] or ''}"
    match = _TEXT_END.match(text)
    if match and not _NO_UNIT.search(match[2]) and match[1][-1] not in "_^({+-*/=,":
        return match[1].strip().rstrip("\\").strip(), _name(match[2])
    if re.search(r"\bpercent\b", text, re.IGNORECASE):
        return re.sub(r"\s*\bpercent\b", "%", text, flags=re.IGNORECASE), ""
    match = _WORDS_END.match(text)
    if match is None or not _is_unit(match[2], attached=not text[match.end(1) :][:1].isspace()):
        return text, ""
    number = not match[1].endswith("}") or re.search(r"^\\frac|^\\sqrt|\^\{", match[1])
    return (match[1].strip(), _name(match[2])) if number else (text, "")


def _is_unit(words: str, attached: bool) -> bool:
    """5 cm, 5cm, 5 apples; not 5n, 4ac, 5 or 6."""
    names = re.findall(r"[A-Za-zµ]+", words)
    if _NO_UNIT.search(words) or re.search(r"\s\d", words):
        return False
    if all(_unit(word) or word in ("per", "sq") for word in names):
        return not attached or max(map(len, names)) > 1
    return not attached and len(names[0]) > 1


def qualified(text: str) -> bool:
    r"""Whether words in it change its meaning: 2\text{ or more}, 5\text{ factorial}."""
    return "\\begin" not in text and any(
        _NO_UNIT.search(content) for content in re.findall(r"\\text\s*\{([^{}]*)\}", text)
    )


def _unit(word: str) -> str | None:
    return _LETTERS.get(word) if len(word) == 1 and word.isalpha() else _UNITS.get(word.lower())


def _name(unit: str) -> str:
    """One name for all spellings of a unit; '' for a unit that is not listed here."""
    unit = re.sub(r"\\(?:text|mathrm|operatorname)|[{}\\~]", " ", unit).replace("per", "/")
    power = 1
    for word, number in (("square", 2), ("sq", 2), ("cubic", 3)):
        if re.search(rf"(?i:\b{word}\b\.?)", unit):
            unit, power = re.sub(rf"(?i:\b{word}\b\.?)", " ", unit), number
    names = []
    for part in re.findall(r"[A-Za-zµ$°¢]+|/|\^\s*-?\s*\d|\d", unit):
        if part == "/" or part.startswith("^"):
            names.append(part.replace(" ", ""))
        elif name := _unit(part):
            names.append(name)
        else:
            return ""
    return "".join(names) + (f"^{power}" if power > 1 else "")
