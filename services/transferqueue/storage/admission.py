"""Who may use an encrypted data socket: ZeroMQ asks here, over ZAP (RFC 27)."""

import logging
from collections.abc import Awaitable, Callable

import zmq
from zmq.utils import z85

from services.common.errors import ServiceError
from services.transferqueue import metrics

logger = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
_KEY_BYTES = 32


async def answer(frames: list[bytes], is_admitted: Callable[[str], Awaitable[bool]]) -> list[bytes]:
    """Answer one request.

    Args:
        frames: Request as a ROUTER receives it: route, empty, version, request id, domain, address,
            identity, mechanism, credentials.
        is_admitted: Looks a public key in Z85 up.

    Returns:
        The frames to send back.
    """
    route, request_id, mechanism, credentials = frames[0], frames[3], frames[7], frames[8:]
    admitted = False
    if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == _KEY_BYTES:
        try:
            admitted = await is_admitted(z85.encode(credentials[0]).decode())
        except ServiceError as error:
            logger.warning("client could not be checked", extra={"error": str(error)})
    if not admitted:
        metrics.REJECTED.labels("data", "unauthenticated").inc()
    code, text = (b"200", b"OK") if admitted else (b"400", b"not admitted")
    return [route, b"", b"1.0", request_id, code, text, b"client", b""]


def encrypt(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """Let a bound socket talk CURVE only, to clients that ZAP admits."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"slipstream")
