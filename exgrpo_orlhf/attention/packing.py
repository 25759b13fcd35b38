"""Rows of prompt and response in one sequence, each distinct prompt once: [prompt, response, response …, prompt …].

The K rows of a question share its prompt. Padded rows compute it K times; with short responses that is most of the work
of an update. Here embeddings, projections and MLPs see each token once and no padding. Prompts attend to themselves,
responses to their prompt and themselves, never to each other: on a CPU in tables, on a GPU in one call. The gradients
of a question's rows add up in the prompt's keys and values, and in the hidden state that predicts their first tokens.

The model's own modules do the rest: this is an attention function (`AttentionInterface`) and the position of each token
within its row. What it asks of a model, shared prompts (`shared_prompt.py`) ask too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED, SHARED = "packed_rows", "shared_prompt"  # names of the attention functions
# Models pass these to every attention function, and full causal attention does not depend on them.
UNUSED = {"is_causal", "position_ids", "use_cache", "cache_position"}
# On a CPU rows are packed where copies of prompts are at least this share of their tokens, which is about what packing
# saves. With less, as in runs with long responses or of the chain models (a quarter), they are padded. (Two cores.)
WORTHWHILE = 1 / 3
SHORTEST = 0.75  # of a table's longest span: the rest of the table is padding


class Unfit(Exception):
    """The model asks for more than full causal attention."""


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model calls transformers' general attention (`sdpa`), as far as its configuration and its signature
    tell: full in every layer, without a window or chunks, for positions that it is given.

    What a layer asks for beyond that shows when attention is called (`refuse`).
    """
    text = model.config.get_text_config()  # of a model of images and text: its part for text
    takes = [inspect.signature(part.forward).parameters for part in (model, model.base_model)]
    return (
        model._supports_attention_backend
        and model.config._attn_implementation in ("sdpa", PACKED)  # PACKED computes padded rows by sdpa
        and all(getattr(text, name, None) is None for name in ("sliding_window", "attention_chunk_size"))
        and set(getattr(text, "layer_types", None) or ()) <= {"full_attention"}
        and all("position_ids" in arguments for arguments in takes)
        and all(any(parameter.kind is parameter.VAR_KEYWORD for parameter in arguments.values()) for arguments in takes)
    )


def goes_on(model: PreTrainedModel) -> bool:
    """Whether keys and values stay right in another batch: not where a layer sees the columns of a window, or where
    positions are rotated otherwise in a longer row."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return is_plain(model) and rope.get("rope_type") not in ("dynamic", "longrope")


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raises Unfit if a model passed more to an attention function than full causal attention needs.

    arguments: further ones of the function. Those that are None, False or 0 ask for nothing.
    """
    asked = [name for name, value in arguments.items() if name not in UNUSED and (isinstance(value, Tensor) or value)]
    if asked:
        raise Unfit(f"attention is called with {', '.join(asked)}")


@contextmanager
def attention_is(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model's attention is the function of that name; afterwards it is again what it was."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


class PackedRow(Protocol):
    """prompt: token ids (P,); token_ids: int32 (T,), of the response; actions: bool (T,), of the tokens that are
    measured, or None: all; targets: int32 (A,), these. Its length is P + T."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def actions(self) -> npt.NDArray[np.bool_] | None: ...

    @property
    def targets(self) -> npt.NDArray[np.int32]: ...

    def __len__(self) -> int: ...


def by_prompt(rows: Sequence[PackedRow]) -> list[list[int]]:
    """Positions of the rows of each distinct prompt; within a prompt the longest response first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row.prompt), []).append(i)
    lengths = [len(row.token_ids) for row in rows]
    return [sorted(group, key=lambda i: (-lengths[i], i)) for group in groups.values()]


def repeated_share(rows: Sequence[PackedRow]) -> float:
    """The share of the rows' tokens that are in second and later copies of a prompt."""
    repeated = sum((len(group) - 1) * len(rows[group[0]].prompt) for group in by_prompt(rows))
    return repeated / max(1, sum(map(len, rows)))


def packed_batches(rows: Sequence[PackedRow], token_budget: int) -> Iterator[list[int]]:
    """Positions of rows in batches of at most `token_budget` packed tokens, rows of a prompt together, longest first.

    A single row may exceed the budget. A prompt whose rows are cut is computed once in each of their batches.
    """
    part: list[int] = []
    tokens = 0
    for group in sorted(by_prompt(rows), key=lambda group: (-len(rows[group[0]]), group[0])):
        prompt, new = len(rows[group[0]].prompt), True
        for i in group:
            response = len(rows[i].token_ids)
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
    causal: no span has a context. Then query t sees the keys up to t, and no mask is needed.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        queries = np.zeros((len(spans), max(span.length for span in spans)), np.int64)
        keys = np.zeros((len(spans), max(span.context_length + span.length for span in spans)), np.int64)
        for i, (begin, length, context, before) in enumerate(spans):
            queries[i, :length] = keys[i, before : before + length] = np.arange(begin, begin + length)
            keys[i, :before] = np.arange(context, context + before)
        self.causal = not any(span.context_length for span in spans)
        self._last = np.array([span.context_length for span in spans])[:, None] + np.arange(queries.shape[1])  # (B, T)
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}
        self.shape = queries.shape
        self.queries, self.keys = (torch.from_numpy(places.ravel()).to(device) for places in (queries, keys))
        self._columns = keys.shape[1]

    def mask(self, grouped: int, dtype: torch.dtype) -> Tensor:
        """(B, 1, G · T, W), added to scores: -inf where a query does not see a key. Padding is seen by padding alone,
        whose results nobody reads.

        Every layer's backward pass keeps the mask that it was given: all of them are given the same tensor.
        """
        if (grouped, dtype) not in self._masks:
            visible = torch.from_numpy(np.arange(self._columns) <= self._last[:, None, :, None])
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
            self._masks[grouped, dtype] = mask.repeat(1, 1, grouped, 1).to(self.queries.device)
        return self._masks[grouped, dtype]


