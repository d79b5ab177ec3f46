"""The requests that are being decoded: prefill, decode steps, recomputation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

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
from services.rollout.engines.decode_step import DecodeStep, StepInputs
from services.rollout.engines.draw import Truncation, uniforms
from services.rollout.engines.kv_slots import SlotCache
from services.rollout.engines.stop_texts import Decode, ends_in_stop_text
from services.rollout.engines.visibility import Visibility

_MAX_PREFILL_TOKENS = 16_384
"""Padded tokens of one prefill pass; bounds the memory of activations."""
_MAX_MASK = 1 << 25
"""Pairs of tokens in the mask of one prefill pass: longer contexts are stored in several."""


@dataclass(slots=True)
class _Row:
    """One running request; its place in the list is its slot."""

    request: GenerationRequest
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    version_runs: list[VersionRun] = field(default_factory=list)
    experts: list[RoutedExperts] = field(default_factory=list)
    """Of the tokens from ``request.experts_from`` on."""

    @property
    def num_sampled(self) -> int:
        """Tokens of the response, those from before it came here included."""
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
    """Decodes all running requests one token at a time. Not thread-safe; its owner calls in turn.

    Prefill stores the keys and values of a context without its last token. That token is the input of
    the next decode step, so first and later tokens take the same path and the language-model head
    runs only where a token is drawn.
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
        """Tokens of contexts that were stored."""
        self.recomputed_tokens_total = 0
        """Those of them that were sampled before."""
        self._news: list[tuple[OnTokens, int, float]] = []
        self.shared_tokens_total = 0
        """Those of them that another request in the same pass had as well."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def span(self) -> int:
        """Most tokens that a running request may come to hold."""
        return max((_final_length(row.request) for row in self._rows), default=0)

    @torch.inference_mode()
    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take in requests and prefill their contexts."""
        first = len(self._rows)
        self._rows.extend(_Row(request, list(request.context_ids)) for request in requests)
        self._cache.reserve(len(self._rows), self.span)
        self._prefill(range(first, len(self._rows)), notes_experts=True)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Fill the cache again, after the weights changed or it was forgotten."""
        self._cache.reserve(len(self._rows), self.span)
        self._prefill(range(len(self._rows)))

    def forget(self) -> None:
        """Give up the cache's memory, and the graphs that read it; requests keep their tokens."""
        self._step.forget()
        self._cache.clear()

    @torch.inference_mode()
    def step(self, weight_version: int) -> list[tuple[str, GenerationResult]]:
        """Draw one token for every request and return those that are finished.

        Args:
            weight_version: Version of the live weights, noted for each token.
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

    def tell(self) -> None:
        """Tell those who want to hear of tokens what the last step made."""
        for on_tokens, token, logprob in self._news:
            on_tokens((token,), (logprob,))
        self._news.clear()

    def abort(self, request_ids: Collection[str] | None) -> list[tuple[str, GenerationResult]]:
        """Remove requests (None: all) and return what they have so far."""
        return self._remove(
            {
                slot: "aborted"
                for slot, row in enumerate(self._rows)
                if request_ids is None or row.request.request_id in request_ids
            }
        )

    def peek(self) -> dict[str, GenerationResult]:
        """What all requests have so far."""
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
                "requests with stop texts are refused without a decoder"
            )
            response = row.tokens[len(request.context_ids) :]
            if ends_in_stop_text(request, response, self._decode):
                return "stop"
        return "length" if len(row.logprobs) >= request.max_tokens else None

    def _prefill(self, slots: Sequence[int], *, notes_experts: bool = False) -> None:
        """Compute each different context once and store it in every slot that has it.

        Args:
            slots: Of requests.
            notes_experts: Whether the experts of the contexts count: those of tokens that were sampled under
                older weights stay what they were.
        """
        slots_by_context: dict[tuple[int, ...], list[int]] = {}
        for slot in slots:
            self.recomputed_tokens_total += self._rows[slot].num_sampled
            context = tuple(self._rows[slot].tokens[:-1])
            if context:
                slots_by_context.setdefault(context, []).append(slot)
        for context, owners in slots_by_context.items():
            self.prompt_tokens_total += len(context) * len(owners)
            self.shared_tokens_total += len(context) * (len(owners) - 1)
        for contexts in _split_by_size(sorted(slots_by_context, key=len)):
            targets = [slot for context in contexts for slot in slots_by_context[context]]
            sources = [
                row for row, context in enumerate(contexts) for _ in slots_by_context[context]
            ]
            longest = len(contexts[-1])
            inputs = self._tensor(
                [[*context, *[0] * (longest - len(context))] for context in contexts]
            )
            experts = self._store(inputs, self._tensor(targets), self._tensor(sources))
            if notes_experts and experts is not None:
                for context, told in zip(contexts, experts, strict=True):
                    self._note_experts(slots_by_context[context], told[: len(context)])

    def _store(self, inputs: Tensor, targets: Tensor, sources: Tensor) -> RoutedExperts | None:
        """Run a pass, in parts whose masks are bounded.

        Args:
            inputs: ``[N, L]`` int64 contexts. Padding is on the right, where causal attention keeps it from
                every real token.
            targets: Slots to fill.
            sources: Row that fills each.

        Returns:
            ``[N, L, layers, K]`` experts that were chosen, if they are watched.
        """
        num_rows, longest = inputs.shape
        num_tokens = max(1, _MAX_MASK // (num_rows * longest))
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
        """Take finished requests out and move the last ones into their slots."""
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


def _split_by_size(contexts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Cut contexts, sorted by length, into passes of bounded padded size."""
    passes: list[list[tuple[int, ...]]] = []
    for context in contexts:
        if passes and (len(passes[-1]) + 1) * len(context) <= _MAX_PREFILL_TOKENS:
            passes[-1].append(context)
        else:
            passes.append([context])
    return passes
