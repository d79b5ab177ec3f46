"""Errors in OpenAI's format."""

from typing import Any


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        body: ``{"error": {"message", "type", "param", "code"}}``.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": _type(status), "param": param, "code": code}
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer: whoever asks an episode that is ending is told to wait, not to insist."""
        return {"Retry-After": "1"} if self.status == 503 else {}

    @property
    def is_too_long(self) -> bool:
        """Whether the conversation has no room for another reply."""
        return bool(self.body["error"]["code"] == "context_length_exceeded")


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """The request is at fault."""
    return ApiError(400, message, param=param)


def too_long(message: str) -> ApiError:
    """The conversation does not fit into the sample's limits."""
    return ApiError(400, message, code="context_length_exceeded")


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
