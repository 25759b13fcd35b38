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
pa pascal pascals, erg ergs, ev, tesla teslas, coulomb coulombs, farad farads, henry henries henrys, siemens,
wb weber webers, wh, mol mole moles, bar, atm atmosphere atmospheres, cal calorie calories, ohm ohms,
å angstrom angstroms, degc celsius degreecelsius, degf fahrenheit
"""
_UNITS = {name: names.split()[0] for names in _NAMES.split(",") for name in names.split()}
_PREFIXES = {"pico": "p", "nano": "n", "micro": "µ", "milli": "m", "centi": "c", "kilo": "k", "mega": "M", "giga": "G"}
_PREFIXED = re.compile(r"([pnµumcdkMGT])(Hz|Pa|eV|Wb|Wh|mol|bar|cal|ohm|[AVWJNFTCHSKmgsLlΩ])")
_PREFIXED_NAME = re.compile(rf"({'|'.join(_PREFIXES)})([a-z]+)")
_TEXT_END = re.compile(
    r"^(.*?\S)\s*(\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}(?:\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}"
    r"|\^\s*\{?\s*-?\d\s*\}?|[/*()]|\\cdot|\s|(?<=[\s}/*(])[A-Za-zµΩ]{1,3}(?=[\s/^{)]|$))*)$",
    re.DOTALL,
)
_WORDS_END = re.compile(
    r"^([-+]?[\d.,/]*\d(?:\s?(?:\\times|\\cdot|\*|x)\s?10\s?\^\s?(?:\{[-+\d ]+\}|\d+)|[eE][-+]?\d+)?%?|.*\})"
    r"\s*([A-Za-zµΩÅ](?:[A-Za-zµΩÅ./^{}()*\-\d ]|\\cdot )*)$"
)
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE_AND_UNIT = re.compile(rf"([-+]?\$?[\d.,]*\d\s*(?:{'|'.join(POWERS)}))\s+([A-Za-z][A-Za-z ]*)", re.IGNORECASE)
_LETTERS = dict(zip("KNJVWAmshglLΩÅ", [*"knjvwamshgll", "ohm", "å"], strict=True))  # of one letter: 5 K, but not 5 k
_RARE = {"T": "tesla", "C": "coulomb", "F": "farad", "H": "henry", "S": "siemens"}  # upright, or beside other units
_NO_UNIT = re.compile(
    r"\b(?:and|or|to|if|not|remainder|factorial|squared|cubed|dozen|pi|sqrt|sin|cos|tan|log|ln|exp|mod|base)\b",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"^(.*\S)\s*\^\{\\circ\}\s*(?:\\(?:text|mathrm)\s*\{\s*)?([CFK])?\s*\}?$")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z]|\s?\^\s?\{?-)")  # no inverse
_UPRIGHT = r"\\(?:text|mathrm|operatorname)\s*\{"
_OHM = r"(?:\\(?:Omega|ohm)(?![A-Za-z])|[Ω\u2126])"
_BRACES = r"\s*(?:\[[^\]]*\]\s*)?\{((?:[^{}]|\{[^{}]*\})*)\}"
_OVER = re.compile(rf"(.*[\d.)}}])\s*\\frac{_BRACES}{_BRACES}", re.DOTALL)
_SIUNITX = re.compile(rf"\\(?:(?:SI|qty){_BRACES}|(?:si|unit)){_BRACES}")
_QUANTITY = re.compile(rf"\\(pu|num|ang){_BRACES}".replace("((", r"\s*([-+]?[\d.,]*(?:[eE][-+]?\d+)?)\s*((", 1))
_flat = lambda match: r" \text{" + re.sub("[{}]", "", match[1]) + "}"
_MACROS = {"per": "/", "squared": "^2", "cubed": "^3", "square": "square ", "cubic": "cubic "}


def upright(text: str) -> str:
    r"""Writes \SI{5}{\micro\ampere}, 5\mu\text{A}, 5 µA and 5\text{k}\Omega with the whole unit in one \text{…}."""
    if re.search(r"\\(?:SI|qty|si|unit|pu|num|ang)\b", text):
        text = _SIUNITX.sub(lambda match: (match[1] or "") + _as_text(match[2]), text)
        text = _QUANTITY.sub(lambda match: match[2] + (r"^{\circ}" if match[1] == "ang" else _as_text(match[3])), text)
    if not re.search(r"[µμΩ\u2126]|\\(?:mu|Omega|ohm)(?![A-Za-z])", text):
        return text
    text = re.sub(r"(?<=\d)(\s*)[µμ]((?:mol|Hz|Pa|[msgAVWFHCTNJLlMΩ\u2126])\b)", r"\1\\text{µ\2}", text)
    text = re.sub(rf"(?:\\mu|[µμ])\s*{_UPRIGHT}", r"\\text{µ", text)
    text = re.sub(rf"({_UPRIGHT}[^{{}}]*)(?:\\mu\s*|[µμ])", r"\1µ", text)
    return re.sub(rf"({_UPRIGHT}[^{{}}]*)(?:\}}\s*{_OHM}|{_OHM}\s*\}})", r"\1Ω}", text)


def _as_text(unit: str) -> str:
    unit = re.sub(r"\\([A-Za-z]+)", lambda m: m[1] if m[1] in _PREFIXES else _MACROS.get(m[1], m[1] + " "), unit)
    return r" \text{" + re.sub(r"[{}~.]", " ", unit) + "}" if unit else ""


def without_unit(text: str) -> tuple[str, str]:
    """(the answer without its unit, the unit's name); the name is '' without a unit, or for a unit not listed here."""
    if match := _LARGE_AND_UNIT.fullmatch(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).strip()):  # 5 million people
        return match[1], _name(match[2])
    if (match := _OVER.fullmatch(text)) and _name(match[2]) and _name(match[3]):  # 60 \frac{\text{km}}{\text{h}}
        unit = f"{match[2]}/{match[3]}"
        if re.search(r"\\(?:text|mathrm)", unit) or _is_unit(unit, attached=True):
            return match[1], _name(unit)
    if (match := re.fullmatch(rf"{_UPRIGHT}([^{{}}]*)\}}", text)) and (inside := without_unit(match[1]))[1]:
        return inside  # \text{12 cm}
    text = re.sub(r"(?<=\d)\s([kMGm]?)\s?\\Omega$", r" \\text{\1Ω}", text.strip())
    text = re.sub(r"(?<=[\d.}])\s*\\(?:text|mathrm)\s*\{((?:[^{}]|\{-?\d\})*)\}", _flat, text)
    if re.fullmatch(r"[-+]?\$\s?\S.*", text):
        return re.sub(r"^([-+]?)\$\s?", r"\1", text), "$"
    if re.fullmatch(r".*\d\s?¢", text):
        return text[:-1].strip(), "cent"
    if (match := _DEGREES.match(text)) and not TRIGONOMETRIC.search(text):
        return match[1], f"deg{(match[2] or '').lower()}"
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
    """5 cm, 5cm, 5 apples; not 5n, 4ac, 2mV, 5 or 6."""
    names = re.findall(r"[A-Za-zµΩÅ]+", words.replace("\\cdot", " "))
    if _NO_UNIT.search(words) or re.search(r"\s\d", words):
        return False
    is_rare = not _RARE.keys().isdisjoint(names) and not re.search(r"[/^]", words)
    if not is_rare and all(_unit(word) or word in ("per", "sq") for word in names):
        return not attached or any(len(name) > (1 if name.lower() in _UNITS else 2) for name in names)
    return not attached and len(names[0]) > 1 and not re.search(r"[()*\\]", words)


