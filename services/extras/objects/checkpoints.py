"""Checkpoints of a run in a store: uploaded in the background, newest restored, old ones deleted.

::

    rank 0     for each submitted folder, in order: uploads its part -> all files are there -> manifest
               -> the folder is confirmed, and outdated checkpoints and remains are deleted
    others     upload the files that they wrote; what they do not upload in time, rank 0 uploads

A record of the steps in the same folder is uploaded before the manifest.

An upload that fails is repeated until it succeeds or the process ends, and goes on with the files that the
store lacks. It never holds training: a folder is complete on disk before it is submitted, and stays there
until its manifest is in the store.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from services.common.fields import new_id
from services.extras.objects.connection import CONCURRENCY, ObjectFolder, StoredObject
from services.extras.objects.layout import (
    StoredCheckpoint,
    StoredManifest,
    download_checkpoint,
    parse_manifest,
    read_manifest,
    stored_checkpoints,
)
from services.extras.objects.records import FOLDER as RECORD
from services.extras.objects.records import RecordUploads, restore_record
from services.extras.objects.transfers import Patience, TransferCancelledError, TransferProgress
from services.extras.objects.upload_reports import UploadReports, UploadStatus
from services.trainer.checkpoint import manifest as manifests
from services.wire.controller import WorkerSession

logger = logging.getLogger(__name__)

_RECORD: Final = ".stored.json"
"""File beside a run's checkpoints: the newest upload that this folder's checkpoints continue from."""
_SHARD: Final = re.compile(r"(?:.*/)?shard-(?P<number>\d+)-\d+\.safetensors")
_PEERS_S: Final = 60.0
"""Seconds without a further file of the other ranks after which rank 0 uploads their files."""
_LOOK_S = 0.2
_PUBLISHED_S: Final = 1800.0
"""Seconds within which rank 0 publishes the folder whose files the other ranks have written."""
_REMAINS_AFTER: Final = timedelta(hours=1)
"""Age after which objects that no manifest names are deleted; younger ones may be of a running upload."""
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Upload:
    """A folder to upload."""

    folder: Path
    step: int
    keep: int | None
    """Number of newest checkpoints that are kept; None to delete none."""


def open_checkpoints(url: str, *, rank: int, world_size: int) -> "ObjectCheckpoints":
    """Returns the checkpoints below a URL."""
    return ObjectCheckpoints(ObjectFolder(url), rank=rank, world_size=world_size)


class ObjectCheckpoints:
    """Implements :class:`services.common.stores.StoredCheckpoints`."""

    def __init__(self, store: ObjectFolder, *, rank: int = 0, world_size: int = 1) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = Patience(store.url, limit_s=None)
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []
        self._current: _Upload | None = None
        self._progress: TransferProgress | None = None
        self._keep_steps: frozenset[int] = frozenset()
        self._stored_step = 0
        self._failure = ""
        self._reports = UploadReports(store.url)
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._records = RecordUploads(
            store, request=self._request, on_total=self._add_total, on_bytes=self._count
        )

    @property
    def url(self) -> str:
        return self._store.url

    def check(self) -> None:
        name = f".{new_id('check')}"
        self._store.write(name, b"")
        self._store.delete([name])

    # ---- Restore

    def restore_newest(self, root: Path, *, before: int | None = None) -> None:
        patience = Patience(self._store.url)
        if before is not None and _is_newest_whole(root, before):
            return
        checkpoints = stored_checkpoints(patience(self._store.list))
        steps = sorted((s for s, c in checkpoints.items() if c.is_published), reverse=True)
        manifests_read = [self._manifest(checkpoints[step], patience) for step in steps]
        stored_manifests = [manifest for manifest in manifests_read if manifest is not None]
        if not stored_manifests:
            return
        self._stored_step = stored_manifests[0].step
        self._reports.add(*((m.step, m.upload) for m in reversed(stored_manifests)))
        if manifests_read[0] is not None:
            self._delete_overtaken(root, stored_manifests)
            if before is None and _is_ahead(root, stored_manifests):
                return
        whole = _newest_whole(root, before)
        for manifest in stored_manifests:
            if before is not None and manifest.step >= before:
                continue
            if whole >= manifest.step:
                return
            try:
                self._download(root, manifest, patience, is_start=before is None)
            except DataLossError as error:
                logger.error("stored checkpoint refused", extra={"reason": str(error)})  # noqa: TRY400
            else:
                return

    def _manifest(self, checkpoint: StoredCheckpoint, patience: Patience) -> StoredManifest | None:
        try:
            return patience(lambda: read_manifest(self._store, checkpoint.name))
        except (NotFoundError, DataLossError) as error:
            logger.error("stored checkpoint refused", extra={"reason": str(error)})  # noqa: TRY400
            return None

    def _delete_overtaken(self, root: Path, stored_manifests: list[StoredManifest]) -> None:
        """Deletes checkpoints of this folder that another process has overtaken.

        If the newest upload in the store neither is in this folder nor was the last one of this folder, a
        process with another folder continued the run, and what only this folder has is of a history that
        the run has left.
        """
        uploads = {step: _upload_of(folder) for step, folder in _local(root, None).items()}
        newest = stored_manifests[0].upload
        if newest == _recorded(root) or newest in uploads.values():
            return
        upload_names = {manifest.upload for manifest in stored_manifests}
        for step, folder in _local(root, None).items():
            if uploads[step] not in upload_names:
                logger.warning(
                    "checkpoint deleted, because the run continued elsewhere",
                    extra={"folder": str(folder), "stored_step": stored_manifests[0].step},
                )
                manifests.delete(folder)

    def _download(
        self, root: Path, manifest: StoredManifest, patience: Patience, *, is_start: bool
    ) -> None:
        folder = manifests.folder_of(root, manifest.step)
        unfinished = manifests.unfinished_of(root, manifest.step)
        download_checkpoint(self._store, folder.name, manifest, unfinished, patience=patience)
        if is_start:  # otherwise this process continues, and its record with it
            restore_record(self._store, root, manifest.step, patience)
        manifests.install(unfinished, folder)
        _record(root, manifest)
        logger.info("checkpoint restored", extra={"url": f"{self._store.url}/{folder.name}"})

    # ---- Upload

    def submit(self, folder: Path, *, keep: int | None, keep_steps: Collection[int]) -> None:
        step = int(folder.name.removeprefix(manifests.STEP_PREFIX))
        with self._changed:
            if keep is not None:
                self._keep_steps = frozenset(keep_steps)
            later = [upload for upload in self._waiting if upload.step >= step]
            self._waiting = [upload for upload in self._waiting if upload.step < step]
            self._waiting.append(_Upload(folder, step, keep))
            if keep is not None:
                newest = sorted(upload.step for upload in self._waiting)[-keep:]
                retained = {*newest, *self._keep_steps}
                later += [upload for upload in self._waiting if upload.step not in retained]
                self._waiting = [upload for upload in self._waiting if upload.step in retained]
            for upload in later:
                logger.info("upload of an outdated checkpoint dropped", extra={"step": upload.step})
            if self._thread is None:
                # A daemon: an upload to a store that does not answer must not keep the process.
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def pending_steps(self) -> set[int]:
        with self._changed:
            return {upload.step for upload in self._uploads()}

    def _uploads(self) -> list[_Upload]:
        return [*self._waiting, *([] if self._current is None else [self._current])]

    def status(self) -> UploadStatus:
        with self._changed:
            progress, current = self._progress, self._current
            return UploadStatus(
                step=0 if current is None else current.step,
                done_bytes=0 if progress is None else progress.done_bytes,
                total_bytes=0 if progress is None else progress.total_bytes,
                num_waiting=len(self._waiting),
                stored_step=self._stored_step,
                failing_s=self._patience.failing_s,
                cause=self._patience.cause,
            )

    def report(self, session: WorkerSession) -> None:
        self._reports.report(session, self.status())

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: self._is_closed or not self._uploads(), timeout_s
            )
        status = self.status()
        if not is_done:
            cause = f"; first cause: {status.cause}" if status.cause else ""
            size = f"{status.done_bytes} of {status.total_bytes} bytes"
            raise DeadlineExceededError(
                f"the checkpoint of step {status.step} is not in {self._store.url} after {timeout_s:.0f} s "
                f"({size}){cause}; its folder on the trainer's host stays"
            )
        if self._failure:
            raise FailedPreconditionError(self._failure)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._patience.cancel()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def delete(self, name: str) -> None:
        self._delete(name)
        objects = self._store.list()
        if not any(c.is_published for c in stored_checkpoints(objects).values()):
            self._store.delete([o.name for o in objects if o.name.startswith(f"{RECORD}/")])

    def _delete(self, name: str) -> None:
        self._store.delete([f"{name}/{manifests.MANIFEST}"])
        self._store.delete([entry.name for entry in self._store.list(name)])

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting)
                if self._is_closed:
                    return
                self._current = self._waiting.pop(0)
            try:
                self._upload(self._current)
                self._failure = ""
            except TransferCancelledError:
                return
            except Exception as error:
                # Another upload may succeed; this one is no checkpoint, and the older ones stay.
                logger.exception("upload failed", extra={"step": self._current.step})
                self._failure = (
                    f"the checkpoint of step {self._current.step} is not stored: {error}"
                )
            finally:
                with self._changed:
                    self._current = self._progress = None
                    self._changed.notify_all()

    def _upload(self, upload: _Upload) -> None:
        if self._rank > 0:
            self._wait_published(upload.folder)
        path = upload.folder / manifests.MANIFEST
        manifest = parse_manifest(path.read_bytes(), str(path))
        name = upload.folder.name
        if self._rank > 0:
            shares = {f: n for f, n in manifest.sizes.items() if self._owner(f) == self._rank}
            self._upload_files(upload, manifest, self._missing(name, manifest, shares))
            return
        total = sum(manifest.sizes.values())
        self._progress = TransferProgress(f"uploading {self._store.url}/{name}", total)
        # The store has nothing of an upload that this process made.
        is_new = upload.keep is not None
        if is_new or not self._is_stored(name, manifest):
            rank_files = {f: n for f, n in manifest.sizes.items() if self._owner(f) == 0}
            missing_files = rank_files if is_new else self._missing(name, manifest, rank_files)
            self._count(sum(rank_files.values()) - sum(missing_files.values()))
            self._upload_files(upload, manifest, missing_files)
            if len(rank_files) < len(manifest.sizes):
                self._wait_for_peers(upload, manifest)
            self._records.upload(upload.folder.parent, upload.step)
            self._request(
                lambda: self._store.write(f"{name}/{manifests.MANIFEST}", manifest.content)
            )
        self._reports.add((upload.step, manifest.upload))
        # An older folder, which a new process submits again, is not what the folders continue from.
        if upload.keep is not None or upload.step >= self._stored_step:
            _record(upload.folder.parent, manifest)
            with self._changed:
                self._stored_step = upload.step
        logger.info("checkpoint stored", extra={"url": f"{self._store.url}/{name}"})
        if upload.keep is not None:
            self._request(lambda: self._retain(upload))

    def _owner(self, file: str) -> int:
        """Returns the rank that wrote a file; rank 0 for files without a number."""
        matched = _SHARD.fullmatch(file)
        return 0 if matched is None else (int(matched["number"]) - 1) % self._world_size

    def _request(self, request: Any) -> Any:
        """Repeats a request until it succeeds; refused credentials may be corrected, but no damaged data."""

        def retriable() -> Any:
            try:
                return request()
            except DataLossError:
                raise
            except ServiceError as error:
                raise UnavailableError(error.message) from error

        return self._patience(retriable)

    def _is_stored(self, name: str, manifest: StoredManifest) -> bool:
        def stored_upload() -> str:
            try:
                return read_manifest(self._store, name).upload
            except (NotFoundError, DataLossError):
                return ""

        return bool(self._request(stored_upload) == manifest.upload)

    def _present(self, name: str, manifest: StoredManifest) -> dict[str, int]:
        """Returns the sizes of an upload's objects, by the file's name."""
        prefix = f"{name}/{manifest.upload}"
        objects: list[StoredObject] = self._request(lambda: self._store.list(prefix))
        return {entry.name.removeprefix(f"{prefix}/"): entry.num_bytes for entry in objects}

    def _missing(
        self, name: str, manifest: StoredManifest, files: Mapping[str, int]
    ) -> dict[str, int]:
        """Returns those of some files, with their bytes, that the store lacks."""
        present = self._present(name, manifest)
        return {file: size for file, size in files.items() if present.get(file) != size}

    def _upload_files(
        self, upload: _Upload, manifest: StoredManifest, files: Mapping[str, int]
    ) -> None:
        """Uploads files, several at a time."""
        name = upload.folder.name

        def send(file: str) -> None:
            path = upload.folder / file

            def attempt() -> None:
                # Before each repetition: the file may be damaged while the store fails.
                if (size := path.stat().st_size) != manifest.sizes[file]:
                    raise DataLossError(
                        f"{path} has {size} bytes, but its manifest says {manifest.sizes[file]}"
                    )
                self._store.upload(path, f"{name}/{manifest.upload}/{file}", on_bytes=self._count)

            self._request(attempt)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            transfers = [pool.submit(send, file) for file in sorted(files)]
            try:
                for transfer in transfers:
                    transfer.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _add_total(self, num_bytes: int) -> None:
        if self._progress is not None:
            self._progress.total_bytes += num_bytes

    def _count(self, num_bytes: int) -> None:
        self._patience.check()
        if self._progress is not None:
            self._progress.add(num_bytes)

    def _wait_for_peers(self, upload: _Upload, manifest: StoredManifest) -> None:
        """Waits until all files are in the store; uploads those whose ranks stopped uploading."""
        name = upload.folder.name
        files, since = manifest.sizes, time.monotonic()
        missing_files = self._missing(name, manifest, files)
        while missing_files:
            if self._world_size == 1 or time.monotonic() - since > _PEERS_S:
                self._upload_files(upload, manifest, missing_files)
            self._patience.pause(_LOOK_S)
            before, missing_files = missing_files, self._missing(name, manifest, files)
            if len(missing_files) < len(before):
                since = time.monotonic()

    def _wait_published(self, folder: Path) -> None:
        deadline = time.monotonic() + _PUBLISHED_S
        while not (folder / manifests.MANIFEST).is_file():
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"{folder} was not published in {_PUBLISHED_S:.0f} s")
            self._patience.pause(_LOOK_S)

    # ---- Retention

    def _retain(self, upload: _Upload) -> None:
        """Deletes outdated checkpoints and the remains of uploads that were never published.

        As on disk: later steps are of a history that the run has left, and older ones are outdated.
        """
        objects = self._store.list()
        checkpoints = stored_checkpoints(objects)
        published = sorted((s for s, c in checkpoints.items() if c.is_published), reverse=True)
        current = [step for step in published if step <= upload.step]
        assert upload.keep is not None
        outdated = {step for step in published if step > upload.step} | {*current[upload.keep :]}
        for step in sorted(outdated - self._keep_steps):
            name = checkpoints[step].name
            self._store.delete([f"{name}/{manifests.MANIFEST}"])
            self._store.delete([o.name for o in objects if o.name.startswith(f"{name}/")])
        newest = max((entry.modified for entry in objects), default=None)
        pending = self.pending_steps()
        for step, checkpoint in checkpoints.items():
            if step in outdated - self._keep_steps or (step in pending and step != upload.step):
                continue
            old_uploads = {
                name: [entry.name for entry in remains]
                for name, remains in checkpoint.uploads.items()
                if newest and all(newest - o.modified > _REMAINS_AFTER for o in remains)
            }
            if old_uploads and (named := self._named_upload(checkpoint)) is not None:
                for name, remains in old_uploads.items():
                    if name != named:
                        self._store.delete(remains)
        self._records.retain(
            upload.step, {o.name for o in objects if o.name.startswith(f"{RECORD}/")}
        )

    def _named_upload(self, checkpoint: StoredCheckpoint) -> str | None:
        """Returns the upload that a manifest names; empty without one, None if it is damaged."""
        try:
            return read_manifest(self._store, checkpoint.name).upload
        except NotFoundError:
            return ""
        except DataLossError:
            return None


def _local(root: Path, before: int | None) -> dict[int, Path]:
    """Returns the published folders on this host by step, only those before a step if one is given."""
    folders = {
        int(folder.name.removeprefix(manifests.STEP_PREFIX)): folder
        for folder in manifests.published_in(root)
        if (folder / manifests.MANIFEST).is_file()
    }
    return {step: folder for step, folder in folders.items() if before is None or step < before}


def _newest_whole(root: Path, before: int | None) -> int:
    """Returns the newest step whose folder on this host is complete and undamaged; -1 if there is none."""
    for step, folder in sorted(_local(root, before).items(), reverse=True):
        try:
            manifests.verify(folder)
        except DataLossError as error:
            logger.error("checkpoint refused", extra={"reason": str(error)})  # noqa: TRY400
        else:
            return step
    return -1


def _is_newest_whole(root: Path, before: int) -> bool:
    """Returns True if the newest folder before a step is complete, so that no store is asked for it."""
    folders = _local(root, before)
    return bool(folders) and _newest_whole(root, before) == max(folders)


def _is_ahead(root: Path, stored_manifests: Sequence[StoredManifest]) -> bool:
    """Returns True if this folder has gone on from the newest upload, even to an earlier step.

    A run that went back deletes later checkpoints on disk when it saves, and in the store once that is
    uploaded.
    """
    uploads = {_upload_of(folder) for folder in _local(root, None).values()}
    newest = stored_manifests[0].upload
    has_more = bool(uploads - {manifest.upload for manifest in stored_manifests})
    return newest == _recorded(root) and newest not in uploads and has_more


def _upload_of(folder: Path) -> str:
    try:
        return parse_manifest((folder / manifests.MANIFEST).read_bytes(), str(folder)).upload
    except (OSError, DataLossError):
        return ""


def _record(root: Path, manifest: StoredManifest) -> None:
    """Remembers the newest upload that the checkpoints of a folder continue from."""
    new_record = root / f"{_RECORD}.new"
    new_record.write_text(json.dumps({"step": manifest.step, "upload": manifest.upload}))
    new_record.rename(root / _RECORD)


def _recorded(root: Path) -> str:
    try:
        return str(json.loads((root / _RECORD).read_text())["upload"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
