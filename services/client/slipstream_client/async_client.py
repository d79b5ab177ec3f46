"""Asynchronous client of a controller, and runs as objects."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from slipstream_client.async_operations import AsyncOperations
from slipstream_client.async_transport import AsyncTransport
from slipstream_client.local import find_token, find_url
from slipstream_client.models import (
    CheckpointView,
    EventView,
    LogLine,
    RunView,
    ValidatedView,
    WholeSample,
)
from slipstream_client.request import ApiError, RunFailedError
from slipstream_client.specification import read_spec

_DAY_S = 86_400.0
_EVENTS_A_PAGE = 1000


class AsyncClient(AsyncOperations):
    """Client of one controller, with the operations of the API as methods.

    Args:
        url: Address of the controller, such as ``http://127.0.0.1:8700``. Default: ``SLIPSTREAM_URL``, or
            the controller that runs on this machine.
        token: API token. Default: ``SLIPSTREAM_TOKEN``, or the token of the controller on this machine.
        retry_s: Max seconds of retries while the controller does not answer, for example because it
            restarts.
        http: HTTP client that sends the requests. Default: a client that ignores proxy settings.

    Raises:
        ApiError: If ``url`` is empty and no controller, or more than one, is found.
    """

    def __init__(
        self,
        url: str = "",
        *,
        token: str = "",
        retry_s: float = 0.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        address = find_url(url)
        super().__init__(
            AsyncTransport(address, token=token or find_token(address), retry_s=retry_s, http=http)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._transport.aclose()

    async def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> "AsyncRun":
        """Submits a run.

        Args:
            spec: Path of a YAML or JSON file, or the specification as a mapping.
            priority: Position in the queue, -1000 to 1000; runs with a higher priority start first.
            labels: Labels by which :meth:`runs` finds the run.

        Raises:
            ApiError: If the specification is invalid; the message lists all its errors.
        """
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        run = await self.create_run(read_spec(spec), priority=priority, label=pairs)
        assert isinstance(run, RunView)
        return AsyncRun(self, run)

    async def validate(self, spec: str | Path | Mapping[str, Any]) -> ValidatedView:
        """Validates a specification without submitting it; returns it with all defaults filled in.

        Raises:
            ApiError: If the specification is invalid; the message lists all its errors.
        """
        checked = await self.create_run(read_spec(spec), validate_only=True)
        assert isinstance(checked, ValidatedView)
        return checked

    async def run(self, name_or_id: str) -> "AsyncRun":
        """Returns the run with an id, or the newest run with a name.

        Raises:
            ApiError: If there is no such run.
        """
        if name_or_id.startswith("run_"):
            return AsyncRun(self, await self.get_run(name_or_id))
        runs = (await self.list_runs(name=name_or_id, page_size=1)).items
        if not runs:
            raise ApiError(
                f"there is no run with the name {name_or_id!r}", status=404, code="not_found"
            )
        return AsyncRun(self, await self.get_run(runs[0].id))

    async def runs(self, *, name: str = "", label: str = "") -> AsyncIterator["AsyncRun"]:
        """Yields the runs of the project, newest first, optionally only those with a name or a label."""
        page_token = ""
        while True:
            page = await self.list_runs(name=name, label=label, page_token=page_token)
            for summary in page.items:
                yield AsyncRun(self, await self.get_run(summary.id))
            page_token = page.next_page_token
            if not page_token:
                return

    async def page_link(self) -> str:
        """Returns a link to the run page that signs one browser in as this caller; it works once."""
        return await self._transport.page_link()

    def watch(
        self, run_id: str, *, after_seq: int = 0, timeout_s: float = _DAY_S
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields the events of a run as they occur: ``(type, event)``; the last one is ``("end", run)``.

        It reconnects if the controller restarts; no event is missed or repeated.

        Raises:
            ApiError: If the controller refuses the request or does not answer for a minute.
            TimeoutError: If the run takes longer than ``timeout_s`` to end.
        """
        return self._transport.watch(run_id, after_seq=after_seq, timeout_s=timeout_s)


