"""The questions that a run works on."""

from __future__ import annotations

from ..evaluation.validation import check_metric
from ..experiment import Experiment
from ..models.supervised_start import SupervisedModel
from ..questions.overlap import same_questions
from ..questions.text import plain_text
from ..records import Question


def load_questions(x: Experiment) -> tuple[list[Question], list[Question]]:
    """Training and validation questions. Raises ValueError if they overlap, for train.best_metric, as their sources and
    as `Verifier.check`."""
    questions, asked = x.questions.load(), x.validation.load() if x.validation else []
    check_metric(x.settings.best_metric, x.evaluation, asked)
    examples = x.model.training_questions() if isinstance(x.model, SupervisedModel) else []
    _refuse_overlap([*questions, *examples], asked)
    x.verifier.check([*questions, *asked])
    return questions, asked


def _refuse_overlap(questions: list[Question], validation: list[Question]) -> None:
    """Raises ValueError for validation questions that are training questions or a supervised start's examples, in the
    same words (scripts/prepare_data.py --check-overlap finds those that share a run of words)."""
    shared = same_questions(questions, validation)
    if shared:
        mine, theirs = shared[0]
        raise ValueError(
            f"{len(shared)} of {len(validation)} validation questions are training questions too (such as "
            f"{plain_text(theirs.prompt)[:80]!r} of {theirs.source}, in training from {mine.source}); bind another set "
            "to Work.validation, or train on what scripts/prepare_data.py --check-overlap TRAIN VALIDATION "
            "--write-clean FILE writes"
        )
