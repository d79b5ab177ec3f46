"""Requests and refusals of a fleet's interface inside a server."""

import json
from typing import Any, Final

from starlette.requests import Request

_MAX_BODY_BYTES: Final = 64 << 20
"""Max bytes of a request in JSON: the list of a model's tensors."""
MAX_GROUP_BYTES: Final = 1 << 30
"""Max bytes of a group's request with the images of its prompts."""


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
