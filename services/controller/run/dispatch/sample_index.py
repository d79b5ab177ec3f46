"""Index of a run's samples in the transferqueue, by group; statistics of batches."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from services.common.fields import group_of, sample_key
from services.common.runspec.algorithm import AlgorithmSpec
from services.controller.rules.difficulty import Member, trains_nothing
from services.controller.rules.learning import Histogram, histogram, term_means
from services.controller.rules.ledger import Group
from services.wire.batch import MISSING, KVBatchMeta, TagValues, pick
from services.wire.transferqueue.client import TransferQueueClient


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """Samples of one group: a view of rows in a shared batch description."""

    batch: KVBatchMeta
    indexes: Sequence[int]

    @property
    def keys(self) -> Sequence[str]:
        return pick(self.batch.keys, self.indexes)

    def tag(self, name: str) -> TagValues:
        return pick(self.batch.tag(name), self.indexes)

    def numbers(self, name: str) -> Sequence[int]:
        """Returns the values of an integer tag, one per sample."""
        return cast("Sequence[int]", self.tag(name))

    def without(self, keys: Collection[str]) -> "GroupSamples":
        return GroupSamples(self.batch, [i for i in self.indexes if self.batch.keys[i] not in keys])

    def concat(self, later: "GroupSamples") -> "GroupSamples":
        metas = [self.batch.select(self.indexes), later.batch.select(later.indexes)]
        batch = KVBatchMeta.concat(metas)
        return GroupSamples(batch, range(batch.num_keys))


class SampleIndex:
    """Samples of one partition, indexed by group.

    Args:
        required_fields: Fields that a finished sample has.
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
        self._incomplete: dict[str, GroupSamples] = {}

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._samples

    def add_group(self, group: Group, samples: GroupSamples) -> None:
        self._samples[group.group_id] = samples

    def meta(self, groups: Iterable[Group]) -> KVBatchMeta:
        """Returns a description of the samples of several groups, in order."""
        group_samples = [self._samples[group.group_id] for group in groups]
        if not group_samples:
            return KVBatchMeta(partition_id=self._partition, keys=())
        # Selects from each batch description once, not once per group, and then restores the order.
        batches = {id(samples.batch): samples.batch for samples in group_samples}
        by_batch: dict[int, list[int]] = {number: [] for number in batches}
        for samples in group_samples:
            by_batch[id(samples.batch)] += samples.indexes
        selected = [batches[number].select(indexes) for number, indexes in by_batch.items()]
        if len(selected) == 1:
            return selected[0]
        begins = dict(
            zip(by_batch, accumulate(map(len, by_batch.values()), initial=0), strict=False)
        )
        order: list[int] = []
        for samples in group_samples:
            begin = begins[id(samples.batch)]
            begins[id(samples.batch)] += len(samples.indexes)
            order += range(begin, begins[id(samples.batch)])
        return KVBatchMeta.concat(selected).select(order)

    async def release(self, groups: Sequence[Group]) -> None:
        await self.delete([self._samples.pop(group.group_id) for group in groups])

    async def delete(self, samples: Sequence[GroupSamples]) -> None:
        """Deletes samples, but not those that a later attempt stored under the same keys meanwhile."""
        keys = [key for sample in samples for key in sample.keys]
        if keys:
            attempts = [attempt for sample in samples for attempt in sample.numbers("attempt")]
            await self._queue.release(self._partition, keys, attempts)

    async def find(self) -> dict[str, GroupSamples]:
        """Returns all stored samples by group; groups may be incomplete."""
        return dict(_split(await self._queue.get_batch(self._partition)))

    def is_whole(self, samples: GroupSamples) -> bool:
        """Returns True if all members of a group are stored."""
        return len(samples.indexes) == self._group_size

    def is_scored(self, samples: GroupSamples) -> bool:
        """Returns True if the samples have all required fields."""
        present = {
            column.name
            for column in samples.batch.fields
            if MISSING not in [column.blob_indexes[index] for index in samples.indexes]
        }
        return self._required_fields <= present

    async def watch_arrivals(self) -> AsyncIterator[list[tuple[str, GroupSamples]]]:
        """Yields samples by group as they arrive, beginning with those already stored."""
        async for batch in self._queue.watch(self._partition, 0):
            if batch.num_keys:
                yield list(_split(batch))

    async def watch_losses(self) -> AsyncIterator[set[str]]:
        """Yields groups whose samples were lost with a shard, beginning with earlier losses."""
        async for loss in self._queue.watch_lost_samples(self._partition):
            yield {group_of(key) for key in loss.keys}

    def add(self, group: Group, samples: GroupSamples) -> GroupSamples | None:
        """Adds samples of a group; returns all samples once the group is complete."""
        earlier = self._incomplete.pop(group.group_id, None)
        if earlier is not None:
            samples = earlier.concat(samples.without(earlier.keys))
        if self.is_whole(samples):
            return samples
        self._incomplete[group.group_id] = samples
        return None

    def members(self, group: Group) -> set[int]:
        samples = self._incomplete.get(group.group_id)
        return set() if samples is None else set(samples.numbers("member"))

    async def discard(self, groups: Iterable[Group]) -> None:
        """Deletes the collected samples of incomplete groups."""
        await self.delete(
            [self._incomplete.pop(g.group_id) for g in groups if g.group_id in self._incomplete]
        )

    async def delete_incomplete(self, attempts: Sequence[tuple[str, int]]) -> None:
        """Deletes all samples of incomplete attempts (group id, number), also those that lack a field.

        Otherwise the next attempt could not store its samples, which have the same keys.
        """
        for group_id, _ in attempts:
            self._incomplete.pop(group_id, None)
        members = range(self._group_size)
        keys = [sample_key(group_id, member) for group_id, _ in attempts for member in members]
        if keys:
            numbers = [number for _, number in attempts for _ in members]
            await self._queue.release(self._partition, keys, numbers)


