"""Client of the REST API."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

_TIMEOUT_S = 30.0
# The server sends a keep-alive comment every 15 s.
_STREAM_SILENCE_S = 60.0
_RECONNECT_S = 60.0
_RECONNECT_EVERY_S = 0.5


class ApiError(RuntimeError):
    """The controller refused a request or could not be reached; the message says why."""


class Api:
    """Calls a controller.

    Args:
        url: Such as ``http://127.0.0.1:8080``.
        token: API token; empty where none is asked for.
    """

    def __init__(self, url: str, *, token: str = "") -> None:
        self._url = url
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

    async def submit(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a run."""
        return await self._call(
            "POST", "/v1/runs", json=dict(spec), headers={"Idempotency-Key": uuid.uuid4().hex}
        )

    async def get(self, run_id: str) -> dict[str, Any]:
        """One run."""
        return await self._call("GET", f"/v1/runs/{run_id}")

    async def list_runs(self, page_size: int = 50) -> list[dict[str, Any]]:
        """Runs, newest first."""
        page = await self._call("GET", "/v1/runs", params={"page_size": page_size})
        items: list[dict[str, Any]] = page["items"]
        return items

    async def cancel(self, run_id: str) -> dict[str, Any]:
        """End a run."""
        return await self._call("POST", f"/v1/runs/{run_id}/cancel")

    async def pause(self, run_id: str) -> dict[str, Any]:
        """Finish the current step, save a checkpoint and stop the workers."""
        return await self._call("POST", f"/v1/runs/{run_id}/pause")

    async def resume(self, run_id: str) -> dict[str, Any]:
        """Queue a paused run again."""
        return await self._call("POST", f"/v1/runs/{run_id}/resume")

    async def checkpoint(self, run_id: str) -> dict[str, Any]:
        """Save a checkpoint at the end of the current step."""
        return await self._call("POST", f"/v1/runs/{run_id}/checkpoint")

    async def checkpoints(self, run_id: str) -> list[dict[str, Any]]:
        """Checkpoints of a run, newest first."""
        page = await self._call("GET", f"/v1/runs/{run_id}/checkpoints")
        items: list[dict[str, Any]] = page["items"]
        return items

    async def topology(self, run_id: str) -> list[dict[str, Any]]:
        """Workers of a run."""
        page = await self._call("GET", f"/v1/runs/{run_id}/topology")
        items: list[dict[str, Any]] = page["items"]
        return items

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
        timeout = httpx.Timeout(_TIMEOUT_S, read=_STREAM_SILENCE_S)
        path = f"/v1/runs/{run_id}/events/stream"
        headers = {"Last-Event-ID": str(after_seq)}
        async with self._http.stream("GET", path, timeout=timeout, headers=headers) as response:
            if response.is_error:
                await response.aread()
                raise ApiError(_explain(response))
            async for kind, data in _events(response):
                yield kind, data

    async def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise ApiError(
                f"no controller answers at {self._url} ({error}); start one with 'slipstream up', or set "
                "SLIPSTREAM_URL or --url"
            ) from error
        if response.is_error:
            raise ApiError(_explain(response))
        body: dict[str, Any] = response.json()
        return body


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
    lines += [str(error["message"]) for error in problem.get("errors", ())]
    return "\n".join(lines)
