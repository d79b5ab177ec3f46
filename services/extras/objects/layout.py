"""Layout of checkpoints in a store.

::

    URL/step-00000010/manifest.json      written last, in one request: the checkpoint exists once it does
    URL/step-00000010/<upload>/<file>    files of one upload, which the manifest names

Each published folder has its own ``upload``, so no upload overwrites an object that a manifest names. A
manifest that replaces another one of its step switches to the new objects at once.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from services.common.errors import DataLossError, NotFoundError
from services.common.stores import Report
from services.extras.objects.connection import ObjectFolder, StoredObject
from services.extras.objects.transfers import Patience, TransferProgress
from services.trainer.checkpoint import manifest as manifests

_OBJECT: Final = re.compile(
    rf"(?P<name>{manifests.STEP_PREFIX}(?P<step>\d{{8}}))/"
    rf"(?:{re.escape(manifests.MANIFEST)}|(?P<upload>[^/]+)/.+)"
)
_UPLOAD: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DOWNLOADS: Final = 2
"""Downloads of a damaged checkpoint before it counts as damaged in the store."""


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """Content of a ``manifest.json``."""

    content: bytes
    step: int
    upload: str
    sizes: Mapping[str, int]
    """Bytes of each file, by its name in the checkpoint."""


@dataclass(slots=True)
class StoredCheckpoint:
    """Objects of one step."""

    step: int
    name: str
    is_published: bool = False
    """True if there is a manifest."""
    uploads: dict[str, list[StoredObject]] = field(default_factory=dict)
    """Objects by upload."""


def parse_manifest(content: bytes, where: str) -> StoredManifest:
    """Returns a manifest.

    Raises:
        DataLossError: If it is not one, was not written for a store, or names files outside the checkpoint.
    """
    try:
        document = json.loads(content)
        sizes = {str(name): int(file["size"]) for name, file in document["files"].items()}
        upload = str(document["upload"])
        manifest = StoredManifest(content, int(document["step"]), upload, sizes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLossError(
            f"{where} is not a manifest of a stored checkpoint: {error!r}"
        ) from error
    # Both become paths on this host, and everyone who can write to the store chooses them.
    if _UPLOAD.fullmatch(upload) is None:
        raise DataLossError(f"{where} names the upload {upload!r:.80}, which is not an id")
    for name in sizes:
        if PurePosixPath(name).is_absolute() or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise DataLossError(
                f"{where} names the file {name!r:.80}, which is not in a checkpoint"
            )
    return manifest


def read_manifest(store: ObjectFolder, name: str) -> StoredManifest:
    """Returns the manifest of a checkpoint.

    Raises:
        NotFoundError: If there is no checkpoint of that name.
        DataLossError: If its manifest is damaged.
    """
    path = f"{name}/{manifests.MANIFEST}"
    try:
        content = store.read(path)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no checkpoint at {store.url}/{name}: it has no {manifests.MANIFEST}; if the run has "
            "just saved it, its upload may still be running, else use another checkpoint",
            url=f"{store.url}/{name}",
        ) from error
    return parse_manifest(content, f"{store.url}/{path}")


def stored_checkpoints(objects: Iterable[StoredObject]) -> dict[int, StoredCheckpoint]:
    """Returns the checkpoints, published or not, to which listed objects belong, by step."""
    checkpoints: dict[int, StoredCheckpoint] = {}
    for stored_object in objects:
        if (matched := _OBJECT.fullmatch(stored_object.name)) is None:
            continue  # of a critic, a record, or of someone else
        step = int(matched["step"])
        checkpoint = checkpoints.setdefault(step, StoredCheckpoint(step, matched["name"]))
        if matched["upload"] is None:
            checkpoint.is_published = True
        else:
            checkpoint.uploads.setdefault(matched["upload"], []).append(stored_object)
    return checkpoints


def download_checkpoint(
    store: ObjectFolder,
    name: str,
    manifest: StoredManifest,
    folder: Path,
    *,
    patience: Patience,
    report: Report | None = None,
) -> None:
    """Downloads a checkpoint into a new folder and verifies every file of it.

    Raises:
        DataLossError: If objects are missing or damaged.
    """
    prefix = f"{name}/{manifest.upload}"
    where = f"{store.url}/{name}"
    for attempt in range(1, _DOWNLOADS + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        all_objects = patience(lambda: store.list(prefix))
        objects = {o: o.name.removeprefix(f"{prefix}/") for o in all_objects}
        sizes = {path: o.num_bytes for o, path in objects.items()}
        missing_files = [path for path, size in manifest.sizes.items() if sizes.get(path) != size]
        if missing_files:
            raise DataLossError(
                f"checkpoint {where}: {', '.join(missing_files[:3])} is missing or has another size",
                url=where,
            )
        needed_objects = {o: folder / path for o, path in objects.items() if path in manifest.sizes}
        total = sum(manifest.sizes.values())
        progress = TransferProgress(f"downloading {where}", total, report)
        store.download(needed_objects, on_bytes=progress.add, persist=patience)
        (folder / manifests.MANIFEST).write_bytes(manifest.content)
        try:
            manifests.verify(folder)
        except DataLossError:
            if attempt == _DOWNLOADS:
                raise
        else:
            return
