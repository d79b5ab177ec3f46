"""The operations of the run API, each declared once: REST, gRPC and the client are made from them.

``handlers`` has one method for each.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from services.controller.models import (
    Body,
    CancelOptions,
    CheckpointPage,
    CheckpointView,
    Document,
    EventPage,
    EventView,
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
    Topology,
    TrackerReport,
    ValidatedView,
    VersionView,
)
from services.controller.rules.run_state import RunState
from services.controller.samples import SampleFilter, SampleId, SamplePage, WholeSample

Answer = TypeVar("Answer", covariant=True)
Place = Literal["path", "query", "header", "body", "document"]
"""Where REST has a field: ``body`` is one key of the body, ``document`` all of it."""

HEADER: Place = "header"
DOCUMENT: Place = "document"


class Operation(BaseModel, Generic[Answer]):
    """One thing that can be asked of the API, and what is said of it."""

    http: ClassVar[str]
    """Method and path; fields that the path names are part of it."""
    role: ClassVar[Role] = "viewer"
    """Who may ask; a handler may want more of some requests."""
    status: ClassVar[HTTPStatus] = HTTPStatus.OK
    location: ClassVar[str] = ""
    """Path of what was made, with the answer's fields."""
    rpc: ClassVar[str | None] = ""
    """The gRPC method, where its name is not that of the class; None if gRPC does not carry the answer."""
    form: ClassVar[Literal["json", "lines", "events"]] = "json"
    """One answer, one for each line, or one after the other as they come."""

    @classmethod
    def answer(cls) -> Any:
        """Type of what is answered; of one item if there are many."""
        found = (base.__pydantic_generic_metadata__["args"] for base in cls._bases())
        return next(args[0] for args in found if args)

    @classmethod
    def body(cls) -> type[Body] | None:
        """What REST has in its body, if that is more than one field."""
        found = (b for b in cls._bases() if issubclass(b, Body) and not issubclass(b, Operation))
        return next(found, None)

    @classmethod
    def place(cls, name: str) -> Place:
        """Where REST has a field."""
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


class OfRun(Operation[Answer], Generic[Answer]):
    """What is asked of one run."""

    run_id: Annotated[str, Field(pattern="^run_[0-9a-f]{32}$")]


MAX_SEQ = 2**53

IdempotencyKey = Annotated[str, Field(max_length=64, pattern=r"^[\x21-\x7e]*$"), HEADER]
IfMatch = Annotated[str, Field(json_schema_extra={"pattern": '^"[0-9]{1,18}"$'}), HEADER]
CheckpointId = Annotated[str, Field(max_length=40, pattern="^[A-Za-z0-9_-]+$")]
Component = Annotated[str, Field(pattern="^[a-z0-9-]{0,63}$")]
Seq = Annotated[int, Field(ge=0, le=MAX_SEQ)]
EventTypes = Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=32)]


