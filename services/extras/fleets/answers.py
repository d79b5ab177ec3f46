"""Requests and refusals of a fleet's interface inside a server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.requests import Request

_MAX_BODY_BYTES: Final = 64 << 20
"""Max bytes of a request in JSON: the list of a model's tensors."""
MAX_GROUP_BYTES: Final = 1 << 30
"""Max bytes of a group's request with the images of its prompts."""
_MAX_GROUPS_BYTES: Final = 1 << 30
"""Max sum of the bytes of the groups that are read and passed to the engine at the same time."""
_ROOM_S: Final = 30.0


class RefusedError(Exception):
    """The server refuses a request.

    Args:
        status: Status of the answer.
        message: Reason and remedy, for people.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


async def read_body(request: Request, *, max_bytes: int = _MAX_BODY_BYTES) -> dict[str, Any]:
    """Reads the JSON object that a request contains.

    Raises:
        RefusedError: If it contains another type or too many bytes.
    """
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_bytes:
            raise RefusedError(413, f"the request has more than {max_bytes} bytes")
    try:
        body = json.loads(content)
    except ValueError as error:
        raise RefusedError(400, f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError(400, "the request is not a JSON object")
    return body


class GroupRoom:
    """Bounds the memory of the groups' requests that the engine has not received, in the order of arrival."""

    def __init__(self) -> None:
        self._free_bytes = _MAX_GROUPS_BYTES
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, request: Request) -> AsyncIterator[Callable[[], None]]:
        """Waits until a request fits; yields a function that frees its room before the block ends.

        Raises:
            RefusedError: If earlier requests leave no room in time.
        """
        length = request.headers.get("content-length", "")
        num_bytes = min(int(length) if length.isdecimal() else MAX_GROUP_BYTES, _MAX_GROUPS_BYTES)
        try:
            async with asyncio.timeout(_ROOM_S), self._turn:
                while self._free_bytes < num_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self._free_bytes -= num_bytes
        except TimeoutError:
            raise RefusedError(
                429, f"earlier requests left no room for {num_bytes} bytes within {_ROOM_S:.0f} s"
            ) from None

        def free() -> None:
            nonlocal num_bytes
            self._free_bytes += num_bytes
            num_bytes = 0
            self._freed.set()

        try:
            yield free
        finally:
            free()
