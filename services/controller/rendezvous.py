"""Key-value scopes in which the members of a weight group meet."""

import asyncio
from collections import defaultdict

from services.common.errors import DeadlineExceededError, InvalidArgumentError

MAX_VALUE_BYTES = 64 << 10


class RendezvousStore:
    """Values by scope and key. A scope is one run and one epoch."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._changed = asyncio.Condition()

    async def set(self, scope: str, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            InvalidArgumentError: If it is larger than 64 KiB.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidArgumentError(
                f"a rendezvous value may have {MAX_VALUE_BYTES} bytes, but {key!r} has {len(value)}"
            )
        async with self._changed:
            self._scopes[scope][key] = value
            self._changed.notify_all()

    async def get(self, scope: str, key: str, timeout_s: float) -> bytes:
        """Return a value, waiting for it.

        Raises:
            DeadlineExceededError: If it was not set in time.
        """
        values = self._scopes[scope]
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: key in values)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"{key!r} was not set in {scope!r} within {timeout_s:.0f} s: a member did not come",
                scope=scope,
            ) from error
        return values[key]

    async def add(self, scope: str, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        async with self._changed:
            value = int(self._scopes[scope].get(key, b"0")) + amount
            self._scopes[scope][key] = str(value).encode()
            self._changed.notify_all()
        return value

    def drop(self, prefix: str) -> None:
        """Forget all scopes whose name starts with ``prefix``."""
        for scope in [scope for scope in self._scopes if scope.startswith(prefix)]:
            del self._scopes[scope]
