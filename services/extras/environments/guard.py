"""Protects services that this process offers to remote rollouts: environments, a reward model."""

import argparse
import asyncio
import hmac
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.http.limits import MAX_UNAUTHENTICATED_EPISODES, admit
from services.common.http.server import serve_http
from services.common.security.credentials import read_key

MAX_BODY_BYTES: Final = 8 << 20
"""Max size of one request body."""
MAX_REQUEST_BYTES: Final = 64 << 20
"""Max size of all concurrent requests; a rollout steps many episodes at once."""
_BODY_TIMEOUT_S = 30.0
_CONNECTIONS_PER_PEER = 4096
_OPEN_PATHS = frozenset({"/healthz"})


class Guard:
    """ASGI middleware that accepts only small JSON requests that have the token and no ``Origin``.

    Browsers send ``Origin`` with requests of web pages. The guard reads nothing but the headers of a
    request without the token. ``/healthz`` needs no token.

    Args:
        app: Application that receives accepted requests, with complete bodies.
        token: Token that rollouts send as ``Authorization: Bearer``; empty if only this user can connect.
    """

    def __init__(self, app: ASGIApp, *, token: bytes, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._token = token
        self._max_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request, or refuses it and closes its connection."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        body = b""
        if refusal is None:
            if scope["path"] not in _OPEN_PATHS:
                admit(scope)
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    body = await self._read(headers, receive)
            except TimeoutError:
                refusal = 408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s"
            except ValueError as error:
                refusal = 413, str(error)
        if refusal is not None:
            status, message = refusal
            response = JSONResponse({"error": message}, status, {"Connection": "close"})
            await response(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        await self._app(scope, lambda: _next(messages, receive), send)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        is_known = scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self._token)
        if self._token and not is_known and path not in _OPEN_PATHS:
            return 401, (
                "the token is missing or wrong; set it in the specification next to the URL, as "
                'token: {"secret": NAME}'
            )
        if "origin" in headers:
            return 403, f"requests from web pages ({headers['origin']!r:.80}) are not allowed"
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and media != "application/json":
            return 415, "the body must be JSON with Content-Type: application/json"
        return None

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """Reads the complete body.

        Raises:
            ValueError: If it is too large.
            ClientDisconnect: If the client disconnects before the body ends.
        """
        body, has_more = bytearray(), True
        stated = headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > self._max_bytes:
            raise ValueError(
                f"the request has {stated} bytes, more than the limit of {self._max_bytes}"
            )
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                raise ValueError(f"the request has more than the limit of {self._max_bytes} bytes")
        return bytes(body)


async def _next(messages: list[Message], receive: Receive) -> Message:
    return messages.pop() if messages else await receive()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :func:`serve_guarded` to a command line."""
    parser.add_argument("--bind", required=True, help="host:port, or unix:PATH")
    parser.add_argument(
        "--token-file",
        type=Path,
        help="file with the token that rollouts send; required unless on a Unix socket",
    )
    parser.add_argument(
        "--tls-certificate", type=Path, help="PEM file with the certificate, to serve https"
    )
    parser.add_argument("--tls-key", type=Path, help="PEM file with the private key")


def serve_guarded(app: ASGIApp, options: argparse.Namespace) -> AbstractAsyncContextManager[int]:
    """Serves an application according to the command line; yields the port.

    Raises:
        ValueError: If other users or hosts could connect without a token.
        InvalidArgumentError: If the token file or the address is invalid.
    """
    is_here = options.bind.startswith("unix:")
    if options.token_file is None and not is_here:
        raise ValueError(
            f"--bind {options.bind} accepts other hosts; set --token-file to a file with at least 32 random "
            "bytes, such as 'openssl rand -hex 32' writes, or bind to unix:PATH"
        )
    token = b"" if options.token_file is None else read_key(options.token_file)
    return serve_http(
        options.bind,
        Guard(app, token=token),
        certificate=options.tls_certificate,
        key=options.tls_key,
        connections_per_peer=0 if is_here else _CONNECTIONS_PER_PEER,
        authenticates=bool(token),
        max_unauthenticated=MAX_UNAUTHENTICATED_EPISODES,
        max_request_bytes=MAX_REQUEST_BYTES,
    )
