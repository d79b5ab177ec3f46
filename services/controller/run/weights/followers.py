"""Rollouts that load weight versions from a store, each at its own pace.

::

    one loop per rollout: prepare -> transfer of each copy on its path -> adopt -> check -> the next version

A rollout that is slow, fails or comes later delays neither the trainer nor other rollouts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from services.common.errors import DataLossError, DeadlineExceededError, ServiceError
from services.common.task_group import TaskGroup, unwrapped
from services.controller.run.state.worker_failures import LateError
from services.controller.run.weights.members import WeightMembers
from services.controller.run.weights.shelf import Shelf, StoredCopy
from services.controller.run.weights.store_channel import StoreChannel, StoreTrouble
from services.weightsync.canary import Canary
from services.wire.weightsync import WeightSyncClient

_MAX_REFUSALS: Final = 5
"""Consecutive versions that a rollout may find damaged or wrong."""
_MIN_GRACE_S: Final = 1.0
"""Least seconds that a publication waits for further rollouts after the first one serves its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version that is complete in the store, with the facts that verify it."""

    version: int
    digest: str
    canary: Canary
    tolerance: float
    """Max mean absolute difference of the canary's logprobs."""


@dataclass(slots=True)
class Follower:
    """State of one rollout."""

    epoch: int = -1
    """Epoch of its channel to the store; -1 without one."""
    served_version: int = -1
    """Version that it serves, verified; -1 for none of this session."""
    held_version: int = -1
    """Version whose bytes it holds in addition to the live weights."""
    lacked_version: int = -1
    """Version that it could not reach by the copies in the store; -1 for none."""
    copies: tuple[str, ...] = ()
    """Names of the copies that it reads now."""
    stall_s: float = 0.0
    """Seconds without a token of its last adoption."""
    timeout_s: float = 0.0
    """Deadline of a transfer, if an earlier one was missed."""
    is_superseded: bool = False
    """True if it was stopped for a newer version."""
    trouble: StoreTrouble = field(default_factory=StoreTrouble)


