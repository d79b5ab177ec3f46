"""Which shard holds a group's samples. Pure."""

from collections.abc import Sequence

import xxhash

from services.transferqueue.facts import Shard


def place(group: str, shards: Sequence[Shard]) -> str:
    """The shard of a group, by rendezvous hashing.

    Each client comes to the same answer without asking, and a shard that comes or goes moves only its
    own share of the groups.

    Raises:
        ValueError: If there is no shard.
    """
    if not shards:
        raise ValueError("there is no shard; add one or wait for one to start")
    return max(
        [shard.shard_id for shard in shards],
        key=lambda shard_id: xxhash.xxh3_64_intdigest(f"{shard_id}/{group}".encode()),
    )
