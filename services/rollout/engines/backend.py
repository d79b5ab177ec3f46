"""Interface between :class:`~services.rollout.engines.external.ExternalEngine` and an external engine."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from services.rollout.engines.base import EngineCapabilities
from services.rollout.engines.request_segments import Segment, TokenChunk


class EngineDiedError(RuntimeError):
    """The engine's process died or does not respond; only a restart helps."""


class SegmentStream(Protocol):
    """Token stream of one segment."""

    async def next(self) -> TokenChunk:
        """Waits for the next chunk; a chunk with a finish reason is the last.

        Raises:
            EngineDiedError: If the engine died.
        """
        ...

    async def close(self) -> None:
        """Closes the stream and ends the segment if it still runs."""
        ...


class Backend(Protocol):
    """Operations that an external engine must provide."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Features of the engine."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Capacity of the KV cache in tokens, available after the start."""
        ...

    async def serve(self, started: Callable[[], None]) -> None:
        """Starts the engine, calls ``started``, and serves until cancelled.

        Raises:
            EngineDiedError: If the engine died.
        """
        ...

    async def submit(self, part: Segment) -> SegmentStream:
        """Submits a segment; from then on, :meth:`abort_segments` can end it."""
        ...

    async def abort_segments(self, segment_ids: Collection[str]) -> None:
        """Ends segments soon, with reason ``abort``; ignores unknown ids."""
        ...

    async def load(self, description: str) -> None:
        """Passes a description to every worker; called only while no segment produces tokens.

        Args:
            description: Describes shared tensors that replace all weights, or a command of ``in_place``.
        """
        ...

    async def score(self, name: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Computes the log probability of every token but the first, without cached prefixes."""
        ...

    async def sleep(self) -> None:
        """Releases the KV cache and the weights' memory.

        Called only while no segment exists; none is submitted before new weights.
        """
        ...

    async def wake(self) -> None:
        """Takes the memory back."""
        ...


class PausableBackend(Protocol):
    """Backend that can keep requests running across a weight change."""

    async def freeze(self) -> None:
        """Stops between two steps; segments keep their slots, tokens and cache."""
        ...

    async def thaw(self, version: int, *, recompute: bool) -> bool:
        """Continues; chunks attribute all tokens sampled from now on to ``version``.

        Args:
            version: Version of the weights loaded in the meantime.
            recompute: True to recompute caches under the new weights.

        Returns:
            True if the cache no longer contains anything computed with older weights.
        """
        ...
