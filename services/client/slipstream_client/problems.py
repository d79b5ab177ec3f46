"""What goes wrong between a client and a controller."""

from typing import Any

import httpx


class ApiError(RuntimeError):
    """The controller refused a request or could not be reached; the message says why.

    Attributes:
        status: HTTP status; 0 if nobody answered.
        code: Stable name of what is wrong, for programs; empty if nobody answered.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RunFailedError(RuntimeError):
    """A run that was waited for ended otherwise than well; the message says how and why."""


def refused(response: httpx.Response) -> ApiError:
    """What an answer says that is none."""
    status = response.status_code
    try:
        problem = response.json()
    except ValueError:
        return ApiError(f"the controller answered {status}: {response.text[:200]}", status=status)
    if not isinstance(problem, dict):
        return ApiError(f"the controller answered {status}: {problem}", status=status)
    lines = [str(problem.get("detail", status)), *map(_pointed, problem.get("errors", ()))]
    return ApiError("\n".join(lines), status=status, code=str(problem.get("code", "")))


def unreachable(url: str, error: Exception) -> ApiError:
    """Nobody answers."""
    return ApiError(
        f"no controller answers at {url} ({error}); start one with 'slipstream up', or set SLIPSTREAM_URL or "
        "--url"
    )


def _pointed(error: dict[str, Any]) -> str:
    """What is wrong, with the name of where it is if the message does not begin with it."""
    name = str(error["pointer"]).strip("/").replace("/", ".")
    message = str(error["message"])
    return message if not name or message.startswith(name) else f"{name}: {message}"
