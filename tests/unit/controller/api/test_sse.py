"""Server-sent event streams: events, heartbeats, and the end of a stream."""

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from services.common.errors import ResourceExhaustedError
from services.controller.api import rest
from services.controller.api.rest import event_stream, frame_of
from services.controller.manager import event_feed
from services.controller.manager.event_feed import Subscription
from services.controller.store.records import Event


def event(seq: int) -> Event:
    return Event(run_id="run", seq=seq, time=0.0, type="Told", message="", data={})


def streamed(*frames: bytes) -> str:
    async def some():
        for frame in frames:
            yield frame

    app = Starlette(routes=[Route("/", lambda request: event_stream(some()))])
    return TestClient(app).get("/").text


def test_an_event_is_a_frame():
    text = streamed(frame_of("Told", "{}", "7"), b"", frame_of("end", "{}"))
    assert text == "id: 7\nevent: Told\ndata: {}\n\nevent: end\ndata: {}\n\n"


def test_a_silent_stream_sends_heartbeats(monkeypatch):
    monkeypatch.setattr(rest, "_PING_S", -1.0)
    assert streamed(b"", frame_of("end", "{}")).startswith(":")


async def test_all_events_that_wait_are_read_at_once():
    subscription = Subscription()
    for seq in (1, 2):
        subscription.offer(event(seq))
    assert [event.seq for event in await subscription.next()] == [1, 2]


async def test_a_reader_gets_heartbeats_without_events(monkeypatch):
    monkeypatch.setattr(event_feed, "_QUIET_S", 0.0)
    assert await Subscription().next() == []


async def test_a_slow_reader_gets_an_overflow_event():
    subscription = Subscription()
    for seq in range(1001):
        subscription.offer(event(seq))
    with pytest.raises(ResourceExhaustedError, match="1000 events"):
        await subscription.next()
