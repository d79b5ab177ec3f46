"""Oversized, malformed, frequent and half-open requests to a running controller; honest ones work."""

import json
import socket
import time
from contextlib import ExitStack

import grpc
import pytest

from services.controller.settings import ControllerSettings
from slipstream.controller.v1 import run_pb2 as pb
from slipstream.controller.v1 import run_pb2_grpc
from tests.helpers.controllers import ADMIN, SPEC, running_controller

pytestmark = pytest.mark.timeout(120)

METADATA = (("authorization", f"Bearer {ADMIN}"),)


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    with running_controller(
        tmp_path_factory.mktemp("controller"), max_requests_per_second=0, max_queued_runs=1000
    ) as running:
        yield running


@pytest.fixture
def rest(controller):
    with controller.client() as client:
        yield client


@pytest.fixture
def rpc(controller):
    with grpc.insecure_channel(controller.grpc) as channel:
        yield run_pb2_grpc.RunServiceStub(channel)


def with_pattern(pattern, name="pattern"):
    return {**SPEC, "name": name, "rollout": {**SPEC["rollout"], "answer_pattern": pattern}}


def with_arguments(arguments, name="arguments"):
    return {
        **SPEC,
        "name": name,
        "rollout": {**SPEC["rollout"], "workflow_arguments": arguments},
    }


def nested(levels):
    text = '{"a":' * levels + "1" + "}" * levels
    return json.loads(text)


def code_of(stub, spec):
    try:
        stub.CreateRun(
            pb.CreateRunRequest(spec_json=json.dumps(spec)), metadata=METADATA, timeout=20
        )
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_an_oversized_specification_is_refused_on_both_faces_at_once(rest, rpc):
    begin = time.monotonic()
    assert code_of(rpc, with_pattern("a" * (30 << 20))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(rpc, with_pattern("a" * (300 << 10))) is grpc.StatusCode.INVALID_ARGUMENT
    refused = rest.post("/v1/runs", json=with_arguments({"text": "a" * (300 << 10)}))
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert time.monotonic() - begin < 15.0, "it was read, for some 16 to 58 s"
    honest = with_arguments({"text": "a" * (200 << 10)}, "large-rest")
    assert rest.post("/v1/runs", json=honest).status_code == 201
    assert code_of(rpc, {**honest, "name": "large-grpc"}) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "spec",
    [
        with_arguments(nested(900)),
        with_arguments({"list": [0] * 20_000}),
        with_pattern("(" * 5000),
        with_pattern("(" * 900 + ")" * 900),
        with_pattern("a{99999999999999999999}"),
    ],
    ids=["900 levels", "20,000 items", "5,000 parentheses", "900 groups", "overflow"],
)
def test_a_malformed_specification_is_the_callers_fault(rest, rpc, spec):
    refused = rest.post("/v1/runs", json=spec)
    assert refused.status_code == 422, refused.text[:300]
    assert code_of(rpc, spec) is grpc.StatusCode.INVALID_ARGUMENT


def test_an_honest_pattern_and_honest_arguments_are_taken(rest, rpc):
    assert rest.post("/v1/runs", json=with_pattern("#### (.*)", "honest")).status_code == 201
    assert code_of(rpc, with_arguments(nested(10), "honest-depth")) is grpc.StatusCode.OK


def test_deep_overrides_of_a_fork_are_the_callers_fault(rest):
    run = rest.post("/v1/runs", json={**SPEC, "name": "parent"}).json()["id"]
    refused = rest.post(f"/v1/runs/{run}/fork", json={"overrides": nested(900)})
    assert refused.status_code == 422
    etag = {"If-Match": '"1"'}
    refused = rest.patch(f"/v1/runs/{run}", json={"limits": nested(900)}, headers=etag)
    assert refused.status_code == 422


def test_lists_leave_specifications_out(rest, rpc):
    rest.post("/v1/runs", json={**SPEC, "name": "listed"})
    (listed,) = rest.get("/v1/runs", params={"name": "listed"}).json()["items"]
    assert "spec" not in listed
    assert listed["target_steps"] == SPEC["trainer"]["steps"]
    assert rest.get(f"/v1/runs/{listed['id']}").json()["spec"]["name"] == "listed"
    (run,) = rpc.ListRuns(pb.ListRunsRequest(run_name="listed"), metadata=METADATA).runs
    assert (run.name, run.spec_json) == (f"runs/{listed['id']}", "")


def test_rate_limited_callers_get_a_retry_time(tmp_path):
    assert ControllerSettings.model_fields["max_requests_per_second"].default > 0
    with (
        running_controller(tmp_path, max_requests_per_second=2) as running,
        running.client() as client,
    ):
        statuses = [client.get("/v1/version").status_code for _ in range(100)]
        assert statuses[:4] == [200] * 4
        assert 429 in statuses
        time.sleep(1.1)
        assert client.get("/v1/version").status_code == 200


def test_silent_connections_do_not_block_others(tmp_path):
    with (
        running_controller(tmp_path, rest_connections_per_peer=64) as running,
        running.client() as honest,
        ExitStack() as stack,
    ):
        host, port = running.url.removeprefix("http://").split(":")
        idle = [
            stack.enter_context(
                socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
            )
            for _ in range(400)
        ]
        for number, connection in enumerate(idle[:32]):
            if number % 2:
                connection.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nX-Slow:")
        assert honest.get("/v1/version").status_code == 200
        refused = idle[-1]
        refused.settimeout(5)
        assert is_closed(refused)
        # Open connections are closed unless they send a request in time.
        idle[0].settimeout(20)
        idle[1].settimeout(20)
        assert is_closed(idle[0])
        assert is_closed(idle[1])
        assert honest.get("/v1/version").status_code == 200
        num_closed = running.log.read_text().count("closed a connection")
        assert num_closed == 1


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
