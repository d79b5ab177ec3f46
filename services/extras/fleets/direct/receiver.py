"""Receiver of ``weight_sync.mode: servers`` in the rollout: it orders its servers to receive."""

import asyncio
from collections.abc import Sequence
from typing import Final

import torch

from services.common.errors import UnavailableError
from services.extras.fleets.direct.relay import GroupRelay
from services.extras.fleets.direct.weights import DirectVersion, DirectWeights
from services.weightsync.endpoints import WeightSink
from services.weightsync.group import WeightGroup
from services.weightsync.transfer import Transferred, TransferRequest
from services.weightsync.weight_plan import WeightPlan, version_digest

_MARGIN_S: Final = 2.0


class DirectReceiver:
    """Forms groups of the attached servers, and has each version sent to all of them."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        self.plan = plan
        self.held_version = -1
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._weights: DirectWeights | None = None

    async def prepare(self) -> None:
        """Forms a group of the attached servers, unless the group has just these.

        Raises:
            UnavailableError: If they do not connect to the trainer.
        """
        relay = GroupRelay.newest()
        try:
            await relay.form(self.plan)
        except (RuntimeError, OSError) as error:
            raise UnavailableError(
                f"the servers formed no weight group with the trainer: {error}"
            ) from error

    def receive(self, group: WeightGroup, request: TransferRequest) -> Transferred:
        relay = GroupRelay.newest()
        receiving = asyncio.run_coroutine_threadsafe(relay.transfer(self.plan, request), self._loop)
        try:
            digests, holders = receiving.result(request.timeout_s + _MARGIN_S)
        except BaseException:
            receiving.cancel()
            raise
        self._weights = DirectWeights(
            version=request.version,
            digest=version_digest(digests),
            num_bytes=self.plan.num_bytes,
            holders=holders,
            repeat=relay.repeat,
            is_repeatable=lambda: relay.is_open,
        )
        relay.last_request = request
        return Transferred(digests=digests, num_bytes=self.plan.num_bytes * len(holders))

    async def adopt(self, version: int) -> float:
        """Puts the version into service on the servers that have received it."""
        weights = self._weights
        assert weights is not None and weights.version == version, "the version was received"
        return await self._sink.adopt_weights(version, DirectVersion(weights))

    async def give_up(self) -> None:
        """Does nothing: the channel's end has ended what the servers received."""
