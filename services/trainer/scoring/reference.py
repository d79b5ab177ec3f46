"""Role ref_logp: adds reference logprobs to finished groups, in parallel with generation and training.

Samples are leased from the transferqueue: if a worker dies, its leases go to the other workers. The
controller sees a group only after the field is stored.
"""

import asyncio
import logging
import time

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from services.common.fields import partition_id
from services.common.runspec.run import RunSpec
from services.trainer import metrics
from services.trainer.scoring.leader import ScoringLeader
from services.wire.batch import KVBatchMeta
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import AcquireRequest

logger = logging.getLogger(__name__)

_WAIT_S = 60.0
# Delay before a retry if the transferqueue restarts or does not hold the run yet.
_RETRY_S = 0.5
# After this time, the samples of a dead worker go to another one. If a live worker takes longer, its work
# may be done twice, which changes nothing.
_LEASE_S = 15.0
_CONSUMER = "ref_logp"


class ReferenceScoring:
    """Scores groups until it is cancelled.

    Args:
        spec: The run.
        run_id: The run's id, which also names the partition of its samples.
        leader: Scores with all ranks that hold the reference.
        queue: Leases samples.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        *,
        leader: ScoringLeader,
        queue: TransferQueueClient,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._leader = leader
        self._queue = queue

    async def run(self) -> None:
        """Leases and scores groups forever."""
        while True:
            try:
                leases = await self._lease()
                await self._score(leases)
            except (UnavailableError, NotFoundError) as error:
                logger.info("nothing can be scored now", extra={"reason": str(error)})
                await asyncio.sleep(_RETRY_S)

    async def _lease(self) -> list[KVBatchMeta]:
        """Leases one group, and further available ones up to the tokens of one forward pass of all ranks."""
        most = self._spec.trainer.tokens_per_micro_batch * self._spec.topology.scoring_ranks
        waited_from = time.perf_counter()
        leases: list[KVBatchMeta] = []
        tokens, wait_s = 0, _WAIT_S
        while tokens < most:
            try:
                meta = await self._queue.acquire(self._request(wait_s))
            except DeadlineExceededError:
                break
            leases.append(meta)
            tokens += sum(sum(meta.column(name).lengths) for name in ("prompt_ids", "response_ids"))
            wait_s = 0.0
        waited_s = time.perf_counter() - waited_from
        metrics.IDLE_SECONDS.labels(self._run_id, "no_data").inc(waited_s)
        return leases

    def _request(self, wait_s: float) -> AcquireRequest:
        return AcquireRequest(
            partition_id=partition_id(self._run_id, "train"),
            consumer=_CONSUMER,
            fields=("prompt_ids", "response_ids"),
            num_keys=self._spec.samples_per_group,
            group_size=self._spec.samples_per_group,
            lease_s=_LEASE_S,
            wait_s=wait_s,
        )

    async def _score(self, leases: list[KVBatchMeta]) -> None:
        if not leases:
            return
        start = time.perf_counter()
        whole = KVBatchMeta.concat(leases)
        try:
            await asyncio.to_thread(self._leader.add, whole)
        except NotFoundError as error:
            # One group was released meanwhile; score the others one by one.
            logger.info("samples are gone", extra={"reason": str(error)})
            if len(leases) > 1:
                for meta in leases:
                    await self._score([meta])
            return
        for meta in leases:
            await self._acknowledge(meta)
        metrics.STEP_SECONDS.labels(self._run_id, "ref_logprob").observe(
            time.perf_counter() - start
        )

    async def _acknowledge(self, meta: KVBatchMeta) -> None:
        try:
            await self._queue.ack(meta)
        except FailedPreconditionError as error:
            logger.info("lease ran out; the samples are scored", extra={"reason": str(error)})
