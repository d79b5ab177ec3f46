"""Weight sessions of one run: agree, form, then publish version after version.

    agree_plan   every member answers with the hash of the plan that it made: all must be equal
    form         one group of trainer and rollouts, under a higher epoch each time
    prepare      everybody is ready, or no collective starts
    transfer     receivers verify what arrived and hold it beside their live weights
    adopt        each rollout puts the verified version into service

Any failure aborts the epoch; the group is built again and the version sent again, once.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from services.common.errors import DataLossError, ServiceError
from services.common.grpc_client import open_channel
from services.common.spec.weight_sync import WeightSyncSpec
from services.common.weightsync.client import WeightSyncClient
from services.controller.membership import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One published version."""

    version: int
    digest: str
    num_bytes: int
    prepare_s: float
    """Until everybody was ready; the trainer copies its weights here."""
    transfer_s: float
    """Until every rollout had verified what it received."""
    adopt_s: float
    """Until every rollout served the version."""
    stall_s: float
    """Longest time in which a rollout produced no token."""

    @property
    def total_s(self) -> float:
        """From the finished step to every rollout serving its weights."""
        return self.prepare_s + self.transfer_s + self.adopt_s


class WeightSession:
    """The weight plane of one run, seen from the controller.

    Args:
        spec: Buckets and deadlines.
        run_id: Names the rendezvous scopes.
    """

    def __init__(self, spec: WeightSyncSpec, run_id: str) -> None:
        self._spec = spec
        self._run_id = run_id
        self._epoch = 0
        self._plan_hash = ""
        self._stack = AsyncExitStack()
        self._trainer: WeightSyncClient
        self._rollouts: Mapping[str, WeightSyncClient] = {}
        # Held while a version is being replaced, and by an evaluation while it needs its version.
        self.pin = asyncio.Lock()

    async def open(self, trainer: Worker, rollouts: list[Worker]) -> None:
        """Agree on a plan with the members and form their first group."""
        self._trainer = await self._connect(trainer)
        self._rollouts = {worker.worker_id: await self._connect(worker) for worker in rollouts}
        tensors = await self._trainer.describe()
        async with asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(member.agree_plan(tensors, self._spec.bucket_bytes))
                for member in self._members()
            ]
        hashes = {answer.result() for answer in answers}
        if len(hashes) != 1:
            raise DataLossError(
                "the members of the weight group made different plans from the same tensors; install the "
                "same release in all of them",
                hashes=sorted(hashes),
            )
        (self._plan_hash,) = hashes
        await self._form()

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()

    async def publish(self, version: int) -> SyncReport:
        """Bring a version from the trainer into service on every rollout.

        Raises:
            ServiceError: If it failed twice.
        """
        async with self.pin:
            try:
                return await self._publish(version)
            except* ServiceError as errors:
                reason = "; ".join(str(error) for error in errors.exceptions)
                logger.warning("weight sync failed, trying again", extra={"reason": reason})
            await self._abort(reason)
            await self._form()
            return await self._publish(version)

    async def _publish(self, version: int) -> SyncReport:
        epoch = self._epoch
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for member in self._members():
                tasks.create_task(member.prepare(epoch, version, self._plan_hash))
        prepared = time.perf_counter()
        timeout_s = self._spec.transfer_timeout_s
        async with asyncio.TaskGroup() as tasks:
            transfers = [
                tasks.create_task(member.transfer(epoch, version, timeout_s))
                for member in self._members()
            ]
        sent = transfers[0].result()
        transferred = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            adoptions = [
                tasks.create_task(member.adopt(epoch, version, sent.digest))
                for member in self._rollouts.values()
            ]
        return SyncReport(
            version=version,
            digest=sent.digest,
            num_bytes=sent.num_bytes,
            prepare_s=prepared - start,
            transfer_s=transferred - prepared,
            adopt_s=time.perf_counter() - transferred,
            stall_s=max(adoption.result() for adoption in adoptions),
        )

    async def _form(self) -> None:
        self._epoch += 1
        members = self._members()
        async with asyncio.TaskGroup() as tasks:
            for rank, member in enumerate(members):
                tasks.create_task(
                    member.form(
                        self._epoch,
                        rank=rank,
                        world_size=len(members),
                        backend="gloo" if self._spec.backend == "auto" else self._spec.backend,
                        scope=f"{self._run_id}/{self._epoch}",
                        timeout_s=self._spec.form_timeout_s,
                    )
                )

    async def _abort(self, reason: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self._members():
                tasks.create_task(member.abort(self._epoch, reason))

    def _members(self) -> list[WeightSyncClient]:
        return [self._trainer, *self._rollouts.values()]

    async def _connect(self, worker: Worker) -> WeightSyncClient:
        return WeightSyncClient(await self._stack.enter_async_context(open_channel(worker.address)))
