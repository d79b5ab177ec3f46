"""Batched decoding of transformers models: attention masks, sampling, decode steps and prefill."""

import math
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from services.common.models.experts import RouterWatch
from services.common.models.families import (
    RoutingShape,
    has_plain_scores,
    recurrent_module,
    windows_of,
)
from services.common.models.invariant import KEYS, token_multiple
from services.common.models.vision import vision_tower
from services.rollout.engines.base import (
    NO_LOGPROB,
    Decode,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    OnTokens,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
    VersionRun,
    append_version,
    ends_in_stop_text,
    fewer_top,
)
from services.rollout.engines.speculation import NgramSpeculator, num_equal
from services.wire.data.model_inputs import ModelInputs, model_arguments


class SlotCache(Cache):
    """Keys and values of the running requests, ``[slots, heads, tokens, head_dim]`` per layer.

    Running requests occupy the slots ``0..n-1`` without holes, so that a decode step attends over
    views and copies nothing. Before each forward pass the owner calls :meth:`begin_prefill` or
    :meth:`begin_decode`. Entries beyond a request's length are never attended to.

    A recurrent layer has the last inputs of its short convolution and a state instead, ``[slots, ...]``. It
    cannot distinguish padding from tokens, so contexts of one prefill pass must have the same length.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self._states: dict[int, Tensor] = {}
        self.num_slots = 0
        self.num_tokens = 0
        self._targets: Tensor | None = None
        self._sources: Tensor | None = None
        self._positions: Tensor | None = None
        self._first = self._span = 0

    @property
    def layout(self) -> tuple[int, int]:
        """Slots and tokens per slot; while they do not change, neither does the memory."""
        return self.num_slots, self.num_tokens

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Ensures room for that many slots and tokens per slot; sizes at least double when they grow."""
        slots, tokens = self.num_slots, self.num_tokens
        if num_slots > slots:
            slots = max(num_slots, 2 * slots)
        if num_tokens > tokens:
            tokens = max(num_tokens, 2 * tokens)
        if (slots, tokens) == (self.num_slots, self.num_tokens):
            return
        for buffers in (self._keys, self._values):
            for layer, old in buffers.items():
                buffers[layer] = old.new_zeros(slots, old.shape[1], tokens, old.shape[3])
                buffers[layer][: old.shape[0], :, : old.shape[2]] = old
        for buffers in (self._inputs, self._states):
            for layer, old in buffers.items():
                buffers[layer] = old.new_zeros(slots, *old.shape[1:])
                buffers[layer][: old.shape[0]] = old
        self.num_slots, self.num_tokens = slots, tokens

    def clear(self) -> None:
        """Frees all memory; requests must be stored again."""
        for buffers in (self._keys, self._values, self._inputs, self._states):
            buffers.clear()
        self.num_slots = self.num_tokens = 0

    def reset_states(self, slots: Tensor) -> None:
        """Empties the recurrent states of some slots, as before a request's first token."""
        for states in (*self._inputs.values(), *self._states.values()):
            states[slots] = 0

    def begin_prefill(self, targets: Tensor, sources: Tensor, *, first: int = 0) -> None:
        """Begins a pass over a part of contexts; tokens before the part must be stored already.

        Args:
            targets: ``[N]`` int64 slots to fill.
            sources: ``[N]`` int64 row that fills each slot, ascending; equal contexts share a row.
            first: Position of the part's first token.
        """
        self._targets, self._sources, self._positions = targets, sources, None
        self._first = first

    def begin_decode(self, positions: Tensor, span: int) -> None:
        """Begins a pass of ``Q`` tokens for each of the first ``N`` slots.

        Args:
            positions: ``[N, Q]`` int64 position of each new token; recurrent layers take one token.
            span: Number of tokens to attend over, greater than any position.
        """
        self._positions, self._span = positions, span
        self._targets = torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values and returns those to attend over."""
        if layer_idx not in self._keys:
            shape = (self.num_slots, key_states.shape[1], self.num_tokens, key_states.shape[3])
            self._keys[layer_idx] = key_states.new_zeros(shape)
            self._values[layer_idx] = value_states.new_zeros(*shape[:3], value_states.shape[3])
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert self._targets is not None, "no forward pass is prepared"
        if self._positions is None:
            assert self._sources is not None
            end = self._first + key_states.shape[2]
            keys[self._targets, :, self._first : end] = key_states[self._sources]
            values[self._targets, :, self._first : end] = value_states[self._sources]
            if self._first == 0:
                return key_states, value_states
            holders = self._holders()
            return keys[holders, :, :end], values[holders, :, :end]
        rows = self._targets[:, None]
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        num_rows = len(self._positions)
        return keys[:num_rows, :, : self._span], values[:num_rows, :, : self._span]

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns True if a recurrent layer must pass its inputs to :meth:`update_conv_state`.

        Otherwise the layer overwrites the result of :meth:`get_conv_state`, which is a copy in a prefill
        pass.
        """
        return self._positions is None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a layer's convolution, ``[N, channels, kernel]``; None at the start."""
        return self._recurrent(self._inputs, layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a layer's states, ``[N, ...]``; None at the start."""
        return self._recurrent(self._states, layer_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **kwargs: Any,
    ) -> Tensor:
        """Stores the last of a layer's new inputs and returns all that its convolution sees."""
        size = int(kwargs["conv_kernel_size"])
        before = self._recurrent(self._inputs, layer_idx)
        inputs = conv_states if before is None else torch.cat([before, conv_states], -1)
        newest = pad(inputs, (max(0, size - inputs.shape[-1]), 0))[..., -size:]
        self._keep(self._inputs, layer_idx, newest)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self._keep(self._states, layer_idx, recurrent_states)
        return recurrent_states

    def _recurrent(self, states_by_layer: dict[int, Tensor], layer: int) -> Tensor | None:
        if layer not in states_by_layer or (self._positions is None and self._first == 0):
            return None
        if self._positions is None:
            return states_by_layer[layer][self._holders()]
        return states_by_layer[layer][: len(self._positions)]

    def _keep(self, states_by_layer: dict[int, Tensor], layer: int, states: Tensor) -> None:
        assert self._targets is not None, "no forward pass is prepared"
        if layer not in states_by_layer:
            states_by_layer[layer] = states.new_zeros(self.num_slots, *states.shape[1:])
        slot_states = states if self._positions is not None else states[self._sources]
        states_by_layer[layer][self._targets] = slot_states

    def _holders(self) -> Tensor:
        """Returns ``[rows]`` int64: for each row of a prefill pass, a slot that stores it."""
        assert self._targets is not None
        assert self._sources is not None
        rows = torch.arange(int(self._sources[-1]) + 1, device=self._targets.device)
        return self._targets[torch.searchsorted(self._sources, rows)]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots over others, to close the holes that finished requests leave."""
        for buffers in (self._keys, self._values, self._inputs, self._states):
            for layer_states in buffers.values():
                layer_states[targets] = layer_states[sources]


class Visibility:
    """Builds attention masks in the form that a transformers model takes.

    A query attends to all earlier keys, or to those within its layer's window.

    Args:
        config: The model's ``config.json``.
        dtype: Dtype of the attention scores.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._windows = windows_of(config)
        self._kinds = set(config.get("layer_types") or ())
        self._dtype = dtype
        self._is_added = not has_plain_scores(config)

    def masks(self, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor | None]:
        """Returns the masks of a forward pass.

        Args:
            queries: ``[N, Q]`` int64 positions.
            keys: ``[K]`` int64 positions.

        Returns:
            ``[N, 1, Q, K]``, a dict by layer type if the model has several. Bool, or an additive mask if the
            model caps scores or its heads have sinks. Recurrent layers have None.
        """
        masks: dict[str, Tensor] = {
            kind: self._formed(_visible(queries, keys, window))
            for kind, window in self._windows.items()
        }
        if not self._kinds:
            return next(iter(masks.values()))
        return {kind: masks.get(kind) for kind in self._kinds}

    def _formed(self, visible: Tensor) -> Tensor:
        if not self._is_added:
            return visible
        lowest = torch.finfo(self._dtype).min
        return torch.zeros_like(visible, dtype=self._dtype).masked_fill(~visible, lowest)


def _visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    queries = queries[:, None, :, None]
    visible = queries >= keys
    return visible if window is None else visible & (queries - keys < window)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns the ``counters``-th number of each seed's random stream.

    The stream is a function of seed and counter alone (SplitMix64, Steele et al. 2014). A row therefore draws
    the same numbers in any batch, and a resumed sample can continue at any position.

    Args:
        seeds: ``[...]`` seeds.
        counters: ``[...]`` numbers of tokens that were drawn before, of a shape that broadcasts with seeds.

    Returns:
        ``[...]`` in ``[0, 1)``, multiples of ``2**-52``.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN
        bits = _mix(state) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Truncation parameters of each row: ``[N]`` float32 tensors, and ``[N]`` int64 ``top_k``."""

    top_p: Tensor
    """Min total probability of the allowed tokens; 1 allows all."""
    top_k: Tensor
    """Number of allowed tokens; 0 allows all."""
    min_p: Tensor
    """Min probability of an allowed token, relative to the most probable one; 0 allows all."""
    reported: Tensor
    """``[N]`` bool: rows whose allowed tokens are reported; their log probabilities are relative to them."""

    def repeated(self, count: int) -> "Truncation":
        """Returns a copy with every row ``count`` times in succession."""
        rows = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Truncation(**{name: row.repeat_interleave(count) for name, row in rows.items()})

    def padded(self, size: int) -> "Truncation":
        """Returns a copy with additional rows that allow all tokens."""
        padding = (0, size - len(self.top_p))
        return Truncation(
            top_p=pad(self.top_p, padding, value=1.0),
            top_k=pad(self.top_k, padding),
            min_p=pad(self.min_p, padding),
            reported=pad(self.reported, padding),
        )


def draw_tokens(
    logits: Tensor,
    temperatures: Tensor,
    numbers: Tensor,
    *,
    truncation: Truncation | None = None,
    num_top: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Draws one token per row by inverting its cumulative distribution.

    Args:
        logits: ``[N, V]`` of any float type.
        temperatures: ``[N]`` float32; 0 takes the most probable token.
        numbers: ``[N]`` float64 in ``[0, 1)``, one per row.
        truncation: Restricts the tokens that may be drawn; None allows all. Log probabilities ignore it,
            except in the reported rows.
        num_top: Number of most likely tokens to return.

    Returns:
        ``[N]`` int64 tokens and ``[N]`` float32 log probabilities, ``log_softmax(logits / temperature)``;
        those of greedy rows are at temperature 1. The third value is ``[N, V]`` bool, the tokens that could
        be drawn; None without truncation. The fourth is ``[N, K + 1, 2]`` float32, the most likely tokens as
        in :func:`most_likely`; None without ``num_top``.
    """
    is_greedy = temperatures == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    # Softmax, because exponentials of a whole batch would depend on a row's place in it.
    probabilities = torch.softmax(scaled, dim=-1)
    allowed = None
    if truncation is not None:
        probabilities = _truncate(probabilities, truncation)
        allowed = probabilities > 0
        relative = torch.log_softmax(scaled.masked_fill(~allowed, -math.inf), dim=-1)
        logprobs = torch.where(truncation.reported[:, None], relative, logprobs)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # A number is at most 1 - 2**-52, so the target is below the total, and the first entry above it
    # belongs to a token of positive probability.
    targets = (numbers * cumulative[:, -1])[:, None]
    sampled = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    tokens = torch.where(is_greedy, scaled.argmax(dim=-1), sampled)
    top = most_likely(logprobs, num_top) if num_top else None
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), allowed, top


