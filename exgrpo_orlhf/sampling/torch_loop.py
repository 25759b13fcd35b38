"""The sampler in torch: a loop over a transformers model and its cache, on one CPU or one GPU.

`model.generate` gives the same distribution, but computes a question's prompt once per rollout and continues every row
until the last one has ended. Here each distinct prompt is computed once, and a row leaves the batch with its end token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..records import Rollout
from .batch import Batch
from .request import EngineLost, Portion, Request, Sampler, StepSeed

BLOCK = 256  # tokens of the vocabulary that are summed first when one is sampled
DRAWN = 64  # random numbers taken at a time from a row's own generator
CHECK_EVERY = 64  # tokens between two checks that all logits were finite; each check waits for the device
Draw = Callable[[Tensor], Tensor]  # of the rows (R,) that go on, the next token (R,)
# (R,) that token, (N, T) all tokens so far and (R,) the rows → (R,) which of them end by themselves
EndsItself = Callable[[Tensor, Tensor, Tensor], Tensor]
Leave = Callable[[Tensor, Tensor], None]  # gets (R,) the rows and (R,) which of them have ended, before they go
_Place = tuple[int, int, Request]  # position of a request, which of its n responses, the request


class LoopSampler(Sampler):
    """Generates chunks of responses to prompts of similar length, with little padding.

    Chunks do not depend on which responses exist already. A chunk with a missing response is generated again as a
    whole, so what was interrupted continues with the same responses that it would have had.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        end: Sequence[int],
        pad: int,
        rows: int,
        computing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """end: tokens that end a response; rows: responses generated at a time; computing: the context of a chunk"""
        self.model, self.tokenizer, self.end, self.pad, self.computing = model, tokenizer, end, pad, computing
        self.together = self.rows = rows
        self.kept: dict[int, Tensor] = {}  # by session, keys and values of its turns
        self.reproducible = (
            f"the {rows} rows of a chunk are computed together: with another --rows, --limit or --samples the last "
            "bits of the logits differ, and seldom a token"
        )

    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        """As Sampler does. Raises ArithmeticError for logits that are not finite, before any response with them."""
        rollouts: dict[int, list[Rollout]] = {}
        for number, chunk in self._chunks(requests):
            if all(i in done for i, *_ in chunk):
                continue
            portion = []
            for (i, _, request), rollout in zip(chunk, self._generate(number, chunk), strict=True):
                of_request = rollouts.setdefault(i, [])
                of_request.append(rollout)
                if len(of_request) == request.n and i not in done:
                    portion.append((i, rollouts.pop(i)))
            yield portion

    def _chunks(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[_Place]]]:
        """Chunks of one benchmark and setting, numbered for each of them."""

        def setting(place: _Place) -> tuple[Any, ...]:
            request = place[2]
            return request.key[:1], request.temperature, request.top_p, request.stop, request.end

        places = [(i, k, request) for i, request in enumerate(requests) for k in range(request.n)]
        for _, same in groupby(places, setting):
            ordered = sorted(same, key=lambda place: (len(place[2].prompt_ids), place[0]))
            for number, begin in enumerate(range(0, len(ordered), self.rows)):
                yield number, ordered[begin : begin + self.rows]

    def _generate(self, number: int, chunk: Sequence[_Place]) -> list[Rollout]:
        requests = [request for *_, request in chunk]
        seed = requests[0].seed
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        seeds = None if isinstance(seed, StepSeed) else [request.seed_at(i) + k for i, k, request in chunk]
        # Joint numbers come from torch's global generator: it is seeded here, and its state is restored afterwards.
        with self.computing(), torch.random.fork_rng(devices=devices):
            if isinstance(seed, StepSeed):
                torch.manual_seed(seed.of_chunk(number))
            try:
                return generate(
                    self.model,
                    requests,
                    end=self.end,
                    pad=self.pad,
                    seeds=seeds,
                    tokenizer=self.tokenizer,
                    kept=self.kept,
                )
            except torch.OutOfMemoryError as error:
                raise EngineLost(
                    f"{len(chunk)} responses at a time are too many for the GPU; lower --rows of run_bench.py, or "
                    "LocalEngine.generation_rows. It decides what is drawn: a run with a checkpoint goes on with "
                    "--resume and LocalEngine.sampler = 'vllm', or a new one with fewer rows from there (--from "
                    "CHECKPOINT --with-buffer)"
                ) from error

    def forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self.kept.pop(session, None)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "transformers",
            "version": transformers.__version__,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "rows": self.rows,
            "threads": torch.get_num_threads(),
        }


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    end: Sequence[int],
    pad: int,
    seeds: Sequence[int] | None = None,
    tokenizer: Any = None,
    kept: dict[int, Tensor] | None = None,
) -> list[Rollout]:
    """One ungraded response to each request.

    The model's own generation config is not used: with its top-k, top-p or repetition penalty the samples would not
    come from the policy, and every importance weight would be wrong. The end token stays in the response; a response
    without one has finish 'length'. For each position one number is drawn per row, also for rows that have ended, so
    the samples of a row do not depend on when the others end.

    Args:
        requests: with one temperature, top_p, end and stop, all turns or none
        end: tokens that end a response, beside those of the requests
        seeds: one for each request, whose response then depends on no other row (but for the last bits of its logits,
            which change with the shape of the batch); None: torch's global generator
        tokenizer: by which texts that end a response are seen, with special tokens; needed where there are some
        kept: by session, keys and values of its turns before: they are taken from here, and a turn that is not the last
            one leaves its own

    Raises ArithmeticError if logits are not finite, up to CHECK_EVERY tokens later but before any response is returned,
    and ValueError if the model's cache has no rows to select, or requests differ in what is one for all.
    """
    temperature, top_p, more_ends, stop = _common_settings(requests)
    kept = {} if kept is None else kept
    going_on = {i: one.session for i, one in enumerate(requests) if one.session is not None and not one.last_turn}
    ends = torch.tensor(sorted({*end, *more_ends}), device=model.device)
    prompts = [tuple(request.prompt_ids) for request in requests]
    index = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}  # each prompt once
    owner = [index[prompt] for prompt in prompts]
    limits = [request.max_tokens for request in requests]
    uniforms = _uniforms(len(requests), seeds, model.device)
    batch = Batch(model, list(index), owner, pad, max(limits) - 1, _taken(kept, requests, owner))

    def draw(rows: Tensor) -> Tensor:
        return sample(batch.logits, temperature, next(uniforms)[rows], top_p) if temperature else batch.logits.argmax(1)

    def ends_itself(token: Tensor, so_far: Tensor, rows: Tensor) -> Tensor:
        ended = torch.isin(token, ends)
        return ended | _with_text(so_far, rows, stop, tokenizer) if stop else ended

    def leave(rows: Tensor, ended: Tensor) -> None:
        if going_on:
            kept.update(_states_left(batch, rows, ended, going_on))

    return _rollouts(*_sampled(batch, limits, pad, draw, ends_itself, leave), limits)