def qualified(text: str) -> bool:
    r"""Whether words in it change its meaning: 2\text{ or more}, 5\text{ factorial}."""
    return "\\begin" not in text and any(
        _NO_UNIT.search(content) for content in re.findall(r"\\text\s*\{([^{}]*)\}", text)
    )


def _unit(word: str) -> str | None:
    if len(word) == 1 and word.isalpha():
        return _LETTERS.get(word) or _RARE.get(word)
    if name := _UNITS.get(word.lower()):
        return name
    if match := _PREFIXED.fullmatch(word):
        return match[1].replace("u", "µ") + (_unit(match[2]) or "")
    match = _PREFIXED_NAME.fullmatch(word.lower())
    return _PREFIXES[match[1]] + _UNITS[match[2]] if match and match[2] in _UNITS else None


def _name(unit: str) -> str:
    """One name for all spellings of a unit, m·s^-2; '' for a unit that is not listed here."""
    unit = re.sub(r"\\mu\s*", "µ", re.sub(r"\\Omega\s*", "Ω ", unit))
    unit = re.sub(r"\\(?:text|mathrm|operatorname|cdot|times)|[{}\\~]", " ", unit).strip()
    unit = re.sub(r"\bdeg(?:rees?)?\.?\s*([CF])(?:elsius|ahrenheit)?\b", r"deg\1", unit)
    unit = re.sub(r"\bper\b", "/", re.sub(r"\bmph\b", "mi/h", unit))
    powers: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for part in re.findall(r"[A-Za-zµΩÅ$°¢]+|/|\^?\s*\(?\s*-?\s*\d", unit):
        if part == "/":
            sign = -1  # of all that follow: J/(kg K), J/kg/K
        elif part[-1].isdigit() and last:
            powers[last] += sign * (int(re.sub(r"[^-\d]", "", part)) - 1)
        elif part.lower() in ("square", "sq", "cubic"):
            power = 3 if part.lower() == "cubic" else 2
        elif (last := _unit(part) or "") and unit not in ("C", "F"):  # which may be degrees
            powers[last] = powers.get(last, 0) + sign * power
            power = 1
        else:
            return ""
    return "·".join(name if count == 1 else f"{name}^{count}" for name, count in sorted(powers.items()))
