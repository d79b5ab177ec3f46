"""Clients of the workers that score batches, and of the critic."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from services.common.rpc.client import open_channel
from services.common.runspec.workers import WORKERS
from services.common.task_group import TaskGroup
from services.controller.membership import Worker
from services.wire.batch import KVBatchMeta
from services.wire.step_command import StepCommand
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import ScoringClient, TrainerClient


class BatchScoring:
    """Adds fields to batches, on the workers of all kinds that score batches (``WorkerKind.scores``).

    Without workers the trainer computes the fields itself.
    """

    def __init__(self, queue: TransferQueueClient, run_id: str) -> None:
        self._queue = queue
        self._run_id = run_id
        self._clients: dict[str, list[ScoringClient]] = {}

    @property
    def needs_weights(self) -> bool:
        """True if a worker scores under the weights that the step starts from."""
        return any(WORKERS[role].receives_weights for role in self._clients)

    async def open(self, stack: AsyncExitStack, workers: Sequence[Worker]) -> None:
        """Connects to the workers that score batches; the stack closes the connections."""
        for worker in workers:
            if WORKERS[worker.role].scores == "batches":
                channel = open_channel(worker.address, "worker", run_id=self._run_id)
                client = ScoringClient(await stack.enter_async_context(channel))
                self._clients.setdefault(worker.role, []).append(client)

    async def add_fields(
        self, batch: KVBatchMeta, *, weight_version: int, is_trained: bool, timeout_s: float
    ) -> KVBatchMeta:
        """Adds the fields of all scoring workers to a batch and returns it.

        Args:
            weight_version: Version that the batch will be trained from.
            is_trained: True if the trainer has trained the batch already. Workers that receive the
                trainer's weights then have newer ones; they are not called, because their fields are not
                needed.

        Raises:
            ServiceError: If a worker or the samples are lost.
        """
        if batch.num_keys == 0:
            return batch
        scorers = [
            clients
            for role, clients in self._clients.items()
            if not (is_trained and WORKERS[role].receives_weights)
        ]
        async with TaskGroup() as tasks:
            for clients in scorers:
                for client, rows in zip(clients, _shares(batch, len(clients)), strict=True):
                    if rows:
                        call = client.score_batch(
                            batch.select(rows), weight_version=weight_version, timeout_s=timeout_s
                        )
                        tasks.create_task(call)
        return await self._queue.get_batch(batch.partition_id, batch.keys) if scorers else batch


class CriticClient:
    """Trains the critic; does nothing in runs without a critic that has its own GPUs."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._trainer: TrainerClient | None = None

    @property
    def exists(self) -> bool:
        return self._trainer is not None

    async def open(self, stack: AsyncExitStack, workers: Sequence[Worker]) -> None:
        """Connects to the worker of the role critic, if there is one."""
        for worker in workers:
            if worker.role == "critic":
                channel = open_channel(worker.address, "worker", run_id=self._run_id)
                self._trainer = TrainerClient(await stack.enter_async_context(channel))

    async def train(self, command: StepCommand, *, timeout_s: float) -> Mapping[str, float]:
        """Trains the critic on the batch of a step and returns its metrics. Idempotent.

        Raises:
            ServiceError: If the critic or the samples are lost.
        """
        if self._trainer is None or command.batch.num_keys == 0:
            return {}
        trained = await self._trainer.train_step(command, timeout_s=timeout_s)
        names = (
            *("value_loss", "value_clip_fraction", "seconds_critic", "nonfinite_critic"),
            *("critic_loss_scale", "critic_overflow_updates"),
        )
        metrics = {name: trained.metrics[name] for name in names if name in trained.metrics}
        if (rewound := trained.metrics.get("rewound_to_step")) is not None:
            metrics["critic_rewound_to_step"] = rewound
        return {**metrics, "critic_skipped": float(trained.skipped)}

    async def save(self, step: int, *, keep_steps: Sequence[int], timeout_s: float) -> None:
        """Saves the critic's checkpoint of a step and deletes old ones except ``keep_steps``."""
        if self._trainer is not None:
            await self._trainer.save_checkpoint(step, keep_steps=keep_steps, timeout_s=timeout_s)

    async def await_uploads(self, *, timeout_s: float) -> None:
        """Waits until the object store has all checkpoints of the critic."""
        if self._trainer is not None:
            await self._trainer.await_uploads(timeout_s=timeout_s)


def _shares(batch: KVBatchMeta, num_workers: int) -> list[list[int]]:
    """Returns sample indexes by worker; balances tokens by assigning the longest samples first."""
    lengths = [
        prompt + response
        for prompt, response in zip(
            batch.column("prompt_ids").lengths,
            batch.column("response_ids").lengths,
            strict=True,
        )
    ]
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        worker = loads.index(min(loads))
        shares[worker].append(index)
        loads[worker] += lengths[index]
    return [sorted(share) for share in shares]
