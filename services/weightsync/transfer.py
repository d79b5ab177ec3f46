"""Transfers one version over a formed group: buckets, then the source's statement about them.

    source                                  receivers
    (weights are packed in its arena)       -
    bucket 0 .. n-1                         received into a shadow arena; live weights untouched
    statement: magic, epoch, version, ...   compared before anything is adopted
      and checksums of all buckets          recomputed from the received bytes, bucket by bucket
                                            while the next one is on the wire, and compared

All collectives start before any is waited for, the buckets first, so that the wire is never idle;
on a GPU no call waits for the device until the end.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.checksum import write_checksum
from services.weightsync.group import Channel, WeightGroup, Work
from services.weightsync.weight_plan import WeightPlan

_HEADER = struct.Struct("<8sqqqqq32s")
_MAGIC = b"SLIPSYNC"
HEADER_BYTES = _HEADER.size


class TransferError(RuntimeError):
    """Transfer that must not be adopted; the message has the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """Request of the controller to transfer a version."""

    epoch: int
    """Epoch of the group."""
    version: int
    """Weight version."""
    timeout_s: float
    """Deadline in seconds."""
    base_version: int = -1
    """Version that all members hold and whose changes are sent; -1 sends everything."""
    stored: str = ""
    """Name of the version in a store; empty for members that meet."""
    manifests: tuple[str, ...] = ()
    """For a receiver, the digest of each source's manifest in the store, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """Result of a finished transfer."""

    digests: tuple[str, ...]
    """Digest of each source that took part, in order."""
    num_bytes: int
    """Bytes sent or received."""


def send_version(
    group: WeightGroup, arena: WeightArena, checksums: Tensor, request: TransferRequest
) -> Transferred:
    """Sends the arena of a source. Blocks until all receivers have it.

    Args:
        checksums: ``[num_buckets, 2]`` int64 of the arena.

    Raises:
        RuntimeError: If a member was lost or the group aborted.
    """
    ((source, channel),) = group.channels.items()
    group.bound(arena.plan, request.timeout_s)
    buckets = [arena.bucket(source, index) for index in range(len(checksums))]
    works = [channel.broadcast(bucket) for bucket in buckets]
    works.append(channel.broadcast(make_statement(arena.plan, request, source, checksums)))
    digest = source_digest(arena.plan.plan_hash, request.version, source, checksums)
    for work in works:
        work.wait()
    group.synchronize()
    return Transferred(digests=(digest,), num_bytes=sum(bucket.nbytes for bucket in buckets))


def receive_version(
    group: WeightGroup,
    shadow: WeightArena,
    request: TransferRequest,
    sums: Mapping[int, Tensor],
) -> Transferred:
    """Receives from all sources into ``shadow`` and verifies every bucket.

    Args:
        shadow: Target; with a base version, it holds that version.
        sums: Buffers for the checksums of the received buckets, by source.

    Raises:
        TransferError: If version or bytes are not the expected ones.
        RuntimeError: If a source was lost or the group aborted.
    """
    group.bound(shadow.plan, request.timeout_s)
    arriving = [
        _Arriving(source, channel, shadow, request, sums[source])
        for source, channel in sorted(group.channels.items())
    ]
    longest = max(len(source.buckets) for source in shadow.plan.sources)
    for index in range(longest):
        for arrival in arriving:
            arrival.start(index)
    for index in range(longest):
        for arrival in arriving:
            arrival.check(index)
    for arrival in arriving:
        arrival.finish()
    # A blocking copy to the host would keep other threads from starting work on the GPU.
    group.synchronize()
    return Transferred(
        digests=tuple(arrival.verified() for arrival in arriving),
        num_bytes=sum(arrival.num_bytes for arrival in arriving),
    )


class _Arriving:
    """Receives and verifies the buckets of one source."""

    def __init__(
        self,
        source: int,
        channel: Channel,
        shadow: WeightArena,
        request: TransferRequest,
        computed: Tensor,
    ) -> None:
        self._source = source
        self._channel = channel
        self._shadow = shadow
        self._request = request
        self._computed = computed
        self._num_buckets = len(computed)
        self._works: list[Work] = []
        self.num_bytes = 0

    def start(self, index: int) -> None:
        """Starts to receive a bucket and, after the last one, the source's statement."""
        if index < self._num_buckets:
            bucket = self._shadow.bucket(self._source, index)
            self._works.append(self._channel.broadcast(bucket))
            self.num_bytes += bucket.nbytes
        if index == self._num_buckets - 1:
            self._stated = no_statement(self._computed)
            self._works.append(self._channel.broadcast(self._stated))
            self._computed.zero_()

    def check(self, index: int) -> None:
        """Waits for a bucket and computes its checksum."""
        if index < self._num_buckets:
            self._works[index].wait()
            # After the last bucket the wire is free, so the checksum may use the whole GPU.
            is_last = index == self._num_buckets - 1
            bucket = self._shadow.bucket(self._source, index)
            write_checksum(bucket, self._computed[index], alone=is_last)

    def finish(self) -> None:
        """Waits for the statement; copies both sides of the comparison to the host."""
        self._works[-1].wait()
        checksums = torch.cat((self._stated, self._computed.flatten().view(torch.uint8)))
        self._checksums = checksums.to("cpu", non_blocking=True)

    def verified(self) -> str:
        """Compares both sides after the device is done; returns the digest of the received version."""
        stated, computed = self._checksums.split((self._stated.nbytes, self._computed.nbytes))
        return check_statement(
            stated,
            computed.view(torch.int64).view(-1, 2),
            self._shadow.plan,
            self._request,
            source=self._source,
        )


