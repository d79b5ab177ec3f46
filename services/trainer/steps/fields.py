"""Adds a computed field to stored samples, with all ranks of a worker: fetch, score, store."""

from collections.abc import Mapping

import torch

from services.common.fields import ROUTED_EXPERTS, SAMPLING_MASK
from services.trainer.batch.samples import BatchFacts, SampleInputs, Samples, sequences_of
from services.trainer.batch.step_plan import plan_step, shard_of
from services.trainer.engines.base import TrainEngine
from services.trainer.transfers import Add, Fetch, fetch_model_inputs
from services.wire.batch import MISSING, KVBatchMeta
from services.wire.data.jagged import Jagged

VERSION_OF = {"proximal_logprobs": "proximal_version"}
"""Name of the field that stores the weight version of another field."""

_INPUTS = ("prompt_ids", "response_ids")
_OPTIONAL_INPUTS = ("version_runs", ROUTED_EXPERTS, SAMPLING_MASK)


class FieldScoring:
    """One rank's part in adding a field to a batch. All ranks must make the same calls.

    Args:
        field: ``values``, ``ref_logprobs`` or ``proximal_logprobs``.
        engine: Engine that computes the field; all ranks call it, including those without samples.
        shares_prefixes: True if tokens that samples have in common are computed once.
    """

    def __init__(
        self, field: str, engine: TrainEngine, *, fetch: Fetch, add: Add, shares_prefixes: bool
    ) -> None:
        self.field = field
        self._engine = engine
        self._fetch = fetch
        self._add = add
        self._ranks = engine.ranks
        self._shares_prefixes = shares_prefixes

    def add(self, meta: KVBatchMeta, *, version: int = 0) -> None:
        """Adds the field to samples that do not have it. Blocks; runs in a thread.

        Args:
            meta: The samples; at least one.
            version: Version of the weights that score, for a field that stores it.

        Raises:
            NotFoundError: If samples were released meanwhile.
            DataLossError: If another rank could not fetch or store its share.
        """
        share = shard_of(
            BatchFacts.from_meta(meta),
            num_updates=1,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            cost=self._engine.model.cost,
            shares_prefixes=self._shares_prefixes,
        )
        rank_meta = meta.select(share.rows)
        names = (*_INPUTS, *(name for name in _OPTIONAL_INPUTS if name in meta.field_names))
        empty = Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        inputs: Mapping[str, Jagged] = dict.fromkeys(_INPUTS, empty)
        model_inputs: list[SampleInputs] = []
        with self._ranks.fail_together("fetch its share of the batch"):
            if share.rows:
                inputs = self._fetch(rank_meta, names)
                model_inputs = fetch_model_inputs(self._fetch, rank_meta)
        sequences = sequences_of(inputs)
        samples = Samples(
            rows=torch.tensor(share.rows, dtype=torch.int64)[sequences.samples],
            numbers=sequences.numbers,
            prompts=sequences.prompts,
            responses=sequences.responses,
            rewards=torch.zeros(len(sequences.samples)),
            tokens={},
            experts=sequences.experts,
            masks=sequences.masks,
            inputs=sequences.inputs_of(model_inputs),
        )
        plan = plan_step(
            share,
            samples,
            ranks=self._ranks,
            shares_prefixes=self._shares_prefixes,
            bounds=self._engine.bounds,
        )
        scored = sequences.of_samples(self._engine.forward_logprobs(samples, plan))
        scores = Jagged(scored, inputs["response_ids"].lengths)
        fields = {self.field: scores.unbind()}
        if self.field in VERSION_OF:
            fields[VERSION_OF[self.field]] = [torch.tensor([version])] * len(share.rows)
        with self._ranks.fail_together(f"store its {self.field}"):
            if share.rows:
                self._add(rank_meta, fields)


def lacking(meta: KVBatchMeta, field: str) -> KVBatchMeta:
    """Returns those samples of a batch that do not have a field yet."""
    present = [column.blob_indexes for column in meta.fields if column.name == field]
    return meta.select(
        [i for i in range(meta.num_keys) if all(blobs[i] == MISSING for blobs in present)]
    )
