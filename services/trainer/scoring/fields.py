"""Adds logprobs to stored samples: fetch, score, put."""

import asyncio

import torch

from services.common.batch import KVBatchMeta
from services.common.columns import MISSING
from services.common.errors import AlreadyExistsError
from services.trainer.scoring.scorer import Scorer
from services.transferqueue.dataclient import DataClient

VERSION_OF = {"proximal_logprobs": "proximal_version"}
"""Field that says which weights another field belongs to."""


async def add_logprobs(
    meta: KVBatchMeta,
    field: str,
    *,
    scorer: Scorer,
    data: DataClient,
    version: int | None = None,
) -> int:
    """Score those samples that lack a field, and add it; returns how many there were.

    Args:
        meta: The samples.
        field: ``ref_logprobs`` or ``proximal_logprobs``.
        scorer: Scores them.
        data: The transferqueue.
        version: Weights that are meant; None takes those that the scorer has.

    Raises:
        NotFoundError: If samples were released meanwhile.
        FailedPreconditionError: If the scorer has other weights.
    """
    meta = lacking(meta, field)
    if meta.num_keys == 0:
        return 0
    tokens = await data.get(meta, ("prompt_ids", "response_ids"))
    logprobs = await asyncio.to_thread(
        scorer.score, tokens["prompt_ids"], tokens["response_ids"], version=version
    )
    fields = {field: logprobs}
    if version is not None and field in VERSION_OF:
        fields[VERSION_OF[field]] = [torch.tensor([version])] * len(logprobs)
    try:
        await data.add_fields(meta, fields)
    except AlreadyExistsError:
        # A lease that ran out went to another worker, which was faster.
        return 0
    return meta.num_keys


def lacking(meta: KVBatchMeta, field: str) -> KVBatchMeta:
    """Those samples of a batch that do not have a field yet."""
    present = [column.blob_indexes for column in meta.fields if column.name == field]
    return meta.select(
        [i for i in range(meta.num_keys) if all(blobs[i] == MISSING for blobs in present)]
    )
