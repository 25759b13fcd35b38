"""What a run starts with (`Work.experience`): another run's replay buffer, or trajectories of an expert from a file."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from .. import checkpoints
from ..experiment import Experiment
from ..io.files import write
from ..questions.prompts import PromptEncoder
from ..questions.question_files import place_of, read_rows
from ..questions.reading import read_prompt
from ..records import Question, Rollout, Trajectory
from ..replay import ReplayBuffer, snapshot
from ..rewards import Verifier
from ..rewards.grading import written_to

log = logging.getLogger(__name__)


def load(experiment: Experiment, questions: Sequence[Question], prompts: PromptEncoder) -> ReplayBuffer:
    """The buffer that a run starts with: a copy of the experiment's empty one, filled.

    `experiment.buffer` stays empty: the OpenRLHF driver calls this as a check, and then the run itself calls it.
    Raises ValueError for a folder that is no checkpoint, and as `snapshot.load_for_new_run` or `read_experts`.
    """
    path, buffer = found(experiment), copy.deepcopy(experiment.buffer)
    if path.suffix != ".jsonl":
        ids = {question.id for question in questions}
        snapshot.load_for_new_run(path, buffer, prompts.fingerprint(), ids)
    else:
        experts = read_experts(path, questions, prompts, experiment.verifier, experiment.sampling.max_response_tokens)
        for question, _ in experts:
            # Not measured yet: any accuracy above 0, or level of spread, makes it a candidate.
            buffer.record(question.id, Fraction(1, 2), 0, spread=Fraction(1, 2))
        buffer.store((question.id, trajectory) for question, trajectory in experts)
    stored = _trajectories(buffer)
    _check(experiment, buffer, stored, prompts, path)
    return buffer


def found(experiment: Experiment) -> Path:
    """The folder of a buffer, or the file, that `Work.experience` names. Raises ValueError, FileNotFoundError."""
    path = Path(str(experiment.experience))
    if (path / "replay").is_dir():  # a checkpoint
        path /= "replay"
    elif saved := checkpoints.find(path):
        raise ValueError(
            f"Work.experience = {str(path)!r} is the folder of a run; give one of its checkpoints, such as "
            f"{str(path / max(saved.items())[1].name)!r}"
        )
    elif path.suffix != ".jsonl" and not (path / "manifest.json").is_file():
        raise ValueError(
            f"Work.experience = {str(path)!r} is neither a checkpoint of a run (runs/x/checkpoint-100) nor a .jsonl "
            "file of expert trajectories"
        )
    if path.suffix == ".jsonl" and not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (Work.experience)")
    return path


def _trajectories(buffer: ReplayBuffer) -> list[Trajectory]:
    return [entry.trajectory for record in buffer.records.values() for entry in record.stored]


def _check(
    experiment: Experiment, buffer: ReplayBuffer, stored: list[Trajectory], prompts: PromptEncoder, path: Path
) -> None:
    """Raises ValueError for stored trajectories that this run cannot use as its settings say."""
    mixer, room = experiment.mixer, experiment.sampling.max_response_tokens
    state = path.parent / "trainer" / "state.json"
    identity = json.loads(state.read_text(encoding="utf-8"))["identity"] if state.is_file() else {}
    failures = identity.get("ReplayMixer.stores", "'successes'") != "'successes'"  # of 0.1, which did not mark each
    if not mixer.store_rule.stores_failures and (failures or not all(trajectory.correct for trajectory in stored)):
        raise ValueError(
            f"{path}: its run stored failures too, which this one (ReplayMixer.store_rule = {mixer.store_rule}) would "
            "take for successes; bind the same, or take the buffer of another run"
        )
    if (longest := max(map(len, stored), default=0)) > room:
        raise ValueError(
            f"{path}: it stores a response of {longest} tokens, longer than Sampling.max_response_tokens = {room}; "
            "raise MAX_RESPONSE_TOKENS, which binds it, or take the buffer of another run"
        )
    names = {*experiment.verifier.parts} if experiment.advantages.of_each_reward else set()
    if any(names - {name for name, _ in trajectory.parts} for trajectory in stored):
        raise ValueError(
            f"{path}: what it stores lacks some of Verifier.rewards ({', '.join(names)}), of each of which "
            "GroupAdvantages.of_each_reward makes advantages; take a run with these rewards, or set it to False"
        )
    if (prefix := mixer.injection.prefix) and experiment.environment.path is None:
        ends = {prompts.tokenizer.eos_token_id, *prompts.turn_ends()}
        for trajectory in [*stored, *(_trajectories(buffer.failed) if buffer.failed else ())]:
            prefix.check_stored(trajectory, room, ends, str(path))
    if prefix and buffer.failed is not None and not buffer.failed.n_trajectories:
        log.warning("%s has no failures that Prefix.of = %r could continue; the run's own come later", path, prefix.of)
    if added := mixer.injection.added_rows:
        added.check_stored(stored, str(path))
    planned = sum(map(len, mixer.injection.candidates(buffer).values()))
    if not mixer.collects and not (planned if mixer.share.largest else stored):
        raise ValueError(
            f"{path}: there is nothing to replay in it, and with ReplayMixer.collects = False there never will be "
            "(retired questions have no trajectories; those at 0 count with ReplayBuffer.replays_unsolved = True"
            f"{'; @Prefix() takes what Prefix.of and Prefix.target say' if mixer.injection.prefix else ''})"
        )


def read_experts(
    path: Path, questions: Sequence[Question], prompts: PromptEncoder, verifier: Verifier, max_tokens: int
) -> list[tuple[Question, Trajectory]]:
    """Somebody else's responses, an object a line: {"prompt": …, "response": …}, or "id" (the question's) for "prompt".

    A response is encoded as it stands and closed with the token that closes the template's turn, or else the
    tokenizer's end token, as the policy's own responses are. Its behaviour log-probs are 0, that is
    π_past = 1 (LUFFY, arXiv 2504.14945), its step is 0. Raises FileNotFoundError, and ValueError that names file and
    line: one that is no object, that belongs to no question of the run or to several, or whose response is no text,
    empty, longer than `max_tokens` with its end token, has an end token already, or is not correct.
    """
    by_key: dict[object, list[Question]] = {}
    for question in questions:
        for key in (question.id, question.prompt):
            by_key.setdefault(key, []).append(question)
    place, matches, encoded = place_of(path), [], []  # one a line
    for row, record in enumerate(read_rows(path, (), "Work.experience")):
        where, response = place.of(row), record.get("response")
        if not record.keys() & {"id", "prompt"} or type(response) is not str or not response:
            raise ValueError(f'{where}: needs "prompt" or "id", and "response", a text; got {dict(record)!r:.200}')
        keys: list[object] = [str(record["id"])] if "id" in record else []
        if "prompt" in record:
            keys.append(read_prompt(record, where, '"id" in its place', "prompt"))
        same = [question for question in by_key.get(keys[0], []) if question in by_key.get(keys[-1], [])]
        if len(same) != 1:
            shown = " and ".join(f"{key!r:.200}" for key in keys)
            apart = " (one that is held out for validation is none of them)" if not same else ""
            raise ValueError(f"{where}: {len(same) or 'none'} of the run's questions have {shown}{apart}")
        try:
            ids = prompts.encode_response(response, max_tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        matches.append(same[0])
        encoded.append(np.array(ids, np.int32))
    # As rollouts are graded: by what the tokens say, which is not the text where the tokenizer lacks a character.
    pairs = [
        (question, written_to(prompts, question, [Rollout(ids, "stop")])[0])
        for question, ids in zip(matches, encoded, strict=True)
    ]
    grades = verifier.grade_all(pairs)
    for row, ((question, (text, *_)), grade) in enumerate(zip(pairs, grades, strict=True)):
        if not grade.correct or grade.reward is None:
            problem = "must be correct" if grade.reward is not None else "could not be graded (right or not)"
            raise ValueError(
                f"{place.of(row)}: an expert's response {problem}; the verdict is {grade.verdict!r}, the answer "
                f"{question.answer!r}, the response {text!r:.200}"
            )
    return [
        (
            question,
            Trajectory(
                *(ids, np.zeros(len(ids), np.float32), grade.reward or 0.0, 0), sound=grade.sound, parts=grade.parts
            ),
        )
        for question, ids, grade in zip(matches, encoded, grades, strict=True)
    ]


def write_experts(path: Path, responses: Iterable[tuple[Question, str]]) -> None:
    """A file that `read_experts` reads; it appears whole or not at all."""
    lines = [json.dumps({"id": question.id, "response": response}) + "\n" for question, response in responses]
    write(path, "".join(lines))
