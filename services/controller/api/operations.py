"""Declares every operation of the run API once; REST, gRPC and the client are generated from it.

``handlers`` implements one method per operation.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from services.controller.rules.run_state import RunState
from services.controller.schemas import (
    PLAIN,
    Body,
    CancelOptions,
    CheckpointPage,
    CheckpointView,
    DefaultsView,
    Document,
    EventPage,
    EventView,
    FleetPage,
    FleetView,
    ForkRequest,
    GroupPage,
    LabelPair,
    LogLine,
    MetricPage,
    PauseOptions,
    Priority,
    QuotaView,
    Role,
    RunPage,
    RunPatch,
    RunView,
    SampleFilter,
    SampleId,
    SamplePage,
    Topology,
    TrackerReport,
    ValidatedView,
    VersionView,
    WholeSample,
)

Answer = TypeVar("Answer", covariant=True)
Place = Literal["path", "query", "header", "body", "document"]
"""Location of a field in the REST request: ``body`` is one key of the body, ``document`` the whole
body."""

HEADER: Place = "header"
DOCUMENT: Place = "document"


class Operation(BaseModel, Generic[Answer]):
    """Base of all operations of the API: the request's fields and its REST and gRPC bindings."""

    http: ClassVar[str]
    """HTTP method and path; the path names the fields that it contains."""
    role: ClassVar[Role] = "viewer"
    """Role that a caller needs at least; a handler may require more for some requests."""
    status: ClassVar[HTTPStatus] = HTTPStatus.OK
    location: ClassVar[str] = ""
    """Path of the created resource, formatted with the fields of the response."""
    rpc: ClassVar[str | None] = ""
    """Name of the gRPC method if it differs from the class name; None if gRPC does not offer the
    operation."""
    form: ClassVar[Literal["json", "lines", "events"]] = "json"
    """Form of the response: one JSON document, one per line, or a stream of events."""

    @classmethod
    def answer(cls) -> Any:
        """Returns the type of the response, or of one item if the response is a sequence."""
        arguments = (base.__pydantic_generic_metadata__["args"] for base in cls._bases())
        return next(args[0] for args in arguments if args)

    @classmethod
    def body(cls) -> type[Body] | None:
        """Returns the model of the REST body, or None if no model describes the body."""
        bodies = (b for b in cls._bases() if issubclass(b, Body) and not issubclass(b, Operation))
        return next(bodies, None)

    @classmethod
    def place(cls, name: str) -> Place:
        """Returns the location of a field in the REST request."""
        for marker in (HEADER, DOCUMENT):
            if marker in cls.model_fields[name].metadata:
                return marker
        if f"{{{name}}}" in cls.http:
            return "path"
        body = cls.body()
        return "body" if body is not None and name in body.model_fields else "query"

    @classmethod
    def _bases(cls) -> Iterator[type[BaseModel]]:
        return (base for base in cls.__mro__ if issubclass(base, BaseModel))


class RunOperation(Operation[Answer], Generic[Answer]):
    """Base of operations on one run."""

    run_id: Annotated[str, Field(pattern="^run_[0-9a-f]{32}$")]


MAX_SEQ = 2**53

IdempotencyKey = Annotated[str, Field(max_length=64, pattern=r"^[\x21-\x7e]*$"), HEADER]
IfMatch = Annotated[str, Field(json_schema_extra={"pattern": '^"[0-9]{1,18}"$'}), HEADER]
CheckpointId = Annotated[str, Field(max_length=40, pattern="^[A-Za-z0-9_-]+$")]
Component = Annotated[str, Field(pattern="^[a-z0-9-]{0,63}$")]
Seq = Annotated[int, Field(ge=0, le=MAX_SEQ)]
EventTypes = Annotated[
    list[Annotated[str, Field(max_length=32, pattern=PLAIN)]], Field(max_length=32)
]


class CreateRun(Operation[RunView | ValidatedView]):
    """Submits a run; the body is its specification. The run starts when the queue admits it.

    If ``label`` repeats a key, the last value counts.
    """

    http = "POST /v1/runs"
    role = "operator"
    status = HTTPStatus.CREATED
    location = "/v1/runs/{id}"
    spec: Annotated[Document, DOCUMENT]
    validate_only: bool = False
    priority: Priority = 0
    label: Annotated[list[LabelPair], Field(max_length=32)] = []
    idempotency_key: IdempotencyKey = ""


class ListRuns(Operation[RunPage]):
    """Lists the runs of the project, newest first unless ``order_by`` differs."""

    http = "GET /v1/runs"
    state: RunState | None = None
    name: Annotated[str, Field(max_length=63, pattern=PLAIN)] = ""
    label: Annotated[
        str, Field(pattern=r"^([^=\x00-\x1f\x7f]+=[^\x00-\x1f\x7f]*)?$", max_length=128)
    ] = ""
    order_by: Literal["-create_time", "create_time"] = "-create_time"
    page_size: Annotated[int, Field(ge=1, le=500)] = 50
    page_token: Annotated[str, Field(max_length=256)] = ""