class AsyncRun:
    """A run, as the controller described it in its last answer.

    Attributes:
        view: The controller's answer to the last request.
    """

    def __init__(self, client: AsyncClient, view: RunView) -> None:
        self._client = client
        self.view = view

    def __repr__(self) -> str:
        return f"<run {self.view.name} {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.view.id

    @property
    def state(self) -> str:
        """State of the run, such as RUNNING."""
        return self.view.state

    async def refresh(self) -> RunView:
        """Requests the run's current state."""
        self.view = await self._client.get_run(self.id)
        return self.view

    async def events(self, *types: str, after_seq: int = 0) -> AsyncIterator[EventView]:
        """Yields the run's past events in order; if ``types`` are given, only events of these types."""
        while True:
            page = (
                await self._client.list_events(
                    self.id, type=types, after_seq=after_seq, limit=_EVENTS_A_PAGE
                )
            ).items
            for event in page:
                yield event
            if len(page) < _EVENTS_A_PAGE:
                return
            after_seq = page[-1].seq

    async def follow(
        self, *, after_seq: int = 0, timeout_s: float = _DAY_S
    ) -> AsyncIterator[EventView]:
        """Yields past and new events in order until the run ends.

        Raises:
            TimeoutError: If the run takes longer than ``timeout_s`` to end.
        """
        async for kind, data in self._client.watch(
            self.id, after_seq=after_seq, timeout_s=timeout_s
        ):
            if kind == "end":
                self.view = RunView.model_validate(data)
            elif kind != "overflow":
                yield EventView.model_validate(data)

    async def wait(self, *, timeout_s: float = _DAY_S) -> RunView:
        """Waits until the run succeeds.

        Raises:
            RunFailedError: If the run fails or is cancelled.
            TimeoutError: If the run takes longer than ``timeout_s`` to end.
        """
        last_events = (await self._client.list_events(self.id, order_by="-seq", limit=1)).items
        after_seq = last_events[0].seq if last_events else 0
        async for _ in self.follow(after_seq=after_seq, timeout_s=timeout_s):
            pass
        if self.state != "SUCCEEDED":
            raise RunFailedError(f"{self.view.name} {self.state}: {self.view.message}")
        return self.view

    async def metrics(
        self, *names: str, from_step: int = 0, to_step: int = 0
    ) -> dict[str, list[Any]]:
        """Returns metrics of the run's steps by name, one value per step; all metrics by default.

        The key ``step`` has the numbers of the steps. Of more than 2,000 steps, only every n-th is returned.
        """
        page = await self._client.list_metrics(
            self.id, name=names, from_step=from_step, to_step=to_step
        )
        return {"step": page.steps, **{metric.name: metric.values for metric in page.items}}

    def samples(
        self,
        *,
        step: int | None = None,
        split: Literal["train", "heldout"] | None = None,
        order_by: Literal["newest", "best", "worst"] = "newest",
        text: str = "",
        limit: int = 0,
        tokens: bool = False,
    ) -> AsyncIterator[WholeSample]:
        """Yields recorded samples; :meth:`AsyncClient.export_samples` has more filters.

        Args:
            step: Step that trained the samples; for an evaluation, its weight version.
            split: ``train`` for training samples, ``heldout`` for samples of evaluations.
            order_by: Newest first, or highest or lowest reward first.
            text: Substring of the prompt or of the response.
            limit: Max number of samples; 0 for all.
            tokens: True to include the tokens of the responses.
        """
        return self._client.export_samples(
            self.id,
            step=step,
            split=split,
            order_by=order_by,
            text=text,
            limit=limit,
            tokens=tokens,
        )

    async def sample(self, sample_id: str) -> WholeSample:
        """Returns one recorded sample with its turns and tokens."""
        return await self._client.get_sample(self.id, sample_id=sample_id)

    def logs(self, *, component: str = "", tail_lines: int = 100) -> AsyncIterator[LogLine]:
        """Yields the last lines of the workers' logs."""
        return self._client.read_logs(self.id, component=component, tail_lines=tail_lines)

    async def checkpoints(self) -> Sequence[CheckpointView]:
        """Returns the run's checkpoints, newest first."""
        return (await self._client.list_checkpoints(self.id)).items

    async def pause(self, *, checkpoint: bool = True) -> None:
        """Finishes the current step, saves a checkpoint if requested, and stops the workers."""
        self.view = await self._client.pause_run(self.id, checkpoint=checkpoint)

    async def resume(self) -> None:
        """Queues the paused run again; it continues from its checkpoint."""
        self.view = await self._client.resume_run(self.id)

    async def cancel(self, *, grace_seconds: float = 0.0, save_checkpoint: bool = False) -> None:
        """Cancels the run; it may take ``grace_seconds`` to finish its step."""
        self.view = await self._client.cancel_run(
            self.id, grace_seconds=grace_seconds, save_checkpoint=save_checkpoint
        )

    async def set(
        self,
        changes: Mapping[str, Any],
        *,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Changes keys of the specification while the run trains.

        Args:
            changes: Keys with new values, nested as in the specification.
            priority: New position in the queue.
            labels: All labels of the run from now on.

        Raises:
            ApiError: If a key cannot change during a run, with the keys that can.
        """
        revision = (await self.refresh()).revision
        self.view = await self._client.update_run(
            self.id,
            if_match=f'"{revision}"',
            spec=dict(changes),
            priority=priority,
            labels=None if labels is None else dict(labels),
        )

    async def fork(
        self, overrides: Mapping[str, Any], *, checkpoint_id: str = "", name: str = ""
    ) -> "AsyncRun":
        """Starts a new run from a checkpoint of this run, by default its newest one.

        Without a name, the new run has that of this run, or a similar one while this run has not ended.
        """
        forked = await self._client.fork_run(
            self.id, checkpoint_id=checkpoint_id, name=name, overrides=dict(overrides)
        )
        return AsyncRun(self._client, forked)
