"""Publishes weight versions to the rollouts of one run: transfer, verification, adoption, canary check."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ServiceError,
)
from services.common.runspec.run import WeightSyncSpec
from services.common.runspec.weight_modes import MODES, TRANSPORTS
from services.common.task_group import gather_in_group
from services.common.telemetry import tracing
from services.controller import metrics
from services.controller.membership import Worker
from services.controller.run.state.worker_failures import LateError
from services.controller.run.weights.followers import Followers, Release
from services.controller.run.weights.members import WeightMembers
from services.controller.run.weights.shelf import Shelf
from services.controller.run.weights.store_channel import (
    StoreChannel,
    StoreFailedError,
    StoreTrouble,
)
from services.controller.run.weights.store_writer import StoreWriter
from services.weightsync.canary import Canary, canary_tolerance
from services.weightsync.weight_plan import version_digest
from services.wire.weightsync import TransferResult, WeightSyncClient

logger = logging.getLogger(__name__)

_MIN_TIMEOUT_S = 1.5
# A rollout that drains for this long counts as dead, in case its own stall detection failed.
_DRAINING_S = 7 * 86_400.0
# Factor of a transfer's deadline: over the duration of the previous transfer, or over a missed deadline.
_SLOWER = 4
# Max attempts to publish one version while no member is lost: a busy machine may miss a deadline, or a
# bit may flip.
_MAX_TRIES = 5


class InterruptedLinkError(DeadlineExceededError):
    """Raised if members do not form a group in time, although each of them answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSource:
    """Version that all rollouts serve, with the facts that verify it."""

    version: int
    digest: str
    canary: Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Timings and receivers of one published version; only the version is set if it has no receivers."""

    version: int
    digest: str = ""
    num_bytes: int = 0
    """Bytes sent by all sources."""
    copy_s: float = 0.0
    """Seconds until the trainer had copied its weights and scored the canary; its next step waits
    for this."""
    prepare_s: float = 0.0
    """Seconds until all members were ready, the copy included."""
    transfer_s: float = 0.0
    """Seconds from then until every rollout had verified what it received."""
    adopt_s: float = 0.0
    """Seconds from then until every rollout served the version."""
    check_s: float = 0.0
    """Seconds from then until every rollout had scored the canary like the trainer."""
    stall_s: float = 0.0
    """Longest time in which a rollout generated no token, in seconds."""
    receivers: tuple[str, ...] = ()
    """Workers that serve the version now."""
    lost: tuple[str, ...] = ()
    """Rollouts that were lost during publication; they do not serve the version."""
    late: tuple[str, ...] = ()
    """Rollouts that still load the version from a store."""

    @property
    def total_s(self) -> float:
        """Seconds from the start of the publication until every rollout serves the version."""
        return self.prepare_s + self.transfer_s + self.adopt_s


def observe(run: str, report: SyncReport) -> None:
    """Records the metrics of a published version."""
    phases = {
        "prepare": report.prepare_s,
        "transfer": report.transfer_s,
        "adopt": report.adopt_s,
        "check": report.check_s,
        "total": report.total_s,
    }
    for phase, seconds in phases.items():
        metrics.WEIGHT_SYNC_SECONDS.labels(run, phase).observe(seconds)
    metrics.WEIGHT_SYNC_BYTES.labels(run).inc(report.num_bytes)
    metrics.WEIGHT_SYNCS.labels(run, "ok").inc()


@dataclass(frozen=True, slots=True)
class _Store:
    """Both sides of a weight store."""

    writer: StoreWriter
    followers: Followers

    @classmethod
    def build(
        cls,
        members: WeightMembers,
        spec: WeightSyncSpec,
        run_id: str,
        *,
        next_epoch: Callable[[], int],
        adopt_timeout_s: float,
    ) -> "_Store":
        assert spec.storage is not None, "validate refuses a stored transport without a store"
        shelf, channel = Shelf(), StoreChannel(spec, run_id, next_epoch)
        followers = Followers(
            members,
            shelf,
            channel,
            adopt_timeout_s=adopt_timeout_s,
            check_timeout_s=spec.adopt_timeout_s,
        )
        writer = StoreWriter(
            members,
            shelf,
            channel,
            followers,
            spec.storage,
            run_id=run_id,
            sends_changes=MODES[spec.mode].sends_changes,
        )
        return cls(writer, followers)


class WeightSession:
    """Publishes weight versions from the trainer to the rollouts of one run.

    Args:
        spec: Mode, bucket size and deadlines.
        run_id: Identifier of the run; names the rendezvous scopes.
        drains: True if rollouts finish running responses before they adopt, for as long as these
            make progress.
        first_epoch: Epochs are greater than this, so that members of an earlier session accept them.
        dtypes: Dtypes that rollouts compute with; empty if they compute with those of the sent weights.
    """

    def __init__(
        self,
        spec: WeightSyncSpec,
        run_id: str,
        *,
        drains: bool = False,
        first_epoch: int = 0,
        dtypes: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._dtypes = dtypes
        self._adopt_s = _DRAINING_S if drains else spec.adopt_timeout_s
        self._run_id = run_id
        self._epoch = first_epoch
        self._is_formed = False
        self._members = WeightMembers(run_id, spec)
        self._store: _Store | None = None
        if spec.is_stored:
            self._store = _Store.build(
                self._members,
                spec,
                run_id,
                next_epoch=self._next_epoch,
                adopt_timeout_s=self._adopt_s,
            )
        self._returning: set[str] = set()
        """Rollouts that are not reserved any more, and join the next publication."""
        self._backend = ""
        self._least_timeout_s = self._timeout_s = _MIN_TIMEOUT_S
        self._canary: tuple[int, Canary] | None = None
        self._peer_source: PeerSource | None = None
        self.version = -1
        """Newest version that this session published; -1 before the first."""
        # Held while a version is being replaced, and by an evaluation while it needs its version.
        self.pin = asyncio.Lock()
        self.trainer_lock = asyncio.Lock()
        """Held while the trainer's weights change, and while they are copied."""

    async def open(self, trainer: Worker, rollouts: list[Worker]) -> None:
        """Agrees on a plan with the members and forms their first group; does nothing without rollouts.

        Raises:
            ServiceError: If a member does not answer, made a different plan, or the group is not
                formed.
        """
        members = self._members
        if not rollouts:
            return
        await members.open(trainer, rollouts)
        if self._store is not None:
            scoring_workers = (worker.worker_id for worker in rollouts if worker.role != "rollout")
            self._store.followers.must_follow = frozenset(scoring_workers)
            await self._store.writer.form()
            self._is_formed = True
            return
        while not self._is_formed:
            self._backend = members.backend()
            self._least_timeout_s = self._spec.transfer_timeout_s or (
                _MIN_TIMEOUT_S + members.plan.num_bytes / TRANSPORTS[self._backend].least_rate
            )
            self._timeout_s = self._least_timeout_s
            try:
                await self._form()
            except FailedPreconditionError as error:
                await members.abort(self._epoch, str(error))
                await members.switch_transfer_path(error)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.writer.close()
        await self._members.close()

    async def follow(self, on_late: Callable[[], Awaitable[None]]) -> None:
        """Lets rollouts load stored versions until it is cancelled; returns at once if members meet.

        Args:
            on_late: Called when a rollout serves the newest version after its publication, or needs that to
                be published again.

        Raises:
            ServiceError: As :meth:`Followers.follow` does.
        """
        if self._store is not None:
            await self._store.followers.follow(on_late)

    @property
    def is_lacking(self) -> bool:
        """True if a rollout waits until the newest version is published again."""
        return self._store is not None and self._store.followers.is_lacking

    @property
    def store_troubles(self) -> Mapping[str, StoreTrouble]:
        """Failures with the weight store, by member that has any."""
        if self._store is None:
            return {}
        trouble = self._store.writer.trouble
        troubles = {name: trouble for name in list(self._members.sources)[:1] if trouble.cause}
        return troubles | dict(self._store.followers.troubles)

    def served_by(self, version: int) -> tuple[str, ...]:
        """Returns the rollouts that serve a stored version, verified; empty if members meet."""
        return () if self._store is None else self._store.followers.serving(version)

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _notify_followers(self) -> None:
        if self._store is not None:
            self._store.followers.notify()

    async def admit(self, rollouts: Sequence[Worker]) -> bool:
        """Adds loaded rollouts, which receive the next published version.

        Returns:
            False if the current transport does not reach them; then the session must be reopened with all.

        Raises:
            ServiceError: If one does not answer, or made a different plan.
        """
        async with self.pin:
            is_reached = await self._members.admit(rollouts)
            self._is_formed &= not is_reached
            self._notify_followers()
            return is_reached

    async def remove_rollouts(self, names: Sequence[str]) -> None:
        """Removes rollouts before the next publication."""
        async with self.pin:
            self._include_returning()
            self._members.remove_rollouts(names)
            self._is_formed = False
            if self._store is not None:
                self._store.followers.forget(names)

    async def send_from_peers(self, names: Sequence[str]) -> list[str]:
        """Sends the served version to admitted rollouts from peers on their hosts.

        Returns:
            Rollouts that serve the version now; the others receive the next published version.
        """
        updated: list[str] = []
        async with self.pin:
            if self._is_formed or self._peer_source is None:
                return updated
            for peer, near in self._members.peers(names).items():
                self._epoch += 1
                facts = {"peer": peer, "to": str(near)}
                try:
                    await self._send_from_peer(peer, near, self._peer_source)
                except ServiceError as error:
                    logger.warning(
                        "peer transfer failed; the trainer will send the weights",
                        extra={**facts, "why": str(error)},
                    )
                    await self._members.abort(self._epoch, str(error))
                else:
                    logger.info("peer transfer completed", extra=facts)
                    updated += near
        return updated

    async def _send_from_peer(self, peer: str, near: Sequence[str], source: PeerSource) -> None:
        rollouts, version = self._members.rollouts, source.version
        receivers = {name: rollouts[name] for name in near}
        members = {peer: rollouts[peer], **receivers}
        await self._form_group(members, receivers=near)
        versions = await self._prepare(version, members)
        if versions[peer] != version:
            raise FailedPreconditionError(
                f"{peer} must hold the served version {version}, but holds {versions[peer]}"
            )
        await self._transfer(version, members, base_version=-1)
        await self._adopt(version, source.digest, receivers)
        await self._check(version, source.canary, receivers)

    async def retain_copy(self, version: int) -> None:
        """Copies a served version on the trainer before its weights change, for rollouts that join later."""
        async with self.pin, self.trainer_lock:
            await self._prepare(version, self._members.sources)
            await self._score(version)

    def has_copy(self, version: int) -> bool:
        """Returns True if the trainer holds a copy of a version, so that it can be sent during training."""
        return self._canary is not None and self._canary[0] == version

    def reserve(self, names: Sequence[str]) -> None:
        """Excludes rollouts from publications for now; the caller holds the pin."""
        self._include_returning()
        self._members.reserve(names)
        self._is_formed = False
        self._notify_followers()

    def unreserve(self, names: Sequence[str]) -> None:
        """Includes reserved rollouts in the next publication that starts, whichever versions they missed.

        It needs no pin, which the trainer's turn on shared GPUs holds for a whole step.
        """
        self._returning.update(names)

    def _include_returning(self) -> None:
        """Includes rollouts that are not reserved any more; the caller holds the pin."""
        if self._returning:
            self._members.unreserve(self._returning)
            self._returning.clear()
            self._is_formed = False
            self._notify_followers()

    async def publish(self, newest: Callable[[], int]) -> SyncReport:
        """Brings the trainer's newest version into service on every live rollout.

        A version that the trainer has copied before is sent from its copy, also during training.

        Args:
            newest: Returns the version of the trainer's weights; called when they cannot change.

        Raises:
            LateError: If a live rollout does not put the version into service in time.
            InterruptedLinkError: If live members do not reach each other.
            ServiceError: If the trainer or all rollouts are lost, or if retries fail although no
                member is lost.
        """
        async with self.pin:
            return await self.replace(newest)

    async def replace(
        self, newest: Callable[[], int], *, on_copied: Callable[[], Awaitable[None]] | None = None
    ) -> SyncReport:
        """Publishes like :meth:`publish`; the caller holds the pin.

        Args:
            newest: Returns the version of the trainer's weights.
            on_copied: Called once the trainer's weights are copied, before rollouts receive
                anything.
        """
        if not self._members.sources:
            return await self._record_unsent(newest)
        self._include_returning()
        lost_rollouts: list[str] = []
        tries, version = 0, -1

        async def copied() -> None:
            await copying.aclose()
            if on_copied is not None:
                await on_copied()

        async with AsyncExitStack() as copying:
            while True:
                try:
                    if not self._is_formed:
                        await self._form()
                    if version < 0 and not self.has_copy(version := newest()):
                        await copying.enter_async_context(self.trainer_lock)
                        version = newest()
                    report = await self._publish(
                        version, tuple(lost_rollouts), copied, in_turns=on_copied is not None
                    )
                except ServiceError as error:
                    metrics.WEIGHT_SYNCS.labels(self._run_id, error.reason).inc()
                    logger.warning(
                        "weight sync failed", extra={"why": str(error), "version": version}
                    )
                    self._is_formed = False
                    aborted = await self._abort(str(error))
                    if isinstance(error, LateError) and error.worker_id not in aborted:
                        raise  # the rollout lives, and would delay the others again
                    lost_rollouts += aborted
                    tries = 0 if aborted else tries + 1
                    self._drop_lost(aborted, error, tries)
                else:
                    observe(self._run_id, report)
                    self._allow(_SLOWER * report.transfer_s)
                    self.version = version
                    self._peer_source = PeerSource(
                        version=version, digest=report.digest, canary=await self._score(version)
                    )
                    return report

    async def _abort(self, reason: str) -> list[str]:
        """Aborts the epoch on all members, or on the sources of a store; returns those that do not answer."""
        if self._store is None:
            return await self._members.abort(self._epoch, reason)
        writer = self._store.writer
        epoch, writer.epoch = writer.epoch, -1
        return await self._members.abort(max(epoch, 0), reason, [*self._members.sources])

    def _allow(self, timeout_s: float) -> None:
        """Sets the deadline of the next transfers, unless the specification does."""
        if self._spec.transfer_timeout_s is None:
            self._timeout_s = max(timeout_s, self._least_timeout_s)

    async def _record_unsent(self, newest: Callable[[], int]) -> SyncReport:
        """Records a version that no worker receives."""
        async with self.trainer_lock:
            self.version = newest()
        return SyncReport(version=self.version)

    async def _publish(
        self,
        version: int,
        lost_rollouts: tuple[str, ...],
        copied: Callable[[], Awaitable[None]],
        *,
        in_turns: bool,
    ) -> SyncReport:
        with tracing.span(
            "weight.sync",
            tracing.of_sync(self._run_id, version),
            is_first=True,
            run=self._run_id,
            version=version,
        ):
            if self._store is not None:
                return await self._send_stored(self._store, version, lost_rollouts, copied)
            return await self._send(version, lost_rollouts, copied, in_turns=in_turns)

    async def _send_stored(
        self,
        store: _Store,
        version: int,
        lost_rollouts: tuple[str, ...],
        copied: Callable[[], Awaitable[None]],
    ) -> SyncReport:
        """Writes a version to the store, and lets rollouts load it."""
        writer, followers, sources = store.writer, store.followers, self._members.sources
        start, num_bytes = time.perf_counter(), writer.num_bytes

        async def prepare() -> dict[str, int]:
            return await self._prepare(version, sources)

        versions = await prepare()
        prepared_s = time.perf_counter() - start

        async def score() -> tuple[Canary, float]:
            canary = await self._score(version)
            await copied()
            return canary, time.perf_counter() - start

        async def write() -> None:
            await writer.write(version, versions=versions.values(), prepare=prepare)

        works: Sequence[Coroutine[Any, Any, Any]] = (score(), write())
        (canary, copied_s), _ = await gather_in_group(works)
        written_at = time.perf_counter()
        release = Release(
            version=version, digest=writer.digest, canary=canary, tolerance=self._tolerance()
        )
        await followers.release(release)
        while followers.is_lacking:
            await writer.write(version, versions=(version,), prepare=prepare)
            await followers.release(release)
        receivers = followers.serving(version)
        return SyncReport(
            version=version,
            digest=writer.digest,
            num_bytes=writer.num_bytes - num_bytes,
            copy_s=copied_s,
            prepare_s=prepared_s,
            transfer_s=written_at - start - prepared_s,
            adopt_s=time.perf_counter() - written_at,
            stall_s=followers.stall_s,
            receivers=receivers,
            lost=(*lost_rollouts, *sorted(followers.lost)),
            late=tuple(sorted({*self._members.rollouts} - {*receivers} - followers.lost)),
        )

    async def _send(
        self,
        version: int,
        lost_rollouts: tuple[str, ...],
        copied: Callable[[], Awaitable[None]],
        *,
        in_turns: bool,
    ) -> SyncReport:
        members = self._members
        start = time.perf_counter()
        sources = await self._prepare(version, members.sources)

        async def score() -> tuple[Canary, float]:
            canary, scored_at = await self._score(version), time.perf_counter()
            await copied()
            return canary, scored_at

        async def send() -> tuple[Mapping[str, Any], str, Mapping[str, float], list[float]]:
            versions = [
                *sources.values(),
                *(await self._prepare(version, members.rollouts)).values(),
            ]
            is_base = len(set(versions)) == 1 and versions[0] < version
            base = versions[0] if is_base else -1
            times = [time.perf_counter()]
            try:
                transfers = await self._transfer(version, members.all(), base_version=base)
            except DeadlineExceededError:
                self._allow(_SLOWER * self._timeout_s)  # a link may be slow
                raise
            digests = [digest for name in members.sources for digest in transfers[name].digests]
            digest = version_digest(digests)
            times.append(time.perf_counter())
            stalls = await self._adopt(version, digest, members.rollouts)
            return transfers, digest, stalls, [*times, time.perf_counter()]

        if in_turns:  # rollouts have no GPU until the trainer has its copy
            (canary, copied_at), outcome = await score(), await send()
        else:
            works: Sequence[Coroutine[Any, Any, Any]] = (score(), send())
            (canary, copied_at), outcome = await gather_in_group(works)
        transfers, digest, stalls, (prepared, transferred, adopted) = outcome
        checked_from = time.perf_counter()
        await self._check(version, canary, members.rollouts)
        return SyncReport(
            version=version,
            digest=digest,
            num_bytes=sum(transfers[name].num_bytes for name in members.sources),
            copy_s=copied_at - start,
            prepare_s=prepared - start,
            transfer_s=transferred - prepared,
            adopt_s=adopted - transferred,
            check_s=time.perf_counter() - checked_from,
            stall_s=max(stalls.values()),
            receivers=tuple(members.rollouts),
            lost=lost_rollouts,
        )

    async def _prepare(
        self, version: int, members: Mapping[str, WeightSyncClient]
    ) -> dict[str, int]:
        """Prepares members for a version; returns the version that each of them still holds."""
        plan_hash = self._members.plan.plan_hash
        epoch = self._epoch if self._store is None else self._store.writer.epoch
        versions = await self._members.call_all(
            {
                name: member.prepare(epoch, version, plan_hash, timeout_s=self._adopt_s)
                for name, member in members.items()
            }
        )
        self._members.note_prepared(members)
        return versions

    async def _transfer(
        self, version: int, members: Mapping[str, WeightSyncClient], *, base_version: int
    ) -> dict[str, TransferResult]:
        """Sends a version from sources to receivers, or its changes since the base version."""
        return await self._members.call_all(
            {
                name: member.transfer(
                    self._epoch, version, base_version=base_version, timeout_s=self._timeout_s
                )
                for name, member in members.items()
            }
        )

    async def _adopt(
        self, version: int, digest: str, rollouts: Mapping[str, WeightSyncClient]
    ) -> dict[str, float]:
        """Puts a version into service; returns the seconds in which each rollout generated no token."""

        async def adopt(name: str, member: WeightSyncClient) -> float:
            try:
                return await member.adopt(self._epoch, version, digest, timeout_s=self._adopt_s)
            except DeadlineExceededError as error:
                action = f"adopt weight version {version}"
                raise LateError(name, f"did not {action} within {self._adopt_s:.0f} s") from error

        return await self._members.call_all(
            {name: adopt(name, member) for name, member in rollouts.items()}
        )

    async def _score(self, version: int) -> Canary:
        """Returns the trainer's canary scores of a version; asks once, before the trainer continues."""
        if self._canary is None or self._canary[0] != version:
            name, trainer = next(iter(self._members.sources.items()))
            answers = await self._members.call_all(
                {name: trainer.score(timeout_s=self._spec.adopt_timeout_s)}
            )
            self._canary = (version, answers[name])
        return self._canary[1]

    async def _check(
        self, version: int, canary: Canary, rollouts: Mapping[str, WeightSyncClient]
    ) -> None:
        tolerance = self._tolerance()
        await self._members.call_all(
            {
                name: member.check(version, canary, tolerance, timeout_s=self._spec.adopt_timeout_s)
                for name, member in rollouts.items()
            }
        )

    def _tolerance(self) -> float:
        # Adapters are sent in float32, regardless of the dtype that they are merged into.
        wire_dtypes = [spec.dtype for spec in self._members.plan.tensors]
        return canary_tolerance(self._dtypes or wire_dtypes)

    async def _form(self) -> None:
        if self._store is not None:
            if self._store.writer.epoch < 0:
                await self._store.writer.reopen()
            self._is_formed = True
            return
        self._epoch += 1
        members = self._members
        try:
            await self._form_group(members.all(), receivers=[*members.rollouts])
        except DeadlineExceededError as error:
            raise InterruptedLinkError(
                f"{error.message}; {', '.join(members.all())} answer the controller, so a link between "
                "two of them is interrupted, or weight_sync.form_timeout_s is too short"
            ) from error
        self._is_formed = True
        metrics.observe_group(self._run_id, self._epoch, len(members.all()))

    async def _form_group(
        self, members: Mapping[str, WeightSyncClient], *, receivers: Sequence[str]
    ) -> None:
        numbers = {name: number for number, name in enumerate(receivers)}
        await self._members.call_all(
            {
                name: member.form_group(
                    self._epoch,
                    receiver=numbers.get(name),
                    num_receivers=len(receivers),
                    backend=self._backend,
                    scope=f"{self._run_id}/{self._epoch}",
                    timeout_s=self._spec.form_timeout_s,
                )
                for name, member in members.items()
            }
        )

    def _drop_lost(self, lost_rollouts: list[str], error: ServiceError, tries: int) -> None:
        """Removes lost rollouts.

        Raises:
            UnavailableError: If the trainer or all rollouts are lost.
            ServiceError: ``error``, after the last retry, or if it is an InterruptedLinkError although all
                members answer.
        """
        self._members.remove_rollouts(lost_rollouts)
        if self._members.sources.keys() & lost_rollouts or not self._members.rollouts:
            raise self._members.unpublishable(lost_rollouts) from error
        is_final = isinstance(error, (InterruptedLinkError, StoreFailedError))
        if tries == _MAX_TRIES or (is_final and not lost_rollouts):
            raise error
