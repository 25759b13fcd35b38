"""Question sets: reading, filtering, mixing and comparing them.

A source is anything with `load() -> list[Question]`: a file, a set of the Hugging Face hub, a mix of sources, or a
source without its long prompts.
"""

from .derived import LengthFilter, QuestionMix
from .hub import QuestionHub
from .question_files import QuestionFile
from .reading import content_hash, fingerprint

__all__ = ["LengthFilter", "QuestionFile", "QuestionHub", "QuestionMix", "content_hash", "fingerprint"]
