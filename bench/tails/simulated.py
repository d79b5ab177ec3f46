"""A run with long tails in virtual time: the product's decisions, without the parts that take time.

Real: ledger, staleness gate, dispatcher, generation, batch selection, group sampler, adoption,
stall detection, and the recovery of a run after a loss. Simulated: engines (one token per running
request and step), the trainer (a fixed time per step), and the stores of samples and progress,
which keep what they receive.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np

from bench.tails.engine import Caches
from bench.tails.rollout import SimulatedRollout, Tokenizer
from bench.tails.setting import RUN, Setting
from bench.tails.stores import MemoryProgress, MemoryQueue
from services.common.fields import partition_id
from services.common.task_group import TaskGroup
from services.controller.rules.ledger import TERMINAL, GroupState, Ledger, LedgerState
from services.controller.rules.prompts import Mixture, PromptOrder
from services.controller.run.dispatch.dispatcher import Dispatcher
from services.controller.run.dispatch.rollout_pool import RolloutPool
from services.controller.run.dispatch.sample_index import SampleIndex
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.observe.waits import Waits
from services.controller.run.state.requests import CurrentSpec
from services.controller.run.train.train_step import take_batch
from services.extras.fake_engine.virtual_time import VirtualTimeLoop
from services.rollout.data.prompts import Prompt, PromptStore
from services.rollout.sampling.sample import Sample
from services.wire.controller import GroupFailure
from services.wire.workers import GroupAssignment

_ROWS = 1_000_000
_SeedAndSample = tuple[int, Sample]
"""A sample and its seed."""


class _Clock:
    """The virtual clock."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    monotonic = time


