"""Listening sockets. Apart from the servers, because each of them would bring its libraries along."""

import socket

from services.common.errors import InvalidArgumentError

_BACKLOG = 1024


def listen(bind: str) -> socket.socket:
    """Returns a listening socket whose connections send data without delay (TCP_NODELAY).

    Args:
        bind: ``host:port``, where port 0 chooses a free one, or ``unix:PATH``. An IPv6 address is in
            brackets; ``[::]`` accepts IPv4, too.

    Raises:
        InvalidArgumentError: If the address cannot be bound.
    """
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if host == "unix":
            # For local processes that may open its file.
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(port)
            listener.listen(_BACKLOG)
            return listener
        listener = socket.create_server(
            (host, int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            backlog=_BACKLOG,
            reuse_port=False,
        )
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"cannot listen on {bind}: {getattr(error, 'strerror', None) or error}; expected host:port "
            "with an address of this host: choose another port, or 0 for any free one",
            bind=bind,
        ) from error
    # Connections inherit it. Without it a body waits for the client to acknowledge the headers, 40
    # ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
