"""Stored samples of a run in the store: uploaded from their file in the background, and read back.

::

    URL/00000012-step-00000030.jsonl.gz    records of samples, in the order in which the file got them

An object has one JSON line per record of a rollout or of the trainer, as
:class:`services.transferqueue.records.store.SampleRecord` has it; token columns are in base64. No object is
overwritten. The file of the samples notes which records the store has, so a store that fails costs nothing as
long as the file keeps them. A killed process uploads at most one object again, which changes nothing for a
reader.
"""

import base64
import gzip
import json
import logging
import re
import sqlite3
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote

from services.common.errors import DataLossError, NotFoundError, ServiceError, UnavailableError
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.transfers import Patience, TransferCancelledError
from services.transferqueue.records.store import SampleRecord, SampleStore

logger = logging.getLogger(__name__)

_OBJECT: Final = re.compile(r"(?P<number>\d{8})-step-(?P<step>\d{8})\.jsonl\.gz")
_EVERY_S: Final = 10.0
"""Seconds between looks for new samples."""
_OBJECT_BYTES: Final = 4 << 20
"""Bytes of records after which an object is full, before compression."""
_LEVEL: Final = 1
_LAST_S: Final = 1800.0
"""Seconds in which a run that has ended may upload its last samples."""
_DELETE_S: Final = 5.0
"""Max seconds for which a deletion waits for the end of an upload."""
_LISTED: Final = 20
"""Max names of folders in an error."""
_WRONG_RECORDS: Final = (
    *(KeyError, TypeError, AttributeError),
    *(sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError),
)
"""Errors of the file for records that are none."""
_UNBOUNDED: Final = {"max_bytes": 1 << 62, "max_steps": 0}
_ROLLOUT_COLUMNS: Final = ("response_ids", "rollout_logprobs", "version_runs")
_TRAINING_COLUMNS: Final = ("advantages", "trained_logprobs", "loss_mask")
_UPLOADS: Final = """
CREATE TABLE IF NOT EXISTS uploads
  (url TEXT PRIMARY KEY, samples INTEGER NOT NULL, training INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS rows_get_numbers_again AFTER DELETE ON training BEGIN
  UPDATE uploads SET training = min(training, (SELECT coalesce(max(rowid), -1) FROM training));
END;
"""
# The first row after those of an earlier file, which are negative, is 0.
_START: Final = "INSERT INTO uploads VALUES (?, 0, -1)"
_SAMPLES: Final = """
SELECT seq AS position, id, coalesce(step, newest_version + 1, 0) AS step, samples.facts AS facts, prompt,
  response, more, response_ids, rollout_logprobs, version_runs
FROM samples JOIN contents USING (id) WHERE seq > ? ORDER BY seq
"""
_TRAINING: Final = """
SELECT rowid AS position, id, step, facts, advantages, trained_logprobs, loss_mask
FROM training WHERE rowid > ? ORDER BY rowid
"""
# Samples of an earlier file get numbers below those of this file, so that they count as older.
_MERGE: Final = (
    """
INSERT OR IGNORE INTO samples (seq, id, size, split, group_id, row, step, oldest_version, newest_version,
  reward, finish_reason, facts)
SELECT seq - 1 - (SELECT max(seq) FROM earlier.samples), id, size, split, group_id, row,
  coalesce((SELECT step FROM main.training WHERE main.training.id = earlier.samples.id), step),
  oldest_version, newest_version, reward, finish_reason, facts FROM earlier.samples
""",
    "INSERT OR IGNORE INTO contents SELECT * FROM earlier.contents",
    """
INSERT OR IGNORE INTO training (rowid, id, step, facts, advantages, trained_logprobs, loss_mask)
SELECT -rowid, id, step, facts, advantages, trained_logprobs, loss_mask FROM earlier.training
WHERE id NOT IN (SELECT id FROM samples WHERE seq > 0)
""",
)

_Result = TypeVar("_Result")


class _Position(NamedTuple):
    """Last row of each table of a file that the store has."""

    samples: int
    training: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object with samples."""

    name: str
    number: int
    step: int
    """Newest step of its samples."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Records for one object."""

    lines: Sequence[bytes]
    step: int
    position: _Position


