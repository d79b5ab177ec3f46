"""Process of the paced fakes: ``python -m bench.pace.fleet``, with orders on standard input."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from bench.controller.fleet import OPTIONS, beat, serve
from bench.controller.peers import FakeQueue
from bench.pace.fakes import Pace, PacedRollouts, PacedSink, PacedSource, PacedTrainer, Part
from services.common.messages import to_message
from services.wire.controller import GroupFailure
from slipstream.controller.v1 import membership_pb2, membership_pb2_grpc
from slipstream.rollout.v1 import rollout_pb2_grpc
from slipstream.trainer.v1 import trainer_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc


async def populate(order: dict[str, Any], queue: FakeQueue, tasks: asyncio.TaskGroup) -> None:
    """Starts the workers of a run, each with its own server."""
    pace = Pace(**order["pace"])
    channel = grpc.aio.insecure_channel(order["controller"], options=OPTIONS)
    trainer = PacedTrainer(pace)
    server = grpc.aio.server(options=OPTIONS)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    source = PacedSource(queue, pace, trainer.turn)
    await _join(server, source, tasks, channel, order, "trainer-0", queue)
    aside: dict[str, dict[int, Part]] = {}
    members = membership_pb2_grpc.MembershipServiceStub(channel)
    for number in range(order["rollouts"]):
        name = f"rollout-{number}"
        report = partial(_report, members, order["run_id"], name)
        rollouts = PacedRollouts(
            queue, pace, places=order["places"], tasks=tasks, aside=aside, report=report
        )
        tasks.create_task(rollouts.engine.run())
        tasks.create_task(rollouts.watch())
        server = grpc.aio.server(options=OPTIONS)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollouts, server)
        sink = PacedSink(queue, pace, rollouts.engine)
        await _join(server, sink, tasks, channel, order, name, queue, gauges=rollouts.gauges)


async def _report(members: Any, run_id: str, name: str, failures: Sequence[GroupFailure]) -> None:
    """Reports parked groups to the controller."""
    messages = [to_message(failure, membership_pb2.GroupFailure) for failure in failures]
    await members.ReportGroups(
        membership_pb2.ReportGroupsRequest(run_id=run_id, worker_id=name, failures=messages)
    )


async def _join(
    server: grpc.aio.Server,
    weights: Any,
    tasks: asyncio.TaskGroup,
    channel: grpc.aio.Channel,
    order: dict[str, Any],
    name: str,
    queue: FakeQueue,
    **more: Any,
) -> None:
    """Starts a worker's server and registers the worker."""
    weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(weights, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tasks.create_task(server.wait_for_termination())
    tasks.create_task(beat(channel, order, name, port, version=lambda: queue.version, **more))


if __name__ == "__main__":
    asyncio.run(serve(populate))
