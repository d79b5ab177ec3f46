"""Tests of the distribution of events to many readers."""

import asyncio
import dataclasses

import pytest

from services.controller.manager.event_feed import EventFeed
from services.controller.store.records import Event, NewRun
from services.controller.store.runs import RunStore

pytestmark = pytest.mark.postgresql

RUN = "run_" + "0" * 32


def event(seq: int) -> Event:
    return Event(run_id=RUN, seq=seq, time=float(seq), type="Note", message="", data={})


async def read(feed: EventFeed, after_seq: int, last: int) -> list[int]:
    """Reads events of the run until the number ``last``, and returns their numbers."""
    numbers: list[int] = []
    async for events in feed.watch(RUN, after_seq):
        numbers += [event.seq for event in events]
        if last in numbers:
            return numbers
    return numbers


async def test_every_reader_gets_every_event_in_order_however_many_read(database):
    store = RunStore(database)
    store.create(NewRun(run_id=RUN, name="many", spec_json="{}", spec_digest=""))
    feed = EventFeed(database, store)
    readers = [asyncio.create_task(read(feed, 1, last=40)) for _ in range(100)]
    await asyncio.sleep(0.1)
    for seq in range(2, 41):
        feed.publish(event(seq), project="default")
        if seq % 3:
            await asyncio.sleep(0)
        if seq == 20:
            # Every other reader is cancelled while events are being delivered.
            for reader in readers[::2]:
                reader.cancel()
    for reader in readers[1::2]:
        assert await asyncio.wait_for(reader, 10.0) == list(range(2, 41))


async def test_a_reader_that_comes_later_sees_no_event_twice(database):
    store = RunStore(database)
    store.create(NewRun(run_id=RUN, name="late", spec_json="{}", spec_digest=""))
    feed = EventFeed(database, store)
    first = asyncio.create_task(read(feed, 0, last=3))
    await asyncio.sleep(0.1)
    (submitted,) = await feed.page(RUN, after_seq=0)
    for seq in (2, 3):
        feed.publish(dataclasses.replace(submitted, seq=seq), project="default")
    feed.publish(submitted, project="default")
    assert await asyncio.wait_for(first, 10.0) == [1, 2, 3]


async def test_a_reader_ahead_of_a_restored_database_gets_the_end(database):
    store = RunStore(database)
    store.create(NewRun(run_id=RUN, name="back", spec_json="{}", spec_digest=""))
    feed = EventFeed(database, store)
    reader = asyncio.create_task(read(feed, 9, last=2))
    await asyncio.sleep(0.1)
    end = dataclasses.replace(event(2), type="StateChanged", data={"to": "FAILED"})
    feed.publish(end, project="default")
    assert await asyncio.wait_for(reader, 10.0) == [2]
