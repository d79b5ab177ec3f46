"""Trains steps exactly once: forms batches, trains and commits them, finishes or reverts interrupted ones."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from services.common.errors import DeadlineExceededError
from services.common.host import Clock
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.data import set_name
from services.common.task_group import TaskGroup, unwrapped
from services.common.telemetry import tracing
from services.controller import metrics
from services.controller.rules import mismatch
from services.controller.rules.learning import (
    PATIENCE,
    Histogram,
    StepSamples,
    nothing_learned,
    step_samples,
)
from services.controller.rules.ledger import RUNNING, Group, GroupState, Ledger
from services.controller.rules.prompts import Mixture
from services.controller.rules.staleness import choose_batch
from services.controller.run.connections import RunConnections
from services.controller.run.dispatch.sample_index import (
    length_facts,
    reward_terms,
    set_scores,
    spread_of,
)
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.observe.observers import Observers
from services.controller.run.observe.progress import Progress, StepMeter
from services.controller.run.observe.waits import Waits
from services.controller.run.state.journal import Journal
from services.controller.run.state.requests import CurrentSpec
from services.controller.run.train.gpu_time_sharing import GpuTimeSharing
from services.controller.store.records import Note
from services.wire.batch import KVBatchMeta
from services.wire.step_command import StepCommand
from services.wire.workers import TrainedStep, TrainerClient


async def take_batch(
    scheduler: GenerationScheduler,
    ledger: Ledger,
    algorithm: AlgorithmSpec,
    *,
    weight_version: int,
    clock: Clock,
    waits: Waits,
    unless: asyncio.Event,
    meanwhile: Coroutine[None, None, None] | None = None,
) -> list[Group] | None:
    """Waits for the groups of the next batch and moves them to TRAINING.

    Args:
        weight_version: Version that the batch will be trained from.
        clock: Clock of the time-out for stale groups.
        unless: Ends the wait once it is set.
        meanwhile: Runs during the wait and is cancelled after it.

    Returns:
        Groups, oldest first; None if ``unless`` was set first.
    """
    if unless.is_set():
        if meanwhile is not None:
            meanwhile.close()
        return None
    async with TaskGroup() as tasks:
        beside = None if meanwhile is None else tasks.create_task(meanwhile)
        ending = tasks.create_task(unless.wait())
        taking = tasks.create_task(
            _take_batch(
                scheduler,
                ledger,
                algorithm,
                weight_version=weight_version,
                clock=clock,
                waits=waits,
            )
        )
        await asyncio.wait((ending, taking), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        taking.cancel()
        if beside is not None:
            beside.cancel()
    return None if taking.cancelled() else taking.result()


async def _take_batch(
    scheduler: GenerationScheduler,
    ledger: Ledger,
    algorithm: AlgorithmSpec,
    *,
    weight_version: int,
    clock: Clock,
    waits: Waits,
) -> list[Group]:
    deadline = clock.monotonic() + algorithm.stale_wait_timeout_s
    while True:
        # The batch needs ``groups_per_step`` ready groups; the scheduler keeps as many in flight.
        with waits("no_data"):
            await scheduler.wait_until(
                lambda: ledger.count(GroupState.READY) >= scheduler.gate.groups_per_step
            )
        may_wait = algorithm.on_stale == "wait" and clock.monotonic() < deadline
        choice = choose_batch(
            ledger.in_state(GroupState.READY),
            ledger.started_groups(),
            gate=scheduler.gate,
            trainer_version=weight_version,
            wait_for_due=may_wait,
            keep_stale=algorithm.on_stale in ("wait", "mask"),
        )
        if choice.batch:
            ledger.train(choice.batch)
            scheduler.batch_taken()
            return list(choice.batch)
        if choice.stale and algorithm.on_stale == "restart":
            await scheduler.restart(choice.stale)
        elif choice.stale:
            await scheduler.drop_stale(choice.stale)
        elif choice.awaited:
            with waits("barrier"):
                await _wait_for_any(choice.awaited, scheduler, deadline - clock.monotonic())


async def _wait_for_any(
    groups: Sequence[Group], scheduler: GenerationScheduler, timeout_s: float
) -> None:
    """Waits until one of the groups is finished or ended, for at most ``timeout_s``."""
    unfinished = (*RUNNING, GroupState.PARTIAL)
    try:
        async with asyncio.timeout(max(timeout_s, 0.0)):
            await scheduler.wait_until(lambda: any(g.state not in unfinished for g in groups))
    except TimeoutError:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyTraining:
    """Accumulates gradients of finished groups while the rest of their batch is still generated.

    The accumulation is not recorded: a trainer that lost its gradients trains the whole step.
    """

    trainer: TrainerClient
    ledger: Ledger
    scheduler: GenerationScheduler
    waits: Waits
    """Records the time in which the trainer worked."""

    async def accumulate(self, step: int, *, weight_version: int, timeout_s: float) -> None:
        """Sends the groups of a step to the trainer as they finish, until it is cancelled.

        One call sends all groups that are READY when the trainer is free, so that its batches are large.
        """
        groups_sent: set[tuple[str, int]] = set()

        def due() -> list[Group]:
            ready_groups = self.ledger.in_state(GroupState.READY)
            gate = self.scheduler.gate
            if len(ready_groups) >= gate.groups_per_step:
                return []
            return [
                group
                for group in ready_groups
                if (group.group_id, group.attempt) not in groups_sent
                and not gate.is_stale(group.oldest_version, trainer_version=weight_version)
            ]

        while True:
            await self.scheduler.wait_until(lambda: bool(due()))
            groups, begin = due(), time.perf_counter()
            groups_sent |= {(group.group_id, group.attempt) for group in groups}
            try:
                await self.trainer.accumulate(
                    step,
                    self.scheduler.sample_index.meta(groups),
                    weight_version=weight_version,
                    timeout_s=timeout_s,
                )
            finally:
                self.waits.add_work(time.perf_counter() - begin)


_MAX_NAMED = 8
"""Max samples that a message names."""


class StalenessError(RuntimeError):
    """Raised if a step trained tokens over the staleness bound: the result is in doubt, so the run fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSteps:
    """Trains the steps of one run, each exactly once."""

    run_id: str
    spec: CurrentSpec
    journal: Journal
    waits: Waits
    """Waiting times since the last step."""
    connections: RunConnections
    ledger: Ledger
    mixture: Mixture
    """Prompt sets of the training data."""
    scheduler: GenerationScheduler
    progress: Progress
    gpu_time_sharing: GpuTimeSharing
    observers: Observers
    """Receives the metrics of each step."""
    version_offset: int
    """Weight version of a step minus the step."""
    meter: StepMeter = field(default_factory=StepMeter)
    newest: deque[StepSamples] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    """Sample outcomes of the newest steps."""
    divergences: deque[float] = field(default_factory=lambda: deque(maxlen=mismatch.PATIENCE))
    """Divergence of the rollouts' policy in the newest steps."""

    async def begin(self, step: int, batch: Sequence[Group]) -> None:
        """Records which groups a step trains, before the trainer receives them."""
        version, begin_ns = step - 1 + self.version_offset, time.time_ns()
        await self.journal.begin_step(step, self.ledger, version=version, groups=batch)
        tracing.record("group.acquire", self._traces(batch), begin_ns=begin_ns, step=step)

    async def train(self, step: int, batch: Sequence[Group], *, begin: float) -> None:
        """Trains a step, commits it, and deletes its samples.

        Raises:
            DeadlineExceededError: After ``limits.step_timeout_s``.
        """
        timeout_s = self.spec.now.limits.step_timeout_s
        with (
            tracing.span(
                "step",
                tracing.of_step(self.run_id, step),
                is_first=True,
                run=self.run_id,
                step=step,
            ),
            _within_limit(step, timeout_s),
            unwrapped(DeadlineExceededError),
        ):
            await self._train(step, batch, begin=begin, timeout_s=timeout_s)

    async def _train(
        self, step: int, batch: Sequence[Group], *, begin: float, timeout_s: float
    ) -> None:
        # A trainer that has already trained the step repeats its answer, even if the samples are
        # gone.
        stored_groups = [group for group in batch if group in self.scheduler.sample_index]
        version = step - 1 + self.version_offset
        samples = self.scheduler.sample_index.meta(stored_groups)
        with self.waits("scoring"):
            samples = await self.connections.scoring.add_fields(
                samples,
                weight_version=version,
                is_trained=self.connections.trained == step,
                timeout_s=timeout_s,
            )
        async with self._weights_may_change():
            wait_s, waits = self.waits.for_data(), self.waits.pop()
            command = StepCommand(
                step,
                samples,
                weight_version=version,
                num_steps=self.spec.num_steps,
                waits=waits,
            )
            async with TaskGroup() as tasks:
                training = tasks.create_task(
                    self.connections.trainer.train_step(command, timeout_s=timeout_s)
                )
                learning = tasks.create_task(
                    self.connections.critic.train(command, timeout_s=timeout_s)
                )
            trained = training.result()
            step_metrics = {
                **learning.result(),
                **reward_terms(samples),
                **length_facts(samples),
                **self._set_scores(batch, samples),
            }
            trained = replace(trained, metrics={**trained.metrics, **step_metrics})
            spread = spread_of(
                samples,
                weight_version=version,
                max_staleness=self.spec.now.algorithm.max_staleness,
            )
            # Commits while it holds the lock: a publication that waits for the lock must publish the new
            # weights under their own version.
            await self._commit(step, batch, trained, spread=spread, begin=begin, wait_s=wait_s)
        await self._report_nothing_learned(step, samples, trained)
        await self.scheduler.release(stored_groups)

    @asynccontextmanager
    async def _weights_may_change(self) -> AsyncIterator[None]:
        """Waits until the trainer has its GPUs and its weights are not being copied."""
        lock = self.connections.weights.trainer_lock
        with self.waits("gpu_switch"):
            await self.gpu_time_sharing.begin_training()
        with self.waits("weight_sync"):
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()

    async def recover(self, step: int) -> bool:
        """Finishes a step that was begun, or returns its groups if samples are lost.

        Returns:
            True if the step is trained.
        """
        batch = self.ledger.in_state(GroupState.TRAINING)
        lost_groups = [group for group in batch if group not in self.scheduler.sample_index]
        if self.connections.trained == step or not lost_groups:
            await self.train(step, batch, begin=time.perf_counter())
            return True
        self.ledger.put_back(batch)
        for group in lost_groups:
            self.ledger.requeue(group)
        await self.journal.forget_step(step, self.ledger)
        return False

    async def _commit(
        self,
        step: int,
        batch: Sequence[Group],
        trained: TrainedStep,
        *,
        spread: Mapping[str, Histogram],
        begin: float,
        wait_s: float,
    ) -> None:
        """Records a step and the groups that it consumed, in one transaction."""
        begin_ns = time.time_ns()
        numbers = _finite(trained.metrics)
        self._check_staleness(step, numbers)
        self.ledger.consume(batch)
        is_skipped = trained.skipped or bool(numbers.get("critic_skipped"))
        self.progress.record_step(numbers, is_skipped=is_skipped)
        metrics.observe_step(self.run_id, step, self.ledger.counts())
        metrics.observe_staleness(self.run_id, spread.get("staleness", {}))
        use = self.meter.measure(self.connections.rollout_pool, time.perf_counter() - begin)
        data: dict[str, Any] = {
            "step": step,
            **numbers,
            "trainer_wait_s": wait_s,
            **use.numbers,
            **self.progress.take_sync(),
            **self.gpu_time_sharing.take_seconds(),
            "ready_groups": self.ledger.count(GroupState.READY),
            "running_groups": len(self.ledger.running()),
            **self._count_skipped(step),
            "histograms": spread,
        }
        text, events = f"trained step {step}", []
        if trained.skipped:
            data["is_skipped"] = 1.0
            text = f"step {step} did not change the weights: {_why_skipped(trained.metrics)}"
            events.append(Note("StepSkipped", text, {"step": step}, step))
        events += _rewound(step, numbers, version=step + self.version_offset)
        if trained.left_out:
            events.append(_left_out(step, trained.left_out))
        details = {**data, "rollouts": {"idle_s": use.idle_s}}
        note = Note("StepCommitted", text, details, step, None, self.progress.summary(self.ledger))
        await self.journal.commit_step(step, self.ledger, note=note, metrics=data)
        for event in events:
            await self.journal.record_event(event)
        self.observers.record_step(data)
        if not trained.skipped and (divergence := mismatch.divergence(numbers)) is not None:
            self.divergences.append(divergence)
        tracing.record(
            "group.settle", self._traces(batch), begin_ns=begin_ns, step=step, outcome="consumed"
        )

    def _check_staleness(self, step: int, numbers: Mapping[str, float]) -> None:
        """Raises a StalenessError if the loss of a step included a token over the bound."""
        bound, oldest = self.spec.now.algorithm.max_staleness, numbers.get("staleness_max", 0.0)
        if oldest > bound:
            metrics.STALENESS_VIOLATIONS.labels(self.run_id).inc()
            raise StalenessError(
                f"step {step} trained tokens with staleness {oldest:.0f}, but algorithm.max_staleness is "
                f"{bound}; this is a bug in Slipstream: report it with the run's database and logs"
            )

    async def _report_nothing_learned(
        self, step: int, samples: KVBatchMeta, trained: TrainedStep
    ) -> None:
        """Reports why the newest steps trained nothing, once for as long as the reason is the same."""
        if samples.num_keys:
            columns = (samples.tag(name) for name in ("reward", "finish_reason", "greedy"))
            rows = [row for row in zip(*columns, strict=True) if not row[2]]
            # A step without trained tokens has no such metric.
            idle = trained.metrics.get("zero_advantage_fraction", float(trained.skipped))
            self.newest.append(
                step_samples(
                    [float(reward) for reward, _, _ in rows],
                    [str(finish) for _, finish, _ in rows],
                    is_idle=math.isnan(idle) or idle >= 1,
                )
            )
        cause, last = nothing_learned([*self.newest], self.spec.now), self.progress.nothing_learned
        self.progress.nothing_learned = {} if cause is None else asdict(cause)
        if cause is not None and cause.reason != last.get("reason"):
            summary = self.progress.summary(self.ledger)
            note = Note(
                "NothingLearned", cause.message, {"reason": cause.reason}, step, None, summary
            )
            await self.journal.record_event(note, self.ledger)

    def _set_scores(self, batch: Sequence[Group], samples: KVBatchMeta) -> dict[str, float]:
        """Returns metrics by prompt set, if there are several sets."""
        if len(self.mixture.splits) == 1:
            return {}
        sets = {group.group_id: set_name(self.mixture.place(group.row)[0]) for group in batch}
        return set_scores(samples, sets)

    def _count_skipped(self, step: int) -> dict[str, int]:
        """Returns the number of prompts that the curriculum leaves out, by reason."""
        difficulty = self.ledger.difficulty
        counts = {} if difficulty is None else difficulty.count_skipped(step=step)
        for why, count in counts.items():
            metrics.SKIPPED_PROMPTS.labels(self.run_id, why).set(count)
        return {f"skipped/{why}": count for why, count in counts.items()}

    def _traces(self, batch: Sequence[Group]) -> list[tracing.Trace]:
        return tracing.of_groups(self.run_id, (group.group_id for group in batch))