def most_likely(logprobs: Tensor, count: int) -> Tensor:
    """Returns the most likely tokens of each row, ``[N, K + 1, 2]`` float32: token id and logprob.

    The last entry, with the id -1, has the logprob of all other tokens.

    Args:
        logprobs: ``[N, V]`` float32, -inf for tokens that cannot be drawn.
        count: Max number of tokens; ``K`` is at most ``V``.
    """
    values, ids = logprobs.topk(min(count, logprobs.shape[1]))
    rest = logprobs.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    ids_column = pad(ids.float(), (0, 1), value=-1.0)
    return torch.stack([ids_column, torch.cat([values, rest], 1).clamp(min=NO_LOGPROB)], -1)


def _truncate(probabilities: Tensor, truncation: Truncation) -> Tensor:
    """Sets the probabilities of excluded tokens to 0; the most probable token is always allowed.

    Like vLLM and transformers, ``top_p`` is relative to the ``top_k`` most probable tokens.
    """
    ordered, indices = probabilities.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    before = ordered.cumsum(dim=-1) - ordered
    top_k = torch.where(truncation.top_k == 0, ordered.shape[1], truncation.top_k)
    allowed = rank < top_k[:, None]
    total = torch.where(allowed, ordered, 0.0).sum(dim=-1, keepdim=True)
    allowed &= before < truncation.top_p[:, None] * total
    allowed &= ordered >= truncation.min_p[:, None] * ordered[:, :1]
    allowed[:, 0] = True
    return torch.zeros_like(ordered).scatter(1, indices, ordered * allowed)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scrambles 64 bits (SplitMix64)."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


