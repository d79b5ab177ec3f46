"""A collector of the services' spans, and an export of them for Perfetto and similar viewers."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class Seen:
    """A span."""

    process: str
    name: str
    begin_s: float
    """Start as Unix time in seconds."""
    end_s: float
    attributes: dict[str, Any]


class Collector(pb_grpc.TraceServiceServicer):
    """Receives spans by OTLP over gRPC."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []

    def Export(self, request: Any, context: Any) -> Any:
        """Receives a batch of spans."""
        for resource in request.resource_spans:
            facts = _attributes(resource.resource.attributes)
            process = str(facts.get("worker") or facts.get("service.name"))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    begin_s, end_s = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    attributes = _attributes(span.attributes)
                    self.spans.append(Seen(process, span.name, begin_s, end_s, attributes))
        return pb.ExportTraceServiceResponse()

    def write(self, path: Path) -> None:
        """Writes all received spans."""
        names = sorted({span.process for span in self.spans})
        events = [
            {
                "ph": "X",
                "pid": names.index(span.process),
                "tid": span.name,
                "name": span.name,
                "ts": 1e6 * span.begin_s,
                "dur": 1e6 * (span.end_s - span.begin_s),
                "args": span.attributes,
            }
            for span in self.spans
        ] + [
            {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
            for number, name in enumerate(names)
        ]
        path.write_text(json.dumps({"traceEvents": events}))

    def durations(self) -> list[str]:
        """Returns a line for each kind of span: count, and duration in milliseconds."""
        kinds: dict[tuple[str, str], list[float]] = {}
        for span in self.spans:
            kinds.setdefault((span.process, span.name), []).append(
                1e3 * (span.end_s - span.begin_s)
            )
        return [
            f"{process:28} {name:20} {len(times):5}  p50 {median(times):9.1f}  longest {max(times):9.1f}"
            for (process, name), times in sorted(kinds.items())
        ]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Runs a collector; yields it and its address for the services."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(grace=1.0).wait()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
