"""Access control of an encrypted data socket, through ZeroMQ's authentication protocol ZAP (RFC 27)."""

import logging
from collections.abc import Awaitable, Callable

import zmq
from zmq.utils import z85

from services.common.errors import ServiceError
from services.transferqueue import metrics

logger = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
ALL_RUNS = "*"
"""Identity of a client without a run: a service, or any client if authentication is off."""
READY = b"\x05READY"
"""Command with which ZeroMQ ends the handshake of an admitted client (CurveZMQ, RFC 26)."""
_KEY_BYTES = 32


async def answer(
    frames: list[bytes], admitted_as: Callable[[str], Awaitable[str | None]]
) -> list[bytes]:
    """Answers one ZAP request.

    Args:
        frames: Request as a ROUTER receives it: route, empty, version, request id, domain, address,
            identity, mechanism, credentials.
        admitted_as: Returns the run of a public key in Z85; None if it is not admitted.

    Returns:
        The frames to send back.
    """
    route, request_id, mechanism, credentials = frames[0], frames[3], frames[7], frames[8:]
    run_id: str | None = None
    if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == _KEY_BYTES:
        try:
            run_id = await admitted_as(z85.encode(credentials[0]).decode())
        except ServiceError as error:
            logger.warning("checking a client's token failed", extra={"error": str(error)})
    if run_id is None:
        metrics.REJECTED.labels("data", "unauthenticated").inc()
        return [route, b"", b"1.0", request_id, b"400", b"not admitted", b"", b""]
    return [route, b"", b"1.0", request_id, b"200", b"OK", run_id.encode(), b""]


def run_of_peer(frame: zmq.Frame) -> str | None:
    """Returns the run of the client that sent a frame to an encrypted socket; None if it may use all."""
    run_id = str(frame.get("User-Id"))
    return None if run_id == ALL_RUNS else run_id


def encrypt(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """Restricts a socket to CURVE connections of clients that ZAP admits; call it before ``bind``."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"slipstream")
