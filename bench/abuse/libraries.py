"""Attacks servers that have only their libraries' limits: ``python -m bench.abuse.libraries [--smoke]``.

A stranger opens 20 connections to a server that refuses every caller, and sends on each as much as the
server accepts, or opens 300 and holds them. The servers are uvicorn with each of its parsers and all of its
own limits (``limit_concurrency``, ``timeout_keep_alive``, ``h11_max_incomplete_event_size``), gRPC with its
own (``max_metadata_size``, ``max_receive_message_length``, ``server_handshake_timeout_ms``), and
:func:`services.common.http.server.serve_http`, whose limits are ours.

The load of the machine changes neither what is counted nor what is compared. An attack lasts for a number of
honest requests once the stranger has connected, or until the server has used no processor time for a while,
and each honest request is sent at the same time to a server of the same kind without an attack. For each
attack the results have the growth of the server's memory, its processor time, the bytes that it took, the
connections that are left open, the honest requests over new connections that got no answer within two seconds
after the quiet server's (``unanswered``), and the median of the ratio of both times (``times_slower``). An
attack that takes 1 GiB is stopped. Results go to ``bench/results/abuse-libraries.json``; ``--smoke`` writes
none.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from statistics import median
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
_MAX_S = 120.0
"""Time after which an attack ends in any case."""
_CONNECT_S = 20.0
_IDLE_S = 3.0
"""Time in which a server that has accepted all that it will accept uses no processor time."""
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


async def _until_connected(process: psutil.Process, connections: int) -> None:
    """Waits until a server has most of a stranger's connections, or has refused them for a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_S):
            while len(process.net_connections(kind="tcp")) < connections * 0.9:
                await asyncio.sleep(_ASKS_EVERY_S)


async def _ask(ports: tuple[int, int], count: int) -> dict[str, Any]:
    """Sends honest requests over new connections to an attacked server and to a quiet one.

    Args:
        ports: Of the attacked server and of the quiet one.
        count: Number of pairs.
    """
    ratios: list[float] = []
    for _ in range(count):
        attacked_answer = asyncio.create_task(_answer_s(ports[0]))  # noqa: TID251 -- awaited below
        quiet_s = await _answer_s(ports[1])
        assert quiet_s is not None, "a server that nobody attacks answers"
        with suppress(TimeoutError):
            answer_s = await asyncio.wait_for(attacked_answer, _WAIT_S)
            if answer_s is not None:
                ratios.append(answer_s / quiet_s)
        await asyncio.sleep(_ASKS_EVERY_S)
    slower = {"times_slower": round(median(ratios), 2)} if ratios else {}
    return {"honest": count, "unanswered": count - len(ratios), **slower}


async def _answer_s(port: int) -> float | None:
    """Returns the seconds until the answer; None if the server refuses or ends the connection."""
    start = time.monotonic()
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /honest HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            if b"200 OK" in await reader.readline():
                return time.monotonic() - start
        finally:
            writer.close()
    return None


async def _until_idle(process: psutil.Process) -> dict[str, Any]:
    """Waits until a server has used no processor time for a while."""
    used_s, since = -1.0, time.monotonic()
    while time.monotonic() - since < _IDLE_S:
        await asyncio.sleep(_ASKS_EVERY_S)
        if (now_s := _cpu_s(process)) > used_s:
            used_s, since = now_s, time.monotonic()
    return {}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def _serving(kind: str) -> AsyncIterator[tuple[int, psutil.Process]]:
    """Starts a server; yields its port and its process."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.abuse.libraries", "--serve", kind),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    assert server.stdout is not None
    try:
        yield int(await server.stdout.readline()), psutil.Process(server.pid)
    finally:
        server.kill()
        await server.wait()


async def attack(kind: str, name: str, *, connections: int, requests: int) -> dict[str, Any]:
    """Attacks a new server once.

    Args:
        requests: Honest requests during the attack.
    """
    async with _serving(kind) as (port, process), _serving(kind) as (quiet_port, _):
        before_mib, before_s, most = own_mib(process), _cpu_s(process), dict[str, float]()
        order = {
            "attack": name,
            "port": port,
            "connections": connections,
            "seconds": _MAX_S,
            "method": "/bench.Abuse/Call",
        }

        async def asking() -> dict[str, Any]:
            await _until_connected(process, connections)
            if kind == "gRPC":
                return await _until_idle(process)
            return await _ask((port, quiet_port), requests)

        until = asyncio.create_task(asking())  # noqa: TID251 -- awaited or cancelled below
        try:
            answer = await attacked(order, {"server": process}, most, until=until)
            honest = until.result() if until.done() else {}
        finally:
            until.cancel()
        rise_mib = round(most["server"] - before_mib, 1)
        cpu_s = round(_cpu_s(process) - before_s, 2)
        return {"rise_mib": rise_mib, "cpu_s": cpu_s, **answer, **honest}


async def measure(names: list[str], *, is_short: bool) -> None:
    """Runs attacks, prints their results and, unless they are short, stores them.

    Args:
        names: ``SERVER/ATTACK``, or the beginning of such names.
    """
    requests = 10 if is_short else 60
    for server, attacks in ATTACKS.items():
        for name in attacks:
            if names and not f"{server}/{name}".startswith(tuple(names)):
                continue
            number = MANY if name in _HOLD and not is_short else FEW
            result = await attack(server, name, connections=number, requests=requests)
            load = round(os.getloadavg()[0], 1)
            result = {"connections": number, **result, "load": load}
            print(f"{server}/{name}", result, flush=True)
            if not is_short:
                write_json(RESULTS, {**read_json(RESULTS, {}), f"{server}/{name}": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks whose names begin so")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--smoke", action="store_true", help="20 connections, ten honest requests each"
    )
    options = parser.parse_args()
    if options.serve:
        serve: Any = SERVERS[options.serve]()
        asyncio.run(serve)
        return
    asyncio.run(measure(options.names, is_short=options.smoke))


if __name__ == "__main__":
    main()
