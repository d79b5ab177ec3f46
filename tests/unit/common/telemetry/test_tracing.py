"""Tracing: trace ids from group names, nested spans, propagation to calls and log lines, and tracing off."""

import asyncio
import logging
from importlib import import_module

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from services.common.errors import InvalidArgumentError
from services.common.rpc.client import call, open_channel
from services.common.rpc.server import serve
from services.common.settings import ServiceSettings
from services.common.telemetry import tracing
from services.common.telemetry.logging import JsonFormatter
from services.extras.tracing.otlp import span_sink
from slipstream.transferqueue.v1 import transferqueue_pb2 as pb
from slipstream.transferqueue.v1 import transferqueue_pb2_grpc
from tests.helpers.packages import install


@pytest.fixture
def collected():
    """Yields a function that returns the exported spans, with every group sampled."""
    exporter = InMemorySpanExporter()
    with tracing.collecting(
        span_sink(SimpleSpanProcessor(exporter), {"service.name": "test"}), ratio=1.0
    ):
        yield exporter.get_finished_spans


def test_every_service_knows_the_trace_of_a_group_by_its_name():
    assert tracing.of_group("run_1", "g00000001") == tracing.of_group("run_1", "g00000001")
    assert tracing.of_group("run_1", "g1").trace_id != tracing.of_group("run_2", "g1").trace_id
    assert len(tracing.of_group("run_1", "g1").trace_id) == 32
    assert len(tracing.of_group("run_1", "g1").span_id) == 16


def test_spans_of_a_group_hang_together(collected):
    group = tracing.of_group("run_1", "g1")
    tracing.record("group.issue", [group], begin_ns=1, is_first=True)
    with tracing.span("rollout.group", group, attempt=2), tracing.span("reward.score"):
        pass
    issue, score, generate = collected()
    assert {span.context.trace_id for span in collected()} == {int(group.trace_id, 16)}
    assert issue.parent is None
    assert generate.parent.span_id == issue.context.span_id
    assert score.parent.span_id == generate.context.span_id
    assert generate.attributes == {"attempt": 2}
    assert generate.resource.attributes["service.name"] == "test"
    assert issue.start_time == 1 < issue.end_time


def test_a_step_is_linked_to_its_groups(collected):
    groups = tracing.of_groups("run_1", ["g1", "g2", "g1"])
    with tracing.span("step", tracing.of_step("run_1", 7), is_first=True, links=groups):
        pass
    (span,) = collected()
    assert [link.context.trace_id for link in span.links] == [int(g.trace_id, 16) for g in groups]
    assert len(groups) == 2


def test_a_span_has_the_error_that_ended_it(collected):
    with pytest.raises(KeyError), tracing.span("step", tracing.of_step("run_1", 1)):
        raise KeyError
    (span,) = collected()
    assert (span.status.is_ok, span.status.description) == (False, "KeyError")


def test_part_of_the_groups_is_collected_and_all_steps(collected):
    names = [f"g{number}" for number in range(2000)]
    with tracing.collecting(span_sink(SimpleSpanProcessor(InMemorySpanExporter()), {}), ratio=0.1):
        assert 130 < len(tracing.of_groups("run_1", names)) < 270
        assert tracing.of_step("run_1", 1).is_collected


def test_without_a_collector_there_are_no_spans_but_the_trace_is_known():
    with tracing.span("rollout.group", group := tracing.of_group("run_1", "g1")):
        assert tracing.current() == group
    assert tracing.of_groups("run_1", ["g1"]) == []
    assert tracing.current() is None


def test_log_lines_name_the_trace():
    record = logging.LogRecord("a", logging.INFO, "f", 1, "group failed", (), None)
    group = tracing.of_group("run_1", "g1")
    with tracing.within(group):
        assert f'"trace_id": "{group.trace_id}"' in JsonFormatter({}).format(record)
    assert "trace_id" not in JsonFormatter({}).format(record)


