"""Spans of a real run: one trace for each group, from its prompt to its gradient, across all services."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.common.telemetry import tracing
from tests.helpers.cli import slipstream

pytestmark = pytest.mark.timeout(300)

GROUP_SPANS = {
    "group.issue": "slipstream-controller",
    "rollout.group": "slipstream-rollout",
    "rollout.generate": "slipstream-rollout",
    "reward.score": "slipstream-rollout",
    "samples.put": "slipstream-rollout",
    "group.acquire": "slipstream-controller",
    "group.train": "slipstream-trainer",
    "group.settle": "slipstream-controller",
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.traces = defaultdict(list)

    def Export(self, request, context):
        for resource_spans in request.resource_spans:
            facts = {
                fact.key: fact.value.string_value for fact in resource_spans.resource.attributes
            }
            for scope in resource_spans.scope_spans:
                for span in scope.spans:
                    self.traces[span.trace_id.hex()].append((facts["service.name"], span))
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector(monkeypatch):
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("SLIPSTREAM_TRACE_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("SLIPSTREAM_TRACE_RATIO", "1")
    yield servicer
    server.stop(None)


def test_a_group_is_followed_from_its_prompt_to_its_gradient(plumbing, tmp_path, collector):
    result = slipstream("run", plumbing, "--json", "--state-directory", tmp_path / "runs")
    assert result.code == 0, result.err
    run_id = result.folder.name

    trained = tracing.of_group(run_id, "g00000000")
    spans = collector.traces[trained.trace_id]
    assert {span.name: service for service, span in spans} == GROUP_SPANS
    (first,) = [span for _, span in spans if span.name == "group.issue"]
    assert (first.span_id.hex(), first.parent_span_id) == (trained.span_id, b"")
    span_ids = {span.span_id for _, span in spans}
    assert all(span.parent_span_id in span_ids for _, span in spans if span is not first)
    assert sum(span.name == "reward.score" for _, span in spans) == 4

    (gradient,) = [span for _, span in spans if span.name == "group.train"]
    (number,) = [fact.value.int_value for fact in gradient.attributes if fact.key == "step"]
    step = tracing.of_step(run_id, number)
    assert [link.trace_id.hex() for link in gradient.links] == [step.trace_id]
    parts = {span.name: span for _, span in collector.traces[step.trace_id]}
    assert set(parts) == {"step", "train.step"}
    assert len(parts["train.step"].links) == 4
    assert parts["train.step"].parent_span_id == parts["step"].span_id

    sync = collector.traces[tracing.of_sync(run_id, 1).trace_id]
    assert {span.name for _, span in sync} == {
        "weight.sync", "weights.prepare", "weights.transfer", "weights.adopt",
    }  # fmt: skip
