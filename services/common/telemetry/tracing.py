"""Traces: what a process works for, in its log lines, in its calls, and as spans for a collector.

A sample group has one trace from its prompt to its gradient::

    controller   group.issue ............................. group.acquire ........... group.settle
    rollout         rollout.group [rollout.generate, reward.score, samples.put]
    trainer                                                         group.train
                 step [train.step], weight.sync    traces of their own, linked to what they work on

Ids follow from names, so that every service knows the trace of a group without being told, also after it was
started again, and all of them agree on the part of the groups that is collected.
"""

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

# Of the groups of a batch, a step is linked to this many.
MAX_LINKS = 128
Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class Trace:
    """A place in a trace: what comes next is a part of it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_collected: bool
    """Whether its spans go to a collector."""

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it in headers."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_collected:02x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that was done, in nanoseconds since 1970."""

    name: str
    trace: Trace
    """The span itself."""
    parent_id: str
    """Empty for the first of its trace."""
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    links: Sequence[Trace] = ()
    error: str = ""
    """Name of the exception that ended it."""


class SpanSink(Protocol):
    """Takes spans; it must not block."""

    def take(self, span: Span) -> None:
        """Take a span that ended."""


@dataclass(slots=True)
class _Collecting:
    sink: SpanSink | None = None
    ratio: float = 0.0


@dataclass(slots=True)
class OpenSpan:
    """A span that has not ended."""

    attributes: dict[str, Attribute] = field(default_factory=dict)
    """What it says at its end."""


_collecting = _Collecting()
_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def collecting(sink: SpanSink, *, ratio: float) -> Iterator[None]:
    """Collect this process's spans until the block ends.

    Args:
        sink: Takes them.
        ratio: Part of the sample groups that is collected. Steps and weight syncs are collected always.
    """
    _collecting.sink, _collecting.ratio = sink, ratio
    try:
        yield
    finally:
        _collecting.sink = None


def is_collecting() -> bool:
    """Whether anybody collects this process's spans."""
    return _collecting.sink is not None


def current() -> Trace | None:
    """What this task is working for."""
    return _current.get()


def headers() -> dict[str, str]:
    """What a call to another service carries, so that its part joins the trace."""
    trace = _current.get()
    return {} if trace is None else {"traceparent": trace.traceparent}


def of_group(run_id: str, group_id: str) -> Trace:
    """The first span of a sample group's trace."""
    trace_id, span_id = _ids(f"{run_id}/{group_id}")
    is_collected = is_collecting() and int(trace_id[16:], 16) < _collecting.ratio * 2**64
    return Trace(trace_id, span_id, is_collected)


def of_step(run_id: str, step: int) -> Trace:
    """The first span of a step's trace."""
    return Trace(*_ids(f"{run_id}/step/{step}"), is_collecting())


def of_sync(run_id: str, version: int) -> Trace:
    """The first span of the trace of a weight version's way to the rollouts."""
    return Trace(*_ids(f"{run_id}/sync/{version}"), is_collecting())


def fresh() -> Trace:
    """A place that nobody collects, to find log lines by."""
    return Trace(secrets.token_hex(16), secrets.token_hex(8), is_collected=False)


def parse(traceparent: str) -> Trace | None:
    """Read a header of W3C Trace Context; None if it is none."""
    parts = traceparent.split("-")
    if [len(part) for part in parts] != [2, 32, 16, 2]:
        return None
    try:
        flags = [int(part, 16) for part in parts][-1]
    except ValueError:
        return None
    return Trace(parts[1], parts[2], bool(flags & 1) and is_collecting())


@contextmanager
def within(trace: Trace | None) -> Iterator[None]:
    """Work for a trace until the block ends."""
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
) -> Iterator[OpenSpan]:
    """Do a part of what ``parent``, or else the current trace, is about.

    Args:
        name: What is done.
        parent: What it is a part of.
        is_first: Whether it is ``parent`` itself: the first span of its trace.
        links: Traces that it works on.
        attributes: Facts; never the text of a prompt or a response.
    """
    parent = parent or _current.get()
    opened = OpenSpan(attributes)
    if parent is None or not parent.is_collected:
        with within(parent):
            yield opened
        return
    own, parent_id = _place(parent, is_first=is_first)
    begin_ns, error = time.time_ns(), ""
    try:
        with within(own):
            yield opened
    except BaseException as caught:
        error = type(caught).__name__
        raise
    finally:
        _take(
            Span(
                name=name,
                trace=own,
                parent_id=parent_id,
                begin_ns=begin_ns,
                end_ns=time.time_ns(),
                attributes=opened.attributes,
                links=links,
                error=error,
            )
        )


def record(
    name: str,
    traces: Iterable[Trace],
    *,
    begin_ns: int,
    is_first: bool = False,
    links: Sequence[Trace] = (),
    **attributes: Attribute,
) -> None:
    """Note something that was done until now for each of several traces."""
    end_ns = time.time_ns()
    for trace in traces:
        if not trace.is_collected:
            continue
        own, parent_id = _place(trace, is_first=is_first)
        _take(
            Span(
                name=name,
                trace=own,
                parent_id=parent_id,
                begin_ns=begin_ns,
                end_ns=end_ns,
                attributes=attributes,
                links=links,
            )
        )


def of_groups(run_id: str, group_ids: Iterable[str]) -> list[Trace]:
    """Traces of the groups of a batch that are collected."""
    if not is_collecting():
        return []
    traces = [of_group(run_id, group_id) for group_id in dict.fromkeys(group_ids)]
    return [trace for trace in traces if trace.is_collected]


def _place(parent: Trace, *, is_first: bool) -> tuple[Trace, str]:
    """Where a new span is, and the id of the span that it is a part of."""
    if is_first:
        return parent, ""
    return Trace(parent.trace_id, secrets.token_hex(8), is_collected=True), parent.span_id


def _take(span_: Span) -> None:
    if _collecting.sink is not None:
        _collecting.sink.take(span_)


def _ids(name: str) -> tuple[str, str]:
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return digest[:32], digest[32:]
