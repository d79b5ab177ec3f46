"""One version over a formed group: header, buckets, checksums.

    source                                  receivers
    (weights are packed in its arena)       -
    header: magic, epoch, version, plan     compared at the end, before anything is adopted
    bucket 0 .. n-1                         received into a shadow arena; live weights untouched
    checksums of all buckets                recomputed from the received bytes, bucket by bucket
                                            while the next one is on the wire, and compared

Everything is started before anything is waited for, so that the wire is never idle; on a GPU no call waits
for the device until the end.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.weightsync.arena import WeightArena, source_digest
from services.common.weightsync.group import Channel, WeightGroup
from services.common.weightsync.plan import WeightPlan

_HEADER = struct.Struct("<8sqqq32s")
_MAGIC = b"SLIPSYNC"


class TransferError(RuntimeError):
    """A transfer that must not be adopted; the message says what differed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """A finished transfer."""

    digests: tuple[str, ...]
    """Of each source that took part, in order."""
    num_bytes: int
    """Bytes sent or received."""


def send_version(
    group: WeightGroup,
    arena: WeightArena,
    checksums: Tensor,
    *,
    epoch: int,
    version: int,
    timeout_s: float,
) -> Transferred:
    """Send what the arena of a source holds. Blocks until all receivers have it.

    Args:
        group: The formed group.
        arena: The source's packed weights.
        checksums: ``[num_buckets, 2]`` int64 of the arena.
        epoch: Of the group.
        version: Weight version.
        timeout_s: Deadline.

    Raises:
        RuntimeError: If a member was lost or the deadline passed (Gloo).
        TimeoutError: If the deadline passed (NCCL).
    """
    ((source, channel),) = group.channels.items()
    group.bound(timeout_s)
    header = _header(arena.plan, epoch, version, source).to(group.device)
    works = [channel.broadcast(header)]
    works += [
        channel.broadcast(arena.bucket(source, index))
        for index in range(len(arena.plan.sources[source].buckets))
    ]
    works.append(channel.broadcast(checksums))
    for work in works:
        work.wait()
    group.settle(timeout_s)
    return Transferred(
        digests=(source_digest(arena.plan.plan_hash, version, source, checksums),),
        num_bytes=arena.plan.sources[source].arena_bytes,
    )


def receive_version(
    group: WeightGroup, shadow: WeightArena, *, epoch: int, version: int, timeout_s: float
) -> Transferred:
    """Receive from all sources into ``shadow`` and verify every bucket.

    Raises:
        TransferError: If a header or bytes are not the expected ones.
        RuntimeError: If a source was lost or the deadline passed (Gloo).
        TimeoutError: If the deadline passed (NCCL).
    """
    group.bound(timeout_s)
    arriving = [
        _Arriving(source, channel, shadow) for source, channel in sorted(group.channels.items())
    ]
    longest = max(len(source.buckets) for source in shadow.plan.sources)
    for index in range(longest):
        for one in arriving:
            one.start(index)
    for index in range(longest):
        for one in arriving:
            one.check(index)
    for one in arriving:
        one.finish()
    group.settle(timeout_s)
    return Transferred(
        digests=tuple(one.verified(epoch, version) for one in arriving),
        num_bytes=shadow.plan.num_bytes,
    )


class _Arriving:
    """What comes from one source."""

    def __init__(self, source: int, channel: Channel, shadow: WeightArena) -> None:
        self._source = source
        self._channel = channel
        self._shadow = shadow
        self._num_buckets = len(shadow.plan.sources[source].buckets)
        self._header = torch.zeros(_HEADER.size, dtype=torch.uint8, device=shadow.device)
        self._stated = torch.zeros(self._num_buckets, 2, dtype=torch.int64, device=shadow.device)
        self._computed: list[Tensor] = []
        self._works = [channel.broadcast(self._header)]

    def start(self, index: int) -> None:
        """Start to receive a bucket and, behind the last one, the checksums."""
        if index < self._num_buckets:
            bucket = self._shadow.bucket(self._source, index)
            self._works.append(self._channel.broadcast(bucket))
        if index == self._num_buckets - 1:
            self._works.append(self._channel.broadcast(self._stated))

    def check(self, index: int) -> None:
        """Compute the checksum of a bucket once it is here."""
        if index < self._num_buckets:
            self._works[1 + index].wait()
            self._computed.append(self._shadow.checksum(self._source, index))

    def finish(self) -> None:
        """Wait for the header and the checksums that the source states."""
        self._works[0].wait()
        self._works[-1].wait()

    def verified(self, epoch: int, version: int) -> str:
        """Compare; returns the digest of what arrived.

        Raises:
            TransferError: If anything differs.
        """
        plan = self._shadow.plan
        if not torch.equal(self._header.cpu(), _header(plan, epoch, version, self._source)):
            raise TransferError(
                f"expected epoch {epoch}, version {version}, source {self._source} and plan "
                f"{plan.plan_hash[:12]}, but the source announced something else; it is refused"
            )
        computed = torch.stack(self._computed)
        damaged = (computed != self._stated).any(1).nonzero().flatten().tolist()
        if damaged:
            raise TransferError(
                f"version {version}: buckets {damaged[:8]} of source {self._source} differ from what was "
                "sent; it is refused"
            )
        return source_digest(plan.plan_hash, version, self._source, computed)


def _header(plan: WeightPlan, epoch: int, version: int, source: int) -> Tensor:
    packed = _HEADER.pack(_MAGIC, epoch, version, source, bytes.fromhex(plan.plan_hash))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
