"""Sample records of one run: an SQLite file of facts, texts and token columns.

Records of rollout and trainer arrive in any order; a sample is visible after its rollout's record
arrived. The functions block; call them in a thread.
"""

import json
import math
import re
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from services.common.errors import InvalidArgumentError, NotFoundError
from services.common.host import make_private, make_private_folder
from services.wire.transferqueue.types import SampleRecordQuery

_DIGITS = 5
# Avoids overflow; a larger ratio means nothing.
_MAX_LOG_RATIO = 80.0


def token_columns(columns: Mapping[str, bytes], vocabulary: Mapping[str, str]) -> dict[str, Any]:
    """Returns columns with one entry per token of a response.

    Args:
        columns: Little-endian values by field: ``response_ids`` and ``version_runs`` int32,
            ``rollout_logprobs`` float32; after training also ``advantages`` and
            ``trained_logprobs`` float32, and ``loss_mask`` one byte each.
        vocabulary: Text of each token that occurs, by its id.
    """
    ids = _values("i", columns["response_ids"])
    logprobs = _values("f", columns["rollout_logprobs"])
    runs = _values("i", columns["version_runs"])
    pairs = zip(runs[::2], runs[1::2], strict=True)
    versions = list(chain.from_iterable(repeat(version, count) for version, count in pairs))
    columns_by_name: dict[str, Any] = {
        "ids": ids,
        "texts": [vocabulary.get(str(token), "") for token in ids],
        "logprobs": _rounded(logprobs),
        "weight_versions": versions,
    }
    if "trained_logprobs" in columns:
        trained = _values("f", columns["trained_logprobs"])
        columns_by_name |= {
            "is_trained": [byte != 0 for byte in columns["loss_mask"]],
            "advantages": _rounded(_values("f", columns["advantages"])),
            "trained_logprobs": _rounded(trained),
            "ratios": [
                round(math.exp(min(after - before, _MAX_LOG_RATIO)), _DIGITS)
                if version >= 0
                else 1.0
                for after, before, version in zip(trained, logprobs, versions, strict=True)
            ],
        }
    return columns_by_name


def _values(code: str, data: bytes) -> list[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return values.tolist()


def _rounded(values: list[float]) -> list[float | None]:
    """Rounds values; None replaces values that are not finite, which JSON cannot express."""
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in values]


_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

Position = tuple[float, int]
"""Rank and sequence number of the last sample read, from which to continue."""

# A sample without a reward is neither best nor worst.
_RANKS = {
    "newest": "0.0",
    "best": "coalesce(-reward, 9e999)",
    "worst": "coalesce(reward, 9e999)",
}
# Step that trained a sample, or the next one after the weights that sampled it.
_AGE = "coalesce(step, newest_version + 1)"
_SCHEMA = f"""
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = TRUNCATE;
CREATE TABLE IF NOT EXISTS samples (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, size INTEGER NOT NULL,
  split TEXT NOT NULL, group_id TEXT NOT NULL, row INTEGER NOT NULL,
  step INTEGER, oldest_version INTEGER, newest_version INTEGER, reward REAL, finish_reason TEXT NOT NULL,
  facts TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_step ON samples (step);
CREATE INDEX IF NOT EXISTS by_age ON samples ({_AGE});
CREATE INDEX IF NOT EXISTS by_group ON samples (group_id);
CREATE INDEX IF NOT EXISTS from_best ON samples ({_RANKS["best"]}, seq DESC);
CREATE INDEX IF NOT EXISTS from_worst ON samples ({_RANKS["worst"]}, seq DESC);
CREATE TABLE IF NOT EXISTS contents (
  id TEXT PRIMARY KEY, prompt TEXT NOT NULL, response TEXT NOT NULL, more TEXT NOT NULL,
  response_ids BLOB NOT NULL, rollout_logprobs BLOB NOT NULL, version_runs BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS training (
  id TEXT PRIMARY KEY, step INTEGER NOT NULL, facts TEXT NOT NULL,
  advantages BLOB NOT NULL, trained_logprobs BLOB NOT NULL, loss_mask BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS training_by_step ON training (step);
"""
_MADE = ("response_ids", "rollout_logprobs", "version_runs")
_TRAINED = ("advantages", "trained_logprobs", "loss_mask")
_FACTS_BYTES = 600
"""Approximate size of a sample besides its texts and columns."""
_UNTOLD_STEPS = 100
"""Steps after which the rollout's record of a trained sample is no longer expected."""
# More characters than any text has.
_WHOLE = 2**31 - 1
# Max samples in memory at once: with turns, in a list, and by default.
_MAX_WHOLE, _MAX_LISTED, _BATCH = 16, 1024, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """Record of one sample from one process."""

    sample_id: str
    record: Mapping[str, Any]
    """``facts``, ``prompt``, ``response`` and more from the rollout; facts of the step from the trainer."""
    columns: Mapping[str, bytes]
    """Token columns by field."""

    @property
    def is_from_rollout(self) -> bool:
        """True if the record is from the rollout, which generated the sample."""
        return "response_ids" in self.columns


