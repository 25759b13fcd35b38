"""Rows of prompt and response in one sequence, each distinct prompt once: [prompt, response, response …, prompt …].

The K rows of a question share its prompt. Padded rows compute it K times; with short responses that is most of the work
of an update. Here embeddings, projections and MLPs see each token once and no padding. Attention has two parts: prompts
attend to themselves, responses to their prompt and themselves, never to each other. The gradients of a question's rows
add up in the prompt's keys and values, and in the hidden state that predicts their first tokens.

The model's own modules do the rest: this is an attention function (`AttentionInterface`) and the position of each token
within its row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..rows import ForwardRow

NAME = "packed_rows"  # of the attention function
# Rows are packed where copies of prompts are at least this share of their tokens, which is about what packing saves.
# With less, as in runs with long responses or of the chain models (a quarter), they are padded.
WORTHWHILE = 1 / 3
SHORTEST = 0.75  # of a table's longest span: the rest of the table is padding


def by_prompt(rows: Sequence[ForwardRow]) -> list[list[int]]:
    """Positions of the rows of each distinct prompt; within a prompt the longest response first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row.prompt), []).append(i)
    return [sorted(group, key=lambda i: (-len(rows[i].response), i)) for group in groups.values()]


def repeated_share(rows: Sequence[ForwardRow]) -> float:
    """The share of the rows' tokens that are in second and later copies of a prompt."""
    repeated = sum((len(group) - 1) * len(rows[group[0]].prompt) for group in by_prompt(rows))
    return repeated / max(1, sum(map(len, rows)))


def packed_batches(rows: Sequence[ForwardRow], token_budget: int) -> Iterator[list[int]]:
    """Positions of rows in batches of at most `token_budget` packed tokens, rows of a prompt together, longest first.

    A single row may exceed the budget. A prompt whose rows are cut is computed once in each of their batches.
    """
    part: list[int] = []
    tokens = 0
    for group in sorted(by_prompt(rows), key=lambda group: (-len(rows[group[0]]), group[0])):
        prompt, new = len(rows[group[0]].prompt), True
        for i in group:
            response = len(rows[i].response)
            if part and tokens + response + prompt * new > token_budget:
                yield part
                part, tokens, new = [], 0, True
            part.append(i)
            tokens += response + prompt * new
            new = False
    if part:
        yield part


class Span(NamedTuple):
    """Consecutive tokens of the packed sequence that attend to a context before them, and causally to themselves."""

    begin: int
    length: int
    context: int = 0  # where it begins
    context_length: int = 0


