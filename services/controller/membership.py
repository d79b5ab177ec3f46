"""Workers of each run: registration, progress, missed heartbeats, and the rendezvous of weight groups."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from services.common.fields import run_of
from services.common.host import Clock
from services.wire.controller import CUT_OFF_GAUGE, WorkerState

logger = logging.getLogger(__name__)

HeartbeatOutcome = Literal["continue", "register", "stop"]
# Limits of what the workers of one run may store in this process: the run's code may be hostile.
MAX_WORKERS = 5000
MAX_GAUGES = 500_000
MAX_TEXT = 256
_MAX_PHASES = 32
_LOADED = "loaded"
# Limits of the rendezvous store.
MAX_VALUE_BYTES = 64 << 10
MAX_KEY_CHARACTERS = 256
MAX_RUN_BYTES = 16 << 20
"""Max size of a run's keys and values together."""
_MAX_SCOPES = 4
"""Number of a run's newest weight groups to keep; members of older ones have failed or moved on."""
_ENTRY_BYTES = 256
"""Overhead that each value adds to its size."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """Registered worker."""

    run_id: str
    worker_id: str
    incarnation: str
    role: str
    address: str
    """``host:port`` of its gRPC server."""
    host_id: str
    last_heartbeat: float
    """Time of its last heartbeat, in monotonic seconds."""
    state: WorkerState = "loading"
    activity: str = ""
    weight_version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)
    last_event: int = 0
    """Number of its newest event that is recorded; they ascend, and a repeated heartbeat repeats them."""
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its events are recorded."""
    start_phases: list[tuple[str, float]] = field(default_factory=list)
    """``(activity, begin)`` of each phase of its start, in monotonic seconds; the last one marks the end."""

    def enter_phase(self, state: WorkerState, activity: str, now: float) -> None:
        """Records what it does during its start, without progress such as ``: step 20 of 100``."""
        phase = activity.partition(":")[0] if state == "loading" else _LOADED
        last = self.start_phases[-1][0] if self.start_phases else ""
        is_new = bool(phase) and last not in (phase, _LOADED)
        if is_new and len(self.start_phases) < _MAX_PHASES:
            self.start_phases.append((phase[:MAX_TEXT], now))

    def start_seconds(self) -> dict[str, float]:
        """Returns the seconds of each ended phase of its start, in order."""
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(self.start_phases):
            seconds[phase] = round(seconds.get(phase, 0.0) + end - begin, 2)
        return seconds

    @property
    def is_cut_off(self) -> bool:
        """True if the worker reports that it cannot reach the transferqueue."""
        return self.gauges.get(CUT_OFF_GAUGE, 0.0) > 0


