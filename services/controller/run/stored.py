"""The samples of a run that the transferqueue holds, group by group."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from services.common.batch import KVBatchMeta
from services.common.columns import MISSING
from services.common.spec.algorithm import AlgorithmSpec
from services.controller.run.groups import Group
from services.transferqueue.client import TransferQueueClient


class StoredGroups:
    """Whole groups in one partition.

    Args:
        queue: The transferqueue.
        partition: The partition.
        group_size: Samples of a group.
        required_fields: Fields that a sample needs before it counts as finished.
    """

    def __init__(
        self,
        queue: TransferQueueClient,
        partition: str,
        *,
        group_size: int,
        required_fields: Sequence[str],
    ) -> None:
        self._queue = queue
        self._partition = partition
        self._group_size = group_size
        self._required_fields = frozenset(required_fields)
        self._metas: dict[str, KVBatchMeta] = {}

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._metas

    def keep(self, group: Group, meta: KVBatchMeta) -> None:
        """Remember the samples of a group."""
        self._metas[group.group_id] = meta

    def meta(self, groups: Iterable[Group]) -> KVBatchMeta:
        """The samples of groups, in order."""
        metas = [self._metas[group.group_id] for group in groups]
        return (
            KVBatchMeta.concat(metas)
            if metas
            else KVBatchMeta(partition_id=self._partition, keys=())
        )

    async def release(self, groups: Sequence[Group]) -> None:
        """Delete the samples of groups that ended."""
        await self.delete([key for group in groups for key in self._metas.pop(group.group_id).keys])

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete samples that nobody waits for."""
        if keys:
            await self._queue.release(self._partition, keys)

    async def find(self) -> dict[str, KVBatchMeta]:
        """What is stored now, by group; a group may be incomplete."""
        return dict(_split(await self._queue.get_batch(self._partition)))

    def is_whole(self, meta: KVBatchMeta) -> bool:
        """Whether all members of a group are there."""
        return meta.num_keys == self._group_size

    def is_scored(self, meta: KVBatchMeta) -> bool:
        """Whether nobody has to add to the members of a group any more."""
        present = {column.name for column in meta.fields if MISSING not in column.blob_indexes}
        return self._required_fields <= present

    async def finished(self) -> AsyncIterator[list[tuple[str, KVBatchMeta]]]:
        """Groups as they become whole, for ever; those that are whole already come first."""
        members: dict[str, list[KVBatchMeta]] = defaultdict(list)
        async for batch in self._queue.watch(self._partition, 0):
            whole: list[tuple[str, KVBatchMeta]] = []
            for group_id, found in _split(batch):
                meta = found
                if group_id in members or not self.is_whole(found):
                    members[group_id].append(found)
                    meta = KVBatchMeta.concat(members[group_id])
                if self.is_whole(meta):
                    members.pop(group_id, None)
                    whole.append((group_id, meta))
            if whole:
                yield whole


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
        for reward, finish, greedy in zip(
            meta.tag("reward"), meta.tag("finish_reason"), meta.tag("greedy"), strict=True
        )
        if finish != "failed" and not greedy
    ]
    if len(rewards) < algorithm.min_group_size:
        return "too_few_members"
    if algorithm.dynamic_sampling and may_refill and max(rewards) - min(rewards) <= 1e-9:
        return "equal_rewards"
    return None


def _split(batch: KVBatchMeta) -> Iterator[tuple[str, KVBatchMeta]]:
    """The samples of each group."""
    if batch.num_keys == 0:  # then it has no tags either
        return
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(batch.tag("group_id")):
        groups[str(group_id)].append(index)
    for group_id, indexes in groups.items():
        yield group_id, batch if len(groups) == 1 else batch.select(indexes)
