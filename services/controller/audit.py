"""Looks into what a run did: its numbers, its samples, its checkpoints."""

import sqlalchemy as sa

from services.controller.api.models import MetricPoint, SampleView
from services.controller.api.views import moment
from services.controller.run.checkpoints import Checkpoint, CheckpointStore
from services.controller.run.groups import Group
from services.controller.store import ledgers as ledger_store
from services.controller.store.database import Database
from services.controller.store.tables import DEAD_LETTERS


class RunAudit:
    """Reads of one controller's runs.

    Args:
        database: Holds the runs.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._checkpoints = CheckpointStore(database)

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Checkpoints of a run, newest first."""
        return await self._database.query(self._checkpoints.list_checkpoints, run_id)

    async def checkpoint(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """One checkpoint."""
        return await self._database.query(self._checkpoints.get, run_id, checkpoint_id)

    async def metrics(
        self, run_id: str, name: str, from_step: int, max_points: int
    ) -> list[MetricPoint]:
        """Numbers of committed steps: of every n-th step, if all were more than ``max_points``."""
        first = max(from_step, 1)

        def read() -> list[MetricPoint]:
            with self._database.read() as connection:
                newest = ledger_store.newest_step(connection, run_id)
                last = ledger_store.read_metrics(connection, run_id, [] if name else [newest])
                per_step = max((len(step.metrics) for step in last), default=1)
                every = max(-(-(newest - first + 1) * per_step // max_points), 1)
                steps = ledger_store.read_metrics(
                    connection, run_id, range(first, newest + 1, every)
                )
            return [
                MetricPoint(step=step.step, time=moment(step.time), name=key, value=value)
                for step in steps
                for key, value in step.metrics.items()
                if name in ("", key)
            ]

        return await self._database.page(max_points, read)

    async def samples(self, run_id: str, after_step: int, steps: int) -> list[SampleView]:
        """Groups of some steps, and all that are in flight or were given up."""

        def read() -> list[SampleView]:
            with self._database.read() as connection:
                records = ledger_store.read_steps(connection, run_id, after=after_step, limit=steps)
                live = ledger_store.read_ledger(connection, run_id).groups
                dead = connection.execute(
                    sa.select(DEAD_LETTERS).where(DEAD_LETTERS.c.run_id == run_id)
                ).all()
            return [
                *(
                    SampleView(
                        group_id=Group(sequence=sequence, row=row).group_id,
                        row=row,
                        attempt=attempt,
                        state="consumed",
                        step=record.step,
                        oldest_version=oldest,
                        staleness=record.weight_version - oldest,
                    )
                    for record in records
                    if record.is_committed
                    for sequence, row, attempt, oldest in record.groups
                ),
                *(
                    SampleView(
                        group_id=group.group_id,
                        row=group.row,
                        attempt=group.attempt,
                        state=group.state.value,
                        oldest_version=group.oldest_version,
                    )
                    for group in live
                ),
                *(
                    SampleView(
                        group_id=Group(sequence=row.sequence, row=row.row).group_id,
                        row=row.row,
                        attempt=row.attempt,
                        state=row.state,
                        reason=row.reason,
                    )
                    for row in dead
                ),
            ]

        return await self._database.scan(read)
