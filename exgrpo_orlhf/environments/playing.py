"""Episodes as they are played: turns of the policy, and what the environment returns between them, as token ids."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..grader.grade import Grade
from ..questions.prompts import PromptEncoder
from ..records import EXTRA_INFO, Finish, Question, Rollout, Trajectory
from ..rewards.grading import as_in_other_readers
from ..rounding import less_rounding
from ..workers.fork_server import CallFailed, Worker
from .agent import Reply
from .environment import Environment

log = logging.getLogger(__name__)
_sessions = count()  # a number for each episode of this process
_TOGETHER = 256  # stored episodes checked at a time
_LONGEST_TOKEN = 1000  # characters: a longer observation than this for each token of room is not even tokenised


class Player:
    """Plays episodes of questions. An episode depends on its question, its seed and the policy, but for the last bits
    of its logits, which change with the rows that are generated beside it.
    """

    def __init__(self, environment: Environment, prompts: PromptEncoder, max_tokens: int) -> None:
        """max_tokens: of an episode, those of the environment included"""
        self.environment, self.prompts, self.max_tokens = environment, prompts, max_tokens
        self.tokenizer: Any = prompts.tokenizer

    @contextmanager
    def episodes(
        self, questions: Sequence[Question], seeds: Sequence[int], given: Mapping[int, Start] = {}
    ) -> Iterator[list[Play]]:
        """An episode for each question and seed, begun; given: by position, from where it goes on. Their processes end
        with this context."""
        plays: list[Play] = []
        try:
            pairs = enumerate(zip(questions, seeds, strict=True))
            plays.extend(Play(self, question, seed, given.get(i)) for i, (question, seed) in pairs)
            yield plays
        finally:
            for play in plays:
                play.close()

    def text(self, turn: Rollout) -> str:
        """As OpenRLHF's agents see a turn: with special tokens, without the end token."""
        ids = turn.token_ids.tolist()
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        if turn.finish == "length" or any(stop in text for stop in self.environment.stop):
            return text
        return str(self.tokenizer.decode(ids[:-1], skip_special_tokens=False))


def player_of(environment: Environment | None, prompts: PromptEncoder, max_tokens: int) -> Player | None:
    """None where a response is one turn."""
    return Player(environment, prompts, max_tokens) if environment and environment.path else None


class Start(NamedTuple):
    """The first turns of a stored episode. tokens: of all that follows the prompt, up to the end of the last of these
    turns; actions: which of them are the policy's; seed: with which its environment answered"""

    tokens: list[int]
    actions: list[bool]
    seed: int


def start_of(episode: Trajectory, given: int) -> Start:
    """Its first `given` tokens."""
    actions = np.ones(len(episode), np.bool_) if episode.actions is None else episode.actions
    return Start(episode.token_ids[:given].tolist(), actions[:given].tolist(), episode.seed or 0)