def attempt_of(samples: GroupSamples) -> int:
    return max(samples.numbers("attempt"))


def oldest_version(samples: GroupSamples) -> int:
    return min(samples.numbers("v_min"))


def rewards_of(samples: GroupSamples) -> list[float]:
    """Returns the rewards of samples that are neither greedy nor failed."""
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
    samples: GroupSamples,
    algorithm: AlgorithmSpec,
    *,
    may_refill: bool,
    max_response_tokens: int = 0,
) -> str | None:
    """Returns why a finished group is not trained; None if it is.

    Args:
        algorithm: Min group size, and whether sampling is dynamic.
        may_refill: True if dynamic sampling may still replace groups.
        max_response_tokens: Limit of the length, from which long responses are penalized.
    """
    if len(rewards_of(samples)) < algorithm.min_group_size:
        return "too_few_members"
    if not (algorithm.dynamic_sampling and may_refill):
        return None
    members = _members_of(samples, algorithm)
    is_idle = trains_nothing(members, algorithm, max_response_tokens=max_response_tokens)
    return "equal_rewards" if is_idle else None


def _members_of(samples: GroupSamples, algorithm: AlgorithmSpec) -> list[Member]:
    """Returns the members of a group that are neither greedy nor failed."""
    rewards = cast("Sequence[float]", samples.tag("reward"))
    lengths: Sequence[int] = [0] * len(rewards)
    terms: Sequence[str] = ["{}"] * len(rewards)
    if algorithm.overlong.buffer_tokens:
        lengths = samples.numbers("response_tokens")
    if algorithm.advantage_kind.idle_groups == "equal_terms":
        terms = cast("Sequence[str]", samples.tag("terms"))
    ends = zip(samples.tag("finish_reason"), samples.tag("greedy"), strict=True)
    return [
        Member(
            reward=reward,
            num_tokens=length,
            is_truncated=finish == "length",
            terms=json.loads(names),
        )
        for reward, length, names, (finish, greedy) in zip(
            rewards, lengths, terms, ends, strict=True
        )
        if finish != "failed" and not greedy
    ]


def reward_terms(samples: KVBatchMeta) -> dict[str, float]:
    """Returns the mean of each named reward term, as metrics of a step.

    Greedy and failed samples are excluded.
    """
    if not samples.num_keys:
        return {}
    tags = zip(
        samples.tag("terms"), samples.tag("finish_reason"), samples.tag("greedy"), strict=True
    )
    return term_means(
        str(terms) for terms, finish, greedy in tags if finish != "failed" and not greedy
    )


def set_scores(samples: KVBatchMeta, sets: Mapping[str, str]) -> dict[str, float]:
    """Returns mean reward and sample count of each prompt set, as metrics of a step.

    Args:
        sets: Name of the prompt set of each group.
    """
    if not samples.num_keys:
        return {}
    rewards: dict[str, list[float]] = defaultdict(list)
    columns = (samples.tag(name) for name in ("group_id", "reward", "finish_reason", "greedy"))
    for group_id, reward, finish, greedy in zip(*columns, strict=True):
        if finish != "failed" and not greedy:
            rewards[sets[str(group_id)]].append(float(reward))
    scores: dict[str, float] = {}
    for name, set_rewards in sorted(rewards.items()):
        scores[f"set_reward/{name}"] = sum(set_rewards) / len(set_rewards)
        scores[f"set_samples/{name}"] = float(len(set_rewards))
    return scores


def spread_of(
    samples: KVBatchMeta, *, weight_version: int, max_staleness: int
) -> dict[str, Histogram]:
    """Returns histograms of staleness and response length of a step; empty for an empty batch.

    Tokens over the staleness bound do not train, so a sample with such tokens counts as one at the bound.

    Args:
        weight_version: Version that the step is trained from.
    """
    if not samples.num_keys:
        return {}
    limit = weight_version - max_staleness
    oldest = cast("Sequence[int]", samples.tag("v_min"))
    trained = (max(version, limit) for version in oldest if version >= 0)
    return {
        "staleness": histogram(weight_version - version for version in trained),
        "response_tokens": histogram(cast("Sequence[int]", samples.tag("response_tokens"))),
    }


def length_facts(samples: KVBatchMeta) -> dict[str, float]:
    """Returns 95th percentile and max length of finished responses, in tokens; empty without any.

    The percentile is nearest-rank: the length of an actual response.
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
    """Yields the samples of each group."""
    if batch.num_keys == 0:  # an empty batch has no tags either
        return
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(batch.tag("group_id")):
        groups[str(group_id)].append(index)
    for group_id, indexes in groups.items():
        # Samples of a group are usually adjacent; then reading a tag is one slice.
        run = range(indexes[0], indexes[-1] + 1)
        yield group_id, GroupSamples(batch, run if len(run) == len(indexes) else indexes)
