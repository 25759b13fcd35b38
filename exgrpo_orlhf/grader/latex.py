"""Normalises the notation of an answer: different ways to write the same thing become the same text."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .units import POWERS, upright

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "＋": "+", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
        "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^{\circ}",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "ℤ": r"\mathbb{Z}", "≡": r"\equiv ",
        "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "，": ",", "（": "(",
        "）": ")", "：": ":", "；": ";", "。": ".", "％": "%", "＝": "=", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "€": r"\$", "£": r"\$", "⟨": r"\langle ", "⟩": r"\rangle ", "℃": r"^{\circ}C", "℉": r"^{\circ}F", "ᵀ": "^{T}",
        "ℏ": r"\hbar ", "ħ": r"\hbar ", "∖": r"\setminus ", "∉": r"\notin ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]",
        "\u212a": "K", "\u212b": "Å",
    }
)  # fmt: skip
_GREEK = (
    "γ gamma δ delta ε epsilon ζ zeta η eta ι iota κ kappa μ mu ν nu ξ xi ρ rho σ sigma τ tau υ upsilon φ phi χ chi "
    "ψ psi ω omega ϕ phi ϵ epsilon ϑ theta ϱ rho ς sigma ϰ kappa ϖ varpi µ mu \u2126 Omega "
    "∆ Delta Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Φ Phi Ψ Psi Ω Omega"
)
_UNICODE |= {ord(letter): rf"\{name} " for letter, name in re.findall(r"(\S) (\w+)", _GREEK)}
_UNICODE |= {0xFF10 + i: str(i) for i in range(10)} | {ord("．"): "."}
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_SPACES = re.compile(
    r"(?<!\\)\\(?:[!,;: >]|$)|~|\\(?:q?quad|limits|(?:display|text|script)style|bf|it)\b"
    r"|\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge)\b"
    r"|\\(?:h?space\*?|(?:text)?color|[hv]?phantom)\s?\{[^{}]*\}"
)
_SIZES = re.compile(r"\\(?:left|right|middle|[bB]ig+[lrm]?)(?![A-Za-z])\s*(\.(?!\d))?")
_NAMES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\leq": r"\le", r"\geq": r"\ge",
    r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">", r"\ast": "*", r"\div": "/",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\lvert": "|", r"\rvert": "|",
    r"\vert": "|", r"\mid": "|", r"\tbinom": r"\binom", r"\dbinom": r"\binom", r"\colon": ":", r"\thinspace": " ",
    r"\varnothing": r"\emptyset", r"\degree": r"^{\circ}", r"\degrees": r"^{\circ}", r"\simeq": r"\approx",
    r"\infin": r"\infty", r"\R": r"\mathbb{R}", r"\reals": r"\mathbb{R}", r"\iff": r"\Leftrightarrow", r"\prime": "'",
    r"\cdotp": r"\cdot", r"\percent": r"\%", r"\mathbf": r"\mathrm", r"\bold": r"\mathrm", r"\boldsymbol": r"\mathrm",
    r"\bm": r"\mathrm", r"\mathit": r"\mathrm", r"\textbf": r"\text", r"\textit": r"\text", r"\textrm": r"\text",
    r"\textup": r"\text", r"\mbox": r"\text", r"\textsf": r"\text", r"\emph": r"\text", r"\underline": r"\text",
    r"\hbox": r"\text", r"\texttt": r"\text", r"\lg": r"\log_{10}", r"\hslash": r"\hbar", r"\backslash": r"\setminus",
    r"\smallsetminus": r"\setminus", r"\bigcup": r"\cup", r"\AA": "Å", r"\angstrom": "Å", r"\ohm": r"\Omega",
}  # fmt: skip
_DRAWN_IN_TWO_WAYS = re.compile(
    r"\\var(epsilon|theta|rho|sigma|kappa|phi|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z])"
)
_NOT = re.compile(r"\\not\s*(?:(=)|\\([A-Za-z]+))|\s!=\s?")
_TURNED = r"(?:\\(?:top|intercal)(?![A-Za-z])|\\(?:mathsf|mathrm|text)\s*(?:\{\s*T\s*\}|T(?![A-Za-z])))"
_TRANSPOSE = re.compile(rf"\^\s*(?:\{{\s*{_TURNED}\s*\}}|{_TURNED})")
_UNION = re.compile(r"((?:\\\}|,[^()\[\]{}]{0,99}[)\]])\s*)U(?=\s*(?:\\\{|[(\[][^()\[\]{}]{0,99},))")  # (1,2)U(3,4)
_NAMED = re.compile(r"\\(?:text|mathrm|operatorname)\s*\{\s*(pi|theta|alpha|beta|gamma|sin|cos|tan|ln|log|exp)\s*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\\[A-Za-z]+|[A-Za-z0-9]))"
_WORD_BELOW = re.compile(  # a word in a symbol's subscript is part of its name
    r"_\s*(?:\{\s*\\(?:text|mathrm)\s*\{\s*([^{}]*?)\s*\}\s*\}|\\(?:text|mathrm)\s*\{\s*([^{}]*?)\s*\})"
)
_MARKED = re.compile(  # \vec v, \mathbb Z, \overline3, \hat\theta
    r"\\(vec|hat|bar|dot|tilde|overline|mathbb|mathcal)"
    r"(?:\s+([A-Za-z]|\d(?!\d))|\s*([A-Z]|\d(?!\d)|\\[A-Za-z]+(?![A-Za-z]|\s*\{)))"
)
_REPEATING = re.compile(  # 0.333...
    r"((?<!\d)\d{0,20}\.\d{0,20}?)(?:(\d)\2{2,}|(\d{2,12}?)\3+)(?:\.\.\.|…|\\[lc]?dots(?![a-z]))"
)
_ALIGNED = re.compile(
    r"\\begin\s*\{(aligned|align\*?|gathered|split|equation\*?)\}((?:(?!\\\\|\\begin).)*)\\end\s*\{\1\}", re.DOTALL
)
_MODULUS = re.compile(r"(\()?\s*\\?(?<![A-Za-z])[pb]?mod(?![A-Za-z])\s*(?:\{\s*(\w+)\s*\}|(\w+))\s*(?(1)\))")  # (mod 7)
_ROOT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d|[A-Za-z](?![A-Za-z]))")
_FUNCTIONS = "sin|cos|tan|cot|csc|ln|log|lg|exp"  # "sec" may be seconds
_INFINITY = r"(?:\\text\s?\{\s*)?(?:(negative |minus )|(?:positive |plus )?)([-+]?)\s*(?:\\text\s?\{\s*)?infinity\s*\}?"
_TEXT = re.compile(r"\\(?:text|mathrm|operatorname)\s*\*?\s*\{([^{}]*)\}")


class Number(NamedTuple):
    """A number as it was written.

    value: exact; percent: whether it has a percent sign (the value is not divided by 100)
    digits: significant digits of a decimal or of e-notation, 0 for integers and fractions
    scientific: e-notation or a power of ten
    """

    value: Fraction
    digits: int
    percent: bool
    scientific: bool


@lru_cache(maxsize=256)  # a gold is cleaned with each of its responses, and several times with each
def clean(text: str) -> str:
    """The same mathematics without delimiters, sizes and spacing commands, and with one name for each command."""
    text = text.strip()
    if not re.search(r"\\begin", text):
        text = re.sub(r"\\\\(?=[A-Za-z%$])", r"\\", text)  # escaped once too often
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")) + "}", text)
    text = upright(text).translate(_UNICODE)
    text = re.sub(r"(?<!\d)\d+(?:\{,\}\d+)+", _commas, text)
    text = _MARKED.sub(r"\\\1{\2\3}", _REPEATING.sub(r"\1\\overline{\2\3}", text))
    text = _ALIGNED.sub(lambda match: match[2].replace("&", ""), text)  # of one line
    text = re.sub(r"(?<=R\})\s*(?:-|\\(?=\s))\s*(?=\\?\{)|(?<=R)\s*\\\s+(?=\\?\{)", r"\\setminus ", text)  # R - \{2\}
    text = _undelimited(_SPACES.sub(" ", re.sub(r"(,)\s*\\!\s*|\{([,:])\}", r"\1\2", text)))
    if (marks := re.findall(r"(?<!\\)\$", text)) and len(marks) % 2 == 0:  # $3$, $5$: delimiters, not dollars
        text = re.sub(r"(?<!\\)\$", "", text)
    text = _SIZES.sub("", text)
    text = _COMMAND.sub(lambda match: _NAMES.get(match[0], match[0]), text)
    text = _DRAWN_IN_TWO_WAYS.sub(  # \varphi and \phi; where a text has both, they differ
        lambda match: match[0] if re.search(rf"\\{match[1]}(?![A-Za-z])", text) else f"\\{match[1]}", text
    )
    text = re.sub(r"\\mathcal\s*(?:\{O\}|O)(?=\s?\()", "O", text)
    text = _NAMED.sub(r"\\\1 ", _TRANSPOSE.sub("^{T}", _UNION.sub(r"\1\\cup ", text)))
    text = re.sub(r"(?<![A-Za-z{])R\s*(?=\\setminus\s*\\?\{)", r"\\mathbb{R}", text)
    text = re.sub(r"(\\setminus\s*)\{([^{}]*)\}", r"\1\\{\2\\}", text)
    text = _NOT.sub(lambda match: r"\notin " if match[2] == "in" else rf"\n{match[2]} " if match[2] else r"\ne ", text)
    text = re.sub(r"(?<=[\d.)])\s*\+\s*-\s*(?=[\d.])", " - ", text)  # 14.0 + -1.0i
    text = re.sub(r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})", r"^{\\circ}", text)
    text = re.sub(r"\^\s*\{\s*('+)\s*\}|\^\s*('+)", r"\1\2", text)
    text = text.replace("**", "^")
    if "\\equiv" in text:  # \pmod 7, \mod 7, (\text{mod } 7), \text{ (mod 7)}
        text = _MODULUS.sub(r"\\pmod{\2\3}", _TEXT.sub(lambda m: m[1] if "mod" in m[1] else m[0], text))
    text = _WORD_BELOW.sub(r"_{\1\2}", text)
    text = re.sub(rf"\\frac{_ARGUMENT}{_ARGUMENT}", r"\\frac{\1\2}{\3\4}", text)  # \frac12, \frac1{72}, \frac ab
    text = re.sub(r"\\frac\s*(\d)(?=\{|\s*\\)", r"\\frac{\1}", text)
    text = re.sub(r"(?<![\w.)}\]/])(\d+)\s?/\s?(\d+)(?=\s[A-Za-z]|\s?[\\(])", r"\\frac{\1}{\2}", text)
    text = _ROOT.sub(r"\\sqrt\1{\2}", text)
    text = re.sub(r"\\(?:text|mathrm)\s*\{\s*(\^\{\\circ\}\s*[CFK]?)\s*\}|\{\}(?=\^)", r"\1", text)
    text = re.sub(r"\\[$]", "$", text).replace(r"\%", "%")
    text = re.sub(r"\s+", " ", text)
    return text.strip()


def _commas(match: re.Match[str]) -> str:
    """Of a number written with {,}: thousands (1,234), or a decimal point."""
    is_decimal = match[0].count("{,}") == 1 and not re.fullmatch(r"[1-9]\d{0,2}\{,\}\d{3}", match[0])
    return match[0].replace("{,}", "." if is_decimal else ",")


def with_commands(text: str) -> str:
    r"""Writes sin(x), 2pi, sqrt(3), ln 2, infinity as \sin(x), 2\pi, \sqrt{3}, \ln 2, \infty."""
    if match := re.fullmatch(_INFINITY, text, re.IGNORECASE):
        return ("-" if match[1] or match[2] == "-" else "") + r"\infty"
    root = lambda match: r"\sqrt" if match[1] is None else rf"\sqrt{{{match[1]}}}"
    text = re.sub(r"(?<![A-Za-z\\])(?<![A-Za-z]\{)sqrt\s?(?:\(([^()]*)\)|(?=[\[{]))", root, text)
    text = re.sub(r"\\?log_10(?=[\s({])|(?<![\\A-Za-z])log10(?=\s?\()", r"\\log_{10}", text)
    next_to = rf"\s?\(|_[\d{{a-z]|\^[\d{{]|\s\d|\s[a-z]\b|\s\\|\s(?:{_FUNCTIONS})\b"
    text = re.sub(rf"(?<![A-Za-z\\])(?<![A-Za-z]\{{)({_FUNCTIONS})(?={next_to})", r"\\\1", text)
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    return re.sub(r"(?<![A-Za-z\\])(?<![A-Za-z]\{)pi(?![A-Za-z])", r"\\pi ", text)


def _undelimited(text: str) -> str:
    """Without the delimiters around it, however many, and without punctuation at the end."""
    while True:
        before = text
        text = text.strip().rstrip(".,;:!?" if not re.search(r"\d!$|[)}A-Za-z]!$", text) else ".,;:?").strip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            surrounded = text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing)
            if surrounded and opening not in inner and not (opening == "$" and inner.endswith("\\")):
                text = inner
        if text == before:
            return text


def canonical(text: str) -> str:
    """For comparing letter by letter: cleaned text without spaces, and without braces that change nothing."""
    text = re.sub(r"(\\[A-Za-z]+)(?=\\(?:text|mathrm)\s*\{[A-Za-z])", r"\1 ", text)
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", "\\1\x00", text)  # the space that ends a command
    text = re.sub(r"(?<=\d) +(?=\d)", "\x00", text)  # 1 2 is not 12
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"([\^_])\{([^{}\\])\}", r"\1\2", text)
    return text.replace(r"\cdot", "*").replace(r"\times", "*")


def words(text: str) -> str:
    """For comparing answers in words: lower case, single spaces, no articles, no punctuation."""
    text = plain_text(text)
    text = re.sub(r"[\"'`.,;:!?$*_\\{}-]+", " ", text).lower()
    return " ".join(word for word in text.split() if word not in ("the", "a", "an"))


def plain_text(text: str) -> str:
    r"""The text with \text{…} and similar commands replaced by their content."""
    return _TEXT.sub(r" \1 ", text)


# -- numbers ----------------------------------------------------------------------------------------------------------

_INTEGER = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+"
_DECIMAL = re.compile(
    rf"(?P<sign>[-+]*)\$?(?P<whole>{_INTEGER})?(?P<point>\.(?P<part>\d*))?"
    r"(?:\s?[eE]\s?\{?(?P<e>[-+]?\d+)\}?|\s?(?:\\times|\\cdot|\*|x|X)\s?10\s?\^\s?(?:\{\s?(?P<b>[-+]?\s?\d+)\s?\}|(?P<c>[-+]?\d+)))?"
    r"\s?\$?(?P<percent>%)?"
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[-+]?)10\s?\^\s?(?:\{\s?(?P<b>[-+]?\s?\d+)\s?\}|(?P<c>\d+))")
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)\s?(?:(?P<mixed>\d+)\s?)?(?:\\frac\s?\{{\s?(?P<inner>-?)\s?(?P<a>{_INTEGER})\s?\}}\s?\{{\s?(?P<b>-?(?:{_INTEGER}))\s?\}})(?P<percent>%)?"
)
_SLASH = re.compile(
    rf"\(?(?P<sign>[-+]?)\s?(?:(?P<mixed>\d+)(?: |\s?\+\s?))?"
    rf"\(?(?P<a>-?(?:{_INTEGER}))\)?\s?/\s?\(?(?P<b>-?(?:{_INTEGER}))\)?\)?(?P<percent>%)?"
)
_LARGE = re.compile(rf"([-+$\d.,]*\d)\s*({'|'.join(POWERS)})", re.IGNORECASE)
_MOST_DIGITS = 3000


def number(text: str) -> Number | None:
    """A cleaned text that is one number: 1,234.5  -3.2e-5  4.5 \\times 10^{33}  1\\frac{4}{5}  28%  $5."""
    text = text.strip().strip("{}") if re.fullmatch(r"\{[^{}]*\}", text.strip()) else text.strip()
    if not text or len(text) > _MOST_DIGITS or not re.search(r"\d", text):
        return None
    if match := _LARGE.fullmatch(plain_text(text).strip()):
        factor = number(match[1])
        return factor and factor._replace(value=factor.value * 10 ** POWERS[match[2].lower()])
    if re.fullmatch(r"\(.*\)", text) and re.fullmatch(r"[^()]*", text[1:-1]) and "," not in text:
        text = text[1:-1].strip()
    text = re.sub(r"^([-+])\s+", r"\1", text)
    text = re.sub(r"^([-+]?)\$\s?", r"\1", text)
    if match := re.fullmatch(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s?\{(\d+)\}", text):
        digits, period = match[3], match[4]
        value = int(match[2] or 0) + Fraction(int(digits or 0), 10 ** len(digits))
        value += Fraction(int(period), 10 ** len(digits) * (10 ** len(period) - 1))
        return Number(_signed(match[1], value), 0, False, False)
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _POWER_OF_TEN.fullmatch(text):
        power = int((match["b"] or match["c"]).replace(" ", ""))
        return Number(_signed(match["sign"], Fraction(10) ** power), 0, False, False) if abs(power) < 5000 else None
    match = _FRACTION.fullmatch(text) or _SLASH.fullmatch(text)
    if match is None:
        return None
    below = _integer(match["b"])
    if not below:
        return None
    inner = -1 if match.groupdict().get("inner") else 1
    value = Fraction(inner * _integer(match["a"]), below) + (int(match["mixed"]) if match["mixed"] else 0)
    return Number(_signed(match["sign"], value), 0, bool(match["percent"]), False)


def _decimal(match: re.Match[str]) -> Number | None:
    integer, part = match["whole"], match["part"] or ""
    if integer is None and not part:
        return None
    exponent = match["e"] or match["b"] or match["c"]
    power = int(exponent.replace(" ", "")) if exponent else 0
    if abs(power) > 5000:
        return None
    mantissa = _integer(integer or "0") * 10 ** len(part) + int(part or 0)
    value = Fraction(mantissa) * Fraction(10) ** (power - len(part))
    significant = len(str(mantissa)) if part or exponent else 0
    return Number(_signed(match["sign"], value), significant, bool(match["percent"]), bool(exponent))


def _integer(text: str) -> int:
    return int(re.sub(r"[, ]", "", text))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign.count("-") % 2 else value


def same_number(gold: Number, answer: Number) -> bool:
    """Exact where both are; otherwise to 6 significant digits, or to as many as a rounded gold has.

    A gold in e-notation, or of at least four digits where the answer is exact, is a rounded value: an answer that
    rounds to it is right. Where only one side has a percent sign, the other may also be that value divided by 100.
    """
    if gold.percent != answer.percent:
        other = gold if answer.percent else answer
        share = (answer if answer.percent else gold).value / 100
        if _close(share, other.value, gold, answer):
            return True
    return _close(gold.value, answer.value, gold, answer)


def _close(a: Fraction, b: Fraction, gold: Number, answer: Number) -> bool:
    if a == b:
        return True
    if not gold.digits and not answer.digits:
        return False
    if not a or not b:
        return abs(a - b) < Fraction(1, 10**9) and bool(gold.digits and answer.digits)
    if abs(a - b) <= max(abs(a), abs(b)) / 10**6:
        is_integer = not gold.digits and not gold.percent and gold.value.denominator == 1
        return not is_integer or abs(a - b) < Fraction(1, 10**4)
    rounded = gold.scientific or (gold.digits >= 4 and not answer.digits)
    if not rounded or (answer.digits and answer.digits < gold.digits):
        return False
    if gold.digits == 1 and abs(a - b) * 20 > abs(a):
        return False  # 5e3 is not 5.4e3
    to_digits = Context(prec=gold.digits, rounding=ROUND_HALF_UP)
    expected, rounded_answer = (
        to_digits.divide(*map(Decimal, side.value.as_integer_ratio())) for side in (gold, answer)
    )
    return expected == rounded_answer
