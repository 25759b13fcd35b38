"""Which stored response a group continues, how much of it it is given, and what its group counts for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import QUESTIONS, K, choices, group, mixer, source, trajectory, view
from run_builders import small_bindings

from exgrpo_orlhf import config
from exgrpo_orlhf.checks import ConfigError
from exgrpo_orlhf.objective import GroupAdvantages
from exgrpo_orlhf.records import Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy, snapshot
from exgrpo_orlhf.replay.plan import Plan, SelectedBatch
from exgrpo_orlhf.replay.prefix import AdaptiveShare, FixedShare, Prefix, UniformShare

FAILED = ["wrong"] * K
PAST = 1000  # tokens of a response, where the room does not matter


def observed(verdicts: dict[int, list[str]], failures: int = 4) -> ReplayBuffer:
    """A buffer of questions, by their number, with these latest groups, and two stored successes and failures each."""
    buffer = ReplayBuffer(RetirementPolicy(), replays_unsolved=True)
    buffer.keep_failures(failures)
    stored = [(QUESTIONS[i].id, trajectory([i, n, 1])) for i in verdicts for n in (5, 6)]
    buffer.observe([group(["correct", "wrong"], QUESTIONS[i]) for i in verdicts], 1)
    buffer.store(stored)
    buffer.failed.store([(id, Trajectory(t.token_ids + 7, t.behaviour_logprobs, 0.0, 0)) for id, t in stored])
    buffer.observe([group(list(told), QUESTIONS[i]) for i, told in verdicts.items()], 2)
    return buffer


def continued(one: RolloutGroup, given: int = 1) -> RolloutGroup:
    rollouts = (Rollout(np.array([8, *r.token_ids], np.int32), r.finish, r.grade, given=given) for r in one.rollouts)
    return RolloutGroup(one.question, tuple(rollouts), True)


LATEST = {0: FAILED, 1: ["correct", "wrong", "wrong", "wrong"], 2: ["correct", "correct", "wrong", "wrong"],
          3: ["correct", "correct", "correct", "wrong"], 4: ["correct"] * K}  # fmt: skip


@pytest.mark.parametrize(
    ("of", "successes", "failures"),
    [("successes", {0, 1}, set()), ("failures", set(), {3, 4}), ("both", {0, 1}, {3, 4})],
)
def test_a_success_is_continued_below_the_target_and_a_failure_above_it_also_of_a_retired_question(
    of, successes, failures
):
    buffer, prefix = observed(LATEST), Prefix(of=of)
    assert list(buffer.retired) == [QUESTIONS[4].id]
    drawn = {id for members in prefix.candidates(buffer).values() for id in members}
    assert drawn == {QUESTIONS[i].id for i in successes | failures}
    for i in successes | failures:
        pool = buffer if i in successes else buffer.failed
        assert prefix.stored_of(QUESTIONS[i].id, buffer) == pool.trajectories(QUESTIONS[i].id) != []


def test_a_plan_gives_each_question_the_first_tokens_of_its_chosen_response_and_says_of_which():
    buffer = observed({0: FAILED, 1: LATEST[1]})
    mixing = mixer(b=4, rho=0.5, injection=Prefix(share=FixedShare(0.7)))
    plan = mixing.plan(source(), buffer, 3)
    assert plan.rollout_counts(K) == [K] * 4, "all are generated"
    newest = choices({q.id: plan.stored[q][1] for q in plan.replayed})
    stored = {id: choice._replace(stored=[*buffer.trajectories(id)], place=1) for id, choice in newest.items()}
    unusable = plan.replayed[0].id
    given = mixing.with_given(plan, stored, {unusable}, PAST, lambda one: ["x"] * len(one))
    assert given.given == {plan.replayed[1].id: 2}
    assert [q.id for q in given.stored] == [plan.replayed[1].id], "no choice, and no share that would move"
    assert given.stored[plan.replayed[1]][0].token_ids.tolist()[1] == 6, "the chosen one is the first"
    assert given.given_to(plan.replayed[1]).tolist() == given.stored[plan.replayed[1]][0].token_ids[:2].tolist()
    assert not len(given.given_to(plan.replayed[0]))
    assert not len(given.given_to(plan.fresh[0]))


def test_a_question_that_returns_from_retirement_is_not_twice_in_a_batch_that_continues_it():
    buffer = observed({4: LATEST[4]})
    buffer.retirement = RetirementPolicy(revisits_every=3, revisited_share=1.0)
    plan = mixer(b=4, rho=0.5, injection=Prefix(of="failures")).plan(source(), buffer, 3)
    assert [question.id for question in plan.replayed] == [QUESTIONS[4].id]
    assert len({question.id for question in (*plan.fresh, *plan.replayed)}) == plan.questions == 4


@pytest.mark.parametrize(
    ("share", "room", "given"), [(0.0, PAST, 0), (0.5, PAST, 3), (0.99, PAST, 5), (0.99, 4, 3), (0.99, 1, 0)]
)
def test_the_last_token_and_what_leaves_no_room_are_never_given(share, room, given):
    assert Prefix().given(trajectory([4, 5, 6, 7, 8, 1]), share, room, None) == given


TEXT = ["So", " 3", ".", "14", ".", " It", " is", '."', "\n", "Then", "", ""]
SIGNS = ["So", ".", "", "", "🙂", " 7.", "\n", "", "√", "2"]  # a character of three tokens, and one of two


@pytest.mark.parametrize(
    ("cut", "most", "given"),
    [("token", 10, 10), ("line", 10, 9), ("line", 8, 0), ("sentence", 10, 9), ("sentence", 8, 8), ("sentence", 7, 5),
     ("sentence", 4, 0), ("sentence", 3, 0)],
)  # fmt: skip
def test_a_given_part_ends_where_it_may(cut, most, given):
    response = trajectory(range(2, 2 + len(TEXT)))
    assert Prefix(cut=cut).given(response, most / len(TEXT) + 1e-9, PAST, lambda one: TEXT) == given


@pytest.mark.parametrize(
    ("cut", "most", "given"), [("line", 9, 7), ("line", 8, 7), ("sentence", 9, 7), ("sentence", 5, 0)]
)
def test_no_given_part_ends_within_a_character_or_in_front_of_one_that_has_no_space(cut, most, given):
    response = trajectory(range(2, 2 + len(SIGNS)))
    assert Prefix(cut=cut).given(response, most / len(SIGNS) + 1e-9, PAST, lambda one: SIGNS) == given


@pytest.mark.parametrize(("share", "given"), [(0.9, 5), (0.5, 2), (0.2, 0)])
def test_what_is_given_of_an_episode_ends_with_a_turn_of_the_policy(share, given):
    actions = np.array([1, 1, 0, 0, 1, 0, 1, 1], bool)
    ids = np.arange(2, 10, dtype=np.int32)
    episode = Trajectory(ids, np.zeros(5, np.float32), 1.0, 0, actions=actions, seed=3)
    assert Prefix().given(episode, share, PAST, None) == given


def test_an_adaptive_share_moves_towards_the_target_in_its_direction_and_stays_within_its_bounds():
    mixing = mixer(injection=Prefix(of="both", share=AdaptiveShare(first=0.5, step=0.25, highest=0.75)))
    success, failure = trajectory(), Trajectory(*(np.array([3], t) for t in (np.int32, np.float32)), 0.0, 0)
    failure = Trajectory(failure.token_ids, failure.behaviour_logprobs, 0.0, 0, correct=False)
    half = ["correct", "wrong"] * 2
    expected = {True: [(FAILED, 0.75), (FAILED, 0.75), (half, 0.75), (["correct"] * K, 0.5), (["timeout"] * K, 0.5)],
                False: [(["correct"] * K, 0.75), (FAILED, 0.5), (FAILED, 0.25)]}  # fmt: skip
    for correct, course in expected.items():
        for verdicts, share in course:
            chosen = choices({QUESTIONS[0].id: success if correct else failure})
            mixing.steer([continued(group(verdicts)), group(verdicts, QUESTIONS[1])], chosen)
            assert mixing.given_shares[correct] == {QUESTIONS[0].id: share}
    again = mixer(injection=Prefix())
    again.load_state_dict(mixing.state_dict())
    assert again.given_shares == mixing.given_shares
    with pytest.raises(KeyError, match="given_shares"):
        mixer().load_state_dict(mixing.state_dict())


def test_a_shared_share_moves_once_a_step_by_the_mean_accuracy_of_the_groups_that_could_be_continued():
    mixing = mixer(injection=Prefix(of="both", share=AdaptiveShare(first=0.5, step=0.125, shared=True)))
    success = trajectory()
    failure = Trajectory(success.token_ids, success.behaviour_logprobs, 0.0, 0, correct=False)
    chosen = choices({q.id: failure if i == 3 else success for i, q in enumerate(QUESTIONS[:4])})
    told = [FAILED, FAILED, ["correct"] * K, ["correct"] * K, ["correct"] * K]  # the last could not be continued
    groups = [continued(group(verdicts, q)) for verdicts, q in zip(told, QUESTIONS, strict=False)]
    mixing.steer(groups, chosen)
    assert mixing.given_shares == {True: {"": 0.625}, False: {"": 0.625}}, "mean 1/3 of three, and 1"
    buffer = observed({0: FAILED, 1: FAILED})
    planning = mixer(b=4, rho=0.5, injection=Prefix(share=AdaptiveShare(shared=True)))
    planning.given_shares[True][""] = 0.7
    plan = planning.plan(source(), buffer, 3)
    both = choices({q.id: plan.stored[q][0] for q in plan.replayed})
    assert [*planning.with_given(plan, both, (), PAST, lambda one: []).given.values()] == [2, 2]


def test_a_whole_batch_of_continued_groups_is_refused_where_nothing_else_would_be_measured():
    with pytest.raises(ValueError, match=r"ReplayMixer\.rho = 1 with @Prefix\(\) would continue the same questions"):
        mixer(rho=1.0, injection=Prefix())
    mixer(rho=1.0, injection=Prefix(), collects=False)
    mixer(rho=1.0, injection=Prefix(share=FixedShare(0.0)))


def test_what_went_wrong_in_a_continued_group_is_counted_and_its_rewards_are_not():
    mixing = mixer(b=2, injection=Prefix())
    failed = continued(group(["error", "timeout", "wrong", "wrong"]))
    cut_off = tuple(replace(rollout, finish="length") for rollout in failed.rollouts)
    groups = [group(["correct"] * K, QUESTIONS[1]), replace(failed, rollouts=cut_off)]
    completed = mixing.complete(groups, {})
    plan = Plan(3, [QUESTIONS[1]], [QUESTIONS[0]], {})
    metrics = SelectedBatch(plan, completed, completed, None).metrics()
    assert (metrics["reward/mean"], metrics["reward/pass_at_1"], metrics["reward/no_answer_share"]) == (1, 1, 0)
    assert (metrics["reward/error_share"], metrics["reward/timeout_share"]) == (1 / 8, 1 / 8)
    assert metrics["rollout/truncated_share"] == 1 / 2


def test_a_uniform_share_is_drawn_for_each_group_within_its_bounds():
    rng = np.random.default_rng(0)
    drawn = [UniformShare(0.2, 0.4).of_group(None, rng) for _ in range(500)]
    assert 0.2 <= min(drawn) < 0.21 and 0.39 < max(drawn) <= 0.4  # noqa: PT018
    assert UniformShare().moved(0.3, 1) is None


def test_a_continued_group_counts_for_nothing_but_its_rows_and_nothing_of_it_is_stored():
    mixing = mixer(b=2, injection=Prefix(of="both"), start_at_accuracy=0.4)
    buffer = observed({0: FAILED})
    before = view(buffer), view(buffer.failed)
    groups = [continued(group(["correct"] * 3 + ["wrong"]))]
    of_policy = [one for one in groups if not one.given]
    mixing.share.observe(of_policy, 3)
    buffer.observe(of_policy, 3)
    assert not mixing.share.started
    mixing.share.started_at = 0
    batch = mixing.assemble(mixing.complete(groups, {}), GroupAdvantages())
    logprobs = [np.zeros(row.length, np.float32) for row in batch.flat_rows()]
    assert [row.length for row in batch.flat_rows()] == [2] * K, "the continuation"
    assert [row.advantage for row in batch.flat_rows()] == [0.25] * 3 + [-0.75]
    assert mixing.collect(batch, logprobs, 3) == mixing.failures(batch, logprobs, 3) == []
    assert (view(buffer), view(buffer.failed)) == before
    given_nothing = [group(["correct"] * 3 + ["wrong"], replayed=True)]
    batch = mixing.assemble(mixing.complete(given_nothing, {}), GroupAdvantages())
    assert [len(found(batch, logprobs, 3)) for found in (mixing.collect, mixing.failures)] == [3, 1]


def test_the_failures_have_a_pool_with_limits_of_its_own_and_are_in_a_snapshot(tmp_path):
    buffer = observed({0: FAILED, 3: LATEST[3]}, failures=1)
    assert {id: len(record.stored) for id, record in buffer.failed.records.items()} == dict.fromkeys(
        (QUESTIONS[0].id, QUESTIONS[3].id), 1
    )
    assert buffer.failed.records[QUESTIONS[3].id].accuracy == Fraction(3, 4)
    snapshot.save(buffer, tmp_path / "replay", "print")
    again = observed({}, failures=1)
    snapshot.load(tmp_path / "replay", again, "print")
    assert (view(again), view(again.failed)) == (view(buffer), view(buffer.failed))
    for_new = ReplayBuffer(RetirementPolicy())
    for_new.keep_failures(1)
    snapshot.load_for_new_run(tmp_path / "replay", for_new, "print", [q.id for q in QUESTIONS])
    assert for_new.failed.n_trajectories == 2


def test_a_failure_is_one_after_a_snapshot_too(tmp_path):
    buffer = observed({})
    failure = Trajectory(np.array([3, 1], np.int32), np.zeros(2, np.float32), 0.0, 0, correct=False)
    buffer.record("q", Fraction(1, 2), 0)
    buffer.store([("q", failure), ("q", trajectory([4, 1]))])
    snapshot.save(buffer, tmp_path / "replay", "print")
    assert [one.correct for one in snapshot.read(tmp_path / "replay").trajectories("q")] == [False, True]


PREFIX = "ReplayMixer.injection = @Prefix()"
REFUSED = [
    (["Work.experience = 'x.jsonl'"], "a text has none"),
    (["Prefix.cut = 'line'", "Environment.path = 'chain_calculator.py'"], "ends with a turn"),
    (["Prefix.share = 0.5"], r"Prefix.share must be a reference such as @AdaptiveShare\(\)"),
    (["Prefix.target = 1.0"], r"Prefix.target must lie in \(0, 1\)"),
    (["Prefix.share = @UniformShare()", "UniformShare.lowest = 0.95"], "UniformShare.lowest must be at most"),
    (["AdaptiveShare.first = 0.9"], r"AdaptiveShare.first must lie in \[AdaptiveShare.lowest, .highest\]"),
    (["Prefix.share = @FixedShare()", "FixedShare.value = 1.0"], r"FixedShare.value must lie in \[0, 1\)"),
    (["ReplayBuffer.counts_stored = True"], "counts a stored success that ReplayMixer.injection = @Prefix"),
    (["ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.per_question = 2"], "where a success belongs"),
    (["ReplayBuffer.difficulty = 'reward_spread'"], "needs ReplayMixer.injection"),
]


@pytest.mark.parametrize(("bindings", "sentence"), REFUSED, ids=[one[0][0] for one in REFUSED])
def test_what_cannot_be_continued_is_refused_before_the_run(bindings, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        config.load(["toy.gin"], small_bindings(tmp_path, PREFIX, *bindings))


@pytest.mark.parametrize(
    ("tokens", "room", "sentence"),
    [(range(2, 42), 30, "leaves none of Sampling.max_response_tokens = 30"), ([4, 1, 5, 1], 30, "end token 1 before")],
)
def test_a_stored_response_of_another_run_that_cannot_be_continued_is_refused(tokens, room, sentence):
    Prefix().check_stored(trajectory(range(2, 32)), 30, {1}, "x")
    with pytest.raises(ValueError, match=f"x: .*{sentence}"):
        Prefix().check_stored(trajectory(tokens), room, {1}, "x")


def test_settings_of_a_share_that_is_not_bound_have_no_effect_and_say_so(tmp_path, caplog):
    config.load(["toy.gin"], small_bindings(tmp_path, PREFIX, "UniformShare.highest = 0.5", "AdaptiveShare.step = 0.2"))
    assert "UniformShare.highest = 0.5 has no effect" in caplog.text
    assert "AdaptiveShare.step" not in caplog.text
