"""Checkpoints of runs as users see them: lookup, and deletion if no run needs them."""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import sqlalchemy as sa

from services.common.errors import FailedPreconditionError, ServiceError
from services.common.runspec.run import RunSpec
from services.common.stores import is_url, join_url, open_checkpoints
from services.controller.rules.run_state import RunState
from services.controller.run.train.checkpoints import (
    Checkpoint,
    CheckpointStore,
    steps_being_replaced,
)
from services.controller.store.database import Database
from services.controller.store.records import Event, Note
from services.controller.store.rows import append_event, get_run
from services.controller.store.runs import RunStore, check_deletable
from services.controller.store.tables import CHECKPOINTS

logger = logging.getLogger(__name__)


class CheckpointInUseError(FailedPreconditionError):
    """A run still needs the checkpoint."""

    reason = "IN_USE"


class NoCheckpointError(FailedPreconditionError):
    """The run has no usable checkpoint."""

    reason = "NO_USABLE_CHECKPOINT"


def check_usable(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Checks, in the transaction that stores a run, that the run's checkpoint stays until the run needs it.

    Raises:
        NoCheckpointError: If it was deleted, or will be once the checkpoint that is being written is saved.
    """
    # Deletions and events lock the run's row, too.
    parent = get_run(connection, checkpoint.run_id, lock=True)
    table = CHECKPOINTS.c
    query = sa.select(table.state).where(table.checkpoint_id == checkpoint.checkpoint_id)
    if connection.execute(query).scalar() != "READY":
        raise NoCheckpointError(
            f"checkpoint {checkpoint.checkpoint_id} of run {checkpoint.run_id} was deleted meanwhile; choose "
            "another one",
            run_id=checkpoint.run_id,
        )
    has_trainer = not parent.is_terminal and parent.state is not RunState.PAUSED
    if has_trainer and checkpoint.step in steps_being_replaced(connection, parent.run_id):
        raise NoCheckpointError(
            f"checkpoint {checkpoint.checkpoint_id} of run {checkpoint.run_id} is being replaced by a newer "
            "one; wait until that is saved, and choose it",
            run_id=checkpoint.run_id,
        )


def check_start(connection: sa.Connection, spec: RunSpec) -> None:
    """Applies :func:`check_usable` to the checkpoint in ``trainer.checkpoint.start_from``.

    A folder that is no READY checkpoint of a run is not checked.
    """
    folder = spec.trainer.checkpoint.start_from
    if folder is None:
        return
    table = CHECKPOINTS.c
    query = sa.select(CHECKPOINTS).where(table.path == folder, table.state == "READY")
    row = connection.execute(query).mappings().first()
    if row is not None:
        check_usable(connection, Checkpoint(**row))


class CheckpointArchive:
    """Finds and deletes checkpoints of all runs.

    Args:
        on_event: Called with the event of each deletion and the run's project.
    """

    def __init__(self, database: Database, on_event: Callable[[Event, str], None]) -> None:
        self._database = database
        self._store = CheckpointStore(database)
        self._on_event = on_event

    async def usable(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Returns a checkpoint that a run can continue from: the newest one if the id is empty.

        Raises:
            NotFoundError: If no checkpoint has that id.
            NoCheckpointError: If the checkpoint is not READY, or the run has none.
        """
        rows = await self._database.query(self._store.list_checkpoints, run_id)
        if checkpoint_id:
            rows = [await self._database.query(self._store.get, run_id, checkpoint_id)]
        ready_checkpoints = [checkpoint for checkpoint in rows if checkpoint.state == "READY"]
        if not ready_checkpoints:
            why = f"{checkpoint_id} is {rows[0].state}" if checkpoint_id else "the run has none"
            raise NoCheckpointError(
                f"run {run_id} needs a READY checkpoint to continue from, but {why}; save one first",
                run_id=run_id,
            )
        return max(ready_checkpoints, key=lambda checkpoint: checkpoint.step)

    async def runs_saved_at(self, paths: Collection[Path]) -> list[str]:
        """Returns the runs that have a checkpoint at one of the paths, above it, or directly below it."""
        return await self._database.query(self._store.runs_saved_at, paths)

    async def delete(self, run_id: str, checkpoint_id: str, *, actor: str = "") -> None:
        """Deletes a checkpoint; a repeated call changes nothing.

        Raises:
            NotFoundError: If no checkpoint has that id.
            CheckpointInUseError: If a run that has not ended would continue from it.
        """
        checkpoint, project, event = await self._database.run(
            self._delete, run_id, checkpoint_id, actor
        )
        if event is not None:
            self._on_event(event, project)
            await asyncio.to_thread(_remove, checkpoint)

    async def delete_all(self, run_id: str, *, revision: int) -> None:
        """Deletes all checkpoints of an ended run, which is deleted next; may be repeated.

        Raises:
            StaleRevisionError: If the run's revision is not ``revision``.
            NotTerminalError: If it has not ended.
            CheckpointInUseError: If a run that has not ended would continue from one.
        """
        await self._remove(await self._database.run(self._delete_all, run_id, revision))

    async def finish_deletions(self) -> None:
        """Removes files of deleted checkpoints that a killed controller left."""
        await self._remove(await self._database.query(self._store.deleted))

    async def _remove(self, checkpoints: Iterable[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            await asyncio.to_thread(_remove, checkpoint)

    def _delete(
        self, run_id: str, checkpoint_id: str, actor: str
    ) -> tuple[Checkpoint, str, Event | None]:
        checkpoint = self._store.get(run_id, checkpoint_id)
        with self._database.write() as connection:
            run = get_run(connection, run_id, lock=True)
            if checkpoint.state == "DELETED":
                return checkpoint, run.project, None
            if checkpoint.state == "READY":
                newest = connection.execute(
                    sa.select(sa.func.max(CHECKPOINTS.c.step)).where(
                        CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.state == "READY"
                    )
                ).scalar()
                is_needed = not run.is_terminal and newest == checkpoint.step
                self._check_unused(checkpoint, is_needed=is_needed)
            connection.execute(
                CHECKPOINTS.update()
                .where(CHECKPOINTS.c.checkpoint_id == checkpoint_id)
                .values(state="DELETED")
            )
            data = {"checkpoint_id": checkpoint_id, "step": checkpoint.step}
            note = Note(
                "CheckpointDeleted",
                f"deleted the checkpoint of step {checkpoint.step}",
                data,
                actor=actor,
            )
            return checkpoint, run.project, append_event(connection, run_id, note)

    def _delete_all(self, run_id: str, revision: int) -> list[Checkpoint]:
        with self._database.write() as connection:
            check_deletable(get_run(connection, run_id, lock=True), revision)
            checkpoints = self._store.list_checkpoints(run_id)
            for checkpoint in checkpoints:
                if checkpoint.state == "READY":
                    self._check_unused(checkpoint, is_needed=False)
            connection.execute(
                CHECKPOINTS.update().where(CHECKPOINTS.c.run_id == run_id).values(state="DELETED")
            )
        return checkpoints

    def _check_unused(self, checkpoint: Checkpoint, *, is_needed: bool) -> None:
        users = [checkpoint.run_id] if is_needed else []
        for run in RunStore(self._database).unfinished():
            spec = json.loads(run.spec_json)
            if spec["trainer"]["checkpoint"].get("start_from") == checkpoint.path:
                users.append(run.run_id)
        if users:
            raise CheckpointInUseError(
                f"checkpoint {checkpoint.checkpoint_id} is needed by {', '.join(users)}; cancel them or "
                "wait until they end",
                checkpoint_id=checkpoint.checkpoint_id,
            )


def _remove(checkpoint: Checkpoint) -> None:
    """Removes the folders of a checkpoint and of its separate critic, if this controller can access them.

    Each folder is renamed first: a partly removed one is then no checkpoint, and a later call finds it.
    """
    if not checkpoint.path:
        return
    if is_url(checkpoint.path):
        _delete_stored(checkpoint.path)
        return
    policy = Path(checkpoint.path)
    for folder in (policy, policy.parent / "critic" / policy.name):
        renamed = folder.with_name(f".deleted-{folder.name}")
        try:
            if renamed.is_dir():
                shutil.rmtree(renamed)
            if (folder / "manifest.json").is_file():
                shutil.rmtree(folder.rename(renamed))
        except OSError as error:  # for example, the trainer deletes it, too
            logger.warning(
                "checkpoint not deleted", extra={"folder": str(folder), "error": str(error)}
            )


def _delete_stored(url: str) -> None:
    """Deletes a checkpoint and that of a separate critic in an object store, if this controller may."""
    parent, _, name = url.rpartition("/")
    for folder in (parent, join_url(parent, "critic")):
        try:
            open_checkpoints(folder).delete(name)
        except ServiceError as error:
            logger.warning(
                "checkpoint not deleted", extra={"folder": f"{folder}/{name}", "error": str(error)}
            )