class SampleStore:
    """Stores and reads the sample records of one run.

    Args:
        path: The SQLite file; created by the first write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, records: Sequence[SampleRecord], *, max_bytes: int, max_steps: int) -> None:
        """Writes new records and deletes the oldest samples beyond the limits.

        The time that it takes depends on the new and the deleted records, not on those that stay.

        Args:
            max_bytes: Max size of the file.
            max_steps: Number of newest steps whose samples stay; 0 for all.
        """
        with _opened(self._path, is_new=True) as database:
            for record in records:
                (_insert_made if record.is_from_rollout else _insert_trained)(database, record)
            _delete_untold(database, records)
            if max_steps:
                _delete_old_steps(database, max_steps)
            _shrink(database, max_bytes)

    def read(
        self, query: SampleRecordQuery, behind: Position | None = None
    ) -> tuple[list[bytes], Position | None]:
        """Reads a batch of samples as JSON lines.

        Args:
            query: Selects the samples; its ``limit`` applies to this call.
            behind: Position at which an earlier call ended.

        Returns:
            The lines, and the position to continue from; None at the end.

        Raises:
            NotFoundError: If the record of the sample ``query.after`` no longer exists.
        """
        if not self._path.exists():
            return [], None
        with _opened(self._path) as database:
            if behind is None and query.after:
                behind = _position(database, query)
            limit = min(query.limit or _BATCH, _MAX_WHOLE if query.with_turns else _MAX_LISTED)
            rows = database.execute(*_select(query, behind, limit)).fetchall()
        lines = [_line(query, row) for row in rows]
        return lines, (rows[-1]["rank"], rows[-1]["seq"]) if len(rows) == limit else None

    def lines(self, query: SampleRecordQuery) -> Iterator[list[bytes]]:
        """Yields all lines of a query, in batches."""
        behind: Position | None = None
        num_left = query.limit
        while True:
            lines, behind = self.read(replace(query, limit=max(num_left, 0)), behind)
            yield lines
            num_left -= len(lines)
            if behind is None or (query.limit and num_left <= 0):
                return


def store_path(folder: Path, run_id: str) -> Path:
    """Returns the file of a run.

    Raises:
        InvalidArgumentError: If ``run_id`` cannot be a file name.
    """
    if not _NAME.fullmatch(run_id):
        raise InvalidArgumentError(f"invalid run id {run_id!r}; use letters, digits, '-' and '_'")
    return folder / f"{run_id}.db"


def remove_store(path: Path) -> None:
    """Deletes the file of a run, if there is one."""
    for suffix in ("", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, *, is_new: bool = False) -> Iterator[sqlite3.Connection]:
    if is_new:
        make_private_folder(path.parent)
        make_private(path)
    with closing(sqlite3.connect(path, timeout=30.0)) as database:
        database.row_factory = sqlite3.Row
        if is_new:
            database.executescript(_SCHEMA)
            database.execute("PRAGMA synchronous = NORMAL")
        with database:
            yield database


def _insert_made(database: sqlite3.Connection, sample: SampleRecord) -> None:
    record = dict(sample.record)
    facts, prompt, response = record.pop("facts"), record.pop("prompt"), record.pop("response")
    more_facts = json.dumps(record)
    columns = [sample.columns[name] for name in _MADE]
    size = sum(map(len, (prompt, response, more_facts, *columns))) + _FACTS_BYTES
    trained = database.execute(
        "SELECT step FROM training WHERE id = ?", (sample.sample_id,)
    ).fetchone()
    database.execute(
        "INSERT OR REPLACE INTO samples (id, size, split, group_id, row, step, oldest_version,"
        " newest_version, reward, finish_reason, facts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            sample.sample_id,
            size,
            facts["split"],
            facts["group_id"],
            facts["row"],
            trained["step"] if trained else facts.get("step"),
            facts["oldest_version"],
            facts["newest_version"],
            facts["reward"],
            facts["finish_reason"],
            json.dumps(facts),
        ),
    )
    database.execute(
        "INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?, ?, ?)",
        (sample.sample_id, prompt, response, more_facts, *columns),
    )


def _insert_trained(database: sqlite3.Connection, sample: SampleRecord) -> None:
    step, columns = sample.record["step"], [sample.columns[name] for name in _TRAINED]
    database.execute(
        "INSERT OR REPLACE INTO training VALUES (?, ?, ?, ?, ?, ?)",
        (sample.sample_id, step, json.dumps(sample.record), *columns),
    )
    database.execute(
        "UPDATE samples SET step = ?, size = size + ? WHERE id = ?",
        (step, sum(map(len, columns)), sample.sample_id),
    )


def _newest_step(database: sqlite3.Connection) -> int:
    row = database.execute(f"SELECT {_AGE} FROM samples ORDER BY {_AGE} DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0])


def _delete(database: sqlite3.Connection, ids: Sequence[str]) -> None:
    for table in ("samples", "contents", "training"):
        database.executemany(f"DELETE FROM {table} WHERE id = ?", [(name,) for name in ids])


def _delete_old_steps(database: sqlite3.Connection, max_steps: int) -> None:
    oldest = _newest_step(database) - max_steps
    rows = database.execute(f"SELECT id FROM samples WHERE {_AGE} <= ?", (oldest,))
    _delete(database, [row["id"] for row in rows])


def _delete_untold(database: sqlite3.Connection, records: Sequence[SampleRecord]) -> None:
    """Deletes the trainer's records of samples whose records from a rollout are no longer expected.

    The file's ``user_version`` is the newest step whose records were examined, so that each is examined once.
    """
    examined: int = database.execute("PRAGMA user_version").fetchone()[0]
    steps = [record.record["step"] for record in records if not record.is_from_rollout]
    examined = min([examined, *(step - 1 for step in steps)])
    last = max(_newest_step(database) - _UNTOLD_STEPS - 1, examined)
    database.execute(
        "DELETE FROM training WHERE step > ? AND step <= ?"
        " AND NOT EXISTS (SELECT 1 FROM samples WHERE samples.id = training.id)",
        (examined, last),
    )
    database.execute(f"PRAGMA user_version = {last:d}")


def _shrink(database: sqlite3.Connection, max_bytes: int) -> None:
    """Deletes the oldest samples until the file has at most ``max_bytes``."""
    while True:
        page_bytes, num_pages, num_free = _pages(database)
        surplus = page_bytes * (num_pages - num_free) - max_bytes
        if surplus <= 0:
            break
        oldest: list[str] = []
        for row in database.execute("SELECT id, size FROM samples ORDER BY seq"):
            oldest.append(row["id"])
            surplus -= row["size"]
            if surplus <= 0:
                break
        if not oldest:
            break
        _delete(database, oldest)
    page_bytes, num_pages, _ = _pages(database)
    for _ in range(num_pages - max_bytes // page_bytes):
        database.execute(
            "PRAGMA incremental_vacuum(1)"
        )  # one call removes one page, whatever the number


def _pages(database: sqlite3.Connection) -> tuple[int, int, int]:
    """Returns the size of a page in bytes, the number of the file's pages, and how many of them are free."""
    names = ("page_size", "page_count", "freelist_count")
    size, count, num_free = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return size, count, num_free