class Table:
    """Spans of similar length as rows of one attention.

    queries: (B, T), keys: (B, W): places in the packed sequence, padded on the right with 0
    mask: (B, 1, T, W), which keys a query sees. Padding is seen by padding alone, whose results nobody reads.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        queries = np.zeros((len(spans), max(span.length for span in spans)), np.int64)
        keys = np.zeros((len(spans), max(span.context_length + span.length for span in spans)), np.int64)
        for i, (begin, length, context, before) in enumerate(spans):
            queries[i, :length] = keys[i, before : before + length] = np.arange(begin, begin + length)
            keys[i, :before] = np.arange(context, context + before)
        last = np.array([span.context_length for span in spans])[:, None] + np.arange(queries.shape[1])  # (B, T)
        self.shape = queries.shape
        self.queries, self.keys = (torch.from_numpy(places.ravel()).to(device) for places in (queries, keys))
        self.mask = torch.from_numpy(np.arange(keys.shape[1]) <= last[:, None, :, None]).to(device)


class Packed:
    """The packed sequence of some rows, N tokens. A response's last token predicts nothing and is left out.

    ids, positions: (1, N); predicts: (T,), places of the tokens that predict the rows' response tokens, end to end
    tables: of the attention; order: (N,), where each token stands in the tables' queries, one after another
    """

    def __init__(self, rows: Sequence[ForwardRow], device: torch.device) -> None:
        ids: list[npt.NDArray[np.int64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        predicts: dict[int, npt.NDArray[np.int64]] = {}
        prompts, responses, end = [], [], 0
        for group in by_prompt(rows):
            prompt = Span(end, len(rows[group[0]].prompt))
            prompts.append(prompt)
            ids.append(np.asarray(rows[group[0]].prompt, np.int64))
            positions.append(np.arange(prompt.length))
            end += prompt.length
            for i in group:
                length = len(rows[i].response) - 1
                predicts[i] = np.array([prompt.begin + prompt.length - 1, *range(end, end + length)])
                if length:
                    responses.append(Span(end, length, prompt.begin, prompt.length))
                    ids.append(rows[i].response[:-1].astype(np.int64))
                    positions.append(np.arange(prompt.length, prompt.length + length))
                    end += length
        order, begin, self.tables = np.zeros(end, np.int64), 0, []
        for spans in (*_alike(prompts), *_alike(responses)):
            table = Table(spans, device)
            rows_of, width = table.shape
            for i, span in enumerate(spans):
                order[span.begin : span.begin + span.length] = np.arange(span.length) + begin + i * width
            begin += rows_of * width
            self.tables.append(table)
        self.ids, self.positions = (torch.from_numpy(np.concatenate(x))[None].to(device) for x in (ids, positions))
        self.predicts = torch.from_numpy(np.concatenate([predicts[i] for i in range(len(rows))])).to(device)
        self.order = torch.from_numpy(order).to(device)


def _alike(spans: list[Span]) -> Iterator[list[Span]]:
    """Spans by length, longest first, cut where they become much shorter."""
    spans = sorted(spans, key=lambda span: (-span.length - span.context_length, span.begin))
    while spans:
        longest = spans[0].length + spans[0].context_length
        n = sum(span.length + span.context_length >= SHORTEST * longest for span in spans)
        yield spans[:n]
        spans = spans[n:]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Packed | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, H·G, N, D); key, value: (1, H, N, D) → (1, N, H·G, D). Without `packed` transformers' own."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    heads = key.shape[1]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    grouped = query.shape[1] // heads
    results = []
    for table in packed.tables:
        rows, width = table.shape
        # The G query heads of a key-value head are queries of one attention: no key is copied for them.
        asked = query.index_select(0, table.queries).view(rows, width, heads, grouped, -1)
        asked = asked.permute(0, 2, 3, 1, 4).reshape(rows, heads, grouped * width, -1)
        keys, values = (
            x.index_select(0, table.keys).view(rows, -1, heads, x.shape[2]).transpose(1, 2) for x in (key, value)
        )
        mask = table.mask.repeat(1, 1, grouped, 1)
        result = scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling)
        result = result.view(rows, heads, grouped, width, -1).permute(0, 3, 1, 2, 4)  # (B, T, H, G, D)
        results.append(result.reshape(rows * width, heads * grouped, -1))
    return torch.cat(results).index_select(0, packed.order)[None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def refuses(model: PreTrainedModel) -> bool:
    """Whether something in the model's configuration forbids packing that a comparison of a few tokens would not show:
    attention that is not full, in a window or in chunks. Or whether it cannot be called as `hidden_states` does."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    takes = inspect.signature(model.base_model.forward).parameters
    called = "position_ids" in takes and any(one.kind is one.VAR_KEYWORD for one in takes.values())
    return kinds != {"full_attention"} or any(windows) or not model._supports_attention_backend or not called


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """The hidden states that predict the rows' response tokens, end to end: (T, D)."""
    # Left so: the backward pass of a checkpointed layer calls it again. All other calls get transformers' own.
    model.config._attn_implementation = NAME
    output = model.base_model(
        input_ids=packed.ids,
        position_ids=packed.positions,
        attention_mask=packed.tables[0].mask,  # not used: with a mask of 4 dimensions the model makes none of its own
        use_cache=False,
        packed=packed,
    )
    hidden: Tensor = output.last_hidden_state[0].index_select(0, packed.predicts)
    return hidden
