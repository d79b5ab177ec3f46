"""The flat buffer that a version travels in, its tensor views, and its checksums."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from services.common.weightsync.plan import ALIGNMENT, WeightPlan

_WORD_BYTES = 8


class WeightArena:
    """One version of all weights in one buffer.

    Attributes:
        plan: The layout.
        buffer: ``[arena_bytes]`` uint8.
        tensors: Views into the buffer by name, with their own shapes and dtypes.
    """

    def __init__(self, plan: WeightPlan, device: torch.device) -> None:
        self.plan = plan
        self.buffer = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        self.tensors: Mapping[str, Tensor] = {
            spec.name: self.buffer[offset : offset + spec.num_bytes]
            .view(getattr(torch, spec.dtype))
            .view(spec.shape)
            for spec, offset in zip(plan.tensors, plan.offsets, strict=True)
        }
        largest = max(bucket.stop - bucket.start for bucket in plan.buckets)
        # Odd factors that differ by position: a changed word and two swapped words both show.
        self._factors = torch.arange(largest // _WORD_BYTES, device=device).mul_(2).add_(1)

    def bucket(self, index: int) -> Tensor:
        """Bytes of one bucket, as a view."""
        bucket = self.plan.buckets[index]
        return self.buffer[bucket.start : bucket.stop]

    def checksum(self, index: int) -> Tensor:
        """Position-dependent sum of one bucket's 64-bit words, modulo 2**64: ``[]`` int64."""
        words = self.bucket(index).view(torch.int64)
        return (words * self._factors[: words.numel()]).sum()

    def checksums(self) -> Tensor:
        """Checksums of all buckets: ``[num_buckets]`` int64."""
        return torch.stack([self.checksum(index) for index in range(len(self.plan.buckets))])


def version_digest(plan_hash: str, version: int, checksums: Tensor) -> str:
    """One hex digest for a version: equal only if plan, version and all bytes are equal.

    Args:
        plan_hash: Of the plan.
        version: Weight version.
        checksums: ``[num_buckets]`` int64.
    """
    digest = hashlib.sha256(f"{plan_hash}:{version}:".encode())
    digest.update(checksums.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


assert ALIGNMENT % _WORD_BYTES == 0
