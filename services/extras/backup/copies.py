"""Backup and restore of an SQLite database.

Recent writes are in its write-ahead log, so a copy of the file alone is an old state.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from services.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from services.controller.store.usage import connect, locked


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
    refusal = f"a controller uses {database}; stop it first"
    with (
        locked(database, fcntl.LOCK_EX, refusal),
        _complete_copy(file, database) as (copy, num_runs),
    ):
        if database.exists() and not overwrite:
            raise FailedPreconditionError(
                f"{database} exists; copy it with 'slipstream backup', then replace it with --force"
            )
        for suffix in ("-wal", "-shm"):  # a log belongs to the database that it was written for
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        copy.replace(database)
    return num_runs


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
        with closing(connect(source)) as reading, closing(connect(copy)) as writing:
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
