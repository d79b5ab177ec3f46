"""The samples of a run that the transferqueue holds, group by group."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence

from services.common.batch import KVBatchMeta
from services.common.spec.algorithm import AlgorithmSpec
from services.controller.run.ledger import Group
from services.transferqueue.client import TransferQueueClient


class StoredGroups:
    """Whole groups in one partition.

    Args:
        queue: The transferqueue.
        partition: The partition.
        group_size: Samples of a group.
    """

    def __init__(self, queue: TransferQueueClient, partition: str, group_size: int) -> None:
        self._queue = queue
        self._partition = partition
        self._group_size = group_size
        self._metas: dict[str, KVBatchMeta] = {}

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._metas

    def keep(self, group: Group, meta: KVBatchMeta) -> None:
        """Remember the samples of a group."""
        self._metas[group.group_id] = meta

    def meta(self, groups: Iterable[Group]) -> KVBatchMeta:
        """The samples of groups, in order."""
        return KVBatchMeta.concat([self._metas[group.group_id] for group in groups])

    async def release(self, groups: Sequence[Group]) -> None:
        """Delete the samples of groups that ended."""
        await self.delete([key for group in groups for key in self._metas.pop(group.group_id).keys])

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete samples that nobody waits for."""
        if keys:
            await self._queue.release(self._partition, keys)

    async def find(self) -> dict[str, KVBatchMeta]:
        """What is stored now, by group; a group may be incomplete."""
        stored = await self._queue.get_batch(self._partition)
        return {group_id: stored.select(at) for group_id, at in _by_group(stored).items()}

    def is_whole(self, meta: KVBatchMeta) -> bool:
        """Whether all members of a group are there."""
        return meta.num_keys == self._group_size

    async def finished(self) -> AsyncIterator[tuple[str, KVBatchMeta]]:
        """Groups as they become whole, for ever; those that are whole already come first."""
        members: dict[str, list[KVBatchMeta]] = defaultdict(list)
        async for batch in self._queue.watch(self._partition, 0):
            for group_id, indexes in _by_group(batch).items():
                members[group_id].append(batch.select(indexes))
                meta = KVBatchMeta.concat(members[group_id])
                if self.is_whole(meta):
                    del members[group_id]
                    yield group_id, meta


def attempt_of(meta: KVBatchMeta) -> int:
    """The try that brought a group."""
    return int(meta.tag("attempt")[0])


def oldest_version(meta: KVBatchMeta) -> int:
    """The oldest weight version in a group."""
    return min(int(version) for version in meta.tag("v_min"))


def why_unfit(meta: KVBatchMeta, algorithm: AlgorithmSpec, *, may_refill: bool) -> str | None:
    """Why a finished group is not worth training, or None.

    Args:
        meta: Its samples.
        algorithm: What training needs.
        may_refill: Whether dynamic sampling may still replace groups.
    """
    rewards = [
        float(str(reward))
        for reward, finish in zip(meta.tag("reward"), meta.tag("finish_reason"), strict=True)
        if finish != "failed"
    ]
    if len(rewards) < algorithm.min_group_size:
        return "too_few_members"
    if algorithm.dynamic_sampling and may_refill and max(rewards) - min(rewards) <= 1e-9:
        return "equal_rewards"
    return None


def _by_group(batch: KVBatchMeta) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    if batch.num_keys == 0:  # then it has no tags either
        return groups
    for index, group_id in enumerate(batch.tag("group_id")):
        groups[str(group_id)].append(index)
    return groups
