"""What the API takes and answers, as typed values: the same for its two faces and its client."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    WithJsonSchema,
)

from services.common.runspec.loader import shape_problem
from services.controller.rules.conditions import ConditionStatus, ConditionType
from services.controller.rules.run_state import Desired

Role = Literal["viewer", "operator", "admin"]
"""Roles of those who use the API."""
_RANK: dict[Role, int] = {"viewer": 0, "operator": 1, "admin": 2}

_KEY = "[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?"
_LABEL = f"^{_KEY}$"
LabelPair = Annotated[str, Field(pattern=f"^{_KEY}=.{{0,63}}$")]
"""``key=value``."""
Labels = Annotated[
    dict[Annotated[str, Field(pattern=_LABEL)], Annotated[str, Field(max_length=63)]],
    Field(max_length=32),
    # What pydantic writes for the keys alone would allow others beside them.
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 32,
            "propertyNames": {"pattern": _LABEL},
            "additionalProperties": {"type": "string", "maxLength": 63},
        }
    ),
]


Priority = Annotated[int, Field(ge=-1000, le=1000)]


def _bounded(document: dict[str, Any]) -> dict[str, Any]:
    if problem := shape_problem(document):
        raise ValueError(f"the document {problem}")
    return document


Document = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""JSON whose depth and lengths are bounded."""


class Body(BaseModel):
    """What is sent; a key that is not known is refused."""

    model_config = ConfigDict(extra="forbid")


class View(BaseModel):
    """What is answered; made from the record whose fields it has."""

    model_config = ConfigDict(from_attributes=True)


class RunError(View):
    """Why a run failed."""

    code: str
    """Stable; for programs."""
    category: Literal["USER", "SYSTEM", "INFRA"]
    """Who can do something: whoever wrote the specification, we, or whoever runs the machines."""
    recoverable: bool
    """Whether the same specification may succeed when it is submitted or forked again."""
    message: str
    component: str
    """What failed: a worker such as ``trainer-0``, or the service that was asked, or ``controller``."""
    trace_id: str
    """Trace of the step that was not finished: in log lines, and with a collector in spans."""


class ConditionView(View):
    """Whether something is true of a run, why, and since when."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    """Stable; for programs."""
    message: str
    observed_generation: int
    """Generation of the specification that this was seen under."""
    last_transition_time: datetime
    """When the status last changed."""


class ListedRun(View):
    """A run in a list, without its specification."""

    id: str
    project: str
    name: str
    desired: Desired
    """What users want of it; ``state`` gets there by itself."""
    state: str
    state_reason: str
    message: str
    priority: int
    labels: dict[str, str]
    created_by: str
    step: int
    weight_version: int
    summary: dict[str, Any]
    spec_digest: str
    target_steps: int
    """Steps that it is to train; 0 while ``data.epochs`` says it and nobody has opened the data."""
    activities: list[str] = []
    """What it is doing now: TRAINING, SYNCING_WEIGHTS, VALIDATING, CHECKPOINTING, FINALIZING."""
    conditions: list[ConditionView] = []
    error: RunError | None = None
    """Why it failed, if it did."""
    create_time: datetime
    update_time: datetime
    start_time: datetime | None = None
    """When it first left the queue."""
    finish_time: datetime | None = None
    """When it ended."""
    revision: int
    generation: int
    """Grows with each change of ``spec``."""


class RunView(ListedRun):
    """A run as clients see it."""

    spec: dict[str, Any]


class RunPage(BaseModel):
    """A page of runs, newest first."""

    items: list[ListedRun]
    next_page_token: str


class ValidatedView(BaseModel):
    """A specification that may be submitted."""

    spec: dict[str, Any]
    """With every default written out."""
    spec_digest: str


class EventView(View):
    """Something that happened to a run."""

    run_id: str
    seq: int
    time: datetime
    type: str
    message: str
    data: dict[str, Any]
    actor: str


class EventPage(BaseModel):
    """Events of a run, in order."""

    items: list[EventView]


class WorkerView(View):
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


class CheckpointView(View):
    """A checkpoint of a run."""

    id: str = Field(validation_alias=AliasChoices("id", "checkpoint_id"))
    step: int
    weight_version: int
    path: str
    state: str
    message: str
    size_bytes: int
    """Of the trainer's folder."""
    create_time: datetime


