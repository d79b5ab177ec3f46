"""Records of steps (``record: full``) in the store: uploaded with the checkpoint that continues after them.

::

    URL/record/files/<file>-<digest>    files of the record, named by their content
    URL/record/step-00000010.json       index of all files up to that step; written before the checkpoint's
                                        manifest

No object is ever overwritten with other content, so a reader of an index sees the files of one history, and
a killed writer leaves objects that no index names. A checkpoint in the store has the records of its steps.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from services.common.errors import DataLossError, NotFoundError
from services.extras.objects.connection import ObjectFolder, StoredObject
from services.extras.objects.transfers import Patience

logger = logging.getLogger(__name__)

FOLDER: Final = "record"
"""Folder of a record in the folder of the checkpoints, on disk and in the store."""
_RUN: Final = "run.json"
_EARLIER: Final = ".stored.json"
"""File of a record on disk: files of earlier steps, which only the store has."""
_FILE: Final = re.compile(r"step-(?P<step>\d{8})/rank-\d+\.safetensors")
_INDEX: Final = re.compile(rf"{FOLDER}/step-(?P<step>\d{{8}})\.json")
_READ_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of a record in the store."""

    object: str
    """Name of its object below the URL of the checkpoints."""
    size: int
    """Bytes."""
    digest: str
    """128-bit XXH3 of its content, in hex."""


Index = Mapping[str, RecordFile]
"""Files of a record by their path in its folder."""