class ObjectSamples:
    """Implements :class:`services.common.stores.StoredSamples`."""

    def __init__(self, url: str) -> None:
        self._store = ObjectFolder(url)
        self._patience = Patience(url, limit_s=None)
        self._limits: Mapping[str, int] = _UNBOUNDED
        self._objects: list[_Stored] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._deadline: float | None = None

    # ---- Uploads

    @property
    def failing_s(self) -> float:
        return self._patience.failing_s if self._thread is not None else 0.0

    @property
    def cause(self) -> str:
        return self._patience.cause

    def follow(self, path: Path, *, max_bytes: int, max_steps: int) -> None:
        with self._lock:
            self._limits = {"max_bytes": max_bytes, "max_steps": max_steps}
            self._deadline = None
            self._ending.clear()
            if self._thread is None:
                # A daemon: an upload to a store that does not answer must not keep the process.
                self._thread = threading.Thread(
                    target=self._work, args=(path,), name="upload samples", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        with self._lock:
            self._deadline = time.monotonic() + _LAST_S
            self._ending.set()

    def wait(self, timeout_s: float) -> bool:
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                cause = f": {self._patience.cause}" if self._patience.cause else ""
                logger.warning(
                    "the last samples are not in the store", extra={"url": self._store.url + cause}
                )
        return thread is None or not thread.is_alive()

    def _work(self, path: Path) -> None:
        while True:
            with suppress(TransferCancelledError):
                self._repeated(lambda: self._continue(path))
                is_last = False
                while not is_last:
                    is_last = self._ending.wait(_EVERY_S)
                    self._repeated(lambda: self._upload_all(path))
            with self._lock:
                if self._ending.is_set():  # otherwise the run goes on
                    self._thread = None
                    return

    def _repeated(self, action: Callable[[], None]) -> None:
        """Calls an action until it raises nothing: the file keeps its samples, and may be readable later."""
        while True:
            try:
                action()
            except TransferCancelledError:
                raise
            except Exception:
                logger.exception("upload of samples failed", extra={"url": self._store.url})
                self._check_deadline()
                self._patience.pause(_EVERY_S)
            else:
                return

    def _upload_all(self, path: Path) -> None:
        while self._upload_next(path):
            """The file may have more than one object's records."""

    def _continue(self, path: Path) -> None:
        """Reads which objects there are, and adds their samples to a file that did not upload them."""
        self._objects = self._request(self._listed)
        if not path.exists():
            SampleStore(path).write((), **_UNBOUNDED)
        with _opened(path) as database:
            database.executescript(_UPLOADS)
            query = "SELECT 1 FROM uploads WHERE url = ?"
            if database.execute(query, (self._store.url,)).fetchone() is not None:
                return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            earlier = Path(folder) / "earlier.db"
            if self._objects:
                self._request(lambda: self._download(earlier))
            with _opened(path) as database:
                if earlier.exists():
                    database.execute("ATTACH ? AS earlier", (str(earlier),))
                with database:
                    for statement in _MERGE if earlier.exists() else ():
                        database.execute(statement)
                    database.execute(_START, (self._store.url,))

    def _upload_next(self, path: Path) -> bool:
        """Uploads one object; returns False if the store has all samples of the file."""
        if not path.exists():  # deleted with the run
            return False
        with _opened(path) as database:
            # Otherwise training that is written between the two queries is uploaded before its samples.
            database.execute("BEGIN")
            batch = _next_batch(database, self._store.url)
        if batch is None:
            return False
        content = gzip.compress(b"".join(batch.lines), _LEVEL)
        number = max((entry.number for entry in self._objects), default=0) + 1
        name = f"{number:08d}-step-{batch.step:08d}.jsonl.gz"
        self._request(lambda: self._store.write(name, content))
        self._objects.append(_Stored(name, number, batch.step, len(content)))
        with _opened(path) as database, database:
            database.execute(
                "UPDATE uploads SET samples = ?, training = ? WHERE url = ?",
                (*batch.position, self._store.url),
            )
        self._delete_oldest()
        return True

    def _delete_oldest(self) -> None:
        """Deletes the oldest objects beyond the limits, never the newest one."""
        oldest_step = max(entry.step for entry in self._objects) - self._limits["max_steps"]
        surplus = sum(entry.num_bytes for entry in self._objects) - self._limits["max_bytes"]
        outdated = []
        for entry in self._objects[:-1]:
            is_old = self._limits["max_steps"] > 0 and entry.step <= oldest_step
            if not is_old and surplus <= 0:
                break
            outdated.append(entry)
            surplus -= entry.num_bytes
        self._request(lambda: self._store.delete([entry.name for entry in outdated]))
        self._objects = self._objects[len(outdated) :]

    def _request(self, request: Callable[[], _Result]) -> _Result:
        """Repeats a request until it succeeds; refused credentials may be corrected, too."""

        def retriable() -> _Result:
            self._check_deadline()
            try:
                return request()
            except ServiceError as error:
                raise UnavailableError(error.message) from error

        return self._patience(retriable)

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            logger.error(
                "last samples not uploaded",
                extra={"url": self._store.url, "cause": self._patience.cause},
            )
            raise TransferCancelledError

    # ---- Reading and deletion

    def restore(self, path: Path) -> None:
        if not self._listed():
            folders = {entry.name.split("/")[0] for entry in self._store.list()}
            listed = f"; it has {', '.join(sorted(folders)[:_LISTED])}" if folders else ""
            raise NotFoundError(f"no samples of a run in {self._store.url}{listed}")
        self._download(path)

    def _download(self, path: Path) -> None:
        store = SampleStore(path)
        for entry in self._listed():
            try:
                store.write(_parsed(self._store, entry.name), **_UNBOUNDED)
            except (NotFoundError, DataLossError, *_WRONG_RECORDS) as error:
                # It was deleted meanwhile, or is damaged.
                reason = f"{self._store.url}/{entry.name}: {error!r}"
                logger.error("stored samples refused", extra={"reason": reason})  # noqa: TRY400

    def delete(self) -> None:
        self._patience.cancel()
        self._ending.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_DELETE_S)
        self._store.delete([entry.name for entry in self._listed()])

    def _listed(self) -> list[_Stored]:
        """Returns the objects with samples, the oldest first."""
        objects = []
        for object_entry in self._store.list():
            if (matched := _OBJECT.fullmatch(object_entry.name)) is not None:
                number, step = int(matched["number"]), int(matched["step"])
                objects.append(_Stored(object_entry.name, number, step, object_entry.num_bytes))
        return sorted(objects, key=lambda entry: entry.number)