@contextmanager
def _within_limit(step: int, timeout_s: float) -> Iterator[None]:
    """Names ``limits.step_timeout_s`` in the error of a step that takes longer."""
    begin = time.monotonic()
    try:
        yield
    except DeadlineExceededError as error:
        if time.monotonic() - begin < timeout_s:
            raise
        raise DeadlineExceededError(
            f"step {step} took longer than limits.step_timeout_s ({timeout_s:g} s): {error}; raise it, or "
            "train fewer tokens per step"
        ) from error


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns the finite numbers: JSON cannot express others, and a mean that includes one is meaningless."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _rewound(step: int, numbers: Mapping[str, float], *, version: int) -> Iterator[Note]:
    """Yields events that report who restored the last checkpoint before skipped steps."""
    for worker, name in (("trainer", "rewound_to_step"), ("critic", "critic_rewound_to_step")):
        if name in numbers:
            restored = int(numbers[name])
            yield Note(
                "Rewound",
                f"step {step}: too many steps in a row had numbers that are not finite, so the {worker} "
                f"restored the weights of step {restored}; training continues with step {step + 1}",
                {"step": restored, "version": version, "reason": "not_finite"},
                step,
            )


def _left_out(step: int, tokens: Mapping[str, int]) -> Note:
    """Returns the event that reports sequences that exceeded the trainer's memory."""
    counts = ", ".join(
        f"{key} ({count:,} tokens)" for key, count in list(tokens.items())[:_MAX_NAMED]
    )
    rest = f" and {len(tokens) - _MAX_NAMED} more" if len(tokens) > _MAX_NAMED else ""
    return Note(
        "SamplesLeftOut",
        f"step {step} left out samples that do not fit into the trainer's memory: {counts}{rest}; lower "
        "rollout.max_response_tokens, or set trainer.activation_checkpointing, "
        "trainer.activation_offloading or trainer.context_parallel",
        {"step": step, "samples": dict(tokens)},
        step,
    )


def _why_skipped(numbers: Mapping[str, float]) -> str:
    if numbers.get("overflow_updates") and not numbers.get("nonfinite_updates"):
        scale = numbers["loss_scale"]
        return f"gradients overflowed in float16; the next loss scale is {scale:g}"
    names = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    return f"{', '.join(names)} not finite" if names else "no sample could be trained"
