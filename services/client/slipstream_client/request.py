"""HTTP requests of the client, and errors of its calls."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

MAX_ANSWER_BYTES = 256 << 20
"""Max size of an answer, and of a line of a streamed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a controller. Query parameters that are None are not sent."""

    method: str
    path: str
    """Path template with ``{name}`` placeholders."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Values of the placeholders."""
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    is_idempotent: bool = False
    """True if a request that is not a GET may be repeated."""

    @property
    def may_retry(self) -> bool:
        """True if a repetition has no further effect: a GET, or a request with an idempotency key."""
        return self.method == "GET" or self.is_idempotent or "idempotency-key" in self.headers

    def options(self) -> dict[str, Any]:
        """Returns the arguments of ``httpx.AsyncClient.request``."""
        path = self.path.format(**{name: quote(of, safe="") for name, of in self.names.items()})
        options = {
            "params": without_none(self.query),
            "headers": dict(self.headers),
            "json": self.body,
        }
        return {"method": self.method, "url": path, **options}


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


class ApiError(RuntimeError):
    """The controller refused a request or did not answer.

    Attributes:
        status: HTTP status; 0 if the controller did not answer.
        code: Stable error code for programs; empty if the controller did not answer.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RunFailedError(RuntimeError):
    """A run failed or was cancelled; the message has its state and the reason."""


class AnswerLines:
    """Splits a streamed answer into lines of limited size.

    Args:
        url: Address of the controller, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._line = bytearray()

    def of(self, chunk: bytes) -> Iterator[str]:
        """Yields the lines that end in the next bytes. Raises ApiError if a line is too long."""
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield (self._line + line).decode(errors="replace").rstrip("\r")
            self._line.clear()
        self._line += rest
        if len(self._line) > MAX_ANSWER_BYTES:
            raise no_controller(self._url, f"a line has more than {MAX_ANSWER_BYTES} bytes")


def json_object(text: str | bytes, url: str) -> dict[str, Any]:
    """Parses a JSON object that a controller has sent. Raises ApiError if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise no_controller(url, f"it sent no JSON: {text[:100]!r}") from error
    if not isinstance(value, dict):
        raise no_controller(url, f"expected a JSON object, got {text[:100]!r}")
    return value


def no_controller(url: str, reason: str) -> ApiError:
    """Creates the error for an answer that no controller gives."""
    return ApiError(
        f"the server at {url} does not answer as a controller of this release: {reason}; check --url and "
        "SLIPSTREAM_URL"
    )


def error_of(response: httpx.Response) -> ApiError:
    """Converts an error response to an exception."""
    status = response.status_code
    try:
        problem = response.json()
    except (ValueError, RecursionError):
        return ApiError(f"the controller answered {status}: {response.text[:200]}", status=status)
    if not isinstance(problem, dict):
        return ApiError(f"the controller answered {status}: {problem!r:.200}", status=status)
    errors = problem.get("errors")
    lines = [
        str(problem.get("detail", status)),
        *map(_with_key, errors if isinstance(errors, list) else ()),
    ]
    return ApiError("\n".join(lines), status=status, code=str(problem.get("code", "")))


def unreachable(url: str, error: Exception) -> ApiError:
    """Creates the error for a controller that does not answer."""
    why = str(error) or type(error).__name__  # time-outs have no text
    return ApiError(
        f"no controller answers at {url} ({why}); start one with 'slipstream up', or set SLIPSTREAM_URL or "
        "--url"
    )


def _with_key(error: Any) -> str:
    """Returns the message of a validation error, prefixed with its key unless it begins with the key."""
    if not isinstance(error, dict) or "pointer" not in error or "message" not in error:
        return f"{error!r:.200}"
    name = str(error["pointer"]).strip("/").replace("/", ".")
    message = str(error["message"])
    return message if not name or message.startswith(name) else f"{name}: {message}"