def _next_batch(database: sqlite3.Connection, url: str) -> _Batch | None:
    """Returns the next records that the store lacks, those of rollouts first; None if it has all."""
    query = "SELECT samples, training FROM uploads WHERE url = ?"
    position = _Position(*database.execute(query, (url,)).fetchone())
    lines: list[bytes] = []
    step = num_bytes = 0
    for statement, table, columns in (
        (_SAMPLES, "samples", _ROLLOUT_COLUMNS),
        (_TRAINING, "training", _TRAINING_COLUMNS),
    ):
        with closing(database.execute(statement, (getattr(position, table),))) as rows:
            for row in rows:
                if num_bytes >= _OBJECT_BYTES:
                    break
                lines.append(_line(row, columns))
                num_bytes += len(lines[-1])
                step = max(step, row["step"])
                position = position._replace(**{table: row["position"]})
    return _Batch(lines, step, position) if lines else None


def _line(row: sqlite3.Row, columns: Sequence[str]) -> bytes:
    """Returns the record of a row as a JSON line."""
    record = facts = json.loads(row["facts"])
    if "prompt" in row.keys():  # noqa: SIM118 -- a row is a sequence of its values
        texts = {"prompt": row["prompt"], "response": row["response"]}
        record = {"facts": facts, **texts, **json.loads(row["more"])}
    encoded = {name: base64.b64encode(row[name]).decode() for name in columns}
    document = {"id": row["id"], "record": record, "columns": encoded}
    # Escaped: a text may have surrogates, which have no bytes.
    return json.dumps(document).encode() + b"\n"


def _parsed(store: ObjectFolder, name: str) -> list[SampleRecord]:
    """Returns the records of an object.

    Raises:
        DataLossError: If it is damaged.
    """
    content = store.read(name)
    try:
        documents = [json.loads(line) for line in gzip.decompress(content).splitlines()]
        return [
            SampleRecord(
                sample_id=document["id"],
                record=document["record"],
                columns={n: base64.b64decode(text) for n, text in document["columns"].items()},
            )
            for document in documents
        ]
    except (OSError, EOFError, zlib.error, ValueError, *_WRONG_RECORDS) as error:
        raise DataLossError(f"{store.url}/{name} has no samples: {error!r}") from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens an existing file."""
    address = f"file:{quote(str(path))}?mode=rw"
    with closing(sqlite3.connect(address, timeout=30.0, uri=True)) as database:
        database.row_factory = sqlite3.Row
        yield database
