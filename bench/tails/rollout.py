"""A rollout in virtual time: the product's sampler and adoption over an engine without a model."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bench.tails.engine import Caches, CachingEngine
from bench.tails.setting import RUN, Setting
from services.common.task_group import TaskGroup
from services.controller.membership import Worker
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import PromptStore
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.sampler import (
    EpisodeWatch,
    Failure,
    GroupSampler,
    ProgressCache,
    Publisher,
)
from services.rollout.weights import WeightReceiver
from services.rollout.workflows.base import SingleTurn
from services.wire.controller import GroupFailure
from services.wire.workers import GroupAssignment

_LOOK_S, _CHECKPOINT_S = 150.0, 60.0


class Tokenizer:
    """A minimal tokenizer for an engine without a model."""

    eos_id, pad_id, vocab_size = 1, 0, 256
    stop_ids = frozenset({1})
    special_tokens: Mapping[str, int] = {}
    textless_tokens: Mapping[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [2] * len(text)

    encode_prompt = encode

    def decode(self, ids: Any, *, keeps_special: bool = False) -> str:
        return ""


class _Reward:
    async def score(self, reward_input: RewardInput) -> Score:
        return Score(0.0)


class SimulatedRollout:
    """A rollout until it is killed; the controller calls it like a client.

    Args:
        name: Name of the worker.
        setting: Settings of the simulation.
        caches: Caches of the engines.
        prompts: The run's data.
        tokenizer: Tokenizer of the model.
        publisher: Receives finished groups.
        progress: Receives unfinished groups.
        report: Reports groups without samples to the controller.
        tasks: Task group of its tasks.
    """

    def __init__(
        self,
        name: str,
        setting: Setting,
        *,
        caches: Caches,
        prompts: PromptStore,
        tokenizer: Any,
        publisher: Publisher,
        progress: ProgressCache,
        report: Callable[[Sequence[GroupFailure]], Awaitable[None]],
        tasks: TaskGroup,
    ) -> None:
        self.worker = Worker(
            run_id=RUN,
            worker_id=name,
            incarnation="",
            role="rollout",
            address="",
            host_id="",
            last_heartbeat=0.0,
            state="ready",
        )
        self.engine = CachingEngine(
            max_running=setting.places,
            step_seconds=lambda _: setting.token_s,
            lengths=setting.lengths,
            caches=caches,
            kv_policy=setting.kv_policy,
            prefill_tokens_per_s=setting.prefill_tokens_per_s,
        )
        services = GroupServices(
            engine=self.engine,
            tokenizer=tokenizer,
            workflow=SingleTurn(),
            reward=_Reward(),
            calls=CallPool(1),
        )
        spec = setting.specification()
        self._stall_s = spec.limits.stall_timeout_s
        self._report_failures = report
        self.sampler = GroupSampler(
            prompts,
            services,
            spec.rollout,
            publisher=publisher,
            cache=progress,
            report_failures=self._report,
        )
        self._receiver = WeightReceiver()
        self._receiver.attach(self.engine, self.sampler, is_partial=setting.is_partial)
        self._is_there, self._is_over = asyncio.Event(), asyncio.Event()
        self.task = tasks.create_task(self._serve())

    async def start_groups(self, groups: Sequence[GroupAssignment]) -> None:
        """Starts groups, unless the rollout is dead."""
        if not self._is_over.is_set():
            self.sampler.start(groups)

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        """Ends groups."""
        self.sampler.cancel(group_ids)

    async def interrupt_groups(self, group_ids: Sequence[str] | None = None) -> None:
        """Stops groups and stores their tokens."""
        await self.sampler.interrupt(group_ids)

    def kill(self) -> None:
        """Ends the rollout; everything that was not stored is lost."""
        self.engine.lose_cache()
        self._is_over.set()

    async def adopt(self, version: int) -> None:
        """Adopts a version."""
        await self._is_there.wait()
        await self._receiver.adopt_weights(version, {})
        self.worker.weight_version = version

    async def num_unfinished(self) -> int:
        """Returns the tokens of the groups that this rollout generates."""
        running = await self.engine.peek()
        progress = [group.progress(running) for group in self.sampler._groups.values()]  # noqa: SLF001
        return sum(
            len(t.token_ids)
            for group_progress in progress
            for m in group_progress.values()
            for t in m.turns
        )

    async def _report(self, failures: Sequence[Failure]) -> None:
        await self._report_failures(
            [
                GroupFailure(
                    group_id=assignment.group_id,
                    attempt=assignment.attempt,
                    reason=error.reason,
                    message=error.message,
                    retryable=error.retryable,
                    worker_id=self.worker.worker_id,
                    num_unfinished=error.num_unfinished,
                    num_tokens=error.num_tokens,
                )
                for assignment, error in failures
            ]
        )

    async def _serve(self) -> None:
        async with TaskGroup() as tasks:
            others = [
                tasks.create_task(self.engine.run()),
                tasks.create_task(self._watch()),
                tasks.create_task(self._checkpoint()),
            ]
            async with self.sampler:
                self._is_there.set()
                await self._is_over.wait()
            for task in others:
                task.cancel()

    async def _watch(self) -> None:
        watch = EpisodeWatch(self._stall_s)
        while True:
            await asyncio.sleep(_LOOK_S)
            self.worker.gauges["tokens_total"] = self.engine.stats().tokens_total
            await self.sampler.stop_stalled(watch, now=asyncio.get_running_loop().time())

    async def _checkpoint(self) -> None:
        """Stores progress as often as a real rollout does."""
        while True:
            await asyncio.sleep(_CHECKPOINT_S)
            self.sampler.checkpoint_soon()
