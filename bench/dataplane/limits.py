"""Limits of the machine: the same bytes through a copy, plain sockets, ZeroMQ, gRPC and Redis."""

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import zmq

from bench.dataplane.sides import PEER_VENV

_FRAME_BYTES = 1 << 20


def memcpy_s(size_bytes: int, rounds: int) -> float:
    """Returns the seconds of a copy between two warm buffers."""
    source = np.ones(size_bytes, dtype=np.uint8)
    target = np.ones(size_bytes, dtype=np.uint8)
    return _median(rounds, lambda: np.copyto(target, source))


def tcp_s(size_bytes: int, rounds: int) -> float:
    """Returns the seconds of a one-way transfer through a loopback connection into a warm buffer."""
    data = memoryview(bytearray(size_bytes))
    target = memoryview(bytearray(size_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:

            def move() -> None:
                thread = threading.Thread(target=sender.sendall, args=(data,))
                thread.start()
                done = 0
                while done < size_bytes:
                    done += receiver.recv_into(target[done:])
                thread.join()

            return _median(rounds, move)


def zmq_s(size_bytes: int, rounds: int) -> float:
    """Returns the seconds of a one-way transfer through ZeroMQ in frames of 1 MiB."""
    data = memoryview(bytearray(size_bytes))
    with (
        zmq.Context() as first,
        zmq.Context() as second,
        first.socket(zmq.PAIR) as sender,
        second.socket(zmq.PAIR) as receiver,
    ):
        port = sender.bind_to_random_port("tcp://127.0.0.1")
        receiver.connect(f"tcp://127.0.0.1:{port}")

        def send() -> None:
            for begin in range(0, size_bytes, _FRAME_BYTES):
                sender.send(data[begin : begin + _FRAME_BYTES], copy=False)

        def move() -> None:
            thread = threading.Thread(target=send)
            thread.start()
            for _ in range(0, size_bytes, _FRAME_BYTES):
                receiver.recv(copy=False)
            thread.join()

        return _median(rounds, move)


async def grpc_s(size_bytes: int, rounds: int) -> float:
    """Returns the seconds of a unary call that carries the bytes."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

    async def take(request: bytes, context: object) -> bytes:
        return b""

    handler = grpc.method_handlers_generic_handler(
        "bench", {"Put": grpc.unary_unary_rpc_method_handler(take)}
    )
    server = grpc.aio.server(options=unlimited)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    data = bytes(size_bytes)
    times = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        method: Any = channel.unary_unary("/bench/Put")
        for _ in range(rounds):
            started = time.perf_counter()
            await method(data)
            times.append(time.perf_counter() - started)
    await server.stop(grace=None)
    return median(times)


def redis_s(size_bytes: int, rounds: int) -> tuple[float, float] | None:
    """Returns the seconds of SET and GET of the bytes as one value; None without a Redis server."""
    script = (
        "import redis,sys,time,statistics\n"
        "n,r,path=int(sys.argv[1]),int(sys.argv[2]),sys.argv[3]\n"
        "c=redis.Redis(unix_socket_path=path); d=bytes(n); p=[]; g=[]\n"
        "for _ in range(r):\n"
        " t=time.perf_counter(); c.set('k',d); p.append(time.perf_counter()-t)\n"
        " t=time.perf_counter(); c.get('k'); g.append(time.perf_counter()-t)\n"
        "print(statistics.median(p),statistics.median(g))\n"
    )
    with _redis_server() as path:
        if path is None:
            return None
        command = [str(PEER_VENV / "bin" / "python"), "-c", script, str(size_bytes), str(rounds)]
        result = subprocess.run([*command, path], capture_output=True, text=True, check=True)
    put_s, get_s = map(float, result.stdout.split())
    return put_s, get_s


@contextmanager
def _redis_server() -> Iterator[str | None]:
    with TemporaryDirectory() as folder:
        path = f"{folder}/redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", ""]
        try:
            process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        except FileNotFoundError:
            yield None
            return
        try:
            for _ in range(100):
                with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(path)
                    break
                time.sleep(0.05)
            yield path
        finally:
            process.terminate()
            process.wait(timeout=10)


def _median(rounds: int, work: Callable[[], None]) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def run_grpc_s(size_bytes: int, rounds: int) -> float:
    """Runs ``grpc_s`` from synchronous code."""
    return asyncio.run(grpc_s(size_bytes, rounds))
