"""Requests that an external engine decodes in segments."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.models.families import RoutingShape
from services.rollout.engines.base import (
    NO_LOGPROB,
    Decode,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
    VersionRun,
    append_version,
    ends_in_stop_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Stretch of a response that an external engine decodes in one request."""

    segment_id: str
    """Id, unique among all segments."""
    context_ids: list[int]
    """Prompt and all response tokens before this segment."""
    max_tokens: int
    """Max number of new tokens."""
    draw_offset: int
    """Number of tokens drawn earlier under the request's seed."""
    cache_salt: str
    """Salt of the prefix cache; only segments of the same salt share blocks."""
    experts_from: int
    """Index of the first token whose experts are not known yet."""
    request: GenerationRequest
    """Original request, with seed, temperature and the other sampling parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Consecutive tokens of a segment that arrived together."""

    token_ids: Sequence[int]
    """New tokens."""
    logprobs: Sequence[float]
    """Log probability of each token."""
    version_runs: Sequence[VersionRun] | None = None
    """Weight versions of the tokens; None if all have the version under which the segment began."""
    cached_tokens: int = 0
    """Tokens of the segment's context that were found in the prefix cache."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort`` in the last chunk, else None."""
    routed_experts: RoutedExperts | None = None
    """Chosen experts of the tokens that are not reported yet, from the segment's ``experts_from``."""
    sampling_mask: SamplingMask | None = None
    """Tokens that could be drawn for each token, if the request asks for them."""
    top_logprobs: TopLogprobs | None = None
    """Most likely tokens in place of each token, if the request asks for them."""


class RequestProgress:
    """Accumulates the tokens of one request across its segments."""

    def __init__(self, request: GenerationRequest, decode: Decode | None) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.version_runs: list[VersionRun] = []
        self.experts: list[RoutedExperts] = []
        self.masks: list[SamplingMask] = []
        self.top: list[TopLogprobs] = []
        self.segment_id: str | None = None
        self.segment_ended = asyncio.Event()
        self.is_aborted = False
        self.ended = asyncio.Event()
        self._decode = decode

    @property
    def num_tokens(self) -> int:
        """Number of tokens of context and response."""
        return len(self.request.context_ids) + len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of response tokens, including those sampled before the request reached this engine."""
        return self.request.draw_offset + len(self.token_ids)

    def next_segment(self, cache_salt: str) -> Segment:
        """Begins the segment that decodes the rest of the request."""
        request, num_done = self.request, len(self.token_ids)
        self.segment_id = f"{request.request_id}+{num_done}/{cache_salt}"
        self.segment_ended.clear()
        return Segment(
            segment_id=self.segment_id,
            context_ids=[*request.context_ids, *self.token_ids],
            max_tokens=request.max_tokens - num_done,
            draw_offset=request.draw_offset + num_done,
            cache_salt=cache_salt,
            experts_from=request.experts_from + sum(map(len, self.experts)),
            request=request,
        )

    def end_segment(self) -> None:
        self.segment_id = None
        self.segment_ended.set()

    def extend(self, chunk: TokenChunk, version: int) -> bool:
        """Adds a chunk's tokens, truncated after a completed stop text.

        Returns:
            True if a stop text was completed.
        """
        first = len(self.token_ids)
        self.token_ids += chunk.token_ids
        end = self._end_of_stop_text(first)
        if end is not None:
            del self.token_ids[end:]
        num_kept = len(self.token_ids) - first
        self.logprobs += chunk.logprobs[:num_kept]
        num_left = num_kept
        for run_version, count in chunk.version_runs or ((version, num_kept),):
            append_version(self.version_runs, run_version, min(count, num_left))
            num_left -= min(count, num_left)
        if chunk.routed_experts is not None:
            self.experts.append(chunk.routed_experts)
        if chunk.sampling_mask is not None:
            self.masks.append(first_masks(chunk.sampling_mask, num_kept))
        if chunk.top_logprobs is not None:
            self.top.append(chunk.top_logprobs[:num_kept])
        if self.request.on_tokens is not None and num_kept:
            self.request.on_tokens(self.token_ids[first:], self.logprobs[first:])
        return end is not None

    def _end_of_stop_text(self, first: int) -> int | None:
        """Returns the number of response tokens up to the first completed stop text, or None.

        Args:
            first: Index of the first token that may complete a stop text.
        """
        request, decode = self.request, self._decode
        if not request.stop_texts or decode is None:
            return None
        ends = range(first + 1, len(self.token_ids) + 1)
        ending = (n for n in ends if ends_in_stop_text(request, self.token_ids[:n], decode))
        return next(ending, None)

    def result(self, reason: FinishReason) -> GenerationResult:
        """Returns the tokens so far as a result."""
        return GenerationResult(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_runs=tuple(self.version_runs),
            finish_reason=reason,
            routed_experts=self._known_experts(),
            sampling_mask=np.concatenate(self.masks) if self.masks else None,
            top_logprobs=np.concatenate(self.top) if self.top else None,
        )

    def _known_experts(self) -> RoutedExperts | None:
        if not self.experts or not self.token_ids:
            return None
        # The engine may have reported experts of tokens after a stop text.
        return np.concatenate(self.experts)[: self.num_tokens - 1 - self.request.experts_from]


def convert_experts(experts: RoutedExperts, routing: RoutingShape) -> RoutedExperts:
    """Converts reported experts to our dtype and drops layers without experts.

    Args:
        experts: ``[tokens, layers, K]`` integers, of the layers with experts or of all layers.
    """
    if experts.shape[1] != len(routing.layers):
        experts = experts[:, routing.layers]
    converted: RoutedExperts = experts.astype(routing.dtype)
    return converted


def first_masks(masks: SamplingMask, count: int) -> SamplingMask:
    """Returns the masks of the first ``count`` tokens."""
    starts = np.flatnonzero(masks < 0)
    return masks if count >= len(starts) else masks[: starts[count]]


def encoded_masks(ids: NDArray[Any], starts: NDArray[Any]) -> SamplingMask:
    """Encodes the tokens that could be drawn as in the data dictionary.

    Args:
        ids: ``[S]`` tokens that could be drawn, for one token after the other.
        starts: ``[n]`` place of each token's first entry.
    """
    masks = np.array(ids, np.int32)
    masks[starts] = ~masks[starts]
    return masks


def top_table(ids: NDArray[Any], logprobs: NDArray[Any], count: int) -> TopLogprobs:
    """Returns ``[n, K + 1, 2]`` most likely tokens, with all other tokens at the end.

    Args:
        ids: ``[n, M]`` most likely tokens, most likely first.
        logprobs: ``[n, M]`` their log probabilities; -inf for those that cannot be drawn.
        count: Max number ``K`` of tokens.
    """
    values = np.maximum(np.asarray(logprobs, np.float64)[:, :count], NO_LOGPROB)
    rest = np.maximum(1.0 - np.exp(values).sum(1), 0.0)
    table = np.full((len(values), values.shape[1] + 1, 2), -1.0, np.float32)
    table[:, :-1, 0], table[:, :-1, 1] = ids[:, :count], values
    with np.errstate(divide="ignore"):
        table[:, -1, 1] = np.maximum(np.log(rest), NO_LOGPROB)
    return table


def segment_seed(seed: int, draw_offset: int) -> int:
    """Derives a seed for the tokens after an offset, for engines whose random streams always start at 0."""
    if draw_offset == 0:
        return seed
    digest = hashlib.sha256(json.dumps([seed, draw_offset]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