def test_a_header_is_read_as_it_was_written(collected):
    group = tracing.of_group("run_1", "g1")
    with tracing.within(group):
        header = tracing.headers()["traceparent"]
    assert tracing.parse(header) == group


@pytest.mark.parametrize("header", ["", "00-1-2-3", f"00-{'x' * 32}-{'0' * 16}-01", "0" * 55])
def test_a_damaged_header_is_no_trace(header):
    assert tracing.parse(header) is None


async def test_a_called_service_works_for_the_caller_s_trace(collected):
    class Servicer(transferqueue_pb2_grpc.TransferQueueServiceServicer):
        async def ReleaseKeys(self, request, context):
            with tracing.span("served"):
                return pb.ReleaseKeysResponse()

    def register(server):
        transferqueue_pb2_grpc.add_TransferQueueServiceServicer_to_server(Servicer(), server)

    async with (
        serve("127.0.0.1:0", register) as port,
        open_channel(f"127.0.0.1:{port}", "worker") as channel,
    ):
        stub = transferqueue_pb2_grpc.TransferQueueServiceStub(channel)
        with tracing.span("asks", tracing.of_step("run_1", 1)):
            await call(stub.ReleaseKeys, pb.ReleaseKeysRequest(), timeout_s=10.0)
    served, asks = collected()
    assert served.parent.span_id == asks.context.span_id
    assert served.context.trace_id == asks.context.trace_id


async def test_spans_reach_a_collector_over_otlp():
    received = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        async def Export(self, request, context):
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = ServiceSettings(trace_endpoint=f"http://127.0.0.1:{port}", trace_ratio=1.0)
    group = tracing.of_group("run_1", "g1")

    def work() -> None:
        with (
            settings.tracing("rollout", run="run_1"),
            tracing.span("rollout.group", tracing.of_group("run_1", "g1")),
        ):
            pass

    await asyncio.to_thread(work)
    await server.stop(None)
    ((spans,),) = [[r.resource_spans[0] for r in received]]
    (span,) = spans.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("rollout.group", group.trace_id)
    facts = {fact.key: fact.value.string_value for fact in spans.resource.attributes}
    assert (facts["service.name"], facts["run"]) == ("slipstream-rollout", "run_1")


def test_missing_packages_are_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name="opentelemetry.sdk")

    monkeypatch.setattr("services.common.doors.resolve_name", missing)
    settings = ServiceSettings(trace_endpoint="http://127.0.0.1:4317")
    with (
        pytest.raises(InvalidArgumentError, match=r"slipstream\[tracing\]"),
        settings.tracing("rollout"),
    ):
        pass


EXPORTER = """
from contextlib import contextmanager

SENT = []


@contextmanager
def exporting(endpoint, *, ratio, facts):
    SENT.append((endpoint, ratio, facts))
    yield
    SENT.append("ended")
"""


def test_a_package_adds_an_exporter(tmp_path, monkeypatch):
    (tmp_path / "their_exporter.py").write_text(EXPORTER)
    points = {"theirs": "their_exporter:exporting", "broken": "their_exporter:missing"}
    install(tmp_path, monkeypatch, entry_points={"slipstream.trace_exporters": points})
    monkeypatch.setenv("SLIPSTREAM_TRACE_EXPORTER", "theirs")
    monkeypatch.setenv("SLIPSTREAM_TRACE_ENDPOINT", "zipkin:9411")
    with ServiceSettings().tracing("rollout", run="run_1"):
        messages = import_module("their_exporter").SENT
        facts = {"service.name": "slipstream-rollout", "run": "run_1"}
        assert messages == [("zipkin:9411", 0.01, facts)]
    assert messages[1:] == ["ended"]

    broken = ServiceSettings(trace_exporter="broken")
    with (
        pytest.raises(InvalidArgumentError, match=r"slipstream-test-package 1\.2"),
        broken.tracing("rollout"),
    ):
        pass
    with pytest.raises(ValidationError, match="'otlp', 'theirs' or 'broken'"):
        ServiceSettings(trace_exporter="unknown")
