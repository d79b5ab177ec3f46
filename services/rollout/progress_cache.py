"""Progress of unfinished groups in the transferqueue."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from services.common.batch import KVBatchMeta
from services.common.errors import NotFoundError, ServiceError
from services.rollout.client import GroupAssignment
from services.rollout.failures import GroupError
from services.rollout.partial import (
    PARTIAL_FIELDS,
    GroupProgress,
    decode_progress,
    encode_progress,
)
from services.transferqueue.client import TransferQueueClient
from services.transferqueue.dataclient import DataClient

logger = logging.getLogger(__name__)
_SLOTS = (0, 1)


class TransferQueueCache:
    """One row per group in the run's ``partial`` partition.

    A group has two keys that take turns: the new row is stored before the old one is deleted, so that a
    crash at any moment leaves one that is complete. The tag ``serial`` says which is newer.

    Args:
        partition_id: The run's ``partial`` partition.
        data: Moves the tensors.
        metadata: Finds and deletes rows.
    """

    def __init__(
        self, partition_id: str, *, data: DataClient, metadata: TransferQueueClient
    ) -> None:
        self._partition_id = partition_id
        self._data = data
        self._metadata = metadata
        self._serials: dict[str, int] = {}

    async def load(self, group_id: str) -> GroupProgress:
        """Return the newest progress; empty if there is none that can be used."""
        try:
            meta = await self._find([_key(group_id, slot) for slot in _SLOTS])
            if meta is None:
                return {}
            serials = [int(serial) for serial in meta.tag("serial")]
            newest = serials.index(max(serials))
            rows = await self._data.get(meta.select([newest]), PARTIAL_FIELDS)
            progress = decode_progress({name: rows[name].unbind()[0] for name in PARTIAL_FIELDS})
        except (ServiceError, ValueError) as error:
            logger.warning("cached progress is not usable", extra={"why": str(error)})
            return {}
        self._serials[group_id] = serials[newest]
        return progress

    async def save(self, groups: Sequence[tuple[GroupAssignment, GroupProgress]]) -> None:
        """Store progress in place of older progress.

        Raises:
            GroupError: If the transferqueue does not take it.
        """
        serials = {
            assignment.group_id: self._serials.get(assignment.group_id, 0) + 1
            for assignment, _ in groups
        }
        rows = [encode_progress(progress) for _, progress in groups]
        keys = [_key(group_id, serial % 2) for group_id, serial in serials.items()]
        try:
            # A row that a crash left in this slot is older than the one that takes its place.
            await self._metadata.release(self._partition_id, keys)
            await self._data.put(
                self._partition_id,
                keys,
                {name: [row[name] for row in rows] for name in PARTIAL_FIELDS},
                tags={"group_id": list(serials), "serial": list(serials.values())},
            )
            await self._release(_key(name, 1 - serial % 2) for name, serial in serials.items())
        except ServiceError as error:
            raise GroupError("cache_failed", error.message, retryable=True) from error
        self._serials.update(serials)

    async def forget(self, group_id: str) -> None:
        """Delete the progress of a group, if there is any."""
        if self._serials.pop(group_id, None) is None:
            return
        try:
            await self._release(_key(group_id, slot) for slot in _SLOTS)
        except ServiceError as error:
            logger.warning("cached progress was not deleted", extra={"why": str(error)})

    async def _find(self, keys: Sequence[str]) -> KVBatchMeta | None:
        """Describe those of the keys that exist."""
        try:
            return await self._metadata.get_batch(self._partition_id, keys)
        except NotFoundError as error:
            missing = _missing(error.metadata)
        found = [key for key in keys if key not in missing]
        if not found or not missing:
            return None
        return await self._metadata.get_batch(self._partition_id, found)

    async def _release(self, keys: Iterable[str]) -> None:
        await self._metadata.release(self._partition_id, list(keys))


def _key(group_id: str, slot: int) -> str:
    return f"{group_id}.{slot}"


def _missing(metadata: Mapping[str, str]) -> set[str]:
    return set(metadata.get("keys", "").split(",")) - {""}
