"""Evaluates pinned weight versions on the held-out prompts, beside training."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from services.common.batch import KVBatchMeta
from services.common.fields import partition_id
from services.common.spec.run import RunSpec
from services.controller.client import GroupFailure
from services.controller.run.assembly import Assembly
from services.controller.run.prompts import sample_seed
from services.controller.run.validation import (
    Reason,
    ValidationMachine,
    ValidationState,
    is_periodic,
)
from services.rollout.client import GroupAssignment
from services.transferqueue.client import TransferQueueClient

logger = logging.getLogger(__name__)

# Seeds of held-out samples never meet those of training groups.
_SEED_OFFSET = 1 << 40
GROUP_PREFIX = "v"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of one weight version."""

    version: int
    reason: str
    status: str
    num_samples: int
    greedy: float | None
    """Mean reward of greedy responses; None without any."""
    sampled: float | None
    """Mean reward of sampled responses; None without any."""
    by_source: dict[str, dict[str, float]]
    """The same two per data source, and of each prompt's k sampled rewards, averaged over prompts: ``best``
    (best@k) and ``maj`` (maj@k, the reward that most of them got: the controller sees rewards, not the
    answers)."""
    seconds: float


@dataclass(slots=True)
class _Scores:
    greedy: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    by_prompt: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Sampled rewards of each prompt."""

    def add(self, group_id: str, reward: float, *, is_greedy: bool) -> None:
        """Take in one sample."""
        if is_greedy:
            self.greedy.append(reward)
            return
        self.sampled.append(reward)
        self.by_prompt[group_id].append(reward)

    def means(self) -> dict[str, float]:
        """Every score that there is, by name."""
        prompts = self.by_prompt.values()
        scores = {
            "greedy": _mean(self.greedy),
            "sampled": _mean(self.sampled),
            "best": _mean([max(rewards) for rewards in prompts]),
            "maj": _mean([_majority(rewards) for rewards in prompts]),
        }
        return {name: score for name, score in scores.items() if score is not None}


class Evaluator:
    """Runs the validation machine of one run.

    Args:
        spec: The run's specification.
        run_id: Names its partitions.
        parts: Where the prompts go, and the lock that keeps the weights as they are meanwhile.
        queue: Where the samples arrive.
        on_result: Hears of every evaluation.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        parts: Assembly,
        *,
        queue: TransferQueueClient,
        on_result: Callable[[Evaluation], Awaitable[None]],
    ) -> None:
        self._spec = spec
        self._partition = partition_id(run_id, "validation")
        self._num_rows = num_rows = parts.num_heldout_rows
        self._attempt = parts.attempt
        self._replicas = parts.replicas
        self._queue = queue
        self._pin = parts.weights.pin
        self._on_result = on_result
        self._evaluated: Collection[int] = ()
        self._version = -1
        self._temperatures = (0.0,) + (
            spec.validation.temperature,
        ) * spec.validation.samples_per_prompt
        self._machine = ValidationMachine(num_rows * len(self._temperatures), enabled=num_rows > 0)
        self._changed = asyncio.Condition()
        self._samples: dict[str, KVBatchMeta] = {}
        self._failed: set[str] = set()

    async def restore(self, evaluated: Collection[int]) -> None:
        """Go on behind an earlier loop, which evaluated the versions in ``evaluated``."""
        self._evaluated = evaluated
        left = await self._queue.get_batch(self._partition)
        if left.num_keys:
            await self._queue.release(self._partition, list(left.keys))

    async def published(self, version: int, *, step: int, is_last: bool = False) -> None:
        """All rollouts serve ``version``, the weights of ``step``; evaluate it if it is its turn."""
        validation = self._spec.validation
        self._version = version
        self._machine.published(version)
        reason: Reason | None = None
        if is_last and validation.at_end:
            reason = "final"
        elif step == 0 and (validation.before_train or validation.only):
            reason = "initial"
        elif is_periodic(step, validation.every):
            reason = "periodic"
        if reason is not None and version not in self._evaluated:
            self._machine.trigger(version, reason)
            await self._notify()
            if validation.mode == "barrier":
                await self.idle()

    def change(self, spec: RunSpec) -> None:
        """Go on under a changed specification."""
        self._spec = spec

    @property
    def is_busy(self) -> bool:
        """Whether something is being evaluated."""
        return self._machine.pinned is not None

    async def trigger(self) -> None:
        """Evaluate the version that is served now, because somebody asks for it."""
        self._machine.trigger(self._version, "manual")
        await self._notify()

    async def idle(self) -> None:
        """Return when no evaluation is running or waiting."""
        resting = (ValidationState.IDLE, ValidationState.DISABLED, ValidationState.STOPPED)
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._machine.state in resting and self._machine.pending is None
            )

    async def run(self) -> None:
        """Evaluate whatever is triggered, for ever."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._machine.state is ValidationState.ACQUIRE)
            await self._evaluate()
            await self._notify()

    async def collect(self) -> None:
        """Take in finished samples for ever."""
        async for batch in self._queue.watch(self._partition, 0):
            for index, key in enumerate(batch.keys):
                self._samples[key] = batch.select([index])
            await self._notify()

    async def fail(self, failures: Sequence[GroupFailure]) -> None:
        """Take in held-out groups that brought no samples: they count as not answered."""
        self._failed.update(f.group_id for f in failures if f.group_id.startswith(GROUP_PREFIX))
        await self._notify()

    async def _evaluate(self) -> None:
        clock = asyncio.get_running_loop().time
        machine = self._machine
        version = machine.pinned
        assert version is not None
        start = clock()
        if await self._acquire():
            try:
                groups = self._groups(version)
                await self._start(groups)
                await self._await_samples(groups)
            finally:
                self._pin.release()
        scores = self._score()
        machine.scored()
        num_results = len(machine.results)
        machine.reported()
        result = machine.results[num_results]
        await self._queue.release(self._partition, list(self._samples))
        self._samples.clear()
        self._failed.clear()
        await self._on_result(
            _evaluation(result.version, result.reason, result.status, scores, clock() - start)
        )

    async def _acquire(self) -> bool:
        """Have the weights stay as they are; False if that was not to be had in time."""
        try:
            async with asyncio.timeout(self._spec.validation.timeout_s):
                await self._pin.acquire()
        except TimeoutError:
            self._machine.timeout()
            return False
        self._machine.leased()
        return True

    def _groups(self, version: int) -> list[GroupAssignment]:
        return [
            GroupAssignment(
                group_id=f"{GROUP_PREFIX}{version:06d}-{row:06d}",
                attempt=self._attempt,
                split="heldout",
                row=row,
                partition_id=self._partition,
                members=tuple(range(len(self._temperatures))),
                seeds=tuple(
                    sample_seed(self._spec.seed, _SEED_OFFSET + row, member)
                    for member in range(len(self._temperatures))
                ),
                temperatures=self._temperatures,
            )
            for row in range(self._num_rows)
        ]

    async def _start(self, groups: Sequence[GroupAssignment]) -> None:
        by_worker: dict[str, list[GroupAssignment]] = defaultdict(list)
        for group in groups:
            worker_id, _ = self._replicas.choose(group.group_id)
            self._replicas.assigned(worker_id)
            by_worker[worker_id].append(group)
        await self._replicas.start(by_worker)
        for worker_id, assigned in by_worker.items():
            for _ in assigned:
                self._replicas.finished(worker_id)

    async def _await_samples(self, groups: Sequence[GroupAssignment]) -> None:
        expected = len(groups) * len(self._temperatures)

        def num_done() -> int:
            return len(self._samples) + len(self._failed) * len(self._temperatures)

        try:
            async with asyncio.timeout(self._spec.validation.timeout_s), self._changed:
                await self._changed.wait_for(lambda: num_done() >= expected)
            self._machine.sample_done(expected)
        except TimeoutError:
            self._machine.sample_done(num_done())
            self._machine.timeout()
            await self._replicas.cancel([group.group_id for group in groups])

    def _score(self) -> dict[str, _Scores]:
        scores: dict[str, _Scores] = defaultdict(_Scores)
        for meta in self._samples.values():
            source = str(meta.tag("data_source")[0])
            reward = float(meta.tag("reward")[0])
            group_id = str(meta.tag("group_id")[0])
            scores[source].add(group_id, reward, is_greedy=bool(meta.tag("greedy")[0]))
        return scores

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _evaluation(
    version: int, reason: str, status: str, scores: dict[str, _Scores], seconds: float
) -> Evaluation:
    greedy = [reward for source in scores.values() for reward in source.greedy]
    sampled = [reward for source in scores.values() for reward in source.sampled]
    return Evaluation(
        version=version,
        reason=reason,
        status=status,
        num_samples=len(greedy) + len(sampled),
        greedy=_mean(greedy),
        sampled=_mean(sampled),
        by_source={name: source.means() for name, source in scores.items()},
        seconds=seconds,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _majority(rewards: Sequence[float]) -> float:
    """The most frequent reward; of several, the least."""
    counts = Counter(rewards)
    return min(counts, key=lambda reward: (-counts[reward], reward))
