"""Checkpoints of the models that a worker trains, written while training continues.

snapshot   each engine copies its state into host memory; training waits only for this
write      every rank writes its part; then rank 0 publishes the folder with its manifest
load       each engine reads its part of the newest complete checkpoint

With an object store, a published folder is then uploaded in the background, and the newest checkpoint in the
store is downloaded before it is loaded.
"""

import errno
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import FailedPreconditionError
from services.common.fields import new_id
from services.common.stores import StoredCheckpoints, join_url
from services.trainer.checkpoint import compatibility, manifest
from services.trainer.collectives import Ranks
from services.trainer.engines.base import PendingSave, TrainEngine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the training state in host memory."""

    step: int
    """Newest trained step."""
    parts: Mapping[str, PendingSave]
    """Copy of each engine's state, by the engine's subfolder."""
    facts: Mapping[str, Any]
    """Plain numbers and the model's facts, the same on every rank."""

    @property
    def num_bytes(self) -> int:
        return sum(state.num_bytes for state in self.parts.values())


class Checkpointer:
    """Saves and loads the engines of a worker.

    Args:
        engines: Engines that train, by the subfolder of their files; the policy has none (``""``).
        root: Folder of all checkpoints of the run, visible to every rank.
        model: Result of :func:`compatibility.model_facts`: each checkpoint has it, and must have it to be
            loaded. None if the caller guarantees that checkpoints are of this model.
        store: Object store that has the checkpoints besides the folder; None without one.
    """

    def __init__(
        self,
        engines: Mapping[str, TrainEngine],
        *,
        root: Path,
        keep: int,
        ranks: Ranks,
        model: Mapping[str, Any] | None = None,
        store: StoredCheckpoints | None = None,
    ) -> None:
        self._engines = engines
        self._model = model
        self._root = root
        self._keep = keep
        self.store = store
        self._ranks = ranks
        self._is_first = (ranks.everyone or ranks).rank == 0
        self._writing: Snapshot | None = None

    def snapshot(self, step: int, facts: Mapping[str, Any]) -> Snapshot:
        """Copies the state; the copy is valid until the next snapshot.

        Args:
            facts: Plain numbers to store, including each engine's ``num_updates``
                (:func:`compatibility.counter`).
        """
        states = {folder: engine.save() for folder, engine in self._engines.items()}
        return Snapshot(step=step, parts=states, facts={**facts, "model": self._model})

    def write(self, snapshot: Snapshot, keep_steps: Collection[int] = ()) -> Path:
        """Writes a snapshot. Blocks; runs in a thread while training continues. All ranks must call it.

        Args:
            keep_steps: Steps whose folders are kept besides the newest ones; only rank 0 needs them.

        Returns:
            The published folder.

        Raises:
            FailedPreconditionError: If writing fails, as on a full disk.
        """
        self._writing = snapshot
        try:
            return self._write(snapshot, keep_steps)
        except OSError as error:
            fix = "free space there, or lower trainer.checkpoint.keep"
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS):
                fix = "set trainer.checkpoint.directory to a folder that the trainer can write to"
            raise FailedPreconditionError(
                f"step {snapshot.step} cannot be written to {self._root}: {error}; {fix}",
                step=snapshot.step,
            ) from error
        finally:
            self._writing = None

    def location(self, folder: Path) -> str:
        """Returns the URL of a published folder in the object store, or the folder itself without a store."""
        return str(folder) if self.store is None else join_url(self.store.url, folder.name)

    def progress(self) -> tuple[int, int]:
        """Returns written and total bytes of all ranks, counted file by file; zeros if none is being written.

        Once all bytes are written, the files are hashed.
        """
        snapshot = self._writing
        if snapshot is None:
            return 0, 0
        total = snapshot.num_bytes
        try:
            # A file is allocated at full size under another name, and gets this name once it is written.
            files = manifest.unfinished_of(self._root, snapshot.step).rglob("*.safetensors")
            return min(sum(file.stat().st_size for file in files), total), total
        except FileNotFoundError:  # the folder was renamed meanwhile
            return total, total

    def _write(self, snapshot: Snapshot, keep_steps: Collection[int]) -> Path:
        unfinished = manifest.unfinished_of(self._root, snapshot.step)
        if self._is_first:
            manifest.remove_leftovers(self._root)
        for subfolder, state in snapshot.parts.items():
            state.write(unfinished / subfolder)
        folder = manifest.folder_of(self._root, snapshot.step)
        if self._is_first:
            not_stored = set() if self.store is None else self.store.pending_steps()
            manifest.publish(
                self._root,
                snapshot.step,
                dict(snapshot.facts),
                keep=self._keep,
                keep_steps={*keep_steps, *not_stored},
                upload="" if self.store is None else new_id("upload"),
            )
        if self.store is not None:
            self.store.submit(folder, keep=self._keep, keep_steps=keep_steps)
        return folder

    def load(self, folder: Path | None = None, *, before: int | None = None) -> dict[str, Any]:
        """Loads a checkpoint in place; returns its facts. All ranks must call it.

        Args:
            folder: The checkpoint; None selects the newest complete one of this run.
            before: Step that the selected checkpoint must precede; None for any.

        Raises:
            NotFoundError: If there is none.
            DataLossError: If ``folder`` is not complete.
            OtherCheckpointError: If the checkpoint is of another model, or lacks one.
        """
        if is_own := folder is None:
            self._restore_from_store(before)
            folder, facts = manifest.newest(self._root, before=before)
        else:
            facts = manifest.verify(folder)
        if problems := [*compatibility.mismatches(facts, self._model, parts=self._engines)]:
            raise compatibility.OtherCheckpointError(
                f"checkpoint {folder} cannot be loaded: {'; '.join(problems)}"
            )
        for name, engine in self._engines.items():
            engine.load(folder / name, num_updates=int(facts[compatibility.counter(name)]))
        if is_own and before is None and self._is_first:
            self._submit_until(folder)
        return facts

    def _restore_from_store(self, before: int | None) -> None:
        """Makes the newest checkpoint of the store available to all ranks."""
        if self.store is None:
            return
        with self._ranks.fail_together("read the checkpoints of the object store"):
            if self._is_first:
                self.store.restore_newest(self._root, before=before)

    def _submit_until(self, loaded: Path) -> None:
        """Uploads the folders that the store lacks, oldest first: the last process may have ended before.

        Later folders than the loaded one are damaged.
        """
        for folder in reversed(manifest.published_in(self._root)):
            if self.store is not None and folder.name <= loaded.name:
                self.store.submit(folder, keep=None, keep_steps=())
