"""Weight sessions of one run: agree, form, then publish version after version.

    agree_plan   every member answers with the hash of the plan that it made: all must be equal
    form         one group of trainer ranks and rollouts, under a higher epoch each time
    prepare      everybody is ready, or no collective starts; the trainer copies its weights
    transfer     receivers verify what arrived and hold it beside their live weights
    adopt        each rollout puts the verified version into service
    check        each rollout scores a short text as the trainer does: now it is ready

Any failure aborts the epoch. Members that do not answer the abort are lost; the others form the next epoch
and the version is sent again. Live weights change in adopt only, so nobody serves half a version meanwhile.
A rollout that comes later is a member of the next session, which the run's loop opens with all there are.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.common import tracing
from services.common.errors import ServiceError, UnavailableError
from services.common.spec.weight_sync import WeightSyncSpec
from services.common.task_group import TaskGroup
from services.common.weightsync.canary import Canary, canary_tolerance
from services.common.weightsync.plan import version_digest
from services.controller import metrics
from services.controller.membership import Worker
from services.controller.run.weight_members import WeightMembers, first_error

logger = logging.getLogger(__name__)

# Slowest wire that a deadline still allows for, in bytes per second.
_LEAST_RATE = {"gloo": 100e6, "nccl": 5e9}
_LEAST_TIMEOUT_S = 1.5
# Tries of one version while nobody is lost: a busy machine misses a deadline, a bit flips.
_MAX_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One published version."""

    version: int
    digest: str
    num_bytes: int
    """On the wire, from all sources."""
    prepare_s: float
    """Until everybody was ready; the trainer copies its weights here."""
    transfer_s: float
    """Until every rollout had verified what it received."""
    adopt_s: float
    """Until every rollout served the version."""
    check_s: float
    """Until every rollout had scored the canary like the trainer."""
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
        spec: Mode, buckets and deadlines.
        run_id: Names the rendezvous scopes.
        first_epoch: Epochs begin above it, so that members which knew an earlier session take part.
    """

    def __init__(self, spec: WeightSyncSpec, run_id: str, *, first_epoch: int = 0) -> None:
        self._spec = spec
        self._run_id = run_id
        self._epoch = first_epoch
        self._is_formed = False
        self._members = WeightMembers(run_id, spec)
        self._backend = ""
        self._timeout_s = _LEAST_TIMEOUT_S
        self._canary: tuple[int, Canary] | None = None
        self.version = -1
        """Newest version that was published; -1 before the first of the session."""
        # Held while a version is being replaced, and by an evaluation while it needs its version.
        self.pin = asyncio.Lock()

    async def open(self, trainer: Worker, rollouts: list[Worker]) -> None:
        """Agree on a plan with the members and form their first group.

        Raises:
            DataLossError: If they made different plans.
            ServiceError: If a member does not answer or the group is not formed.
        """
        await self._members.open(trainer, rollouts)
        self._backend = self._members.backend()
        self._timeout_s = self._spec.transfer_timeout_s or (
            _LEAST_TIMEOUT_S + self._members.plan.num_bytes / _LEAST_RATE[self._backend]
        )
        await self._form()

    async def close(self) -> None:
        """Close the connections."""
        await self._members.close()

    def lend(self, names: Sequence[str]) -> None:
        """Publish to the other rollouts only; for whoever holds the pin."""
        self._members.lend(names)
        self._is_formed = False

    async def take_back(self, names: Sequence[str]) -> None:
        """Publish to rollouts that were lent again: they get the next version, whichever they missed."""
        async with self.pin:
            self._members.take_back(names)
            self._is_formed = False

    async def publish(self, version: int) -> SyncReport:
        """Bring a version from the trainer into service on every rollout that lives.

        A version that the trainer has sent before is sent from its copy, also while it trains.

        Raises:
            ServiceError: If the trainer or all rollouts are lost, or if it fails although nobody is.
        """
        with tracing.span(
            "weight.sync",
            tracing.of_sync(self._run_id, version),
            is_first=True,
            run=self._run_id,
            version=version,
        ):
            return await self._publish_to_the_living(version)

    async def _publish_to_the_living(self, version: int) -> SyncReport:
        lost: list[str] = []
        tries = 0
        async with self.pin:
            while True:
                try:
                    if not self._is_formed:
                        await self._form()
                    report = await self._publish(version, tuple(lost))
                except ServiceError as error:
                    metrics.WEIGHT_SYNCS.labels(self._run_id, error.reason).inc()
                    logger.warning(
                        "weight sync failed", extra={"why": str(error), "version": version}
                    )
                    self._is_formed = False
                    gone = await self._members.abort(self._epoch, str(error))
                    lost += gone
                    tries = 0 if gone else tries + 1
                    self._go_on_without(gone, error, tries)
                else:
                    metrics.observe_sync(self._run_id, report)
                    self.version = version
                    return report

    async def _publish(self, version: int, lost: tuple[str, ...]) -> SyncReport:
        epoch, members = self._epoch, self._members
        start = time.perf_counter()
        held = await members.ask(
            {
                name: member.prepare(
                    epoch, version, members.plan.plan_hash, timeout_s=self._spec.adopt_timeout_s
                )
                for name, member in members.all().items()
            }
        )
        base = min(held.values()) if len(set(held.values())) == 1 else -1
        prepared = time.perf_counter()
        sent = await members.ask(
            {
                name: member.transfer(
                    epoch,
                    version,
                    base_version=base if base < version else -1,
                    timeout_s=self._timeout_s,
                )
                for name, member in members.all().items()
            }
        )
        digest = version_digest(
            [digest for name in members.sources for digest in sent[name].digests]
        )
        transferred = time.perf_counter()
        with first_error():
            async with TaskGroup() as tasks:
                scoring = tasks.create_task(self._score(version))
                stalls = await members.ask(
                    {
                        name: member.adopt(
                            epoch, version, digest, timeout_s=self._spec.adopt_timeout_s
                        )
                        for name, member in members.rollouts.items()
                    }
                )
                adopted = time.perf_counter()
        await self._check(version, scoring.result())
        return SyncReport(
            version=version,
            digest=digest,
            num_bytes=sum(sent[name].num_bytes for name in members.sources),
            prepare_s=prepared - start,
            transfer_s=transferred - prepared,
            adopt_s=adopted - transferred,
            check_s=time.perf_counter() - adopted,
            stall_s=max(stalls.values()),
            lost=lost,
        )

    async def _score(self, version: int) -> Canary:
        """What the trainer says about the canary; asked once, before it trains on."""
        if self._canary is None or self._canary[0] != version:
            name, trainer = next(iter(self._members.sources.items()))
            answers = await self._members.ask(
                {name: trainer.score(timeout_s=self._spec.adopt_timeout_s)}
            )
            self._canary = (version, answers[name])
        return self._canary[1]

    async def _check(self, version: int, canary: Canary) -> None:
        tolerance = canary_tolerance([spec.dtype for spec in self._members.plan.tensors])
        await self._members.ask(
            {
                name: member.check(version, canary, tolerance, timeout_s=self._spec.adopt_timeout_s)
                for name, member in self._members.rollouts.items()
            }
        )

    async def _form(self) -> None:
        self._epoch += 1
        members = self._members
        numbers = {name: number for number, name in enumerate(members.rollouts)}
        await members.ask(
            {
                name: member.form(
                    self._epoch,
                    receiver=numbers.get(name),
                    num_receivers=len(members.rollouts),
                    backend=self._backend,
                    scope=f"{self._run_id}/{self._epoch}",
                    timeout_s=self._spec.form_timeout_s,
                )
                for name, member in members.all().items()
            }
        )
        self._is_formed = True
        metrics.observe_group(self._run_id, self._epoch, len(members.all()))

    def _go_on_without(self, gone: list[str], error: ServiceError, tries: int) -> None:
        """Leave lost rollouts behind, or give up."""
        self._members.dismiss(gone)
        if any(name in self._members.sources for name in gone) or not self._members.rollouts:
            raise UnavailableError(
                f"{' and '.join(gone)} did not answer, so no version can be published"
            ) from error
        if tries == _MAX_TRIES:
            raise error
