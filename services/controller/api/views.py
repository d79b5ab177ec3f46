"""What the REST API answers, as typed values."""

from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from pydantic import BaseModel

from services.common.spec.loader import parse_spec
from services.controller.membership import Worker
from services.controller.run.checkpoints import Checkpoint
from services.controller.store.records import Event, Run


class RunView(BaseModel):
    """A run as clients see it."""

    id: str
    project: str
    name: str
    state: str
    state_reason: str
    message: str
    priority: int
    labels: dict[str, str]
    created_by: str
    step: int
    weight_version: int
    summary: dict[str, Any]
    spec: dict[str, Any]
    spec_digest: str
    create_time: datetime
    update_time: datetime
    revision: int


class RunPage(BaseModel):
    """A page of runs, newest first."""

    items: list[RunView]
    next_page_token: str


class EventView(BaseModel):
    """Something that happened to a run."""

    seq: int
    time: datetime
    type: str
    message: str
    data: dict[str, Any]
    actor: str


class EventPage(BaseModel):
    """Events of a run, in order."""

    items: list[EventView]


class WorkerView(BaseModel):
    """A worker of a run."""

    worker_id: str
    role: str
    state: str
    activity: str
    weight_version: int
    gauges: dict[str, float]


class Topology(BaseModel):
    """Registered workers of a run, by name."""

    items: list[WorkerView]


class CheckpointView(BaseModel):
    """A checkpoint of a run."""

    id: str
    step: int
    weight_version: int
    path: str
    state: str
    message: str
    create_time: datetime


class CheckpointPage(BaseModel):
    """Checkpoints of a run, newest first."""

    items: list[CheckpointView]


class MetricPoint(BaseModel):
    """A number of one step."""

    step: int
    time: datetime
    name: str
    value: float


class MetricPage(BaseModel):
    """Numbers of a run's steps, in order."""

    items: list[MetricPoint]


class SampleView(BaseModel):
    """A group of samples and what became of it. Texts are not part of it."""

    group_id: str
    row: int
    attempt: int
    state: str
    step: int | None = None
    oldest_version: int | None = None
    staleness: int | None = None
    reason: str = ""


class SamplePage(BaseModel):
    """Groups of a run by sequence."""

    items: list[SampleView]


class QuotaView(BaseModel):
    """What a project may use, and uses."""

    project: str
    max_active_runs: int
    max_queued_runs: int
    active_runs: int
    queued_runs: int


class VersionView(BaseModel):
    """The release that answers."""

    version: str


def view_run(run: Run, response: Response | None = None) -> RunView:
    """A run; its revision becomes the answer's ETag."""
    if response is not None:
        response.headers["ETag"] = f'"{run.revision}"'
    return RunView(
        id=run.run_id,
        project=run.project,
        name=run.name,
        state=run.state.value,
        state_reason=run.state_reason,
        message=run.message,
        priority=run.priority,
        labels=dict(run.labels),
        created_by=run.created_by,
        step=run.step,
        weight_version=run.weight_version,
        summary=dict(run.summary),
        spec=parse_spec(run.spec_json).model_dump(mode="json"),
        spec_digest=run.spec_digest,
        create_time=moment(run.create_time),
        update_time=moment(run.update_time),
        revision=run.revision,
    )


def view_event(event: Event) -> EventView:
    """An event."""
    return EventView(
        seq=event.seq,
        time=moment(event.time),
        type=event.type,
        message=event.message,
        data=dict(event.data),
        actor=event.actor,
    )


def view_worker(worker: Worker) -> WorkerView:
    """A worker."""
    return WorkerView(
        worker_id=worker.worker_id,
        role=worker.role,
        state=worker.state,
        activity=worker.activity,
        weight_version=worker.weight_version,
        gauges=worker.gauges,
    )


def view_checkpoint(checkpoint: Checkpoint) -> CheckpointView:
    """A checkpoint."""
    return CheckpointView(
        id=checkpoint.checkpoint_id,
        step=checkpoint.step,
        weight_version=checkpoint.weight_version,
        path=checkpoint.path,
        state=checkpoint.state,
        message=checkpoint.message,
        create_time=moment(checkpoint.create_time),
    )


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as UTC."""
    return datetime.fromtimestamp(seconds, UTC)