_WHERE = {
    "split": "split = :split",
    "step": "samples.step = :step",
    "weight_version": "oldest_version <= :weight_version AND newest_version >= :weight_version",
    "group_id": "group_id = :group_id",
    "row": "row = :row",
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "finish_reason": "finish_reason = :finish_reason",
    "sample_id": "id = :sample_id",
    "text": "(prompt LIKE :text ESCAPE '!' OR response LIKE :text ESCAPE '!')",
}


def _select(
    query: SampleRecordQuery, behind: Position | None, limit: int
) -> tuple[str, dict[str, Any]]:
    """Returns the SQL statement for the next samples, and its parameters."""
    values = {name: getattr(query, name) for name in _WHERE}
    filters = [name for name, value in values.items() if value not in (None, "")]
    for sign in "!%_":
        values["text"] = values["text"].replace(sign, f"!{sign}")
    values["text"] = f"%{values['text']}%"
    rank = _RANKS[query.order_by]
    where = [_WHERE[name] for name in filters]
    if behind is not None:
        where.append(f"({rank}, -seq) > (:rank, -:seq)")
        values["rank"], values["seq"] = behind
    columns = [
        *(f"{rank} AS rank", "seq", "id", "samples.facts", "training.facts AS trained"),
        *("substr(prompt, 1, :excerpt) AS prompt", "substr(response, 1, :excerpt) AS response"),
        *(["more"] if query.with_turns else []),
        *((*_MADE, *_TRAINED) if query.with_tokens else ()),
    ]
    statement = (
        f"SELECT {', '.join(columns)} FROM samples JOIN contents USING (id) LEFT JOIN training USING (id) "
        f"{'WHERE' if where else ''} {' AND '.join(where)} ORDER BY {rank}, seq DESC LIMIT :limit"
    )
    return statement, {
        **values,
        "limit": limit,
        "excerpt": _WHOLE if query.excerpt is None else query.excerpt,
    }


def _position(database: sqlite3.Connection, query: SampleRecordQuery) -> Position:
    rank = _RANKS[query.order_by]
    row = database.execute(
        f"SELECT {rank} AS rank, seq FROM samples WHERE id = ?", (query.after,)
    ).fetchone()
    if row is None:
        raise NotFoundError(
            f"sample {query.after} was deleted, so the list cannot continue after it; start from the first "
            "page"
        )
    return row["rank"], row["seq"]


def _line(query: SampleRecordQuery, row: sqlite3.Row) -> bytes:
    """Formats a sample as a JSON line: the rollout's facts, then the trainer's."""
    record = {"id": row["id"], **json.loads(row["facts"]), **json.loads(row["trained"] or "{}")}
    record |= {"prompt": row["prompt"], "response": row["response"]}
    if query.with_turns:
        further_facts = json.loads(row["more"])
        vocabulary = further_facts.pop("vocabulary")
        record |= further_facts
        if query.with_tokens:
            columns = {name: row[name] for name in (*_MADE, *_TRAINED) if row[name] is not None}
            record["tokens"] = token_columns(columns, vocabulary)
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair as its escape
