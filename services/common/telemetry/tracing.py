"""Traces: connect the log lines, calls and spans of all services that work on a group, step or sync.

A sample group has one trace from its prompt to its gradient::

    controller   group.issue ............................. group.acquire ........... group.settle
    rollout         rollout.group [rollout.generate, reward.score, samples.put]
    trainer                                                         group.train
                 step [train.step], weight.sync    own traces, linked to the groups they work on

Ids are derived from names, so every service knows the trace of a group without communication, even
after a restart, and all agree on the fraction of groups that is collected.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

# Max groups of a batch to which a step is linked.
MAX_LINKS = 128
Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class Trace:
    """Position in a trace: the parent of spans that start within it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_collected: bool
    """True if its spans are sent to a collector."""

    @property
    def traceparent(self) -> str:
        """Header value in the format of W3C Trace Context."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_collected:02x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ended operation, with times in nanoseconds since 1970."""

    name: str
    trace: Trace
    """Position of the span itself."""
    parent_id: str
    """Id of the parent span; empty for the first span of a trace."""
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    links: Sequence[Trace] = ()
    error: str = ""
    """Name of the exception that ended it."""


SpanSink = Callable[[Span], None]
"""Receives ended spans; must not block."""


@dataclass(slots=True)
class _Collecting:
    sink: SpanSink | None = None
    ratio: float = 0.0


_collecting = _Collecting()
_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def collecting(sink: SpanSink, *, ratio: float) -> Iterator[None]:
    """Collects this process's spans until the block ends.

    Args:
        ratio: Fraction of the sample groups that is collected. Steps and weight syncs are always
            collected.
    """
    _collecting.sink, _collecting.ratio = sink, ratio
    try:
        yield
    finally:
        _collecting.sink = None


def is_collecting() -> bool:
    """Returns True if this process's spans are collected."""
    return _collecting.sink is not None


def current() -> Trace | None:
    return _current.get()


def headers() -> dict[str, str]:
    """Returns the headers with which a call to another service joins the trace."""
    trace = _current.get()
    return {} if trace is None else {"traceparent": trace.traceparent}


def of_group(run_id: str, group_id: str) -> Trace:
    """Returns the first span of a sample group's trace."""
    trace_id, span_id = _ids(f"{run_id}/{group_id}")
    is_collected = is_collecting() and int(trace_id[16:], 16) < _collecting.ratio * 2**64
    return Trace(trace_id, span_id, is_collected)


def of_step(run_id: str, step: int) -> Trace:
    return Trace(*_ids(f"{run_id}/step/{step}"), is_collecting())


def of_sync(run_id: str, version: int) -> Trace:
    """Returns the first span of the trace of a weight version's transfer to the rollouts."""
    return Trace(*_ids(f"{run_id}/sync/{version}"), is_collecting())


def uncollected_trace() -> Trace:
    """Returns a new trace that is not collected, only to correlate log lines."""
    return Trace(secrets.token_hex(16), secrets.token_hex(8), is_collected=False)


def parse(traceparent: str) -> Trace | None:
    """Parses a W3C Trace Context header; returns None if it is malformed."""
    segments = traceparent.split("-")
    if [len(segment) for segment in segments] != [2, 32, 16, 2]:
        return None
    try:
        flags = [int(segment, 16) for segment in segments][-1]
    except ValueError:
        return None
    return Trace(segments[1], segments[2], bool(flags & 1) and is_collecting())


@contextmanager
def within(trace: Trace | None) -> Iterator[None]:
    """Makes a trace the current one until the block ends."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def span(
    name: str,
    parent: Trace | None = None,
    *,
    is_first: bool = False,
    links: Sequence[Trace] = (),
    **attributes: Attribute,
) -> Iterator[dict[str, Attribute]]:
    """Runs the block as a span of ``parent``, or else of the current trace.

    Args:
        is_first: True if the span is ``parent`` itself: the first span of its trace.
        attributes: Facts; never the text of a prompt or a response.

    Yields:
        The attributes, to which the block may add.
    """
    parent = parent or _current.get()
    if parent is None or not parent.is_collected:
        with within(parent):
            yield attributes
        return
    context, parent_id = _place(parent, is_first=is_first)
    begin_ns, error = time.time_ns(), ""
    try:
        with within(context):
            yield attributes
    except BaseException as caught:
        error = type(caught).__name__
        raise
    finally:
        _send(name, context, parent_id, begin_ns, attributes, links=links, error=error)


def record(
    name: str,
    traces: Iterable[Trace],
    *,
    begin_ns: int,
    is_first: bool = False,
    links: Sequence[Trace] = (),
    **attributes: Attribute,
) -> None:
    """Records a span from ``begin_ns`` to now for each of several traces."""
    for trace in traces:
        if trace.is_collected:
            context, parent_id = _place(trace, is_first=is_first)
            _send(name, context, parent_id, begin_ns, attributes, links=links)


def of_groups(run_id: str, group_ids: Iterable[str]) -> list[Trace]:
    if not is_collecting():
        return []
    traces = [of_group(run_id, group_id) for group_id in dict.fromkeys(group_ids)]
    return [trace for trace in traces if trace.is_collected]


def _place(parent: Trace, *, is_first: bool) -> tuple[Trace, str]:
    """Returns the position of a new span, and the id of its parent."""
    if is_first:
        return parent, ""
    return Trace(parent.trace_id, secrets.token_hex(8), is_collected=True), parent.span_id


def _send(
    name: str,
    trace: Trace,
    parent_id: str,
    begin_ns: int,
    attributes: Mapping[str, Attribute],
    *,
    links: Sequence[Trace],
    error: str = "",
) -> None:
    """Passes a span that ends now to the collector."""
    if _collecting.sink is not None:
        _collecting.sink(
            Span(
                name=name,
                trace=trace,
                parent_id=parent_id,
                begin_ns=begin_ns,
                end_ns=time.time_ns(),
                attributes=attributes,
                links=links,
                error=error,
            )
        )


def _ids(name: str) -> tuple[str, str]:
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return digest[:32], digest[32:]