_CAPTURE_AFTER = 4
"""Steps of one shape before a graph is captured; a capture costs about as much as a hundred steps save."""
_MIN_SPAN = 128


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step that computes ``Q`` tokens for each of ``N`` requests."""

    tokens: NDArray[np.int64]
    """``[N, Q]`` last token of each request, then those that were proposed to follow it."""
    positions: NDArray[np.int64]
    """``[N, Q]`` positions of these tokens."""
    rotary_positions: NDArray[np.int64]
    """``[N, Q]`` positions in the rotary embedding, which differ from ``positions`` after images."""
    temperatures: NDArray[np.float32]
    """``[N]`` divisors of the logits; 0 is greedy."""
    numbers: NDArray[np.float64]
    """``[N, Q]`` random numbers in [0, 1)."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a step: the token drawn after each input token."""

    tokens: Tensor
    """``[N, Q]`` int64."""
    logprobs: Tensor
    """``[N, Q]`` float32."""
    experts: Tensor | None
    """``[N, Q, layers, K]`` int64 experts chosen for the input tokens, if they are recorded."""
    allowed: Tensor | None = None
    """``[N, Q, V]`` bool: tokens that could be drawn; None without truncation."""
    top: Tensor | None = None
    """``[N, Q, K + 1, 2]`` float32: most likely tokens; None if no request asks for them."""

    def first(self, num_rows: int) -> "StepOutputs":
        experts, allowed, top = (
            None if output is None else output[:num_rows]
            for output in (self.experts, self.allowed, self.top)
        )
        return StepOutputs(self.tokens[:num_rows], self.logprobs[:num_rows], experts, allowed, top)


