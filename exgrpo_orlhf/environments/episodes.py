"""Episodes of questions: a sampler's turns and the environments' answers, until each episode is over."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ..records import Question, Rollout
from ..sampling.request import POLL, Request, Sampler
from .playing import Play, Player, Start


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
    order = sorted(range(len(questions)), key=lambda i: (len(player.prompts.encode(questions[i])), i))
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
                for i in [i for i in sorted(waiting) if sampler.in_step or plays[i].answered]:
                    waiting.remove(i)
                    if plays[i].received():
                        if plays[i].goes_on_as_given():
                            waiting.add(i)
                        elif plays[i].going:
                            pending.send(i, _turn(plays[i], like))
                    if not plays[i].going:
                        sampler.forget(plays[i].session)
                        yield i
                if not pending:
                    time.sleep(POLL if waiting else 0)
                    continue
                for i, (rollout,) in pending.arrived(wait=not waiting):
                    plays[i].act(rollout)
                    waiting.add(i)
    finally:
        for episode in plays:
            sampler.forget(episode.session)


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
