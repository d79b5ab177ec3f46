"""A trainer, rollouts and weight transfers that take as long as real ones, but compute nothing.

Rollouts decode with the :class:`~services.extras.fake_engine.engine.FakeEngine`: one token per running
request and step. The trainer sleeps; its weights are copied between two steps, like those of the
real one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any, cast

from bench.controller.peers import FakeQueue, FakeRollouts, FakeTrainer, FakeWeights, MadeGroup
from services.common.telemetry.metrics import IdleClock
from services.extras.fake_engine.engine import FakeEngine
from services.extras.planner.inputs import DecodeTime, Geometric, Lengths, Lognormal, Rates
from services.rollout.engines.base import GenerationRequest
from services.rollout.monitor import DecodeTimes
from services.wire.batch import KVBatchMeta
from services.wire.controller import GroupFailure
from slipstream.rollout.v1 import rollout_pb2
from slipstream.trainer.v1 import trainer_pb2
from slipstream.weightsync.v1 import weightsync_pb2 as ws

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Durations; the defaults are those of two H200s with 1.3 billion parameters."""

    token_s: float = 0.0055
    """Seconds of one decode step while the engine is not full."""
    tokens_per_s: float = 45_000.0
    """Max rate of an engine."""
    mean_tokens: float = 280.0
    """Mean of geometric response lengths, or median of log-normal ones."""
    sigma: float = 0.0
    """Sigma of log-normal lengths; 0 makes them geometric."""
    max_tokens: int = 1024
    train_s: float = 1.5
    """Seconds of a trainer's step with ``batch_tokens`` response tokens."""
    batch_tokens: float = 256 * 273.0
    piece_s: float = 0.03
    """Fixed seconds of a part of a step."""
    pack_s: float = 0.005
    """Seconds to copy the trainer's weights and to score the canary."""
    transfer_s: float = 0.05
    stall_s: float = 0.003
    """Seconds that an engine pauses for an adoption."""
    gpu_switch_s: float = 0.8
    """Seconds of both switches of a colocated step; each side sleeps and wakes for a quarter of it."""
    is_partial: bool = False
    """True if running responses continue with new weights."""

    def step_seconds(self, num_running: int) -> float:
        """Returns the seconds of one decode step of an engine."""
        return max(self.token_s, num_running / self.tokens_per_s)

    @property
    def lengths(self) -> Lengths:
        """Returns the distribution of response lengths."""
        if self.sigma:
            return Lognormal(
                median_tokens=self.mean_tokens, sigma=self.sigma, max_tokens=self.max_tokens
            )
        return Geometric(mean_tokens=self.mean_tokens, max_tokens=self.max_tokens)

    def length(self, seed: int) -> int:
        """Returns the tokens of the sample with this seed."""
        return next(self.lengths.draws(Random(seed)))

    def rates(self) -> Rates:
        """Returns the durations as a plan's rates."""
        return Rates(
            train_tokens_per_s=self.batch_tokens / self.train_s,
            decode=DecodeTime(
                fixed_s=self.token_s, sample_s=0.0, max_samples=self.token_s * self.tokens_per_s
            ),
            lengths=self.lengths,
            piece_s=self.piece_s,
            copy_s=self.pack_s,
            transfer_s=self.transfer_s,
            stall_s=self.stall_s,
            gpu_switch_s=self.gpu_switch_s,
        )


