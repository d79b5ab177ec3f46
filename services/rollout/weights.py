"""The engine's side of weight sync: when a received version goes into service."""

import time
from collections.abc import Mapping

from torch import Tensor

from services.common.errors import InvalidArgumentError, UnavailableError
from services.rollout import metrics
from services.rollout.engines.base import Engine
from services.rollout.sampling import GroupSampler


class WeightReceiver:
    """Hands complete, verified versions to the engine.

    With partial rollout, running responses go on under the new weights in the middle of a sentence.
    Without it they finish under the old ones first, while new responses wait.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._sampler: GroupSampler | None = None
        self._is_partial = False

    def attach(self, engine: Engine, sampler: GroupSampler, *, is_partial: bool) -> None:
        """Begin to receive.

        Args:
            engine: Takes the weights.
            sampler: Caches what is unfinished after each update, if ``is_partial``.
            is_partial: Whether responses may change weights in their middle.
        """
        self._engine, self._sampler, self._is_partial = engine, sampler, is_partial

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Put a version into service; returns the seconds in which no token was produced."""
        engine, sampler = self._engine, self._sampler
        if engine is None or sampler is None:
            raise UnavailableError("this rollout worker still loads its model; try again")
        started_at = time.monotonic()
        try:
            if not self._is_partial:
                await engine.pause(drain=True)
            stall_s = await engine.adopt_weights(version, tensors)
        except ValueError as error:
            raise InvalidArgumentError(str(error), version=version) from error
        finally:
            await engine.resume()
        metrics.ADOPT_STALL_SECONDS.observe(stall_s)
        metrics.ADOPT_SECONDS.observe(time.monotonic() - started_at)
        metrics.WEIGHT_VERSION.set(version)
        if self._is_partial:
            sampler.checkpoint_soon()
        return stall_s
