"""Weight sessions of one run: agree, form, then publish version after version.

    agree_plan   every member answers with the hash of the plan that it made: all must be equal
    form         one group of trainer and rollouts, under a higher epoch each time
    prepare      everybody is ready, or no collective starts
    transfer     receivers verify what arrived and hold it beside their live weights
    adopt        each rollout puts the verified version into service

Any failure aborts the epoch. Members that do not answer the abort are lost; the others form the next epoch
and the version is sent again. Live weights change in adopt only, so nobody serves half a version meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from services.common.errors import DataLossError, ServiceError, UnavailableError
from services.common.grpc_client import open_channel
from services.common.spec.weight_sync import WeightSyncSpec
from services.common.weightsync.client import WeightSyncClient
from services.common.weightsync.plan import fsdp_shards, make_plan, version_digest
from services.controller.membership import Worker

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Slowest wire that a deadline still allows for, in bytes per second.
_LEAST_RATE = {"gloo": 100e6, "nccl": 5e9}
_LEAST_TIMEOUT_S = 1.5
# A member that does not answer an abort within this time is lost.
_ABORT_TIMEOUT_S = 1.0


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
    lost: tuple[str, ...] = ()
    """Rollouts that were lost on the way; they do not serve the version."""

    @property
    def total_s(self) -> float:
        """From the finished step to every rollout serving its weights."""
        return self.prepare_s + self.transfer_s + self.adopt_s


class WeightSession:
    """The weight plane of one run, seen from the controller.

    Args:
        spec: Buckets and deadlines.
        run_id: Names the rendezvous scopes.
        first_epoch: Epochs begin above it, so that members which knew an earlier session take part.
    """

    def __init__(self, spec: WeightSyncSpec, run_id: str, *, first_epoch: int = 0) -> None:
        self._spec = spec
        self._run_id = run_id
        self._epoch = first_epoch
        self._is_formed = False
        self._plan_hash = ""
        self._backend = "gloo" if spec.backend == "auto" else spec.backend
        self._timeout_s = _LEAST_TIMEOUT_S
        self._adopt_timeout_s = spec.adopt_timeout_s
        self._stack = AsyncExitStack()
        self._trainer: WeightSyncClient
        self._rollouts: dict[str, WeightSyncClient] = {}
        # Held while a version is being replaced, and by an evaluation while it needs its version.
        self.pin = asyncio.Lock()

    async def open(self, trainer: Worker, rollouts: list[Worker]) -> None:
        """Agree on a plan with the members and form their first group.

        Raises:
            DataLossError: If they made different plans.
            ServiceError: If a member does not answer or the group is not formed.
        """
        self._trainer = await self._connect(trainer)
        self._rollouts = {worker.worker_id: await self._connect(worker) for worker in rollouts}
        tensors = await self._trainer.describe()
        plan = make_plan(tensors, self._spec.bucket_bytes, fsdp_shards(tensors, 1))
        self._plan_hash = plan.plan_hash
        self._timeout_s = self._spec.transfer_timeout_s or (
            _LEAST_TIMEOUT_S + plan.num_bytes / _LEAST_RATE[self._backend]
        )
        hashes = await _all(
            {
                name: member.agree_plan(
                    tensors,
                    self._spec.bucket_bytes,
                    num_sources=1,
                    source=0 if member is self._trainer else None,
                )
                for name, member in self._members().items()
            }
        )
        others = {name: found[:12] for name, found in hashes.items() if found != plan.plan_hash}
        if others:
            raise DataLossError(
                f"the controller made plan {plan.plan_hash[:12]}, but members made {others} of the same "
                "tensors; install the same release in all of them"
            )
        await self._form()

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()

    async def publish(self, version: int) -> SyncReport:
        """Bring a version from the trainer into service on every rollout that lives.

        Raises:
            ServiceError: If the trainer or all rollouts are lost, or if it fails although nobody is.
        """
        lost: list[str] = []
        async with self.pin:
            while True:
                try:
                    if not self._is_formed:
                        await self._form()
                    return await self._publish(version, tuple(lost))
                except ServiceError as error:
                    logger.warning(
                        "weight sync failed", extra={"why": str(error), "version": version}
                    )
                    gone = await self._abort(str(error))
                    self._leave_behind(gone, error, is_repeated=bool(lost))
                    lost += gone or [""]

    async def _publish(self, version: int, lost: tuple[str, ...]) -> SyncReport:
        epoch = self._epoch
        start = time.perf_counter()
        await _all(
            {
                name: member.prepare(epoch, version, self._plan_hash, timeout_s=self._timeout_s)
                for name, member in self._members().items()
            }
        )
        prepared = time.perf_counter()
        transfers = await _all(
            {
                name: member.transfer(epoch, version, self._timeout_s)
                for name, member in self._members().items()
            }
        )
        sent = transfers["trainer"]
        digest = version_digest(sent.digests)
        transferred = time.perf_counter()
        stalls = await _all(
            {
                name: member.adopt(epoch, version, digest, timeout_s=self._adopt_timeout_s)
                for name, member in self._rollouts.items()
            }
        )
        return SyncReport(
            version=version,
            digest=digest,
            num_bytes=sent.num_bytes,
            prepare_s=prepared - start,
            transfer_s=transferred - prepared,
            adopt_s=time.perf_counter() - transferred,
            stall_s=max(stalls.values()),
            lost=tuple(name for name in lost if name),
        )

    async def _form(self) -> None:
        self._epoch += 1
        numbers = {name: number for number, name in enumerate(self._rollouts)}
        await _all(
            {
                name: member.form(
                    self._epoch,
                    receiver=numbers.get(name),
                    num_receivers=len(self._rollouts),
                    backend=self._backend,
                    scope=f"{self._run_id}/{self._epoch}",
                    timeout_s=self._spec.form_timeout_s,
                )
                for name, member in self._members().items()
            }
        )
        self._is_formed = True

    async def _abort(self, reason: str) -> list[str]:
        """End the epoch everywhere; returns who does not answer."""
        self._is_formed = False
        members = self._members()
        answers = await asyncio.gather(
            *(
                member.abort(self._epoch, reason, timeout_s=_ABORT_TIMEOUT_S)
                for member in members.values()
            ),
            return_exceptions=True,
        )
        return [
            name
            for name, answer in zip(members, answers, strict=True)
            if isinstance(answer, ServiceError)
        ]

    def _leave_behind(self, gone: list[str], error: ServiceError, *, is_repeated: bool) -> None:
        """Go on without lost rollouts, or give up."""
        for name in gone:
            self._rollouts.pop(name, None)
        if "trainer" in gone or not self._rollouts:
            raise UnavailableError(
                f"{' and '.join(gone)} did not answer, so no version can be published"
            ) from error
        if not gone and is_repeated:
            raise error

    def _members(self) -> Mapping[str, WeightSyncClient]:
        return {"trainer": self._trainer, **self._rollouts}

    async def _connect(self, worker: Worker) -> WeightSyncClient:
        return WeightSyncClient(
            await self._stack.enter_async_context(
                open_channel(worker.address, "worker", run_id=self._run_id)
            )
        )


async def _all(calls: Mapping[str, Awaitable[_T]]) -> dict[str, _T]:
    """Results by member, once all have answered.

    Raises:
        ServiceError: The first one, naming its member. All calls have ended by then.
    """
    answers = await asyncio.gather(*calls.values(), return_exceptions=True)
    results: dict[str, _T] = {}
    for name, answer in zip(calls, answers, strict=True):
        if isinstance(answer, BaseException):
            if isinstance(answer, ServiceError):
                answer.message = f"{name}: {answer.message}"
            raise answer
        results[name] = answer
    return results
