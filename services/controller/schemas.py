"""Request and response models of the API, shared by REST, gRPC and the client."""

import json
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StrictInt,
    WithJsonSchema,
)

from services.common.runspec.loader import shape_problem
from services.controller.rules.run_state import ConditionStatus, ConditionType, Desired

Role = Literal["viewer", "operator", "admin"]
"""Roles of API users, in ascending order of permission."""
_RANK: dict[Role, int] = {"viewer": 0, "operator": 1, "admin": 2}

_KEY = "[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?"
_LABEL = f"^{_KEY}$"
# Without control characters: PostgreSQL stores no zero byte, and terminals interpret others.
_VALUE = r"[^\x00-\x1f\x7f]{0,63}"
LabelPair = Annotated[str, Field(pattern=f"^{_KEY}={_VALUE}$")]
"""``key=value``."""
PLAIN = r"^[^\x00-\x1f\x7f]*$"
"""Pattern of texts that filter lists."""
Labels = Annotated[
    dict[Annotated[str, Field(pattern=_LABEL)], Annotated[str, Field(pattern=f"^{_VALUE}$")]],
    Field(max_length=32),
    # The schema that pydantic derives from the key type also allows other keys.
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 32,
            "propertyNames": {"pattern": _LABEL},
            "additionalProperties": {"type": "string", "pattern": f"^{_VALUE}$"},
        }
    ),
]


Priority = Annotated[int, Field(ge=-1000, le=1000)]


def _bounded(document: dict[str, Any]) -> dict[str, Any]:
    if problem := shape_problem(document):
        raise ValueError(f"the document {problem}")
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the document must have text of Unicode characters only") from error
    return document


Document = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""JSON object with bounded depth and lengths."""


class Body(BaseModel):
    """Base of request bodies; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class View(BaseModel):
    """Base of responses; built from the record with fields of the same names."""

    model_config = ConfigDict(from_attributes=True)


class RunError(View):
    """Reason for which a run failed."""

    code: str
    """Stable code for programs."""
    category: Literal["USER", "SYSTEM", "INFRA"]
    """Party that can fix it: the author of the specification (USER), the developers of Slipstream
    (SYSTEM) or the operators of the machines (INFRA)."""
    recoverable: bool
    """True if the same specification may succeed when it is submitted or forked again."""
    message: str
    component: str
    """The part that failed: a worker such as ``trainer-0``, the service that was called, or
    ``controller``."""
    trace_id: str
    """Trace of the unfinished step; appears in log lines and, with a trace collector, in spans."""


class ConditionView(View):
    """Condition of a run: its status, the reason and the time of its last change."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    """Stable code for programs."""
    message: str
    observed_generation: int
    """Generation of the specification under which the condition was observed."""
    last_transition_time: datetime
    """Time at which the status last changed."""


class ListedRun(View):
    """Run as listed, without its specification."""

    id: str
    project: str
    name: str
    desired: Desired
    """State that users want; the controller brings ``state`` there."""
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
    """Number of steps to train; 0 while it depends on ``data.epochs`` and no worker has opened the
    data."""
    activities: list[str] = []
    """Current activities: TRAINING, SYNCING_WEIGHTS, VALIDATING, CHECKPOINTING, FINALIZING."""
    conditions: list[ConditionView] = []
    error: RunError | None = None
    """Reason of the failure; None if the run has not failed."""
    create_time: datetime
    update_time: datetime
    start_time: datetime | None = None
    """Time at which the run first left the queue."""
    finish_time: datetime | None = None
    """Time at which the run ended."""
    revision: int
    """Number that grows with each change of state, ``spec``, ``labels`` or ``priority``, which ``If-Match``
    compares."""
    generation: int
    """Number that grows with each change of ``spec``."""


class RunView(ListedRun):
    """Run with its specification."""

    spec: dict[str, Any]


class RunPage(BaseModel):
    """Page of runs, newest first."""

    items: list[ListedRun]
    next_page_token: str


class ValidatedView(BaseModel):
    """Valid specification, ready to submit."""

    spec: dict[str, Any]
    """The specification with all defaults filled in."""
    spec_digest: str


class EventView(View):
    """Event of a run."""

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
    """Worker of a run."""

    worker_id: str
    role: str
    state: str
    activity: str
    weight_version: int
    gauges: dict[str, float]


class Topology(BaseModel):
    """Registered workers of a run, ordered by name."""

    items: list[WorkerView]


class CheckpointView(View):
    """Checkpoint of a run."""

    id: str = Field(validation_alias=AliasChoices("id", "checkpoint_id"))
    step: int
    weight_version: int
    path: str
    state: str
    message: str
    size_bytes: int
    """Size of the trainer's checkpoint folder."""
    create_time: datetime


class LogLine(BaseModel):
    """Line of a worker's log."""

    component: str
    """Name of the worker, such as ``rollout-0``."""
    line: str


class CheckpointPage(BaseModel):
    """Checkpoints of a run, newest first."""

    items: list[CheckpointView]


