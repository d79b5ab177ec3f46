"""Adoption of received weight versions by the engine."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from services.common.errors import InvalidArgumentError, UnavailableError
from services.common.task_group import in_thread, uninterrupted
from services.rollout import metrics
from services.rollout.engines.base import Engine, OpenEngine
from services.rollout.frozen_weights import FrozenWeights
from services.rollout.sampling.sampler import GroupSampler
from services.weightsync.endpoints import Place
from services.weightsync.weight_plan import WeightPlan

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class WeightReceiver:
    """Passes complete, verified weight versions to the engine.

    With partial rollout, running responses continue under the new weights from their next token.
    Otherwise they finish under the old weights first, while new responses wait.

    Args:
        on_refused: Receives the reason if this rollout stops serving until it adopts other weights.
        on_adopted: Called after the engine has adopted weights and before they are checked, even if the
            session that sent them has ended.
    """

    def __init__(
        self,
        on_refused: Callable[[str], None] = lambda reason: None,
        on_adopted: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_refused = on_refused
        self._on_adopted = on_adopted
        self._engine: Engine | None = None
        self._sampler: GroupSampler | None = None
        self._is_partial = False
        self._frozen: FrozenWeights | None = None
        self._asked_at = 0.0
        self._stopped_at: float | None = None

    def attach(
        self,
        engine: Engine,
        sampler: GroupSampler,
        *,
        is_partial: bool,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """Sets the engine and sampler; until then calls raise UnavailableError.

        Args:
            sampler: Checkpoints unfinished groups after each update, if ``is_partial``.
            is_partial: True if weights may change in the middle of a response.
            frozen: Base weights to merge adapters into, if only adapters are received.
        """
        self._engine, self._sampler, self._is_partial = engine, sampler, is_partial
        self._frozen = frozen

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Puts a version into service; returns the seconds without tokens.

        Raises:
            InvalidArgumentError: If the tensors do not match the engine's weights or the frozen weights.
        """
        engine, _ = self._attached()
        if self._frozen is not None:
            try:
                self._frozen.check(tensors)
                return await self._adopt_merged(self._frozen, version, tensors)
            except ValueError as error:
                raise InvalidArgumentError(str(error), version=version) from error
        return await self._adopt_whole(engine, version, tensors)

    async def _adopt_merged(
        self, frozen: FrozenWeights, version: int, tensors: Mapping[str, Tensor]
    ) -> float:
        """Merges adapters into the frozen weights and writes the result into the live weights."""
        await in_thread(partial(frozen.merge_ahead, tensors))
        try:
            copy_slot = await self.open_weights(frozen.plan, frozen.slots.buffers)
        except InvalidArgumentError as error:
            logger.warning("merging adapters into a copy of all weights", extra={"why": str(error)})
            merged = await in_thread(partial(frozen.merged, tensors))
            self._stopped_at = None
            return await self._adopt_whole(self._attached()[0], version, merged)
        try:
            await in_thread(partial(frozen.write, tensors, copy_slot))
        except BaseException:
            await self.refuse_weights(
                "merging adapters into the live weights failed; nothing is served until a whole version "
                "arrives"
            )
            raise
        return await self.adopt_placed(version)

    async def _adopt_whole(
        self, engine: Engine, version: int, tensors: Mapping[str, Tensor]
    ) -> float:
        started_at = time.monotonic()
        try:
            if not self._is_partial:
                await engine.pause(drain=True)
            stall_s = await self._finish(engine.adopt_weights(version, tensors))
        except ValueError as error:
            raise InvalidArgumentError(str(error), version=version) from error
        finally:
            await engine.resume()
        self._adopted(version, stall_s, seconds=time.monotonic() - started_at)
        return stall_s

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the logprob of each token but the first; empty for an engine without a model."""
        engine, _ = self._attached()
        # An engine without weights has none that a transfer could misplace.
        return await engine.score(token_ids) if engine.weight_specs() else ()

    async def refuse_weights(self, reason: str) -> None:
        """Pauses the engine until other weights are adopted, and reports the reason."""
        engine, _ = self._attached()
        await engine.pause()
        self._on_refused(reason)

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Pauses the engine and opens its live weights for writing.

        Raises:
            InvalidArgumentError: If the engine does not expose its weights, or they do not match the plan.
        """
        engine = self._open()
        asked_at = time.monotonic()
        if not self._is_partial:
            await engine.pause(drain=True)
        # After a failed transfer the engine is still paused; the stall counts from that first pause.
        if self._stopped_at is None:
            self._asked_at, self._stopped_at = asked_at, time.monotonic()
        try:
            return await engine.open_weights(plan, slots)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error

    async def adopt_placed(self, version: int) -> float:
        """Puts the written weights into service; returns the seconds since the pause began."""
        engine = self._open()
        await self._finish(engine.adopt_placed(version))
        await engine.resume()
        now = time.monotonic()
        assert self._stopped_at is not None, "weights were written without a pause"
        stall_s, self._stopped_at = now - self._stopped_at, None
        self._adopted(version, stall_s, seconds=now - self._asked_at)
        return stall_s

    async def close_weights(self) -> None:
        """Resumes the engine after a pause in which no weights were written."""
        await self._open().close_weights()
        self._stopped_at = None

    async def _finish(self, adoption: Awaitable[_T]) -> _T:
        """Awaits the end of the engine's adoption, even if the session ends before it.

        The engine must not decode with a mixture of two versions.
        """

        async def adopt() -> _T:
            result = await adoption
            self._on_adopted()
            return result

        return await uninterrupted(adopt())

    def _adopted(self, version: int, stall_s: float, *, seconds: float) -> None:
        metrics.ADOPT_STALL_SECONDS.observe(stall_s)
        metrics.ADOPT_SECONDS.observe(seconds)
        metrics.WEIGHT_VERSION.set(version)
        _, sampler = self._attached()
        if self._is_partial:
            sampler.checkpoint_soon()

    def _open(self) -> OpenEngine:
        engine, _ = self._attached()
        if not isinstance(engine, OpenEngine):
            raise InvalidArgumentError(
                f"weight_sync.mode inplace writes into live weights, which engine "
                f"{engine.capabilities.name!r} does not expose; use mode shadow"
            )
        return engine

    def _attached(self) -> tuple[Engine, GroupSampler]:
        if self._engine is None or self._sampler is None:
            raise UnavailableError("this rollout worker is still loading its model; retry")
        return self._engine, self._sampler
