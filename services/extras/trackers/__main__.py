"""Writes one run to one tracker: ``python -m services.extras.trackers JOB``.

It is a separate process because trackers hang, leak and end their process. Unread events stay in
the controller's database, so they do not accumulate here, and the next process continues after the
cursor.
"""

import asyncio
import fcntl
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from typing import Any

from services.cli.api import Api, ApiError
from services.cli.controller_address import CliSettings
from services.common.callables import load_callable
from services.common.lifetime import wait_for_shutdown
from services.common.runspec.trackers import TRACKERS, TrackerSpec
from services.common.task_group import until_first
from services.controller.api.operations import ListSamples, ReportTracker
from services.controller.schemas import RunView, SampleView
from services.extras.trackers.tracker import (
    GONE,
    Cursor,
    EventPosition,
    OpenTracker,
    Split,
    Tracker,
    TrackerJob,
    cursor_path,
    row_of,
)

_EXCERPT = 2000
_RETRY_S = 30.0


class Writer:
    """Writes a run's events to a tracker."""

    def __init__(self, job: TrackerJob, api: Api, run: RunView) -> None:
        self._job = job
        self._api = api
        self._run = run
        self._spec = _spec_of(run, job.kind)
        self._path = cursor_path(job.folder, job.run_id, job.kind)
        self._cursor = Cursor.read(self._path)
        self._is_failing = job.is_failing
        # Position of the samples to write next. The trainer reports their results after the event of its
        # step, so they are read at the next step or evaluation.
        self._due: tuple[EventPosition, Split] | None = None

    async def write(self) -> None:
        """Writes past and future events until the run ends or pauses."""
        if self._cursor.is_done:
            return
        open_tracker: OpenTracker = load_callable(TRACKERS[self._spec.kind].opens)
        with self._deadline():
            tracker = open_tracker(self._run, self._spec, self._job.folder)
        state = ""
        try:
            state = await self._follow(tracker)
        finally:
            with self._deadline():
                tracker.close(state)
        if state:
            Cursor(seq=self._cursor.seq, is_done=True).write(self._path)

    async def _follow(self, tracker: Tracker) -> str:
        """Returns the state that the run ended in; empty if it is only paused."""
        async for kind, event in self._events(max(self._cursor.seq - tracker.rereads, 0)):
            if kind in ("StepCommitted", "Validated", "end"):
                await self._write_due_samples(tracker)
            if kind == "end":
                return str(event["state"])
            self._take(tracker, kind, event)
            if self._is_failing:
                await self._api.call(_report(self._job, is_writing=True))
                self._is_failing = False
            if event["seq"] <= self._cursor.seq:
                continue
            self._cursor = Cursor(seq=event["seq"])
            self._cursor.write(self._path)
            if kind == "StateChanged" and event["data"]["to"] == "PAUSED":
                return ""
        return ""

    async def _events(self, after_seq: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields events of the run; if some were deleted, from the oldest that exists."""
        try:
            async for kind, event in self._api.watch(self._run.id, after_seq=after_seq):
                yield kind, event
        except ApiError as error:
            if error.status != HTTPStatus.GONE:
                raise
            async for kind, event in self._api.watch(self._run.id):
                yield kind, event

    def _take(self, tracker: Tracker, kind: str, event: Mapping[str, Any]) -> None:
        data, seconds = event["data"], datetime.fromisoformat(event["time"]).timestamp()
        if kind == "StepCommitted":
            moment = EventPosition(seq=event["seq"], step=data["step"], time=seconds)
            numbers = {
                name: float(value)
                for name, value in data.items()
                if name != "step" and isinstance(value, int | float)
            }
            every = self._spec.samples_every
            if every and moment.step % every == 0:
                self._due = moment, "train"
        elif kind == "Validated" and data["num_samples"]:
            moment = EventPosition(seq=event["seq"], step=data["version"], time=seconds)
            numbers = dict(_scores(data))
            if self._spec.samples_every:
                self._due = moment, "heldout"
        else:
            return
        with self._deadline():
            tracker.numbers(moment, numbers)

    async def _write_due_samples(self, tracker: Tracker) -> None:
        if self._due is None:
            return
        moment, split = self._due
        maximum = self._spec.samples
        due_samples: dict[str, SampleView] = {}
        for ranking, number in (("best", (maximum + 1) // 2), ("worst", maximum // 2)):
            operation = ListSamples(
                run_id=self._run.id,
                split=split,
                step=moment.step,
                order_by=ranking,
                page_size=max(number, 1),
                excerpt=_EXCERPT,
            )
            with suppress(ApiError):  # without the transferqueue, metrics are still written
                due_samples |= {
                    sample.id: sample for sample in (await self._api.call(operation)).items[:number]
                }
        if due_samples:
            with self._deadline():
                tracker.samples(moment, split, [row_of(sample) for sample in due_samples.values()])
            self._due = None

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """Ends this process if a call of the tracker takes too long.

        The kernel's timer works even if everything else hangs.
        """
        signal.setitimer(signal.ITIMER_REAL, self._job.deadline_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _spec_of(run: RunView, kind: str) -> TrackerSpec:
    """Returns a run's settings of a tracker; defaults if the run does not name it."""
    matching = [tracker for tracker in run.spec.get("trackers", ()) if tracker["kind"] == kind]
    return TrackerSpec.model_validate(matching[0] if matching else {"kind": kind})


def _scores(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the scores of an evaluation, and of each set and source; a single one has no name prefix."""
    sections = [("heldout", {name: data[name] for name in ("greedy", "sampled")})]
    for kind in ("by_set", "by_source"):
        sets = data.get(kind, {})
        sections += [
            ("heldout" if len(sets) == 1 else f"heldout/{name}", sets[name]) for name in sets
        ]
    for prefix, scores in sections:
        for name, score in scores.items():
            if score is not None:
                yield f"{prefix}/{name}", float(score)


def _report(job: TrackerJob, *, is_writing: bool, message: str = "") -> ReportTracker:
    return ReportTracker(
        run_id=job.run_id, tracker=job.kind, is_writing=is_writing, message=message
    )


async def _write(job: TrackerJob) -> None:
    async with Api(job.url, token=CliSettings().token, retry_s=_RETRY_S) as api:
        run = await api.get(job.run_id)
        with _alone(job):
            await Writer(job, api, run).write()


@contextmanager
def _alone(job: TrackerJob) -> Iterator[None]:
    """Locks a run and tracker; another process may still be ending with its last call."""
    path = cursor_path(job.folder, job.run_id, job.kind).with_suffix(".lock")
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    job, code = TrackerJob.model_validate_json(sys.argv[1]), 0
    try:
        asyncio.run(until_first(_write(job), wait_for_shutdown(stop_on_stdin_eof=True)))
    except* ApiError as group:
        code = GONE
        sys.stderr.write(f"{group.exceptions[0]}\n")
    except* Exception as group:  # noqa: BLE001 -- trackers may raise any exception
        code = 1
        traceback.print_exception(group)
        error = group.exceptions[0]
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