class PacedRollouts(FakeRollouts):
    """Decodes groups with a fake engine."""

    def __init__(
        self,
        queue: FakeQueue,
        pace: Pace,
        *,
        places: int,
        tasks: asyncio.TaskGroup,
        aside: "dict[str, dict[int, Part]]",
        report: Callable[[Sequence[GroupFailure]], Awaitable[None]],
    ) -> None:
        super().__init__(queue, (0.0, 0.0))
        self._tasks = tasks
        self._pace = pace
        self._aside = aside
        self._report = report
        self._cut: set[str] = set()
        self._parked: list[GroupFailure] = []
        self.engine = FakeEngine(
            max_running=places, step_seconds=pace.step_seconds, lengths=pace, vocab_size=256
        )
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._decoding = DecodeTimes()

    def gauges(self) -> dict[str, float]:
        """Returns the engine's gauges in heartbeats."""
        stats = self.engine.stats()
        return {
            **self._decoding.gauges(),
            "tokens_total": stats.tokens_total,
            "idle_seconds": stats.idle_seconds,
        }

    async def watch(self) -> None:
        """Observes the engine as often as a real rollout does, forever."""
        while True:
            self._decoding.observe(self.engine.stats(), now=time.monotonic())
            await asyncio.sleep(_LOOK_S)

    async def StartGroups(self, request: Any, context: Any) -> Any:
        for group in request.groups:
            self._groups[group.group_id] = self._tasks.create_task(self._make(group))
        return rollout_pb2.StartGroupsResponse()

    async def CancelGroups(self, request: Any, context: Any) -> Any:
        for group_id in request.group_ids:
            if (task := self._groups.pop(group_id, None)) is not None:
                task.cancel()
        return rollout_pb2.CancelGroupsResponse()

    async def InterruptGroups(self, request: Any, context: Any) -> Any:
        groups = {name: self._groups[name] for name in request.group_ids or [*self._groups]}
        self._cut |= groups.keys()
        # The engine knows requests only by name, and all of them are aborted.
        await self.engine.abort()
        if groups:
            await asyncio.wait(groups.values())
            parked, self._parked = self._parked, []
            await self._report(parked)
        return rollout_pb2.InterruptGroupsResponse()

    async def Sleep(self, request: Any, context: Any) -> Any:
        await self.engine.sleep()
        await asyncio.sleep(self._pace.gpu_switch_s / 4)
        return rollout_pb2.SleepResponse()

    async def Wake(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self._pace.gpu_switch_s / 4)
        await self.engine.wake()
        return rollout_pb2.WakeResponse()

    async def _make(self, group: Any) -> None:
        entry = self._aside.pop(group.group_id, {})
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(self._sample(group, member, seed, entry.get(member, Part())))
                for member, seed in zip(group.members, group.seeds, strict=True)
            ]
        parts = {m: task.result() for m, task in zip(group.members, members, strict=True)}
        self._groups.pop(group.group_id, None)
        if group.group_id in self._cut:
            self._cut.discard(group.group_id)
            self._aside[group.group_id] = parts
            self._parked.append(_interrupted(group, parts.values()))
            return
        versions = [version for response in parts.values() for version in response.versions]
        lengths = [response.tokens for response in parts.values()]
        self._queue.add(MadeGroup(group, lengths, oldest=min(versions), newest=max(versions)))

    async def _sample(self, group: Any, member: int, seed: int, response: "Part") -> "Part":
        if response.is_whole:
            return response
        result = await self.engine.generate(
            GenerationRequest(
                request_id=f"{group.group_id}.{member}/{group.attempt}",
                context_ids=(2,) * 100,
                max_tokens=1 << 19,
                seed=seed,
                draw_offset=response.tokens,
                oldest_version=min(response.versions, default=None),
            )
        )
        return Part(
            tokens=response.tokens + len(result.token_ids),
            versions=response.versions | {version for version, _ in result.version_runs},
            is_whole=result.finish_reason != "aborted",
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The generated part of a sample."""

    tokens: int = 0
    versions: frozenset[int] = frozenset()
    is_whole: bool = False


def _interrupted(group: Any, parts: Collection[Part]) -> GroupFailure:
    return GroupFailure(
        group_id=group.group_id,
        attempt=group.attempt,
        reason="interrupted",
        message="",
        retryable=True,
        num_unfinished=sum(not response.is_whole for response in parts),
        num_tokens=sum(response.tokens for response in parts),
    )


class PacedTrainer(FakeTrainer):
    """Sleeps for each step, and reports why it idled between two steps."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace.train_s)
        self._pace = pace
        self._counted_keys: set[str] = set()
        self.turn = asyncio.Lock()
        self._idle = IdleClock()

    async def Sleep(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self._pace.gpu_switch_s / 4)
        return trainer_pb2.SleepResponse()

    async def Wake(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self._pace.gpu_switch_s / 4)
        return trainer_pb2.WakeResponse()

    async def AccumulateStep(self, request: Any, context: Any) -> Any:
        async with self.turn:
            with self._idle.working():
                await asyncio.sleep(self._pace.piece_s + self._work(request.batch))
        return trainer_pb2.AccumulateStepResponse()

    def _work(self, batch: Any) -> float:
        """Returns the seconds for the new part of a batch."""
        meta = KVBatchMeta.from_proto(batch)
        tokens = {
            key: cast("int", count)
            for key, count in zip(meta.keys, meta.tag("response_tokens"), strict=True)
            if key not in self._counted_keys
        }
        self._counted_keys |= set(tokens)
        return self._pace.train_s * sum(tokens.values()) / self._pace.batch_tokens

    async def TrainStep(self, request: Any, context: Any) -> Any:
        async with self.turn:
            idle = self._idle.step_begins(dict(request.waits))
            meta = KVBatchMeta.from_proto(request.batch)
            versions, work_s = meta.tag("v_min"), self._work(request.batch)
            await asyncio.sleep(work_s)
            self._counted_keys.clear()
            self.newest = request.step
            self._idle.step_ended()
        numbers = {f"idle_seconds_{why}": spent for why, spent in idle.items()}
        staleness = [request.weight_version - int(version) for version in versions]
        numbers |= {"staleness_max": max(staleness), "staleness_mean": fmean(staleness)}
        tokens = sum(int(count) for count in meta.tag("response_tokens"))
        numbers |= {"seconds_total": work_s, "response_tokens": float(tokens)}
        return trainer_pb2.TrainStepResponse(step=request.step, metrics=numbers)


class PacedSource(FakeWeights):
    """The trainer's side of a transfer."""

    def __init__(self, queue: FakeQueue, pace: Pace, turn: asyncio.Lock) -> None:
        super().__init__(queue)
        self._pace = pace
        self._turn = turn
        self._packed = -1

    async def PrepareTransfer(self, request: Any, context: Any) -> Any:
        if request.version != self._packed:
            async with self._turn:
                await asyncio.sleep(self._pace.pack_s)
            self._packed = request.version
        return ws.PrepareTransferResponse(held_version=-1)

    async def TransferWeights(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self._pace.transfer_s)
        return await super().TransferWeights(request, context)

    async def ScoreWeights(self, request: Any, context: Any) -> Any:
        async with self._turn:
            return ws.ScoreWeightsResponse()


class PacedSink(FakeWeights):
    """A rollout's side of a transfer."""

    def __init__(self, queue: FakeQueue, pace: Pace, engine: FakeEngine) -> None:
        super().__init__(queue)
        self._pace = pace
        self._engine = engine
        self._adopting = asyncio.Lock()

    async def TransferWeights(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self._pace.transfer_s)
        return await super().TransferWeights(request, context)

    async def AdoptWeights(self, request: Any, context: Any) -> Any:
        async with self._adopting:
            await self._engine.pause(drain=not self._pace.is_partial)
            await asyncio.sleep(self._pace.stall_s)
            await self._engine.adopt_weights(request.version, {})
            await self._engine.resume()
        return await super().AdoptWeights(request, context)