class Followers:
    """Keeps the rollouts of a session on the newest released version.

    Args:
        adopt_timeout_s: Max seconds of an adoption.
        check_timeout_s: Max seconds to score the canary.
    """

    def __init__(
        self,
        members: WeightMembers,
        shelf: Shelf,
        channel: StoreChannel,
        *,
        adopt_timeout_s: float,
        check_timeout_s: float,
    ) -> None:
        self._members = members
        self._shelf = shelf
        self._channel = channel
        self._adopt_timeout_s = adopt_timeout_s
        self._check_timeout_s = check_timeout_s
        self._states: dict[str, Follower] = {}
        self._newest: Release | None = None
        self._is_published = False
        self._changed = asyncio.Event()
        self.must_follow: frozenset[str] = frozenset()
        """Receivers for which every publication waits: workers that score with exactly its weights."""
        self.lost: set[str] = set()
        """Rollouts that do not answer any more."""

    @property
    def version(self) -> int:
        """Newest released version; -1 before the first."""
        return -1 if self._newest is None else self._newest.version

    @property
    def troubles(self) -> Mapping[str, StoreTrouble]:
        """Failures by rollout that has any."""
        return {name: f.trouble for name, f in self._states.items() if f.trouble.cause}

    @property
    def copies(self) -> set[str]:
        """Names of the copies that rollouts read now."""
        return {name for follower in self._states.values() for name in follower.copies}

    @property
    def held_versions(self) -> list[int]:
        """Version that each rollout holds; -1 for none."""
        return [self._state(name).held_version for name in self._members.rollouts]

    @property
    def stall_s(self) -> float:
        """Longest time without a token of the rollouts' last adoptions, in seconds."""
        return max((follower.stall_s for follower in self._states.values()), default=0.0)

    @property
    def is_lacking(self) -> bool:
        """True if a rollout waits until a copy of the newest version is written that it can use."""
        return any(self._lacks(self._state(name)) for name in self._members.rollouts)

    def serving(self, version: int) -> tuple[str, ...]:
        """Returns the rollouts that serve a version, verified."""
        names = self._members.rollouts
        return tuple(name for name in names if self._state(name).served_version == version)

    def notify(self) -> None:
        """Wakes all that wait for a change of members, copies or versions."""
        changed_event, self._changed = self._changed, asyncio.Event()
        changed_event.set()

    def forget(self, names: Collection[str]) -> None:
        """Forgets rollouts that left."""
        for name in names:
            self._states.pop(name, None)
            self.lost.discard(name)
        self.notify()

    async def release(self, release: Release) -> None:
        """Lets rollouts load a version; returns once all serve it, or some do and the others are slow.

        Slow is who takes more than twice the time of the first one. Returns early if a rollout lacks a copy
        (:attr:`is_lacking`), which the caller then writes.
        """
        if self.version != release.version:
            self._newest = release
        self._is_published = False
        self.notify()
        clock = asyncio.get_running_loop().time
        started_at, until = clock(), None
        while pending := {*self._members.rollouts} - {*self.serving(self.version)} - self.lost:
            if self.is_lacking:
                return
            if until is None and self.serving(self.version):
                until = clock() + max(_MIN_GRACE_S, clock() - started_at)
            try:
                async with asyncio.timeout_at(None if pending & self.must_follow else until):
                    await self._changed.wait()
            except TimeoutError:
                break
        self._is_published = True

    async def follow(self, on_late: Callable[[], Awaitable[None]]) -> None:
        """Runs the loops of all rollouts until it is cancelled.

        Args:
            on_late: Called when a rollout serves the newest version after its publication, or lacks a copy.

        Raises:
            LateError: If a rollout does not adopt a version in time.
            StoreFailedError: If the store fails for a rollout for ``weight_sync.storage.timeout_s``.
            DataLossError: If a rollout refuses several versions in a row.
        """
        loops: dict[str, asyncio.Task[None]] = {}
        with unwrapped(ServiceError):
            async with TaskGroup() as tasks:
                while True:
                    for name in loops.keys() - self._members.rollouts.keys():
                        loops.pop(name).cancel()
                    for name in self._members.rollouts.keys() - loops.keys():
                        loops[name] = tasks.create_task(self._follow(name, on_late))
                    await self._changed.wait()

    async def stop_readers(self, copy: str) -> None:
        """Makes the rollouts that read a copy stop; they read the newest version next."""
        for name, follower in [*self._states.items()]:
            if copy in follower.copies:
                follower.is_superseded = True
                await self._members.abort(follower.epoch, f"{copy} is outdated", [name])
                follower.copies = ()

    async def stop(self) -> None:
        """Makes all rollouts stop that read a copy."""
        for copy in self.copies:
            await self.stop_readers(copy)

    async def _follow(self, name: str, on_late: Callable[[], Awaitable[None]]) -> None:
        follower = self._state(name)
        while True:
            release = self._newest
            if release is None or not self._can_load(follower, release.version):
                await self._changed.wait()
                continue
            try:
                await self._members.call_all({name: self._load(name, follower, release)})
            except LateError:
                raise
            except ServiceError as error:
                if not await self._survives(name, follower, error):
                    return
            else:
                follower.trouble = StoreTrouble()
            self.notify()
            is_served = follower.served_version == self.version
            if self._is_published and (is_served or self._lacks(follower)):
                await on_late()

    def _can_load(self, follower: Follower, version: int) -> bool:
        if follower.served_version == version:
            return False
        # Whether a copy is missing is known after the rollout has said what it holds.
        return follower.lacked_version != version or not self._lacks(follower)

    def _lacks(self, follower: Follower) -> bool:
        path = self._shelf.path(follower.held_version, self.version)
        return follower.lacked_version == self.version >= 0 and path is None

    async def _load(self, name: str, follower: Follower, release: Release) -> None:
        """Loads, adopts and checks a version; only notes it if the rollout lacks a copy."""
        member, version = self._members.rollouts[name], release.version
        if follower.epoch < 0:
            epoch = self._channel.next_epoch()
            await self._channel.open(member, epoch, receiver=0)
            follower.epoch = epoch
        plan_hash, timeout_s = self._members.plan.plan_hash, self._adopt_timeout_s
        follower.held_version = await member.prepare(
            follower.epoch, version, plan_hash, timeout_s=timeout_s
        )
        self._members.note_prepared([name])
        path = self._shelf.path(follower.held_version, version)
        follower.lacked_version = version if path is None else -1
        if path is None:
            return
        follower.copies = tuple(copy.name for copy in path)
        try:
            for copy in path:
                await self._read(member, follower, copy)
                follower.held_version = copy.version
        finally:
            follower.copies = ()
        try:
            follower.stall_s = await member.adopt(
                follower.epoch, version, release.digest, timeout_s=timeout_s
            )
        except DeadlineExceededError as error:
            action = f"adopt weight version {version}"
            raise LateError(name, f"did not {action} within {timeout_s:.0f} s") from error
        await member.check(
            version, release.canary, release.tolerance, timeout_s=self._check_timeout_s
        )
        follower.served_version = version

    async def _read(self, member: WeightSyncClient, follower: Follower, copy: StoredCopy) -> None:
        timeout_s = max(self._channel.timeout_s(copy.num_bytes), follower.timeout_s)
        try:
            await member.transfer(
                follower.epoch,
                copy.version,
                base_version=copy.base_version,
                timeout_s=timeout_s,
                stored=copy.name,
                manifests=copy.manifests,
            )
        except DeadlineExceededError:
            follower.timeout_s = self._channel.slower_timeout_s(timeout_s)
            raise
        except DataLossError:
            self._shelf.drop(copy.name)
            raise

    async def _survives(self, name: str, follower: Follower, error: ServiceError) -> bool:
        """Records a failed load, and waits before the next one; returns False if the rollout is lost."""
        epoch, follower.epoch, follower.held_version = follower.epoch, -1, -1
        if await self._members.abort(max(epoch, 0), str(error), [name]):
            self.lost.add(name)
            self.notify()
            return False
        if follower.is_superseded:
            follower.is_superseded = False
            return True
        self._channel.record(name, follower.trouble, error)
        if follower.trouble.num_refusals >= _MAX_REFUSALS:
            raise error
        if isinstance(error, DataLossError) and (full_copy := self._shelf.find(self.version, -1)):
            self._shelf.drop(full_copy.name)  # it is written again, whatever was wrong
        # Without what it held, it may lack a whole copy.
        follower.served_version, follower.lacked_version = -1, self.version
        self.notify()
        await follower.trouble.pause()
        return True

    def _state(self, name: str) -> Follower:
        return self._states.setdefault(name, Follower())