class LogLine(BaseModel):
    """A line of a worker's log."""

    component: str
    """The worker, such as ``rollout-0``."""
    line: str


class CheckpointPage(BaseModel):
    """Checkpoints of a run, newest first."""

    items: list[CheckpointView]


class Metric(BaseModel):
    """A number of each step."""

    name: str
    values: list[float | None]
    """One for each step; None where it has no such number."""


class MetricHistogram(BaseModel):
    """How the samples of each step spread."""

    name: str
    bounds: list[int]
    """Upper bounds of the buckets, which belong to them."""
    counts: list[list[int]]
    """Samples in each bucket, for each step."""


class MetricPage(BaseModel):
    """Numbers of a run's steps, as columns."""

    steps: list[int]
    """In order."""
    times: list[datetime]
    """When each of them was trained."""
    items: list[Metric]
    """By name."""
    histograms: list[MetricHistogram]


class GroupView(View):
    """A group of samples and what became of it. Texts are not part of it."""

    group_id: str
    row: int
    attempt: int
    state: str
    step: int | None = None
    oldest_version: int | None = None
    """Version that sampled its oldest token, masked or not."""
    staleness: int | None = None
    """Versions that the trainer was ahead of ``oldest_version``; tokens over ``algorithm.max_staleness`` were
    masked."""
    reason: str = ""


class GroupPage(BaseModel):
    """Groups of a run by sequence."""

    items: list[GroupView]


class QuotaView(View):
    """What a project may use, and uses."""

    project: str
    max_active_runs: int
    max_queued_runs: int
    max_gpus: int
    """GPUs that its active runs may take together; 0 for no bound."""
    max_transferqueue_bytes: int
    """Sum of ``transferqueue.quota_bytes`` of its active runs; 0 for no bound."""
    max_checkpoint_bytes: int
    """Size of the checkpoints of its runs above which none starts; 0 for no bound."""
    max_requests_per_second: int
    """Requests that each controller answers, twice as many at once; 0 for no bound."""
    max_event_streams: int
    """Streams of events and logs that are open at each controller; 0 for no bound."""
    active_runs: int
    queued_runs: int
    gpus: int
    transferqueue_bytes: int
    checkpoint_bytes: int
    event_streams: int
    """Open at the controller that answers."""


class VersionView(BaseModel):
    """The release that answers."""

    version: str


class RunPatch(Body):
    """What may change; parts that are not sent stay as they are."""

    labels: Labels | None = None
    priority: Priority | None = None
    limits: Document | None = None
    """Keys of ``limits`` in the specification."""
    validation_every: int | None = Field(None, ge=0, le=1 << 31)
    """``validation.every`` from the next step on."""
    checkpoint_every: int | None = Field(None, ge=0, le=1 << 31)
    """``trainer.checkpoint.every`` from the next step on."""
    rollout_replicas: int | None = Field(None, ge=1, le=4096)
    """``rollout.replicas``: more are taken in once they have loaded, fewer at once; the run goes on."""


class PauseOptions(Body):
    """How a run is held."""

    checkpoint: StrictBool = True
    """Whether a checkpoint is saved behind the step; otherwise the run goes on from the one before."""


class CancelOptions(Body):
    """How a run is ended."""

    grace_seconds: float = Field(0.0, ge=0, le=86_400, strict=True)
    """Time in which the run may finish its step; then it is ended by force. 0 ends it at once."""
    save_checkpoint: StrictBool = False
    """Whether a checkpoint is saved behind that step."""


class TrackerReport(Body):
    """How writing a run to a tracker goes."""

    is_writing: StrictBool
    """Whether it is written to; False once it has failed, which is then tried again."""
    message: str = Field("", max_length=2000, pattern=r"^[^\x00]*$")
    """Why not, for a person."""


class ForkRequest(Body):
    """A new run that goes on from a checkpoint of another one."""

    checkpoint_id: str = Field("", max_length=40)
    """The checkpoint; empty takes the newest one."""
    name: str = Field("", pattern="^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")
    """Name of the new run; empty keeps that of the old one."""
    overrides: Document = Field(default_factory=dict)
    """Keys of the specification that differ, such as ``{"trainer": {"steps": 200}}``."""


def covers(role: Role, needed: Role) -> bool:
    """Whether whoever has a role may do what needs another one."""
    return _RANK[role] >= _RANK[needed]
