"""Saves checkpoints of a run and records them in the database.

A checkpoint has three parts: the trainer's published folder (weights, optimizer, RNG), the
transferqueue's snapshot (samples in flight, finished or not), and the ledger. It exists once its
database row does; the row names the first two, and the same transaction writes the ledger. A run
that resumes from a checkpoint trains exactly what an uninterrupted run would.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import sqlalchemy as sa

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
)
from services.common.fields import new_id
from services.common.host import Clock
from services.common.runspec.trainer import CheckpointSpec
from services.common.stores import is_url, size_text
from services.controller.rules.ledger import Ledger
from services.controller.rules.run_state import VOLATILE
from services.controller.run.scorers import CriticClient
from services.controller.run.state.journal import Journal
from services.controller.store.database import Database
from services.controller.store.records import Note
from services.controller.store.rows import IS_UNFINISHED, newest_event
from services.controller.store.runs import Work
from services.controller.store.tables import CHECKPOINTS, RUNS
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import TrainerClient

CheckpointState = Literal["READY", "FAILED", "DELETED"]

_SAVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Database record of one checkpoint."""

    checkpoint_id: str
    run_id: str
    step: int
    weight_version: int
    path: str
    """Folder that the trainer wrote, or its URL in an object store."""
    state: CheckpointState
    message: str
    """Cause of the failure, or why the samples in flight are missing."""
    create_time: float
    snapshot_id: str = ""
    """Transferqueue snapshot of the samples in flight; empty if they could not be saved."""
    size_bytes: int = 0
    """Size of the trainer's folder."""


def ready_checkpoints(connection: sa.Connection, run_id: str) -> list[Checkpoint]:
    """Returns the checkpoints from which a run can resume, newest first."""
    query = (
        sa.select(CHECKPOINTS)
        .where(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.state == "READY")
        .order_by(CHECKPOINTS.c.step.desc())
    )
    return [Checkpoint(**row) for row in connection.execute(query).mappings()]


def steps_in_use(connection: sa.Connection, run_id: str) -> list[int]:
    """Returns steps of a run from whose checkpoints other runs, which have not ended, start."""
    specs = connection.execute(sa.select(RUNS.c.spec_json).where(IS_UNFINISHED)).scalars()
    paths = {json.loads(spec)["trainer"]["checkpoint"].get("start_from") for spec in specs}
    return [row.step for row in ready_checkpoints(connection, run_id) if row.path in paths]


def steps_being_replaced(connection: sa.Connection, run_id: str) -> list[int]:
    """Returns steps whose checkpoints are deleted once the one that is being written is saved."""
    kinds = ("CheckpointStarted", "CheckpointSaved", "CheckpointFailed")
    newest = newest_event(connection, run_id, kinds)
    return [] if newest is None else list(newest.data.get("replaces", ()))


def relocate_checkpoints(database: Database, state_directory: Path) -> None:
    """Corrects the paths of checkpoints in a state directory that was moved since they were saved."""
    table = CHECKPOINTS.c
    with database.read() as connection:
        rows = connection.execute(sa.select(table.checkpoint_id, table.run_id, table.path)).all()
    paths = [(row.checkpoint_id, path) for row in rows if (path := _moved(row, state_directory))]
    if not paths:
        return
    with database.write_unfenced() as connection:
        for checkpoint_id, path in paths:
            query = sa.update(CHECKPOINTS).where(table.checkpoint_id == checkpoint_id)
            connection.execute(query.values(path=path))


def _moved(row: Any, state_directory: Path) -> str:
    """Returns the present path of a checkpoint that is not at its stored one; empty if it is or is gone."""
    if is_url(row.path):
        return ""
    _, is_in_run, rest = row.path.partition(f"/{row.run_id}/")
    path = state_directory.absolute() / row.run_id / rest
    is_there = os.path.exists(row.path)  # noqa: PTH110 -- it raises no error for a folder of another user
    return str(path) if is_in_run and not is_there and path.is_dir() else ""


