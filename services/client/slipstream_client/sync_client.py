"""Synchronous client of a controller, and runs as objects: a thin wrapper of the asynchronous ones."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from slipstream_client.async_client import AsyncClient, AsyncRun
from slipstream_client.blocking import blocking, items_of, iterating, wait_for, wrapped
from slipstream_client.models import RunView


class Client:
    """Client of one controller, with the operations of the API as methods.

    Arguments and errors are those of :class:`AsyncClient`. It also works where an event loop runs, as in a
    notebook, and in several threads; a process that is forked needs its own.
    """

    def __init__(
        self,
        url: str = "",
        *,
        token: str = "",
        retry_s: float = 0.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._wrapped = AsyncClient(url, token=token, retry_s=retry_s, http=http)
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> "Run":
        """Submits a run like :meth:`AsyncClient.submit`."""
        return Run(wait_for(wrapped(self).submit(spec, priority=priority, labels=labels)))

    def run(self, name_or_id: str) -> "Run":
        """Returns a run like :meth:`AsyncClient.run`."""
        return Run(wait_for(wrapped(self).run(name_or_id)))

    def runs(self, *, name: str = "", label: str = "") -> Iterator["Run"]:
        """Yields runs like :meth:`AsyncClient.runs`."""
        return map(Run, items_of(wrapped(self).runs(name=name, label=label)))

    close = blocking(AsyncClient.aclose)
    validate = blocking(AsyncClient.validate)
    page_link = blocking(AsyncClient.page_link)
    watch = iterating(AsyncClient.watch)

    list_fleets = blocking(AsyncClient.list_fleets)
    get_fleet = blocking(AsyncClient.get_fleet)
    get_quota = blocking(AsyncClient.get_quota)
    list_runs = blocking(AsyncClient.list_runs)
    create_run = blocking(AsyncClient.create_run)
    delete_run = blocking(AsyncClient.delete_run)
    get_run = blocking(AsyncClient.get_run)
    update_run = blocking(AsyncClient.update_run)
    cancel_run = blocking(AsyncClient.cancel_run)
    save_run = blocking(AsyncClient.save_run)
    list_checkpoints = blocking(AsyncClient.list_checkpoints)
    delete_checkpoint = blocking(AsyncClient.delete_checkpoint)
    get_checkpoint = blocking(AsyncClient.get_checkpoint)
    get_defaults = blocking(AsyncClient.get_defaults)
    list_events = blocking(AsyncClient.list_events)
    fork_run = blocking(AsyncClient.fork_run)
    list_groups = blocking(AsyncClient.list_groups)
    read_logs = iterating(AsyncClient.read_logs)
    list_metrics = blocking(AsyncClient.list_metrics)
    pause_run = blocking(AsyncClient.pause_run)
    resume_run = blocking(AsyncClient.resume_run)
    list_samples = blocking(AsyncClient.list_samples)
    export_samples = iterating(AsyncClient.export_samples)
    get_sample = blocking(AsyncClient.get_sample)
    get_topology = blocking(AsyncClient.get_topology)
    report_tracker = blocking(AsyncClient.report_tracker)
    evaluate_run = blocking(AsyncClient.evaluate_run)
    get_version = blocking(AsyncClient.get_version)


class Run:
    """A run, as the controller described it in its last answer."""

    def __init__(self, run: AsyncRun) -> None:
        self._wrapped = run
        self._process = os.getpid()

    def __repr__(self) -> str:
        return repr(self._wrapped)

    @property
    def view(self) -> RunView:
        """The controller's answer to the last request."""
        return self._wrapped.view

    @property
    def id(self) -> str:
        """Id of the run."""
        return self._wrapped.id

    @property
    def state(self) -> str:
        """State of the run, such as RUNNING."""
        return self._wrapped.state

    def fork(
        self, overrides: Mapping[str, Any], *, checkpoint_id: str = "", name: str = ""
    ) -> "Run":
        """Starts a new run from a checkpoint of this run like :meth:`AsyncRun.fork`."""
        return Run(wait_for(wrapped(self).fork(overrides, checkpoint_id=checkpoint_id, name=name)))

    refresh = blocking(AsyncRun.refresh)
    events = iterating(AsyncRun.events)
    follow = iterating(AsyncRun.follow)
    wait = blocking(AsyncRun.wait)
    metrics = blocking(AsyncRun.metrics)
    samples = iterating(AsyncRun.samples)
    sample = blocking(AsyncRun.sample)
    logs = iterating(AsyncRun.logs)
    checkpoints = blocking(AsyncRun.checkpoints)
    pause = blocking(AsyncRun.pause)
    resume = blocking(AsyncRun.resume)
    cancel = blocking(AsyncRun.cancel)
    set = blocking(AsyncRun.set)
