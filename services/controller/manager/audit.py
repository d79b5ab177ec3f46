"""Read access to a run's history: metrics, groups and checkpoints."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from services.common.errors import NotFoundError, ServiceError
from services.controller.rules.ledger import Group
from services.controller.run.train.checkpoints import Checkpoint, CheckpointStore
from services.controller.schemas import (
    GroupView,
    Metric,
    MetricHistogram,
    MetricPage,
    SampleFilter,
    SampleView,
    WholeSample,
)
from services.controller.store import ledgers as ledger_store
from services.controller.store.database import Database
from services.controller.store.ledgers import StepMetrics, StepRecord
from services.controller.store.tables import DEAD_LETTERS
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import SampleRecordQuery

logger = logging.getLogger(__name__)

_DELETE_TIMEOUT_S = 10.0
_FIELDS = {field.name for field in fields(SampleRecordQuery)}


class SampleReader:
    """Reads recorded samples of all runs."""

    def __init__(self, queue: TransferQueueClient) -> None:
        self._queue = queue

    async def page(
        self, run_id: str, only: SampleFilter, *, after: str, limit: int, excerpt: int
    ) -> list[SampleView]:
        """Returns up to ``limit`` samples after the sample ``after``, with excerpts of their texts."""
        query = _query(only, after=after, limit=limit, excerpt=excerpt)
        lines = await self._read(run_id, query)
        return [SampleView.model_validate_json(line) for line in lines.splitlines()]

    async def get(self, run_id: str, sample_id: str) -> WholeSample:
        """Returns one sample with its turns and tokens.

        Raises:
            NotFoundError: If the sample is not recorded.
        """
        query = SampleRecordQuery(sample_id=sample_id, limit=1, with_turns=True, with_tokens=True)
        line = await self._read(run_id, query)
        if not line:
            raise NotFoundError(
                f"run {run_id} has no recorded sample {sample_id}; list its samples",
                run_id=run_id,
            )
        return WholeSample.model_validate_json(line)

    async def export(
        self, run_id: str, only: SampleFilter, *, limit: int, with_tokens: bool
    ) -> AsyncIterator[bytes]:
        """Returns a stream of whole samples as JSON lines; its first chunk has arrived when this returns."""
        query = _query(only, limit=limit, with_turns=True, with_tokens=with_tokens)
        chunks = self._queue.read_sample_records(run_id, query)
        first = await anext(chunks, b"")

        async def all_chunks() -> AsyncIterator[bytes]:
            yield first
            async for chunk in chunks:
                yield chunk

        return all_chunks()

    async def delete_records(self, run_id: str, *, directory: str = "") -> None:
        """Deletes the recorded samples of a run, also below a URL; logs a warning if that fails."""
        try:
            async with asyncio.timeout(_DELETE_TIMEOUT_S):
                await self._queue.delete_sample_records(run_id, directory=directory)
        except (ServiceError, TimeoutError) as error:
            # The size limit of all sample records removes them eventually.
            logger.warning(
                "cannot delete recorded samples", extra={"run": run_id, "reason": str(error)}
            )

    async def _read(self, run_id: str, query: SampleRecordQuery) -> bytes:
        return b"".join([chunk async for chunk in self._queue.read_sample_records(run_id, query)])


def _query(only: SampleFilter, **restrictions: object) -> SampleRecordQuery:
    filters = only.model_dump(include=_FIELDS, exclude_none=True)
    return SampleRecordQuery(**(filters | restrictions))


_HISTOGRAMS = "histograms"


def as_columns(steps: Sequence[StepMetrics], names: Collection[str]) -> MetricPage:
    """Converts step metrics into columns.

    Args:
        steps: Steps in ascending order.
        names: Metrics and histograms to include; empty means all. ``NAME*`` selects all with that
            prefix.
    """
    numbers = {name for step in steps for name in step.metrics} - {_HISTOGRAMS}
    spreads = [step.metrics.get(_HISTOGRAMS, {}) for step in steps]
    spread = {name for histogram in spreads for name in histogram}
    return MetricPage(
        steps=[step.step for step in steps],
        times=[datetime.fromtimestamp(step.time, UTC) for step in steps],
        items=[
            Metric(name=name, values=[step.metrics.get(name) for step in steps])
            for name in _wanted(numbers, names)
        ],
        histograms=[
            _histogram(name, [histogram.get(name, {}) for histogram in spreads])
            for name in _wanted(spread, names)
        ],
    )


def _wanted(recorded: Collection[str], names: Collection[str]) -> list[str]:
    beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
    return sorted(
        name for name in recorded if not names or name in names or name.startswith(beginnings)
    )


def _histogram(name: str, spreads: Sequence[dict[str, int]]) -> MetricHistogram:
    bounds = sorted({int(bound) for counter in spreads for bound in counter})
    counts = [[counter.get(str(bound), 0) for bound in bounds] for counter in spreads]
    return MetricHistogram(name=name, bounds=bounds, counts=counts)


class RunAudit:
    """Reads the history of one controller's runs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._checkpoints = CheckpointStore(database)

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        return await self._database.query(self._checkpoints.list_checkpoints, run_id)

    async def checkpoint(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        return await self._database.query(self._checkpoints.get, run_id, checkpoint_id)

    async def metrics(
        self, run_id: str, *, names: Sequence[str], from_step: int, to_step: int, max_points: int
    ) -> MetricPage:
        """Reads metrics of committed steps; if there are more than ``max_points``, of every n-th step.

        Args:
            names: Metrics to include; empty means all.
            to_step: Last step; 0 means the newest.
            max_points: Max number of steps. The last one is always included.
        """

        def read() -> MetricPage:
            with self._database.read() as connection:
                newest = ledger_store.newest_step(connection, run_id)
                oldest = ledger_store.read_first_step(connection, run_id) + 1
                first, last = max(from_step, oldest), min(to_step or newest, newest)
                every = max(-(-(last - first + 1) // max_points), 1)
                step_numbers = range(last, first - 1, -every)[::-1]
                steps = ledger_store.read_metrics(connection, run_id, step_numbers)
            return as_columns(steps, frozenset(names))

        return await self._database.page(max_points, read)

    async def groups(self, run_id: str, after_step: int, steps: int) -> list[GroupView]:
        """Returns the groups of some steps, and all that are in flight or were dropped."""

        def read() -> list[GroupView]:
            with self._database.read() as connection:
                records = ledger_store.read_steps(connection, run_id, after=after_step, limit=steps)
                live = ledger_store.read_ledger(connection, run_id).groups
                dead = connection.execute(
                    sa.select(DEAD_LETTERS).where(DEAD_LETTERS.c.run_id == run_id)
                ).all()
            return [*_trained(records), *_in_flight(live), *_dropped(dead)]

        return await self._database.scan(read)


def _trained(records: Iterable[StepRecord]) -> Iterator[GroupView]:
    for record in records:
        for sequence, row, attempt, oldest in record.groups if record.is_committed else ():
            yield GroupView(
                group_id=Group(sequence=sequence, row=row).group_id,
                row=row,
                attempt=attempt,
                state="consumed",
                step=record.step,
                oldest_version=oldest,
                staleness=record.weight_version - oldest,
            )


def _in_flight(groups: Iterable[Group]) -> Iterator[GroupView]:
    for group in groups:
        yield GroupView(
            group_id=group.group_id,
            row=group.row,
            attempt=group.attempt,
            state=group.state.value,
            oldest_version=group.oldest_version,
        )


def _dropped(dead: Iterable[Any]) -> Iterator[GroupView]:
    for row in dead:
        yield GroupView(
            group_id=Group(sequence=row.sequence, row=row.row).group_id,
            row=row.row,
            attempt=row.attempt,
            state=row.state,
            reason=row.reason,
        )