class Metric(BaseModel):
    """One metric over the steps of a run."""

    name: str
    values: list[float | None]
    """One value per step; None for a step without this metric."""


class MetricHistogram(BaseModel):
    """Distribution of one quantity over the samples of each step."""

    name: str
    bounds: list[int]
    """Upper bounds of the buckets, inclusive."""
    counts: list[list[int]]
    """Samples per bucket, one list for each step."""


class MetricPage(BaseModel):
    """Metrics of a run's steps, in columns."""

    steps: list[int]
    """Steps in ascending order."""
    times: list[datetime]
    """Time at which each step was trained."""
    items: list[Metric]
    """Metrics ordered by name."""
    histograms: list[MetricHistogram]


class GroupView(View):
    """Group of samples and its outcome, without texts."""

    group_id: str
    row: int
    attempt: int
    state: str
    step: int | None = None
    oldest_version: int | None = None
    """Weight version that sampled the oldest token, masked or not."""
    staleness: int | None = None
    """Trainer's weight version minus ``oldest_version``; tokens staler than
    ``algorithm.max_staleness`` were masked."""
    reason: str = ""


class GroupPage(BaseModel):
    """Groups of a run, ordered by sequence."""

    items: list[GroupView]


class FleetRunView(View):
    """Use of a server by one of the runs that share it."""

    run_id: str | None
    """None for a run of another project."""
    share: float
    """Weight of the run."""
    weight_version: int | None
    """Version in service; None before the first."""
    adapters: int
    """Versions that the server holds."""
    tokens: int
    """Tokens that the run has sampled on the server."""
    requests: int
    running: int
    waiting: int


class FleetServerView(View):
    """State of a server of a fleet."""

    address: str
    is_healthy: bool = False
    """True if it answers."""
    problem: str = ""
    """Why it does not answer."""
    exclusive_run: str | None = None
    """Run with whole weights, to which the server belongs; None for another project's, or for none."""
    weight_version: int | None = None
    """Version of that run in service."""
    max_adapters: int = 0
    """Runs with adapters that may share the server; 0 if none may."""
    kv_capacity_tokens: int = 0
    max_model_len: int = 0
    runs: list[FleetRunView] = []
    """Runs that share the server."""


class FleetView(View):
    """Engine servers that runs name by one name."""

    name: str
    servers: list[FleetServerView]


class FleetPage(View):
    """All fleets."""

    items: list[FleetView]


class QuotaView(View):
    """Limits of a project and its current use."""

    project: str
    max_active_runs: int
    max_queued_runs: int
    max_gpus: int
    """Max GPUs of all active runs together; 0 means unlimited."""
    max_transferqueue_bytes: int
    """Max sum of ``transferqueue.quota_bytes`` over active runs; 0 means unlimited."""
    max_checkpoint_bytes: int
    """Size of the project's checkpoints at which no further run starts; 0 means unlimited."""
    max_requests_per_second: int
    """Requests per second that each controller answers; bursts may have twice as many; 0 means
    unlimited."""
    max_event_streams: int
    """Max open streams of events and logs at each controller; 0 means unlimited."""
    active_runs: int
    queued_runs: int
    gpus: int
    transferqueue_bytes: int
    checkpoint_bytes: int
    event_streams: int
    """Streams that are open at the controller that answers."""


class VersionView(BaseModel):
    """Release of the controller that answers."""

    version: str


class DefaultsView(BaseModel):
    """Defaults of the keys of one specification, of which some depend on its other keys."""

    items: dict[str, Any]
    """Default of each dotted key; keys without which the specification is invalid are absent."""


class RunPatch(Body):
    """Changes to a run; omitted fields keep their values."""

    labels: Labels | None = None
    priority: Annotated[Priority, Strict()] | None = None
    spec: Document | None = None
    """New values of keys of the specification that can change during a run, nested as in it, such as
    ``{"trainer": {"checkpoint": {"every": 20}}}``."""
    limits: Document | None = None
    """Keys of the specification's ``limits``."""
    validation_every: StrictInt | None = Field(None, ge=0, le=1 << 31)
    """New ``validation.every``, in effect from the next step."""
    checkpoint_every: StrictInt | None = Field(None, ge=0, le=1 << 31)
    """New ``trainer.checkpoint.every``, in effect from the next step."""
    rollout_replicas: StrictInt | None = Field(None, ge=1, le=4096)
    """New ``rollout.replicas``. Additional rollouts join after they have loaded, surplus ones leave
    at once; training continues."""


class PauseOptions(Body):
    """Options of pausing a run."""

    checkpoint: StrictBool = True
    """True to save a checkpoint after the current step; otherwise the run resumes from the previous
    one."""


class CancelOptions(Body):
    """Options of cancelling a run."""

    grace_seconds: float = Field(0.0, ge=0, le=86_400, strict=True)
    """Time in seconds for the run to finish its step before it is ended by force; 0 ends it at
    once."""
    save_checkpoint: StrictBool = False
    """True to save a checkpoint after that step."""