def _common_settings(requests: Sequence[Request]) -> tuple[float, float, tuple[int, ...], tuple[str, ...]]:
    """Temperature, top_p, end and stop of all requests."""
    settings = {(one.temperature, one.top_p, one.end, one.stop, one.session is None) for one in requests}
    if len(settings) != 1:
        raise ValueError(f"requests of one call differ in temperature, top_p, end, stop or in being turns: {settings}")
    ((temperature, top_p, end, stop, _),) = settings
    return temperature, top_p, end, stop


def _sampled(
    batch: Batch, limits: Sequence[int], pad: int, draw: Draw, ends_itself: EndsItself, leave: Leave
) -> tuple[Tensor, Tensor]:
    """Tokens (N, T), filled up with pad, and lengths (N,), 0 of the responses that did not end by themselves.

    limits: tokens of each response, at most
    """
    n, longest, device = len(limits), max(limits), batch.logits.device
    tokens = torch.full((n, longest), pad, device=device)
    rows = torch.arange(n, device=device)  # (R,) the responses that have not ended
    lengths = torch.zeros(n, dtype=torch.long, device=device)
    most = torch.tensor(limits, device=device)
    finite = torch.ones(longest, dtype=torch.bool, device=device)  # are the logits of each token?
    for position in range(longest):
        finite[position] = batch.logits.amax(1).isfinite().all()
        if (position + 1) % CHECK_EVERY == 0:
            _check(finite)
        token = draw(rows)
        tokens[rows, position] = token
        ended = ends_itself(token, tokens[:, : position + 1], rows)
        lengths[rows] = torch.where(ended, position + 1, 0)
        ended |= position + 1 >= most[rows]
        leave(rows, ended)
        going = ended.logical_not().nonzero().squeeze(1)
        if not len(going) or position + 1 == longest:
            break
        if len(going) < len(rows):
            going = batch.keep(going)
            rows, token = rows[going], token[going]
        batch.append(token)
    _check(finite)
    return tokens, lengths


