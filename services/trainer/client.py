"""Typed clients of the trainer and of the role logp; the controller trains with them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from services.common.batch import KVBatchMeta
from services.common.rpc.client import call
from slipstream.trainer.v1 import scoring_pb2, scoring_pb2_grpc, trainer_pb2_grpc
from slipstream.trainer.v1 import trainer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """Outcome of a step."""

    step: int
    """Its number."""
    metrics: Mapping[str, float]
    """Reduced numbers by name."""
    skipped: bool
    """Whether the weights stayed as they were, because a number was not finite."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Tokens that did not fit into memory, by key of their sample."""


class TrainerClient:
    """Calls rank 0 of the trainer."""

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
        """Train one batch. Safe to repeat for the newest step.

        Args:
            step: Its number, from 1.
            batch: Whole groups, oldest first.
            weight_version: Number of the weights that the step starts from.
            num_steps: Steps of the whole run.
            timeout_s: Deadline.
            waits: Seconds since the last step, by what was waited for.

        Raises:
            InvalidArgumentError: If the batch lacks what the algorithm needs.
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the trainer still loads.
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
        """Begin with some groups of the next step; :meth:`train_step` then needs less time. Safe to repeat.

        Args:
            step: Number of the step that they belong to.
            groups: Whole groups.
            weight_version: Number of the weights that the step starts from.
            timeout_s: Deadline.

        Raises:
            InvalidArgumentError: If the groups lack what the algorithm needs.
            FailedPreconditionError: If ``step`` does not follow the newest one.
            UnavailableError: If the trainer still loads.
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
        """The newest trained step, once no step is being trained; 0 before the first."""
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
        """Save the training state of the newest step; returns its folder, and how many bytes it holds.

        Args:
            step: The newest one.
            keep_steps: Steps whose checkpoints are kept besides the newest ones.
            timeout_s: Deadline.

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
        """Have all ranks move their state to host memory, after the step that is trained. Safe to repeat."""
        await call(self._stub.Sleep, pb.SleepRequest(), timeout_s=timeout_s, idempotent=True)

    async def wake(self, *, timeout_s: float) -> None:
        """Have all ranks move their state back. Safe to repeat."""
        await call(self._stub.Wake, pb.WakeRequest(), timeout_s=timeout_s, idempotent=True)


class ScoringClient:
    """Calls one worker of the role logp."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = scoring_pb2_grpc.ScoringServiceStub(channel)

    async def score_batch(
        self, batch: KVBatchMeta, *, weight_version: int, timeout_s: float
    ) -> None:
        """Have proximal logprobs added to samples. Safe to repeat.

        Args:
            batch: The samples; those that have the field are left alone.
            weight_version: Number of the weights that are meant.
            timeout_s: Deadline.

        Raises:
            FailedPreconditionError: If the worker serves other weights.
            UnavailableError: If it still loads, or is gone.
        """
        await call(
            self._stub.ScoreBatch,
            scoring_pb2.ScoreBatchRequest(batch=batch.to_proto(), weight_version=weight_version),
            timeout_s=timeout_s,
            idempotent=True,
        )
