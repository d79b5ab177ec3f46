"""Typed API client of the commands; it uses the operations and answers that the controller declares.

    async with Api("http://127.0.0.1:8700", token=token) as api:
        run = await api.submit(spec)
        await api.call(PauseRun(run_id=run.id))

Other programs use ``slipstream_client``, which sends the requests for this class too.
"""

import math
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from services.controller.schemas import EventView, ListedRun, LogLine, RunView
from slipstream_client.async_transport import AsyncTransport
from slipstream_client.request import ApiError, Request, no_controller

__all__ = ["Api", "ApiError"]

NO_CONTROLLER = "start one with 'slipstream up', or set --url or SLIPSTREAM_URL"
"""Advice in the error for a command that reaches no controller."""
_EVENTS_A_PAGE = 1000
_NAME = re.compile(r"[\w-]{1,128}")


@contextmanager
def fields_of(url: str, subject: str) -> Iterator[None]:
    """Raises ApiError if the block finds other fields in an answer of a server than it expects."""
    try:
        yield
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        raise no_controller(url, f"{key}: {wrong['msg']}".removeprefix(": ")) from error
    except UnicodeEncodeError:
        raise  # the terminal cannot show the answer
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise no_controller(url, f"{subject} has other fields: {error!r:.200}") from error


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
        with fields_of(self.url, "an answer"):
            answer: Answer = TypeAdapter(operation.answer()).validate_json(content or b"null")
        for run in (answer, *getattr(answer, "items", ())):
            # Commands name folders by it.
            if isinstance(run, ListedRun) and not _NAME.fullmatch(run.id):
                raise no_controller(self.url, f"id: {run.id!r:.80} is no id of a run")
        return answer

    async def watch(
        self, run_id: str, *, after_seq: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields the events of a run, with the fields that the API declares, until the run has ended."""
        events = super().watch(run_id, after_seq=after_seq, timeout_s=timeout_s)
        async for kind, event in events:
            with fields_of(self.url, f"event {kind}"):
                (RunView if kind == "end" else EventView).model_validate(event)
            yield kind, event

    async def submit(
        self, spec: Mapping[str, Any], *, priority: int = 0, labels: Mapping[str, str] | None = None
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
            with fields_of(self.url, "a line of a log"):
                line = LogLine.model_validate(data)
            yield line

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
