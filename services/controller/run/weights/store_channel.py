"""URL, deadlines and failures that the sources and the rollouts of a weight store share."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.common.errors import DataLossError, DeadlineExceededError, ServiceError
from services.common.runspec.run import WeightSyncSpec
from services.common.runspec.weight_modes import TRANSPORTS
from services.common.stores import join_url, without_secrets
from services.controller import metrics
from services.wire.weightsync import WeightSyncClient

logger = logging.getLogger(__name__)

_SLOWER: Final = 4
"""Factor of a deadline after it was missed."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 15.0


class StoreFailedError(DeadlineExceededError):
    """Raised if the store failed for longer than the run waits; the message has the first cause."""


@dataclass(slots=True)
class StoreTrouble:
    """Failures of one member with the store since its last success."""

    cause: str = ""
    """First cause; empty if the last request succeeded."""
    since: float = 0.0
    """Time of that failure, in monotonic seconds."""
    num_refusals: int = 0
    """Versions that the member found damaged or wrong, in a row."""
    pause_s: float = _FIRST_PAUSE_S

    @property
    def failing_s(self) -> float:
        return time.monotonic() - self.since if self.cause else 0.0

    async def pause(self) -> None:
        """Waits before the next try, twice as long each time."""
        await asyncio.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, _MAX_PAUSE_S)


class StoreChannel:
    """Opens the store at members of one run, bounds their transfers, and records their failures.

    Args:
        next_epoch: Returns an epoch that is higher than any before.
    """

    def __init__(self, spec: WeightSyncSpec, run_id: str, next_epoch: Callable[[], int]) -> None:
        assert spec.storage is not None, "validate refuses a stored transport without a store"
        self._spec, self._storage = spec, spec.storage
        self._run_id = run_id
        self.next_epoch = next_epoch
        self.url = join_url(spec.storage.directory, run_id)
        """Folder of the run in the store, or its URL."""

    async def open(self, member: WeightSyncClient, epoch: int, *, receiver: int | None) -> None:
        """Opens the store at a source, or at a receiver.

        Raises:
            ServiceError: If the member cannot use it, with the store's cause.
        """
        timeout_s = self._spec.form_timeout_s
        try:
            await member.form_group(
                epoch,
                receiver=receiver,
                num_receivers=1,
                backend=self._spec.backend,
                scope=f"{self._run_id}/{epoch}",
                timeout_s=timeout_s,
                url=self.url,
            )
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"the weight store {without_secrets(self.url)} did not answer within {timeout_s:.0f} s"
            ) from error

    def timeout_s(self, num_bytes: int) -> float:
        """Returns the deadline of a transfer."""
        if self._spec.transfer_timeout_s is not None:
            return self._spec.transfer_timeout_s
        transport = TRANSPORTS[self._spec.backend]
        return transport.latency_s + num_bytes / transport.least_rate

    def slower_timeout_s(self, timeout_s: float) -> float:
        """Returns the deadline of a transfer after another one missed its own."""
        return min(_SLOWER * timeout_s, max(timeout_s, self._storage.timeout_s))

    def record(self, name: str, trouble: StoreTrouble, error: ServiceError) -> None:
        """Records a failure of a member.

        Raises:
            StoreFailedError: If the store has failed for ``weight_sync.storage.timeout_s``.
        """
        if not trouble.cause:
            trouble.cause, trouble.since = error.message, time.monotonic()
        trouble.num_refusals += isinstance(error, DataLossError)
        metrics.WEIGHT_SYNCS.labels(self._run_id, error.reason).inc()
        logger.warning(
            "weight store failed",
            extra={"run": self._run_id, "worker": name, "why": error.message},
        )
        if trouble.failing_s > self._storage.timeout_s:
            raise StoreFailedError(
                f"{name} could not use the weight store {without_secrets(self.url)} for "
                f"{self._storage.timeout_s:.0f} s; first cause: {trouble.cause}"
            ) from error
