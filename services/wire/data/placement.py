"""Chooses the shard that holds a group's samples; no I/O.

Controllers do not import it: their image has no xxhash.
"""

from collections.abc import Sequence

import xxhash

from services.wire.transferqueue.types import Shard


def place(group: str, shards: Sequence[Shard]) -> str:
    """Chooses the shard of a group by rendezvous hashing.

    All clients choose the same shard without communication, and adding or removing a shard moves
    only that shard's fraction of the groups.

    Raises:
        ValueError: If there is no shard.
    """
    if not shards:
        raise ValueError("no shard is registered; add one or wait for one to start")
    return max(
        [shard.shard_id for shard in shards],
        key=lambda shard_id: xxhash.xxh3_64_intdigest(f"{shard_id}/{group}".encode()),
    )
