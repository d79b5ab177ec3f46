"""Tests of schema, migrations and leader leases on SQLite and PostgreSQL."""

import asyncio
import threading

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from services.common.errors import FailedPreconditionError
from services.controller.store import database as database_module
from services.controller.store.database import Database, DatabaseError, LeaseLostError
from services.controller.store.lease import Leadership
from services.controller.store.ledgers import read_ledger
from services.controller.store.records import NewRun
from services.controller.store.runs import RunStore
from services.controller.store.tables import DELETED_RUNS, LEASES, METADATA, RETURNED_ROWS

pytestmark = pytest.mark.postgresql


def test_migrations_make_the_tables(database):
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_an_older_database_is_migrated(database, database_url):
    with database.write() as connection:
        RETURNED_ROWS.drop(connection)
        DELETED_RUNS.drop(connection)
        for change in (
            "DROP COLUMN refilled_before",
            "ADD COLUMN returned_json TEXT NOT NULL DEFAULT '{}'",
        ):
            connection.execute(sa.text(f"ALTER TABLE ledgers {change}"))
        connection.execute(sa.text("ALTER TABLE leases DROP COLUMN address"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0001'"))
        run = NewRun(run_id="run_1", name="one", spec_json="{}", spec_digest="d")
    RunStore(database).create(run)
    with database.write() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO ledgers (run_id, num_issued, position, ended_json, reasons_json, returned_json)"
                " VALUES ('run_1', 0, 0, '{}', :reasons, :returned)"
            ),
            {
                "reasons": '{"equal_rewards": 3}',
                "returned": '{"epoch": 2, "waiting": [5], "known": [8, 5]}',
            },
        )
    migrated = Database(database_url)
    with migrated.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        state = read_ledger(connection, "run_1")
    migrated.close()
    assert state.refilled_before == 3
    assert not state.returned.add(8, epoch=2)
    assert state.returned.take() == 5


def test_a_database_opens_again(database, database_url):
    Database(database_url).close()


def test_a_newer_schema_is_refused(database, database_url):
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(FailedPreconditionError, match="newer"):
        Database(database_url)


async def test_a_replaced_leader_writes_no_more(database, database_url):
    old = Leadership(database, holder="one", ttl_s=0.2)
    assert await old.acquire() == 1
    successor = Database(database_url)
    assert await Leadership(successor, holder="two", ttl_s=30).acquire() == 2
    with pytest.raises(LeaseLostError), database.write():
        pass
    successor.close()


async def test_a_dead_leader_is_replaced_although_the_databases_clock_was_set_back(
    database, database_url
):
    if database.is_sqlite:
        pytest.skip("the lease of an SQLite file is taken at once")
    assert await Leadership(database, holder="one", ttl_s=0.5).acquire() == 1
    with database.write() as connection:
        connection.execute(LEASES.update().values(expire_time=LEASES.c.expire_time + 7200.0))
    successor = Database(database_url)
    async with asyncio.timeout(60.0):
        assert await Leadership(successor, holder="two", ttl_s=0.5).acquire() == 2
    successor.close()


async def test_a_leader_that_renews_its_lease_is_not_replaced_after_the_clock_was_set_back(
    database, database_url
):
    if database.is_sqlite:
        pytest.skip("the lease of an SQLite file is taken at once")
    assert await Leadership(database, holder="one", ttl_s=30.0).acquire() == 1
    other = Database(database_url)
    standby = Leadership(other, holder="two", ttl_s=0.01)
    for shift_s in range(7200, 7205):
        with database.write() as connection:
            connection.execute(LEASES.update().values(expire_time=LEASES.c.expire_time + shift_s))
        assert await other.run(standby._try) > 0
        await asyncio.sleep(0.05)
    other.close()


async def test_a_holder_reacquires_its_lease_at_once(database, database_url):
    assert await Leadership(database, holder="pod-0", ttl_s=3600).acquire() == 1
    restarted = Database(database_url)
    assert await Leadership(restarted, holder="pod-0", ttl_s=3600).acquire() == 2
    restarted.close()


async def test_a_released_lease_is_free_at_once_and_a_lost_one_stays_with_its_holder(
    database, database_url
):
    old = Leadership(database, holder="one", ttl_s=3600)
    await old.acquire()
    await old.release()
    other = Database(database_url)
    assert await Leadership(other, holder="two", ttl_s=3600).acquire() == 2
    await old.release()
    with other.write():
        pass
    other.close()


async def test_a_leader_whose_database_does_not_answer_ends_where_another_may_lead(
    database, database_url
):
    leadership = Leadership(database, holder="one", ttl_s=0.1)
    await leadership.acquire()
    released = threading.Event()
    silent = asyncio.ensure_future(database.run(released.wait, 60))
    try:
        if database.is_sqlite:  # nobody takes the lease because it has expired
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await leadership.keep_renewed()
        else:
            async with asyncio.timeout(30):
                with pytest.raises(LeaseLostError):
                    await leadership.keep_renewed()
    finally:
        released.set()
        await silent
    if database.is_sqlite:
        with database.write():
            """Still leads."""
        other = Database(database_url)
        await Leadership(other, holder="two", ttl_s=3600).acquire()
        with pytest.raises(LeaseLostError):
            await leadership.keep_renewed()
        other.close()


def test_both_ends_of_a_connection_notice_that_the_other_is_gone(database):
    if database.is_sqlite:
        return  # SQLite has no network connections
    with database.read() as connection:
        driver = connection.connection.driver_connection
        assert int(driver.info.get_parameters()["tcp_user_timeout"]) > 0
        names = connection.execute(sa.text("SHOW tcp_user_timeout")).scalar_one()
        # PostgreSQL applies the setting only to TCP and shows 0 for a Unix socket.
        assert names in ("15s", "0")


def test_a_server_that_lacks_an_option_is_used_without_it(database, database_url, monkeypatch):
    options = {"no_such_option": "5s", **database_module._SERVER_OPTIONS}
    monkeypatch.setattr(database_module, "_SERVER_OPTIONS", options)
    Database(database_url).close()


def test_a_statement_that_waits_too_long_is_an_error(database, database_url, monkeypatch):
    if database.is_sqlite:
        return  # waits for other writers only, for at most busy_timeout
    with database.read() as connection:
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar_one() == "1min"
    options = {**database_module._SERVER_OPTIONS, "statement_timeout": "100ms"}
    monkeypatch.setattr(database_module, "_SERVER_OPTIONS", options)
    impatient = Database(database_url)
    try:
        with database.write() as connection:
            connection.exec_driver_sql("LOCK TABLE runs")
            with pytest.raises(DatabaseError), impatient.read() as waiting:
                waiting.exec_driver_sql("SELECT * FROM runs")
    finally:
        impatient.close()


@pytest.mark.parametrize("way", ["query", "scan"])
async def test_who_only_looks_does_not_wait_for_a_write(database, way):
    begun, is_seen = threading.Event(), threading.Event()

    def write() -> bool:
        with database.write():
            begun.set()
            return is_seen.wait(30)

    def look() -> None:
        with database.read() as connection:
            connection.execute(sa.text("SELECT * FROM runs")).all()

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(database.run(write))
        assert await asyncio.to_thread(begun.wait, 30)
        await getattr(database, way)(look)
        is_seen.set()
    assert writing.result()
