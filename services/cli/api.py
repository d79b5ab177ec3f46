"""Typed API client of the commands; it uses the operations and answers that the controller declares.

    async with Api("http://127.0.0.1:8700", token=token) as api:
        run = await api.submit(spec)
        await api.call(PauseRun(run_id=run.id))

Other programs use ``slipstream_client``, which sends the requests for this class too.
"""

import math
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Self

import httpx
from pydantic import TypeAdapter, ValidationError

from services.controller.api.operations import (
    Answer,
    CreateRun,
    ExportSamples,
    FollowLogs,
    GetRun,
    ListEvents,
    Operation,
    Place,
    ReadLogs,
    WatchRuns,
)
from services.controller.schemas import EventView, LogLine, RunView
from slipstream_client.async_transport import AsyncTransport
from slipstream_client.request import ApiError, Request, no_controller

__all__ = ["Api", "ApiError"]

NO_CONTROLLER = "start one with 'slipstream up', or set --url or SLIPSTREAM_URL"
"""Advice in the error for a command that reaches no controller."""
_EVENTS_A_PAGE = 1000


class Api(AsyncTransport):
    """Calls a controller."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def call(self, operation: Operation[Answer]) -> Answer:
        """Sends an operation with a single answer and returns the answer.

        Raises:
            ApiError: If the controller refuses the operation or does not answer.
        """
        content = await self.content(_request(operation))
        try:
            answer: Answer = TypeAdapter(operation.answer()).validate_json(content or b"null")
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            key = ".".join(map(str, wrong["loc"]))
            raise no_controller(self.url, f"{key}: {wrong['msg']}".removeprefix(": ")) from error
        return answer

    async def submit(
        self,
        spec: Mapping[str, Any],
        *,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> RunView:
        """Submits a run; runs with a higher priority start first."""
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        run = await self.call(CreateRun(spec=dict(spec), priority=priority, label=pairs))
        assert isinstance(run, RunView)
        return run

    async def get(self, run_id: str) -> RunView:
        return await self.call(GetRun(run_id=run_id))

    async def events(self, run_id: str, *, after_seq: int = 0, type_: str = "") -> list[EventView]:
        events: list[EventView] = []
        while True:
            types = [type_] if type_ else []
            call = ListEvents(run_id=run_id, after_seq=after_seq, type=types, limit=_EVENTS_A_PAGE)
            page = (await self.call(call)).items
            events += page
            if len(page) < call.limit:
                return events
            if page[-1].seq <= after_seq:
                raise no_controller(self.url, "its pages of events do not advance")
            after_seq = page[-1].seq

    async def logs(
        self, run_id: str, *, component: str = "", tail_lines: int = 100, follow: bool = False
    ) -> AsyncIterator[LogLine]:
        """Yields the last log lines of the workers; with ``follow`` also new lines until the run ends."""
        operation_class = FollowLogs if follow else ReadLogs
        operation = operation_class(run_id=run_id, component=component, tail_lines=tail_lines)
        limits = {"quiet_s": math.inf} if follow else {}
        async for kind, data in self.stream(_request(operation), **limits):
            if kind == "end":
                continue
            try:
                yield LogLine.model_validate(data)
            except ValidationError as error:
                raise no_controller(self.url, "a line of a log is none") from error

    async def samples(self, operation: ExportSamples) -> AsyncIterator[dict[str, Any]]:
        """Yields the kept samples of a run."""
        async for _, sample in self.stream(_request(operation)):
            yield sample

    async def watch_all(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields new events of all runs of the project as ``(type, event)`` until the connection breaks."""
        with suppress(httpx.TransportError):
            async for kind, event in self.stream(_request(WatchRuns()), quiet_s=math.inf):
                yield kind, event


def _request(operation: Operation[Any]) -> Request:
    fields = operation.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if "idempotency_key" in type(operation).model_fields:
        fields.setdefault("idempotency_key", uuid.uuid4().hex)
    by_place: dict[Place, dict[str, Any]] = defaultdict(dict)
    for name, value in fields.items():
        by_place[operation.place(name)][name] = value
    method, path = operation.http.split(" ")
    body = by_place["body"] if operation.body() else None
    return Request(
        method=method,
        path=path,
        names=by_place["path"],
        query=by_place["query"],
        headers={name.replace("_", "-"): value for name, value in by_place["header"].items()},
        body=next(iter(by_place["document"].values()), body),
    )
