"""Durable record of one run: events, ledger and steps, each change in one transaction.

A decision of the ledger is written before any other process acts on it, which makes a crash harmless.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from services.controller.rules.difficulty import PromptRate
from services.controller.rules.evaluation import EvaluationRecord, StartedEvaluation
from services.controller.rules.learning import RewardHistory
from services.controller.rules.ledger import Group, Ledger, LedgerState
from services.controller.store import ledgers as ledger_store
from services.controller.store.database import Database
from services.controller.store.ledgers import StepMetrics, StepRecord
from services.controller.store.records import Event, Note, Run
from services.controller.store.rows import (
    event_data,
    first_event,
    get_run,
    has_event,
    newest_event,
    newest_snapshot,
    set_target_steps,
    typed_event_data,
)
from services.controller.store.runs import RunStore, Work

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """State of a run according to the database."""

    run: Run
    ledger: LedgerState
    quarantined_rows: frozenset[int]
    rates: Sequence[PromptRate]
    """Running success of prompts."""
    step: int
    """Last committed step."""
    version_offset: int
    """Weight version of a step minus the step; grows when a run is rewound."""
    published: int
    """Newest weight version that was published since the run was last rewound; -1 without one."""
    begun: StepRecord | None
    """Step that was sent to the trainer and is not committed; None without one."""
    syncs_ms: tuple[float, ...]
    """Latencies of the weight syncs so far, in milliseconds."""
    step_metrics: Sequence[StepMetrics]
    """Metrics of the steps in :meth:`RewardHistory.sampled_steps`."""
    evaluations: EvaluationRecord
    start_step: int
    """Step from which the run started: that of its first published weights."""

    @property
    def is_new(self) -> bool:
        """True if the run has issued, trained and published nothing."""
        is_untrained = self.step == 0 and self.begun is None
        return is_untrained and self.ledger.num_issued == 0 and self.run.weight_version < 0


class Journal:
    """Writes and reads the durable record of one run.

    Args:
        on_event: Called after each recorded event.
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
        """Identifier of the run."""
        self._database = database
        self._store = store
        self._on_event = on_event

    async def load(self) -> Recovered:
        """Reads the state of the run."""
        return await self._database.run(self._load)

    async def read(self, query: Callable[[sa.Connection, str], _T]) -> _T:
        """Runs a query about the run and returns its result."""

        def read() -> _T:
            with self._database.read() as connection:
                return query(connection, self.run_id)

        return await self._database.run(read)

    async def newest_snapshot(self) -> str:
        """Returns the transferqueue snapshot of the newest checkpoint; empty without one."""
        return await self.read(newest_snapshot)

    async def begin_attempt(self) -> int:
        """Counts an attempt to enter the loops; returns its number, from 1."""
        return await self._database.run(self._store.begin_attempt, self.run_id)

    async def data_opened(self, rows: Mapping[str, int], *, steps: int) -> None:
        """Records the rows of each prompt set and the resulting number of steps, unless they are known.

        If a set had another number of rows before, the event ``DataChanged`` warns.
        """

        def known() -> Event | None:
            with self._database.read() as connection:
                return newest_event(connection, self.run_id, ("DataOpened",))

        data = {"rows": dict(rows), "steps": steps}
        before = await self._database.run(known)
        if before is None or before.data != data:
            row_counts = ", ".join(f"data.{split}: {count:,}" for split, count in rows.items())
            message = f"rows: {row_counts}; {steps:,} steps"
            await self._record(
                Note("DataOpened", message, data),
                lambda connection: set_target_steps(connection, self.run_id, steps),
            )
        earlier = {} if before is None else before.data["rows"]
        changed_sets = [name for name, count in rows.items() if earlier.get(name, count) != count]
        if changed_sets:
            row_counts = ", ".join(
                f"data.{name}: {earlier[name]:,}, now {rows[name]:,}" for name in changed_sets
            )
            await self.record_event(
                Note(
                    "DataChanged",
                    f"the data has other rows than before ({row_counts}); the run continues with the new "
                    "ones, in another order",
                    {"before": earlier, "rows": dict(rows)},
                )
            )

    async def record_event(
        self, note: Note, ledger: Ledger | None = None, *, also: Work | None = None
    ) -> None:
        """Writes an event, the ledger's changes, and a further write in one transaction."""
        await self._record(note, self._change(ledger, also))

    async def record_once(self, note: Note, key: str) -> None:
        """Writes an event unless the data of an earlier one of its type has the same ``key``."""

        def record() -> Event | None:
            with self._database.read() as connection:
                if has_event(connection, self.run_id, note.type, key):
                    return None
            return self._store.record(self.run_id, note)

        # In one turn of the database's thread: two processes of a worker may report at the same time.
        if (event := await self._database.run(record)) is not None:
            self._on_event(event)

    async def save(self, ledger: Ledger) -> None:
        await self._database.run(self._write, self._change(ledger))

    async def begin_step(
        self, step: int, ledger: Ledger, *, version: int, groups: Sequence[Group]
    ) -> None:
        """Records which groups will be sent to the trainer for a step."""
        begin = partial(
            ledger_store.begin_step, run_id=self.run_id, step=step, version=version, groups=groups
        )
        await self._database.run(self._write, self._change(ledger, begin))

    async def commit_step(
        self, step: int, ledger: Ledger, *, note: Note, metrics: Mapping[str, Any]
    ) -> None:
        """Records a trained step and its consumed groups."""
        commit = partial(ledger_store.commit_step, run_id=self.run_id, step=step, metrics=metrics)
        await self._record(note, self._change(ledger, commit))

    async def forget_step(self, step: int, ledger: Ledger) -> None:
        """Deletes the record of a step that was begun but not trained."""
        forget = partial(ledger_store.forget_step, run_id=self.run_id, step=step)
        await self._database.run(self._write, self._change(ledger, forget))

    async def rewind(self, step: int, *, version: int, message: str) -> None:
        """Rewinds the run to the end of ``step``, whose weights get the number ``version``."""

        def work(connection: sa.Connection) -> None:
            ledger_store.roll_back(connection, self.run_id, step)
            ledger_store.set_version_offset(connection, self.run_id, version - step)

        data = {"step": step, "version": version}
        await self._record(Note("Rewound", message, data, step=step), work)

    async def start_at(self, step: int, *, message: str) -> None:
        """Starts the run after ``step``, whose weights get the same number."""
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
        """Takes the ledger's changes; returns the function that writes them and runs ``also``."""
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
            started_steps = ledger_store.read_steps(connection, self.run_id, after=step, limit=1)
            offset = ledger_store.read_version_offset(connection, self.run_id)
            start = _read_start_step(connection, self.run_id, step)
            run = get_run(connection, self.run_id)
            return Recovered(
                run=run,
                ledger=ledger_store.read_ledger(connection, self.run_id),
                quarantined_rows=frozenset(
                    ledger_store.read_quarantined_rows(connection, self.run_id)
                ),
                rates=ledger_store.read_rates(connection, self.run_id),
                step=step,
                version_offset=offset,
                published=_read_published(connection, run),
                begun=started_steps[0] if started_steps else None,
                syncs_ms=tuple(
                    float(data["sync_ms"])
                    for data in event_data(connection, self.run_id, "WeightsPublished")
                ),
                step_metrics=ledger_store.read_metrics(
                    connection, self.run_id, RewardHistory.sampled_steps(step)
                ),
                evaluations=_read_evaluations(connection, self.run_id, start=start, offset=offset),
                start_step=start,
            )


