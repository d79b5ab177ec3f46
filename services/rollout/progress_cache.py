"""Progress of unfinished groups in the transferqueue."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from services.common.batch import KVBatchMeta
from services.common.errors import AlreadyExistsError, ServiceError
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

    async def load(self, group_ids: Collection[str]) -> Mapping[str, GroupProgress]:
        """Return the newest progress of those groups that have some that can be used."""
        try:
            newest = _newest(await self._metadata.get_batch(self._partition_id), group_ids)
            if newest.num_keys == 0:
                return {}
            rows = await self._data.get(newest, PARTIAL_FIELDS)
        except ServiceError as error:
            logger.warning("cached progress is not usable", extra={"why": str(error)})
            return {}
        columns = {name: rows[name].unbind() for name in PARTIAL_FIELDS}
        found: dict[str, GroupProgress] = {}
        for index, group_id in enumerate(newest.tag("group_id")):
            self._serials[str(group_id)] = int(newest.tag("serial")[index])
            try:
                found[str(group_id)] = decode_progress(
                    {name: column[index] for name, column in columns.items()}
                )
            except ValueError as error:
                logger.warning("cached progress is not usable", extra={"why": str(error)})
        return found

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
            fields = {name: [row[name] for row in rows] for name in PARTIAL_FIELDS}
            tags: dict[str, Sequence[int] | Sequence[float] | Sequence[str]] = {
                "group_id": list(serials),
                "serial": list(serials.values()),
            }
            try:
                await self._data.put(self._partition_id, keys, fields, tags=tags)
            except AlreadyExistsError:
                # A row that a crash left in this slot is older than the one that takes its place.
                await self._metadata.release(self._partition_id, keys)
                await self._data.put(self._partition_id, keys, fields, tags=tags)
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

    async def _release(self, keys: Iterable[str]) -> None:
        await self._metadata.release(self._partition_id, list(keys))


def _key(group_id: str, slot: int) -> str:
    return f"{group_id}.{slot}"


def _newest(stored: KVBatchMeta, group_ids: Collection[str]) -> KVBatchMeta:
    """Of each of the groups that is stored, the row with the highest serial."""
    wanted = set(group_ids)
    places: dict[str, int] = {}
    if stored.num_keys == 0:
        return stored
    names, serials = stored.tag("group_id"), stored.tag("serial")
    for place, name in enumerate(map(str, names)):
        if name in wanted and (
            name not in places or int(serials[place]) > int(serials[places[name]])
        ):
            places[name] = place
    return stored.select(list(places.values()))