class DecodeStep:
    """Runs decode steps over the first ``N`` slots of a cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        watch: RouterWatch | None = None,
        *,
        is_invariant: bool = False,
    ) -> None:
        self._rows_multiple = token_multiple(model) if is_invariant else None
        self._model = model
        self._watch = watch
        self._cache = cache
        self._device = model.device
        self._is_cuda = model.device.type == "cuda"
        self._graphs: dict[tuple[int, int, int, int], _Graph] = {}
        self._num_seen: dict[tuple[int, int, int, int], int] = {}
        self._layout = cache.layout
        self._visibility = Visibility(model.config.to_dict(), model.dtype)
        # A graph's warm-up would advance the states of running requests.
        self._is_captured = recurrent_module(model.config.to_dict()) is None

    @torch.inference_mode()
    def run(
        self, inputs: StepInputs, truncation: Truncation | None, *, num_top: int = 0
    ) -> StepOutputs:
        """Stores keys and values and draws a token after each input; on a GPU, returns when both are done.

        Args:
            truncation: Restricts the tokens that may be drawn; None allows all.
            num_top: Number of most likely tokens to return.
        """
        num_rows, num_queries = inputs.tokens.shape
        span = int(inputs.positions.max()) + 1
        if self._is_cuda:
            size, span = rounded_up(num_rows), max(rounded_up(span), _MIN_SPAN)
        elif self._rows_multiple is not None:
            size, span = _multiple(num_rows, self._rows_multiple), _multiple(span, KEYS)
        else:
            return self._compute(self._move(inputs), span, truncation, num_top)
        self._cache.reserve(size, span)
        padded = _pad(inputs, size)
        is_captured = self._is_cuda and self._is_captured and truncation is None
        graph = self._graph(size, span, num_queries, num_top) if is_captured else None
        if graph is not None:
            outputs = graph.replay(padded)
        else:
            if truncation is not None:
                truncation = truncation.padded(size)
            outputs = self._compute(self._move(padded), span, truncation, num_top)
        # A thread that waits in a copy to the host keeps other threads from launching GPU work, so
        # wait here.
        if outputs.tokens.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return outputs.first(num_rows)

    def discard_graphs(self) -> None:
        """Discards the captured graphs; called before weights or cache move in memory."""
        self._graphs.clear()

    def _compute(
        self, inputs: "_DeviceInputs", span: int, truncation: Truncation | None, num_top: int
    ) -> StepOutputs:
        positions = inputs.positions
        self._cache.begin_decode(positions, span)
        keys = torch.arange(span, device=self._device)
        logits = self._model(
            input_ids=inputs.tokens,
            position_ids=inputs.rotary_positions,
            attention_mask=self._visibility.masks(positions, keys),
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        shape = positions.shape
        tokens, logprobs, allowed, top = draw_tokens(
            logits.flatten(0, 1),
            inputs.temperatures.repeat_interleave(shape[1]),
            inputs.numbers.flatten(),
            truncation=None if truncation is None else truncation.repeated(shape[1]),
            num_top=num_top,
        )
        experts = None if self._watch is None else self._watch.chosen().unflatten(0, shape)
        return StepOutputs(
            tokens.view(shape),
            logprobs.view(shape),
            experts,
            None if allowed is None else allowed.unflatten(0, shape),
            None if top is None else top.unflatten(0, shape),
        )

    def _move(self, inputs: StepInputs) -> "_DeviceInputs":
        arrays = {name: getattr(inputs, name) for name in StepInputs.__dataclass_fields__}
        return _DeviceInputs(
            **{name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        )

    def _graph(self, size: int, span: int, num_queries: int, num_top: int) -> "_Graph | None":
        """Returns the graph of a shape once the shape has occurred often enough, else None."""
        if self._cache.layout != self._layout:
            self._graphs.clear()
            self._layout = self._cache.layout
        key = size, span, num_queries, num_top
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if key not in self._graphs and self._num_seen[key] > _CAPTURE_AFTER:
            self._graphs[key] = _Graph(self, size, span, num_queries, num_top)
        return self._graphs.get(key)


@dataclass(frozen=True, slots=True)
class _DeviceInputs:
    """:class:`StepInputs` on the model's device."""

    tokens: Tensor
    positions: Tensor
    rotary_positions: Tensor
    temperatures: Tensor
    numbers: Tensor


