"""A weight member in a process of its own: ``... weight_member ROLE RENDEZVOUS BYTES DEVICE``.

Serves the member's gRPC and prints its port. A receiver writes the digest of its live weights after each
adoption, so that a test can compare it.
"""

import asyncio
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from services.common.grpc_client import open_channel
from services.common.grpc_server import serve
from services.common.logging import configure
from services.common.weightsync.canary import Canary
from services.common.weightsync.member import WeightMember
from services.common.weightsync.plan import TensorSpec
from services.common.weightsync.server import WeightSyncServicer
from services.controller.client import Rendezvous
from slipstream.controller.v1 import membership_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc


class Trainer:
    """Weights that are new at every look, and the same in every process that counts along."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self._device = device
        self._specs = [TensorSpec(f"layer{i}", (num_bytes // 64, 4), "float32") for i in range(4)]
        self._version = -1

    def weight_specs(self) -> list[TensorSpec]:
        return self._specs

    def weight_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._version += 1
        for spec in self._specs:
            yield spec.name, torch.full(spec.shape, float(self._version), device=self._device)

    def score_canary(self) -> Canary:
        return Canary((1, 2, 3), (-1.0, -2.0))


class Rollout:
    """Reports what it serves."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self._live = {
            spec.name: torch.zeros(spec.shape, device=device)
            for spec in Trainer(num_bytes, device).weight_specs()
        }

    async def open_weights(self) -> Mapping[str, Tensor]:
        return self._live

    async def close_weights(self) -> None:
        """Nothing is paused."""

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        digest = await asyncio.to_thread(self._digest, tensors)
        print(f"serves {version} {digest[:16]}", flush=True)
        return 0.0

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(tensors[name].cpu().numpy().data)
        return total.hexdigest()

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return (-1.0, -2.0)

    async def refuse_weights(self, reason: str) -> None:
        print(f"refuses {reason}", flush=True)


async def main(role: str, address: str, num_bytes: int, device: str) -> None:
    async with open_channel(address, "worker") as channel:
        meetings = membership_pb2_grpc.RendezvousServiceStub(channel)
        loop = asyncio.get_running_loop()
        member = WeightMember(
            source=Trainer(num_bytes, device) if role == "trainer" else None,
            sink=Rollout(num_bytes, device) if role == "rollout" else None,
            device=torch.device(device),
            host="127.0.0.1",
            rendezvous=lambda scope: Rendezvous(meetings, loop, scope),
        )

        def register(server):
            weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                WeightSyncServicer(member), server
            )

        async with serve("127.0.0.1:0", register) as port:
            print(f"port {port}", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    configure(member=sys.argv[1])
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
