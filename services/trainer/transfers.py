"""Transfers of samples between the transferqueue and training threads."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from torch import Tensor

from services.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    ServiceError,
)
from services.common.fields import MODEL_INPUTS, TURN_INPUTS
from services.trainer.batch.samples import SampleInputs
from services.wire.batch import KVBatchMeta
from services.wire.data.client import DataClient
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs, decode_bundles

Fetch = Callable[[KVBatchMeta, Sequence[str]], dict[str, Jagged]]
"""Fetches fields of samples; blocks until they have arrived."""
Add = Callable[[KVBatchMeta, Mapping[str, Sequence[Tensor]]], None]
"""Adds fields to stored samples; blocks until they are stored."""

StoreRecords = Callable[[str, Sequence[str], Mapping[str, Sequence[Tensor]]], None]
"""Stores fields under new keys of a partition without waiting for the result."""

_TIMEOUT_S = 300.0
# Short, because nothing waits for sample records.
_RECORD_TIMEOUT_S = 5.0
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


class Transfers(Protocol):
    """Source of the samples that a rank trains."""

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        """Fetches fields of samples; see :data:`Fetch`."""

    def store_records(
        self, partition_id: str, keys: Sequence[str], fields: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Stores records for people to read; see :data:`StoreRecords`."""


class QueueTransfers:
    """Runs transfers on the event loop for other threads; a call blocks until its transfer ends."""

    def __init__(self, data: DataClient, loop: asyncio.AbstractEventLoop) -> None:
        self._data = data
        self._loop = loop
        self._storing: Future[None] | None = None

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        problem = f"the transferqueue did not return {meta.num_keys} samples"
        return _wait(self._data.get(meta, fields), self._loop, problem)

    def add(self, meta: KVBatchMeta, fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Adds fields to stored samples; succeeds if they are there already, so a request can be retried."""
        rows = {name: list(tensors) for name, tensors in fields.items()}
        problem = f"the transferqueue did not store {', '.join(rows)} of {meta.num_keys} samples"
        with suppress(AlreadyExistsError):
            _wait(self._data.add_fields(meta, rows), self._loop, problem)

    def store_records(
        self, partition_id: str, keys: Sequence[str], fields: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Stores records for people to read, without waiting.

        Drops the new records if earlier ones are still being stored.
        """
        if self._storing is not None and not self._storing.done():
            logger.warning("sample records dropped: earlier ones are still being stored")
            return
        rows = {name: list(tensors) for name, tensors in fields.items()}
        storing = self._store_records(partition_id, keys, rows)
        self._storing = asyncio.run_coroutine_threadsafe(storing, self._loop)

    async def finish(self) -> None:
        """Waits until the last records are stored."""
        if self._storing is not None:
            await asyncio.wrap_future(self._storing)

    async def _store_records(
        self, partition_id: str, keys: Sequence[str], fields: Mapping[str, list[Tensor]]
    ) -> None:
        try:
            async with asyncio.timeout(_RECORD_TIMEOUT_S):
                await self._data.put(partition_id, keys, fields)
        except (ServiceError, TimeoutError) as error:
            logger.warning("sample records dropped", extra={"cause": type(error).__name__})


def fetch_model_inputs(fetch: Fetch, meta: KVBatchMeta) -> list[SampleInputs]:
    """Fetches the model inputs of samples; fetches inputs of a prompt once for all samples that share it.

    Returns:
        The inputs of each sample; empty if the run has none. Prompts with equal inputs have the same
        :class:`ModelInputs` object.
    """
    if MODEL_INPUTS not in meta.field_names:
        return []
    column = meta.column(MODEL_INPUTS)
    locations = list(zip(column.blob_indexes, column.offsets, strict=True))
    distinct = {location: row for row, location in reversed(list(enumerate(locations)))}
    columns = fetch(meta.select(list(distinct.values())), (MODEL_INPUTS,))[MODEL_INPUTS]
    bundles = map(ModelInputs.from_encoded, columns.unbind())
    by_place, by_digest = dict(zip(distinct, bundles, strict=True)), dict[str, ModelInputs]()
    prompts = [by_digest.setdefault(by_place[at].digest, by_place[at]) for at in locations]
    if TURN_INPUTS not in meta.field_names:
        return [SampleInputs(prompt) for prompt in prompts]
    turns = map(decode_bundles, fetch(meta, (TURN_INPUTS,))[TURN_INPUTS].unbind())
    return [SampleInputs(prompt, rest) for prompt, rest in zip(prompts, turns, strict=True)]


def of_vocabulary(fetch: Fetch, vocab_size: int) -> Fetch:
    """Wraps ``fetch`` to raise ``InvalidArgumentError`` for tokens that the model does not have.

    Without this check, the embedding would fail with an index error that does not name the sample.
    """

    def checked(meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        columns = fetch(meta, fields)
        for name in {"prompt_ids", "response_ids"} & columns.keys():
            values = columns[name].values
            strange = ((values < 0) | (values >= vocab_size)).nonzero()
            if len(strange):
                index = int(strange[0])
                row = int((columns[name].offsets() <= index).sum()) - 1
                raise InvalidArgumentError(
                    f"sample {meta.keys[row]} has the token {int(values[index])} in {name}, but the model "
                    f"has 0 to {vocab_size - 1}; check that model.tokenizer belongs to model.path",
                    key=meta.keys[row],
                )
        return columns

    return checked


def _wait(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop, problem: str) -> _T:
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(_TIMEOUT_S)
    except TimeoutError as error:
        future.cancel()
        raise DeadlineExceededError(
            f"{problem} within {_TIMEOUT_S:.0f} s; check its log"
        ) from error
