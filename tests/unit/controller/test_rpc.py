"""The gRPC face: every operation of the REST API, on the same runs, for the same principals."""

import json
import re

import grpc
import pytest

from services.common import grpc_client
from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from services.common.grpc_server import serve
from services.controller.api.app import build_app
from services.controller.api.principals import TokenStore
from services.controller.api.request_limits import RequestLimits
from services.controller.api.rpc import RunServicer
from services.controller.audit import RunAudit
from services.controller.logs import RunLogs
from slipstream.controller.v1 import run_pb2 as pb
from slipstream.controller.v1 import run_pb2_grpc
from tests.unit.controller.rest import SPEC, client_of

# Operations of the one API, and what they are called in the other.
PAIRS = {
    ("post", "/v1/runs"): "CreateRun",
    ("get", "/v1/runs"): "ListRuns",
    ("get", "/v1/runs/stream"): "WatchRuns",
    ("get", "/v1/runs/{run_id}"): "GetRun",
    ("patch", "/v1/runs/{run_id}"): "UpdateRun",
    ("delete", "/v1/runs/{run_id}"): "DeleteRun",
    ("post", "/v1/runs/{run_id}/cancel"): "CancelRun",
    ("post", "/v1/runs/{run_id}/pause"): "PauseRun",
    ("post", "/v1/runs/{run_id}/resume"): "ResumeRun",
    ("post", "/v1/runs/{run_id}/checkpoint"): "SaveRun",
    ("post", "/v1/runs/{run_id}/validate"): "EvaluateRun",
    ("post", "/v1/runs/{run_id}/fork"): "ForkRun",
    ("get", "/v1/runs/{run_id}/events"): "ListEvents",
    ("get", "/v1/runs/{run_id}/events/stream"): "WatchRun",
    ("get", "/v1/runs/{run_id}/logs"): "ReadLogs",
    ("get", "/v1/runs/{run_id}/logs/stream"): "ReadLogs",
    ("get", "/v1/runs/{run_id}/metrics"): "ListMetrics",
    ("get", "/v1/runs/{run_id}/samples"): "ListSamples",
    ("get", "/v1/runs/{run_id}/checkpoints"): "ListCheckpoints",
    ("get", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}"): "GetCheckpoint",
    ("delete", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}"): "DeleteCheckpoint",
    ("get", "/v1/runs/{run_id}/topology"): "GetTopology",
    ("get", "/v1/quota"): "GetQuota",
    ("get", "/v1/version"): "GetVersion",
}


@pytest.fixture
async def both(manager, database, tmp_path):
    """Both faces of one controller."""
    logs, limits = RunLogs(tmp_path, manager.is_ended), RequestLimits(manager.limits)
    servicer = RunServicer(manager, RunAudit(database), logs, None, limits)

    def register(server):
        run_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)

    async with (
        serve("127.0.0.1:0", register) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        client_of(manager, database, tmp_path) as rest,
    ):
        yield run_pb2_grpc.RunServiceStub(channel), rest


