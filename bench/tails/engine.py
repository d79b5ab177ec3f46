"""Fake engines with prefix caches, whose prefill of a context takes time."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from services.extras.fake_engine.engine import FakeEngine
from services.rollout.engines.base import GenerationRequest, GenerationResult


class Caches:
    """Caches of a run's engines, and counts of tokens that are recomputed, by reason.

    Attributes:
        after_updates: Tokens that were cached with other weights.
        after_kills: Tokens that no engine holds because the one that did was killed.
        elsewhere: Tokens that another engine holds.
    """

    def __init__(self) -> None:
        self.after_updates = self.after_kills = self.elsewhere = 0
        self._caches: list[dict[str, int]] = []
        self._last: dict[str, dict[str, int]] = {}
        self._times: Counter[tuple[str, int]] = Counter()

    @property
    def total(self) -> int:
        """Returns the number of recomputed tokens."""
        return self.after_updates + self.after_kills + self.elsewhere

    @property
    def most_times(self) -> int:
        """Returns the max number of times that a response was recomputed with one weight version."""
        return max(self._times.values(), default=0)

    def join(self) -> dict[str, int]:
        """Returns the cache of a new engine: tokens by member."""
        self._caches.append({})
        return self._caches[-1]

    def leave(self, cache: dict[str, int]) -> None:
        """Removes an engine with its cache."""
        self._caches = [other for other in self._caches if other is not cache]

    def go_on(self, member: str, cache: dict[str, int], *, needed: int, version: int) -> int:
        """Returns, and counts, those of a response's ``needed`` tokens that an engine has not cached."""
        here = min(needed, cache.get(member, 0))
        there = min(needed, max(other.get(member, 0) for other in self._caches))
        self.elsewhere += max(0, there - here)
        gone = needed - max(there, here)
        if any(other is self._last.get(member) for other in self._caches):
            self.after_updates += gone
        else:
            self.after_kills += gone
        self._last[member] = cache
        self._times[member, version] += needed > here
        return needed - here

    def update(self, tokens: Mapping[str, int], cache: dict[str, int], *, version: int) -> int:
        """Counts that an engine recomputes these members and evicts all others; returns the tokens."""
        cache.clear()
        total = sum(tokens.values())
        self.after_updates += total
        self._times.update((member, version) for member in tokens)
        return total


class CachingEngine(FakeEngine):
    """A fake engine whose recomputation takes time.

    A response that continues here finds its cache here, unless weights were adopted meanwhile and
    caches are recomputed. The cache is never full.

    Args:
        caches: Caches of all engines of the run.
        kv_policy: Treatment of running responses by an adoption: ``recompute`` or ``keep``.
        prefill_tokens_per_s: Rate of the prefill.
    """

    def __init__(
        self, *, caches: Caches, kv_policy: str, prefill_tokens_per_s: float, **others: Any
    ) -> None:
        super().__init__(**others)
        self._recomputes = kv_policy == "recompute"
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._caches, self._cache = caches, caches.join()

    def lose_cache(self) -> None:
        """Discards the cache, as the end of a process does."""
        self._caches.leave(self._cache)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Computes the missing part of the response so far, then decodes."""
        member = _member(request)
        missing = self._caches.go_on(
            member, self._cache, needed=request.draw_offset, version=self._weight_version
        )
        if missing:
            await asyncio.sleep(missing / self._prefill_tokens_per_s)
        result = await super().generate(request)
        self._cache[member] = request.draw_offset + len(result.token_ids)
        return result

    async def adopt_weights(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Stops, recomputes running responses if the policy says so, and tags later tokens with a version."""
        await self.pause()
        stall_s = 0.0
        if self._recomputes:
            results = await self.peek()
            running = [(self._running[name].request, result) for name, result in results.items()]
            tokens = {
                _member(request): request.draw_offset + len(result.token_ids)
                for request, result in running
            }
            num_tokens = self._caches.update(tokens, self._cache, version=version)
            stall_s = num_tokens / self._prefill_tokens_per_s
            await asyncio.sleep(stall_s)
        return stall_s + await super().adopt_weights(version, tensors)


def _member(request: GenerationRequest) -> str:
    return request.request_id.partition("/")[0]