class Play:
    """One episode. `going` says whether the policy has another turn; then `context` is what it continues.

    `received` takes the environment's answer to what it was asked last: to the reset when the episode begins, then to
    each turn (`act`).
    """

    def __init__(self, player: Player, question: Question, seed: int, start: Start | None = None) -> None:
        """seed: of its tokens and, but for an episode that goes on from a stored one, of its environment"""
        self.player, self.question, self.token_seed, self.start = player, question, seed, start
        self.seed = seed if start is None else start.seed
        self.prompt = player.prompts.encode(question)
        self.tokens: list[int] = []
        self.actions: list[bool] = []
        self.logprobs: list[float] = []
        self.turns, self.truncated, self.going, self.given = 0, False, True, 0
        self.reward, self.score = 0.0, None  # type: float, float | None
        self.logs: tuple[tuple[str, float], ...] = ()
        self.failure: CallFailed | None = None
        self.session = next(_sessions)
        self._text = player.prompts.render(question)
        self._action = ""
        meta = {name: value for name, value in question.meta.items() if name != EXTRA_INFO}
        golds = question.answer
        self._label = as_in_other_readers([*golds] if isinstance(golds, tuple) else golds)
        states = {"observation": self._text, "label": self._label, "seed": self.seed, "meta": as_in_other_readers(meta)}
        self.episode: Worker | None = None
        try:
            self.episode = player.environment.server().worker()
            self.episode.call(pickle.dumps(states))
        except CallFailed as error:
            self._fail(error)

    @property
    def context(self) -> list[int]:
        """Token ids of the prompt and all that follows it so far."""
        return [*self.prompt, *self.tokens]

    @property
    def turn_seed(self) -> int:
        """of the next turn's tokens"""
        entropy = np.random.SeedSequence([self.token_seed, self.turns])
        return int(entropy.generate_state(1)[0]) if self.turns else self.token_seed

    @property
    def last_turn(self) -> bool:
        """Whether no other may follow the next one."""
        return self.turns + 1 == self.player.environment.max_turns

    @property
    def room(self) -> int:
        """Tokens that the next turn may have."""
        return self.player.max_tokens - len(self.tokens)

    def act(self, turn: Rollout) -> None:
        """A turn of the policy, of at most `room` tokens."""
        ids = turn.token_ids.tolist()
        self.turns += 1
        self.truncated = turn.finish == "length"
        self.tokens += ids
        self.actions += [True] * len(ids)
        if turn.sampler_logprobs is not None:
            self.logprobs += turn.sampler_logprobs.tolist()
        self._action = self.player.text(turn)
        assert self.episode is not None  # or it would not be going
        states = {"observation_text": self._text, "action_text": self._action, "label": self._label}
        self.episode.call(pickle.dumps({**states, "sampling_params": None}))

    def goes_on_as_given(self) -> bool:
        """Acts as the stored episode did, while it has another given turn. It fails where the environment has answered
        otherwise."""
        if self.start is None or self.given:
            return False
        turn = next_turn(self, self.start.tokens, self.start.actions)
        if not turn:
            self._fail(CallFailed("error", "the environment answers otherwise than to the stored episode"))
            self.close()
            return False
        self.act(Rollout(np.array(turn, np.int32), "stop"))
        self.given = len(self.tokens) if len(self.tokens) == len(self.start.tokens) else 0
        return True

    @property
    def answered(self) -> bool:
        """Whether `received` returns at once."""
        return self.episode is None or self.episode.ready(self.player.environment.timeout)

    def received(self) -> bool:
        """Wait for the environment. Returns `going`."""
        if self.episode is not None:
            try:
                self._take(self.episode.reply(self.player.environment.timeout))
            except CallFailed as error:
                self._fail(error)
        if not self.going:
            self.close()
        return self.going

    def _take(self, reply: Reply) -> None:
        if self.turns == 0:  # a reset may only add to the prompt, whose token ids are the question's
            if not reply.observation.startswith(self._text):
                raise CallFailed(
                    "error",
                    f"reset returned an observation that does not begin with the prompt: {reply.observation!r:.80}",
                )
            added = reply.observation[len(self._text) :]
        else:
            self.reward, self.score, self.logs = self.reward + reply.reward, reply.score, reply.logs
            added = reply.observation
        if reply.done:
            self.going = False
            return
        long = len(added) > _LONGEST_TOKEN * self.room
        ids = self.player.prompts.encode_observation(added, self.question) if added and not long else []
        # Without room for a token after it, or another turn, an observation is no part of the episode.
        if long or self.turns == self.player.environment.max_turns or len(ids) >= self.room:
            if self.turns == 0:
                raise CallFailed(
                    "error", f"what reset adds to the prompt leaves no room in {self.room} tokens (MAX_RESPONSE_TOKENS)"
                )
            self.going, self.truncated = False, True
            return
        self.tokens += ids
        self.actions += [False] * len(ids)
        self._text += self._action + added

    def _fail(self, error: CallFailed) -> None:
        self.failure, self.going = error, False
        log.warning("not played (%s): %s; question %s", error.verdict, error.reason, self.question.id)

    def rollout(self) -> Rollout:
        """The episode, up to the policy's last token; graded by the environment, or to be graded by the verifier."""
        played, given = np.array(self.actions, np.bool_), self.given
        last = int(np.flatnonzero(played)[-1]) + 1 if played[given:].any() else 0
        ids, actions = np.array(self.tokens[:last], np.int32), played[:last]
        if not last:  # it did not begin: one token, which is in no loss
            ids, actions, given = np.array(self.prompt[-1:], np.int32), np.ones(1, np.bool_), 0
            self.logprobs = [0.0]
        grade = None
        if self.failure is not None:
            grade = Grade(self.failure.verdict, None)
        elif self.player.environment.reward == "environment":
            score = self.reward if self.score is None else self.score
            success = score >= less_rounding(self.player.environment.success_at)
            grade = Grade("correct" if success else "wrong", self.reward, logs=self.logs)
        logprobs = np.array(self.logprobs, np.float32) if self.logprobs else None
        finish: Finish = "length" if self.truncated else "stop"
        return Rollout(ids, finish, grade, logprobs, actions=actions, seed=self.seed, given=given)

    def close(self) -> None:
        if self.episode is not None:
            self.episode.close()


def next_turn(play: Play, ids: Sequence[int], actions: Sequence[bool]) -> list[int]:
    """The actions that a stored episode goes on with after what has been played of it; none where it went on
    otherwise."""
    n = len(play.tokens)
    if (play.tokens, play.actions) != (ids[:n], actions[:n]):
        return []
    return [token for token, _ in takewhile(itemgetter(1), zip(ids[n:], actions[n:], strict=True))]


def episode_seeds(seed: int, step: int, round: int, count: int) -> list[int]:
    """Of a step's episodes, in the plan's order. seed: of the run; round: of rollouts in the step"""
    return [int(x) for x in np.random.SeedSequence([seed, step, round]).generate_state(count, np.uint32)]


def outdated(player: Player, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
    """Of each stored episode, whether the environment would no longer answer to its actions as it did, or would reward
    them otherwise. Turns with nothing between them are played as one."""
    parts = [stored[begin : begin + _TOGETHER] for begin in range(0, len(stored), _TOGETHER)]
    return [differs for part in parts for differs in _outdated(player, part)]


def _outdated(player: Player, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
    ids = [episode.token_ids.tolist() for _, episode in stored]
    actions = [[True] * len(episode) if episode.actions is None else episode.actions.tolist() for _, episode in stored]

    with player.episodes([question for question, _ in stored], [episode.seed or 0 for _, episode in stored]) as plays:
        turns = {i: [0] for i in range(len(stored))}
        while turns := {
            i: turn for i in turns if plays[i].received() and (turn := next_turn(plays[i], ids[i], actions[i]))
        }:
            for i, turn in turns.items():
                plays[i].act(Rollout(np.array(turn, np.int32), "stop"))
    by_verifier = player.environment.reward != "environment"
    return [
        play.going
        or play.truncated
        or play.failure is not None
        or play.tokens != tokens
        or not (by_verifier or play.reward == episode.reward)
        for play, tokens, (_, episode) in zip(plays, ids, stored, strict=True)
    ]
