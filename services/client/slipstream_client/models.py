"""Answers of a controller, as pydantic models.

Written by deploy/reference/client.py: `make docs` keeps it current.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel


class CheckpointPage(BaseModel):
    """Checkpoints of a run, newest first."""

    items: list[CheckpointView]


class CheckpointView(BaseModel):
    """Checkpoint of a run."""

    create_time: datetime
    id: str
    message: str
    path: str
    size_bytes: int
    state: str
    step: int
    weight_version: int


class ConditionView(BaseModel):
    """Condition of a run: its status, the reason and the time of its last change."""

    last_transition_time: datetime
    message: str
    observed_generation: int
    reason: str
    status: str
    type: str


class EventPage(BaseModel):
    """Events of a run, in order."""

    items: list[EventView]


class EventView(BaseModel):
    """Event of a run."""

    actor: str
    data: dict[str, Any]
    message: str
    run_id: str
    seq: int
    time: datetime
    type: str


class GroupPage(BaseModel):
    """Groups of a run, ordered by sequence."""

    items: list[GroupView]


class GroupView(BaseModel):
    """Group of samples and its outcome, without texts."""

    attempt: int
    group_id: str
    row: int
    state: str
    oldest_version: int | None = None
    reason: str = ""
    staleness: int | None = None
    step: int | None = None


class ListedRun(BaseModel):
    """Run as listed, without its specification."""

    create_time: datetime
    created_by: str
    desired: str
    generation: int
    id: str
    labels: dict[str, str]
    message: str
    name: str
    priority: int
    project: str
    revision: int
    spec_digest: str
    state: str
    state_reason: str
    step: int
    summary: dict[str, Any]
    target_steps: int
    update_time: datetime
    weight_version: int
    activities: list[str] = []
    conditions: list[ConditionView] = []
    error: RunError | None = None
    finish_time: datetime | None = None
    start_time: datetime | None = None


class LogLine(BaseModel):
    """Line of a worker's log."""

    component: str
    line: str


class Metric(BaseModel):
    """One metric over the steps of a run."""

    name: str
    values: list[float | None]


class MetricHistogram(BaseModel):
    """Distribution of one quantity over the samples of each step."""

    bounds: list[int]
    counts: list[list[int]]
    name: str


class MetricPage(BaseModel):
    """Metrics of a run's steps, in columns."""

    histograms: list[MetricHistogram]
    items: list[Metric]
    steps: list[int]
    times: list[datetime]


class QuotaView(BaseModel):
    """Limits of a project and its current use."""

    active_runs: int
    checkpoint_bytes: int
    event_streams: int
    gpus: int
    max_active_runs: int
    max_checkpoint_bytes: int
    max_event_streams: int
    max_gpus: int
    max_queued_runs: int
    max_requests_per_second: int
    max_transferqueue_bytes: int
    project: str
    queued_runs: int
    transferqueue_bytes: int


class RunError(BaseModel):
    """Reason for which a run failed."""

    category: str
    code: str
    component: str
    message: str
    recoverable: bool
    trace_id: str


class RunPage(BaseModel):
    """Page of runs, newest first."""

    items: list[ListedRun]
    next_page_token: str


class RunView(BaseModel):
    """Run with its specification."""

    create_time: datetime
    created_by: str
    desired: str
    generation: int
    id: str
    labels: dict[str, str]
    message: str
    name: str
    priority: int
    project: str
    revision: int
    spec: dict[str, Any]
    spec_digest: str
    state: str
    state_reason: str
    step: int
    summary: dict[str, Any]
    target_steps: int
    update_time: datetime
    weight_version: int
    activities: list[str] = []
    conditions: list[ConditionView] = []
    error: RunError | None = None
    finish_time: datetime | None = None
    start_time: datetime | None = None


class SamplePage(BaseModel):
    """Page of a run's recorded samples."""

    items: list[SampleView]
    next_page_token: str


class SampleView(BaseModel):
    """Recorded sample: its facts and excerpts of its texts."""

    attempt: int
    data_source: str
    finish_reason: str
    group_id: str
    id: str
    is_greedy: bool
    member: int
    num_segments: int
    num_turns: int
    prompt_tokens: int
    response_tokens: int
    row: int
    split: str
    time: datetime
    advantage: float | None = None
    newest_version: int | None = None
    oldest_version: int | None = None
    prompt: str = ""
    ratio: float | None = None
    response: str = ""
    reward: float | None = None
    staleness: int | None = None
    step: int | None = None
    terms: dict[str, float] = {}


class TokenColumns(BaseModel):
    """Tokens of a response in columns of equal length; columns of training are empty before it.

    Values that are not finite are null.
    """

    ids: list[int]
    logprobs: list[float | None]
    texts: list[str]
    weight_versions: list[int]
    advantages: list[float | None] = []
    is_trained: list[bool] = []
    ratios: list[float | None] = []
    trained_logprobs: list[float | None] = []


class Topology(BaseModel):
    """Registered workers of a run, ordered by name."""

    items: list[WorkerView]


class TurnView(BaseModel):
    """Stretch of a response that the policy sampled or observed, for example from a tool."""

    is_sampled: bool
    num_tokens: int
    text: str
    finish_reason: str | None = None
    seconds: float = 0.0
    tool_calls: list[dict[str, Any]] = []


class ValidatedView(BaseModel):
    """Valid specification, ready to submit."""

    spec: dict[str, Any]
    spec_digest: str


class VersionView(BaseModel):
    """Release of the controller that answers."""

    version: str


class WholeSample(BaseModel):
    """Recorded sample with its turns, tokens and expected answer."""

    attempt: int
    data_source: str
    finish_reason: str
    group_id: str
    id: str
    is_greedy: bool
    member: int
    num_segments: int
    num_turns: int
    prompt_tokens: int
    response_tokens: int
    row: int
    split: str
    time: datetime
    advantage: float | None = None
    answer: Any = None
    newest_version: int | None = None
    oldest_version: int | None = None
    prompt: str = ""
    ratio: float | None = None
    response: str = ""
    reward: float | None = None
    staleness: int | None = None
    step: int | None = None
    terms: dict[str, float] = {}
    tokens: TokenColumns | None = None
    turns: list[TurnView] = []


class WorkerView(BaseModel):
    """Worker of a run."""

    activity: str
    gauges: dict[str, float]
    role: str
    state: str
    weight_version: int
    worker_id: str
