"""When two question texts are the same question: spelling, spacing and the layout of LaTeX do not count.

Everything that carries meaning stays: signs, digits, brackets and operators. Left out are the system message, which
says how to answer and not what is asked, and typesetting: spaces, $, \\left, bold, small and capital letters.
"""

from __future__ import annotations

import re
import unicodedata

from ..grader.grade import Message

Prompt = str | tuple[Message, ...]

# Commands that change how a formula looks and not what it means; longest first where one begins another.
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|left|right|quad|qquad|limits|bigl|bigr|big)(?![a-z])|\\[,;:!> ()\[\]]"
)
_SAME = {
    **dict.fromkeys((r"\dfrac", r"\tfrac"), r"\frac"),
    **dict.fromkeys((r"\dots", r"\ldots", r"\cdots"), "..."),
    **{r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", "{,}": ","},
}
_SYNONYM = re.compile(r"\\(?:dfrac|tfrac|dots|ldots|cdots|leq|geq|neq)(?![a-z])|\{,\}")
_MARKUP = re.compile(r"</?(?:br|p|i|b|em|strong)\s*/?>")
_BOLD = re.compile(r"(?<![\w)*])\*\*([^*]+)\*\*(?![\w(*])")  # of Markdown; 2**3 is a power
_LONE = re.compile(r"([\^_])\s*\{\s*(\w|\\[a-z]+)\s*\}")  # x^{2} is x^2; \frac{11}{2} is not \frac112
_THOUSANDS = re.compile(r"(?<![\w.,(\[{])[1-9]\d{0,2}(?:,\d{3})+(?![\d,]*\d)")
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("‐‑‒–—−", "-"),
        **dict.fromkeys("‘’ʼ`", "'"),
        **dict.fromkeys("“”„", '"'),
        **{raised: f"^{digit}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},  # NFKC would make x² the same as x2
        "×": r"\times",
        "·": r"\cdot",
        "≤": r"\le",
        "≥": r"\ge",
        "≠": r"\ne",
        "~": " ",
        "$": " ",
    }
)


def plain_text(prompt: Prompt) -> str:
    """The question that is asked: the text, or the messages without the system message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content for role, content in prompt if role != "system")


def without_thousands(answer: str) -> str:
    """An answer without the commas that separate thousands: 1,200 is 1200; 3,5 and 0,123 and (1,200) stay."""
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), answer)


def with_roles(prompt: Prompt) -> str:
    """The prompt as one text, a line for each message with its role."""
    return prompt if isinstance(prompt, str) else "\n".join(": ".join(message) for message in prompt)


def normalised(prompt: Prompt) -> str:
    """A text that is equal for prompts that ask the same in the same words, however they are typeset."""
    text = plain_text(prompt)
    same = re.sub(r"\s+", "", _unstyled(text)).rstrip(".?:")
    return same or text  # a text of style alone stays as it is


def normalised_answer(answer: str) -> str:
    """A text that is equal for answers that differ only in typesetting. It does no mathematics; a verifier does."""
    return re.sub(r"\s+", "", _unstyled(answer, fold=False)).rstrip(".") or answer


def _unstyled(text: str, fold: bool = True) -> str:
    """The text without typesetting. fold: treat small and capital letters alike"""
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    text = text.casefold() if fold else text
    text = _SYNONYM.sub(lambda match: _SAME[match[0]], _STYLE.sub(" ", _MARKUP.sub(" ", _BOLD.sub(r"\1", text))))
    return _LONE.sub(r"\1\2 ", text)
