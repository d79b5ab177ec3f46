"""Backup and restore of an SQLite database.

Recent writes are in its write-ahead log, so a copy of the file alone is an old state.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)

_BUSY_S = 30.0


@contextmanager
def in_use(database: Path) -> Iterator[None]:
    """Locks the database against replacement, as a controller does, until the block or the process ends.

    Raises:
        FailedPreconditionError: If a restore is running, or the database is missing although runs
            exist.
    """
    with _locked(database, fcntl.LOCK_SH, f"{database} is being restored; try again later"):
        expect(database)
        yield


def expect(database: Path) -> None:
    """Checks that the database exists if there are folders of runs.

    Raises:
        FailedPreconditionError: If it is missing, empty or damaged: continuing would lose the runs.
    """
    runs = sorted(logs.parent.name for logs in database.parent.glob("run_*/logs"))
    if not runs:
        return
    try:
        state = "missing" if not database.exists() else "" if _has_runs_table(database) else "empty"
    except sqlite3.DatabaseError as error:
        state = f"damaged ({error})"
    if state:
        raise FailedPreconditionError(
            f"the database {database} is {state}, but {len(runs)} runs have folders beside it, such as "
            f"{runs[-1]}; restore a copy with 'slipstream restore FILE', or move these folders away, or use "
            "another state directory"
        )


def backup(database: Path, file: Path) -> int:
    """Copies a database, even while a controller writes to it; replaces an existing file.

    Returns:
        Number of runs in the copy.

    Raises:
        NotFoundError: If the database does not exist.
        InvalidArgumentError: If the file is the database itself, or the database is damaged.
    """
    if not database.is_file():
        raise NotFoundError(
            f"no database exists at {database}; set --state-directory to that of its controller (copy a "
            "PostgreSQL database with pg_dump)"
        )
    if file.exists() and file.samefile(database):
        raise InvalidArgumentError(f"{file} is the database itself; name another file")
    with _complete_copy(database, file) as (copy, num_runs):
        copy.replace(file)
    return num_runs


def restore(file: Path, database: Path, *, overwrite: bool) -> int:
    """Replaces a database with a copy.

    Args:
        file: Copy that :func:`backup` wrote.
        overwrite: True to discard an existing database.

    Returns:
        Number of runs in it.

    Raises:
        NotFoundError: If the copy does not exist.
        InvalidArgumentError: If the copy is damaged, or not a database of runs.
        FailedPreconditionError: If a controller uses the database, or it exists and ``overwrite``
            is False.
    """
    if not file.is_file():
        raise NotFoundError(f"the file {file} does not exist")
    database.parent.mkdir(parents=True, exist_ok=True)
    used = f"a controller uses {database}; stop it first"
    with _locked(database, fcntl.LOCK_EX, used), _complete_copy(file, database) as (copy, num_runs):
        if database.exists() and not overwrite:
            raise FailedPreconditionError(
                f"{database} exists; copy it with 'slipstream backup', then replace it with --force"
            )
        for left in ("-wal", "-shm"):  # a log belongs to the database that it was written for
            database.with_name(database.name + left).unlink(missing_ok=True)
        copy.replace(database)
    return num_runs


@contextmanager
def _locked(database: Path, how: int, otherwise: str) -> Iterator[None]:
    with database.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FailedPreconditionError(otherwise) from error
        yield


@contextmanager
def _complete_copy(source: Path, target: Path) -> Iterator[tuple[Path, int]]:
    """Copies a database to a file next to ``target``, readable by this user only.

    Yields:
        The copy and the number of its runs.
    """
    copy = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    with suppress(FileNotFoundError):
        copy.unlink()
    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        with closing(_connect(source)) as reading, closing(_connect(copy)) as writing:
            reading.backup(writing)
            # Stores the copy in one file, without a write-ahead log.
            writing.execute("PRAGMA journal_mode=DELETE")
            (verdict,) = writing.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise InvalidArgumentError(f"{source} is damaged ({verdict}); use an older copy")
            (num_runs,) = writing.execute("SELECT count(*) FROM runs").fetchone()
        yield copy, num_runs
    except sqlite3.DatabaseError as error:
        raise InvalidArgumentError(
            f"{source} must be a complete database of runs: {error}"
        ) from error
    finally:
        copy.unlink(missing_ok=True)


def _has_runs_table(database: Path) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'runs'"
    with closing(_connect(database)) as connection:
        return bool(connection.execute(query).fetchone()[0])


def _connect(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)