class OneCall:
    """Attention of all spans, in the sequence's order, in one call: flash attention, for GPUs and half precision.

    places: (M,), of each span's keys in the packed sequence, its context and itself, one span after another
    ends: int32 (S + 1,), of the S spans' queries, and of their keys; longest: the most queries, and keys, of a span
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        places = [np.r_[x.context : x.context + x.context_length, x.begin : x.begin + x.length] for x in spans]
        lengths = [x.length for x in spans], [*map(len, places)]
        self.places = torch.from_numpy(np.concatenate(places)).to(device)
        self.ends = [torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)).to(device) for sizes in lengths]
        self.longest = [max(sizes) for sizes in lengths]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Any:
        """query: (N, H·G, D); key, value: (N, H, D) → (N, H·G, D). Raises RuntimeError for what the kernel lacks."""
        from torch.nn.attention.varlen import varlen_attn

        # Keys are gathered in float32, in which the gradients of a prompt's copies are added up.
        key, value = (x.float().index_select(0, self.places).to(query.dtype) for x in (key, value))
        lengths: Any = (*self.ends, *self.longest)
        causal: Any = {"window_size": (-1, 0), "enable_gqa": True}  # a span's last query sees its last key
        return varlen_attn(query, key, value, *lengths, scale=scaling, **causal)


class Packed:
    """The packed sequence of some rows, N tokens. A response's last token predicts nothing and is left out.

    ids, positions: (1, N); predicts: (A,), places of the tokens that predict the rows' actions, end to end
    tables: of the attention; order: (N,), where each token stands in the tables' queries, one after another
    one_call: the attention instead of tables, or None
    mask: (1, 1, N, N), for the model, which then makes none of its own: `attention` does not read it
    """

    def __init__(self, rows: Sequence[PackedRow], device: torch.device, one_call: bool = False) -> None:
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
                length = len(rows[i].token_ids) - 1
                places = np.array([prompt.begin + prompt.length - 1, *range(end, end + length)])
                predicts[i] = places if rows[i].actions is None else places[rows[i].actions]
                if length:
                    responses.append(Span(end, length, prompt.begin, prompt.length))
                    ids.append(rows[i].token_ids[:-1].astype(np.int64))
                    positions.append(np.arange(prompt.length, prompt.length + length))
                    end += length
        self.one_call = OneCall(sorted(prompts + responses), device) if one_call else None
        order, begin, self.tables = np.zeros(end, np.int64), 0, []
        for spans in () if one_call else (*_alike(prompts), *_alike(responses)):
            table = Table(spans, device)
            rows_of, width = table.shape
            for i, span in enumerate(spans):
                order[span.begin : span.begin + span.length] = np.arange(span.length) + begin + i * width
            begin += rows_of * width
            self.tables.append(table)
        self.ids, self.positions = (torch.from_numpy(np.concatenate(x))[None].to(device) for x in (ids, positions))
        self.predicts = torch.from_numpy(np.concatenate([predicts[i] for i in range(len(rows))])).to(device)
        self.order = torch.from_numpy(order).to(device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, end, end)


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
    """query: (1, H·G, N, D); key, value: (1, H, N, D) → (1, N, H·G, D). Without `packed` transformers' own.

    Raises Unfit if the model asks for more than full causal attention.
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    refuse(kwargs)
    if attention_mask is not packed.mask:
        raise Unfit("the model changes its mask")
    heads = key.shape[1]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    grouped = query.shape[1] // heads
    # Autocast would convert a float32 mask in every layer, and does not know attention in one call.
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if packed.one_call is not None:
        return packed.one_call(query.to(dtype), key, value, scaling)[None], None
    results = []
    for table in packed.tables:
        rows, width = table.shape
        queries = query.index_select(0, table.queries).view(rows, width, heads, grouped, -1)
        queries = queries.permute(0, 2, 3, 1, 4)  # (B, H, G, T, D)
        keys, values = (
            x.index_select(0, table.keys).view(rows, -1, heads, x.shape[2]).transpose(1, 2) for x in (key, value)
        )  # (B, H, W, D)
        # The G query heads of a key-value head are heads of one attention, or queries of one head where a mask says
        # which is which: no key is copied for them.
        if table.causal:
            keys, values = (x.flatten(0, 1)[:, None].expand(-1, grouped, -1, -1) for x in (keys, values))
            result = scaled_dot_product_attention(queries.flatten(0, 1), keys, values, is_causal=True, scale=scaling)
        else:
            mask = table.mask(grouped, dtype)
            result = scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=mask, scale=scaling)
        result = result.view(rows, heads, grouped, width, -1).permute(0, 3, 1, 2, 4)  # (B, T, H, G, D)
        results.append(result.reshape(rows * width, heads * grouped, -1))
    return torch.cat(results).index_select(0, packed.order)[None], None


AttentionInterface.register(PACKED, attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """The hidden states that predict the rows' response tokens, end to end: (T, D). The model's attention is PACKED."""
    output = model.base_model(
        input_ids=packed.ids, position_ids=packed.positions, attention_mask=packed.mask, use_cache=False, packed=packed
    )
    hidden: Tensor = output.last_hidden_state[0].index_select(0, packed.predicts)
    return hidden
