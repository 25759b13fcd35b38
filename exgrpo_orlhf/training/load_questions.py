"""The questions that a run works on."""

from __future__ import annotations

from ..checks import require
from ..experiment import Experiment
from ..questions.overlap import same_questions
from ..questions.text import plain_text
from ..records import Question
from .supervised_start import SupervisedModel
from .validation import check_metric


def load_questions(experiment: Experiment) -> tuple[list[Question], list[Question]]:
    """Training and validation questions.

    Raises ValueError for train.best_metric, as their sources and as `Verifier.check_questions`, and for validation
    questions that are training questions or a supervised start's examples, in the same words.
    """
    training = experiment.questions.load()
    validation = experiment.validation.load() if experiment.validation else []
    best, every = experiment.settings.best_metric, experiment.settings.eval_every
    require(
        best is None or (len(validation) > 0 and every is not None),
        f"train.best_metric = {best!r} is never measured: bind Work.validation and train.eval_every ({every!r})",
    )
    check_metric(best, experiment.evaluation, validation, experiment.verifier)
    examples = experiment.model.training_questions() if isinstance(experiment.model, SupervisedModel) else []
    if shared := same_questions([*training, *examples], validation):
        trained, question = shared[0]
        raise ValueError(
            f"{len(shared)} of {len(validation)} validation questions are training questions too (such as "
            f"{plain_text(question.prompt)[:80]!r} of {question.source}, in training from {trained.source}); bind "
            "another set to Work.validation, or train on what scripts/prepare_data.py --check-overlap TRAIN VALIDATION "
            "--write-clean FILE writes"
        )
    experiment.environment.check_file()
    if experiment.environment.path is None or experiment.environment.reward != "environment":
        experiment.verifier.check_questions([*training, *validation])
    return training, validation
