"""The operations of the API as methods.

Written by deploy/reference/client.py: `make docs` keeps it current.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter

from slipstream_client.models import (
    CheckpointPage,
    CheckpointView,
    EventPage,
    EventView,
    GroupPage,
    LogLine,
    MetricPage,
    QuotaView,
    RunPage,
    RunView,
    SamplePage,
    Topology,
    ValidatedView,
    VersionView,
    WholeSample,
)
from slipstream_client.request import Request, given
from slipstream_client.sync_transport import Transport


class Operations:
    """Whatever a controller can be asked; fields that are None are not sent."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _ask(self, kind: Any, request: Request) -> Any:
        content = self._transport.content(request)
        return TypeAdapter(kind).validate_json(content or b"null")

    def get_quota(self) -> QuotaView:
        """Returns the limits of the project and its current use."""
        request = Request(method="GET", path="/v1/quota")
        answer: QuotaView = self._ask(QuotaView, request)
        return answer

    def list_runs(
        self,
        *,
        state: Literal[
            "QUEUED",
            "STARTING",
            "RUNNING",
            "PAUSING",
            "PAUSED",
            "RECOVERING",
            "CANCELLING",
            "SUCCEEDED",
            "FAILED",
            "CANCELLED",
        ]
        | None = None,
        name: str = "",
        label: str = "",
        order_by: Literal["-create_time", "create_time"] = "-create_time",
        page_size: int = 50,
        page_token: str = "",
    ) -> RunPage:
        """Lists the runs of the project, newest first unless ``order_by`` differs."""
        request = Request(
            method="GET",
            path="/v1/runs",
            query={
                "state": state,
                "name": name,
                "label": label,
                "order_by": order_by,
                "page_size": page_size,
                "page_token": page_token,
            },
        )
        answer: RunPage = self._ask(RunPage, request)
        return answer

    def create_run(
        self,
        spec: Mapping[str, Any],
        *,
        validate_only: bool = False,
        priority: int = 0,
        label: Sequence[str] = (),
        idempotency_key: str = "",
    ) -> RunView | ValidatedView:
        """Submits a run; the body is its specification. The run starts when the queue admits it.

        If ``label`` repeats a key, the last value counts.
        """
        request = Request(
            method="POST",
            path="/v1/runs",
            query={"validate_only": validate_only, "priority": priority, "label": label},
            headers={"idempotency-key": idempotency_key or uuid.uuid4().hex},
            body=spec,
        )
        answer: RunView | ValidatedView = self._ask(RunView | ValidatedView, request)
        return answer

    def delete_run(self, run_id: str, *, delete_checkpoints: bool = False, if_match: str) -> None:
        """Deletes a run that has ended. Its checkpoints stay on disk unless ``delete_checkpoints`` is set."""
        request = Request(
            method="DELETE",
            path="/v1/runs/{run_id}",
            names={"run_id": run_id},
            query={"delete_checkpoints": delete_checkpoints},
            headers={"if-match": if_match},
        )
        self._ask(None, request)

    def get_run(self, run_id: str) -> RunView:
        """Returns one run."""
        request = Request(method="GET", path="/v1/runs/{run_id}", names={"run_id": run_id})
        answer: RunView = self._ask(RunView, request)
        return answer

    def update_run(
        self,
        run_id: str,
        *,
        if_match: str,
        checkpoint_every: int | None = None,
        labels: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | None = None,
        priority: int | None = None,
        rollout_replicas: int | None = None,
        validation_every: int | None = None,
    ) -> RunView:
        """Changes a run; ``If-Match`` names the revision that the caller has read."""
        request = Request(
            method="PATCH",
            path="/v1/runs/{run_id}",
            names={"run_id": run_id},
            headers={"if-match": if_match},
            body=given(
                {
                    "checkpoint_every": checkpoint_every,
                    "labels": labels,
                    "limits": limits,
                    "priority": priority,
                    "rollout_replicas": rollout_replicas,
                    "validation_every": validation_every,
                }
            ),
        )
        answer: RunView = self._ask(RunView, request)
        return answer

    def cancel_run(
        self, run_id: str, *, grace_seconds: float = 0.0, save_checkpoint: bool = False
    ) -> RunView:
        """Cancels a run.

        Cancelling a cancelled run changes nothing; a second call may shorten the grace period.
        """
        request = Request(
            method="POST",
            path="/v1/runs/{run_id}/cancel",
            names={"run_id": run_id},
            body=given({"grace_seconds": grace_seconds, "save_checkpoint": save_checkpoint}),
        )
        answer: RunView = self._ask(RunView, request)
        return answer

    def save_run(self, run_id: str) -> RunView:
        """Saves a checkpoint at the end of the current step; the event ``CheckpointSaved`` reports it."""
        request = Request(
            method="POST", path="/v1/runs/{run_id}/checkpoint", names={"run_id": run_id}
        )
        answer: RunView = self._ask(RunView, request)
        return answer

    def list_checkpoints(self, run_id: str) -> CheckpointPage:
        """Lists the checkpoints of a run, newest first."""
        request = Request(
            method="GET", path="/v1/runs/{run_id}/checkpoints", names={"run_id": run_id}
        )
        answer: CheckpointPage = self._ask(CheckpointPage, request)
        return answer

    def delete_checkpoint(self, run_id: str, *, checkpoint_id: str) -> None:
        """Deletes a checkpoint that no run needs any more."""
        request = Request(
            method="DELETE",
            path="/v1/runs/{run_id}/checkpoints/{checkpoint_id}",
            names={"run_id": run_id, "checkpoint_id": checkpoint_id},
        )
        self._ask(None, request)

    def get_checkpoint(self, run_id: str, *, checkpoint_id: str) -> CheckpointView:
        """Returns one checkpoint."""
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/checkpoints/{checkpoint_id}",
            names={"run_id": run_id, "checkpoint_id": checkpoint_id},
        )
        answer: CheckpointView = self._ask(CheckpointView, request)
        return answer

    def list_events(
        self,
        run_id: str,
        *,
        after_seq: int = 0,
        before_seq: int = 0,
        limit: int = 1000,
        type: Sequence[str] = (),
        not_type: Sequence[str] = (),
        order_by: Literal["seq", "-seq"] = "seq",
    ) -> EventPage:
        """Lists the events of a run in order, or newest first with ``order_by=-seq``.

        In the latter case ``before_seq`` continues after a page.
        """
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/events",
            names={"run_id": run_id},
            query={
                "after_seq": after_seq,
                "before_seq": before_seq,
                "limit": limit,
                "type": type,
                "not_type": not_type,
                "order_by": order_by,
            },
        )
        answer: EventPage = self._ask(EventPage, request)
        return answer

    def fork_run(
        self,
        run_id: str,
        *,
        idempotency_key: str = "",
        checkpoint_id: str = "",
        name: str = "",
        overrides: Mapping[str, Any] | None = None,
    ) -> RunView:
        """Starts a new run that continues from a checkpoint of another run.

        It does not repeat the prompts trained up to that checkpoint, unless its data or seed differ.
        """
        request = Request(
            method="POST",
            path="/v1/runs/{run_id}/fork",
            names={"run_id": run_id},
            headers={"idempotency-key": idempotency_key or uuid.uuid4().hex},
            body=given({"checkpoint_id": checkpoint_id, "name": name, "overrides": overrides}),
        )
        answer: RunView = self._ask(RunView, request)
        return answer

    def list_groups(self, run_id: str, *, after_step: int = 0, steps: int = 10) -> GroupPage:
        """Lists the groups that steps trained, those in flight, and those that were dropped with a reason."""
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/groups",
            names={"run_id": run_id},
            query={"after_step": after_step, "steps": steps},
        )
        answer: GroupPage = self._ask(GroupPage, request)
        return answer

    def read_logs(
        self, run_id: str, *, component: str = "", tail_lines: int = 1000
    ) -> Iterator[LogLine]:
        """Returns the last lines of the workers' logs as JSON objects with ``component`` and ``line``."""
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/logs",
            names={"run_id": run_id},
            query={"component": component, "tail_lines": tail_lines},
        )
        for _, item in self._transport.stream(request):
            yield LogLine.model_validate(item)

    def list_metrics(
        self,
        run_id: str,
        *,
        name: Sequence[str] = (),
        from_step: int = 0,
        to_step: int = 0,
        max_points: int = 2000,
    ) -> MetricPage:
        """Lists metrics of the run's steps; more than ``max_points`` steps are thinned to every n-th.

        ``to_step`` 0 is the newest.

        A ``name`` that ends with ``*`` selects all metrics with that prefix.
        """
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/metrics",
            names={"run_id": run_id},
            query={
                "name": name,
                "from_step": from_step,
                "to_step": to_step,
                "max_points": max_points,
            },
        )
        answer: MetricPage = self._ask(MetricPage, request)
        return answer

    def pause_run(self, run_id: str, *, checkpoint: bool = True) -> RunView:
        """Pauses a run: finishes the current step, saves a checkpoint if requested, and stops the workers."""
        request = Request(
            method="POST",
            path="/v1/runs/{run_id}/pause",
            names={"run_id": run_id},
            body=given({"checkpoint": checkpoint}),
        )
        answer: RunView = self._ask(RunView, request)
        return answer

    def resume_run(self, run_id: str) -> RunView:
        """Queues a paused run again; it continues from its checkpoint."""
        request = Request(method="POST", path="/v1/runs/{run_id}/resume", names={"run_id": run_id})
        answer: RunView = self._ask(RunView, request)
        return answer

    def list_samples(
        self,
        run_id: str,
        *,
        split: Literal["train", "heldout"] | None = None,
        step: int | None = None,
        weight_version: int | None = None,
        group_id: str = "",
        row: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        finish_reason: str = "",
        text: str = "",
        order_by: Literal["newest", "best", "worst"] = "newest",
        excerpt: int = 300,
        page_size: int = 50,
        page_token: str = "",
    ) -> SamplePage:
        """Lists recorded samples with their facts and, over REST, the beginnings of their texts."""
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/samples",
            names={"run_id": run_id},
            query={
                "split": split,
                "step": step,
                "weight_version": weight_version,
                "group_id": group_id,
                "row": row,
                "min_reward": min_reward,
                "max_reward": max_reward,
                "finish_reason": finish_reason,
                "text": text,
                "order_by": order_by,
                "excerpt": excerpt,
                "page_size": page_size,
                "page_token": page_token,
            },
        )
        answer: SamplePage = self._ask(SamplePage, request)
        return answer

    def export_samples(
        self,
        run_id: str,
        *,
        split: Literal["train", "heldout"] | None = None,
        step: int | None = None,
        weight_version: int | None = None,
        group_id: str = "",
        row: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        finish_reason: str = "",
        text: str = "",
        order_by: Literal["newest", "best", "worst"] = "newest",
        tokens: bool = True,
        limit: int = 0,
    ) -> Iterator[WholeSample]:
        """Exports recorded samples as JSON lines, streamed as they are read."""
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/samples.jsonl",
            names={"run_id": run_id},
            query={
                "split": split,
                "step": step,
                "weight_version": weight_version,
                "group_id": group_id,
                "row": row,
                "min_reward": min_reward,
                "max_reward": max_reward,
                "finish_reason": finish_reason,
                "text": text,
                "order_by": order_by,
                "tokens": tokens,
                "limit": limit,
            },
        )
        for _, item in self._transport.stream(request):
            yield WholeSample.model_validate(item)

    def get_sample(self, run_id: str, *, sample_id: str) -> WholeSample:
        """Returns one recorded sample with its turns and tokens."""
        request = Request(
            method="GET",
            path="/v1/runs/{run_id}/samples/{sample_id}",
            names={"run_id": run_id, "sample_id": sample_id},
        )
        answer: WholeSample = self._ask(WholeSample, request)
        return answer

    def get_topology(self, run_id: str) -> Topology:
        """Lists the registered workers of a run and their activities."""
        request = Request(method="GET", path="/v1/runs/{run_id}/topology", names={"run_id": run_id})
        answer: Topology = self._ask(Topology, request)
        return answer

    def report_tracker(
        self, run_id: str, *, tracker: str, is_writing: bool | None = None, message: str = ""
    ) -> EventView:
        """Records, as an event of the run, that a tracker has failed or works again."""
        request = Request(
            method="POST",
            path="/v1/runs/{run_id}/trackers/{tracker}",
            names={"run_id": run_id, "tracker": tracker},
            body=given({"is_writing": is_writing, "message": message}),
        )
        answer: EventView = self._ask(EventView, request)
        return answer

    def evaluate_run(self, run_id: str) -> RunView:
        """Evaluates the weights that the run serves now; the event ``Validated`` reports the result."""
        request = Request(
            method="POST", path="/v1/runs/{run_id}/validate", names={"run_id": run_id}
        )
        answer: RunView = self._ask(RunView, request)
        return answer

    def get_version(self) -> VersionView:
        """Returns the release of the controller."""
        request = Request(method="GET", path="/v1/version")
        answer: VersionView = self._ask(VersionView, request)
        return answer
