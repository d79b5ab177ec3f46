"""The samples of a run that the transferqueue holds, group by group."""

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from services.common.batch import MISSING, KVBatchMeta, TagValues, pick
from services.common.fields import group_of, sample_key
from services.common.runspec.algorithm import AlgorithmSpec
from services.controller.rules.groups import Group
from services.controller.rules.statistics import Histogram, histogram, term_means
from services.transferqueue.client import TransferQueueClient


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """The samples of one group: some of those of a description that is not taken apart for it."""

    batch: KVBatchMeta
    indexes: Sequence[int]

    @property
    def keys(self) -> Sequence[str]:
        """Their keys."""
        return pick(self.batch.keys, self.indexes)

    def tag(self, name: str) -> TagValues:
        """Values of a tag, one for each of them."""
        return pick(self.batch.tag(name), self.indexes)

    def numbers(self, name: str) -> Sequence[int]:
        """Values of a tag that holds whole numbers."""
        return cast("Sequence[int]", self.tag(name))

    def without(self, keys: Collection[str]) -> "GroupSamples":
        """Those that have other keys."""
        return GroupSamples(self.batch, [i for i in self.indexes if self.batch.keys[i] not in keys])

    def and_(self, later: "GroupSamples") -> "GroupSamples":
        """These and others of the same group."""
        metas = [self.batch.select(self.indexes), later.batch.select(later.indexes)]
        both = KVBatchMeta.concat(metas)
        return GroupSamples(both, range(both.num_keys))


class SampleIndex:
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
        self._samples: dict[str, GroupSamples] = {}
        self._begun: dict[str, GroupSamples] = {}

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._samples

    def keep(self, group: Group, samples: GroupSamples) -> None:
        """Remember the samples of a group."""
        self._samples[group.group_id] = samples

    def meta(self, groups: Iterable[Group]) -> KVBatchMeta:
        """The samples of groups, in order."""
        chosen = [self._samples[group.group_id] for group in groups]
        if not chosen:
            return KVBatchMeta(partition_id=self._partition, keys=())
        # Once per message that described samples, not once per group: then they are put in order.
        batches = {id(samples.batch): samples.batch for samples in chosen}
        wanted: dict[int, list[int]] = {number: [] for number in batches}
        for samples in chosen:
            wanted[id(samples.batch)] += samples.indexes
        connections = [batches[number].select(indexes) for number, indexes in wanted.items()]
        if len(connections) == 1:
            return connections[0]
        begins = dict(zip(wanted, accumulate(map(len, wanted.values()), initial=0), strict=False))
        order: list[int] = []
        for samples in chosen:
            begin = begins[id(samples.batch)]
            begins[id(samples.batch)] += len(samples.indexes)
            order += range(begin, begins[id(samples.batch)])
        return KVBatchMeta.concat(connections).select(order)

    async def release(self, groups: Sequence[Group]) -> None:
        """Delete the samples of groups that ended."""
        ended = [self._samples.pop(group.group_id) for group in groups]
        await self.delete([key for samples in ended for key in samples.keys])

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete samples that nobody waits for."""
        if keys:
            await self._queue.release(self._partition, keys)

    async def find(self) -> dict[str, GroupSamples]:
        """What is stored now, by group; a group may be incomplete."""
        return dict(_split(await self._queue.get_batch(self._partition)))

    def is_whole(self, samples: GroupSamples) -> bool:
        """Whether all members of a group are there."""
        return len(samples.indexes) == self._group_size

    def is_scored(self, samples: GroupSamples) -> bool:
        """Whether nobody has to add to the members of a group any more."""
        present = {
            column.name
            for column in samples.batch.fields
            if MISSING not in [column.blob_indexes[index] for index in samples.indexes]
        }
        return self._required_fields <= present

    async def arrived(self) -> AsyncIterator[list[tuple[str, GroupSamples]]]:
        """Samples as they come, by group, for ever; those that are there already come first."""
        async for batch in self._queue.watch(self._partition, 0):
            if batch.num_keys:
                yield list(_split(batch))

    async def lost(self) -> AsyncIterator[set[str]]:
        """Groups of which samples were lost with a shard, as it happens; earlier losses come first."""
        async for loss in self._queue.watch_losses(self._partition):
            yield {group_of(key) for key in loss.keys}

    def add(self, group: Group, samples: GroupSamples) -> GroupSamples | None:
        """Take in some samples of a group; returns all of them once it is whole."""
        earlier = self._begun.pop(group.group_id, None)
        if earlier is not None:
            samples = earlier.and_(samples.without(earlier.keys))
        if self.is_whole(samples):
            return samples
        self._begun[group.group_id] = samples
        return None

    def members(self, group: Group) -> set[int]:
        """Members of a group that is not whole whose samples are there."""
        begun = self._begun.get(group.group_id)
        return set() if begun is None else set(begun.numbers("member"))

    async def discard(self, groups: Iterable[Group]) -> None:
        """Delete what is there of groups that are not whole."""
        found = [self._begun.pop(g.group_id) for g in groups if g.group_id in self._begun]
        await self.delete([key for samples in found for key in samples.keys])

    async def wipe(self, groups: Sequence[Group]) -> None:
        """Delete what is stored of groups that were not seen whole, also what still lacks a field.

        Were it left, the next try would find its keys taken.
        """
        for group in groups:
            self._begun.pop(group.group_id, None)
        members = range(self._group_size)
        await self.delete(
            [sample_key(group.group_id, member) for group in groups for member in members]
        )


def attempt_of(samples: GroupSamples) -> int:
    """The newest try that brought some of them."""
    return max(samples.numbers("attempt"))


def oldest_version(samples: GroupSamples) -> int:
    """The oldest weight version in a group."""
    return min(samples.numbers("v_min"))


def rewards_of(samples: GroupSamples) -> list[float]:
    """Rewards of the samples that count: sampled ones that did not fail."""
    return [
        reward
        for reward, finish, greedy in zip(
            cast("Sequence[float]", samples.tag("reward")),
            samples.tag("finish_reason"),
            samples.tag("greedy"),
            strict=True,
        )
        if finish != "failed" and not greedy
    ]


def unfit_reason(
    samples: GroupSamples, algorithm: AlgorithmSpec, *, may_refill: bool
) -> str | None:
    """Why a finished group is not worth training, or None.

    Args:
        samples: Its samples.
        algorithm: What training needs.
        may_refill: Whether dynamic sampling may still replace groups.
    """
    rewards = rewards_of(samples)
    if len(rewards) < algorithm.min_group_size:
        return "too_few_members"
    if algorithm.dynamic_sampling and may_refill and max(rewards) - min(rewards) <= 1e-9:
        return "equal_rewards"
    return None


def reward_terms(samples: KVBatchMeta) -> dict[str, float]:
    """Means of the named terms of rewards that counted, as a step's metrics."""
    if not samples.num_keys:
        return {}
    tags = zip(
        samples.tag("terms"), samples.tag("finish_reason"), samples.tag("greedy"), strict=True
    )
    return term_means(
        str(terms) for terms, finish, greedy in tags if finish != "failed" and not greedy
    )


