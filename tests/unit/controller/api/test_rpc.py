"""The gRPC API: every REST operation, on the same runs, for the same principals."""

import asyncio
import json
import re
import threading
from typing import get_type_hints

import grpc
import pytest

from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    from_rpc_error,
)
from services.common.rpc import client
from services.common.rpc.server import serve
from services.controller.api.app import build_app
from services.controller.api.handlers import Handlers
from services.controller.api.operations import OPERATIONS
from services.controller.api.principals import TokenStore
from services.controller.api.request_limits import RequestLimits
from services.controller.api.rpc import run_servicer, run_users
from services.controller.api.run_api import RunApi, handler_name
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from slipstream.controller.v1 import run_pb2 as pb
from slipstream.controller.v1 import run_pb2_grpc
from tests.helpers.rest import SPEC, Developer, client_of


@pytest.fixture
async def both(manager, database, tmp_path):
    """Yields a gRPC stub and an HTTP client of one controller."""
    logs, limits = RunLogs(tmp_path, manager.is_ended), RequestLimits(manager.limits)
    api = RunApi(manager, RunAudit(database), logs, Developer(), limits)
    servicer = run_servicer(api)

    def register(server):
        run_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)

    async with (
        serve("127.0.0.1:0", register, users=run_users(api)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        client_of(manager, database, tmp_path) as rest,
    ):
        yield run_pb2_grpc.RunServiceStub(channel), rest


def test_every_operation_is_served_by_both_faces():
    nothing = None
    document = build_app(RunApi(*[nothing] * 5)).openapi()
    served = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert served == {operation.http for operation in OPERATIONS}
    methods = pb.DESCRIPTOR.services_by_name["RunService"].methods_by_name
    # Texts and tokens of samples are too large for messages, so only REST streams them.
    named = {op.rpc or op.__name__ for op in OPERATIONS if op.rpc is not None}
    assert set(methods) == named
    for operation in OPERATIONS:
        handler = getattr(Handlers, handler_name(operation))
        assert get_type_hints(handler)["request"] is operation


async def test_both_faces_have_the_same_limits(both, tmp_path):
    stub, rest = both
    created = await call(stub.CreateRun, pb.CreateRunRequest(spec_json=json.dumps(SPEC)))
    run_id = created.name.removeprefix("runs/")
    folder = tmp_path / run_id / "logs"
    folder.mkdir(parents=True)
    (folder / "trainer-0.log").write_text("line\n" * 1500)
    read = [line async for line in stub.ReadLogs(pb.ReadLogsRequest(name=created.name))]
    assert len(read) == len((await rest.get(f"/v1/runs/{run_id}/logs")).text.splitlines()) == 1000
    runs = pb.ListRunsRequest(page_size=10_000)
    assert len((await call(stub.ListRuns, runs)).runs) == 1
    for wrong in (
        pb.ListRunsRequest(page_size=-1),
        pb.ListRunsRequest(label="=blue"),
        pb.ListRunsRequest(run_name="x" * 64),
    ):
        with pytest.raises(InvalidArgumentError):
            await call(stub.ListRuns, wrong)
    with pytest.raises(InvalidArgumentError):
        negative = pb.ListMetricsRequest(name=created.name, from_step=-1)
        await call(stub.ListMetrics, negative)
    with pytest.raises(InvalidArgumentError):
        hidden = pb.UpdateRunRequest(
            name=created.name, revision=1, patch_json=json.dumps({"run_id": f"run_{'0' * 32}"})
        )
        await call(stub.UpdateRun, hidden)


async def call(method, request):
    return await client.call(method, request, timeout_s=10)


async def test_both_faces_show_the_same_runs(both):
    stub, rest = both
    created = await call(stub.CreateRun, pb.CreateRunRequest(spec_json=json.dumps(SPEC)))
    run_id = created.name.removeprefix("runs/")
    assert re.fullmatch("run_[0-9a-f]{32}", run_id)
    path = f"/v1/runs/{run_id}"
    rest_run = (await rest.get(path)).json()
    grpc_run = await call(stub.GetRun, pb.GetRunRequest(name=created.name))
    assert json.loads(grpc_run.spec_json) == rest_run["spec"]
    assert (grpc_run.project, grpc_run.created_by) == (rest_run["project"], rest_run["created_by"])
    listed = await call(stub.ListRuns, pb.ListRunsRequest(run_name="one"))
    assert [run.name for run in listed.runs] == [created.name]
    events = await call(stub.ListEvents, pb.ListEventsRequest(name=created.name))
    rest_events = (await rest.get(f"{path}/events")).json()["items"]
    assert [event.type for event in events.events] == [event["type"] for event in rest_events]
    quota = await call(stub.GetQuota, pb.GetQuotaRequest())
    assert quota.active_run_count == (await rest.get("/v1/quota")).json()["active_runs"]
    version = await call(stub.GetVersion, pb.GetVersionRequest())
    assert version.version == (await rest.get("/v1/version")).json()["version"]
    named = {"name": created.name}
    assert not (await call(stub.ListMetrics, pb.ListMetricsRequest(**named))).steps
    assert not (await call(stub.ListGroups, pb.ListGroupsRequest(**named))).groups
    assert not (await call(stub.ListCheckpoints, pb.ListCheckpointsRequest(**named))).checkpoints
    assert not (await call(stub.GetTopology, pb.GetTopologyRequest(**named))).workers
    assert [line async for line in stub.ReadLogs(pb.ReadLogsRequest(**named))] == []


@pytest.mark.parametrize(
    ("patch", "code"),
    [
        ({"steps": 50}, "invalid_request"),
        ({"validation_every": "3"}, "invalid_request"),
        ({"limits": {"max_restarts": "x"}}, "invalid_spec"),
    ],
)
async def test_both_faces_refuse_a_change_with_the_same_code_and_text(both, patch, code):
    rpc, rest = both
    created = await rest.post("/v1/runs", json=SPEC)
    path, etag = created.headers["Location"], created.headers["ETag"]
    refused = (await rest.patch(path, json=patch, headers={"If-Match": etag})).json()
    (problem,) = refused["errors"]
    request = pb.UpdateRunRequest(
        name=f"runs/{created.json()['id']}",
        revision=created.json()["revision"],
        patch_json=json.dumps(patch),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc.UpdateRun(request)
    error = from_rpc_error(caught.value, "controller")
    assert (refused["code"], error.reason) == (code, code.upper())
    assert error.message.endswith(problem["message"])
    assert "pydantic" not in error.message


async def test_an_unknown_state_is_the_callers_fault(both):
    rpc, _ = both
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.ListRuns(pb.ListRunsRequest(state=99))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_wrong_with_a_very_long_name_arrives(both):
    rpc, _ = both
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.GetRun(pb.GetRunRequest(name="é" * 50_000))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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
    viewer_token = tokens.create(name="bob", project="blue", role="viewer")
    logs = RunLogs(tmp_path, manager.is_ended)
    limits = RequestLimits(manager.limits)
    api = RunApi(manager, RunAudit(database), logs, tokens, limits)
    servicer = run_servicer(api)

    def register(server):
        run_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)

    async with (
        serve("127.0.0.1:0", register, users=run_users(api)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = run_pb2_grpc.RunServiceStub(channel)
        with pytest.raises(UnauthenticatedError):
            await call(stub.ListRuns, pb.ListRunsRequest())
        metadata = (("authorization", f"Bearer {viewer_token}"),)
        assert not (await stub.ListRuns(pb.ListRunsRequest(), metadata=metadata)).runs
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.CreateRun(pb.CreateRunRequest(spec_json=json.dumps(SPEC)), metadata=metadata)
        assert refused.value.code() == PermissionDeniedError.code


async def test_a_caller_that_leaves_does_not_stop_its_command_halfway(both, manager, database):
    stub, _ = both
    is_held, released = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        released.wait()

    holding = asyncio.create_task(database.run(hold))
    await asyncio.to_thread(is_held.wait)  # from now on, only the command can be in the queue
    creating = stub.CreateRun(pb.CreateRunRequest(spec_json=json.dumps(SPEC)))
    while not database._thread._work_queue.qsize():  # noqa: ASYNC110 -- a queue of a thread has no awaitable
        await asyncio.sleep(0.01)
    creating.cancel()
    await asyncio.sleep(0.1)  # gives the server time to receive the cancellation
    released.set()
    await holding
    async with asyncio.timeout(60):
        while not manager.drivers.driven_runs():  # noqa: ASYNC110 -- the start of a driver has no event
            await asyncio.sleep(0.01)
    (run,) = await manager.list_runs(limit=9)
    assert (run.state, {run.run_id}) == ("STARTING", {*manager.drivers.driven_runs()})