class CreateRun(Operation[RunView | ValidatedView]):
    """Submit a run; the body is its specification. It starts when its turn comes.

    Of several values of ``label`` with the same key the last one counts.
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
    """List the runs of the project, newest first unless ``order_by`` says otherwise."""

    http = "GET /v1/runs"
    state: RunState | None = None
    name: Annotated[str, Field(max_length=63)] = ""
    label: Annotated[str, Field(pattern="^([^=]+=.*)?$", max_length=128)] = ""
    order_by: Literal["-create_time", "create_time"] = "-create_time"
    page_size: Annotated[int, Field(ge=1, le=500)] = 50
    page_token: Annotated[str, Field(max_length=256)] = ""


class GetRun(OfRun[RunView]):
    """One run."""

    http = "GET /v1/runs/{run_id}"
    if_none_match: Annotated[str, HEADER] = ""


class UpdateRun(RunPatch, OfRun[RunView]):
    """Change a run; ``If-Match`` names the revision that was read."""

    http = "PATCH /v1/runs/{run_id}"
    role = "operator"
    if_match: IfMatch = ""


class DeleteRun(OfRun[None]):
    """Forget a run that has ended. Its checkpoints stay on disk unless they are to go too."""

    http = "DELETE /v1/runs/{run_id}"
    role = "admin"
    status = HTTPStatus.NO_CONTENT
    if_match: IfMatch = ""
    delete_checkpoints: bool = False


class CancelRun(CancelOptions, OfRun[RunView]):
    """End a run. Cancelling a cancelled run changes nothing; a second call may shorten the grace."""

    http = "POST /v1/runs/{run_id}/cancel"
    role = "operator"


class PauseRun(PauseOptions, OfRun[RunView]):
    """Finish the current step, save a checkpoint if it is wanted, and stop the workers."""

    http = "POST /v1/runs/{run_id}/pause"
    role = "operator"


class ResumeRun(OfRun[RunView]):
    """Queue a paused run again; it goes on from its checkpoint."""

    http = "POST /v1/runs/{run_id}/resume"
    role = "operator"


class EvaluateRun(OfRun[RunView]):
    """Evaluate the weights that are served now; event ``Validated`` tells of it."""

    http = "POST /v1/runs/{run_id}/validate"
    role = "operator"
    status = HTTPStatus.ACCEPTED


class SaveRun(OfRun[RunView]):
    """Save a checkpoint at the end of the current step; event ``CheckpointSaved`` tells of it."""

    http = "POST /v1/runs/{run_id}/checkpoint"
    role = "operator"
    status = HTTPStatus.ACCEPTED
    location = "/v1/runs/{id}/checkpoints"


class ReportTracker(TrackerReport, OfRun[EventView]):
    """Tell that a tracker of the run has failed or is written to again; an event of the run says so."""

    http = "POST /v1/runs/{run_id}/trackers/{tracker}"
    rpc = None
    role = "operator"
    tracker: Annotated[str, Field(pattern="^[a-z0-9-]{1,63}$")]


class ForkRun(ForkRequest, OfRun[RunView]):
    """Start a new run that goes on from a checkpoint, with the same prompts behind it."""

    http = "POST /v1/runs/{run_id}/fork"
    role = "operator"
    status = HTTPStatus.CREATED
    location = "/v1/runs/{id}"
    idempotency_key: IdempotencyKey = ""


class ListEvents(OfRun[EventPage]):
    """Events of a run in order, or the newest first: then ``before_seq`` goes on behind a page."""

    http = "GET /v1/runs/{run_id}/events"
    after_seq: Seq = 0
    before_seq: Seq = 0
    limit: Annotated[int, Field(ge=1, le=1000)] = 1000
    type: EventTypes = []
    not_type: EventTypes = []
    order_by: Literal["seq", "-seq"] = "seq"


class WatchRun(OfRun[EventView]):
    """Events of a run as they come; the stream ends with event ``end`` once the run has ended.

    A reader that falls too far behind gets event ``overflow`` and goes on by ``Last-Event-ID``.
    """

    http = "GET /v1/runs/{run_id}/events/stream"
    form = "events"
    after_seq: Seq = 0
    last_event_id: Annotated[str, HEADER] = ""


class WatchRuns(Operation[EventView]):
    """Events of all runs of the project as they come, from now on or behind ``Last-Event-ID``."""

    http = "GET /v1/runs/stream"
    form = "events"
    last_event_id: Annotated[str, Field(max_length=64), HEADER] = ""


class ReadLogs(OfRun[LogLine]):
    """The ends of the workers' logs, one JSON object a line: ``component`` and ``line``."""

    http = "GET /v1/runs/{run_id}/logs"
    form = "lines"
    component: Component = ""
    tail_lines: Annotated[int, Field(ge=1, le=10_000)] = 1000


