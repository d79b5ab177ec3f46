"""One version over a formed group: buckets, and what the source states of them.

    source                                  receivers
    (weights are packed in its arena)       -
    bucket 0 .. n-1                         received into a shadow arena; live weights untouched
    statement: magic, epoch, version, ...   compared before anything is adopted
      and checksums of all buckets          recomputed from the received bytes, bucket by bucket
                                            while the next one is on the wire, and compared

Everything is started before anything is waited for, and the buckets before all else, so that the wire is
never idle; on a GPU no call waits for the device until the end.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.weightsync.arena import WeightArena, source_digest
from services.weightsync.checksum import write_checksum
from services.weightsync.group import Channel, WeightGroup, Work
from services.weightsync.plan import WeightPlan

_HEADER = struct.Struct("<8sqqqqq32s")
_MAGIC = b"SLIPSYNC"
HEADER_BYTES = _HEADER.size


class TransferError(RuntimeError):
    """A transfer that must not be adopted; the message says what differed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOrder:
    """What the controller asked for."""

    epoch: int
    """Of the group."""
    version: int
    """Weight version."""
    timeout_s: float
    """Deadline."""
    base_version: int = -1
    """Version that all members hold and whose changes are sent; -1 sends everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """A finished transfer."""

    digests: tuple[str, ...]
    """Of each source that took part, in order."""
    num_bytes: int
    """Bytes sent or received."""


def send_version(
    group: WeightGroup, arena: WeightArena, checksums: Tensor, order: TransferOrder
) -> Transferred:
    """Send what the arena of a source holds. Blocks until all receivers have it.

    Args:
        group: The formed group.
        arena: The source's packed weights.
        checksums: ``[num_buckets, 2]`` int64 of the arena.
        order: What to send.

    Raises:
        RuntimeError: If a member was lost or the group aborted.
    """
    ((source, channel),) = group.channels.items()
    group.bound(arena.plan)
    sent = [arena.bucket(source, index) for index in range(len(checksums))]
    works = [channel.broadcast(bucket) for bucket in sent]
    works.append(channel.broadcast(make_statement(arena.plan, order, source, checksums)))
    digest = source_digest(arena.plan.plan_hash, order.version, source, checksums)
    for work in works:
        work.wait()
    group.settle()
    return Transferred(digests=(digest,), num_bytes=sum(bucket.nbytes for bucket in sent))


def receive_version(
    group: WeightGroup,
    shadow: WeightArena,
    order: TransferOrder,
    sums: Mapping[int, Tensor] | None = None,
) -> Transferred:
    """Receive from all sources into ``shadow`` and verify every bucket.

    Args:
        group: The formed group.
        shadow: Where it goes; with a base version, it holds that one.
        order: What comes.
        sums: Checksums of what ``shadow`` holds, by source; those of what arrives are written there.

    Raises:
        TransferError: If version or bytes are not the expected ones.
        RuntimeError: If a source was lost or the group aborted.
    """
    group.bound(shadow.plan)
    sums = shadow.no_checksums() if sums is None else sums
    arriving = [
        _Arriving(source, channel, shadow, order, sums[source])
        for source, channel in sorted(group.channels.items())
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
    # Waiting in a copy to the host would keep other threads from starting work on the GPU.
    group.settle()
    return Transferred(
        digests=tuple(one.verified() for one in arriving),
        num_bytes=sum(one.num_bytes for one in arriving),
    )


class _Arriving:
    """What comes from one source."""

    def __init__(
        self,
        source: int,
        channel: Channel,
        shadow: WeightArena,
        order: TransferOrder,
        computed: Tensor,
    ) -> None:
        self._source = source
        self._channel = channel
        self._shadow = shadow
        self._order = order
        self._computed = computed
        self._num_buckets = len(computed)
        self._works: list[Work] = []
        self.num_bytes = 0

    def start(self, index: int) -> None:
        """Start to receive a bucket and, behind the last one, what the source states."""
        if index < self._num_buckets:
            bucket = self._shadow.bucket(self._source, index)
            self._works.append(self._channel.broadcast(bucket))
            self.num_bytes += bucket.nbytes
        if index == self._num_buckets - 1:
            self._stated = no_statement(self._computed)
            self._works.append(self._channel.broadcast(self._stated))
            self._computed.zero_()

    def check(self, index: int) -> None:
        """Compute the checksum of a bucket once it is here."""
        if index < self._num_buckets:
            self._works[index].wait()
            # Behind the last bucket the wire is free, and the rest of the GPU may help.
            is_last = index == self._num_buckets - 1
            bucket = self._shadow.bucket(self._source, index)
            write_checksum(bucket, self._computed[index], alone=is_last)

    def finish(self) -> None:
        """Wait for what the source states; both sides of the comparison go to the host."""
        self._works[-1].wait()
        found = torch.cat((self._stated, self._computed.flatten().view(torch.uint8)))
        self._found = found.to("cpu", non_blocking=True)

    def verified(self) -> str:
        """Compare, once the device is done; returns the digest of what is held now."""
        stated, computed = self._found.split((self._stated.nbytes, self._computed.nbytes))
        return check_statement(
            stated,
            computed.view(torch.int64).view(-1, 2),
            self._shadow.plan,
            self._order,
            source=self._source,
        )


def make_header(
    plan: WeightPlan, order: TransferOrder, source: int, num_changed: int = 0
) -> Tensor:
    """What a source announces: ``[HEADER_BYTES]`` uint8.

    Args:
        plan: The layout.
        order: What is sent.
        source: Who sends.
        num_changed: With a base version, words that differ from it; -1 if everything is sent after all.
    """
    packed = _HEADER.pack(
        _MAGIC,
        order.epoch,
        order.version,
        order.base_version,
        source,
        num_changed,
        bytes.fromhex(plan.plan_hash),
    )
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def check_header(header: Tensor, plan: WeightPlan, order: TransferOrder, source: int) -> int:
    """Compare an announcement with what was asked for; returns its number of changed words.

    Raises:
        TransferError: If it announces something else.
    """
    found = header.cpu().numpy().tobytes()
    num_changed: int = _HEADER.unpack(found)[5]
    if found != make_header(plan, order, source, num_changed).numpy().tobytes():
        raise TransferError(
            f"expected epoch {order.epoch}, version {order.version}, source {source} and plan "
            f"{plan.plan_hash[:12]}, but the source announced something else; it is refused"
        )
    return num_changed


def make_statement(
    plan: WeightPlan, order: TransferOrder, source: int, checksums: Tensor
) -> Tensor:
    """What a source states behind its buckets: header and checksums, ``[n]`` uint8.

    Args:
        plan: The layout.
        order: What is sent.
        source: Who sends.
        checksums: ``[num_buckets, 2]`` int64; the statement lies on their device.
    """
    header = make_header(plan, order, source).to(checksums.device)
    return torch.cat((header, checksums.flatten().view(torch.uint8)))


def no_statement(checksums: Tensor) -> Tensor:
    """Room for the statement of as many buckets as there are ``checksums``."""
    num_bytes = HEADER_BYTES + checksums.nbytes
    return torch.zeros(num_bytes, dtype=torch.uint8, device=checksums.device)


def check_statement(
    stated: Tensor, computed: Tensor, plan: WeightPlan, order: TransferOrder, *, source: int
) -> str:
    """Compare what a source stated with what arrived; returns the digest.

    Args:
        stated: From :func:`make_statement`.
        computed: Checksums of what arrived: ``[num_buckets, 2]`` int64.
        plan: The layout.
        order: What was asked for.
        source: Who sent.

    Raises:
        TransferError: If something else was sent, or a bucket differs.
    """
    header, checksums = stated.split((HEADER_BYTES, computed.nbytes))
    check_header(header, plan, order, source)
    return check_buckets(
        computed, checksums.view(torch.int64).view(-1, 2), plan, order, source=source
    )


def check_buckets(
    computed: Tensor,
    stated: Tensor,
    plan: WeightPlan,
    order: TransferOrder,
    *,
    source: int,
) -> str:
    """Compare the checksums of what arrived with those of what was sent; returns the digest.

    Raises:
        TransferError: If a bucket differs.
    """
    if not torch.equal(computed, stated):
        damaged = (computed != stated).any(1).nonzero().flatten().tolist()
        raise TransferError(
            f"version {order.version}: buckets {damaged[:8]} of source {source} differ from what was "
            "sent; it is refused"
        )
    return source_digest(plan.plan_hash, order.version, source, computed)
