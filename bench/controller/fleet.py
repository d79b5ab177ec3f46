"""Process of the fake workers: ``python -m bench.controller.fleet``, with orders on standard input.

Each line of input is a JSON object that names a run, its number of rollouts, and the time of a
group and of a step; from then on the workers of that run register with the controller and send
heartbeats.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from bench.controller.peers import FakeQueue, add_services
from slipstream.controller.v1 import membership_pb2 as pb
from slipstream.controller.v1 import membership_pb2_grpc
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc
from slipstream.type.v1 import worker_pb2

_WORKERS_PER_CONNECTION = 32
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The services' own servers accept the pings that waiting clients send.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
)


Populate = Callable[[dict[str, Any], FakeQueue, asyncio.TaskGroup], Awaitable[None]]
"""Function that starts the workers of a run."""


async def serve(populate: Populate) -> None:
    """Serves a transferqueue, and the workers of each named run, until the input ends."""
    queue = FakeQueue()
    server = grpc.aio.server(options=OPTIONS)
    transferqueue_pb2_grpc.add_TransferQueueServiceServicer_to_server(queue, server)
    transferqueue_pb2_grpc.add_SampleRecordServiceServicer_to_server(queue, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(_obey(populate, json.loads(line), queue, tasks))
        raise SystemExit(0)


async def _obey(
    populate: Populate, order: dict[str, Any], queue: FakeQueue, tasks: asyncio.TaskGroup
) -> None:
    await populate(order, queue, tasks)


async def _populate(order: dict[str, Any], queue: FakeQueue, tasks: asyncio.TaskGroup) -> None:
    """Starts the workers of a run."""
    names = ["trainer-0", *(f"rollout-{i}" for i in range(order["rollouts"]))]
    server = grpc.aio.server(options=OPTIONS)
    seconds = (order["least_s"], order["most_s"])
    add_services(server, queue, seconds=seconds, step_s=order["step_s"])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in names]
    await server.start()
    # The controller bounds the calls of one connection, so the workers cannot all share one.
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(order["controller"], options=options)
        for _ in range(0, len(names), _WORKERS_PER_CONNECTION)
    ]
    for number, (name, port) in enumerate(zip(names, ports, strict=True)):
        channel = channels[number // _WORKERS_PER_CONNECTION]
        offset_s = order["heartbeat_s"] * number / len(names)
        version = lambda: queue.version  # noqa: E731
        tasks.create_task(beat(channel, order, name, port, offset_s=offset_s, version=version))
    await server.wait_for_termination()


async def beat(
    channel: grpc.aio.Channel,
    order: dict[str, Any],
    name: str,
    port: int,
    *,
    version: Callable[[], int],
    offset_s: float = 0.0,
    gauges: Callable[[], dict[str, float]] = dict,
) -> None:
    """Registers a worker and sends its heartbeats until the run ends.

    Args:
        channel: Channel to the controller.
        order: The run's order.
        name: The worker.
        port: Port of the worker's server.
        version: Returns the weight version that it serves.
        offset_s: Seconds before its first heartbeat.
        gauges: Returns its gauges.
    """
    members = membership_pb2_grpc.MembershipServiceStub(channel)
    role = "trainer" if name == "trainer-0" else "rollout"
    identity = {"run_id": order["run_id"], "worker_id": name, "incarnation": f"{name}-1"}
    await members.RegisterWorker(
        pb.RegisterWorkerRequest(
            **identity,
            role=role,
            address=f"127.0.0.1:{port}",
            host_id="bench",
        )
    )
    rows = {"prompts_train": float(order["rows"]), "prompts_heldout": 0.0, "tokens_total": 0.0}
    await asyncio.sleep(offset_s)
    while True:
        answer = await members.Heartbeat(
            pb.HeartbeatRequest(
                **identity,
                state=worker_pb2.WORKER_STATE_LOADED,
                weight_version=version(),
                gauges=rows | gauges(),
            )
        )
        if answer.order == pb.HeartbeatResponse.ORDER_STOP:
            return
        await asyncio.sleep(max(order["heartbeat_s"], answer.heartbeat_interval_s))


if __name__ == "__main__":
    asyncio.run(serve(_populate))
