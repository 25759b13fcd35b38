"""The records that everything passes around: trajectories, questions, and a group's accuracy."""

import math
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import group, trajectory

from exgrpo_orlhf.records import Question, Rollout, RolloutGroup, Trajectory

IDS, LOGPROBS, MASK = np.array([4, 5, 6], np.int32), np.zeros(3, np.float32), np.array([True, False, True])


@pytest.mark.parametrize(
    ("ids", "logprobs", "actions", "message"),
    [
        # T6: nothing is padded or aligned by position later, the lengths are equal or the trajectory does not exist.
        (IDS, LOGPROBS[:2], None, "as many behaviour log-probs as tokens"),
        (IDS[:0], LOGPROBS[:0], None, "at least one"),
        (IDS[None], LOGPROBS[None], None, "as many behaviour log-probs"),
        (IDS, LOGPROBS, MASK, "as many behaviour log-probs"),
        *(
            (IDS, LOGPROBS[: len(bad) - 1], bad, "a bool for each of its tokens")
            for bad in (MASK[:2], MASK.astype(np.int8))
        ),
        (IDS.astype(np.int64), LOGPROBS, None, "int64"),
        (IDS, LOGPROBS.astype(np.float64), None, "float64"),
        *((IDS, np.array([-1, bad, 0], np.float32), None, "finite") for bad in (math.nan, -math.inf)),
    ],
)
def test_a_trajectory_that_cannot_be_is_refused(ids, logprobs, actions, message):
    with pytest.raises(TypeError if "64" in message else ValueError, match=message):
        Trajectory(ids, logprobs, 1.0, 0, actions=actions)


def test_an_episode_has_a_logprob_for_each_action_and_its_mask_is_a_part_of_its_identity_and_its_bytes():
    ids, mask, logprobs = IDS, MASK, np.full(2, -1.0, np.float32)
    episode = Trajectory(ids, logprobs, 1.0, 0, actions=mask)
    assert (len(episode), episode.length, episode.n_bytes) == (3, 2, 3 * 4 + 2 * 4 + 3)
    assert episode.key != Trajectory(ids, np.zeros(3, np.float32), 1.0, 0).key
    assert episode.key != Trajectory(ids, logprobs, 1.0, 0, actions=mask[[1, 0, 2]]).key
    assert [Rollout(ids, "stop", actions=one).turns for one in (mask, ~mask, mask | True)] == [2, 1, 1]


def test_identity_of_a_trajectory_is_its_tokens_alone():
    assert trajectory([1, 2], step=3).key == trajectory([1, 2], step=9, logprob=-2.0).key
    assert len({trajectory(t).key for t in ([1, 2], [2, 1], [1, 2, 0], [1], [258])}) == 5


def test_question_id_depends_on_source_prompt_and_answer_only():
    base = Question.make("s", "p", "a", {"row": 1})
    assert base.id == Question.make("s", "p", "a").id
    others = [Question.make("s2", "p", "a"), Question.make("s", "p2", "a"), Question.make("s", "p", "a2")]
    others += [Question.make("sp", "", "a"), Question.make("s", (("user", "p"),), "a")]
    assert len({base.id, *(question.id for question in others)}) == 6
    assert len(base.id) == 32
    assert int(base.id, 16) >= 0


def test_an_ungraded_rollout_is_not_silently_wrong():
    ungraded = RolloutGroup(Question("q", "q", "", ""), (Rollout(np.array([1], np.int32), "stop"),) * 2, False)
    with pytest.raises(ValueError, match="not been graded"):
        _ = ungraded.accuracy


# -- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "replayed", "accuracy"),
    [
        (["correct", "wrong", "timeout", "no_answer", "error"], False, Fraction(1, 3)),
        (["correct", "wrong", "error"], False, Fraction(1, 2)),
        (["correct", "timeout", "error"], False, None),
        (["timeout", "error"], False, None),
        (["timeout", "error"], True, None),
        # Beside a stored success and two timeouts, one lucky answer must not retire a question.
        (["correct", "timeout", "timeout"], True, None),
        (["correct"], True, 1),  # all there is
        # T4: the stored row does not count, so a replayed question can fall to 0 and no replay lifts its accuracy.
        (["wrong"] * 7, True, 0),
        (["correct"] * 3 + ["wrong"] * 4, True, Fraction(3, 7)),
    ],
)
def test_ungradable_rollouts_are_out_of_the_accuracy_and_one_of_several_says_nothing(verdicts, replayed, accuracy):
    assert group(verdicts, "q", replayed=replayed).accuracy == accuracy
