"""Exports spans to an OpenTelemetry collector, by OTLP over gRPC; needs the extra ``tracing``."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from services.common.telemetry import tracing


def span_sink(processor: SpanProcessor, facts: dict[str, str]) -> tracing.SpanSink:
    """Returns a function that converts spans to OpenTelemetry's and passes them to a processor.

    Args:
        facts: Attributes of the process: ``service.name`` and so on.
    """
    resource = Resource.create(facts)

    def export(span: tracing.Span) -> None:
        parent = None
        if span.parent_id:
            parent = _context(tracing.Trace(span.trace.trace_id, span.parent_id, is_collected=True))
        processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_context(span.trace),
                parent=parent,
                resource=resource,
                attributes=dict(span.attributes),
                links=[Link(_context(link)) for link in span.links],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=span.begin_ns,
                end_time=span.end_ns,
            )
        )

    return export


@contextmanager
def exporting(endpoint: str, *, ratio: float, facts: dict[str, str]) -> Iterator[None]:
    """Sends this process's spans to a collector until the block ends.

    Args:
        endpoint: ``http://host:port`` of OTLP over gRPC, or ``https://`` with TLS.
        ratio: Fraction of the sample groups that is collected.
    """
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
    try:
        with tracing.collecting(span_sink(processor, facts), ratio=ratio):
            yield
    finally:
        processor.shutdown()  # type: ignore[no-untyped-call]


def _context(trace: tracing.Trace) -> SpanContext:
    return SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
