"""Typed gRPC clients of a run's workers (rollouts, trainer, role logp), used by the controller. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from services.common.messages import to_message
from services.common.rpc.client import call
from services.wire.batch import KVBatchMeta
from services.wire.step_command import StepCommand
from slipstream.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.trainer.v1 import scoring_pb2, scoring_pb2_grpc, trainer_pb2, trainer_pb2_grpc

DEFERRED: Final = "deferred"
"""Failure reason of groups that were not started because the curriculum's function deferred their prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHistory:
    """History of a prompt, on which the curriculum's function decides."""

    step: int
    """Step whose weights are served."""
    tries: int
    """Number of the prompt's groups with a reward."""
    mean_reward: float
    """Running mean of those groups' mean rewards; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssignment:
    """A group, or a shard of it, that one replica generates; the prompt is identified by its row."""

    group_id: str
    """The group's id; its samples get the keys ``{group_id}.{member}``."""
    attempt: int
    """Number of this attempt, from 1."""
    split: str
    """Set of prompts: ``train`` or ``heldout``; if there are several, ``train.NAME`` or ``heldout.NAME``."""
    row: int
    """Row in the set, from 0."""
    partition_id: str
    """Partition that stores the samples."""
    members: tuple[int, ...]
    """Indices of the samples in the group, from 0."""
    seeds: tuple[int, ...]
    """Sampling seed of each sample."""
    temperatures: tuple[float, ...]
    """Temperature of each sample; 0 is greedy."""
    tried: PromptHistory | None = None
    """History that the curriculum's function receives before sampling; None skips the function."""
    first_attempt: int = 1
    """First attempt whose cached tokens may be resumed; tokens of earlier attempts are discarded."""