class CheckpointStore:
    """Reads checkpoint records from the database. Methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        query = (
            sa.select(CHECKPOINTS)
            .where(CHECKPOINTS.c.run_id == run_id)
            .order_by(CHECKPOINTS.c.create_time.desc())
        )
        with self._database.read() as connection:
            return [Checkpoint(**row) for row in connection.execute(query).mappings()]

    def get(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Returns one checkpoint.

        Raises:
            NotFoundError: If the run has no checkpoint with that id.
        """
        for checkpoint in self.list_checkpoints(run_id):
            if checkpoint.checkpoint_id == checkpoint_id:
                return checkpoint
        raise NotFoundError(
            f"run {run_id} has no checkpoint {checkpoint_id!r}; list the run's checkpoints",
            checkpoint_id=checkpoint_id,
        )

    def deleted(self) -> list[Checkpoint]:
        """Returns deleted checkpoints of all runs whose folders no other checkpoint has or may get.

        In an object store, those of a run with a READY checkpoint are left to the trainer's retention: the
        store may lack the READY one, whose upload is pending or failed, and needs the older one until then.
        """
        query = sa.select(CHECKPOINTS, IS_UNFINISHED.label("is_unfinished"))
        query = query.select_from(CHECKPOINTS.join(RUNS))
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        ready_rows = {row["path"]: row for row in rows if row["state"] == "READY"}
        newest: dict[str, int] = {}
        for row in ready_rows.values():
            newest[row["run_id"]] = max(row["step"], newest.get(row["run_id"], 0))
        return [
            Checkpoint(**{name: row[name] for name in Checkpoint.__slots__})
            for row in rows
            if row["state"] == "DELETED"
            and row["path"] not in ready_rows
            and not (is_url(row["path"]) and row["run_id"] in newest)
            # A rewound run may be saving its later steps again.
            and (not row["is_unfinished"] or row["step"] < newest.get(row["run_id"], 0))
        ]

    def runs_saved_at(self, paths: Collection[Path]) -> list[str]:
        """Returns runs that have a checkpoint at one of the paths, in a parent of it, or directly in it."""
        around = {str(folder) for path in paths for folder in (path, *path.parents)}
        paths_here = {str(path) for path in paths}
        query = sa.select(CHECKPOINTS.c.run_id, CHECKPOINTS.c.path)
        with self._database.read() as connection:
            rows = connection.execute(query.where(CHECKPOINTS.c.state != "DELETED")).all()
        # URLs are compared as Path writes them, too.
        saved_runs = [(row.run_id, PurePath(row.path)) for row in rows]
        return sorted(
            {
                run
                for run, path in saved_runs
                if str(path) in around or str(path.parent) in paths_here
            }
        )