def _read_start_step(connection: sa.Connection, run_id: str, step: int) -> int:
    """Reads the step from which a run started.

    Args:
        step: Last committed step, which is the result before the first publication.
    """
    first = first_event(connection, run_id, "WeightsPublished")
    if first is None:
        return step
    # Events of earlier releases lack the step.
    return int(first.data.get("step", ledger_store.read_first_step(connection, run_id)))


def _read_published(connection: sa.Connection, run: Run) -> int:
    """Reads the newest weight version that was published since the last rewind; -1 without one.

    Rollouts may still serve an older one, whose step was trained again or will be.
    """
    rewinds = [data for data in event_data(connection, run.run_id, "Rewound") if _loses_steps(data)]
    first = int(rewinds[-1]["version"]) if rewinds else 0
    return run.weight_version if run.weight_version >= first else -1


def _loses_steps(rewind: Mapping[str, Any]) -> bool:
    """Returns True if steps were lost; otherwise only the weights went back, and the steps continue."""
    return "reason" not in rewind


def _read_evaluations(
    connection: sa.Connection, run_id: str, *, start: int, offset: int
) -> EvaluationRecord:
    """Reads which evaluations of a run ended, which one began, and which versions were served since.

    Args:
        start: Step from which the run started; no evaluation of an earlier step is due.
        offset: Weight version of a step minus the step.
    """
    settled = start - 1
    versions: set[int] = set()
    served: dict[int, int] = {}
    evaluation_start: StartedEvaluation | None = None
    interrupted: list[StartedEvaluation] = []
    types = ("WeightsPublished", "ValidationStarted", "Validated", "Rewound")
    for type_, data in typed_event_data(connection, run_id, types):
        if type_ == "Rewound":
            if _loses_steps(data):
                settled = min(settled, int(data["step"]))
                served.clear()
                interrupted += [] if evaluation_start is None else [evaluation_start]
                evaluation_start = None
            continue
        version = int(data["version"])
        step = int(data.get("step", version - offset))
        if type_ == "WeightsPublished":
            served[version] = step
            continue
        evaluation = StartedEvaluation(version, step, data["reason"])
        if type_ == "ValidationStarted":
            evaluation_start = evaluation
            continue
        versions.add(version)
        if evaluation in interrupted:  # its step is evaluated again once it has been trained again
            interrupted.remove(evaluation)
            continue
        settled = max(settled, step)
        if evaluation_start == evaluation:
            evaluation_start = None
    return EvaluationRecord(
        versions=frozenset(versions),
        settled_step=settled,
        begun=evaluation_start,
        lost=tuple(interrupted),
        served=tuple((version, step) for version, step in served.items() if step > settled),
    )
