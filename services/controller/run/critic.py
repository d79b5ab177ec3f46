"""The critic of one run where it has processes of its own: values before a step, training beside it.

A critic that is lost goes on from its newest checkpoint, without the steps since then: values are a baseline,
and an older one does not make advantages wrong, only noisier. So the policy need not go back for it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from services.common.batch import KVBatchMeta
from services.common.grpc_client import open_channel
from services.controller.membership.registry import Worker
from services.trainer.client import ScoringClient, TrainerClient
from services.transferqueue.client import TransferQueueClient


class CriticCalls:
    """Calls the critic; without one nothing is done.

    Args:
        queue: Where the samples are.
        run_id: The run that the critic belongs to.
    """

    def __init__(self, queue: TransferQueueClient, run_id: str) -> None:
        self._queue = queue
        self._run_id = run_id
        self._clients: tuple[ScoringClient, TrainerClient] | None = None

    async def open(self, stack: AsyncExitStack, workers: Sequence[Worker]) -> None:
        """Connect to the worker of the role critic, if there is one."""
        for worker in workers:
            channel = open_channel(worker.address, "worker", run_id=self._run_id)
            connected = await stack.enter_async_context(channel)
            self._clients = ScoringClient(connected), TrainerClient(connected)

    async def add_values(
        self, batch: KVBatchMeta, *, weight_version: int, timeout_s: float
    ) -> KVBatchMeta:
        """Have values added to a batch; returns the batch with them.

        Raises:
            ServiceError: If the critic is lost or the samples are gone.
        """
        if self._clients is None or batch.num_keys == 0:
            return batch
        scoring, _ = self._clients
        await scoring.score_batch(batch, weight_version=weight_version, timeout_s=timeout_s)
        return await self._queue.get_batch(batch.partition_id, batch.keys)

    async def train(
        self,
        step: int,
        batch: KVBatchMeta,
        *,
        weight_version: int,
        num_steps: int,
        timeout_s: float,
    ) -> Mapping[str, float]:
        """Train the critic on the batch of a step; returns its metrics. Safe to repeat.

        Raises:
            ServiceError: If the critic is lost or the samples are gone.
        """
        if self._clients is None or batch.num_keys == 0:
            return {}
        _, trainer = self._clients
        trained = await trainer.train_step(
            step,
            batch,
            weight_version=weight_version,
            num_steps=num_steps,
            timeout_s=timeout_s,
        )
        names = ("value_loss", "value_clip_fraction", "seconds_critic", "nonfinite_critic")
        return {name: trained.metrics[name] for name in names if name in trained.metrics}

    async def save(self, step: int, *, keep_steps: Sequence[int], timeout_s: float) -> None:
        """Save the critic beside the trainer's checkpoint of a step; as old ones are kept as of that."""
        if self._clients is not None:
            _, trainer = self._clients
            await trainer.save_checkpoint(step, keep_steps=keep_steps, timeout_s=timeout_s)