class Checkpoints:
    """Saves the checkpoints of one run.

    Args:
        saved_at: Time from which work is unsaved, in seconds since the epoch.
        saved_step: Step from which work is unsaved.
        why_volatile: Returns why a folder of the trainer is lost with it; empty if it is not.
    """

    def __init__(
        self,
        run_id: str,
        *,
        keep: int,
        journal: Journal,
        queue: TransferQueueClient,
        clock: Clock,
        unsaved_s: float,
        saved_step: int,
        why_volatile: Callable[[str], Awaitable[str]],
    ) -> None:
        self._run_id = run_id
        self._keep = keep
        self._journal = journal
        self._queue = queue
        self._clock = clock
        # The monotonic clock, which cannot be set back.
        self._saved_at = clock.monotonic() - unsaved_s
        self.saved_step = saved_step
        """Newest step that was saved, or whose save failed since the last recovery."""
        self._why_volatile = why_volatile

    def is_due(self, step: int, spec: CheckpointSpec) -> bool:
        """Returns True if a step is to be saved by its number or, if ``every`` is 0, by elapsed time.

        A checkpoint that was due at an earlier step and was not tried is due at this one.
        """
        if spec.every:
            return step // spec.every > self.saved_step // spec.every
        is_unsaved = spec.every_s > 0 and step > self.saved_step
        return is_unsaved and self._clock.monotonic() - self._saved_at >= spec.every_s

    async def save(
        self,
        trainer: TrainerClient,
        critic: CriticClient,
        ledger: Ledger,
        *,
        step: int,
        version: int,
        keep_steps: Collection[int],
        skipped_since: int | None,
        also: Work,
    ) -> bool:
        """Saves the trainer's newest step and the samples in flight, and records both in one transaction.

        A failed save does not stop training: the failure is recorded instead. Returns True if the step then
        has a checkpoint, of this save or an earlier one.

        Args:
            ledger: Ledger to record in the same transaction.
            version: Weight version of the step.
            keep_steps: Steps whose checkpoints are kept besides the newest ones and those that other runs
                start from.
            skipped_since: First of the newest steps that changed no weights; None if the last one did.
                Checkpoints of earlier steps are kept, because the trainer may return to them.
            also: Further write of the same transaction.
        """
        steps = {*keep_steps, *await self._journal.read(steps_in_use)}
        ready_rows = await self._journal.read(ready_checkpoints)
        if skipped_since is not None:
            steps.update(row.step for row in ready_rows if row.step < skipped_since)
        replaced = sorted(
            _outdated([step, *(row.step for row in ready_rows)], keep=self._keep) - steps
        )
        begin = self._clock.monotonic()
        data = {"step": step, "replaces": replaced}
        await self._journal.record_event(
            Note("CheckpointStarted", f"saving the checkpoint of step {step}", data), ledger
        )
        # The event prevents further forks from the checkpoints that it replaces; this read finds the forks
        # that were created before.
        steps.update(await self._journal.read(steps_in_use))
        checkpoint = await self._save(
            trainer, critic, step=step, version=version, keep_steps=sorted(steps)
        )

        def write(connection: sa.Connection) -> None:
            self._write(connection, checkpoint, sorted(steps))
            also(connection)

        why_volatile = await self._why_volatile(checkpoint.path) if checkpoint.path else ""
        seconds = self._clock.monotonic() - begin
        note = _ended(checkpoint, seconds=seconds, why_volatile=why_volatile)
        await self._journal.record_event(note, ledger, also=write)
        self._saved_at, self.saved_step = self._clock.monotonic(), step
        return checkpoint.state == "READY" or step in {row.step for row in ready_rows}

    async def _save(
        self,
        trainer: TrainerClient,
        critic: CriticClient,
        *,
        step: int,
        version: int,
        keep_steps: Sequence[int],
    ) -> Checkpoint:
        """Saves everything outside the database; a failed result holds the cause.

        If the step was saved before, its folder already holds what trainer and critic would write:
        only the samples in flight are saved.
        """
        state: CheckpointState = "READY"
        path, size_bytes, snapshot_id, message = "", 0, "", ""
        ready_rows = await self._journal.read(ready_checkpoints)
        same = next((row for row in ready_rows if row.step == step), None)
        if critic.exists:
            # Trainer or critic may fail, so neither deletes what both have before both have saved.
            keep_steps = sorted({*keep_steps, *(r.step for r in ready_rows if r.step < step)})
        try:
            snapshot_id, message = await self._save_samples({row.snapshot_id for row in ready_rows})
            if same is not None:
                path, size_bytes = same.path, same.size_bytes
                snapshot_id = snapshot_id or same.snapshot_id
            else:
                (path, size_bytes), _ = await asyncio.gather(
                    trainer.save_checkpoint(step, keep_steps=keep_steps, timeout_s=_SAVE_TIMEOUT_S),
                    critic.save(step, keep_steps=keep_steps, timeout_s=_SAVE_TIMEOUT_S),
                )
        except (FailedPreconditionError, DeadlineExceededError) as error:
            state, message = "FAILED", error.message
        return Checkpoint(
            checkpoint_id=new_id("ckpt"),
            run_id=self._run_id,
            step=step,
            weight_version=version,
            path=path,
            state=state,
            message=message,
            create_time=self._clock.time(),
            snapshot_id=snapshot_id,
            size_bytes=size_bytes,
        )

    async def _save_samples(self, in_use: Collection[str]) -> tuple[str, str]:
        """Saves a snapshot; returns its name and an empty text or, if it failed, an empty name and the cause.

        Without a snapshot, the samples are generated again.

        Args:
            in_use: Snapshot names in use by checkpoints. The first other name is used, so that there
                is at most one snapshot besides those of checkpoints.
        """
        name = next(name for name in map("slot-{}".format, itertools.count()) if name not in in_use)
        try:
            await self._queue.save_snapshot(self._run_id, name)
        except (
            FailedPreconditionError,
            InternalError,
            DataLossError,
            ResourceExhaustedError,
        ) as error:
            return "", f"saved without samples in flight: {error.message}"
        return name, ""

    def _write(
        self, connection: sa.Connection, checkpoint: Checkpoint, keep_steps: Sequence[int]
    ) -> None:
        table = CHECKPOINTS.c
        of_run = table.run_id == self._run_id
        values = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        if checkpoint.state != "READY":
            connection.execute(CHECKPOINTS.insert().values(values))
            return
        # The trainer overwrites a step's folder, and deletes all but the newest folders.
        connection.execute(CHECKPOINTS.delete().where(of_run, table.step == checkpoint.step))
        connection.execute(CHECKPOINTS.insert().values(values))
        ready_steps = [row.step for row in ready_checkpoints(connection, self._run_id)]
        outdated = _outdated(ready_steps, keep=self._keep) - set(keep_steps)
        connection.execute(
            CHECKPOINTS.update()
            .where(of_run, table.state == "READY", table.step.in_(outdated))
            .values(state="DELETED")
        )


def _outdated(steps: Collection[int], *, keep: int) -> set[int]:
    """Returns the steps that are not among the newest ``keep``."""
    return set(steps) - set(sorted(set(steps), reverse=True)[:keep])


def _ended(checkpoint: Checkpoint, *, seconds: float, why_volatile: str) -> Note:
    """Returns the event that reports a saved or failed checkpoint."""
    kind, text = "CheckpointSaved", f"saved {size_text(checkpoint.size_bytes)} in {seconds:.1f} s"
    if checkpoint.state == "FAILED":
        kind, text = "CheckpointFailed", f"checkpoint failed: {checkpoint.message}"
    data = {
        "checkpoint_id": checkpoint.checkpoint_id,
        "step": checkpoint.step,
        "path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "seconds": seconds,
    }
    if why_volatile and checkpoint.state == "READY":
        text += f", but it is lost with the trainer: {why_volatile}"
        data["reason"] = VOLATILE
    return Note(kind, f"step {checkpoint.step}: {text}", data)
