"""Whether two expressions are equal by math-verify, which is asked only where it is sure to finish quickly."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Abs, Basic, Derivative, Expr, Integral, Limit, MatrixBase, MatrixExpr, Pow, Product, Sum, Symbol, log
from sympy import I as IMAGINARY_UNIT

from .latex import number
from .units import TRIGONOMETRIC

for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_LONGEST = 1_500  # characters
_DEEPEST = 25  # brackets inside each other
_POWER = 20_000  # largest exponent that is computed with
_ARGUMENT = 2_000  # largest argument of a factorial, a binomial, or limit of a sum or product
_COUNTING = r"binom|\\prod|\\sum|\\choose|Gamma|zeta|\\dots|\\cdots|\\ldots"
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[abcdfghj-zA-DF-HJ-Z](?![A-Za-z(])")
_CALCULATION = re.compile(
    r"(?!.*\d\s+\d)(?:[\d\s.+\-*/^!(){}]|\\(?:frac|sqrt|cdot|times|div|pi|binom|ln)(?![A-Za-z])|e(?=\s?\^)"
    r"|\\(?:sin|cos|tan)[\s({]*[\d.]+\s?\^\{\\circ\})+"
)
_ALLOWED = re.compile(r"[0-9A-Za-z\\{}()\[\]^_+\-*/=<>,.!|&:;'%\s]+")
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
)
_EXPONENT = re.compile(r"\{([^{}]*)\}|(\{)|(\d+|.|$)")
_DEGREES = re.compile(r"(?:\{\s*([\d.]+)\s*\}|\(\s*([\d.]+)\s*\)|([\d.]+))\s*\^\s?\{\\circ\}")
_NUMERIC_POWER = re.compile(r"(?<![\d.])(\d+)\s*\^\s*(?:\{\s*(\d+)\s*\}|(\d+))")


def equal(gold: str, answer: str) -> bool:
    """Whether math-verify finds two cleaned expressions equal. False for what it cannot parse, or what would be too
    large to compute."""
    # math-verify sees no primes, and some capitals as small letters.
    if gold.count("'") != answer.count("'") or _differ_in_case(gold, answer):
        return False
    if _number_against_variable(gold, answer) or not (computable(gold) and computable(answer)):
        return False
    is_real = not (should_treat_as_complex(gold) or should_treat_as_complex(answer))  # it sees i, but not 2i
    a, b = _parsed(gold, is_real), _parsed(answer, is_real)
    if isinstance(a, Expr) and isinstance(b, Expr) and {str(x) for x in a.free_symbols | b.free_symbols} == {"i"}:
        # The parser takes i for a variable.
        a, b = (side.subs(dict.fromkeys(side.free_symbols, IMAGINARY_UNIT)) for side in (a, b))
    if a is None or b is None or _surely_different(a, b):
        return False
    a, b = _with_positive_variables(a, b)
    return bool(verify(a, b, timeout_seconds=None, allow_set_relation_comp=True))


def far_apart(one: str, other: str) -> bool:
    """Whether two calculations have values that differ by more than 2 %, as in 2 + 2 = 5."""
    a, b = (_parsed(text) if _CALCULATION.fullmatch(text) and computable(text) else None for text in (one, other))
    return a is not None and b is not None and _surely_different(a, b, 0.02)


def _with_positive_variables(a: Any, b: Any) -> tuple[Any, Any]:
    """A variable that stands alone in an even root or a logarithm of either is positive, but not beside a modulus."""
    if not (isinstance(a, Expr) and isinstance(b, Expr)) or a.has(Abs) or b.has(Abs):
        return a, b
    uses = [use for use in a.atoms(log, Pow) | b.atoms(log, Pow) if use.args[0].is_Symbol]
    positive = {
        use.args[0]: Symbol(str(use.args[0]), positive=True)
        for use in uses
        if isinstance(use, log) or (use.exp.is_Rational and use.exp.q % 2 == 0)
    }
    return (a.subs(positive).doit(), b.subs(positive).doit()) if positive else (a, b)


def _surely_different(a: Any, b: Any, tolerance: float = 1e-6) -> bool:
    """Whether two expressions have different values somewhere: no simplification will make them equal then.

    Of numbers the difference is relative, so that math-verify, which rounds to six decimals, compares no tiny ones.
    """
    for expression in (a, b):
        # A lone symbol may be a word; an integral, a sum or a limit may take longer to evaluate than to compare.
        if (
            not isinstance(expression, Expr)
            or isinstance(expression, Symbol | MatrixExpr)
            or expression.has(Integral, Sum, Product, Limit, Derivative)
        ):
            return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: 1.1 + 0.37 * i for i, symbol in enumerate(symbols)}  # positive, where roots are real
    try:
        # strict: a difference that cancels (\sqrt{8} - 2\sqrt{2}) has no digits, and raises an error
        x, y = (side.subs(point).evalf(15, strict=not symbols) for side in (a, b))
        return bool(abs(x - y) > tolerance * max(float(bool(symbols)), abs(x), abs(y)))
    except MemoryError:
        raise
    except Exception:  # the value is no number, or sympy fails: math-verify decides
        return False


def _number_against_variable(gold: str, answer: str) -> bool:
    """Whether one is a plain number and the other a rational expression in a variable: they need no parsing."""
    if re.search(r"\\(?:sin|cos|tan|sec|csc|cot|log|ln|exp|sum|prod|int|lim|binom|math)", gold + answer):
        return False
    variable = [
        bool(_VARIABLE.search(text)) and not re.search(r"[=<>]|\\(?:le|ge|in|ne)\b", text) for text in (gold, answer)
    ]
    return (variable[1] and number(gold) is not None) or (variable[0] and number(answer) is not None)


def _differ_in_case(gold: str, answer: str) -> bool:
    r"""Whether one writes R where the other writes r, or \Phi and \phi."""
    a, b = (set(re.findall(r"(?<=\\)[A-Za-z]+|[A-Za-z]", text)) for text in (gold, answer))
    return any(name[0].swapcase() + name[1:] in b - a for name in a - b)


@lru_cache(maxsize=512)  # a question's gold comes with each of its responses
def _parsed(text: str, is_real: bool = True) -> Any:
    """A sympy expression, or None."""
    try:
        # It takes A^T for the A of a number, and the t of \sin t for a unit.
        text = re.sub(r"(?<![A-Za-z\\])([A-Z])\s?\^\s?(?:\{T\}|T(?![A-Za-z]))", r"\1_{T}", text)
        text = re.sub(r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log|exp)) ([a-z])(?![A-Za-z_^(\s])", r"\1{\2}", text)
        if TRIGONOMETRIC.search(text):  # it drops degrees
            text = _DEGREES.sub(r"{\\frac{\1\2\3\\pi}{180}}", text)
        normal = normalize_latex(text, _NORMALIZATION)
        parsed = latex2sympy(normal, is_real=is_real, convert_degrees=False, normalization_config=None)
    except MemoryError:
        raise
    except Exception:  # what this parser raises on text that is no mathematics is not documented
        return None
    return parsed if isinstance(parsed, Basic | MatrixBase) else None


def computable(text: str) -> bool:
    """Whether evaluating it is sure to be cheap: no power towers, huge factorials, sums over millions, deep nesting.

    This check takes microseconds. The pool kills what it misses when the limit is reached, which takes seconds.
    """
    if len(text) > _LONGEST or not _ALLOWED.fullmatch(text) or depth(text) > _DEEPEST or re.search(r"\d{400}", text):
        return False
    if re.search(r"__|[A-Za-z]{3,}\(.*\bimport\b", text):
        return False
    text = _collapsed(text.replace("**", "^"))
    largest = max(map(int, re.findall(r"\d+", text)), default=0)
    if "!" in text and (largest > _ARGUMENT or "!!!" in text or (text.count("!") > 1 and re.search(r"[)}]\s*!", text))):
        return False
    if re.search(_COUNTING, text) and largest > _ARGUMENT:
        return False
    inner = outer = 1
    for sign in re.finditer(r"\^\s*", text):
        match = _EXPONENT.match(text, sign.end())
        assert match is not None  # its last alternative is the end of the text
        exponent = _group(text, match.start(2)) if match[2] else match[1] or match[3] or ""
        highest = max(map(int, re.findall(r"\d+", exponent)), default=0)
        # A power in the exponent is no plain number: those are evaluated already.
        if highest > (20 if match[2] and "^" in exponent else _POWER):
            return False
        if not text[: sign.start()].rstrip().endswith((")", "}", "]")):
            inner = max(inner, highest)
        else:
            outer *= max(1, highest)
            if highest > 200 and re.search(r"(?<!\\)\b[a-z]\b", text):
                return False
    return inner * outer <= _POWER


def depth(text: str) -> int:
    """How many brackets of any kind are open at once."""
    deepest = now = 0
    for bracket in re.findall(r"[{}()\[\]]", text):
        now += 1 if bracket in "{([" else -1
        deepest = max(deepest, now)
    return deepest


def _collapsed(text: str) -> str:
    """Evaluate powers of plain numbers in exponents and arguments, innermost first; a power tower becomes a number
    above every limit."""
    for _ in range(6):
        # From the right: 9^9^9 is 9^(9^9).
        matches = [m for m in _NUMERIC_POWER.finditer(text) if _is_argument(text, m.start())]
        if not matches:
            return text
        match = matches[-1]
        base, power = int(match[1]), int(match[2] or match[3])
        value = base**power if base < 2 or power * base.bit_length() < 64 else 10**18
        text = f"{text[: match.start()]}{value}{text[match.end() :]}"
    return text + f"^{{{10**18}}}"


def _is_argument(text: str, start: int) -> bool:
    """Whether what begins here stands in an exponent, or in something whose size counts."""
    before = text[:start].rstrip("{( ")
    return before.endswith("^") or bool(re.search("!|" + _COUNTING, text))


def _group(text: str, start: int) -> str:
    """What the brace at `start` encloses."""
    open_braces = 0
    for i in range(start, len(text)):
        open_braces += {"{": 1, "}": -1}.get(text[i], 0)
        if not open_braces:
            return text[start + 1 : i]
    return text[start + 1 :]
