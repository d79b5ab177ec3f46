"""Feed of run events: stored events from the database, then new ones live."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from services.common.errors import ResourceExhaustedError
from services.controller.rules.run_state import TERMINAL
from services.controller.store.database import Database
from services.controller.store.records import ALL_EVENTS, Event, EventFilter
from services.controller.store.runs import RunStore

_MAX_BEHIND = 1000
_PAGE = 500
# An idle reader receives an empty batch at this interval, which lets it notice a closed connection.
_QUIET_S = 15.0
# Readers woken per iteration of the event loop: waking hundreds at once would delay all requests.
_WOKEN_AT_ONCE = 16


class Subscription:
    """Queue of new events for one reader, of one run or of all runs of a project."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._has_news = asyncio.Event()
        self._is_overflown = False

    def offer(self, event: Event) -> None:
        """Adds an event; if the queue is full, marks the reader as too slow."""
        if len(self._events) < _MAX_BEHIND:
            self._events.append(event)
            self._has_news.set()
        else:
            self._is_overflown = True

    async def next(self) -> list[Event]:
        """Waits for the next events; returns an empty list if none arrive for a while.

        Raises:
            ResourceExhaustedError: If the reader fell too far behind; it must resume after the last
                event that it read.
        """
        if self._is_overflown:
            raise ResourceExhaustedError(
                f"the reader is over {_MAX_BEHIND} events behind; resume after the last event that was read"
            )
        try:
            async with asyncio.timeout(_QUIET_S):
                await self._has_news.wait()
        except TimeoutError:
            return []
        self._has_news.clear()
        events, self._events = self._events, []
        return events


class EventFeed:
    """Distributes events to readers. Belongs to the event loop's thread."""

    def __init__(self, database: Database, store: RunStore) -> None:
        self._database = database
        self._store = store
        self._by_run: dict[str, set[Subscription]] = defaultdict(set)
        self._by_project: dict[str, set[Subscription]] = defaultdict(set)
        self._due: deque[tuple[Event, list[Subscription]]] = deque()

    async def page(
        self, run_id: str, *, after_seq: int, limit: int = _PAGE, only: EventFilter = ALL_EVENTS
    ) -> list[Event]:
        """Reads stored events of a run after ``after_seq``, in order unless ``only`` sets another one.

        Raises:
            CursorExpiredError: If some of these events are no longer stored.
        """
        return await self._database.page(
            limit, self._store.events, run_id, after_seq=after_seq, limit=limit, only=only
        )

    async def check_moment(self, project: str, moment: float) -> None:
        """Checks that all events of a project after a moment are still stored.

        Raises:
            CursorExpiredError: If some are not.
        """
        await self._database.query(self._store.events_since, project, moment, limit=1)

    async def watch(self, run_id: str, after_seq: int) -> AsyncIterator[Sequence[Event]]:
        """Streams the events of a run; ends after the event that ends the run.

        Yields:
            A batch of events; an empty one after a while without any.

        Raises:
            ResourceExhaustedError: If the reader is too slow.
        """
        with _subscribe(self._by_run, run_id) as subscription:
            is_ended = (await self._database.query(self._store.get, run_id)).is_terminal
            # If the database was restored from an older copy, the cursor may be newer than its events;
            # the stream then continues from the newest stored event.
            newest = await self._database.query(self._store.newest_seq, run_id)
            after_seq = min(after_seq, newest)
            is_behind = True
            while is_behind:
                page = await self.page(run_id, after_seq=after_seq)
                yield page
                after_seq = page[-1].seq if page else after_seq
                is_ended = is_ended or any(map(_ends_run, page))
                is_behind = len(page) == _PAGE
            while not is_ended:
                events = [event for event in await subscription.next() if event.seq > after_seq]
                yield events
                is_ended = any(map(_ends_run, events))

    async def watch_project(
        self, project: str, after: float | None
    ) -> AsyncIterator[Sequence[Event]]:
        """Streams the events of all runs of a project, without end.

        Args:
            after: Time after which the stream begins, in seconds since the epoch; None means now.

        Yields:
            A batch of events; an empty one after a while without any.

        Raises:
            ResourceExhaustedError: If the reader is too slow.
        """
        last_seqs: dict[str, int] = {}
        with _subscribe(self._by_project, project) as subscription:
            while after is not None:
                page = await self._database.scan(self._store.events_since, project, after)
                yield page
                last_seqs |= {event.run_id: event.seq for event in page}
                after = page[-1].time if page else None
            while True:
                events = await subscription.next()
                yield [event for event in events if event.seq > last_seqs.get(event.run_id, 0)]

    def publish(self, event: Event, *, project: str) -> None:
        """Sends a stored event to all subscribed readers."""
        readers = [*self._by_run.get(event.run_id, ()), *self._by_project.get(project, ())]
        if readers:
            self._due.append((event, readers))
            if len(self._due) == 1:
                self._distribute()

    def _distribute(self) -> None:
        event, readers = self._due[0]
        for subscription in readers[:_WOKEN_AT_ONCE]:
            subscription.offer(event)
        del readers[:_WOKEN_AT_ONCE]
        if not readers:
            self._due.popleft()
        if self._due:
            asyncio.get_running_loop().call_soon(self._distribute)


@contextmanager
def _subscribe(subscribers: dict[str, set[Subscription]], name: str) -> Iterator[Subscription]:
    """Subscribes to events until the block ends."""
    subscription = Subscription()
    subscribers[name].add(subscription)
    try:
        yield subscription
    finally:
        subscribers[name].discard(subscription)
        if not subscribers[name]:
            del subscribers[name]


def _ends_run(event: Event) -> bool:
    return event.type == "StateChanged" and event.data["to"] in TERMINAL
