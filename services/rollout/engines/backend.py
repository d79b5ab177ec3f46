"""What :class:`PartedEngine` needs of an engine of another project."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from services.rollout.engines.base import EngineCapabilities
from services.rollout.engines.request_segments import Segment, TokenChunk


class EngineDiedError(RuntimeError):
    """The engine's process is gone or does not answer; only a restart helps."""


class SegmentStream(Protocol):
    """The tokens of one part."""

    async def next(self) -> TokenChunk:
        """Return what came since; a chunk with a finish reason is the last. Raises EngineDiedError."""
        ...

    async def close(self) -> None:
        """Take no more; a part that still runs is ended."""
        ...


class Backend(Protocol):
    """What the adapter needs of an engine."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that its KV cache holds, once it has started."""
        ...

    async def serve(self, started: Callable[[], None]) -> None:
        """Start, call ``started``, and serve until cancelled. Raises EngineDiedError."""
        ...

    async def submit(self, part: Segment) -> SegmentStream:
        """Hand over a part; from then on :meth:`cut` reaches it."""
        ...

    async def cut(self, part_ids: Collection[str]) -> None:
        """End parts soon, with reason ``abort``; unknown ones are ignored."""
        ...

    async def load(self, description: str) -> None:
        """Hand a description to every worker, while no part makes tokens.

        Args:
            description: Of shared tensors that replace all weights, or an order of ``in_place``.
        """
        ...

    async def score(self, name: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of every token but the first; reads no cached prefix."""
        ...

    async def sleep(self) -> None:
        """Give up the KV cache and what the weights hold; no part is there, or comes before weights."""
        ...

    async def wake(self) -> None:
        """Take the memory back."""
        ...


class PausableBackend(Protocol):
    """A backend that can hold what runs while weights change."""

    async def freeze(self) -> None:
        """Stop between two steps; parts keep their place, their tokens and their cache."""
        ...

    async def thaw(self, version: int, *, recompute: bool) -> bool:
        """Go on; what is sampled from now on is of ``version``, and says so in its chunks.

        Args:
            version: Of the weights that were loaded meanwhile.
            recompute: Whether caches are computed anew under them.

        Returns:
            Whether nothing is cached any more that older weights computed.
        """
        ...
