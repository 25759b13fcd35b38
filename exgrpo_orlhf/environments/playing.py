"""Episodes as they are played: a sampler's turns and what the environments return between them, as token ids."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ..grader.grade import Grade
from ..questions.prompts import PromptEncoder
from ..records import EXTRA_INFO, Finish, Question, Rollout
from ..rewards.grading import as_in_other_readers
from ..rounding import less_rounding
from ..sampling.request import POLL, Request, Sampler
from ..workers.fork_server import CallFailed, ForkServer, Worker, replies
from .agent import Reply
from .environment import Environment
from .start import Start

log = logging.getLogger(__name__)
_sessions = count()  # a number for each episode of this process
_LONGEST_TOKEN = 1000  # characters: a longer observation than this for each token of room is not even tokenised


class Player:
    """Plays episodes of questions. An episode depends on its question, its seed and the policy, but for the last bits
    of its logits, which change with the rows that are generated beside it.
    """

    def __init__(self, environment: Environment, prompts: PromptEncoder, max_tokens: int) -> None:
        """max_tokens: of an episode, those of the environment included"""
        self.environment, self.prompts, self.max_tokens = environment, prompts, max_tokens
        self.tokenizer: Any = prompts.tokenizer
        self.success_at = less_rounding(environment.success_at)
        added = self.tokenizer.added_tokens_decoder
        self._special = {i: token.content for i, token in added.items() if token.special}

    @contextmanager
    def episodes(
        self, questions: Sequence[Question], seeds: Sequence[int], given: Mapping[int, Start] = {}
    ) -> Iterator[list[Play]]:
        """An episode for each question and seed, begun; given: by position, from where it goes on. Their processes end
        with this context."""
        plays: list[Play] = []
        try:
            server, openings = self.environment.server(), dict[int, Opening]()
            for i, (question, seed) in enumerate(zip(questions, seeds, strict=True)):
                if id(question) not in openings:  # K episodes of a question have one
                    openings[id(question)] = Opening.of(self.prompts, question)
                plays.append(Play(self, openings[id(question)], seed, server, given.get(i)))
            yield plays
        finally:
            for play in plays:
                play.close()

    def text(self, turn: Rollout) -> str:
        """As OpenRLHF's agents see a turn: with special tokens, without the end token, and up to the text that ends a
        turn, behind which its last token may have more. Such a text has all of a special token, as the end token is, or
        nothing of it."""
        ids = turn.token_ids.tolist()
        text, before = (str(self.tokenizer.decode(part, skip_special_tokens=False)) for part in (ids, ids[:-1]))
        last = self._special.get(ids[-1], "")
        stops = [stop for stop in self.environment.stop if stop in before or (stop in text and stop.endswith(last))]
        if ends := [text.index(stop) + len(stop) for stop in stops]:
            return text[: min(ends)]
        return text if turn.finish == "length" else before


def player_of(environment: Environment | None, prompts: PromptEncoder, max_tokens: int) -> Player | None:
    """None where a response is one turn."""
    return Player(environment, prompts, max_tokens) if environment and environment.path else None


class Opening(NamedTuple):
    """What all episodes of a question begin with. prompt: its token ids; text: the same; label, meta: as an environment
    gets them"""

    question: Question
    prompt: list[int]
    text: str
    label: Any
    meta: Any

    @classmethod
    def of(cls, prompts: PromptEncoder, question: Question) -> Opening:
        meta = {name: value for name, value in question.meta.items() if name != EXTRA_INFO}
        golds = [*question.answer] if isinstance(question.answer, tuple) else question.answer
        label, meta = as_in_other_readers(golds), as_in_other_readers(meta)
        return cls(question, prompts.encode(question), prompts.render(question), label, meta)


class Play:
    """One episode. `going` says whether the policy has another turn; then `context` is what it continues.

    `take` takes the environment's answer to what it was asked last (`receive`): to the reset when the episode begins,
    then to each turn (`act`).
    """

    def __init__(
        self, player: Player, opening: Opening, seed: int, server: ForkServer, start: Start | None = None
    ) -> None:
        """seed: of its tokens and, but for an episode that goes on from a stored one, of its environment"""
        self.player, self.question, self.token_seed, self.start = player, opening.question, seed, start
        self.seed = seed if start is None else start.seed
        self.prompt = opening.prompt
        self.tokens: list[int] = []
        self.actions: list[bool] = []
        self.logprobs: list[float] = []
        self.turns, self.truncated, self.going, self.given = 0, False, True, 0
        self.reward, self.score = 0.0, None  # type: float, float | None
        self.logs: tuple[tuple[str, float], ...] = ()
        self.failure: CallFailed | None = None
        self.session = next(_sessions)
        self._text, self._label = opening.text, opening.label
        self._action = ""
        states = {"observation": self._text, "label": self._label, "seed": self.seed, "meta": opening.meta}
        self.episode: Worker | None = None
        try:
            self.episode = server.worker()
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
        turn = self.start.next_turn(self.tokens, self.actions)
        if not turn:
            self._fail(CallFailed("error", "the environment answers otherwise than to the stored episode"))
            self.close()
            return False
        self.act(Rollout(np.array(turn, np.int32), "stop"))
        self.given = len(self.tokens) if len(self.tokens) == len(self.start.tokens) else 0
        return True

    @property
    def answered(self) -> bool:
        """Whether `receive` returns at once."""
        return self.episode is None or self.episode.ready(self.player.environment.timeout)

    def take(self, reply: Reply | CallFailed) -> None:
        try:
            if isinstance(reply, CallFailed):
                raise reply
            self._take(reply)
        except CallFailed as error:
            self._fail(error)

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
        played, given = np.array(self.actions, np.bool_), len(self.start.tokens) if self.start else 0
        if given and not played[given:].any() and self.failure is None:  # or given tokens would be trained on
            self.failure = CallFailed("error", "the environment ended before the policy's first turn")
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
            grade = Grade("correct" if score >= self.player.success_at else "wrong", self.reward, logs=self.logs)
        logprobs = np.array(self.logprobs, np.float32) if self.logprobs else None
        finish: Finish = "length" if self.truncated else "stop"
        return Rollout(ids, finish, grade, logprobs, actions=actions, seed=self.seed, given=given)

    def close(self) -> None:
        if self.episode is not None:
            self.episode.close()
            self.episode = None


def receive(plays: Sequence[Play]) -> list[bool]:
    """Wait for the environments of episodes that go on. Returns of each whether it still does."""
    waiting = [(play, play.episode) for play in plays if play.episode is not None]
    if waiting:
        timeout = waiting[0][0].player.environment.timeout
        for (play, _), reply in zip(waiting, replies([worker for _, worker in waiting], timeout), strict=True):
            play.take(reply)
    for play in plays:
        if not play.going:
            play.close()
    return [play.going for play in plays]


def play(
    sampler: Sampler,
    player: Player,
    questions: Sequence[Question],
    seeds: Sequence[int],
    like: Request,
    done: Collection[int] = (),
    given: Mapping[int, Start] = {},
) -> Iterator[list[tuple[int, Rollout]]]:
    """Plays an episode of each question with its seed, `Sampler.together` of them at a time. Yields positions and
    rollouts of those that are over, in portions, those at `done` excepted. like: how their turns are sampled; given: by
    position, from where an episode goes on

    Which are played together does not depend on `done`: where one of them is missing, all are played. Raises
    EngineLost and NotLoaded.
    """
    lengths = [len(player.prompts.encode(question)) for question in questions]
    order = sorted(range(len(questions)), key=lambda i: (lengths[i], i))
    size = sampler.together or max(1, len(order))
    for block in (order[begin : begin + size] for begin in range(0, len(order), size)):
        if all(i in done for i in block):
            continue
        starts = {n: given[i] for n, i in enumerate(block) if i in given}
        with player.episodes([questions[i] for i in block], [seeds[i] for i in block], starts) as plays:
            ended = turns(sampler, plays, like)
            for over in [sorted(ended)] if sampler.in_step else ([i] for i in ended):
                yield [(block[i], plays[i].rollout()) for i in over if block[i] not in done]


def turns(sampler: Sampler, plays: Sequence[Play], like: Request) -> Iterator[int]:
    """Plays episodes that have begun. Yields the position of each when it is over.

    With a sampler in step a turn waits for the environments of all: which rows are generated together then never
    depends on how fast an environment was, and a resumed run samples the same tokens. With any other, an episode's next
    turn is sent when its own environment has answered.
    """
    waiting = set(range(len(plays)))  # for their environments
    try:
        with sampler.pending() as pending:
            while waiting or pending:
                answered = [i for i in sorted(waiting) if sampler.in_step or plays[i].answered]
                waiting.difference_update(answered)
                receive([plays[i] for i in answered])
                as_given = {i for i in answered if plays[i].going and plays[i].goes_on_as_given()}
                waiting |= as_given
                pending.send({i: _turn(plays[i], like) for i in answered if plays[i].going and i not in as_given})
                over = [i for i in answered if not plays[i].going]
                sampler.forget([plays[i].session for i in over])
                yield from over
                if not pending:
                    time.sleep(POLL if waiting else 0)
                    continue
                for i, (rollout,) in pending.arrived(wait=not waiting):
                    plays[i].act(rollout)
                    waiting.add(i)
    finally:
        sampler.forget([episode.session for episode in plays])


def _turn(episode: Play, like: Request) -> Request:
    """The request for an episode's next turn, sampled as `like` is."""
    return replace(
        like,
        prompt_ids=episode.context,
        seed=episode.turn_seed,
        max_tokens=episode.room,
        stop=episode.player.environment.stop,
        session=episode.session,
        last_turn=episode.last_turn,
    )


def episode_seeds(seed: int, step: int, round: int, count: int) -> list[int]:
    """Of a step's episodes, in the plan's order. seed: of the run; round: of rollouts in the step"""
    return [int(x) for x in np.random.SeedSequence([seed, step, round]).generate_state(count, np.uint32)]
