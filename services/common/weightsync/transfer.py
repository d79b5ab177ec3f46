"""One version over a formed group: header, buckets, checksums.

rank 0                                  others
pack weights into the arena             -
header: magic, epoch, version, plan     compare, or fail before any weight moves
bucket 0 .. n-1                         received into a shadow arena; live weights untouched
checksums of all buckets                recomputed from the received bytes and compared
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.weightsync.arena import WeightArena, version_digest
from services.common.weightsync.group import WeightGroup
from services.common.weightsync.plan import WeightPlan

_HEADER = struct.Struct("<8sqq32s")
_MAGIC = b"SLIPSYNC"


class TransferError(RuntimeError):
    """A transfer that must not be adopted; the message says what differed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """A finished transfer."""

    digest: str
    """Of plan, version and all bytes."""
    num_bytes: int
    """Size of the arena."""


def send_version(
    group: WeightGroup, arena: WeightArena, *, epoch: int, version: int
) -> Transferred:
    """Send the arena's content. Blocks until all members received it.

    Raises:
        RuntimeError: If a member was lost or a deadline passed.
    """
    group.broadcast(_header(arena.plan, epoch, version, arena.buffer.device)).wait()
    works = [group.broadcast(arena.bucket(index)) for index in range(len(arena.plan.buckets))]
    checksums = arena.checksums()
    for work in works:
        work.wait()
    group.broadcast(checksums).wait()
    return Transferred(
        digest=version_digest(arena.plan.plan_hash, version, checksums),
        num_bytes=arena.plan.arena_bytes,
    )


def receive_version(
    group: WeightGroup, shadow: WeightArena, *, epoch: int, version: int
) -> Transferred:
    """Receive into ``shadow`` and verify every bucket.

    Raises:
        TransferError: If header or bytes are not the expected ones.
        RuntimeError: If the sender was lost or a deadline passed.
    """
    expected = _header(shadow.plan, epoch, version, shadow.buffer.device)
    header = torch.zeros_like(expected)
    group.broadcast(header).wait()
    header_differs = not torch.equal(header, expected)
    works = [group.broadcast(shadow.bucket(index)) for index in range(len(shadow.plan.buckets))]
    checksums = torch.empty(len(works), dtype=torch.int64, device=shadow.buffer.device)
    for work in works:
        work.wait()
    group.broadcast(checksums).wait()
    if header_differs:
        raise TransferError(
            f"expected epoch {epoch}, version {version} and plan {shadow.plan.plan_hash[:12]}, but the "
            "sender announced something else; the version is refused"
        )
    damaged = (shadow.checksums() != checksums).nonzero().flatten().tolist()
    if damaged:
        raise TransferError(
            f"version {version}: buckets {damaged[:8]} differ from what was sent; it is refused"
        )
    return Transferred(
        digest=version_digest(shadow.plan.plan_hash, version, checksums),
        num_bytes=shadow.plan.arena_bytes,
    )


def _header(plan: WeightPlan, epoch: int, version: int, device: torch.device) -> Tensor:
    packed = _HEADER.pack(_MAGIC, epoch, version, bytes.fromhex(plan.plan_hash))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)
