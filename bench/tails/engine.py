"""A fake engine with a prefix cache, that takes time to compute a context."""

import asyncio
from collections.abc import Mapping
from typing import Any

from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.fake import FakeEngine


class CachingEngine(FakeEngine):
    """Counts the tokens of responses that are computed again.

    A response that goes on here finds what it has here, unless weights were adopted meanwhile and caches
    are recomputed. Its cache is never full.

    Args:
        kv_policy: Whether an adoption recomputes what runs: ``recompute`` or ``keep``.
        prefill_tokens_per_s: How fast contexts are computed.
    """

    def __init__(self, *, kv_policy: str, prefill_tokens_per_s: float, **others: Any) -> None:
        super().__init__(**others)
        self._recomputes = kv_policy == "recompute"
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._held: dict[str, int] = {}
        self.again_tokens_total = 0
        """To go on with a response, or under new weights."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Compute what is missing of the response so far, then decode."""
        member = request.request_id.partition("/")[0]
        missing = max(0, request.draw_offset - self._held.get(member, 0))
        if missing:
            self.again_tokens_total += missing
            await asyncio.sleep(missing / self._prefill_tokens_per_s)
        result = await super().generate(request)
        self._held[member] = request.draw_offset + len(result.token_ids)
        return result

    async def adopt_weights(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Stop, compute again what runs if that is the policy, and count further tokens to a version."""
        await self.pause()
        stall_s = 0.0
        if self._recomputes:
            self._held.clear()
            made = await self.peek()
            num_tokens = sum(
                self._running[name].request.draw_offset + len(result.token_ids)
                for name, result in made.items()
            )
            self.again_tokens_total += num_tokens
            stall_s = num_tokens / self._prefill_tokens_per_s
            await asyncio.sleep(stall_s)
        return stall_s + await super().adopt_weights(version, tensors)
