"""The durable record of one run, as its loop writes it: events, ledger and steps, one transaction each.

The rule that makes a crash harmless: what the ledger decided is written before anybody outside acts on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from services.controller.rules.difficulty import PromptRate
from services.controller.rules.evaluation import BegunEvaluation
from services.controller.rules.groups import Group, LedgerState
from services.controller.rules.ledger import Ledger
from services.controller.store import ledgers as ledger_store
from services.controller.store.database import Database
from services.controller.store.ledgers import StepRecord
from services.controller.store.records import Event, Note, Run
from services.controller.store.rows import (
    event_data,
    get_run,
    newest_event,
    newest_snapshot,
    set_target_steps,
)
from services.controller.store.runs import RunStore, Work

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Where a run stands according to the database."""

    run: Run
    ledger: LedgerState
    quarantined_rows: frozenset[int]
    rates: Sequence[PromptRate]
    """Running success of prompts."""
    step: int
    """The last committed step."""
    version_offset: int
    """Weight version of a step's weights, less the step: it grows when a run is rewound."""
    begun: StepRecord | None
    """The step that the trainer was asked for and that is not committed."""
    syncs_ms: tuple[float, ...]
    """Latencies of the weight syncs so far."""
    evaluated: frozenset[int]
    """Weight versions that were evaluated."""
    begun_evaluation: BegunEvaluation | None
    """What was being evaluated."""

    @property
    def is_new(self) -> bool:
        """Whether the run has issued, trained and published nothing."""
        is_untrained = self.step == 0 and self.begun is None
        return is_untrained and self.ledger.num_issued == 0 and self.run.weight_version < 0


class Journal:
    """Writes what one run does.

    Args:
        run_id: The run.
        database: Where it is written.
        store: The runs in it.
        on_event: Called after each event.
    """

    def __init__(
        self,
        run_id: str,
        *,
        database: Database,
        store: RunStore,
        on_event: Callable[[Event], None],
    ) -> None:
        self.run_id = run_id
        """The run."""
        self._database = database
        self._store = store
        self._on_event = on_event

    async def load(self) -> Recovered:
        """Read where the run stands."""
        return await self._database.run(self._load)

    async def read(self, query: Callable[[sa.Connection, str], _T]) -> _T:
        """Answer a query about the run."""

        def read() -> _T:
            with self._database.read() as connection:
                return query(connection, self.run_id)

        return await self._database.run(read)

    async def newest_snapshot(self) -> str:
        """The transferqueue's part of the newest checkpoint; empty if there is none."""
        return await self.read(newest_snapshot)

    async def begin_attempt(self) -> int:
        """Count that the loop is entered; returns the number, from 1."""
        return await self._database.run(self._store.begin_attempt, self.run_id)

    async def data_opened(self, rows: Mapping[str, int], *, steps: int) -> None:
        """Write how many rows each set of prompts has, and how many steps the run has with them, once."""

        def known() -> Event | None:
            with self._database.read() as connection:
                return newest_event(connection, self.run_id, ("DataOpened",))

        data = {"rows": dict(rows), "steps": steps}
        before = await self._database.run(known)
        if before is None or before.data != data:
            listed = ", ".join(f"data.{split}: {count:,}" for split, count in rows.items())
            message = f"rows of {listed}; {steps:,} steps"
            await self._record(
                Note("DataOpened", message, data),
                lambda connection: set_target_steps(connection, self.run_id, steps),
            )

    async def note(
        self, note: Note, ledger: Ledger | None = None, *, also: Work | None = None
    ) -> None:
        """Write an event, what changed in the ledger, and whatever else belongs to it."""
        await self._record(note, self._change(ledger, also))

    async def save(self, ledger: Ledger) -> None:
        """Write what changed in the ledger."""
        await self._database.run(self._write, self._change(ledger))

    async def begin_step(
        self, step: int, ledger: Ledger, *, version: int, groups: Sequence[Group]
    ) -> None:
        """Write which groups the trainer will be asked to train."""
        begin = partial(
            ledger_store.begin_step, run_id=self.run_id, step=step, version=version, groups=groups
        )
        await self._database.run(self._write, self._change(ledger, begin))

    async def commit_step(
        self, step: int, ledger: Ledger, *, note: Note, metrics: Mapping[str, Any]
    ) -> None:
        """Write that a step is trained and its groups are consumed."""
        commit = partial(ledger_store.commit_step, run_id=self.run_id, step=step, metrics=metrics)
        await self._record(note, self._change(ledger, commit))

    async def forget_step(self, step: int, ledger: Ledger) -> None:
        """Write that a step that was begun was not trained."""
        forget = partial(ledger_store.forget_step, run_id=self.run_id, step=step)
        await self._database.run(self._write, self._change(ledger, forget))

    async def rewind(self, step: int, *, version: int, message: str) -> None:
        """Go back to the end of ``step``, whose weights get the number ``version`` now."""

        def work(connection: sa.Connection) -> None:
            ledger_store.roll_back(connection, self.run_id, step)
            ledger_store.set_version_offset(connection, self.run_id, version - step)

        data = {"step": step, "version": version}
        await self._record(Note("Rewound", message, data, step=step), work)

    async def start_at(self, step: int, *, message: str) -> None:
        """Begin the run after ``step``, whose weights get the same number."""
        work = partial(ledger_store.start_at, run_id=self.run_id, step=step)
        data = {"step": step, "version": step}
        await self._record(Note("StartedFromCheckpoint", message, data, step, step), work)

    async def _record(self, note: Note, also: Work) -> None:
        event = await self._database.run(self._store.record, self.run_id, note, also=also)
        self._on_event(event)

    def _write(self, work: Work) -> None:
        with self._database.write() as connection:
            work(connection)

    def _change(self, ledger: Ledger | None, also: Work | None = None) -> Work:
        """The write of what changed, which is taken now, and of what belongs to it."""
        change = None if ledger is None else ledger.take_changes()

        def work(connection: sa.Connection) -> None:
            if change is not None:
                ledger_store.write_change(connection, self.run_id, change)
            if also is not None:
                also(connection)

        return work

    def _load(self) -> Recovered:
        with self._database.read() as connection:
            step = ledger_store.newest_step(connection, self.run_id)
            begun = ledger_store.read_steps(connection, self.run_id, after=step, limit=1)
            return Recovered(
                run=get_run(connection, self.run_id),
                ledger=ledger_store.read_ledger(connection, self.run_id),
                quarantined_rows=frozenset(
                    ledger_store.read_quarantined_rows(connection, self.run_id)
                ),
                rates=ledger_store.read_rates(connection, self.run_id),
                step=step,
                version_offset=ledger_store.read_version_offset(connection, self.run_id),
                begun=begun[0] if begun else None,
                syncs_ms=tuple(
                    float(data["sync_ms"])
                    for data in event_data(connection, self.run_id, "WeightsPublished")
                ),
                evaluated=frozenset(
                    int(data["version"])
                    for data in event_data(connection, self.run_id, "Validated")
                ),
                begun_evaluation=_begun_evaluation(connection, self.run_id),
            )


def _begun_evaluation(connection: sa.Connection, run_id: str) -> BegunEvaluation | None:
    newest = newest_event(connection, run_id, ("ValidationStarted", "Validated"))
    if newest is None or newest.type == "Validated":
        return None
    return BegunEvaluation(int(newest.data["version"]), newest.data["reason"])
