"""What the controller holds, as messages of the gRPC API."""

import json
from collections.abc import Sequence

from google.protobuf import timestamp_pb2

from services.common.errors import InvalidArgumentError
from services.controller.api.models import MetricPoint, SampleView
from services.controller.api.views import error_of
from services.controller.membership import Worker
from services.controller.run.checkpoints import Checkpoint
from services.controller.run.conditions import Condition
from services.controller.run.run_state import desired_state
from services.controller.store.records import Event, Run
from slipstream.controller.v1 import run_pb2 as pb


def run_id_of(name: str) -> str:
    """The id in a run's name.

    Raises:
        InvalidArgumentError: If it is no name of a run.
    """
    prefix, _, run_id = name.partition("/")
    if prefix != "runs" or not run_id:
        raise InvalidArgumentError(f"a run's name is 'runs/' and its id, but {name!r} came")
    return run_id


def run_message(run: Run, activities: Sequence[str] = ()) -> pb.Run:
    """A run."""
    return pb.Run(
        name=f"runs/{run.run_id}",
        spec_json=run.spec_json,
        spec_digest=run.spec_digest,
        state=pb.Run.State.Value(f"STATE_{run.state.value}"),
        state_reason=run.state_reason,
        message=run.message,
        step=run.step,
        weight_version=run.weight_version,
        create_time=timestamp(run.create_time),
        update_time=timestamp(run.update_time),
        start_time=None if run.start_time is None else timestamp(run.start_time),
        finish_time=None if run.finish_time is None else timestamp(run.finish_time),
        revision=run.revision,
        project=run.project,
        priority=run.priority,
        labels=dict(run.labels),
        created_by=run.created_by,
        summary_json=json.dumps(dict(run.summary)),
        activities=activities,
        desired=desired_state(run.state),
        generation=run.generation,
        conditions=map(condition_message, run.conditions),
        error=error_message(run),
    )


def condition_message(condition: Condition) -> pb.Run.Condition:
    """A condition."""
    return pb.Run.Condition(
        type=condition.type,
        status=condition.status,
        reason=condition.reason,
        message=condition.message,
        observed_generation=condition.observed_generation,
        last_transition_time=timestamp(condition.last_transition_time),
    )


def error_message(run: Run) -> pb.Run.Error | None:
    """Why a run failed; None if it did not."""
    error = error_of(run)
    return None if error is None else pb.Run.Error(**error.model_dump())


def event_message(event: Event) -> pb.RunEvent:
    """An event."""
    return pb.RunEvent(
        seq=event.seq,
        time=timestamp(event.time),
        type=event.type,
        message=event.message,
        data_json=json.dumps(dict(event.data)),
        actor=event.actor,
        run=f"runs/{event.run_id}",
    )


def checkpoint_message(checkpoint: Checkpoint) -> pb.Checkpoint:
    """A checkpoint."""
    return pb.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        step=checkpoint.step,
        weight_version=checkpoint.weight_version,
        path=checkpoint.path,
        state=checkpoint.state,
        message=checkpoint.message,
        size_bytes=checkpoint.size_bytes,
        create_time=timestamp(checkpoint.create_time),
    )


def point_message(point: MetricPoint) -> pb.ListMetricsResponse.Point:
    """A number of a step."""
    return pb.ListMetricsResponse.Point(
        step=point.step,
        time=timestamp(point.time.timestamp()),
        name=point.name,
        value=point.value,
    )


def sample_message(sample: SampleView) -> pb.ListSamplesResponse.Sample:
    """A group of samples."""
    return pb.ListSamplesResponse.Sample(
        group_id=sample.group_id,
        row=sample.row,
        attempt=sample.attempt,
        state=sample.state,
        step=sample.step or 0,
        oldest_version=-1 if sample.oldest_version is None else sample.oldest_version,
        reason=sample.reason,
    )


def worker_message(worker: Worker) -> pb.Topology.Worker:
    """A worker."""
    return pb.Topology.Worker(
        worker_id=worker.worker_id,
        role=worker.role,
        state=worker.state,
        activity=worker.activity,
        weight_version=worker.weight_version,
        gauges=worker.gauges,
    )


def timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    """Seconds since the epoch."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
