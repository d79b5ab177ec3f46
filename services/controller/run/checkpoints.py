"""Checkpoints of a run: the trainer writes them, the database knows of them.

A checkpoint is the trainer's published folder and the row that names its step. The ledger at that step is in
the database, step by step, so a run that goes on from it trains what an unbroken one would.
"""

import time
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from services.common.errors import DeadlineExceededError, FailedPreconditionError, NotFoundError
from services.common.ids import new_id
from services.common.spec.trainer import CheckpointSpec
from services.controller.run.journal import Journal
from services.controller.store.database import Database
from services.controller.store.records import Note
from services.controller.store.tables import CHECKPOINTS
from services.trainer.client import TrainerClient

CheckpointState = Literal["READY", "FAILED", "DELETED"]

_SAVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of a run."""

    checkpoint_id: str
    run_id: str
    step: int
    weight_version: int
    path: str
    """The trainer's folder."""
    state: CheckpointState
    message: str
    """Why it failed."""
    create_time: float


class CheckpointStore:
    """Checkpoints in the database. Methods block.

    Args:
        database: Where they are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Checkpoints of a run, newest first."""
        query = (
            sa.select(CHECKPOINTS)
            .where(CHECKPOINTS.c.run_id == run_id)
            .order_by(CHECKPOINTS.c.create_time.desc())
        )
        with self._database.read() as connection:
            return [Checkpoint(**row) for row in connection.execute(query).mappings()]

    def get(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """One checkpoint.

        Raises:
            NotFoundError: If the run has none of that id.
        """
        for checkpoint in self.list_checkpoints(run_id):
            if checkpoint.checkpoint_id == checkpoint_id:
                return checkpoint
        raise NotFoundError(
            f"run {run_id} has no checkpoint {checkpoint_id!r}; list its checkpoints",
            checkpoint_id=checkpoint_id,
        )


class Checkpoints:
    """Saves one run.

    Args:
        run_id: The run.
        spec: How much is kept.
        journal: Its record.
    """

    def __init__(self, run_id: str, spec: CheckpointSpec, journal: Journal) -> None:
        self._run_id = run_id
        self._spec = spec
        self._journal = journal

    async def save(self, trainer: TrainerClient, step: int, *, version: int) -> None:
        """Have the trainer save its newest step, and write that down.

        A trainer that cannot save is no reason to stop training: the failure is written down instead.
        """
        try:
            path = await trainer.save_checkpoint(step, timeout_s=_SAVE_TIMEOUT_S)
        except (FailedPreconditionError, DeadlineExceededError) as error:
            await self._note(step, version, state="FAILED", path="", message=error.message)
            return
        await self._note(step, version, state="READY", path=path, message="")

    async def _note(
        self, step: int, version: int, *, state: CheckpointState, path: str, message: str
    ) -> None:
        checkpoint = Checkpoint(
            checkpoint_id=new_id("ckpt"),
            run_id=self._run_id,
            step=step,
            weight_version=version,
            path=path,
            state=state,
            message=message,
            create_time=time.time(),
        )
        done = "is saved" if state == "READY" else f"was not saved: {message}"
        note = Note(
            "CheckpointSaved" if state == "READY" else "CheckpointFailed",
            f"step {step} {done}",
            {"checkpoint_id": checkpoint.checkpoint_id, "step": step, "path": path},
        )
        await self._journal.note(note, also=lambda connection: self._write(connection, checkpoint))

    def _write(self, connection: sa.Connection, checkpoint: Checkpoint) -> None:
        table = CHECKPOINTS.c
        of_run = table.run_id == self._run_id
        if checkpoint.state == "READY":
            # The trainer writes a step's folder anew, and deletes all but the newest ones.
            connection.execute(CHECKPOINTS.delete().where(of_run, table.step == checkpoint.step))
        connection.execute(
            CHECKPOINTS.insert().values(
                {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
            )
        )
        kept = (
            sa.select(table.checkpoint_id)
            .where(of_run, table.state == "READY")
            .order_by(table.step.desc())
            .limit(self._spec.keep)
        )
        connection.execute(
            CHECKPOINTS.update()
            .where(of_run, table.state == "READY", table.checkpoint_id.not_in(kept))
            .values(state="DELETED")
        )