class RecordUploads:
    """Uploads what a record's folder has and the store lacks.

    Args:
        request: Repeats a request until it succeeds.
        on_total: Called with further bytes that are going to be uploaded.
        on_bytes: Called with further bytes that were uploaded.
    """

    def __init__(
        self,
        store: ObjectFolder,
        *,
        request: Callable[[Callable[[], Any]], Any],
        on_total: Callable[[int], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._store = store
        self._request = request
        self._on_total = on_total
        self._on_bytes = on_bytes
        self._digests: dict[Path, tuple[int, int, str]] = {}

    def upload(self, root: Path, step: int) -> None:
        """Uploads the files of all steps up to one, then their index; does nothing without a record.

        Args:
            root: Folder of the run's checkpoints on this host.
        """
        folder = root / FOLDER
        local = {name: self._described(folder / name, name) for name in _files(folder, step)}
        if _RUN not in local:
            return
        # Listed again each time: who deletes the last checkpoint deletes the record's objects, too.
        present = self._request(lambda: self._store.list(f"{FOLDER}/files"))
        sizes = {entry.name: entry.num_bytes for entry in present}
        missing_files = {n: f for n, f in local.items() if sizes.get(f.object) != f.size}
        self._on_total(sum(file.size for file in missing_files.values()))
        for name, file in missing_files.items():
            self._upload_file(folder / name, file)
        index = {**_until(_earlier(folder), step), **local}
        content = json.dumps({name: asdict(file) for name, file in index.items()}).encode()
        self._request(lambda: self._store.write(_index_name(step), content))

    def retain(self, step: int, names: Collection[str]) -> None:
        """Deletes the objects that the index of a step does not name; does nothing without a whole index.

        Args:
            names: Names of the record's objects in the store.
        """
        if _index_name(step) in names:
            try:
                index = _read_index(self._store, _index_name(step))
            except (NotFoundError, DataLossError) as error:  # no repetition would help
                _log_refused(error)
                return
            outdated = set(names) - {file.object for file in index.values()} - {_index_name(step)}
            self._store.delete(sorted(outdated))

    def _upload_file(self, path: Path, file: RecordFile) -> None:
        def attempt() -> None:
            self._store.upload(path, file.object, on_bytes=self._on_bytes)

        self._request(attempt)

    def _described(self, path: Path, name: str) -> RecordFile:
        """Returns the description of a file, whose content is only read if it is new or was replaced."""
        status = path.stat()
        described = self._digests.get(path)
        if described is None or described[:2] != (status.st_mtime_ns, status.st_size):
            described = (status.st_mtime_ns, status.st_size, _digest(path))
            self._digests[path] = described
        return RecordFile(f"{FOLDER}/files/{name}-{described[2]}", described[1], described[2])


def restore_record(store: ObjectFolder, root: Path, step: int, patience: Patience) -> None:
    """Prepares the record on this host to go on after a checkpoint that was downloaded.

    Records of earlier steps stay in the store; the file of starts and the records of ``step`` are downloaded.
    A record that is damaged in the store is logged, and does not keep the run from going on.

    Args:
        root: Folder of the run's checkpoints on this host.
    """
    try:
        index = _index_of(store, patience, at_least=step)
    except NotFoundError:
        return
    except DataLossError as error:
        _log_refused(error)
        return
    folder = root / FOLDER
    for later in folder.glob("step-*"):
        shutil.rmtree(later)
    earlier = _until(index, step)
    try:
        for name, file in earlier.items():
            if name == _RUN or _step_of(name) == step:
                _write(folder / name, _content(store, file, patience))
    except (NotFoundError, DataLossError) as error:
        _log_refused(error)
    names = {name: asdict(file) for name, file in earlier.items()}
    _write(folder / _EARLIER, json.dumps(names).encode())


def record_objects(
    store: ObjectFolder, patience: Patience
) -> tuple[Mapping[StoredObject, str], str]:
    """Returns the objects of the newest record with their paths in its folder, and a digest of the record.

    Raises:
        NotFoundError: If the store has no record.
        DataLossError: If its index is damaged, or names an object that is missing or has another size.
    """
    index = _index_of(store, patience)
    entries = {o.name: o for o in patience(lambda: store.list(f"{FOLDER}/files"))}
    for file in index.values():
        if file.object not in entries or entries[file.object].num_bytes != file.size:
            raise DataLossError(
                f"{store.url}/{file.object} of the record is missing or has another size",
                url=store.url,
            )
    objects = {entries[file.object]: name for name, file in index.items()}
    return objects, xxhash.xxh3_64_hexdigest(json.dumps([o.name for o in objects]).encode())


def _log_refused(error: Exception) -> None:
    logger.error("stored record refused", extra={"reason": str(error)})


def _files(folder: Path, step: int) -> list[str]:
    """Returns the paths of the files of a record up to a step."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("step-*/rank-*"))]
    names = [n for n in names if _FILE.fullmatch(n) is not None and _step_of(n) <= step]
    return [*([_RUN] if (folder / _RUN).is_file() else []), *names]


def _until(index: Index, step: int) -> Index:
    return {name: file for name, file in index.items() if _step_of(name) <= step}


def _step_of(name: str) -> int:
    """Returns the step of a file; -1 for that of the starts."""
    matched = _FILE.fullmatch(name)
    return -1 if matched is None else int(matched["step"])


def _index_name(step: int) -> str:
    return f"{FOLDER}/step-{step:08d}.json"


def _index_of(store: ObjectFolder, patience: Patience, *, at_least: int | None = None) -> Index:
    """Returns the newest index, or the first one of ``at_least`` a step if there is one.

    Raises:
        NotFoundError: If there is none.
        DataLossError: If it is damaged.
    """
    names = (entry.name for entry in patience(lambda: store.list(FOLDER)))
    steps = sorted(int(m["step"]) for n in names if (m := _INDEX.fullmatch(n)) is not None)
    if not steps:
        raise NotFoundError(
            f"there is no record in {store.url}/{FOLDER}; a run with 'record: full' uploads it with its "
            "checkpoints",
            url=store.url,
        )
    step = next((s for s in steps if at_least is not None and s >= at_least), steps[-1])
    return patience(lambda: _read_index(store, _index_name(step)))


def _read_index(store: ObjectFolder, name: str) -> Index:
    content = store.read(name)
    try:
        files = {str(path): RecordFile(**file) for path, file in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataLossError(f"{store.url}/{name} is not an index of a record: {error!r}") from error
    for path in files:
        if path != _RUN and _FILE.fullmatch(path) is None:
            raise DataLossError(f"{store.url}/{name} names the file {path!r}, which no record has")
    return files


def _earlier(folder: Path) -> Index:
    """Returns the files of earlier steps that only the store has."""
    try:
        content = (folder / _EARLIER).read_text()
    except FileNotFoundError:
        return {}
    return {name: RecordFile(**file) for name, file in json.loads(content).items()}


def _content(store: ObjectFolder, file: RecordFile, patience: Patience) -> bytes:
    content = patience(lambda: store.read(file.object))
    if xxhash.xxh3_128_hexdigest(content) != file.digest:
        raise DataLossError(f"{store.url}/{file.object} is damaged", url=store.url)
    return content


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _digest(path: Path) -> str:
    total = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while content := stream.read(_READ_BYTES):
            total.update(content)
    return total.hexdigest()
