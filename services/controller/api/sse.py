"""Server-sent events over HTTP."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from services.common.errors import ResourceExhaustedError

# Proxies end a connection that is silent for a minute.
_PING_S = 10.0
_PING = b": nothing new\n\n"

_TEXTS = {name: {"type": "string"} for name in ("data", "event", "id")}
DESCRIPTION: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"itemSchema": {"type": "object", "properties": _TEXTS}}}
    }
}
"""What the schema says of a route that answers with a stream."""


def event_stream(frames: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer of events, with a comment now and then while there are none.

    It ends with event ``overflow`` if the reader is too slow.

    Args:
        frames: What :func:`frame_of` makes, one or several at once; empty if there is nothing to say now.
    """
    # Proxies such as nginx would hold events back.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_with_pings(frames), media_type="text/event-stream", headers=headers)


def frame_of(type_: str, data: str, id_: str = "") -> bytes:
    """An event as it is sent; ``data`` is JSON in one line."""
    head = f"id: {id_}\n" if id_ else ""
    return f"{head}event: {type_}\ndata: {data}\n\n".encode()


async def _with_pings(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    sent = time.monotonic()
    try:
        async for frame in frames:
            if frame or time.monotonic() - sent > _PING_S:
                yield frame or _PING
                sent = time.monotonic()
    except ResourceExhaustedError as error:
        yield frame_of("overflow", json.dumps({"detail": error.message}))
