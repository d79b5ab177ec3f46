"""Typed client of the REST API; the command line is written with it, and programs may be too.

async with Api("http://127.0.0.1:8700", token=token) as api:
    run = await api.submit(spec)
    await api.call(PauseRun(run_id=run.id))
"""

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import TypeAdapter

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
    WatchRun,
)
from services.controller.models import EventView, LogLine, RunView

_TIMEOUT_S = 30.0
# The server sends a keep-alive comment every 15 s.
_STREAM_TIMEOUT = httpx.Timeout(_TIMEOUT_S, read=60.0)
_EVENTS_A_PAGE = 1000
_RECONNECT_S = 60.0
_RECONNECT_EVERY_S = 0.5


class ApiError(RuntimeError):
    """The controller refused a request or could not be reached; the message says why."""


class Api:
    """Calls a controller.

    Args:
        url: Such as ``http://127.0.0.1:8080``.
        token: API token; empty where none is asked for.
        patience_s: How long a controller that does not answer is asked again: one that is started again.
    """

    def __init__(self, url: str, *, token: str = "", patience_s: float = 0.0) -> None:
        self._url = url
        self._patience_s = patience_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT_S, trust_env=False, headers=headers
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def call(self, operation: Operation[Answer]) -> Answer:
        """Have an operation answered that answers once.

        Raises:
            ApiError: If it is refused, or nobody answers.
        """
        request = _request(operation)
        # Repeating it is safe: a changed run has another revision, and nothing is made twice.
        may_repeat = request.method == "GET" or "idempotency_key" in type(operation).model_fields
        content = await self._content(request, may_repeat=may_repeat)
        answer: Answer = TypeAdapter(operation.answer()).validate_json(content or b"null")
        return answer

    async def submit(
        self,
        spec: Mapping[str, Any],
        *,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> RunView:
        """Submit a run; those with a higher priority start first."""
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        run = await self.call(CreateRun(spec=dict(spec), priority=priority, label=pairs))
        assert isinstance(run, RunView)
        return run

    async def page_link(self) -> str:
        """A link to the run page that signs one browser in, once, as this caller."""
        request = _Request("POST", "/page/links", {}, {}, None)
        return f"{self._url}{json.loads(await self._content(request, may_repeat=True))['path']}"

    async def get(self, run_id: str) -> RunView:
        """One run."""
        return await self.call(GetRun(run_id=run_id))

    async def events(self, run_id: str, *, after_seq: int = 0, type_: str = "") -> list[EventView]:
        """All events of a run, in order."""
        events: list[EventView] = []
        while True:
            types = [type_] if type_ else []
            asked = ListEvents(run_id=run_id, after_seq=after_seq, type=types, limit=_EVENTS_A_PAGE)
            page = (await self.call(asked)).items
            events += page
            if len(page) < asked.limit:
                return events
            after_seq = page[-1].seq

    async def logs(
        self, run_id: str, *, component: str = "", tail_lines: int = 100, follow: bool = False
    ) -> AsyncIterator[LogLine]:
        """Last lines of the workers' logs; with ``follow`` also those that come, until the run has ended."""
        asked = FollowLogs if follow else ReadLogs
        operation = asked(run_id=run_id, component=component, tail_lines=tail_lines)
        async for kind, data in self._stream(operation):
            if kind != "end":
                yield LogLine.model_validate(data)

    async def samples(self, asked: ExportSamples) -> AsyncIterator[dict[str, Any]]:
        """Kept samples of a run, one after the other."""
        async for _, sample in self._stream(asked):
            yield sample

    async def watch(self, run_id: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Events of a run as they come: ``(type, event)``; the last one is ``("end", run)``.

        A controller that is started again is found again, and no event is missed or told twice.
        """
        clock = asyncio.get_running_loop().time
        seq, last_heard = 0, clock()
        while True:
            try:
                known = WatchRun(run_id=run_id, last_event_id=str(seq))
                async for kind, data in self._stream(known):
                    yield kind, data
                    if kind == "end":
                        return
                    seq, last_heard = data["seq"], clock()
            except httpx.TransportError as error:
                if clock() - last_heard > _RECONNECT_S:
                    raise ApiError(f"the controller at {self._url} broke off: {error!r}") from error
            await asyncio.sleep(_RECONNECT_EVERY_S)

    async def _stream(self, operation: Operation[Any]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """What an operation answers bit by bit."""
        request = _request(operation)
        async with self._http.stream(
            request.method,
            request.path,
            params=request.params,
            headers=request.headers,
            timeout=_STREAM_TIMEOUT,
        ) as response:
            if response.is_error:
                await response.aread()
                raise ApiError(_explain(response))
            if operation.form == "events":
                async for kind, data in _events(response):
                    yield kind, data
                return
            async for line in response.aiter_lines():
                yield "line", json.loads(line)

    async def _content(self, request: "_Request", *, may_repeat: bool) -> bytes:
        response = await self._answer(request, may_repeat=may_repeat)
        if response.is_error:
            raise ApiError(_explain(response))
        return response.content

    async def _answer(self, request: "_Request", *, may_repeat: bool) -> httpx.Response:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        while True:
            try:
                return await self._http.request(
                    request.method,
                    request.path,
                    params=request.params,
                    headers=request.headers,
                    json=request.body,
                )
            except httpx.TransportError as error:
                if not may_repeat or clock() >= deadline:
                    raise ApiError(
                        f"no controller answers at {self._url} ({error}); start one with 'slipstream up', or "
                        "set SLIPSTREAM_URL or --url"
                    ) from error
            await asyncio.sleep(_RECONNECT_EVERY_S)


@dataclass(frozen=True, slots=True)
class _Request:
    """An operation as it is sent."""

    method: str
    path: str
    params: dict[str, Any]
    headers: dict[str, str]
    body: Any


def _request(operation: Operation[Any]) -> _Request:
    """An operation as it is sent: every field in its place."""
    fields = operation.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if "idempotency_key" in type(operation).model_fields:
        fields.setdefault("idempotency_key", uuid.uuid4().hex)
    by_place: dict[Place, dict[str, Any]] = defaultdict(dict)
    for name, value in fields.items():
        by_place[operation.place(name)][name] = value
    method, path = operation.http.split(" ")
    body = by_place["body"] if operation.body() else None
    return _Request(
        method,
        path.format(**by_place["path"]),
        params=by_place["query"],
        headers={name.replace("_", "-"): value for name, value in by_place["header"].items()},
        body=next(iter(by_place["document"].values()), body),
    )


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    kind = "message"
    async for line in response.aiter_lines():
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield kind, json.loads(line.removeprefix("data:"))


def _explain(response: httpx.Response) -> str:
    try:
        problem = response.json()
    except ValueError:
        return f"the controller answered {response.status_code}: {response.text[:200]}"
    lines = [str(problem.get("detail", response.status_code))]
    lines += [_pointed(error["pointer"], error["message"]) for error in problem.get("errors", ())]
    return "\n".join(lines)


def _pointed(pointer: str, message: str) -> str:
    """What is wrong, with the name of where it is if the message does not begin with it."""
    name = pointer.strip("/").replace("/", ".")
    return message if not name or message.startswith(name) else f"{name}: {message}"
