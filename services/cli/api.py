"""Typed client of the REST API; the command line is written with it, and programs may be too.

async with Api("http://127.0.0.1:8700", token=token) as api:
run = await api.submit(spec)
async for kind, event in api.watch(run.id):
...
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from services.controller.api.models import (
    CancelOptions,
    CheckpointPage,
    CheckpointView,
    EventPage,
    EventView,
    ForkRequest,
    LogLine,
    MetricPage,
    MetricPoint,
    PauseOptions,
    QuotaView,
    RunPage,
    RunPatch,
    RunView,
    SamplePage,
    SampleView,
    Topology,
    ValidatedView,
    VersionView,
    WorkerView,
)

_Model = TypeVar("_Model", bound=BaseModel)

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

    async def submit(
        self,
        spec: Mapping[str, Any],
        *,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> RunView:
        """Submit a run; those with a higher priority start first."""
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        return await self._model(
            RunView,
            "POST",
            "/v1/runs",
            json=dict(spec),
            params={"priority": priority, "label": pairs},
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )

    async def validate(self, spec: Mapping[str, Any]) -> ValidatedView:
        """Have the controller check a specification; nothing starts."""
        return await self._model(
            ValidatedView, "POST", "/v1/runs", json=dict(spec), params={"validate_only": True}
        )

    async def get(self, run_id: str) -> RunView:
        """One run."""
        return await self._model(RunView, "GET", f"/v1/runs/{run_id}")

    async def list_runs(
        self,
        *,
        state: str = "",
        name: str = "",
        label: str = "",
        page_size: int = 50,
        page_token: str = "",
    ) -> RunPage:
        """A page of runs, newest first; of one state, name or label (``key=value``) if that is given."""
        params: dict[str, str | int] = {"page_size": page_size, "page_token": page_token}
        params |= {"name": name, "label": label} | ({"state": state} if state else {})
        return await self._model(RunPage, "GET", "/v1/runs", params=params)

    async def patch(self, run: RunView, patch: RunPatch) -> RunView:
        """Change a run as it was read."""
        return await self._model(
            RunView,
            "PATCH",
            f"/v1/runs/{run.id}",
            json=patch.model_dump(mode="json", exclude_none=True),
            headers={"If-Match": f'"{run.revision}"'},
        )

    async def delete(self, run: RunView, *, delete_checkpoints: bool = False) -> None:
        """Forget a run that has ended."""
        await self._call(
            "DELETE",
            f"/v1/runs/{run.id}",
            params={"delete_checkpoints": delete_checkpoints},
            headers={"If-Match": f'"{run.revision}"'},
        )

    async def cancel(
        self, run_id: str, *, grace_seconds: float = 0.0, save_checkpoint: bool = False
    ) -> RunView:
        """End a run: at once, or behind its current step if that is done within the grace."""
        options = CancelOptions(grace_seconds=grace_seconds, save_checkpoint=save_checkpoint)
        path = f"/v1/runs/{run_id}/cancel"
        return await self._model(RunView, "POST", path, json=options.model_dump(mode="json"))

    async def pause(self, run_id: str, *, checkpoint: bool = True) -> RunView:
        """Finish the current step, save a checkpoint if it is wanted, and stop the workers."""
        options = PauseOptions(checkpoint=checkpoint).model_dump(mode="json")
        return await self._model(RunView, "POST", f"/v1/runs/{run_id}/pause", json=options)

    async def resume(self, run_id: str) -> RunView:
        """Queue a paused run again."""
        return await self._model(RunView, "POST", f"/v1/runs/{run_id}/resume")

    async def evaluate(self, run_id: str) -> RunView:
        """Evaluate the weights that are served now."""
        return await self._model(RunView, "POST", f"/v1/runs/{run_id}/validate")

    async def checkpoint(self, run_id: str) -> RunView:
        """Save a checkpoint at the end of the current step."""
        return await self._model(RunView, "POST", f"/v1/runs/{run_id}/checkpoint")

    async def checkpoints(self, run_id: str) -> list[CheckpointView]:
        """Checkpoints of a run, newest first."""
        path = f"/v1/runs/{run_id}/checkpoints"
        return (await self._model(CheckpointPage, "GET", path)).items

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint that no run needs any more."""
        await self._call("DELETE", f"/v1/runs/{run_id}/checkpoints/{checkpoint_id}")

    async def fork(self, run_id: str, fork: ForkRequest) -> RunView:
        """Start a new run that goes on from a checkpoint."""
        return await self._model(
            RunView,
            "POST",
            f"/v1/runs/{run_id}/fork",
            json=fork.model_dump(mode="json"),
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )

    async def topology(self, run_id: str) -> list[WorkerView]:
        """Workers of a run."""
        return (await self._model(Topology, "GET", f"/v1/runs/{run_id}/topology")).items

    async def events(self, run_id: str, *, after_seq: int = 0, type_: str = "") -> list[EventView]:
        """Events of a run, in order."""
        path = f"/v1/runs/{run_id}/events"
        events: list[EventView] = []
        while True:
            params = {"after_seq": after_seq, "type": type_, "limit": _EVENTS_A_PAGE}
            page = (await self._model(EventPage, "GET", path, params=params)).items
            events += page
            if len(page) < _EVENTS_A_PAGE:
                return events
            after_seq = page[-1].seq

    async def metrics(
        self, run_id: str, *, name: str = "", from_step: int = 0, max_points: int = 2000
    ) -> list[MetricPoint]:
        """Numbers of a run's steps, in order."""
        params = {"name": name, "from_step": from_step, "max_points": max_points}
        path = f"/v1/runs/{run_id}/metrics"
        return (await self._model(MetricPage, "GET", path, params=params)).items

    async def samples(
        self, run_id: str, *, after_step: int = 0, steps: int = 10
    ) -> list[SampleView]:
        """Groups that steps trained, those in flight, and those that were given up."""
        params = {"after_step": after_step, "steps": steps}
        path = f"/v1/runs/{run_id}/samples"
        return (await self._model(SamplePage, "GET", path, params=params)).items

    async def quota(self) -> QuotaView:
        """What the project may use, and uses."""
        return await self._model(QuotaView, "GET", "/v1/quota")

    async def version(self) -> str:
        """The release that answers."""
        return (await self._model(VersionView, "GET", "/v1/version")).version

    async def logs(
        self, run_id: str, *, component: str = "", tail_lines: int = 100, follow: bool = False
    ) -> AsyncIterator[LogLine]:
        """Last lines of the workers' logs; with ``follow`` also those that come, until the run has ended."""
        params: dict[str, str | int] = {"component": component, "tail_lines": tail_lines}
        path = f"/v1/runs/{run_id}/logs/stream" if follow else f"/v1/runs/{run_id}/logs"
        async with self._http.stream(
            "GET", path, params=params, timeout=_STREAM_TIMEOUT
        ) as response:
            if response.is_error:
                await response.aread()
                raise ApiError(_explain(response))
            if follow:
                async for kind, data in _events(response):
                    if kind == "line":
                        yield LogLine.model_validate(data)
                return
            async for line in response.aiter_lines():
                yield LogLine.model_validate_json(line)

    async def watch(self, run_id: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Events of a run as they come: ``(type, event)``; the last one is ``("end", run)``.

        A controller that is started again is found again, and no event is missed or told twice.
        """
        clock = asyncio.get_running_loop().time
        seq, last_heard = 0, clock()
        while True:
            try:
                async for kind, data in self._stream(run_id, seq):
                    yield kind, data
                    if kind == "end":
                        return
                    seq, last_heard = data["seq"], clock()
            except httpx.TransportError as error:
                if clock() - last_heard > _RECONNECT_S:
                    raise ApiError(f"the controller at {self._url} broke off: {error!r}") from error
            await asyncio.sleep(_RECONNECT_EVERY_S)

    async def _stream(
        self, run_id: str, after_seq: int
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        path = f"/v1/runs/{run_id}/events/stream"
        headers = {"Last-Event-ID": str(after_seq)}
        async with self._http.stream(
            "GET", path, timeout=_STREAM_TIMEOUT, headers=headers
        ) as response:
            if response.is_error:
                await response.aread()
                raise ApiError(_explain(response))
            async for kind, data in _events(response):
                yield kind, data

    async def _model(self, model: type[_Model], method: str, path: str, **arguments: Any) -> _Model:
        return model.model_validate_json(await self._call(method, path, **arguments))

    async def _call(self, method: str, path: str, **arguments: Any) -> bytes:
        response = await self._answer(method, path, **arguments)
        if response.is_error:
            raise ApiError(_explain(response))
        return response.content

    async def _answer(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        may_repeat = method == "GET" or "Idempotency-Key" in arguments.get("headers", {})
        while True:
            try:
                return await self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                if not may_repeat or clock() >= deadline:
                    raise ApiError(
                        f"no controller answers at {self._url} ({error}); start one with 'slipstream up', or "
                        "set SLIPSTREAM_URL or --url"
                    ) from error
            await asyncio.sleep(_RECONNECT_EVERY_S)


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
