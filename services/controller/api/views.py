"""Turns what the controller holds into what the API answers."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal

from fastapi import Response

from services.common import tracing
from services.controller.api.models import (
    CheckpointView,
    ConditionView,
    EventView,
    QuotaView,
    RunError,
    RunView,
    WorkerView,
)
from services.controller.membership import Worker
from services.controller.quotas import Quota
from services.controller.run.checkpoints import Checkpoint
from services.controller.run.conditions import Condition
from services.controller.run.run_state import RunState, desired_state
from services.controller.store.records import Event, Run

_INFRA = frozenset(
    {"WorkerLost", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS", "DATABASE_UNAVAILABLE"}
)
_USER = frozenset(
    {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "GenerationError", "SpecError", "QueueTimeout"}
)

# A lost worker, or the service that a call went to, stands at the beginning of the message.
_COMPONENT = re.compile(r"([a-z_]+-\d+)\b|/slipstream\.([a-z]+)\.v1\.")


def view_run(
    run: Run, response: Response | None = None, *, activities: Sequence[str] = ()
) -> RunView:
    """A run; its revision becomes the answer's ETag."""
    if response is not None:
        response.headers["ETag"] = f'"{run.revision}"'
    return RunView(
        id=run.run_id,
        project=run.project,
        name=run.name,
        desired=desired_state(run.state),
        state=run.state.value,
        state_reason=run.state_reason,
        message=run.message,
        priority=run.priority,
        labels=dict(run.labels),
        created_by=run.created_by,
        step=run.step,
        weight_version=run.weight_version,
        summary=dict(run.summary),
        spec=json.loads(run.spec_json),
        spec_digest=run.spec_digest,
        activities=list(activities),
        conditions=[view_condition(condition) for condition in run.conditions],
        error=error_of(run),
        create_time=moment(run.create_time),
        update_time=moment(run.update_time),
        start_time=None if run.start_time is None else moment(run.start_time),
        finish_time=None if run.finish_time is None else moment(run.finish_time),
        revision=run.revision,
        generation=run.generation,
    )


def view_condition(condition: Condition) -> ConditionView:
    """A condition."""
    return ConditionView(
        type=condition.type,
        status=condition.status,
        reason=condition.reason,
        message=condition.message,
        observed_generation=condition.observed_generation,
        last_transition_time=moment(condition.last_transition_time),
    )


def view_event(event: Event) -> EventView:
    """An event."""
    return EventView(
        run_id=event.run_id,
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
        size_bytes=checkpoint.size_bytes,
        create_time=moment(checkpoint.create_time),
    )


def view_quota(quota: Quota, *, event_streams: int) -> QuotaView:
    """Limits and use of a project."""
    return QuotaView(
        project=quota.project,
        **asdict(quota.limits),
        active_runs=quota.active_runs,
        queued_runs=quota.queued_runs,
        gpus=quota.gpus,
        transferqueue_bytes=quota.transferqueue_bytes,
        checkpoint_bytes=quota.checkpoint_bytes,
        event_streams=event_streams,
    )


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def error_of(run: Run) -> RunError | None:
    """Why a run failed; None if it did not."""
    if run.state is not RunState.FAILED:
        return None
    category: Literal["USER", "SYSTEM", "INFRA"] = "SYSTEM"
    if run.state_reason in _INFRA:
        category = "INFRA"
    elif run.state_reason in _USER:
        category = "USER"
    return RunError(
        code=run.state_reason,
        category=category,
        recoverable=category == "INFRA",
        message=run.message,
        component=_component_of(run),
        trace_id=tracing.of_step(run.run_id, run.step + 1).trace_id,
    )


def _component_of(run: Run) -> str:
    """What failed: a worker, a service, or the controller, which knows no other."""
    if run.state_reason == "GenerationError":
        return "rollout"
    found = _COMPONENT.match(run.message)
    return found[1] or found[2] if found else "controller"