class GetRun(RunOperation[RunView]):
    """Returns one run."""

    http = "GET /v1/runs/{run_id}"
    if_none_match: Annotated[str, HEADER] = ""


class GetDefaults(RunOperation[DefaultsView]):
    """Returns the default of each key of a run's specification, given its other keys."""

    http = "GET /v1/runs/{run_id}/defaults"
    rpc = None


class UpdateRun(RunPatch, RunOperation[RunView]):
    """Changes a run; ``If-Match`` names the revision that the caller has read."""

    http = "PATCH /v1/runs/{run_id}"
    role = "operator"
    if_match: IfMatch = ""


class DeleteRun(RunOperation[None]):
    """Deletes a run that has ended, with its logs and recorded samples.

    Its checkpoints stay on disk unless ``delete_checkpoints`` is set, which is refused while a run that
    has not ended starts from one of them.
    """

    http = "DELETE /v1/runs/{run_id}"
    role = "admin"
    status = HTTPStatus.NO_CONTENT
    if_match: IfMatch = ""
    delete_checkpoints: bool = False


class CancelRun(CancelOptions, RunOperation[RunView]):
    """Cancels a run.

    Cancelling a cancelled run changes nothing; a second call may shorten the grace period.
    """

    http = "POST /v1/runs/{run_id}/cancel"
    role = "operator"


class PauseRun(PauseOptions, RunOperation[RunView]):
    """Pauses a run: finishes the current step, saves a checkpoint if requested, and stops the workers."""

    http = "POST /v1/runs/{run_id}/pause"
    role = "operator"


class ResumeRun(RunOperation[RunView]):
    """Queues a paused run again; it continues from its checkpoint."""

    http = "POST /v1/runs/{run_id}/resume"
    role = "operator"


class EvaluateRun(RunOperation[RunView]):
    """Evaluates the weights that the run serves now; the event ``Validated`` reports the result."""

    http = "POST /v1/runs/{run_id}/validate"
    role = "operator"
    status = HTTPStatus.ACCEPTED


class SaveRun(RunOperation[RunView]):
    """Saves a checkpoint at the end of the current step; the event ``CheckpointSaved`` reports it."""

    http = "POST /v1/runs/{run_id}/checkpoint"
    role = "operator"
    status = HTTPStatus.ACCEPTED
    location = "/v1/runs/{id}/checkpoints"


class ReportTracker(TrackerReport, RunOperation[EventView]):
    """Records, as an event of the run, that a tracker has failed or works again."""

    http = "POST /v1/runs/{run_id}/trackers/{tracker}"
    rpc = None
    role = "operator"
    tracker: Annotated[str, Field(pattern="^[a-z0-9-]{1,63}$")]


class ForkRun(ForkRequest, RunOperation[RunView]):
    """Starts a new run that continues from a checkpoint of another run.

    It does not repeat the prompts trained up to that checkpoint, unless its data or seed differ.
    """

    http = "POST /v1/runs/{run_id}/fork"
    role = "operator"
    status = HTTPStatus.CREATED
    location = "/v1/runs/{id}"
    idempotency_key: IdempotencyKey = ""


class ListEvents(RunOperation[EventPage]):
    """Lists the events of a run in order, or newest first with ``order_by=-seq``.

    In the latter case ``before_seq`` continues after a page.
    """

    http = "GET /v1/runs/{run_id}/events"
    after_seq: Seq = 0
    before_seq: Seq = 0
    limit: Annotated[int, Field(ge=1, le=1000)] = 1000
    type: EventTypes = []
    not_type: EventTypes = []
    order_by: Literal["seq", "-seq"] = "seq"


class WatchRun(RunOperation[EventView]):
    """Streams the events of a run; the stream ends with the event ``end`` after the run has ended.

    A reader that falls too far behind receives the event ``overflow`` and continues with
    ``Last-Event-ID``.
    """

    http = "GET /v1/runs/{run_id}/events/stream"
    form = "events"
    after_seq: Seq = 0
    last_event_id: Annotated[str, HEADER] = ""


class WatchRuns(Operation[EventView]):
    """Streams the events of all runs of the project, from now on or after ``Last-Event-ID``."""

    http = "GET /v1/runs/stream"
    form = "events"
    last_event_id: Annotated[str, Field(max_length=64), HEADER] = ""


class ReadLogs(RunOperation[LogLine]):
    """Returns the last lines of the workers' logs as JSON objects with ``component`` and ``line``."""

    http = "GET /v1/runs/{run_id}/logs"
    form = "lines"
    component: Component = ""
    tail_lines: Annotated[int, Field(ge=1, le=10_000)] = 1000