def set_scores(samples: KVBatchMeta, sets: Mapping[str, str]) -> dict[str, float]:
    """Mean reward and number of the samples of each set of prompts, as a step's metrics.

    Args:
        samples: The batch.
        sets: The set of each group.
    """
    if not samples.num_keys:
        return {}
    rewards: dict[str, list[float]] = defaultdict(list)
    columns = (samples.tag(name) for name in ("group_id", "reward", "finish_reason", "greedy"))
    for group_id, reward, finish, greedy in zip(*columns, strict=True):
        if finish != "failed" and not greedy:
            rewards[sets[str(group_id)]].append(float(reward))
    scores: dict[str, float] = {}
    for name, found in sorted(rewards.items()):
        scores[f"set_reward/{name}"] = sum(found) / len(found)
        scores[f"set_samples/{name}"] = float(len(found))
    return scores


def spread_of(
    samples: KVBatchMeta, *, weight_version: int, max_staleness: int
) -> dict[str, Histogram]:
    """How the samples of a step spread; nothing without any.

    Tokens over the bound do not train: a sample that has some counts as one at the bound.

    Args:
        samples: The batch.
        weight_version: Version that the step is trained from.
        max_staleness: The bound.
    """
    if not samples.num_keys:
        return {}
    limit = weight_version - max_staleness
    oldest = cast("Sequence[int]", samples.tag("v_min"))
    trained = (max(one, limit) for one in oldest if one >= 0)
    return {
        "staleness": histogram(weight_version - one for one in trained),
        "response_tokens": histogram(cast("Sequence[int]", samples.tag("response_tokens"))),
    }


def length_facts(samples: KVBatchMeta) -> dict[str, float]:
    """How long the finished responses of a step are beside their mean, in tokens; nothing without any.

    The 95th percentile is the length of one of them that 95 % of them do not pass.
    """
    if not samples.num_keys:
        return {}
    tags = zip(samples.tag("response_tokens"), samples.tag("finish_reason"), strict=True)
    lengths = sorted(cast("int", length) for length, finish in tags if finish != "failed")
    if not lengths:
        return {}
    rank = -(-95 * len(lengths) // 100)
    return {"response_length_p95": lengths[rank - 1], "response_length_max": lengths[-1]}


def _split(batch: KVBatchMeta) -> Iterator[tuple[str, GroupSamples]]:
    """The samples of each group."""
    if batch.num_keys == 0:  # then it has no tags either
        return
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(batch.tag("group_id")):
        groups[str(group_id)].append(index)
    for group_id, indexes in groups.items():
        first, last = indexes[0], indexes[-1]
        # Samples of a group lie side by side as a rule; then reading a tag is one slice.
        is_run = last - first + 1 == len(indexes)
        yield group_id, GroupSamples(batch, range(first, last + 1) if is_run else indexes)