class TrackerReport(Body):
    """Status of writing a run to an experiment tracker."""

    is_writing: StrictBool
    """True if the tracker is being written to; False after a failure, which is then retried."""
    message: str = Field("", max_length=2000, pattern=r"^[^\x00]*$")
    """Reason of the failure, for people."""


class ForkRequest(Body):
    """Request for a new run that continues from a checkpoint of another run."""

    checkpoint_id: str = Field("", max_length=40)
    """Checkpoint to continue from; empty means the newest one."""
    name: str = Field("", pattern="^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")
    """Name of the new run; empty keeps the parent's name, with ``-fork`` while an active run has it."""
    overrides: Document = Field(default_factory=dict)
    """Keys of the specification to change, such as ``{"trainer": {"steps": 200}}``."""


def covers(role: Role, required: Role) -> bool:
    """Returns True if a role includes the permissions of another one."""
    return _RANK[role] >= _RANK[required]


_MAX_NUMBER = 2**53
Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
Reward = Annotated[float, Field(allow_inf_nan=False)]
SampleId = Annotated[str, Field(max_length=80, pattern="^[A-Za-z0-9_-]+[.][0-9]+$")]


class SampleFilter(BaseModel):
    """Filter and order of a run's recorded samples."""

    split: Literal["train", "heldout"] | None = None
    """Training samples or evaluation samples."""
    step: Number | None = None
    """Step that trained the sample; for evaluations, the evaluated weight version."""
    weight_version: Number | None = None
    """Weight version that sampled one of its tokens."""
    group_id: Annotated[str, Field(max_length=64)] = ""
    row: Number | None = None
    """Row of its prompt in the data."""
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    finish_reason: Annotated[str, Field(max_length=16)] = ""
    text: Annotated[str, Field(max_length=200)] = ""
    """Part of the prompt or of the response, case-insensitive."""
    order_by: Literal["newest", "best", "worst"] = "newest"
    """By time or by reward; samples without a reward come last."""


class SampleView(View):
    """Recorded sample: its facts and excerpts of its texts."""

    id: str
    group_id: str
    member: int
    attempt: int
    split: Literal["train", "heldout"]
    row: int
    data_source: str
    step: int | None = None
    """Step that trained it, or None before; for evaluations, the weight version."""
    oldest_version: int | None = None
    """Oldest weight version that sampled one of its tokens."""
    newest_version: int | None = None
    staleness: int | None = None
    """Trainer's weight version minus that of its oldest trained token; None if no token trained."""
    reward: float | None = None
    """None if the sample failed."""
    terms: dict[str, float] = Field(default_factory=dict)
    """Named reward terms, before weighting."""
    advantage: float | None = None
    """Mean over its trained tokens."""
    ratio: float | None = None
    """Mean over its trained tokens of the probability under the trainer's weights divided by that
    under the rollout's."""
    finish_reason: str
    """``stop``, ``length`` or ``failed``."""
    is_greedy: bool
    prompt_tokens: int
    response_tokens: int
    num_turns: int
    num_segments: int
    time: datetime
    """Time at which it was finished."""
    prompt: str = ""
    """Prompt; in lists its beginning."""
    response: str = ""
    """All turns of the response; in lists their beginning."""


class SamplePage(BaseModel):
    """Page of a run's recorded samples."""

    items: list[SampleView]
    next_page_token: str


class TurnView(View):
    """Stretch of a response that the policy sampled or observed, for example from a tool."""

    is_sampled: bool
    text: str
    num_tokens: int
    finish_reason: str | None = None
    """Reason for which sampling ended."""
    seconds: float = 0.0
    tool_calls: tuple[dict[str, Any], ...] = ()
    """``name`` and ``arguments`` of each call in it."""


class TokenColumns(View):
    """Tokens of a response in columns of equal length; columns of training are empty before it.

    Values that are not finite are null.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    """Under the policy that sampled the token; 0 if none did."""
    weight_versions: tuple[int, ...]
    """Version that sampled the token; -1 if none did."""
    is_trained: tuple[bool, ...] = ()
    """True if the token was in the loss."""
    advantages: tuple[float | None, ...] = ()
    trained_logprobs: tuple[float | None, ...] = ()
    """Under the trainer's weights when the token was trained."""
    ratios: tuple[float | None, ...] = ()
    """``exp(trained_logprobs - logprobs)``; 1 for tokens that no policy sampled."""


class PictureView(View):
    """Image of a prompt."""

    name: str
    """Path or address in the data; empty for an image without."""
    width: int
    height: int
    thumbnail: str
    """Data URL of a small copy."""


class WholeSample(SampleView):
    """Recorded sample with its turns, tokens, images and expected answer."""

    images: tuple[PictureView, ...] = ()
    """Images of the prompt."""
    answer: Any = None
    """Expected answer, if the data has one."""
    turns: tuple[TurnView, ...] = ()
    tokens: TokenColumns | None = None
