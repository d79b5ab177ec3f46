"""The storage shards of a transferqueue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.columns import BlobRef
from services.transferqueue.facts import Shard, ShardStats


@dataclass(frozen=True, slots=True)
class _Member:
    shard: Shard
    stats: Callable[[], ShardStats]
    free: Callable[[Sequence[int]], None]


class Shards:
    """Where the bytes are."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}

    def add(
        self,
        shard: Shard,
        *,
        stats: Callable[[], ShardStats],
        free: Callable[[Sequence[int]], None],
    ) -> None:
        """Add a shard, with how to see its fill and how to delete blobs there."""
        self._members[shard.shard_id] = _Member(shard, stats, free)

    def admit(self, public_key: str) -> list[Shard]:
        """Admit a client to the data sockets; returns where they are."""
        return [member.shard for member in self._members.values()]

    def stats(self) -> list[ShardStats]:
        """Fill of each shard."""
        return [member.stats() for member in self._members.values()]

    def free(self, blobs: Sequence[BlobRef]) -> None:
        """Delete blobs, wherever they are."""
        by_shard: dict[str, list[int]] = {}
        for blob in blobs:
            by_shard.setdefault(blob.shard_id, []).append(blob.blob_id)
        for shard_id, blob_ids in by_shard.items():
            if shard_id in self._members:
                self._members[shard_id].free(blob_ids)
