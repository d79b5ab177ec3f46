"""The client: everything that a controller can be asked, and runs as objects.

Written by deploy/reference/client.py: `make docs` keeps it current.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from slipstream_client.local import find_token, find_url
from slipstream_client.models import (
    CheckpointView,
    EventView,
    LogLine,
    RunView,
    ValidatedView,
    WholeSample,
)
from slipstream_client.problems import ApiError, RunFailedError
from slipstream_client.specification import read_spec
from slipstream_client.sync_operations import Operations
from slipstream_client.sync_transport import Transport

_DAY_S = 86_400.0
_EVENTS_A_PAGE = 1000


class Client(Operations):
    """A controller, asked by one caller.

    Args:
        url: Such as ``http://127.0.0.1:8700``. Default: ``SLIPSTREAM_URL``, or what runs on this machine.
        token: API token. Default: ``SLIPSTREAM_TOKEN``, or that of the controller that was started here.
        patience_s: How long a controller that does not answer is asked again: one that is started again.
        http: What sends requests, where it must be another client than one without a proxy.

    Raises:
        ApiError: If no controller is given, and none or several are found.
    """

    def __init__(
        self,
        url: str = "",
        *,
        token: str = "",
        patience_s: float = 0.0,
        http: httpx.Client | None = None,
    ) -> None:
        found = find_url(url)
        super().__init__(
            Transport(found, token=token or find_token(found), patience_s=patience_s, http=http)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._transport.close()

    def submit(
        self,
        spec: str | Path | Mapping[str, Any],
        *,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> "Run":
        """Submit a run; those with a higher priority start first.

        Args:
            spec: A YAML or JSON file, or a document.
            priority: From -1000 to 1000.
            labels: What it is found by.

        Raises:
            ApiError: If it is refused; the message names all that is wrong with it.
        """
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        run = self.create_run(read_spec(spec), priority=priority, label=pairs)
        assert isinstance(run, RunView)
        return Run(self, run)

    def validate(self, spec: str | Path | Mapping[str, Any]) -> ValidatedView:
        """Have a specification checked, with every default written out.

        Raises:
            ApiError: If it would be refused; the message names all that is wrong with it.
        """
        checked = self.create_run(read_spec(spec), validate_only=True)
        assert isinstance(checked, ValidatedView)
        return checked

    def run(self, name_or_id: str) -> "Run":
        """A run by its id, or the newest one of a name.

        Raises:
            ApiError: If there is none.
        """
        if name_or_id.startswith("run_"):
            return Run(self, self.get_run(name_or_id))
        found = (self.list_runs(name=name_or_id, page_size=1)).items
        if not found:
            raise ApiError(f"there is no run with the name {name_or_id!r}", code="not_found")
        return Run(self, self.get_run(found[0].id))

    def runs(self, *, name: str = "", label: str = "") -> Iterator["Run"]:
        """Runs of the project, newest first."""
        page_token = ""
        while True:
            page = self.list_runs(name=name, label=label, page_token=page_token)
            for listed in page.items:
                yield Run(self, self.get_run(listed.id))
            page_token = page.next_page_token
            if not page_token:
                return

    def page_link(self) -> str:
        """A link to the run page that signs one browser in, once, as this caller."""
        return self._transport.page_link()

    def watch(
        self, run_id: str, *, after_seq: int = 0, timeout_s: float = _DAY_S
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events of a run as they come: ``(type, event)``; the last one is ``("end", run)``.

        A controller that is started again is found again, and no event is missed or told twice.

        Raises:
            ApiError: If the request is refused, or nobody answers for a minute.
            TimeoutError: If the run takes longer than ``timeout_s`` to end.
        """
        return self._transport.watch(run_id, after_seq=after_seq, timeout_s=timeout_s)