def test_every_operation_has_its_counterpart():
    nothing = None
    document = build_app(nothing, nothing, nothing, None, nothing).openapi()
    operations = {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    assert operations == set(PAIRS)
    methods = pb.DESCRIPTOR.services_by_name["RunService"].methods_by_name
    assert set(methods) == set(PAIRS.values())


async def call(method, request):
    return await grpc_client.call(method, request, timeout_s=10)


async def test_both_faces_show_the_same_runs(both):
    stub, rest = both
    created = await call(stub.CreateRun, pb.CreateRunRequest(spec_json=json.dumps(SPEC)))
    run_id = created.name.removeprefix("runs/")
    assert re.fullmatch("run_[0-9a-f]{32}", run_id)
    path = f"/v1/runs/{run_id}"
    seen = (await rest.get(path)).json()
    found = await call(stub.GetRun, pb.GetRunRequest(name=created.name))
    assert json.loads(found.spec_json) == seen["spec"]
    assert (found.project, found.created_by) == (seen["project"], seen["created_by"])
    listed = await call(stub.ListRuns, pb.ListRunsRequest(run_name="one"))
    assert [run.name for run in listed.runs] == [created.name]
    events = await call(stub.ListEvents, pb.ListEventsRequest(name=created.name))
    told = (await rest.get(f"{path}/events")).json()["items"]
    assert [event.type for event in events.events] == [event["type"] for event in told]
    quota = await call(stub.GetQuota, pb.GetQuotaRequest())
    assert quota.active_run_count == (await rest.get("/v1/quota")).json()["active_runs"]
    version = await call(stub.GetVersion, pb.GetVersionRequest())
    assert version.version == (await rest.get("/v1/version")).json()["version"]
    named = {"name": created.name}
    assert not (await call(stub.ListMetrics, pb.ListMetricsRequest(**named))).points
    assert not (await call(stub.ListSamples, pb.ListSamplesRequest(**named))).samples
    assert not (await call(stub.ListCheckpoints, pb.ListCheckpointsRequest(**named))).checkpoints
    assert not (await call(stub.GetTopology, pb.GetTopologyRequest(**named))).workers
    assert [line async for line in stub.ReadLogs(pb.ReadLogsRequest(**named))] == []


async def test_a_run_goes_through_its_life_over_grpc(both):
    stub, _ = both
    await call(stub.CreateRun, pb.CreateRunRequest(spec_json=json.dumps(SPEC)))
    second = await call(
        stub.CreateRun, pb.CreateRunRequest(spec_json=json.dumps({**SPEC, "name": "two"}))
    )
    named = {"name": second.name}
    paused = await call(stub.PauseRun, pb.PauseRunRequest(**named, skip_checkpoint=True))
    assert (paused.state, paused.desired) == (pb.Run.STATE_PAUSED, "PAUSED")
    assert {condition.type: condition.status for condition in paused.conditions}[
        "Admitted"
    ] == "False"
    resumed = await call(stub.ResumeRun, pb.ResumeRunRequest(**named))
    assert resumed.state == pb.Run.STATE_QUEUED
    patch = pb.UpdateRunRequest(
        **named, revision=resumed.revision, patch_json='{"labels": {"team": "blue"}}'
    )
    assert (await call(stub.UpdateRun, patch)).labels == {"team": "blue"}
    for method, request in (
        (stub.SaveRun, pb.SaveRunRequest(**named)),
        (stub.EvaluateRun, pb.EvaluateRunRequest(**named)),
        (stub.ForkRun, pb.ForkRunRequest(**named)),
    ):
        with pytest.raises(FailedPreconditionError):
            await call(method, request)
    cancelled = await call(stub.CancelRun, pb.CancelRunRequest(**named))
    assert cancelled.state == pb.Run.STATE_CANCELLED
    kinds = [event.type async for event in stub.WatchRun(pb.WatchRunRequest(**named))]
    assert kinds[0] == "Submitted"
    assert kinds[-1] == "StateChanged"
    deletion = pb.DeleteRunRequest(**named, revision=cancelled.revision)
    await call(stub.DeleteRun, deletion)
    with pytest.raises(NotFoundError):
        await call(stub.GetRun, pb.GetRunRequest(**named))
    for wrong in (
        {"spec_json": "{}"},
        {"priority": 1001},
        {"labels": {"Not Allowed": "x"}},
    ):
        with pytest.raises(InvalidArgumentError):
            await call(
                stub.CreateRun, pb.CreateRunRequest(**{"spec_json": json.dumps(SPEC), **wrong})
            )
    labelled = pb.CreateRunRequest(
        spec_json=json.dumps(SPEC | {"name": "three"}), labels={"a": "b"}
    )
    assert (await call(stub.CreateRun, labelled)).labels == {"a": "b"}
    with pytest.raises(InvalidArgumentError):
        await call(stub.GetRun, pb.GetRunRequest(name="run_1"))


async def test_grpc_asks_for_the_same_tokens(manager, database, tmp_path):
    tokens = TokenStore(database)
    seen = tokens.create(name="bob", project="blue", role="viewer")
    logs = RunLogs(tmp_path, manager.is_ended)
    limits = RequestLimits(manager.limits)
    servicer = RunServicer(manager, RunAudit(database), logs, tokens, limits)

    def register(server):
        run_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)

    async with (
        serve("127.0.0.1:0", register) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = run_pb2_grpc.RunServiceStub(channel)
        with pytest.raises(UnauthenticatedError):
            await call(stub.ListRuns, pb.ListRunsRequest())
        metadata = (("authorization", f"Bearer {seen}"),)
        assert not (await stub.ListRuns(pb.ListRunsRequest(), metadata=metadata)).runs
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.CreateRun(pb.CreateRunRequest(spec_json=json.dumps(SPEC)), metadata=metadata)
        assert refused.value.code() == PermissionDeniedError.code
