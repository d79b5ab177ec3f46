"""Clients of the logp and critic workers, which add log probabilities and values to batches."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from services.common.rpc.client import open_channel
from services.common.task_group import TaskGroup
from services.controller.membership.registry import Worker
from services.wire.batch import KVBatchMeta
from services.wire.trainer import ScoringClient, TrainerClient
from services.wire.transferqueue.client import TransferQueueClient


class LogpScoring:
    """Scores batches on the logp workers; without workers the trainer scores them itself.

    Args:
        queue: Client of the transferqueue.
        run_id: Identifier of the run.
    """

    def __init__(self, queue: TransferQueueClient, run_id: str) -> None:
        self._queue = queue
        self._run_id = run_id
        self._stack = AsyncExitStack()
        self._clients: list[ScoringClient] = []

    @property
    def is_active(self) -> bool:
        """True if the run has logp workers."""
        return bool(self._clients)

    async def open(self, workers: Sequence[Worker]) -> None:
        """Connects to the workers of the role logp."""
        for worker in workers:
            channel = open_channel(worker.address, "worker", run_id=self._run_id)
            self._clients.append(ScoringClient(await self._stack.enter_async_context(channel)))

    async def close(self) -> None:
        """Closes the connections."""
        await self._stack.aclose()

    async def add_proximal(
        self, batch: KVBatchMeta, *, weight_version: int, timeout_s: float
    ) -> KVBatchMeta:
        """Adds proximal log probabilities to a batch and returns it.

        Args:
            batch: Samples to score.
            weight_version: Version that the batch will be trained from.
            timeout_s: Deadline of each call, in seconds.

        Raises:
            ServiceError: If a worker or the samples are lost.
        """
        if not self._clients or batch.num_keys == 0:
            return batch
        async with TaskGroup() as tasks:
            for client, rows in zip(self._clients, self._shares(batch), strict=True):
                if rows:
                    tasks.create_task(
                        client.score_batch(
                            batch.select(rows), weight_version=weight_version, timeout_s=timeout_s
                        )
                    )
        return await self._queue.get_batch(batch.partition_id, batch.keys)

    def _shares(self, batch: KVBatchMeta) -> list[list[int]]:
        """Returns sample indexes by worker; balances tokens by assigning the longest samples first."""
        lengths = [
            prompt + response
            for prompt, response in zip(
                batch.column("prompt_ids").lengths,
                batch.column("response_ids").lengths,
                strict=True,
            )
        ]
        shares: list[list[int]] = [[] for _ in self._clients]
        loads = [0] * len(self._clients)
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            worker = loads.index(min(loads))
            shares[worker].append(index)
            loads[worker] += lengths[index]
        return [sorted(share) for share in shares]


class CriticClient:
    """Scores batches on the critic and trains it; does nothing in runs without a critic.

    Args:
        queue: Client of the transferqueue.
        run_id: Identifier of the run.
    """

    def __init__(self, queue: TransferQueueClient, run_id: str) -> None:
        self._queue = queue
        self._run_id = run_id
        self._clients: tuple[ScoringClient, TrainerClient] | None = None

    async def open(self, stack: AsyncExitStack, workers: Sequence[Worker]) -> None:
        """Connects to the worker of the role critic, if there is one."""
        for worker in workers:
            channel = open_channel(worker.address, "worker", run_id=self._run_id)
            connected = await stack.enter_async_context(channel)
            self._clients = ScoringClient(connected), TrainerClient(connected)

    async def add_values(
        self, batch: KVBatchMeta, *, weight_version: int, timeout_s: float
    ) -> KVBatchMeta:
        """Adds values to a batch and returns it.

        Raises:
            ServiceError: If the critic or the samples are lost.
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
        """Trains the critic on the batch of a step and returns its metrics. Idempotent.

        Raises:
            ServiceError: If the critic or the samples are lost.
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
        """Saves the critic's checkpoint of a step and deletes old ones except ``keep_steps``."""
        if self._clients is not None:
            _, trainer = self._clients
            await trainer.save_checkpoint(step, keep_steps=keep_steps, timeout_s=timeout_s)