class RolloutClient:
    """Client of one rollout worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    async def start_groups(self, groups: Sequence[GroupAssignment]) -> None:
        """Starts groups and returns at once. Safe to repeat.

        Raises:
            InvalidArgumentError: If a group is invalid; then no group was started.
            UnavailableError: If the worker is still loading.
        """
        request = rollout_pb2.StartGroupsRequest(
            groups=[
                to_message(
                    group,
                    rollout_pb2.GroupAssignment,
                    tried=group.tried and to_message(group.tried, rollout_pb2.PromptHistory),
                )
                for group in groups
            ]
        )
        await call(self._stub.StartGroups, request, idempotent=True)

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        """Ends groups without results. Safe to repeat."""
        request = rollout_pb2.CancelGroupsRequest(group_ids=group_ids)
        await call(self._stub.CancelGroups, request, idempotent=True)

    async def interrupt_groups(self, group_ids: Sequence[str] = ()) -> None:
        """Stops groups (none named: all) and caches their tokens, so that any worker can resume them.

        The worker reports them as failed with reason ``interrupted`` before the call returns. Safe to repeat.
        """
        request = rollout_pb2.InterruptGroupsRequest(group_ids=group_ids)
        await call(self._stub.InterruptGroups, request, idempotent=True)

    async def sleep(self, *, timeout_s: float) -> None:
        """Releases the engine's GPU memory; groups are parked meanwhile. Safe to repeat."""
        await call(
            self._stub.Sleep, rollout_pb2.SleepRequest(), timeout_s=timeout_s, idempotent=True
        )

    async def wake(self, *, timeout_s: float) -> None:
        """Takes the engine's GPU memory back; groups continue after the next weights. Safe to repeat."""
        await call(self._stub.Wake, rollout_pb2.WakeRequest(), timeout_s=timeout_s, idempotent=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """Outcome of a step."""

    step: int
    metrics: Mapping[str, float]
    """Metrics, reduced over all ranks, by name."""
    skipped: bool
    """True if no weights changed because a number was not finite."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Tokens that were left out because they did not fit into memory, by sample key."""


_ANSWER_S = 10.0
"""Seconds for the answer of a worker that waited as long as it was asked to."""


class TrainerClient:
    """Client of rank 0 of the trainer."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    async def train_step(self, command: StepCommand, *, timeout_s: float) -> TrainedStep:
        """Trains one batch. Safe to retry for the newest step.

        Raises:
            InternalError: If the batch lacks what the algorithm needs.
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the trainer is still loading.
        """
        request = command.to_proto()
        response = await call(self._stub.TrainStep, request, timeout_s=timeout_s, idempotent=True)
        return TrainedStep(
            step=response.step,
            metrics=dict(response.metrics),
            skipped=response.skipped,
            left_out=dict(response.left_out),
        )

    async def accumulate(
        self, step: int, groups: KVBatchMeta, *, weight_version: int, timeout_s: float
    ) -> None:
        """Accumulates gradients of some groups of the next step, which shortens its :meth:`train_step`.

        Safe to retry.

        Args:
            step: Number of the step that the groups belong to.
            groups: Whole groups.
            weight_version: Version of the weights that the step starts from.

        Raises:
            InternalError: If the groups lack what the algorithm needs.
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the trainer is still loading.
        """
        request = trainer_pb2.AccumulateStepRequest(
            step=step, batch=groups.to_proto(), weight_version=weight_version
        )
        await call(self._stub.AccumulateStep, request, timeout_s=timeout_s, idempotent=True)

    async def newest_step(self, *, timeout_s: float) -> int:
        """Returns the newest trained step, or 0 before the first. Waits for a step that is being trained."""
        request = trainer_pb2.GetNewestStepRequest()
        response = await call(
            self._stub.GetNewestStep, request, timeout_s=timeout_s, idempotent=True
        )
        return response.step

    async def save_checkpoint(
        self, step: int, *, keep_steps: Sequence[int] = (), timeout_s: float
    ) -> tuple[str, int]:
        """Saves the training state of the newest step; returns the checkpoint's folder and its size in bytes.

        Args:
            keep_steps: Steps whose checkpoints are kept besides the newest ones.

        Raises:
            FailedPreconditionError: If ``step`` is not the newest one.
        """
        request = trainer_pb2.SaveCheckpointRequest(step=step, keep_steps=keep_steps)
        response = await call(
            self._stub.SaveCheckpoint, request, timeout_s=timeout_s, idempotent=True
        )
        return response.path, response.size_bytes

    async def await_uploads(self, *, timeout_s: float) -> None:
        """Waits until the object store has all saved checkpoints; returns at once without a store.

        Raises:
            DeadlineExceededError: If it has not in time; the message has the first cause.
            FailedPreconditionError: If one cannot be uploaded.
        """
        request = trainer_pb2.AwaitUploadsRequest(timeout_s=timeout_s)
        await call(
            self._stub.AwaitUploads, request, timeout_s=timeout_s + _ANSWER_S, idempotent=True
        )

    async def sleep(self, *, timeout_s: float) -> None:
        """Moves the training state of all ranks to host memory, after the running step. Safe to retry."""
        await call(
            self._stub.Sleep, trainer_pb2.SleepRequest(), timeout_s=timeout_s, idempotent=True
        )

    async def wake(self, *, timeout_s: float) -> None:
        """Moves the training state of all ranks back to their GPUs. Safe to retry."""
        await call(self._stub.Wake, trainer_pb2.WakeRequest(), timeout_s=timeout_s, idempotent=True)


class ScoringClient:
    """Client of one worker of the role logp."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = scoring_pb2_grpc.ScoringServiceStub(channel)

    async def score_batch(
        self, batch: KVBatchMeta, *, weight_version: int, timeout_s: float
    ) -> None:
        """Adds proximal logprobs to stored samples. Safe to retry.

        Args:
            batch: The samples; those that already have the field are skipped.

        Raises:
            FailedPreconditionError: If the worker holds another weight version.
            UnavailableError: If the worker is still loading, or is gone.
        """
        request = scoring_pb2.ScoreBatchRequest(
            batch=batch.to_proto(), weight_version=weight_version
        )
        await call(self._stub.ScoreBatch, request, timeout_s=timeout_s, idempotent=True)