class FollowLogs(OfRun[LogLine]):
    """Lines of the workers' logs as they come; ends with event ``end`` once the run has ended."""

    http = "GET /v1/runs/{run_id}/logs/stream"
    rpc = "ReadLogs"
    form = "events"
    component: Component = ""
    tail_lines: Annotated[int, Field(ge=0, le=10_000)] = 100
    last_event_id: Annotated[str, Field(max_length=4096), HEADER] = ""


class ListMetrics(OfRun[MetricPage]):
    """Numbers of the run's steps; of more than ``max_points`` every n-th. ``to_step`` 0 is the newest.

    A ``name`` that ends with ``*`` means all that begin so.
    """

    http = "GET /v1/runs/{run_id}/metrics"
    name: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=64)] = []
    from_step: Seq = 0
    to_step: Seq = 0
    max_points: Annotated[int, Field(ge=1, le=2000)] = 2000


class ListGroups(OfRun[GroupPage]):
    """Groups that steps trained, those in flight, and those that were given up, with the reason."""

    http = "GET /v1/runs/{run_id}/groups"
    after_step: Seq = 0
    steps: Annotated[int, Field(ge=1, le=100)] = 10


class ListSamples(SampleFilter, OfRun[SamplePage]):
    """Kept samples with their facts and, over REST, the beginnings of their texts."""

    http = "GET /v1/runs/{run_id}/samples"
    excerpt: Annotated[int, Field(ge=0, le=10_000)] = 300
    """Most characters of a prompt and of a response."""
    page_size: Annotated[int, Field(ge=1, le=500)] = 50
    page_token: Annotated[str, Field(max_length=256)] = ""


class GetSample(OfRun[WholeSample]):
    """One kept sample with its turns and tokens."""

    http = "GET /v1/runs/{run_id}/samples/{sample_id}"
    rpc = None
    sample_id: SampleId


class ExportSamples(SampleFilter, OfRun[WholeSample]):
    """Kept samples as JSON lines, one after the other as they are read."""

    http = "GET /v1/runs/{run_id}/samples.jsonl"
    rpc = None
    form = "lines"
    tokens: bool = True
    """Whether their tokens are part of it."""
    limit: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    """Most samples; 0 for all."""


class ListCheckpoints(OfRun[CheckpointPage]):
    """Checkpoints of a run, newest first."""

    http = "GET /v1/runs/{run_id}/checkpoints"


class GetCheckpoint(OfRun[CheckpointView]):
    """One checkpoint."""

    http = "GET /v1/runs/{run_id}/checkpoints/{checkpoint_id}"
    checkpoint_id: CheckpointId


class DeleteCheckpoint(OfRun[None]):
    """Delete a checkpoint that no run needs any more."""

    http = "DELETE /v1/runs/{run_id}/checkpoints/{checkpoint_id}"
    role = "operator"
    status = HTTPStatus.NO_CONTENT
    checkpoint_id: CheckpointId


class GetTopology(OfRun[Topology]):
    """Registered workers of a run and what they are doing."""

    http = "GET /v1/runs/{run_id}/topology"


class GetQuota(Operation[QuotaView]):
    """What the project may use, and uses."""

    http = "GET /v1/quota"


class GetVersion(Operation[VersionView]):
    """The release that answers."""

    http = "GET /v1/version"


# The path of the stream of all runs would otherwise be taken for a run's.
OPERATIONS: tuple[type[Operation[Any]], ...] = (
    *(CreateRun, ListRuns, WatchRuns, GetRun, UpdateRun, DeleteRun),
    *(CancelRun, PauseRun, ResumeRun, EvaluateRun, SaveRun, ReportTracker, ForkRun),
    *(ListEvents, WatchRun, ReadLogs, FollowLogs, ListMetrics, ListGroups),
    *(ListSamples, GetSample, ExportSamples),
    *(ListCheckpoints, GetCheckpoint, DeleteCheckpoint, GetTopology, GetQuota, GetVersion),
)
"""All of them; REST looks for a path in this order."""
