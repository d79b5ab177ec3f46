"""Progress of unfinished groups in the transferqueue."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from services.common.batch import KVBatchMeta
from services.common.errors import AlreadyExistsError, ServiceError
from services.rollout.failures import GroupError
from services.rollout.partial import (
    PARTIAL_FIELDS,
    GroupProgress,
    MemberProgress,
    decode_progress,
    encode_progress,
)
from services.transferqueue.client import TransferQueueClient
from services.transferqueue.dataclient import DataClient

logger = logging.getLogger(__name__)
_SLOTS = (0, 1)
_Member = tuple[str, int]


class TransferQueueCache:
    """One row per member of a group in the run's ``partial`` partition.

    A member has two keys that take turns: the new row is stored before the old one is deleted, so that a
    crash at any moment leaves one that is complete. The tag ``serial`` says which is newer. The tag
    ``attempt`` fences a row: a later attempt that begins anew never resumes it, however late the row is
    stored or restored. Replicas that work on different members of a group touch different rows.

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
        self._serials: dict[str, dict[int, int]] = defaultdict(dict)

    async def load(self, first_attempts: Mapping[str, int]) -> Mapping[str, GroupProgress]:
        """Return the newest progress of those groups that have some that can be used.

        Args:
            first_attempts: By group, the first attempt whose progress may be resumed.
        """
        try:
            stored = await self._metadata.get_batch(self._partition_id)
            if stored.num_keys == 0:
                return {}
            serials = stored.tag("serial")
            for place, (group_id, member) in enumerate(_members(stored)):
                if group_id in first_attempts:
                    known = self._serials[group_id]
                    known[member] = max(int(serials[place]), known.get(member, 0))
            newest = _newest(stored, first_attempts)
            if newest.num_keys == 0:
                return {}
            rows = await self._data.get(newest, PARTIAL_FIELDS)
        except (ServiceError, ValueError) as error:
            logger.warning("cached progress is not usable", extra={"why": str(error)})
            return {}
        columns = {name: rows[name].unbind() for name in PARTIAL_FIELDS}
        found: dict[str, dict[int, MemberProgress]] = defaultdict(dict)
        for index, (group_id, member) in enumerate(_members(newest)):
            try:
                found[group_id][member] = decode_progress(
                    {name: column[index] for name, column in columns.items()}
                )
            except ValueError as error:
                logger.warning("cached progress is not usable", extra={"why": str(error)})
        return found

    async def save(
        self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
    ) -> None:
        """Store progress in place of older progress of the same members.

        Args:
            groups: Progress by group.
            attempts: The attempt of each group.
            is_last: Whether this replica gives these groups away.

        Raises:
            GroupError: If the transferqueue does not take it.
        """
        members = [(group_id, member) for group_id in groups for member in groups[group_id]]
        serials = [self._serials[name].get(member, 0) + 1 for name, member in members]
        rows = []
        for group_id, member in members:
            rows.append(encode_progress(groups[group_id][member]))
            # One at a time: all of them take longer than messages may wait for the event loop, and a thread
            # would keep the interpreter from it for milliseconds at each of its calls.
            await asyncio.sleep(0)
        keys = [_key(*who, serial % 2) for who, serial in zip(members, serials, strict=True)]
        old = [_key(*who, 1 - serial % 2) for who, serial in zip(members, serials, strict=True)]
        try:
            fields = {name: [row[name] for row in rows] for name in PARTIAL_FIELDS}
            tags: dict[str, Sequence[int] | Sequence[float] | Sequence[str]] = {
                "group_id": [group_id for group_id, _ in members],
                "member": [member for _, member in members],
                "serial": serials,
                "attempt": [attempts[group_id] for group_id, _ in members],
            }
            try:
                await self._data.put(self._partition_id, keys, fields, tags=tags)
            except AlreadyExistsError:
                # A row that a crash left in this slot is older than the one that takes its place.
                await self._release(keys)
                await self._data.put(self._partition_id, keys, fields, tags=tags)
            await self._release(old)
        except ServiceError as error:
            raise GroupError("cache_failed", error.message, retryable=True) from error
        for (group_id, member), serial in zip(members, serials, strict=True):
            if is_last:
                self._serials.pop(group_id, None)
            else:
                self._serials[group_id][member] = serial

    async def forget(self, group_id: str, members: Collection[int]) -> None:
        """Delete the progress of members of a group, if there is any."""
        known = self._serials.pop(group_id, {})
        keys = [_key(group_id, m, slot) for m in members if m in known for slot in _SLOTS]
        if not keys:
            return
        try:
            await self._release(keys)
        except ServiceError as error:
            logger.warning("cached progress was not deleted", extra={"why": str(error)})

    async def _release(self, keys: Iterable[str]) -> None:
        await self._metadata.release(self._partition_id, list(keys))


def _key(group_id: str, member: int, slot: int) -> str:
    return f"{group_id}.{member}.{slot}"


def _members(stored: KVBatchMeta) -> list[_Member]:
    """Whose progress each row is."""
    names, members = stored.tag("group_id"), stored.tag("member")
    return [(str(names[row]), int(members[row])) for row in range(stored.num_keys)]


def _newest(stored: KVBatchMeta, first_attempts: Mapping[str, int]) -> KVBatchMeta:
    """Of each member whose progress may be resumed, the row with the highest serial."""
    places: dict[_Member, int] = {}
    serials, attempts = stored.tag("serial"), stored.tag("attempt")
    for place, who in enumerate(_members(stored)):
        first = first_attempts.get(who[0])
        if first is None or int(attempts[place]) < first:
            continue
        if who not in places or int(serials[place]) > int(serials[places[who]]):
            places[who] = place
    return stored.select(list(places.values()))
