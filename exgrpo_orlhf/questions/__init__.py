"""Question sets: where they come from, what is left out of them, how two of them are compared.

A source is anything with `load() -> list[Question]`: a file, a set of the Hugging Face hub, a mix of sources, or a
source whose long prompts are left out.
"""

from .files import QuestionFile
from .hub import QuestionHub
from .length import LengthFilter
from .mix import QuestionMix
from .records import fingerprint

__all__ = ["LengthFilter", "QuestionFile", "QuestionHub", "QuestionMix", "fingerprint"]