def make_header(
    plan: WeightPlan, request: TransferRequest, source: int, num_changed: int = 0
) -> Tensor:
    """Builds the header with which a source announces a transfer: ``[HEADER_BYTES]`` uint8.

    Args:
        num_changed: With a base version, number of words that differ from it; -1 if everything is
            sent nevertheless.
    """
    packed = _HEADER.pack(
        _MAGIC,
        0 if request.stored else request.epoch,  # receivers of a store have epochs of their own
        request.version,
        request.base_version,
        source,
        num_changed,
        bytes.fromhex(plan.plan_hash),
    )
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def check_header(header: Tensor, plan: WeightPlan, request: TransferRequest, source: int) -> int:
    """Compares a header with the requested transfer; returns its number of changed words.

    Raises:
        TransferError: If it announces another transfer.
    """
    content = header.cpu().numpy().tobytes()
    num_changed: int = _HEADER.unpack(content)[5]
    if content != make_header(plan, request, source, num_changed).numpy().tobytes():
        raise TransferError(
            f"expected epoch {request.epoch}, version {request.version}, source {source} and plan "
            f"{plan.plan_hash[:12]}, but the source announced other values; the version is rejected"
        )
    return num_changed


def make_statement(
    plan: WeightPlan, request: TransferRequest, source: int, checksums: Tensor
) -> Tensor:
    """Builds the statement that a source sends after its buckets: header and checksums, ``[n]`` uint8.

    Args:
        checksums: ``[num_buckets, 2]`` int64; the statement is on their device.
    """
    header = make_header(plan, request, source).to(checksums.device)
    return torch.cat((header, checksums.flatten().view(torch.uint8)))


def no_statement(checksums: Tensor) -> Tensor:
    """Returns a zeroed buffer for the statement about as many buckets as ``checksums`` has."""
    num_bytes = HEADER_BYTES + checksums.nbytes
    return torch.zeros(num_bytes, dtype=torch.uint8, device=checksums.device)


def check_statement(
    stated: Tensor, computed: Tensor, plan: WeightPlan, request: TransferRequest, *, source: int
) -> str:
    """Compares a source's statement with the received bytes; returns the digest.

    Args:
        computed: Checksums of the received buckets: ``[num_buckets, 2]`` int64.
        source: Number of the source that sent.

    Raises:
        TransferError: If another transfer was sent, or a bucket differs.
    """
    header, checksums = stated.split((HEADER_BYTES, computed.nbytes))
    check_header(header, plan, request, source)
    return check_buckets(
        computed, checksums.view(torch.int64).view(-1, 2), plan, request, source=source
    )


def check_buckets(
    computed: Tensor,
    stated: Tensor,
    plan: WeightPlan,
    request: TransferRequest,
    *,
    source: int,
) -> str:
    """Compares the checksums of received and sent buckets; returns the digest.

    Raises:
        TransferError: If a bucket differs.
    """
    if not torch.equal(computed, stated):
        damaged = (computed != stated).any(1).nonzero().flatten().tolist()
        raise TransferError(
            f"version {request.version} is rejected: buckets {damaged[:8]} of source {source} arrived "
            "corrupted"
        )
    return source_digest(plan.plan_hash, request.version, source, computed)
