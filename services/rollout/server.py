"""gRPC server of the rollout service."""

from typing import Any

import grpc

from services.common.errors import InvalidArgumentError, UnavailableError
from services.common.messages import from_message
from services.common.task_group import uninterrupted
from services.rollout.sampling.sampler import GroupSampler
from services.wire.workers import GroupAssignment, PromptHistory
from slipstream.rollout.v1 import rollout_pb2 as pb
from slipstream.rollout.v1 import rollout_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Translates gRPC requests to calls of the sampler.

    Answers UNAVAILABLE until the sampler is attached: the port must be registered before the run's
    specification, and so the engine, can be loaded.
    """

    def __init__(self) -> None:
        self._sampler: GroupSampler | None = None

    def attach(self, sampler: GroupSampler) -> None:
        """Starts to serve requests with this sampler."""
        self._sampler = sampler

    async def StartGroups(
        self, request: pb.StartGroupsRequest, context: _Context
    ) -> pb.StartGroupsResponse:
        self._attached().start([_assignment(group) for group in request.groups])
        return pb.StartGroupsResponse()

    async def CancelGroups(
        self, request: pb.CancelGroupsRequest, context: _Context
    ) -> pb.CancelGroupsResponse:
        """Ends groups without results."""
        self._attached().cancel(request.group_ids)
        return pb.CancelGroupsResponse()

    async def InterruptGroups(
        self, request: pb.InterruptGroupsRequest, context: _Context
    ) -> pb.InterruptGroupsResponse:
        """Stops groups and caches their progress."""
        # Finish even if the call is cancelled: a stopped group must be reported, and the caller does not
        # name it again.
        await uninterrupted(self._attached().interrupt(request.group_ids or None))
        return pb.InterruptGroupsResponse()

    async def Sleep(self, request: pb.SleepRequest, context: _Context) -> pb.SleepResponse:
        """Releases the engine's GPU memory."""
        await self._attached().sleep()
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: _Context) -> pb.WakeResponse:
        """Reclaims the engine's GPU memory."""
        await self._attached().wake()
        return pb.WakeResponse()

    def _attached(self) -> GroupSampler:
        if self._sampler is None:
            raise UnavailableError("this rollout worker is still loading its model; retry")
        return self._sampler


def _assignment(group: pb.GroupAssignment) -> GroupAssignment:
    problems = {
        "group_id must not be empty": not group.group_id,
        "attempt must be at least 1": group.attempt < 1,
        "first_attempt must be from 1 to attempt": not 1 <= group.first_attempt <= group.attempt,
        "partition_id must not be empty": not group.partition_id,
        "members must not be empty": not group.members,
        "members must be distinct and not negative": len({m for m in group.members if m >= 0})
        != len(group.members),
        "seeds must have one entry per member": len(group.seeds) != len(group.members),
        "temperatures must have one entry per member": len(group.temperatures)
        != len(group.members),
        "temperatures must not be negative": any(value < 0 for value in group.temperatures),
    }
    wrong = [problem for problem, is_true in problems.items() if is_true]
    if wrong:
        raise InvalidArgumentError(
            f"group {group.group_id!r}: {'; '.join(wrong)}", group_id=group.group_id
        )
    if not group.HasField("tried"):
        return from_message(group, GroupAssignment)
    return from_message(group, GroupAssignment, tried=from_message(group.tried, PromptHistory))
