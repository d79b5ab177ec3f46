"""Protocols of agents beside OpenAI's chat and text completions, which packages add."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from services.common.doors import Door
from services.extras.agents.requests import ApiError
from services.extras.agents.session import Session


def _openai_body(error: ApiError) -> Mapping[str, Any]:
    return error.body


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProtocol:
    """A protocol by which an agent asks for replies.

    A function of ``paths`` parses the request into a ``ChatRequest`` and returns :meth:`Session.answer` with
    its own formatter. Tokens, logprobs and versions are recorded as for chat completions.
    """

    paths: Mapping[str, Callable[[Request, Session], Awaitable[Response]]]
    """Function that answers ``POST`` requests, by their path. It may raise ``ApiError``."""
    error_body: Callable[[ApiError], Mapping[str, Any]] = _openai_body
    """Returns the JSON of an error."""


PROTOCOLS: Final = Door("protocols", AgentProtocol)


def protocol_of(path: str) -> AgentProtocol | None:
    """Returns the installed protocol that serves a path. Protocols are imported at the first such request."""
    return next((protocol for protocol in PROTOCOLS.values() if path in protocol.paths), None)
