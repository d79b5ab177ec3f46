"""Local copies of objects, downloaded once per host.

::

    CACHE/<digest of the URL>/lock               held by the process that downloads
    CACHE/<digest of the URL>/<version>/<name>   a complete copy; the version is a digest of sizes and tags

A copy is downloaded under another name and renamed when it is complete, so that a killed process leaves no
copy that another one would use.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from services.common.errors import FailedPreconditionError, NotFoundError
from services.common.stores import FetchKind, Report
from services.extras.objects.connection import ObjectFolder, StoredObject
from services.extras.objects.layout import download_checkpoint, read_manifest
from services.extras.objects.records import record_objects
from services.extras.objects.transfers import Patience, TransferProgress

_OTHER_FORMATS: Final = (
    *(".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite"),
    *(".ot", ".mlmodel", ".npz"),
)
_WEIGHTS: Final = ".safetensors"
_PART = ".part"


def fetch(url: str, kind: FetchKind, *, cache: Path, report: Report) -> Path:
    """Returns a local copy, as :func:`services.common.stores.fetch` describes."""
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    has_parent = not parent.endswith("/")
    if kind in ("file", "checkpoint", "record") and not has_parent:
        raise FailedPreconditionError(
            f"{url} names a bucket, expected a {kind} in it; use a URL such as {url}/folder/name",
            url=url,
        )
    root = cache / _digest(url)
    root.mkdir(parents=True, exist_ok=True)
    if kind == "checkpoint":
        return _fetch_checkpoint(ObjectFolder(parent), name, root, report)
    if kind == "record":
        return _fetch_record(ObjectFolder(parent), name, root, report)
    patience = Patience(url, report=report)
    if kind == "file":
        store = ObjectFolder(parent)
        objects = [patience(lambda: store.head(name))]
        target = PurePosixPath(name)
    else:
        store = ObjectFolder(url)
        objects = [o for o in patience(store.list) if _is_wanted(o.name, kind)]
        target = PurePosixPath(name if has_parent else "files")
    if not objects:
        raise NotFoundError(f"{url} has no objects; use the URL of a folder with files", url=url)
    with _locked(root):
        version = root / _version(objects)
        if not version.is_dir():
            _remove_parts(root)
            unfinished = version.with_suffix(_PART)
            base = unfinished if kind == "file" else unfinished / target
            total = sum(o.num_bytes for o in objects)
            progress = TransferProgress(f"downloading {url}", total, report)
            files = {o: base / o.name for o in objects}
            store.download(files, on_bytes=progress.add, persist=patience)
            unfinished.rename(version)
            report("")
    return version / target


def _fetch_checkpoint(store: ObjectFolder, name: str, root: Path, report: Report) -> Path:
    patience = Patience(f"{store.url}/{name}", report=report)
    manifest = patience(lambda: read_manifest(store, name))
    with _locked(root):
        version = root / manifest.upload
        if not version.is_dir():
            _remove_parts(root)
            unfinished = version.with_suffix(_PART)
            download_checkpoint(
                store, name, manifest, unfinished / name, patience=patience, report=report
            )
            unfinished.rename(version)
            report("")
    return version / name


def _fetch_record(store: ObjectFolder, name: str, root: Path, report: Report) -> Path:
    url = f"{store.url}/{name}"
    patience = Patience(url, report=report)
    with _locked(root):
        objects, digest = record_objects(store, patience)
        version = root / digest
        if not version.is_dir():
            _remove_parts(root)
            unfinished = version.with_suffix(_PART)
            total = sum(stored_object.num_bytes for stored_object in objects)
            progress = TransferProgress(f"downloading {url}", total, report)
            files = {
                stored_object: unfinished / name / path for stored_object, path in objects.items()
            }
            store.download(files, on_bytes=progress.add, persist=patience)
            unfinished.rename(version)
            report("")
    return version / name


def _is_wanted(name: str, kind: FetchKind) -> bool:
    """Returns True if a copy of this kind has an object; names that end in a slash mark empty folders."""
    if name.endswith("/"):
        return False
    if kind == "folder":
        return True
    is_weights = name.endswith(_WEIGHTS) and kind == "model without weights"
    return not is_weights and not name.endswith(_OTHER_FORMATS)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(objects: Sequence[StoredObject]) -> str:
    return _digest(json.dumps([(o.name, o.num_bytes, o.tag) for o in objects]))


def _remove_parts(root: Path) -> None:
    """Removes what killed processes left; the caller holds the lock."""
    for unfinished in root.glob(f"*{_PART}"):
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Waits until no other process downloads to a folder, and keeps others from it.

    The wait ends: the kernel unlocks files of processes that end, and a download that makes no progress
    fails.
    """
    descriptor = os.open(root / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
