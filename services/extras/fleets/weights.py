"""The newest weights of a run, kept by a rollout for the servers of its fleet."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from services.weightsync.adapters import FROZEN_DIGEST
from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP, TensorSpec, make_plan

BUCKET_BYTES: Final = 16 << 20
"""Bytes of one request with weights: several of them are sent at once, and a lost one is sent again."""
_PART_BYTES: Final = 1 << 18


class FleetWeights:
    """One version in host memory, in the layout in which servers receive it.

    Args:
        version: Weight version.
        specs: All tensors, in sending order.
        tensors: Their values, which are copied. Blocks.
        base: Hex digest of the base weights that adapters are added to; empty for whole weights.
    """

    def __init__(
        self,
        version: int,
        specs: Sequence[TensorSpec],
        tensors: Mapping[str, Tensor],
        *,
        base: str = "",
    ) -> None:
        self.version = version
        self.base = base
        self.plan = make_plan(specs, BUCKET_BYTES)
        self._arena = WeightArena(self.plan, torch.device("cpu"))
        with torch.no_grad():
            for name, _, view in self._arena.pieces(0):
                view.copy_(tensors[name])
        self.digest = source_digest(self.plan.plan_hash, version, 0, self._arena.checksums(0))
        self.checksums: dict[Hashable, tuple[str, str]] = {}
        """First server that loaded the version, and its own checksum of its parameters, by their layout."""

    @property
    def num_buckets(self) -> int:
        return len(self.plan.sources[0].buckets)

    @property
    def num_bytes(self) -> int:
        return self.plan.num_bytes

    def bucket_bytes(self, index: int) -> int:
        return int(self._arena.bucket(0, index).nbytes)

    def tensors(self) -> dict[str, Tensor]:
        """Returns views of all tensors by name."""
        return {name: view for name, _, view in self._arena.pieces(0)}

    def parts(self, index: int) -> Iterator[bytes]:
        """Yields the bytes of a bucket in parts that one write to a socket takes."""
        bucket = self._arena.bucket(0, index).numpy().data
        for start in range(0, len(bucket), _PART_BYTES):
            yield bytes(bucket[start : start + _PART_BYTES])


def adapter_weights(version: int, tensors: Mapping[str, Tensor]) -> FleetWeights:
    """Returns a version of which only the adapters travel. Blocks.

    Args:
        tensors: Adapters and the digest of the trainer's frozen weights.

    Raises:
        ValueError: If the trainer sent other weights too.
    """
    other_names = [
        name
        for name in tensors
        if name != FROZEN_DIGEST and not name.endswith((LORA_DOWN, LORA_UP))
    ]
    if other_names or FROZEN_DIGEST not in tensors:
        raise ValueError(
            f"servers add adapters to base weights that never change, but the trainer also sends "
            f"{', '.join(other_names[:3]) or 'no digest of its base'}; set trainer.lora.sync to merged"
        )
    adapters = {name: value for name, value in tensors.items() if name != FROZEN_DIGEST}
    specs = [
        TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in adapters.items()
    ]
    base = bytes(tensors[FROZEN_DIGEST].cpu().tolist()).hex()
    return FleetWeights(version, specs, adapters, base=base)
