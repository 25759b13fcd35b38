"""A run's questions as MLflow's datasets: which set of questions was trained on, by a hash of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..records import Question

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_NAMES = 3  # sources that a dataset's name lists


def datasets(sets: Mapping[str, Sequence[Question]], bindings: Mapping[str, str]) -> list[DatasetInput]:
    """One dataset for each set that has questions.

    sets: by context, 'training' and 'validation'; bindings: where each comes from, as bound
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            Dataset(
                name=_name(questions),
                digest=digest(questions),
                source_type="gin",
                source=json.dumps({"binding": bindings.get(context, "")}),
                profile=json.dumps({"questions": len(questions)}),
            ),
            [InputTag("mlflow.data.context", context)],
        )
        for context, questions in sets.items()
        if questions
    ]


def digest(questions: Sequence[Question]) -> str:
    """32 hexadecimal digits of the questions' ids, whatever their order. An id is a hash of the question."""
    ids = sorted(question.id for question in questions)
    return hashlib.blake2b("\n".join(ids).encode(), digest_size=16).hexdigest()


def _name(questions: Sequence[Question]) -> str:
    sources = list(dict.fromkeys(question.source for question in questions))
    more = f" and {len(sources) - _NAMES} more" if len(sources) > _NAMES else ""
    return ", ".join(sources[:_NAMES]) + more
