"""Storage shard whose index runs in another process."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from services.common.errors import ServiceError
from services.common.task_group import TaskGroup, unwrapped
from services.transferqueue.storage.blobs import BlobStore
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.registry_client import ShardRegistryClient
from services.wire.transferqueue.types import Shard

logger = logging.getLogger(__name__)


class RemoteIndex:
    """Index of another process, as this shard uses it.

    Args:
        client: Calls the index.
    """

    def __init__(self, client: ShardRegistryClient) -> None:
        self._client = client

    async def reserve(self, partition_id: str, size_bytes: int, *, wait_s: float) -> None:
        """Charges the run's quota."""
        await self._client.reserve(partition_id, size_bytes, wait_s=wait_s)

    def cancel(self, partition_id: str, size_bytes: int) -> None:
        """Reverts the charge in the background."""
        self._tasks.create_task(self._cancel(partition_id, size_bytes))

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        """Makes a put visible."""
        return await self._client.commit(meta, put_id=put_id)

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of a client that may use the data socket; None if it may not."""
        return await self._client.admitted_as(public_key)

    @asynccontextmanager
    async def joined(
        self, shard: Shard, storage: BlobStore, free: Callable[[Sequence[int]], None]
    ) -> AsyncIterator[None]:
        """Registers the shard and sends heartbeats until the block ends.

        Args:
            shard: Address of this shard.
            storage: Its blobs.
            free: Deletes blobs.

        Raises:
            NotFoundError: If the index gave this shard up. Its samples count as lost, so the
                process must end and restart.
        """
        await self._client.register(shard, capacity_bytes=storage.capacity_bytes)
        with unwrapped():
            async with TaskGroup() as self._tasks:
                beating = self._tasks.create_task(self._beat(storage, free))
                yield
                beating.cancel()

    async def _beat(self, storage: BlobStore, free: Callable[[Sequence[int]], None]) -> None:
        num_deleted = 0
        while True:
            blob_ids = await self._client.heartbeat(
                stored_bytes=storage.used_bytes, num_deleted=num_deleted
            )
            free(blob_ids)
            num_deleted += len(blob_ids)

    async def _cancel(self, partition_id: str, size_bytes: int) -> None:
        try:
            await self._client.cancel(partition_id, size_bytes)
        except ServiceError as error:
            # The index reverts the charge when it gives this shard up.
            logger.warning("quota was not returned", extra={"error": str(error)})