def _with_text(so_far: Tensor, rows: Tensor, stop: Sequence[str], tokenizer: Any) -> Tensor:
    """so_far: (N, T) tokens → (R,): whether one of these texts is among the last tokens of each of the rows."""
    tail = 1 + max(len(text.encode()) for text in stop)  # tokens: each has a byte at least
    texts = tokenizer.batch_decode(so_far[rows, -tail:].to("cpu").tolist(), skip_special_tokens=False)
    return torch.tensor([any(ending in text for ending in stop) for text in texts], device=so_far.device)


def _states_left(batch: Batch, rows: Tensor, ended: Tensor, sessions: Mapping[int, int]) -> dict[int, Tensor]:
    """By session, keys and values of those rows that have ended. sessions: by the number of a request"""
    over, numbers = ended.to("cpu").nonzero().squeeze(1), rows.to("cpu")
    left = {
        sessions[number]: batch.computed(row)
        for row, number in zip(over.tolist(), numbers[over].tolist(), strict=True)
        if number in sessions
    }
    return {session: states for session, states in left.items() if states is not None}


def _rollouts(tokens: Tensor, lengths: Tensor, limits: Sequence[int]) -> list[Rollout]:
    """tokens (N, T); lengths (N,), 0 of those that were cut off at their limit"""
    responses = torch.cat((lengths[:, None], tokens), 1).to("cpu", torch.int32).numpy()  # one copy to the host
    return [
        Rollout(response[: length or limit].copy(), "stop" if length else "length")
        for length, response, limit in zip(responses[:, 0], responses[:, 1:], limits, strict=True)
    ]


def _taken(kept: dict[int, Tensor], requests: Sequence[Request], owner: Sequence[int]) -> list[Tensor] | None:
    """Of each different prompt; None if one is missing. They are kept no longer."""
    states = [None if one.session is None else kept.pop(one.session, None) for one in requests]
    of_prompt = dict(zip(owner, states, strict=True))  # in their order
    taken = [tensor for tensor in of_prompt.values() if tensor is not None]
    return taken if taken and len(taken) == len(of_prompt) else None


def _check(finite: Tensor) -> None:
    if not finite.all():
        first = int(finite.int().argmin()) + 1
        raise ArithmeticError(f"the logits of token {first} of a response are not finite")


def _uniforms(rows: int, seeds: Sequence[int] | None, device: torch.device) -> Iterator[Tensor]:
    """The random numbers of each position, (rows,) float64 in [0, 1)."""
    while seeds is None:
        yield torch.rand(rows, dtype=torch.float64, device=device)
    generators = [np.random.default_rng(seed) for seed in seeds]
    while True:
        numbers = np.stack([generator.random(DRAWN) for generator in generators], axis=1)
        yield from torch.from_numpy(numbers).to(device)  # (positions, rows)


def sample(logits: Tensor, temperature: float, uniform: Tensor, top_p: float = 1.0) -> Tensor:
    """logits (R, V), uniform (R,) float64 in [0, 1) → tokens (R,): the first whose cumulative probability exceeds it.

    This needs one number per row instead of V, so that drawing numbers for ended rows too costs nothing.

    top_p: only the most probable tokens of each row, which together reach this, can be sampled
    """
    probabilities = (logits.float() / temperature).softmax(1)
    if top_p < 1:
        ranked, order = probabilities.sort(dim=1, descending=True, stable=True)
        before = ranked.cumsum(1, dtype=torch.float64) - ranked  # what the more probable ones have together
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, ranked.where(before < top_p, 0))
    # First a block of tokens, then one of its tokens: summing in float64 over the whole vocabulary would take longer
    # than softmax. float32 would swallow tokens rarer than 1e-7.
    blocks = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(2, dtype=torch.float64)
    cumulative = sums.cumsum(1)
    aim = uniform[:, None] * cumulative[:, -1:]  # the total is 1 but for rounding
    block = _first_above(cumulative, aim)
    aim -= cumulative.gather(1, block) - sums.gather(1, block)
    aim.clamp_(min=0)  # rounding can make it negative, and an impossible first token would be chosen
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(1, dtype=torch.float64)
    token = block * BLOCK + _first_above(within, aim)
    return token.clamp_(max=logits.shape[1] - 1).squeeze(1)  # of NaN


def _first_above(cumulative: Tensor, aim: Tensor) -> Tensor:
    """cumulative: (R, N) float64, aim: (R, 1) → (R, 1): the first that exceeds it, whose own share is not 0 therefore.
    Where rounding has made `aim` as large as the last one, it is the first that equals the last."""
    below = torch.nextafter(cumulative[:, -1:], torch.zeros_like(aim))
    first = torch.searchsorted(cumulative, aim.minimum(below), right=True)
    return first.clamp_(max=cumulative.shape[1] - 1)  # of NaN