class _Graph:
    """Captured CUDA graph of a step of one shape."""

    def __init__(
        self, step: DecodeStep, size: int, span: int, num_queries: int, num_top: int
    ) -> None:
        nothing = np.zeros((0, num_queries), np.int64)
        empty = StepInputs(
            nothing, nothing, nothing, np.zeros(0, np.float32), nothing.astype(np.float64)
        )
        self._inputs = step._move(_pad(empty, size))  # noqa: SLF001 -- a part of the step
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        compute = step._compute  # noqa: SLF001
        # At position 0, the warm-up below would overwrite running requests; the entries at span - 1 are
        # stored again before they are used.
        self._inputs.positions.fill_(span - 1)
        with torch.cuda.stream(stream):
            compute(self._inputs, span, None, num_top)
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads may receive weights during the capture.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = compute(self._inputs, span, None, num_top)

    def replay(self, inputs: StepInputs) -> StepOutputs:
        """Runs the graph with these inputs; the next replay overwrites the outputs."""
        for name in StepInputs.__dataclass_fields__:
            source = torch.from_numpy(getattr(inputs, name))
            getattr(self._inputs, name).copy_(source, non_blocking=True)
        self._graph.replay()
        return self._outputs


def _multiple(number: int, of: int) -> int:
    """Rounds up to a multiple."""
    return -(-number // of) * of


def rounded_up(number: int) -> int:
    """Rounds up to the next ``2**k`` or ``3 * 2**k``, which wastes at most a third."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= number else power


def _pad(inputs: StepInputs, size: int) -> StepInputs:
    """Adds rows whose outputs are ignored."""
    num_missing = size - len(inputs.tokens)
    rows = (0, num_missing), (0, 0)
    return StepInputs(
        tokens=np.pad(inputs.tokens, rows),
        positions=np.pad(inputs.positions, rows),
        rotary_positions=np.pad(inputs.rotary_positions, rows),
        temperatures=np.pad(inputs.temperatures, (0, num_missing), constant_values=1),
        numbers=np.pad(inputs.numbers, rows),
    )


_Context = tuple[tuple[int, ...], str]
"""Tokens of a context, and the digest of its model inputs; equal contexts are computed once."""

_MAX_PREFILL_TOKENS = 16_384
"""Max padded tokens of one prefill pass; bounds the memory of activations."""
_MAX_MASK = 1 << 25
"""Max token pairs in the mask of one prefill pass; longer contexts take several passes."""


@dataclass(slots=True)
class _Row:
    """Running request; its index in the list is its slot."""

    request: GenerationRequest
    tokens: "array[int]"
    """Context and response."""
    max_length: int
    """Number of tokens that context and response may reach."""
    offset: int = 0
    """Rotary position minus index, for tokens after the prompt's images."""
    logprobs: list[float] = field(default_factory=list)
    version_runs: list[VersionRun] = field(default_factory=list)
    experts: list[RoutedExperts] = field(default_factory=list)
    """Experts of the tokens from ``request.experts_from`` on."""
    masks: list[SamplingMask] = field(default_factory=list)
    """Tokens that could be drawn for each new token, if the request asks for them."""
    top: list[TopLogprobs] = field(default_factory=list)
    """Most likely tokens in place of each new token, if the request asks for them."""

    @property
    def num_sampled(self) -> int:
        """Number of response tokens, including those sampled before the request reached this engine."""
        return self.request.draw_offset + len(self.logprobs)

    def result(self, reason: FinishReason) -> GenerationResult:
        return GenerationResult(
            token_ids=tuple(self.tokens[len(self.request.context_ids) :]),
            logprobs=tuple(self.logprobs),
            version_runs=tuple(self.version_runs),
            finish_reason=reason,
            routed_experts=np.concatenate(self.experts) if self.experts and self.logprobs else None,
            sampling_mask=np.concatenate(self.masks) if self.masks else None,
            top_logprobs=np.concatenate(self.top) if self.top else None,
        )


class DecodeBatch:
    """Decodes all running requests step by step. Not thread-safe: the owner serializes calls.

    A step draws one token for each request. With speculation it also computes proposed tokens and draws
    after each of them, with the random numbers of those positions. A drawn token is kept if all proposals
    before it equal the tokens drawn in their places. That is rejection sampling for proposals that are not
    random (Leviathan et al., arXiv:2211.17192): a proposal is accepted with its probability, and otherwise
    the token in its place is drawn from the remaining ones. Kept tokens are those that decoding without
    proposals draws.

    Prefill stores the keys and values of a context without its last token. That token is the input
    of the next decode step. The first token thus takes the same path as later ones, and the
    language-model head runs only where a token is drawn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Decode | None = None,
        routing: RoutingShape | None = None,
        is_invariant: bool = False,
        speculator: NgramSpeculator | None = None,
    ) -> None:
        self._speculator = speculator
        self._length_multiple = token_multiple(model) if is_invariant else 1
        self._routing = routing
        self._watch = None if routing is None else RouterWatch(model)
        self._model = model
        self._decode = decode
        self._device = model.device
        self._cache = SlotCache()
        self._step = DecodeStep(model, self._cache, self._watch, is_invariant=is_invariant)
        self._visibility = Visibility(model.config.to_dict(), model.dtype)
        self._pads = recurrent_module(model.config.to_dict()) is None
        self._rows: list[_Row] = []
        self.tokens_total = 0
        """Tokens that were drawn and kept."""
        self.prompt_tokens_total = 0
        """Context tokens that were stored."""
        self.recomputed_tokens_total = 0
        """Stored context tokens that had been sampled before."""
        self._news: list[tuple[OnTokens, int, float]] = []
        self._refused: dict[str, Exception] = {}
        self.shared_tokens_total = 0
        """Stored context tokens shared with another request in the same pass."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def span(self) -> int:
        """Max length that any running request may reach."""
        return max(map(attrgetter("max_length"), self._rows), default=0)

    @torch.inference_mode()
    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Adds requests and prefills their contexts.

        Requests whose model inputs the model refuses are removed; see :meth:`pop_refused`.
        """
        first = len(self._rows)
        self._rows.extend(
            _Row(
                request,
                array("q", request.context_ids),
                len(request.context_ids) + request.max_tokens,
                self._offset(request.model_inputs),
            )
            for request in requests
        )
        self._cache.reserve(len(self._rows), self.span)
        failures = self._prefill(range(first, len(self._rows)), notes_experts=True)
        for slot, error in failures.items():
            self._refused[self._rows[slot].request.request_id] = error
        self._remove(dict.fromkeys(failures, "aborted"))

    def _offset(self, model_inputs: ModelInputs | None) -> int:
        if model_inputs is None or vision_tower(self._model) is None:
            return 0
        decoder: Any = self._model.base_model
        return int(decoder.position_offset(model_inputs.tensors))

    def pop_refused(self) -> dict[str, Exception]:
        """Returns the errors of requests that :meth:`admit` removed since the last call, by request."""
        refused, self._refused = self._refused, {}
        return refused

    @torch.inference_mode()
    def recompute(self) -> None:
        """Fills the cache again, after the weights changed or the cache was released."""
        self._cache.reserve(len(self._rows), self.span)
        for error in self._prefill(range(len(self._rows))).values():
            raise error

    def release_cache(self) -> None:
        """Releases the cache's memory and the graphs that read it; requests keep their tokens."""
        self._step.discard_graphs()
        self._cache.clear()

    @torch.inference_mode()
    def step(self, weight_version: int) -> list[tuple[str, GenerationResult]]:
        """Draws at least one token for every request and returns the finished requests.

        Args:
            weight_version: Version of the live weights, recorded for each token.
        """
        began = time.perf_counter()
        drafts = self._propose()
        num_top = max(map(attrgetter("request.top_logprobs"), self._rows))
        outputs = self._step.run(self._inputs(drafts), self._truncation(), num_top=num_top)
        finished: dict[int, FinishReason] = {}
        counts: list[int] = []
        for slot, (row, draft, tokens, logprobs) in enumerate(
            zip(self._rows, drafts, outputs.tokens.tolist(), outputs.logprobs.tolist(), strict=True)
        ):
            num_kept = 1 + num_equal(draft, tokens)
            request, num_before = row.request, len(row.logprobs)
            for token, logprob in zip(tokens[:num_kept], logprobs, strict=False):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                if request.on_tokens is not None:
                    self._news.append((request.on_tokens, token, logprob))
                reason = self._finish_reason(row, token)
                if reason is not None:
                    finished[slot] = reason
                    break
            counts.append(len(row.logprobs) - num_before)
            append_version(row.version_runs, weight_version, counts[-1])
        if outputs.experts is not None:
            experts_of_rows = self._to_array(outputs.experts)
            for row, count, experts in zip(self._rows, counts, experts_of_rows, strict=True):
                row.experts.append(experts[:count])
        if outputs.allowed is not None:
            self._note_masks(outputs.allowed, counts)
        if outputs.top is not None:
            self._note_top(outputs.top, counts)
        self.tokens_total += sum(counts)
        if self._speculator is not None:
            self._speculator.record(drafts, counts, time.perf_counter() - began)
        return self._remove(finished)

    def deliver_tokens(self) -> None:
        """Passes the tokens of the last step to the requests' callbacks."""
        for on_tokens, token, logprob in self._news:
            on_tokens((token,), (logprob,))
        self._news.clear()

    def abort(self, request_ids: Collection[str] | None) -> list[tuple[str, GenerationResult]]:
        """Removes requests (None: all) and returns their results so far."""
        return self._remove(
            {
                slot: "aborted"
                for slot, row in enumerate(self._rows)
                if request_ids is None or row.request.request_id in request_ids
            }
        )

    def peek(self) -> dict[str, GenerationResult]:
        """Returns the tokens so far of all requests."""
        return {row.request.request_id: row.result("aborted") for row in self._rows}

    def _propose(self) -> list[Sequence[int]]:
        """Returns the tokens proposed to follow each request's last one."""
        nothing: list[Sequence[int]] = [()] * len(self._rows)
        if self._speculator is None or not self._speculator.is_on(len(self._rows)):
            return nothing
        return [
            # The last token of a response is no input, so that proposals end one token earlier.
            self._speculator.propose(
                row.tokens, limit=row.request.max_tokens - len(row.logprobs) - 1
            )
            # A proposal may contain the placeholders of a prompt's images.
            if row.request.model_inputs is None
            else ()
            for row in self._rows
        ]

    def _inputs(self, drafts: Sequence[Sequence[int]]) -> StepInputs:
        seeds = np.array([row.request.seed % 2**64 for row in self._rows], dtype=np.uint64)
        num_drawn = np.array([row.num_sampled for row in self._rows], dtype=np.uint64)
        width = max(map(len, drafts))
        if width and self._device.type == "cuda":
            assert self._speculator is not None
            width = self._speculator.num_tokens  # one shape, for graphs
        steps = np.arange(1 + width)
        tokens = np.zeros((len(drafts), 1 + width), np.int64)
        tokens[:, 0] = [row.tokens[-1] for row in self._rows]
        for draft, new in zip(drafts, tokens, strict=True) if width else ():
            new[1 : 1 + len(draft)] = draft
        positions = np.array([len(row.tokens) - 1 for row in self._rows])[:, None] + steps
        # No request stores a token in the last place, because the last token of a response is no input.
        positions = np.minimum(positions, self.span - 1)
        offsets = np.array([row.offset for row in self._rows])[:, None]
        return StepInputs(
            tokens=tokens,
            positions=positions,
            rotary_positions=positions + offsets,
            temperatures=np.array([r.request.temperature for r in self._rows], dtype=np.float32),
            numbers=uniforms(seeds[:, None], num_drawn[:, None] + steps.astype(np.uint64)),
        )

    def _truncation(self) -> Truncation | None:
        requests = [row.request for row in self._rows]
        if not any(request.is_truncated or request.returns_mask for request in requests):
            return None
        return Truncation(
            top_p=torch.tensor([request.top_p for request in requests], device=self._device),
            top_k=self._tensor([request.top_k for request in requests]),
            min_p=torch.tensor([request.min_p for request in requests], device=self._device),
            reported=torch.tensor(
                [request.returns_mask for request in requests], device=self._device
            ),
        )

    def _finish_reason(self, row: _Row, last_token: int) -> FinishReason | None:
        request = row.request
        if last_token in request.stop_token_ids:
            return "stop"
        if request.stop_texts:
            assert self._decode is not None, (
                "requests with stop texts are rejected without a decoder"
            )
            response = row.tokens[len(request.context_ids) :]
            if ends_in_stop_text(request, response, self._decode):
                return "stop"
        return "length" if len(row.logprobs) >= request.max_tokens else None

    def _prefill(
        self, slots: Sequence[int], *, notes_experts: bool = False
    ) -> dict[int, Exception]:
        """Computes each distinct context once and stores it in every slot that has it.

        Args:
            notes_experts: True to record the contexts' experts. A recomputation must not record them, because
                the experts of tokens sampled under older weights stay as they were.

        Returns:
            Errors of contexts whose inputs besides tokens the model refuses, by slot.
        """
        self._cache.reset_states(self._tensor(list(slots)))
        slots_by_context: dict[_Context, list[int]] = {}
        for slot in slots:
            row = self._rows[slot]
            self.recomputed_tokens_total += row.num_sampled
            if tokens := tuple(row.tokens[:-1]):
                bundle = row.request.model_inputs
                context = (tokens, "" if bundle is None else bundle.digest)
                slots_by_context.setdefault(context, []).append(slot)
        for (tokens, _), owners in slots_by_context.items():
            self.prompt_tokens_total += len(tokens) * len(owners)
            self.shared_tokens_total += len(tokens) * (len(owners) - 1)
        failures: dict[int, Exception] = {}
        by_length = sorted(slots_by_context, key=lambda entry: len(entry[0]))
        for contexts in _split_by_size(by_length, pads=self._pads):
            holders = [slots_by_context[context] for context in contexts]
            targets = [slot for rows in holders for slot in rows]
            sources = [row for row, rows in enumerate(holders) for _ in rows]
            longest = _multiple(len(contexts[-1][0]), self._length_multiple)
            self._cache.reserve(len(self._rows), longest)
            inputs = self._tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in contexts])
            bundle = self._rows[targets[0]].request.model_inputs if contexts[0][1] else None
            try:
                experts = self._store(inputs, self._tensor(targets), self._tensor(sources), bundle)
            except Exception as error:
                if bundle is None:
                    raise
                # The rows are the user's, and the model's own checks raise various errors.
                failures |= dict.fromkeys(targets, error)
                continue
            if notes_experts and experts is not None:
                for (ids, _), rows, chosen_experts in zip(contexts, holders, experts, strict=True):
                    self._note_experts(rows, chosen_experts[: len(ids)])
        return failures

    def _store(
        self,
        inputs: Tensor,
        targets: Tensor,
        sources: Tensor,
        model_inputs: ModelInputs | None = None,
    ) -> RoutedExperts | None:
        """Runs a pass, split into parts with masks of bounded size.

        Args:
            inputs: ``[N, L]`` int64 contexts, padded on the right, where causal attention hides the
                padding from every real token.
            sources: Row that fills each slot.
            model_inputs: The model's inputs besides the tokens of a single context. The pass is then not
                split, because it is not known to which tokens the inputs belong.

        Returns:
            ``[N, L, layers, K]`` chosen experts, if they are recorded.
        """
        num_rows, longest = inputs.shape
        # A Mamba-2 mixer updates its state in place for a single token, but here the state is a copy: no part
        # after the first has one token.
        num_tokens = max(2, _MAX_MASK // (num_rows * longest))
        arguments: dict[str, Tensor] = {}
        if model_inputs is not None:
            arguments = model_arguments(self._model.base_model, [model_inputs], self._device)
            num_tokens = longest
        experts: list[RoutedExperts] = []
        starts = range(0, max(1, longest - 1), num_tokens)
        for first, end in pairwise([*starts, longest]):
            self._cache.begin_prefill(targets, sources, first=first)
            keys = torch.arange(end, device=self._device)
            positions = keys[None, first:]
            self._model.base_model(
                input_ids=inputs[:, first:end],
                position_ids=positions.expand(num_rows, -1),
                attention_mask=self._visibility.masks(positions, keys),
                past_key_values=self._cache,
                use_cache=True,
                **arguments,
            )
            if self._watch is not None:
                chosen_experts = self._to_array(self._watch.chosen())
                experts.append(
                    chosen_experts.reshape(num_rows, end - first, *chosen_experts.shape[1:])
                )
        return np.concatenate(experts, axis=1) if experts else None

    def _note_masks(self, allowed: Tensor, counts: Sequence[int]) -> None:
        """Adds the masks of each request's new tokens."""
        slot_steps = [
            (slot, step)
            for slot, row in enumerate(self._rows)
            if row.request.returns_mask
            for step in range(counts[slot])
        ]
        slots = [slot for slot, _ in slot_steps]
        rows, ids = allowed[slots, [step for _, step in slot_steps]].nonzero(as_tuple=True)
        sizes = torch.bincount(rows, minlength=len(slots)).tolist()
        mask_ids = ids.int().cpu()
        for slot, mask in zip(slots, mask_ids.split(sizes), strict=True):
            encoded = mask.numpy().copy()
            encoded[0] = ~encoded[0]
            self._rows[slot].masks.append(encoded)

    def _note_top(self, top: Tensor, counts: Sequence[int]) -> None:
        """Adds the most likely tokens in place of each request's new tokens."""
        top_tables = top.cpu().numpy()
        for row, count, tables in zip(self._rows, counts, top_tables, strict=True):
            if row.request.top_logprobs:
                row.top.append(fewer_top(tables[:count], row.request.top_logprobs))

    def _note_experts(self, slots: Sequence[int], experts: RoutedExperts) -> None:
        for slot in slots:
            row = self._rows[slot]
            row.experts.append(experts[row.request.experts_from :])

    def _to_array(self, experts: Tensor) -> RoutedExperts:
        assert self._routing is not None
        chosen_experts: RoutedExperts = experts.cpu().numpy().astype(self._routing.dtype)
        return chosen_experts

    @torch.inference_mode()
    def _remove(self, reasons: dict[int, FinishReason]) -> list[tuple[str, GenerationResult]]:
        """Removes finished requests and moves the last ones into their slots."""
        if not reasons:
            return []
        results = [
            (self._rows[slot].request.request_id, self._rows[slot].result(reason))
            for slot, reason in reasons.items()
        ]
        num_left = len(self._rows) - len(reasons)
        holes = [slot for slot in reasons if slot < num_left]
        movers = [slot for slot in range(num_left, len(self._rows)) if slot not in reasons]
        if holes:
            self._cache.move(self._tensor(movers), self._tensor(holes))
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        del self._rows[num_left:]
        return results

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)


def _split_by_size(contexts: list[_Context], *, pads: bool) -> list[list[_Context]]:
    """Splits contexts, sorted by length, into passes of bounded padded size.

    A context with model inputs gets a separate pass without padding. Without ``pads``, contexts of a pass
    have the same length.
    """
    passes: list[list[_Context]] = []
    alone = [[context] for context in contexts if context[1]]
    for context in contexts:
        if context[1]:
            continue
        is_joined = bool(passes) and (pads or len(passes[-1][0][0]) == len(context[0]))
        if is_joined and (len(passes[-1]) + 1) * len(context[0]) <= _MAX_PREFILL_TOKENS:
            passes[-1].append(context)
        else:
            passes.append([context])
    return passes + alone
