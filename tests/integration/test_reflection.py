"""Clients such as grpcurl list the controller's services."""

import asyncio

import grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from services.cli.local import local_services


async def test_the_run_api_describes_itself_on_a_developers_machine(tmp_path):
    def services_of(address):
        with grpc.insecure_channel(address) as channel:
            return ProtoReflectionDescriptorDatabase(channel).get_services()

    async with local_services(tmp_path) as services:
        found = await asyncio.to_thread(services_of, services.grpc_address)
    assert "slipstream.controller.v1.RunService" in found
    assert not any("Membership" in name for name in found)