class FollowLogs(RunOperation[LogLine]):
    """Streams lines of the workers' logs; the stream ends with the event ``end`` after the run has ended."""

    http = "GET /v1/runs/{run_id}/logs/stream"
    rpc = "ReadLogs"
    form = "events"
    component: Component = ""
    tail_lines: Annotated[int, Field(ge=0, le=10_000)] = 100
    # The position in the log of each worker.
    last_event_id: Annotated[str, Field(max_length=48 << 10), HEADER] = ""


class ListMetrics(RunOperation[MetricPage]):
    """Lists metrics of the run's steps; more than ``max_points`` steps are thinned to every n-th.

    ``to_step`` 0 is the newest.

    A ``name`` that ends with ``*`` selects all metrics with that prefix.
    """

    http = "GET /v1/runs/{run_id}/metrics"
    name: Annotated[
        list[Annotated[str, Field(max_length=128, pattern=PLAIN)]], Field(max_length=64)
    ] = []
    from_step: Seq = 0
    to_step: Seq = 0
    max_points: Annotated[int, Field(ge=1, le=2000)] = 2000


class ListGroups(RunOperation[GroupPage]):
    """Lists the groups that steps trained, those in flight, and those that were dropped with a reason."""

    http = "GET /v1/runs/{run_id}/groups"
    after_step: Seq = 0
    steps: Annotated[int, Field(ge=1, le=100)] = 10


class ListSamples(SampleFilter, RunOperation[SamplePage]):
    """Lists recorded samples with their facts and, over REST, the beginnings of their texts."""

    http = "GET /v1/runs/{run_id}/samples"
    excerpt: Annotated[int, Field(ge=0, le=10_000)] = 300
    """Max characters of a prompt and of a response."""
    page_size: Annotated[int, Field(ge=1, le=500)] = 50
    page_token: Annotated[str, Field(max_length=256)] = ""


class GetSample(RunOperation[WholeSample]):
    """Returns one recorded sample with its turns and tokens."""

    http = "GET /v1/runs/{run_id}/samples/{sample_id}"
    rpc = None
    sample_id: SampleId


class ExportSamples(SampleFilter, RunOperation[WholeSample]):
    """Exports recorded samples as JSON lines, streamed as they are read."""

    http = "GET /v1/runs/{run_id}/samples.jsonl"
    rpc = None
    form = "lines"
    tokens: bool = True
    """True to include the samples' tokens."""
    limit: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    """Max samples; 0 means all."""


class ListCheckpoints(RunOperation[CheckpointPage]):
    """Lists the checkpoints of a run, newest first."""

    http = "GET /v1/runs/{run_id}/checkpoints"


class GetCheckpoint(RunOperation[CheckpointView]):
    """Returns one checkpoint."""

    http = "GET /v1/runs/{run_id}/checkpoints/{checkpoint_id}"
    checkpoint_id: CheckpointId


class DeleteCheckpoint(RunOperation[None]):
    """Deletes a checkpoint that no run needs any more."""

    http = "DELETE /v1/runs/{run_id}/checkpoints/{checkpoint_id}"
    role = "operator"
    status = HTTPStatus.NO_CONTENT
    checkpoint_id: CheckpointId


class GetTopology(RunOperation[Topology]):
    """Lists the registered workers of a run and their activities."""

    http = "GET /v1/runs/{run_id}/topology"


class GetQuota(Operation[QuotaView]):
    """Returns the limits of the project and its current use."""

    http = "GET /v1/quota"


class ListFleets(Operation[FleetPage]):
    """Lists the fleets of engine servers, with health, versions, and use by each run."""

    http = "GET /v1/fleets"
    rpc = None


class GetFleet(Operation[FleetView]):
    """Returns one fleet of engine servers."""

    http = "GET /v1/fleets/{name}"
    rpc = None
    name: Annotated[str, Field(max_length=63, pattern="^[A-Za-z0-9._-]+$")]


class GetVersion(Operation[VersionView]):
    """Returns the release of the controller."""

    http = "GET /v1/version"


# WatchRuns comes before GetRun: otherwise REST would match its path as that of a run.
OPERATIONS: tuple[type[Operation[Any]], ...] = (
    *(CreateRun, ListRuns, WatchRuns, GetRun, GetDefaults, UpdateRun, DeleteRun),
    *(CancelRun, PauseRun, ResumeRun, EvaluateRun, SaveRun, ReportTracker, ForkRun),
    *(ListEvents, WatchRun, ReadLogs, FollowLogs, ListMetrics, ListGroups),
    *(ListSamples, GetSample, ExportSamples),
    *(ListCheckpoints, GetCheckpoint, DeleteCheckpoint, GetTopology, GetQuota, GetVersion),
    *(ListFleets, GetFleet),
)
"""All operations, in the order in which REST matches their paths."""
