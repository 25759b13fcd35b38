"""Answers that look like arithmetic but are not: dates, times, scores, ranges and chemical formulas."""

from __future__ import annotations

import re
import unicodedata
from datetime import date, datetime

from .latex import clean, number, plain_text, same_number, with_commands
from .units import without_unit

_DATE_FORMATS = ("%Y-%m-%d", "%Y/%m/%d", "%B %d %Y", "%d %B %Y", "%b %d %Y", "%d %b %Y")
_SLASHES = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_COLONS = re.compile(r"(\d+)\s?:\s?(\d+)(?:\s?:\s?(\d+))?\s?(?:([ap])\.?\s?m\b\.?)?(?:\s[a-z][a-z. ]*)?", re.IGNORECASE)
_AMOUNT = r"(\$?(?:\d[\d,]*)?(?:\.\d+|\d)%?)"
_RANGE = re.compile(rf"(?:from\s)?{_AMOUNT}\s?(?:-{{1,3}}|\bto\b)\s?{_AMOUNT}(\s?[A-Za-z][A-Za-z./ ]+)?")
_ELEMENT = "(?:H|He|Li|B|C|N|O|F|Na|Mg|Al|Si|P|S|Cl|K|Ca|Cr|Mn|Fe|Cu|Zn|Br|Ag|I|Ba|Au|Hg|Pb)"
# F_{10}F_{12} and P_1V_1 are products.
_FORMULA = re.compile(
    rf"(?!.*([A-Z][a-z]?)\d+\1\d)(?:\(?{_ELEMENT}(?:[2-9]|[1-9]\d)?\)?(?:[2-9])?){{2,}}(?:\^\d?[+-])?"
)


def same_notation(gold: str, answer: str) -> bool | None:
    """Whether two answers are the same date, time, score, range or formula.

    None where the gold is none of these, or the answer may be the same in another notation (1/2 for 1:2).
    """
    if not re.search(r"\d.*[-:/]|\d{4}|\d.* to |[A-Za-z]\}?_", gold):
        return None
    gold, answer = _plain(gold), _plain(answer)
    if day := _date(gold):
        return day == _date(answer)
    if (a := _COLONS.fullmatch(gold)) and (b := _COLONS.fullmatch(answer)):
        return _same_parts(a, b)
    if a := _range(gold):
        return (b := _range(answer)) is not None and _same_range(a, b)
    if "_" in gold and _FORMULA.fullmatch(formula := re.sub(r"[_\s]", "", gold)):
        return formula == re.sub(r"[_\s]", "", answer)
    return None


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", plain_text(with_commands(clean(text))))
    return re.sub(r"\s+", " ", re.sub(r"\\(?:text|mathrm|ce)(?![a-z])|[{}]", "", text)).strip()


def _date(text: str) -> date | tuple[int, ...] | None:
    """Where the day or the month may come first (5/1/2023), the numbers as they are written."""
    if match := _SLASHES.fullmatch(text):
        return tuple(map(int, match.groups()))
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|[.,]", "", text) if len(text) < 30 and re.search(r"\d{4}", text) else ""
    for date_format in _DATE_FORMATS:
        try:
            return datetime.strptime(text, date_format).date()
        except ValueError:
            continue
    return None


def _same_parts(a: re.Match[str], b: re.Match[str]) -> bool:
    """Times, scores and ratios, number by number. A missing am or pm is accepted, and 16:30 is 4:30 pm."""
    minutes = [[int(part or 0) for part in match.group(2, 3)] for match in (a, b)]
    halves = {match[4].lower() for match in (a, b) if match[4]}
    hours = [{int(m[1]), int(m[1]) % 12 + 12 * (m[4] in ("p", "P")) if m[4] else int(m[1])} for m in (a, b)]
    return minutes[0] == minutes[1] and bool(hours[0] & hours[1]) and len(halves) < 2


def _range(text: str) -> re.Match[str] | None:
    """10-20, 10 to 20 km; not 6 - 5i."""
    match = _RANGE.fullmatch(text)
    words = match[3] if match else None
    return match if not words or _unit(words) or re.match(r"\s[A-Za-z]{3}", words) else None


def _unit(words: str | None) -> str:
    return without_unit(f"1 {words.strip()}")[1] if words else ""


def _same_range(a: re.Match[str], b: re.Match[str]) -> bool:
    ends = [(number(x), number(y)) for x, y in zip(a.group(1, 2), b.group(1, 2), strict=True)]
    units = {_unit(match[3]) for match in (a, b)} - {""}
    return len(units) < 2 and all(x and y and same_number(x, y) for x, y in ends)
