"""gRPC face of the rendezvous: values by scope and key for the members of weight groups."""

from typing import Any

import grpc

from services.controller.membership.rendezvous import RendezvousStore
from slipstream.controller.v1 import membership_pb2, membership_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class RendezvousServicer(membership_pb2_grpc.RendezvousServiceServicer):
    """Key-value scopes for weight groups."""

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store

    async def SetValue(
        self, request: membership_pb2.SetValueRequest, context: _Context
    ) -> membership_pb2.SetValueResponse:
        """Store a value."""
        await self._store.set(request.scope, request.key, request.value)
        return membership_pb2.SetValueResponse()

    async def GetValue(
        self, request: membership_pb2.GetValueRequest, context: _Context
    ) -> membership_pb2.GetValueResponse:
        """Return a value, waiting for it."""
        value = await self._store.get(request.scope, request.key, request.wait_timeout_s)
        return membership_pb2.GetValueResponse(value=value)

    async def AddValue(
        self, request: membership_pb2.AddValueRequest, context: _Context
    ) -> membership_pb2.AddValueResponse:
        """Add to a counter."""
        value = await self._store.add(request.scope, request.key, request.amount)
        return membership_pb2.AddValueResponse(value=value)
