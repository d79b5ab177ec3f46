"""A request that is decoded in parts, for engines that cannot continue one under new weights."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.engines.base import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    VersionRun,
    append_version,
)
from services.rollout.engines.stop_texts import Decode, ends_in_stop_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an engine decodes under one weight version."""

    part_id: str
    """Unique among all parts."""
    context_ids: list[int]
    """Prompt and everything before this part."""
    max_tokens: int
    """Most new tokens."""
    draw_offset: int
    """Tokens drawn under the request's seed before."""
    cache_salt: str
    """Blocks of the prefix cache are shared between parts of the same salt only."""
    request: GenerationRequest
    """Whose part it is: seed, temperature and the rest of the sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some more tokens of a part."""

    token_ids: Sequence[int]
    """New tokens."""
    logprobs: Sequence[float]
    """Log-probability of each."""
    cached_tokens: int = 0
    """Tokens of the part's context that were found in the prefix cache."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort`` in the last chunk."""


class Progress:
    """What a request has so far."""

    def __init__(self, request: GenerationRequest, decode: Decode | None) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.version_runs: list[VersionRun] = []
        self.part_id: str | None = None
        self.part_over = asyncio.Event()
        self.is_aborted = False
        self.ended = asyncio.Event()
        self._decode = decode

    @property
    def num_tokens(self) -> int:
        """Tokens of context and response."""
        return len(self.request.context_ids) + len(self.token_ids)

    def next_part(self, cache_salt: str) -> Part:
        """Describe what is left to decode."""
        request, num_done = self.request, len(self.token_ids)
        self.part_id = f"{request.request_id}+{num_done}/{cache_salt}"
        self.part_over.clear()
        return Part(
            part_id=self.part_id,
            context_ids=[*request.context_ids, *self.token_ids],
            max_tokens=request.max_tokens - num_done,
            draw_offset=request.draw_offset + num_done,
            cache_salt=cache_salt,
            request=request,
        )

    def end_part(self) -> None:
        """Note that the part makes no more tokens."""
        self.part_id = None
        self.part_over.set()

    def extend(self, chunk: Chunk, version: int) -> bool:
        """Take in tokens; True if they completed a stop text, and what came after it was left out."""
        first = len(self.token_ids)
        self.token_ids += chunk.token_ids
        end = self._end_of_stop_text(first)
        if end is not None:
            del self.token_ids[end:]
        num_kept = len(self.token_ids) - first
        self.logprobs += chunk.logprobs[:num_kept]
        append_version(self.version_runs, version, num_kept)
        if self.request.on_tokens is not None and num_kept:
            self.request.on_tokens(self.token_ids[first:], self.logprobs[first:])
        return end is not None

    def _end_of_stop_text(self, first: int) -> int | None:
        """Where a stop text is complete, if tokens from a place on complete one."""
        texts, decode = self.request.stop_texts, self._decode
        if not texts or decode is None:
            return None
        ends = range(first + 1, len(self.token_ids) + 1)
        return next((n for n in ends if ends_in_stop_text(texts, self.token_ids[:n], decode)), None)

    def result(self, reason: FinishReason) -> GenerationResult:
        """The result as it is now."""
        return GenerationResult(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_runs=tuple(self.version_runs),
            finish_reason=reason,
        )


def part_seed(seed: int, draw_offset: int) -> int:
    """A seed for what follows an offset, where random streams cannot be entered in their middle."""
    if draw_offset == 0:
        return seed
    digest = hashlib.sha256(json.dumps([seed, draw_offset]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