class Membership:
    """Registered workers by run; any change of members or states wakes :meth:`wait_until`.

    Args:
        heartbeat_timeout_s: Seconds of silence after which a worker counts as lost.
    """

    def __init__(self, clock: Clock, heartbeat_timeout_s: float) -> None:
        self._clock = clock
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._runs: dict[str, dict[str, Worker]] = {}
        self._ending: set[str] = set()
        self._opened: dict[str, float] = {}
        """Time of :meth:`open_run` per run, in monotonic seconds."""
        self._last_checks: dict[str, float] = {}
        """Time of the last call of :meth:`find_silent` per run, in monotonic seconds."""
        self._forgotten: dict[str, set[str]] = {}
        """Incarnations per run that count as gone, whose processes may live for some seconds more."""
        self.rendezvous = RendezvousStore()
        """Rendezvous of the members of weight groups."""
        self._changed = asyncio.Condition()

    def open_run(self, run_id: str) -> None:
        self._runs.setdefault(run_id, {})
        self._opened[run_id] = self._clock.monotonic()
        self.rendezvous.open(run_id)

    async def end_run(self, run_id: str) -> None:
        """Accepts no more workers of a run; registered ones are ordered to stop at their next heartbeat.

        Those that wait in a rendezvous stop waiting. What they report as they end is accepted until
        :meth:`close_run`.
        """
        self._ending.add(run_id)
        await self.rendezvous.close(run_id)

    async def close_run(self, run_id: str) -> None:
        """Forgets the workers of a run; the answer to a late heartbeat is the order to stop."""
        self._ending.discard(run_id)
        self._runs.pop(run_id, None)
        self._opened.pop(run_id, None)
        self._last_checks.pop(run_id, None)
        self._forgotten.pop(run_id, None)
        await self.rendezvous.close(run_id)
        await self._notify()

    def find(self, run_id: str, worker_id: str) -> Worker | None:
        return self._runs.get(run_id, {}).get(worker_id)

    async def unregister(self, run_id: str, worker_id: str) -> None:
        """Removes a worker whose process is gone; the answer to a late heartbeat is the order to stop."""
        worker = self._runs.get(run_id, {}).pop(worker_id, None)
        if worker is not None:
            self._forgotten.setdefault(run_id, set()).add(worker.incarnation)
        await self._notify()

    async def register(self, worker: Worker) -> bool:
        """Registers a worker; a newer incarnation replaces the older one.

        Returns:
            True if it replaced another incarnation.

        Raises:
            FailedPreconditionError: If the run is not active, or the worker counts as gone.
            InvalidArgumentError: If its description is too long.
            ResourceExhaustedError: If the run has :data:`MAX_WORKERS` others.
        """
        texts = (worker.worker_id, worker.incarnation, worker.address, worker.host_id)
        if max(map(len, texts)) > MAX_TEXT:
            raise InvalidArgumentError(
                f"the id, incarnation, address and host of a worker must have at most {MAX_TEXT} characters",
                run_id=worker.run_id,
            )
        if worker.run_id not in self._runs or worker.run_id in self._ending:
            raise FailedPreconditionError(
                f"run {worker.run_id} is not active, so no worker can register",
                run_id=worker.run_id,
            )
        if worker.incarnation in self._forgotten.get(worker.run_id, ()):
            raise FailedPreconditionError(
                f"{worker.worker_id} was considered lost and has been replaced by another process",
                run_id=worker.run_id,
            )
        previous = self._runs[worker.run_id].get(worker.worker_id)
        if previous is None and len(self._runs[worker.run_id]) >= MAX_WORKERS:
            raise ResourceExhaustedError(
                f"run {worker.run_id} has {MAX_WORKERS} workers, so no other one can register",
                run_id=worker.run_id,
            )
        is_replaced = previous is not None and previous.incarnation != worker.incarnation
        if previous is not None and not is_replaced:  # a repeated call
            worker.last_event, worker.recording = previous.last_event, previous.recording
        self._runs[worker.run_id][worker.worker_id] = worker
        worker.start_phases = [
            ("imports", self._opened[worker.run_id]),
            ("registered", self._clock.monotonic()),
        ]
        await self._notify()
        return is_replaced

    async def record_heartbeat(
        self,
        run_id: str,
        worker_id: str,
        incarnation: str,
        *,
        state: WorkerState,
        activity: str,
        weight_version: int,
        gauges: Mapping[str, float],
    ) -> HeartbeatOutcome:
        workers = self._runs.get(run_id)
        if workers is None or run_id in self._ending:
            return "stop"
        if incarnation in self._forgotten.get(run_id, ()):
            return "stop"
        worker = workers.get(worker_id)
        if worker is None:
            return "register"
        if worker.incarnation != incarnation:
            return "stop"
        has_new_names = worker.gauges.keys() != gauges.keys()
        if has_new_names:
            elsewhere = sum(len(member.gauges) for member in workers.values()) - len(worker.gauges)
            if elsewhere + len(gauges) > MAX_GAUGES or max(map(len, gauges), default=0) > MAX_TEXT:
                raise ResourceExhaustedError(
                    f"the workers of run {run_id} report more than {MAX_GAUGES} gauges, or a name of more "
                    f"than {MAX_TEXT} characters",
                    run_id=run_id,
                )
        # Wakes waiters only for changes on which a condition may depend: the state, the names of the
        # gauges and the value of CUT_OFF_GAUGE. Most heartbeats change none of them.
        is_news = worker.state != state or has_new_names
        is_news |= worker.is_cut_off != (gauges.get(CUT_OFF_GAUGE, 0.0) > 0)
        worker.last_heartbeat = self._clock.monotonic()
        worker.enter_phase(state, activity, worker.last_heartbeat)
        worker.state = state
        worker.activity = activity[:MAX_TEXT]
        worker.weight_version = weight_version
        worker.gauges = dict(gauges)
        if is_news:
            await self._notify()
        return "continue"

    @property
    def num_workers(self) -> int:
        """Number of registered workers of all runs."""
        return sum(map(len, self._runs.values()))

    def workers(self, run_id: str, role: str | None = None) -> list[Worker]:
        """Returns the registered workers of a run, ordered by name."""
        members = self._runs.get(run_id, {}).values()
        return sorted(
            (worker for worker in members if role is None or worker.role == role),
            key=lambda worker: worker.worker_id,
        )

    def start_supervision(self, run_id: str) -> None:
        """Starts the supervision of a run's workers, so that the time before does not count as a pause."""
        self._last_checks[run_id] = self._clock.monotonic()

    def find_silent(self, run_id: str) -> list[Worker]:
        """Returns the workers without a heartbeat within the time-out. Call it at least twice in that time.

        A much later call means that the controller itself was stopped (by a debugger, or as a
        frozen virtual machine) and received no heartbeats meanwhile. The workers did not cause this,
        so their time-outs start again.
        """
        now = self._clock.monotonic()
        pause_s = now - self._last_checks.get(run_id, now)
        self._last_checks[run_id] = now
        workers = self.workers(run_id)
        if pause_s > self._heartbeat_timeout_s * 0.75:
            logger.warning(
                "the controller was suspended; heartbeat time-outs start again",
                extra={"run": run_id, "pause_s": round(pause_s, 1)},
            )
            for worker in workers:
                worker.last_heartbeat = now
        limit = now - self._heartbeat_timeout_s
        return [worker for worker in workers if worker.last_heartbeat < limit]

    async def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: Callable[[], float],
        waiting_for: Callable[[], str],
    ) -> None:
        """Waits until ``condition`` holds; reads it and the time-out again at every change.

        Raises:
            DeadlineExceededError: After ``timeout_s()``, naming what was waited for.
        """
        clock = asyncio.get_running_loop().time
        begin = clock()
        async with self._changed:
            while not condition():
                limit_s = timeout_s()
                left_s = begin + limit_s - clock()
                if left_s <= 0:
                    raise DeadlineExceededError(
                        f"timed out after {limit_s:.0f} s waiting for {waiting_for()}"
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()

    async def recheck(self) -> None:
        """Makes all waiters read conditions and time-outs again, after a run's limits have changed."""
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass(slots=True)
class _Run:
    scopes: OrderedDict[str, dict[str, bytes]] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class RendezvousStore:
    """Key-value store through which the members of a weight group meet.

    A scope is one run and one epoch, ``RUN/EPOCH``, and is removed with its run.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._changed = asyncio.Condition()

    def open(self, run_id: str) -> None:
        self._runs.setdefault(run_id, _Run())

    async def close(self, run_id: str) -> None:
        """Removes the values of a run; pending :meth:`get` calls fail."""
        self._runs.pop(run_id, None)
        async with self._changed:
            self._changed.notify_all()

    async def set(self, scope: str, key: str, value: bytes) -> None:
        """Stores a value.

        Raises:
            FailedPreconditionError: If the run is not active.
            InvalidArgumentError: If the key has more than 256 characters or the value more than 64
                KiB.
            ResourceExhaustedError: If the run would exceed its total size.
        """
        if len(value) > MAX_VALUE_BYTES or len(key) > MAX_KEY_CHARACTERS:
            raise InvalidArgumentError(
                f"a rendezvous key must have at most {MAX_KEY_CHARACTERS} characters and its value at most "
                f"{MAX_VALUE_BYTES} bytes, got {len(key)} and {len(value)} for "
                f"{key[:MAX_KEY_CHARACTERS]!r}"
            )
        run = self._run(scope)
        if scope not in run.scopes:
            run.scopes[scope] = {}
            if len(run.scopes) > _MAX_SCOPES:
                _, old = run.scopes.popitem(last=False)
                run.size_bytes -= sum(_size(key, value) for key, value in old.items())
        values = run.scopes[scope]
        grown = run.size_bytes + _size(key, value)
        if key in values:
            grown -= _size(key, values[key])
        if grown > MAX_RUN_BYTES:
            raise ResourceExhaustedError(
                f"the rendezvous store of {run_of(scope)} has {run.size_bytes} of {MAX_RUN_BYTES} bytes, "
                f"no room for {_size(key, value)} more; store only what members need to connect",
                scope=scope,
            )
        run.size_bytes = grown
        values[key] = value
        async with self._changed:
            self._changed.notify_all()

    async def get(self, scope: str, key: str, timeout_s: float) -> bytes:
        """Waits for a value and returns it.

        Raises:
            FailedPreconditionError: If the run is not active.
            DeadlineExceededError: If it was not set in time.
        """

        def found() -> bytes | None:
            return self._run(scope).scopes.get(scope, {}).get(key)

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: found() is not None)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"{key!r} was not set in {scope!r} within {timeout_s:.0f} s: a member did not join",
                scope=scope,
            ) from error
        value = found()
        assert value is not None
        return value

    async def add(self, scope: str, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value.

        Raises:
            FailedPreconditionError: If the run is not active.
            InvalidArgumentError: If the key holds a value that is not a counter.
        """
        old_value = self._run(scope).scopes.get(scope, {}).get(key, b"0")
        try:
            value = int(old_value) + amount
        except ValueError as error:
            raise InvalidArgumentError(
                f"{key!r} of {scope!r} must be a counter, but has another value"
            ) from error
        await self.set(scope, key, str(value).encode())
        return value

    def _run(self, scope: str) -> _Run:
        run = self._runs.get(run_of(scope))
        if run is None:
            raise FailedPreconditionError(
                f"run {run_of(scope)} is not active, so its workers cannot rendezvous", scope=scope
            )
        return run


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
