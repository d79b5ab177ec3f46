"""One step after the other: written down, trained, committed; settled if something died in between."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.common import tracing
from services.common.spec.run import RunSpec
from services.common.task_group import TaskGroup
from services.controller import metrics
from services.controller.run.groups import Group, GroupState
from services.controller.run.journal import Journal
from services.controller.run.progress import StepMeter
from services.controller.run.recovery import Restored
from services.controller.run.waits import Waits
from services.controller.store.records import Note
from services.trainer.client import TrainedStep


class Steps:
    """Trains steps of one run, each exactly once.

    Args:
        run_id: The run.
        spec: Its specification.
        journal: Its record.
        waits: What was waited for since the last step.
    """

    def __init__(self, run_id: str, spec: RunSpec, journal: Journal, waits: Waits) -> None:
        self._run_id = run_id
        self._spec = spec
        self._journal = journal
        self._waits = waits
        self._meter = StepMeter()

    async def begin(self, state: Restored, step: int, batch: Sequence[Group]) -> None:
        """Write down which groups a step trains, before the trainer is asked."""
        version, begin_ns = step - 1 + state.version_offset, time.time_ns()
        await self._journal.begin_step(step, state.ledger, version=version, groups=batch)
        tracing.record("group.acquire", self._traces(batch), begin_ns=begin_ns, step=step)

    async def train(
        self, state: Restored, step: int, batch: Sequence[Group], *, begin: float
    ) -> None:
        """Have the trainer train a step, commit it, and delete its samples."""
        with tracing.span(
            "step", tracing.of_step(self._run_id, step), is_first=True, run=self._run_id, step=step
        ):
            await self._train(state, step, batch, begin=begin)

    async def _train(
        self, state: Restored, step: int, batch: Sequence[Group], *, begin: float
    ) -> None:
        # A trainer that has trained the step repeats its answer, even if the samples are gone since.
        stored = [group for group in batch if group in state.generation.stored]
        version, timeout_s = step - 1 + state.version_offset, self._spec.limits.step_timeout_s
        samples = state.generation.stored.meta(stored)
        if state.parts.trained != step:
            with self._waits("old_logprob"):
                samples = await state.parts.scoring.add_proximal(
                    samples, weight_version=version, timeout_s=timeout_s
                )
        critic = state.parts.critic
        with self._waits("values"):
            samples = await critic.add_values(samples, weight_version=version, timeout_s=timeout_s)
        wait_s, waits = self._waits.for_data(), self._waits.take()
        async with TaskGroup() as tasks:
            training = tasks.create_task(
                state.parts.trainer.train_step(
                    step, samples, weight_version=version, waits=waits, timeout_s=timeout_s
                )
            )
            learning = tasks.create_task(
                critic.train(step, samples, weight_version=version, timeout_s=timeout_s)
            )
        trained = training.result()
        trained = replace(trained, metrics={**trained.metrics, **learning.result()})
        await self._commit(state, step, batch, trained, begin=begin, wait_s=wait_s)
        await state.generation.release(stored)

    async def settle(self, state: Restored, step: int) -> bool:
        """Finish the step that was begun, or put its groups back if their samples are gone.

        Returns:
            Whether the step is trained.
        """
        batch = state.ledger.in_state(GroupState.TRAINING)
        lost = [group for group in batch if group not in state.generation.stored]
        if state.parts.trained == step or not lost:
            await self.train(state, step, batch, begin=time.perf_counter())
            return True
        state.ledger.put_back(batch)
        for group in lost:
            state.ledger.requeue(group)
        await self._journal.forget_step(step, state.ledger)
        return False

    async def _commit(
        self,
        state: Restored,
        step: int,
        batch: Sequence[Group],
        trained: TrainedStep,
        *,
        begin: float,
        wait_s: float,
    ) -> None:
        """Record a step and everything it consumed, in one transaction."""
        begin_ns = time.time_ns()
        numbers = _finite(trained.metrics)
        state.ledger.consume(batch)
        state.progress.stepped(numbers)
        metrics.observe_step(self._run_id, step, numbers, state.ledger.counts())
        data = {
            "step": step,
            **numbers,
            "trainer_wait_s": wait_s,
            **self._meter.measure(state.parts.replicas, time.perf_counter() - begin),
            "ready_groups": state.ledger.count(GroupState.READY),
            "running_groups": len(state.ledger.running()),
        }
        text = f"step {step} is trained"
        if trained.skipped:
            data["is_skipped"] = 1.0
            text = f"step {step} left the weights as they were: {_why_skipped(trained.metrics)}"
        note = Note("StepCommitted", text, data, step, None, state.summary())
        await self._journal.commit_step(step, state.ledger, note=note, metrics=data)
        tracing.record(
            "group.settle", self._traces(batch), begin_ns=begin_ns, step=step, outcome="consumed"
        )

    def _traces(self, batch: Sequence[Group]) -> list[tracing.Trace]:
        return tracing.of_groups(self._run_id, (group.group_id for group in batch))


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers: JSON knows no others, and a mean with one of them says nothing."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _why_skipped(numbers: Mapping[str, float]) -> str:
    names = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    return f"{', '.join(names)} not finite" if names else "no sample of it could be trained"
