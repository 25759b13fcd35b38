"""When two question texts are the same question: spelling, spacing and the dress of LaTeX do not count.

Nothing that carries meaning is dropped: signs, digits, brackets and operators stay. Left out are the system message,
which is how a question is put and not what it asks, and what only sets it: spaces, $, \\left, bold, small and large.
"""

from __future__ import annotations

import re
import unicodedata

from ..records import Message

# Commands that change how a formula looks and not what it says; longest first where one begins another.
_DRESS = re.compile(
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
_LAYOUT = re.compile(
    r"\\(?:frac|dfrac|tfrac|text|textbf|textit|mathrm|mathbf|operatorname|overline|begin|end|item)(?![a-z])"
)
_WORD = re.compile(r"[぀-ヿ一-鿿]|\d+|[^\W\d_぀-ヿ一-鿿]+")


def plain_text(prompt: str | tuple[Message, ...]) -> str:
    """What is asked: the text, or the messages without the system's."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content for role, content in prompt if role != "system")


def normalised(prompt: str | tuple[Message, ...]) -> str:
    """Equal for prompts that ask the same in the same words, however they are set."""
    text = plain_text(prompt)
    same = re.sub(r"\s+", "", _undressed(text)).rstrip(".?:")
    return same or text  # a text of nothing but dress is what it is


def normalised_answer(answer: str) -> str:
    """Equal for answers that differ in their setting alone: no judge of mathematics, that is the verifier's work."""
    return re.sub(r"\s+", "", _undressed(answer, fold=False)).rstrip(".") or answer


def words(prompt: str | tuple[Message, ...]) -> list[str]:
    """The words and numbers of a prompt in their order, in small letters; a Chinese character is a word."""
    return _WORD.findall(_LAYOUT.sub(" ", _undressed(plain_text(prompt))))


def _undressed(text: str, fold: bool = True) -> str:
    """fold: small and large letters alike, as befits a sentence and not an answer"""
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    text = text.casefold() if fold else text
    text = _SYNONYM.sub(lambda match: _SAME[match[0]], _DRESS.sub(" ", _MARKUP.sub(" ", _BOLD.sub(r"\1", text))))
    return _LONE.sub(r"\1\2 ", text)
