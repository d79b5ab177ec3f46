"""Adds the critic's values to stored samples, with all ranks of the critic."""

from collections.abc import Callable

import torch

from services.common.batch import KVBatchMeta
from services.common.jagged import Jagged
from services.trainer.batch.plan import plan_step
from services.trainer.batch.samples import Cohort, Samples
from services.trainer.critic.runner import CriticRunner
from services.trainer.ranks.collectives import Ranks
from services.trainer.ranks.transfers import Add, Fetch

_INPUTS = ("prompt_ids", "response_ids")


class Values:
    """One rank's part in scoring a batch. Every rank must be asked the same.

    Args:
        critic: Scores.
        fetch: Brings samples from the transferqueue.
        add: Takes the values there.
        ranks: The critic's data-parallel ranks.
        cost: Cost of a sequence by its length, for balancing.
        max_tokens: Packed tokens of one forward pass.
    """

    def __init__(
        self,
        critic: CriticRunner,
        *,
        fetch: Fetch,
        add: Add,
        ranks: Ranks,
        cost: Callable[[int], float],
        max_tokens: int,
    ) -> None:
        self._critic = critic
        self._fetch = fetch
        self._add = add
        self._ranks = ranks
        self._cost = cost
        self._max_tokens = max_tokens

    def add(self, meta: KVBatchMeta) -> None:
        """Add ``values`` to samples that have none. Blocks; runs in a thread.

        Raises:
            DataLossError: If another rank could not fetch or store its share.
        """
        plan = plan_step(
            Cohort.from_meta(meta),
            num_updates=1,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            max_tokens=self._max_tokens,
            cost=self._cost,
        )
        share = meta.select(plan.rows)
        empty = Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        fields = dict.fromkeys(_INPUTS, empty)
        with self._ranks.agreed("fetch its share of the batch"):
            if plan.rows:
                fields = self._fetch(share, _INPUTS)
        samples = Samples(
            rows=torch.tensor(plan.rows, dtype=torch.int64),
            prompts=fields["prompt_ids"],
            responses=fields["response_ids"],
            rewards=torch.zeros(len(plan.rows)),
            tokens={},
        )
        values = self._critic.values(samples, plan)
        with self._ranks.agreed("store its values"):
            if plan.rows:
                self._add(share, {"values": Jagged(values, samples.responses.lengths).unbind()})
