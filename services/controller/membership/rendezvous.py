"""Key-value store with scopes, through which the members of a weight group meet."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from services.common.fields import run_of

MAX_VALUE_BYTES = 64 << 10
MAX_KEY_CHARACTERS = 256
MAX_RUN_BYTES = 16 << 20
"""Max size of a run's keys and values together."""
_MAX_SCOPES = 4
"""Number of a run's newest weight groups to keep; members of older ones have failed or moved on."""
_ENTRY_BYTES = 256
"""Overhead that each value adds to its size."""


@dataclass(slots=True)
class _Run:
    scopes: OrderedDict[str, dict[str, bytes]] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class RendezvousStore:
    """Values by scope and key.

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
        known = self._run(scope).scopes.get(scope, {}).get(key, b"0")
        try:
            value = int(known) + amount
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
