"""Batched decoding of transformers models: attention masks, sampling, decode steps and prefill."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from services.common.models.families import has_plain_scores, windows_of
from services.common.models.routers import RouterWatch
from services.common.models.routing_shape import RoutingShape
from services.rollout.engines.base import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    OnTokens,
    RoutedExperts,
    VersionRun,
    append_version,
)
from services.rollout.engines.stop_texts import Decode, ends_in_stop_text
from services.rollout.engines.torch.kv_slots import SlotCache
from services.wire.data.model_inputs import ModelInputs, model_arguments


class Visibility:
    """Builds attention masks in the form that a transformers model takes.

    A query attends to all earlier keys, or to those within its layer's window.

    Args:
        config: The model's ``config.json``.
        dtype: Dtype of the attention scores.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._windows = windows_of(config)
        self._by_kind = bool(config.get("layer_types"))
        self._dtype = dtype
        self._is_added = not has_plain_scores(config)

    def masks(self, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """Returns the masks of a forward pass.

        Args:
            queries: ``[N, Q]`` int64 positions.
            keys: ``[K]`` int64 positions.

        Returns:
            ``[N, 1, Q, K]``, a dict by layer type if the model has several. Bool, or an additive mask if the
            model caps scores or its heads have sinks.
        """
        masks = {
            kind: self._formed(_visible(queries, keys, window))
            for kind, window in self._windows.items()
        }
        return masks if self._by_kind else next(iter(masks.values()))

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

    The stream is a function of seed and counter alone (SplitMix64, Steele et al. 2014). A row
    therefore draws the same numbers in any batch, and a resumed sample can continue at any
    position.

    Args:
        seeds: ``[N]`` one seed per row.
        counters: ``[N]`` number of tokens that the row has drawn before.

    Returns:
        ``[N]`` in ``[0, 1)``, multiples of ``2**-52``.
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

    def padded(self, size: int) -> "Truncation":
        """Returns a copy with additional rows that allow all tokens."""
        missing = (0, size - len(self.top_p))
        return Truncation(
            top_p=pad(self.top_p, missing, value=1.0),
            top_k=pad(self.top_k, missing),
            min_p=pad(self.min_p, missing),
        )


def draw_tokens(
    logits: Tensor, temperatures: Tensor, numbers: Tensor, *, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting its cumulative distribution.

    Args:
        logits: ``[N, V]`` of any float type.
        temperatures: ``[N]`` float32; 0 takes the most probable token.
        numbers: ``[N]`` float64 in ``[0, 1)``, one per row.
        truncation: Restricts the tokens that may be drawn; None allows all. Log probabilities ignore it.

    Returns:
        ``[N]`` int64 tokens and ``[N]`` float32 log probabilities, ``log_softmax(logits / temperature)``;
        those of greedy rows are at temperature 1.
    """
    is_greedy = temperatures == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = logprobs.exp()
    if truncation is not None:
        probabilities = _truncate(probabilities, truncation)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # A number is at most 1 - 2**-52, so the target is below the total, and the first entry above it
    # belongs to a token of positive probability.
    targets = (numbers * cumulative[:, -1])[:, None]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    tokens = torch.where(is_greedy, scaled.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _truncate(probabilities: Tensor, truncation: Truncation) -> Tensor:
    """Sets the probabilities of excluded tokens to 0; the most probable token is always allowed."""
    ordered, places = probabilities.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    before = ordered.cumsum(dim=-1) - ordered
    top_k = torch.where(truncation.top_k == 0, ordered.shape[1], truncation.top_k)
    allowed = (rank < top_k[:, None]) & (before < truncation.top_p[:, None])
    allowed &= ordered >= truncation.min_p[:, None] * ordered[:, :1]
    allowed[:, 0] = True
    return torch.zeros_like(ordered).scatter(1, places, ordered * allowed)


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
    """Inputs of a step, one entry per row; ``[N]``."""

    tokens: NDArray[np.int64]
    """Last token of each request."""
    positions: NDArray[np.int64]
    """Position of that token."""
    temperatures: NDArray[np.float32]
    """Divisors of the logits; 0 is greedy."""
    numbers: NDArray[np.float64]
    """Random numbers in [0, 1)."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a step, one entry per row."""

    tokens: Tensor
    """``[N]`` int64."""
    logprobs: Tensor
    """``[N]`` float32."""
    experts: Tensor | None
    """``[N, layers, K]`` int64 experts chosen for the input token, if they are recorded."""

    def first(self, num_rows: int) -> "StepOutputs":
        """Returns the outputs of the first rows."""
        experts = None if self.experts is None else self.experts[:num_rows]
        return StepOutputs(self.tokens[:num_rows], self.logprobs[:num_rows], experts)


class DecodeStep:
    """Runs decode steps over the first ``N`` slots of a cache."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, watch: RouterWatch | None = None
    ) -> None:
        self._model = model
        self._watch = watch
        self._cache = cache
        self._device = model.device
        self._is_cuda = model.device.type == "cuda"
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._num_seen: dict[tuple[int, int], int] = {}
        self._layout = cache.layout
        self._visibility = Visibility(model.config.to_dict(), model.dtype)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, truncation: Truncation | None) -> StepOutputs:
        """Stores keys and values and draws one token per row; on a GPU, returns when both are done.

        Args:
            inputs: Inputs of all rows.
            truncation: Restricts the tokens that may be drawn; None allows all.
        """
        num_rows, span = len(inputs.tokens), int(inputs.positions.max()) + 1
        if not self._is_cuda:
            return self._compute(self._move(inputs), span, truncation)
        size, span = rounded_up(num_rows), max(rounded_up(span), _MIN_SPAN)
        self._cache.reserve(size, span)
        padded = _pad(inputs, size)
        graph = self._graph(size, span) if truncation is None else None
        if graph is not None:
            outputs = graph.replay(padded)
        else:
            if truncation is not None:
                truncation = truncation.padded(size)
            outputs = self._compute(self._move(padded), span, truncation)
        # A thread that waits in a copy to the host keeps other threads from launching GPU work, so
        # wait here.
        if outputs.tokens.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return outputs.first(num_rows)

    def forget(self) -> None:
        """Discards the captured graphs; called before weights or cache move in memory."""
        self._graphs.clear()

    def _compute(
        self, inputs: "_DeviceInputs", span: int, truncation: Truncation | None
    ) -> StepOutputs:
        positions = inputs.positions
        self._cache.begin_decode(positions, span)
        keys = torch.arange(span, device=self._device)
        logits = self._model(
            input_ids=inputs.tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._visibility.masks(positions[:, None], keys),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        drawn = draw_tokens(logits, inputs.temperatures, inputs.numbers, truncation=truncation)
        return StepOutputs(*drawn, None if self._watch is None else self._watch.chosen())

    def _move(self, inputs: StepInputs) -> "_DeviceInputs":
        return _DeviceInputs(
            tokens=torch.from_numpy(inputs.tokens).to(self._device),
            positions=torch.from_numpy(inputs.positions).to(self._device),
            temperatures=torch.from_numpy(inputs.temperatures).to(self._device),
            numbers=torch.from_numpy(inputs.numbers).to(self._device),
        )

    def _graph(self, size: int, span: int) -> "_Graph | None":
        """Returns the graph of a shape once the shape has occurred often enough, else None."""
        if self._cache.layout != self._layout:
            self._graphs.clear()
            self._layout = self._cache.layout
        key = size, span
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if key not in self._graphs and self._num_seen[key] > _CAPTURE_AFTER:
            self._graphs[key] = _Graph(self, size, span)
        return self._graphs.get(key)


@dataclass(frozen=True, slots=True)
class _DeviceInputs:
    """:class:`StepInputs` on the model's device."""

    tokens: Tensor
    positions: Tensor
    temperatures: Tensor
    numbers: Tensor


class _Graph:
    """Captured CUDA graph of a step of one shape."""

    def __init__(self, step: DecodeStep, size: int, span: int) -> None:
        empty = StepInputs(
            *(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.float32, float))
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
            compute(self._inputs, span, None)
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads may receive weights during the capture.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = compute(self._inputs, span, None)

    def replay(self, inputs: StepInputs) -> StepOutputs:
        """Runs the graph with these inputs; the next replay overwrites the outputs."""
        for name in StepInputs.__dataclass_fields__:
            source = torch.from_numpy(getattr(inputs, name))
            getattr(self._inputs, name).copy_(source, non_blocking=True)
        self._graph.replay()
        return self._outputs


def rounded_up(number: int) -> int:
    """Rounds up to the next ``2**k`` or ``3 * 2**k``, which wastes at most a third."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= number else power


def _pad(inputs: StepInputs, size: int) -> StepInputs:
    """Adds rows whose outputs are ignored."""
    num_missing = size - len(inputs.tokens)
    return StepInputs(
        tokens=np.pad(inputs.tokens, (0, num_missing)),
        positions=np.pad(inputs.positions, (0, num_missing)),
        temperatures=np.pad(inputs.temperatures, (0, num_missing), constant_values=1),
        numbers=np.pad(inputs.numbers, (0, num_missing)),
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
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    version_runs: list[VersionRun] = field(default_factory=list)
    experts: list[RoutedExperts] = field(default_factory=list)
    """Experts of the tokens from ``request.experts_from`` on."""

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
        )


class DecodeBatch:
    """Decodes all running requests one token at a time. Not thread-safe: the owner serializes calls.

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
    ) -> None:
        self._routing = routing
        self._watch = None if routing is None else RouterWatch(model)
        self._model = model
        self._decode = decode
        self._device = model.device
        self._cache = SlotCache()
        self._step = DecodeStep(model, self._cache, self._watch)
        self._visibility = Visibility(model.config.to_dict(), model.dtype)
        self._rows: list[_Row] = []
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
        return max((_final_length(row.request) for row in self._rows), default=0)

    @torch.inference_mode()
    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Adds requests and prefills their contexts.

        Requests whose model inputs the model refuses are removed; see :meth:`take_refused`.
        """
        first = len(self._rows)
        self._rows.extend(_Row(request, list(request.context_ids)) for request in requests)
        self._cache.reserve(len(self._rows), self.span)
        failures = self._prefill(range(first, len(self._rows)), notes_experts=True)
        for slot, error in failures.items():
            self._refused[self._rows[slot].request.request_id] = error
        self._remove(dict.fromkeys(failures, "aborted"))

    def take_refused(self) -> dict[str, Exception]:
        """Returns the errors of requests that :meth:`admit` removed since the last call, by request."""
        refused, self._refused = self._refused, {}
        return refused

    @torch.inference_mode()
    def recompute(self) -> None:
        """Fills the cache again, after the weights changed or the cache was released."""
        self._cache.reserve(len(self._rows), self.span)
        for error in self._prefill(range(len(self._rows))).values():
            raise error

    def forget(self) -> None:
        """Releases the cache's memory and the graphs that read it; requests keep their tokens."""
        self._step.forget()
        self._cache.clear()

    @torch.inference_mode()
    def step(self, weight_version: int) -> list[tuple[str, GenerationResult]]:
        """Draws one token for every request and returns the finished requests.

        Args:
            weight_version: Version of the live weights, recorded for each token.
        """
        outputs = self._step.run(self._inputs(), self._truncation())
        if outputs.experts is not None:
            for row, experts in zip(self._rows, self._as_told(outputs.experts), strict=True):
                row.experts.append(experts[None])
        finished: dict[int, FinishReason] = {}
        for slot, (row, token, logprob) in enumerate(
            zip(self._rows, outputs.tokens.tolist(), outputs.logprobs.tolist(), strict=True)
        ):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            append_version(row.version_runs, weight_version, 1)
            if row.request.on_tokens is not None:
                self._news.append((row.request.on_tokens, token, logprob))
            reason = self._finish_reason(row)
            if reason is not None:
                finished[slot] = reason
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

    def _inputs(self) -> StepInputs:
        requests = [row.request for row in self._rows]
        seeds = np.array([request.seed % 2**64 for request in requests], dtype=np.uint64)
        drawn = [row.request.draw_offset + len(row.logprobs) for row in self._rows]
        return StepInputs(
            tokens=np.array([row.tokens[-1] for row in self._rows]),
            positions=np.array([len(row.tokens) - 1 for row in self._rows]),
            temperatures=np.array([r.temperature for r in requests], dtype=np.float32),
            numbers=uniforms(seeds, np.array(drawn, dtype=np.uint64)),
        )

    def _truncation(self) -> Truncation | None:
        requests = [row.request for row in self._rows]
        if not any(request.is_truncated for request in requests):
            return None
        return Truncation(
            top_p=torch.tensor([request.top_p for request in requests], device=self._device),
            top_k=self._tensor([request.top_k for request in requests]),
            min_p=torch.tensor([request.min_p for request in requests], device=self._device),
        )

    def _finish_reason(self, row: _Row) -> FinishReason | None:
        request = row.request
        if row.tokens[-1] in request.stop_token_ids:
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
            slots: Slots of the requests.
            notes_experts: True to record the contexts' experts. A recomputation must not, because experts of
                tokens sampled under older weights stay as they were.

        Returns:
            Errors of contexts whose inputs besides tokens the model refuses, by slot.
        """
        slots_by_context: dict[_Context, list[int]] = {}
        for slot in slots:
            row = self._rows[slot]
            self.recomputed_tokens_total += row.num_sampled
            if tokens := tuple(row.tokens[:-1]):
                given = row.request.model_inputs
                context = (tokens, "" if given is None else given.digest)
                slots_by_context.setdefault(context, []).append(slot)
        for (tokens, _), owners in slots_by_context.items():
            self.prompt_tokens_total += len(tokens) * len(owners)
            self.shared_tokens_total += len(tokens) * (len(owners) - 1)
        failures: dict[int, Exception] = {}
        for contexts in _split_by_size(sorted(slots_by_context, key=lambda each: len(each[0]))):
            holders = [slots_by_context[context] for context in contexts]
            targets = [slot for own in holders for slot in own]
            sources = [row for row, own in enumerate(holders) for _ in own]
            longest = len(contexts[-1][0])
            inputs = self._tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in contexts])
            given = self._rows[targets[0]].request.model_inputs if contexts[0][1] else None
            try:
                experts = self._store(inputs, self._tensor(targets), self._tensor(sources), given)
            except Exception as error:
                if given is None:
                    raise
                # The rows are the user's, and the model's own checks raise various errors.
                failures |= dict.fromkeys(targets, error)
                continue
            if notes_experts and experts is not None:
                for (ids, _), own, told in zip(contexts, holders, experts, strict=True):
                    self._note_experts(own, told[: len(ids)])
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
            targets: Slots to fill.
            sources: Row that fills each slot.
            model_inputs: What the model takes besides the tokens of a single context. The pass is then not
                split, because it is not known to which tokens the inputs belong.

        Returns:
            ``[N, L, layers, K]`` chosen experts, if they are recorded.
        """
        num_rows, longest = inputs.shape
        num_tokens = max(1, _MAX_MASK // (num_rows * longest))
        arguments: dict[str, Tensor] = {}
        if model_inputs is not None:
            arguments = model_arguments(self._model.base_model, [model_inputs], self._device)
            num_tokens = longest
        chosen: list[RoutedExperts] = []
        for first in range(0, longest, num_tokens):
            end = min(first + num_tokens, longest)
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
                told = self._as_told(self._watch.chosen())
                chosen.append(told.reshape(num_rows, end - first, *told.shape[1:]))
        return np.concatenate(chosen, axis=1) if chosen else None

    def _note_experts(self, slots: Sequence[int], experts: RoutedExperts) -> None:
        for slot in slots:
            row = self._rows[slot]
            row.experts.append(experts[row.request.experts_from :])

    def _as_told(self, experts: Tensor) -> RoutedExperts:
        assert self._routing is not None
        told: RoutedExperts = experts.cpu().numpy().astype(self._routing.dtype)
        return told

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


def _final_length(request: GenerationRequest) -> int:
    return len(request.context_ids) + request.max_tokens


def _split_by_size(contexts: list[_Context]) -> list[list[_Context]]:
    """Splits contexts, sorted by length, into passes of bounded padded size.

    A context with model inputs has a pass of its own, in which nothing is padded.
    """
    passes: list[list[_Context]] = []
    alone = [[context] for context in contexts if context[1]]
    for context in contexts:
        if context[1]:
            continue
        if passes and (len(passes[-1]) + 1) * len(context[0]) <= _MAX_PREFILL_TOKENS:
            passes[-1].append(context)
        else:
            passes.append([context])
    return passes + alone
