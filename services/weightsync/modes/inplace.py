"""``inplace``: received straight into the live weights under a pause, where memory has no room for a shadow.

A failed transfer leaves the live weights torn: the engine stays paused until a whole version is in place.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.weightsync.endpoints import WeightSink
from services.weightsync.group import WeightGroup
from services.weightsync.modes.placing import Placer
from services.weightsync.modes.staged import Slots, receive_staged
from services.weightsync.plan import WeightPlan
from services.weightsync.transfer import TransferOrder, Transferred


class InplaceReceiver:
    """Receives into the engine's own tensors."""

    def __init__(self, plan: WeightPlan, devices: Sequence[torch.device], sink: WeightSink) -> None:
        self.plan = plan
        self.held_version = -1
        self._sink = sink
        self._slots = Slots(plan, devices[0])
        self._live: Mapping[str, Tensor] = {}
        self._place = Placer(plan, ())
        self._is_torn = False

    async def prepare(self) -> None:
        """Pause the engine.

        Raises:
            ValueError: If it keeps its tensors to itself, or they are not those of the plan.
        """
        self._live = await self._sink.open_weights()
        self._place = Placer(
            self.plan,
            [
                _flat_bytes(spec.name, self._live, spec.dtype, spec.shape)
                for spec in self.plan.tensors
            ],
        )

    def receive(self, group: WeightGroup, order: TransferOrder) -> Transferred:
        """Receive into the live weights; they are torn until this has returned."""
        self._is_torn = True
        done = receive_staged(group, self._slots, order, self._place)
        self._is_torn = False
        return done

    async def adopt(self, version: int) -> float:
        """Go on with the weights that are in place."""
        return await self._sink.adopt_weights(version, self._live)

    async def give_up(self) -> None:
        """Go on with the old weights, unless they are torn."""
        self._slots = self._slots.renewed()
        if self._live and not self._is_torn:
            await self._sink.close_weights()


def _flat_bytes(
    name: str, live: Mapping[str, Tensor], dtype: str, shape: tuple[int, ...]
) -> Tensor:
    tensor = live.get(name)
    if tensor is None or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"the engine has no contiguous tensor {name!r} of shape {shape}, so nothing can be received in "
            "place; trainer and rollout must be given the same model"
        )
    if tensor.dtype != getattr(torch, dtype):
        raise ValueError(
            f"{name!r} arrives as {dtype}, but the engine keeps it as {tensor.dtype}; weights that are "
            "received in place are not converted: choose mode shadow, or the same trainer.dtype"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
