"""The transferqueue of a simulated run, whose contents survive every failure."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from services.common.fields import sample_key
from services.rollout.data.prompts import Prompt
from services.rollout.sampling.progress_cache import GroupProgress, MemberProgress
from services.rollout.sampling.sample import Sample, sample_tags
from services.wire.batch import KVBatchMeta
from services.wire.workers import GroupAssignment


class MemoryQueue:
    """Stores the tags of samples, without tensors."""

    def __init__(self) -> None:
        self._partition = ""
        self._stored: dict[str, Mapping[str, Any]] = {}
        self._watchers: list[asyncio.Queue[KVBatchMeta]] = []

    def put(self, assignment: GroupAssignment, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Stores a group, or a shard of one."""
        self._partition, group_id = assignment.partition_id, assignment.group_id
        tags = sample_tags(samples, prompt, group_id=group_id, attempt=assignment.attempt)
        new = {
            sample_key(group_id, sample.member): {name: tags[name][row] for name in tags}
            for row, sample in enumerate(samples)
        }
        self._stored |= new
        for watcher in self._watchers:
            watcher.put_nowait(self._meta(new))

    async def get_batch(self, partition: str) -> KVBatchMeta:
        return self._meta(self._stored)

    async def watch(self, partition: str, revision: int) -> AsyncIterator[KVBatchMeta]:
        watcher: asyncio.Queue[KVBatchMeta] = asyncio.Queue()
        self._watchers.append(watcher)
        try:
            yield self._meta(self._stored)
            while True:
                yield await watcher.get()
        finally:
            self._watchers.remove(watcher)

    async def release(
        self, partition: str, keys: Sequence[str], attempts: Sequence[int] = ()
    ) -> None:
        for key, attempt in zip_longest(keys, attempts):
            if attempt is None or self._stored.get(key, {}).get("attempt", 0) <= attempt:
                self._stored.pop(key, None)

    def _meta(self, stored: Mapping[str, Mapping[str, Any]]) -> KVBatchMeta:
        names = next(iter(stored.values()), {})
        tags = {name: tuple(entry[name] for entry in stored.values()) for name in names}
        return KVBatchMeta(partition_id=self._partition, keys=tuple(stored), tags=tags)


class MemoryProgress:
    """Stores the progress of unfinished groups, for all rollouts."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[int, MemberProgress]] = defaultdict(dict)

    async def load(self, first_attempts: Mapping[str, int]) -> Mapping[str, GroupProgress]:
        return {name: dict(self.groups[name]) for name in first_attempts if name in self.groups}

    async def save(
        self, groups: Mapping[str, GroupProgress], attempts: Mapping[str, int], *, is_last: bool
    ) -> None:
        for name, members in groups.items():
            self.groups[name] |= members

    async def delete_progress(self, group_id: str, members: Collection[int]) -> None:
        for member in members:
            self.groups.get(group_id, {}).pop(member, None)

    def num_tokens(self, group_id: str) -> int:
        """Returns the stored tokens of a group."""
        members = self.groups.get(group_id, {}).values()
        return sum(len(turn.token_ids) for member in members for turn in member.turns)