class Run:
    """A run, as it was when it was last asked for.

    Attributes:
        view: All that the controller said of it then.
    """

    def __init__(self, client: Client, view: RunView) -> None:
        self._client = client
        self.view = view

    def __repr__(self) -> str:
        return f"<run {self.view.name} {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.view.id

    @property
    def state(self) -> str:
        """Its state, such as RUNNING."""
        return self.view.state

    def refresh(self) -> RunView:
        """Ask for it again."""
        self.view = self._client.get_run(self.id)
        return self.view

    def events(self, *types: str, after_seq: int = 0) -> Iterator[EventView]:
        """Its events so far, in order; only those of some types, if any are named."""
        while True:
            page = (
                self._client.list_events(
                    self.id, type=types, after_seq=after_seq, limit=_EVENTS_A_PAGE
                )
            ).items
            for event in page:
                yield event
            if len(page) < _EVENTS_A_PAGE:
                return
            after_seq = page[-1].seq

    def follow(self, *, after_seq: int = 0, timeout_s: float = _DAY_S) -> Iterator[EventView]:
        """Its events in order, those that are there and those that come, until it has ended.

        Raises:
            TimeoutError: If that takes longer than ``timeout_s``.
        """
        for kind, data in self._client.watch(self.id, after_seq=after_seq, timeout_s=timeout_s):
            if kind == "end":
                self.view = RunView.model_validate(data)
            elif kind != "overflow":
                yield EventView.model_validate(data)

    def wait(self, *, timeout_s: float = _DAY_S) -> RunView:
        """Wait until it has succeeded.

        Raises:
            RunFailedError: If it failed or was cancelled.
            TimeoutError: If it takes longer than ``timeout_s``.
        """
        seen = (self._client.list_events(self.id, order_by="-seq", limit=1)).items
        after_seq = seen[0].seq if seen else 0
        for _ in self.follow(after_seq=after_seq, timeout_s=timeout_s):
            pass
        if self.state != "SUCCEEDED":
            raise RunFailedError(f"{self.view.name} {self.state}: {self.view.message}")
        return self.view

    def metrics(self, *names: str, from_step: int = 0, to_step: int = 0) -> dict[str, list[Any]]:
        """Numbers of its steps as columns, ``step`` among them; all of them if none is named.

        Of more than 2,000 steps it has every n-th.
        """
        page = self._client.list_metrics(self.id, name=names, from_step=from_step, to_step=to_step)
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
    ) -> Iterator[WholeSample]:
        """What its model wrote, as far as it is kept; ``export_samples`` of the client has all filters.

        Args:
            step: Step that trained them; of an evaluation, the weight version.
            split: Those for training, or those of evaluations.
            order_by: By time or by reward.
            text: Part of the prompt or of the response.
            limit: Most samples; 0 for all.
            tokens: Whether their tokens are part of it.
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

    def sample(self, sample_id: str) -> WholeSample:
        """One kept sample with its turns and tokens."""
        return self._client.get_sample(self.id, sample_id=sample_id)

    def logs(self, *, component: str = "", tail_lines: int = 100) -> Iterator[LogLine]:
        """The ends of its workers' logs."""
        return self._client.read_logs(self.id, component=component, tail_lines=tail_lines)

    def checkpoints(self) -> Sequence[CheckpointView]:
        """Its checkpoints, newest first."""
        return (self._client.list_checkpoints(self.id)).items

    def pause(self, *, checkpoint: bool = True) -> None:
        """Finish the current step, save a checkpoint if it is wanted, and stop the workers."""
        self.view = self._client.pause_run(self.id, checkpoint=checkpoint)

    def resume(self) -> None:
        """Let it go on from its checkpoint."""
        self.view = self._client.resume_run(self.id)

    def cancel(self, *, grace_seconds: float = 0.0, save_checkpoint: bool = False) -> None:
        """End it; with a grace it may finish its step."""
        self.view = self._client.cancel_run(
            self.id, grace_seconds=grace_seconds, save_checkpoint=save_checkpoint
        )

    def fork(
        self, overrides: Mapping[str, Any], *, checkpoint_id: str = "", name: str = ""
    ) -> "Run":
        """A new run that goes on from a checkpoint of this one, the newest unless another is named."""
        forked = self._client.fork_run(
            self.id, checkpoint_id=checkpoint_id, name=name, overrides=dict(overrides)
        )
        return Run(self._client, forked)
