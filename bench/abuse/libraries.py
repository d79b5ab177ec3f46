"""Attacks servers that have only their libraries' limits: ``python -m bench.abuse.libraries [--smoke]``.

A stranger opens 20 connections to a server that refuses every caller, and sends on each as much as the
server accepts, or opens 300 and holds them. The servers are uvicorn with each of its parsers and all of its
own limits (``limit_concurrency``, ``timeout_keep_alive``, ``h11_max_incomplete_event_size``), gRPC with its
own (``max_metadata_size``, ``max_receive_message_length``, ``server_handshake_timeout_ms``), and
:func:`services.common.http.server.serve_http`, whose limits are ours. For each attack the results have the
growth of the server's memory, the connections that are left open, and the honest requests, over new
connections, that got no answer within two seconds. An attack that takes 1 GiB is stopped. Results go to
``bench/results/abuse-libraries.json``; ``--smoke`` writes none.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio
import psutil
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from bench.abuse.memory import attacked, own_mib
from bench.report import read_json, write_json
from bench.whole_run import REPOSITORY
from services.common.http.server import serve_http

RESULTS = REPOSITORY / "bench" / "results" / "abuse-libraries.json"
_WAIT_S = 2.0
_ASKS_EVERY_S = 0.1
_HTTP = ("header_of_many_bytes", "many_headers", "slow_headers", "silent")
_GRPC = ("grpc_metadata", "grpc_headers_without_end", "silent")
ATTACKS = {
    "uvicorn, httptools": _HTTP,
    "uvicorn, h11": _HTTP,
    "serve_http": _HTTP,
    "gRPC": _GRPC,
}

MANY, FEW = 300, 20
"""Connections of attacks that hold them, and of those that send on each as much as the server accepts."""
_HOLD = ("slow_headers", "silent")


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    response = Response(status_code=401)
    if scope["type"] == "http" and Request(scope).url.path == "/honest":
        response = Response("answered")
    await response(scope, receive, send)


async def _serve_uvicorn(parser: str) -> None:
    config = uvicorn.Config(
        _refuse,
        port=0,
        log_config=None,
        lifespan="off",
        http=parser,  # type: ignore[arg-type]
        limit_concurrency=256,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=64 << 10,
    )
    config.load()
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    print(listener.getsockname()[1], flush=True)
    await server.serve([listener])


async def _serve_ours() -> None:
    async with serve_http("127.0.0.1:0", _refuse) as port:
        print(port, flush=True)
        await asyncio.Event().wait()


async def _serve_grpc() -> None:
    async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")

    options = {
        "grpc.max_metadata_size": 8 << 10,
        "grpc.absolute_max_metadata_size": 16 << 10,
        "grpc.max_receive_message_length": 64 << 10,
        "grpc.max_concurrent_streams": 100,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.max_connection_idle_ms": 10_000,
    }
    server = grpc.aio.server(options=[*options.items()])
    handler = grpc.unary_unary_rpc_method_handler(call)
    server.add_registered_method_handlers("bench.Abuse", {"Call": handler})
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


SERVERS: dict[str, Callable[[], Awaitable[None]]] = {
    "uvicorn, httptools": lambda: _serve_uvicorn("httptools"),
    "uvicorn, h11": lambda: _serve_uvicorn("h11"),
    "serve_http": _serve_ours,
    "gRPC": _serve_grpc,
}


async def _ask(port: int, asked: dict[str, int]) -> None:
    """Sends honest requests over new connections and counts those without an answer."""
    while True:
        asked["honest"] += 1
        asked["unanswered"] += not await _is_answered(port)
        await asyncio.sleep(_ASKS_EVERY_S)


async def _is_answered(port: int) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /honest HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
                return b"200 OK" in await reader.readline()
            finally:
                writer.close()
    return False


async def attack(kind: str, name: str, *, connections: int, seconds: float) -> dict[str, Any]:
    """Attacks a new server once."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.abuse.libraries", "--serve", kind),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    assert server.stdout is not None
    asking: asyncio.Task[None] | None = None
    try:
        port = int(await server.stdout.readline())
        process = psutil.Process(server.pid)
        before, most = own_mib(process), dict[str, float]()
        asked = {"honest": 0, "unanswered": 0}
        if kind != "gRPC":
            asking = asyncio.create_task(_ask(port, asked))  # noqa: TID251 -- cancelled below
        order = {
            "attack": name,
            "port": port,
            "connections": connections,
            "seconds": seconds,
            "method": "/bench.Abuse/Call",
        }
        answer = await attacked(order, {"server": process}, most)
        rise_mib = round(most["server"] - before, 1)
        return {"rise_mib": rise_mib, **answer, **(asked if asking is not None else {})}
    finally:
        if asking is not None:
            asking.cancel()
        server.kill()
        await server.wait()


async def measure(names: list[str], *, is_short: bool) -> None:
    """Runs attacks, prints their results and, unless they are short, stores them.

    Args:
        names: ``SERVER/ATTACK``, or the beginning of such names.
    """
    seconds = 2.0 if is_short else 6.0
    for server, attacks in ATTACKS.items():
        for name in attacks:
            if names and not f"{server}/{name}".startswith(tuple(names)):
                continue
            number = MANY if name in _HOLD and not is_short else FEW
            result = await attack(server, name, connections=number, seconds=seconds)
            load = round(os.getloadavg()[0], 1)
            result = {"connections": number, "seconds": seconds, **result, "load": load}
            print(f"{server}/{name}", result, flush=True)
            if not is_short:
                write_json(RESULTS, {**read_json(RESULTS, {}), f"{server}/{name}": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks whose names begin so")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="20 connections, two seconds each")
    options = parser.parse_args()
    if options.serve:
        serve: Any = SERVERS[options.serve]()
        asyncio.run(serve)
        return
    asyncio.run(measure(options.names, is_short=options.smoke))


if __name__ == "__main__":
    main()
