"""Typed gRPC clients of the trainer and of the role logp, used by the controller. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from services.common.rpc.client import call
from services.wire.batch import KVBatchMeta
from slipstream.trainer.v1 import scoring_pb2, scoring_pb2_grpc, trainer_pb2_grpc
from slipstream.trainer.v1 import trainer_pb2 as pb


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


class TrainerClient:
    """Client of rank 0 of the trainer."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    async def train_step(
        self,
        step: int,
        batch: KVBatchMeta,
        *,
        weight_version: int,
        num_steps: int,
        timeout_s: float,
        waits: Mapping[str, float] | None = None,
    ) -> TrainedStep:
        """Trains one batch. Safe to retry for the newest step.

        Args:
            step: Number of the step, from 1.
            batch: Whole groups, oldest first.
            weight_version: Version of the weights that the step starts from.
            num_steps: Steps of the whole run.
            timeout_s: Deadline in seconds.
            waits: Seconds that the run has waited since the last step, by reason.

        Raises:
            InvalidArgumentError: If the batch lacks what the algorithm needs.
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the trainer is still loading.
        """
        response = await call(
            self._stub.TrainStep,
            pb.TrainStepRequest(
                step=step,
                batch=batch.to_proto(),
                weight_version=weight_version,
                num_steps=num_steps,
                waits=waits,
            ),
            timeout_s=timeout_s,
            idempotent=True,
        )
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
            timeout_s: Deadline in seconds.

        Raises:
            InvalidArgumentError: If the groups lack what the algorithm needs.
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the trainer is still loading.
        """
        await call(
            self._stub.AccumulateStep,
            pb.AccumulateStepRequest(
                step=step, batch=groups.to_proto(), weight_version=weight_version
            ),
            timeout_s=timeout_s,
            idempotent=True,
        )

    async def newest_step(self, *, timeout_s: float) -> int:
        """Returns the newest trained step, or 0 before the first. Waits for a step that is being trained."""
        response = await call(
            self._stub.GetNewestStep,
            pb.GetNewestStepRequest(),
            timeout_s=timeout_s,
            idempotent=True,
        )
        return response.step

    async def save_checkpoint(
        self, step: int, *, keep_steps: Sequence[int] = (), timeout_s: float
    ) -> tuple[str, int]:
        """Saves the training state of the newest step; returns the checkpoint's folder and its size in bytes.

        Args:
            step: The newest step.
            keep_steps: Steps whose checkpoints are kept besides the newest ones.
            timeout_s: Deadline in seconds.

        Raises:
            FailedPreconditionError: If ``step`` is not the newest one.
        """
        response = await call(
            self._stub.SaveCheckpoint,
            pb.SaveCheckpointRequest(step=step, keep_steps=keep_steps),
            timeout_s=timeout_s,
            idempotent=True,
        )
        return response.path, response.size_bytes

    async def sleep(self, *, timeout_s: float) -> None:
        """Moves the training state of all ranks to host memory, after the running step. Safe to retry."""
        await call(self._stub.Sleep, pb.SleepRequest(), timeout_s=timeout_s, idempotent=True)

    async def wake(self, *, timeout_s: float) -> None:
        """Moves the training state of all ranks back to their GPUs. Safe to retry."""
        await call(self._stub.Wake, pb.WakeRequest(), timeout_s=timeout_s, idempotent=True)


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
            weight_version: Version of the weights to score with.
            timeout_s: Deadline in seconds.

        Raises:
            FailedPreconditionError: If the worker holds another weight version.
            UnavailableError: If the worker is still loading, or is gone.
        """
        await call(
            self._stub.ScoreBatch,
            scoring_pb2.ScoreBatchRequest(batch=batch.to_proto(), weight_version=weight_version),
            timeout_s=timeout_s,
            idempotent=True,
        )
