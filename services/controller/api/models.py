"""What the API takes and answers, as typed values: the same for its two faces and its client."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, WithJsonSchema

from services.controller.api.roles import Role
from services.controller.run.conditions import ConditionStatus, ConditionType
from services.controller.run.run_state import Desired

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


class RunError(BaseModel):
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


class ConditionView(BaseModel):
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


class RunView(BaseModel):
    """A run as clients see it."""

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
    spec: dict[str, Any]
    spec_digest: str
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


class RunPage(BaseModel):
    """A page of runs, newest first."""

    items: list[RunView]
    next_page_token: str


class ValidatedView(BaseModel):
    """A specification that may be submitted."""

    spec: dict[str, Any]
    """With every default written out."""
    spec_digest: str


class EventView(BaseModel):
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


class RunPatch(BaseModel):
    """What may change; parts that are not sent stay as they are."""

    model_config = ConfigDict(extra="forbid")

    labels: Labels | None = None
    priority: Priority | None = None
    limits: dict[str, Any] | None = None
    """Keys of ``limits`` in the specification."""
    validation_every: int | None = Field(None, ge=0, le=1 << 31)
    """``validation.every`` from the next step on."""
    checkpoint_every: int | None = Field(None, ge=0, le=1 << 31)
    """``trainer.checkpoint.every`` from the next step on."""
    rollout_replicas: int | None = Field(None, ge=1, le=4096)
    """``rollout.replicas``: more are taken in once they have loaded, fewer at once; the run goes on."""


class SubmitOptions(BaseModel):
    """What is said of a run beside its specification."""

    priority: Priority = 0
    """Runs with a higher one start first."""
    labels: Labels = {}


class PauseOptions(BaseModel):
    """How a run is held."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: StrictBool = True
    """Whether a checkpoint is saved behind the step; otherwise the run goes on from the one before."""


class CancelOptions(BaseModel):
    """How a run is ended."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: float = Field(0.0, ge=0, le=86_400, strict=True)
    """Time in which the run may finish its step; then it is ended by force. 0 ends it at once."""
    save_checkpoint: StrictBool = False
    """Whether a checkpoint is saved behind that step."""


class ForkRequest(BaseModel):
    """A new run that goes on from a checkpoint of another one."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_id: str = Field("", max_length=40)
    """The checkpoint; empty takes the newest one."""
    name: str = Field("", pattern="^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")
    """Name of the new run; empty keeps that of the old one."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the specification that differ, such as ``{"trainer": {"steps": 200}}``."""

    @property
    def needed_role(self) -> Role:
        """Who may ask for it: code that comes with a model needs an admin."""
        model = self.overrides.get("model")
        trusts = isinstance(model, dict) and "trust_remote_code" in model
        return "admin" if trusts else "operator"
