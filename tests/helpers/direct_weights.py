"""A rollout whose servers receive weights from the trainer."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from services.extras.fleets.engine import FleetEngine


class FleetSink:
    """Sink of a rollout whose engine is a fleet."""

    def __init__(self, engine: FleetEngine) -> None:
        self._engine = engine
        self.refused = ""

    async def adopt_weights(self, version: int, received: Mapping[str, Tensor]) -> float:
        return await self._engine.adopt_weights(version, received)

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return await self._engine.score(token_ids)

    async def refuse_weights(self, reason: str) -> None:
        self.refused = reason
