"""The role ref_logp: adds reference logprobs to finished groups, beside generation and training.

Samples are leased from the transferqueue, so work that dies with a worker comes back to the others, and the
controller sees a group only once the field is there.
"""

import asyncio
import logging
import time

from services.common.batch import KVBatchMeta
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
from services.transferqueue.client import TransferQueueClient
from services.transferqueue.types import AcquireRequest

logger = logging.getLogger(__name__)

_WAIT_S = 60.0
# A transferqueue that restarts, or that does not hold the run yet, is asked again after this time.
_RETRY_S = 0.5
# What a dead worker held goes to another one after this time. A live one that takes longer may see its work
# done twice, which changes nothing.
_LEASE_S = 15.0
_CONSUMER = "ref_logp"


class ReferenceScoring:
    """Scores groups until it is cancelled.

    Args:
        spec: The run.
        run_id: Its name, and that of its samples' partition.
        leader: Holds the reference, with all ranks.
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
        """Lease groups and score them, for ever."""
        while True:
            try:
                leases = await self._lease()
                await self._score(leases)
            except (UnavailableError, NotFoundError) as error:
                logger.info("nothing can be scored now", extra={"reason": str(error)})
                await asyncio.sleep(_RETRY_S)

    async def _lease(self) -> list[KVBatchMeta]:
        """One group, and what else is there already, up to the tokens of one forward pass of all ranks."""
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
            # A group was given up meanwhile; the others are scored one by one.
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