class _Journal:
    """Writes nothing; keeps the events that users would see."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def save(self, ledger: Ledger) -> None:
        ledger.take_changes()

    async def record_event(self, note: Any, ledger: Ledger) -> None:
        ledger.take_changes()
        self.notes.append(f"{note.type}: {note.message}")


class _LocalReplicas(RolloutPool):
    """The rollouts of this process."""

    def __init__(self, rollouts: dict[str, SimulatedRollout]) -> None:
        super().__init__()
        for name, rollout in rollouts.items():
            self._clients[name] = rollout  # type: ignore[assignment]  # answers as a client does
            self._workers[name] = rollout.worker
            self._placement.add(name)


class SimulatedRun:
    """Controller, trainer and rollouts."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._spec = CurrentSpec(setting.specification())
        self._tokenizer: Any = Tokenizer()
        self._prompts = PromptStore(
            self._spec.now.data, {"train": [{"prompt": "x"}] * _ROWS}, self._tokenizer
        )
        self._queue, self._progress, self._journal = MemoryQueue(), MemoryProgress(), _Journal()
        self._caches = Caches()
        self._ledger = Ledger(max_attempts=self._spec.now.rollout.max_attempts)
        self._generation: GenerationScheduler
        self._prompt_order = PromptOrder(Mixture({"train": _ROWS}), seed=0, shuffle=False)
        self._rollouts: dict[str, SimulatedRollout] = {}
        self._killed: list[SimulatedRollout] = []
        self._background: list[asyncio.Task[None]] = []
        self._leave, self._choosing = asyncio.Event(), asyncio.Lock()
        self._offered = asyncio.Event()
        self._version = self._published = 0
        self._samples: dict[str, list[_SeedAndSample]] = {}
        self._staleness: list[int] = []
        self._masked = 0
        self._trained: list[_SeedAndSample] = []
        self._ends: list[float] = []

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        """Stores a group, as a rollout does."""
        samples_of_group = self._samples.setdefault(assignment.group_id, [])
        samples_of_group += zip(assignment.seeds, samples, strict=True)
        self._queue.put(assignment, prompt, samples)

    async def run(self) -> dict[str, Any]:
        """Simulates the run and returns its report."""
        async with TaskGroup() as self._tasks:
            for number in range(self.setting.replicas):
                await self._join(f"rollout-{number}")
            await self._enter(lost=[])
            others = [
                self._tasks.create_task(self._publish()),
                self._tasks.create_task(self._kill()),
            ]
            await self._train()
            report = await self._report()
            for task in (*others, *self._background):
                task.cancel()
            for rollout in self._rollouts.values():
                rollout.kill()
        return report

    async def _train(self) -> None:
        setting = self.setting
        while self._version < setting.steps:
            async with self._choosing:
                batch = await take_batch(
                    self._generation,
                    self._ledger,
                    self._spec.now.algorithm,
                    weight_version=self._version,
                    clock=_Clock(),
                    waits=Waits(),
                    unless=self._leave,
                )
            if batch is None:
                await asyncio.sleep(0)
                continue
            await asyncio.sleep(setting.train_s)
            # The run may have been restarted meanwhile.
            batch = self._ledger.in_state(GroupState.TRAINING)
            for group in batch:
                self._staleness.append(self._version - group.oldest_version)
                group_samples = self._samples.pop(group.group_id)
                self._trained += group_samples
                self._masked += sum(self._num_stale(sample) for _, sample in group_samples)
            self._ledger.consume(batch)
            await self._generation.release(batch)
            self._version += 1
            self._ends.append(asyncio.get_running_loop().time())
            self._offered.set()

    async def _publish(self) -> None:
        """Publishes the newest version, and repeats this if there is a newer one by then."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            version = self._version
            adopting = [
                self._tasks.create_task(rollout.adopt(version))
                for rollout in self._rollouts.values()
            ]
            deaths = [rollout.task for rollout in self._rollouts.values()]
            for adoption, death in zip(adopting, deaths, strict=True):
                await asyncio.wait((adoption, death), return_when=asyncio.FIRST_COMPLETED)
                if not adoption.done():
                    adoption.cancel()
            self._published = version
            self._generation.published(version)

    async def _kill(self) -> None:
        """Kills one rollout after the other at random times."""
        setting, chooser = self.setting, Random(0)
        for number in range(setting.kills):
            while self._version < number * setting.steps // setting.kills:
                await asyncio.sleep(setting.train_s / 4)
            await asyncio.sleep(chooser.uniform(0.0, 4 * setting.train_s))
            name = chooser.choice(sorted(self._rollouts))
            if setting.kills_oldest:
                name = self._ledger.running()[0].worker_id
            victim = self._rollouts.pop(name)
            victim.kill()
            await victim.task
            self._killed.append(victim)
            await self._enter(lost=[name])
            await asyncio.sleep(setting.restart_s)
            await self._join(name)
            await self._enter(lost=[])

    async def _join(self, name: str) -> None:
        rollout = SimulatedRollout(
            name,
            self.setting,
            caches=self._caches,
            prompts=self._prompts,
            tokenizer=self._tokenizer,
            publisher=self,
            progress=self._progress,
            report=self._fail,
            tasks=self._tasks,
        )
        await rollout.adopt(self._published)
        self._rollouts[name] = rollout

    async def _fail(self, failures: Sequence[GroupFailure]) -> None:
        await self._generation.fail(failures)

    async def _enter(self, *, lost: list[str]) -> None:
        """Leaves the loop if it runs, and starts it again with the available rollouts."""
        self._leave.set()
        async with self._choosing:
            for task in self._background:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self._leave.clear()
            self._ledger = _restored(self._ledger, self._spec)
            self._generation = self._built()
            await self._generation.restore(lost, is_queue_empty=False)
            self._generation.published(self._published)
            self._background = [
                self._tasks.create_task(self._generation.collect()),
                self._tasks.create_task(self._generation.dispatch_loop()),
            ]

    def _built(self) -> GenerationScheduler:
        sample_index: Any = SampleIndex(
            self._queue,  # type: ignore[arg-type]  # holds what it is given
            partition_id(RUN, "train"),
            group_size=self.setting.group_size,
            required_fields=(),
        )
        shared: dict[str, Any] = {
            "ledger": self._ledger,
            "prompt_order": self._prompt_order,
            "journal": self._journal,
            "rollout_pool": _LocalReplicas(self._rollouts),
            "sample_index": sample_index,
        }
        dispatcher = Dispatcher(self._spec, RUN, clock=_Clock(), **shared)
        return GenerationScheduler(self._spec, dispatcher=dispatcher, **shared)

    async def _report(self) -> dict[str, Any]:
        setting = self.setting
        # Earlier steps fill the engines.
        first = min(setting.lag + 1, setting.steps // 2)
        seconds = self._ends[-1] - self._ends[first - 1]
        num_samples = (setting.steps - first) * setting.groups_per_step * setting.group_size
        engines = [rollout.engine for rollout in (*self._rollouts.values(), *self._killed)]
        sampled = sum(engine.stats().tokens_total for engine in engines)
        caches = self._caches
        samples = [sample for _, sample in self._trained]
        lengths = [len(sample.response_ids) for sample in samples]
        again = sampled - sum(lengths) - await self._num_unfinished()
        counts = self._ledger.counts()
        return {
            "samples_per_s": round(num_samples / seconds, 3),
            "step_s": round(seconds / (setting.steps - first)),
            "places_used": round(
                sampled * setting.token_s / (self._ends[-1] * setting.replicas * setting.places), 3
            ),
            "sampled_again": round(again / sampled, 4),
            "computed_again": round(caches.total / sampled, 4),
            "held_by_killed": round(caches.after_kills / sampled, 4),
            "held_elsewhere": round(caches.elsewhere / sampled, 4),
            "times_a_version": caches.most_times,
            "kills": len(self._killed),
            "groups_lost": counts["dropped"] + counts["quarantined"],
            "reasons": self._ledger.reasons(),
            "trained": len(samples),
            "longest": max(lengths),
            "wrong": sum(not self._is_right(*seed_and_sample) for seed_and_sample in self._trained),
            "over_the_bound": round(
                sum(staleness > setting.lag for staleness in self._staleness)
                / len(self._staleness),
                3,
            ),
            "masked": round(self._masked / sum(lengths), 4),
            "staleness_max": max(self._staleness),
            "versions_max": max(len(sample.sampled_versions) for sample in samples),
            "stalls": sum("stalled" in note for note in self._journal.notes),
            "hours": round(self._ends[-1] / 3600, 2),
        }

    def _num_stale(self, sample: Sample) -> int:
        """Returns the number of tokens that are too stale to train now."""
        oldest = self._version - self.setting.lag
        return sum(length for version, length in sample.version_runs if version < oldest)

    async def _num_unfinished(self) -> int:
        """Returns the tokens of groups that are not trained yet, each counted once."""
        total = sum(
            len(s.response_ids)
            for group_samples in self._samples.values()
            for _, s in group_samples
        )
        for group in self._ledger.in_state(GroupState.PARTIAL):
            total += self._progress.num_tokens(group.group_id)
        for rollout in self._rollouts.values():
            total += await rollout.num_unfinished()
        return total

    def _is_right(self, seed: int, sample: Sample) -> bool:
        """Returns True if a response has its expected tokens, despite failures, and increasing versions."""
        setting = self.setting
        length, most = setting.lengths.length(seed), setting.max_tokens
        positions = np.arange(min(length, most), dtype=np.int64)
        tokens = (2 + seed % 256 * 31 + positions) % 256
        if length <= most:
            tokens[-1] = 1
        versions = sample.sampled_versions
        return np.array_equal(tokens, sample.response_ids) and versions == sorted(versions)


def _restored(ledger: Ledger, spec: CurrentSpec) -> Ledger:
    """Returns the state of a ledger after a restart of the loop."""
    state = LedgerState(
        groups=tuple(ledger.in_state(*(set(GroupState) - TERMINAL))),
        num_issued=ledger.num_issued,
        position=ledger.position,
        ended={state: ledger.counts()[state.value] for state in TERMINAL},
        reasons=ledger.reasons(),
        returned=ledger.returned,
    )
    now = asyncio.get_running_loop().time()
    return Ledger.restore(state, max_attempts=spec.now.rollout.max_attempts, now=now)


def simulate(setting: Setting) -> dict[str, Any]:
    """Runs one setting in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(SimulatedRun(setting).run())
