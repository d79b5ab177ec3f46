"""REST routes that stream server-sent events: a run's events, those of all runs, a run's logs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Query
from fastapi.responses import StreamingResponse

from services.controller.api.commands import Access, Authenticate, RunId
from services.controller.api.observing import MAX_SEQ
from services.controller.api.principals import Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.api.sse import DESCRIPTION, event_stream, frame_of
from services.controller.api.views import view_event
from services.controller.logs import RunLogs
from services.controller.runs import RunManager
from services.controller.store.records import Event

_KEPT_FRAMES = 2000

Streaming = Callable[..., AsyncIterator[Principal]]
"""Who asks for a stream that is counted."""


def add_stream_routes(
    app: FastAPI,
    manager: RunManager,
    logs: RunLogs,
    authenticate: Authenticate,
    limits: RequestLimits,
) -> None:
    """Add the routes; they come before ``/v1/runs/{run_id}``, which would take ``stream`` for an id."""
    encoded = _Encoded()

    async def streaming(
        who: Annotated[Principal, Depends(authenticate)],
    ) -> AsyncIterator[Principal]:
        # Left when the stream has ended.
        with limits.stream(who.project):
            yield who

    existing = _existing(Access(manager), streaming)
    _add_project_events(app, manager, encoded, streaming)
    _add_run_events(app, manager, encoded, existing)
    _add_logs(app, logs, existing)


def _existing(access: Access, streaming: Streaming) -> Callable[..., Awaitable[str]]:
    async def existing(run_id: RunId, who: Annotated[Principal, Depends(streaming)]) -> str:
        # Checked before the stream begins: an answer that has begun cannot say 404.
        return (await access.run(who, run_id)).run_id

    return existing


def _add_project_events(
    app: FastAPI, manager: RunManager, encoded: "_Encoded", streaming: Streaming
) -> None:
    async def known_moment(
        who: Annotated[Principal, Depends(streaming)],
        last_event_id: Annotated[str, Header(max_length=64)] = "",
    ) -> float | None:
        # An answer that has begun cannot say 410.
        moment = _time(last_event_id)
        if moment is not None:
            await manager.feed.check_moment(who.project, moment)
        return moment

    @app.get("/v1/runs/stream", response_class=StreamingResponse, responses=DESCRIPTION)
    async def stream_all_events(
        who: Annotated[Principal, Depends(streaming)],
        moment: Annotated[float | None, Depends(known_moment)],
    ) -> StreamingResponse:
        """Events of all runs of the project as they come, from now on or behind ``Last-Event-ID``."""

        async def frames() -> AsyncIterator[bytes]:
            async for events in manager.feed.watch_project(who.project, moment):
                yield encoded.frames(events, lambda event: f"{event.time:.6f}")

        return event_stream(frames())


def _add_run_events(
    app: FastAPI,
    manager: RunManager,
    encoded: "_Encoded",
    existing: Callable[..., Awaitable[str]],
) -> None:
    access = Access(manager)

    async def known_seq(
        run_id: Annotated[str, Depends(existing)],
        after_seq: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
        last_event_id: Annotated[str, Header()] = "",
    ) -> int:
        # An answer that has begun cannot say 410.
        is_number = last_event_id.isdecimal() and len(last_event_id) < 16
        start = int(last_event_id) if is_number else after_seq
        if start:
            await manager.feed.page(run_id, after_seq=start, limit=1)
        return start

    @app.get(
        "/v1/runs/{run_id}/events/stream", response_class=StreamingResponse, responses=DESCRIPTION
    )
    async def stream_events(
        known: Annotated[str, Depends(existing)],
        start: Annotated[int, Depends(known_seq)],
    ) -> StreamingResponse:
        """Events of a run as they come; the stream ends with event ``end`` once the run has ended.

        A reader that falls too far behind gets event ``overflow`` and goes on by ``Last-Event-ID``.
        """

        async def frames() -> AsyncIterator[bytes]:
            async for events in manager.feed.watch(known, start):
                yield encoded.frames(events, lambda event: str(event.seq))
            run = access.view(await manager.get(known))
            yield frame_of("end", run.model_dump_json())

        return event_stream(frames())


def _add_logs(app: FastAPI, logs: RunLogs, existing: Callable[..., Awaitable[str]]) -> None:
    @app.get(
        "/v1/runs/{run_id}/logs/stream", response_class=StreamingResponse, responses=DESCRIPTION
    )
    async def stream_logs(
        known: Annotated[str, Depends(existing)],
        component: Annotated[str, Query(pattern="^[a-z0-9-]{0,63}$")] = "",
        tail_lines: Annotated[int, Query(ge=0, le=10_000)] = 100,
        last_event_id: Annotated[str, Header(max_length=4096)] = "",
    ) -> StreamingResponse:
        """Lines of the workers' logs as they come; ends with event ``end`` once the run has ended."""

        async def frames() -> AsyncIterator[bytes]:
            cursor = ""
            async for lines in logs.follow(known, component, tail_lines, last_event_id):
                for cursor, line in lines:
                    yield frame_of("line", line.model_dump_json(), cursor)
                yield b""
            yield frame_of("end", "{}", cursor)

        return event_stream(frames())


class _Encoded:
    """The newest events as they are sent, made once however many read them."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int], bytes] = {}

    def frames(self, events: Sequence[Event], id_: Callable[[Event], str]) -> bytes:
        """Events, and their ids in a stream."""
        return b"".join(
            b"id: %b\n%b" % (id_(event).encode(), self._frame(event)) for event in events
        )

    def _frame(self, event: Event) -> bytes:
        key = (event.run_id, event.seq)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _KEPT_FRAMES:
                del self._frames[next(iter(self._frames))]
            frame = self._frames[key] = frame_of(event.type, view_event(event).model_dump_json())
        return frame


def _time(last_event_id: str) -> float | None:
    """The moment behind which a stream goes on; None for now."""
    try:
        moment = float(last_event_id)
    except ValueError:
        return None
    return moment if 0.0 < moment < 1e11 else None
