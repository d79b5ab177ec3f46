"""gRPC servicer of a weight member."""

from typing import Any

import grpc

from services.common.errors import InvalidArgumentError
from services.common.messages import from_message, to_message
from services.common.telemetry import tracing
from services.weightsync.canary import Canary
from services.weightsync.member import WeightMember
from services.weightsync.transfer import TransferRequest
from services.weightsync.weight_plan import TensorSpec
from slipstream.weightsync.v1 import weightsync_pb2 as pb
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


def serve_member(member: WeightMember, server: grpc.aio.Server) -> None:
    weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(WeightSyncServicer(member), server)


class WeightSyncServicer(weightsync_pb2_grpc.WeightSyncServiceServicer):
    """Translates gRPC requests to calls of a :class:`WeightMember`."""

    def __init__(self, member: WeightMember) -> None:
        self._member = member

    async def DescribeWeights(
        self, request: pb.DescribeWeightsRequest, context: _Context
    ) -> pb.DescribeWeightsResponse:
        """Returns the tensors that the trainer sends."""
        return pb.DescribeWeightsResponse(
            tensors=[to_message(spec, pb.TensorSpec) for spec in self._member.describe()],
            source_addresses=self._member.source_addresses,
            device=self._member.device_name,
        )

    async def AgreePlan(
        self, request: pb.AgreePlanRequest, context: _Context
    ) -> pb.AgreePlanResponse:
        tensors = [from_message(tensor, TensorSpec) for tensor in request.tensors]
        try:
            plan_hash = self._member.agree_plan(
                tensors,
                request.bucket_bytes,
                num_sources=request.source_count,
                source=None if request.source < 0 else request.source,
                mode=request.mode,
            )
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        return pb.AgreePlanResponse(plan_hash=plan_hash, device=self._member.device_name)

    async def FormGroup(
        self, request: pb.FormGroupRequest, context: _Context
    ) -> pb.FormGroupResponse:
        await self._member.form_group(
            request.epoch,
            receiver=request.receiver,
            num_receivers=request.receiver_count,
            backend=request.backend,
            scope=request.scope,
            timeout_s=request.timeout_s,
            url=request.url,
        )
        return pb.FormGroupResponse()

    async def PrepareTransfer(
        self, request: pb.PrepareTransferRequest, context: _Context
    ) -> pb.PrepareTransferResponse:
        try:
            with tracing.span("weights.prepare"):
                version = await self._member.prepare(
                    request.epoch, request.version, request.plan_hash
                )
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        return pb.PrepareTransferResponse(held_version=version)

    async def TransferWeights(
        self, request: pb.TransferWeightsRequest, context: _Context
    ) -> pb.TransferWeightsResponse:
        """Sends or receives a version."""
        with tracing.span("weights.transfer"):
            report = await self._member.transfer(from_message(request, TransferRequest))
        return pb.TransferWeightsResponse(
            digests=report.digests,
            size_bytes=report.num_bytes,
            duration_s=report.seconds,
            manifest=report.manifest,
        )

    async def RetainVersions(
        self, request: pb.RetainVersionsRequest, context: _Context
    ) -> pb.RetainVersionsResponse:
        await self._member.retain(request.epoch, request.names, timeout_s=request.timeout_s)
        return pb.RetainVersionsResponse()

    async def AdoptWeights(
        self, request: pb.AdoptWeightsRequest, context: _Context
    ) -> pb.AdoptWeightsResponse:
        with tracing.span("weights.adopt"):
            stall_s = await self._member.adopt(request.version, request.digest)
        return pb.AdoptWeightsResponse(stall_s=stall_s)

    async def ScoreWeights(
        self, request: pb.ScoreWeightsRequest, context: _Context
    ) -> pb.ScoreWeightsResponse:
        return to_message(await self._member.score(), pb.ScoreWeightsResponse)

    async def CheckWeights(
        self, request: pb.CheckWeightsRequest, context: _Context
    ) -> pb.CheckWeightsResponse:
        """Compares the live weights with the trainer's by the canary."""
        canary = Canary(tuple(request.token_ids), tuple(request.logprobs))
        distance = await self._member.check(request.version, canary, request.tolerance)
        return pb.CheckWeightsResponse(difference=distance)

    async def AbortGroup(
        self, request: pb.AbortGroupRequest, context: _Context
    ) -> pb.AbortGroupResponse:
        await self._member.abort(request.epoch, request.reason)
        return pb.AbortGroupResponse()
