"""Database of the controller: SQLite by default, PostgreSQL for several controllers.

Writers take turns. Every write checks in its own transaction that this controller still leads.
"""

import asyncio
import importlib.resources
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import event, exc

from services.common.errors import AbortedError, FailedPreconditionError, UnavailableError
from services.common.host import make_private
from services.controller.store.tables import LEASES, METADATA

_P = ParamSpec("_P")
_T = TypeVar("_T")

LEADER_LEASE = "controller"
# Without these options, the controller notices a lost connection after 15 minutes, and the server after
# two hours, during which it holds the locks of a lost controller's transaction.
_SILENCE_S = 15
_CLIENT_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": _SILENCE_S * 1000,
}
_SERVER_OPTIONS = {
    "tcp_keepalives_idle": "5s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": f"{_SILENCE_S}s",
    # The time of a statement includes waits for locks.
    "statement_timeout": "60s",
}
# A read of this many rows takes a few milliseconds.
_FEW_ROWS = 100
_EPOCH = sa.select(LEASES.c.epoch).where(LEASES.c.name == LEADER_LEASE).with_for_update(read=True)


class DatabaseError(UnavailableError):
    """The database cannot be reached or did not accept a transaction."""

    reason = "DATABASE_UNAVAILABLE"


class LeaseLostError(AbortedError):
    """Another controller leads now; this one must end."""

    reason = "LEASE_LOST"


class Database:
    """Connections and transactions of the database.

    Args:
        url: SQLAlchemy URL, ``sqlite:///PATH`` or ``postgresql+psycopg://...``.

    Raises:
        FailedPreconditionError: If a newer release wrote its schema.
        DatabaseError: If it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._engine = _make_engine(url)
        self._turn = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
        self.is_sqlite = self._engine.dialect.name == "sqlite"
        self._readers = ThreadPoolExecutor(
            max_workers=1 if self.is_sqlite else 4, thread_name_prefix="database-reader"
        )
        self.epoch: int | None = None
        """Leadership epoch that every write checks; None before this controller leads."""
        with self._mapped_errors():
            _migrate(self._engine)

    def close(self) -> None:
        """Finishes pending work and closes all connections."""
        self._readers.shutdown()
        self._thread.shutdown()
        self._engine.dispose()

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs ``work`` in the database's own thread, in the order of the calls.

        It finishes even if the caller is cancelled: a started transaction is not undone.
        """
        future = self._thread.submit(work, *args, **kwargs)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def query(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs ``work``, a small read, concurrently with writes; it sees all transactions committed before.

        SQLite is read in the calling thread: another thread would compete with it for the
        interpreter lock, and handing that over once per row takes longer than the read. A
        PostgreSQL server is awaited in a thread.
        """
        if self.is_sqlite:
            return work(*args, **kwargs)
        return await self.scan(work, *args, **kwargs)

    async def page(
        self, num_rows: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Runs ``work`` by :meth:`query` or :meth:`scan`, depending on the max number of rows it reads."""
        method = self.query if num_rows <= _FEW_ROWS else self.scan
        return await method(work, *args, **kwargs)

    async def scan(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs a large read in a thread, with any database."""
        return await asyncio.wrap_future(self._readers.submit(work, *args, **kwargs))

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        with self._mapped_errors(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Opens a write transaction of the leader.

        Raises:
            LeaseLostError: If another controller leads.
            DatabaseError: If the database did not accept the transaction.
        """
        with self.write_unfenced() as connection:
            self._check_lead(connection)
            yield connection

    @contextmanager
    def write_unfenced(self) -> Iterator[sa.Connection]:
        """Opens a write transaction without a leadership check, for example to become the leader."""
        with self._mapped_errors(), self._turn, self._engine.connect() as connection:
            writing = connection.execution_options(slipstream_writes=True)
            with writing.begin():
                yield writing

    def _check_lead(self, connection: sa.Connection) -> None:
        if self.epoch is None:
            return
        epoch = connection.execute(_EPOCH).scalar()
        if epoch != self.epoch:
            raise LeaseLostError(
                f"another controller is the leader (epoch {epoch}; this one had {self.epoch})",
                epoch=epoch,
            )

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:
            raise DatabaseError(
                f"the database does not answer: {str(error).splitlines()[0]}; the call is retried"
            ) from error


def _make_engine(url: str) -> sa.Engine:
    if not url.startswith("sqlite"):
        query = sa.make_url(url).query
        options = {name: value for name, value in _CLIENT_OPTIONS.items() if name not in query}
        engine = sa.create_engine(url, pool_pre_ping=True, pool_size=10, connect_args=options)
        event.listen(engine, "connect", partial(_prepare_postgresql, engine.dialect.loaded_dbapi))
        return engine
    if file := sa.make_url(url).database:
        make_private(Path(file))
    engine = sa.create_engine(url, connect_args={"timeout": 30})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_postgresql(driver: Any, connection: Any, record: Any) -> None:
    # Sets the options by statements, because connection poolers reject options that they do not know.
    for name, value in _SERVER_OPTIONS.items():
        try:
            connection.execute(f"SET {name} = '{value}'")
            connection.commit()
        except driver.DatabaseError:  # a server that does not run on Linux lacks some options
            connection.rollback()


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # The driver must not begin transactions itself: a read that turns into a write would deadlock.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("slipstream_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(engine: sa.Engine) -> None:
    """Creates the tables in a new database; migrates an older schema to this release."""
    config = Config()
    migrations = importlib.resources.files("services.controller.store") / "migrations"
    config.set_main_option("script_location", str(migrations))
    with engine.connect() as connection:
        writing = connection.execution_options(slipstream_writes=True)
        with writing.begin():
            if engine.dialect.name == "postgresql":  # a migration of a large table takes long
                writing.exec_driver_sql("SET LOCAL statement_timeout = 0")
            config.attributes["connection"] = writing
            try:
                if sa.inspect(writing).has_table("alembic_version"):
                    command.upgrade(config, "head")
                else:
                    METADATA.create_all(writing)
                    command.stamp(config, "head")
            except CommandError as error:
                raise FailedPreconditionError(
                    f"this release does not know the database's schema ({error}): a newer release or one "
                    "before the first release created it; install that release, or use another state "
                    "directory"
                ) from error
