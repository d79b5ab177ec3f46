"""Protects the SQLite database against a restore during use, and its runs against a lost database."""

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from services.common.errors import FailedPreconditionError
from services.common.host import make_private

_BUSY_S = 30.0


@contextmanager
def in_use(database: Path) -> Iterator[None]:
    """Locks the database against replacement, as a controller does, until the block or the process ends.

    Raises:
        FailedPreconditionError: If a restore is running, or the database is missing although runs
            exist.
    """
    with locked(database, fcntl.LOCK_SH, f"{database} is being restored; try again later"):
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


@contextmanager
def locked(database: Path, how: int, otherwise: str) -> Iterator[None]:
    """Holds a lock of a database until the block ends.

    Args:
        how: ``LOCK_SH`` to use it, ``LOCK_EX`` to replace it.
        otherwise: Text of the error if another process holds it.
    """
    lock_file = database.with_suffix(".lock")
    make_private(lock_file)  # another user who may open it could hold it
    with lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FailedPreconditionError(otherwise) from error
        yield


def _has_runs_table(database: Path) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'runs'"
    with closing(connect(database)) as connection:
        return bool(connection.execute(query).fetchone()[0])


def connect(file: Path) -> sqlite3.Connection:
    """Opens an existing database."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)
