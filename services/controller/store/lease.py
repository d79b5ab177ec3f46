"""Election of the leading controller: a lease with a holder, an epoch and an expiry, on the database's clock.

A new leader raises the epoch. Every write checks it (:meth:`Database.write`), so a leader that was
stopped and resumes later can change nothing.
"""

import asyncio
import logging
import time
from contextlib import suppress

import sqlalchemy as sa

from services.controller.store.database import LEADER_LEASE, Database, DatabaseError, LeaseLostError
from services.controller.store.tables import LEASES

logger = logging.getLogger(__name__)

_POLL_S = 0.5
"""Max seconds until a waiting controller notices that the lease is free."""


class Leadership:
    """Lease with which this controller is the leader.

    Args:
        holder: Name of this controller; a controller of the same name takes its own lease back at
            once.
        ttl_s: Seconds without renewal after which a lease is free.
        address: Where this controller serves, for others that forward to it; empty if none does.
    """

    def __init__(self, database: Database, *, holder: str, ttl_s: float, address: str = "") -> None:
        self._database = database
        self._holder = holder
        self._ttl_s = ttl_s
        self._address = address
        self._seen_expiry, self._seen_at = -1.0, 0.0
        """Expiry of another controller's lease, and when this one first saw it, on its own clock."""

    async def acquire(self) -> int:
        """Waits until this controller leads; returns its epoch."""
        while (rest_s := await self._database.run(self._try)) > 0:
            logger.debug("another controller is the leader", extra={"rest_s": round(rest_s, 1)})
            await asyncio.sleep(min(rest_s, self._ttl_s / 3, _POLL_S))
        epoch = self._database.epoch
        assert epoch is not None
        logger.info("this controller is the leader", extra={"epoch": epoch, "holder": self._holder})
        return epoch

    async def keep_renewed(self) -> None:
        """Renews the lease until cancelled.

        No controller waits for the lease of an SQLite file, because another one that is started takes it at
        once. So a lease that a busy machine does not renew in time is kept there.

        Raises:
            LeaseLostError: If another controller took over, or PostgreSQL was unavailable for too long.
        """
        clock = asyncio.get_running_loop().time
        renewed = clock()
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                async with asyncio.timeout(self._ttl_s):
                    await self._database.run(self._renew)
                renewed = clock()
            except (DatabaseError, TimeoutError) as error:
                busy = "or this machine is too busy to read its answer"
                why = str(error) or f"the database does not answer, {busy}"
                logger.warning("the lease is not renewed", extra={"cause": why})
                if clock() - renewed > self._ttl_s and not self._database.is_sqlite:
                    raise LeaseLostError(
                        f"cannot renew the lease for {self._ttl_s:.0f} s: {why}"
                    ) from error

    async def release(self) -> None:
        """Frees the lease, so that another controller need not wait until it ends."""
        with suppress(LeaseLostError, DatabaseError, TimeoutError):
            async with asyncio.timeout(self._ttl_s):
                await self._database.run(self._free)

    def _free(self) -> None:
        with self._database.write() as connection:
            connection.execute(_this().values(expire_time=0.0))

    def _try(self) -> float:
        """Takes the lease if it is free; returns 0 then, otherwise the seconds until it may be free."""
        with self._database.write_unfenced() as connection:
            now = _now(connection)
            row = connection.execute(
                sa.select(LEASES).where(LEASES.c.name == LEADER_LEASE).with_for_update()
            ).first()
            # Only one controller uses an SQLite file at a time, so an older holder is dead.
            is_taken = row is not None and row.expire_time > now and row.holder != self._holder
            if row is not None and is_taken and not self._database.is_sqlite:
                if row.expire_time != self._seen_expiry:
                    self._seen_expiry, self._seen_at = row.expire_time, time.monotonic()
                rest_s = float(row.expire_time) - now
                if rest_s > self._ttl_s:  # the database's clock was set back; a leader renews
                    rest_s = self._seen_at + self._ttl_s - time.monotonic()
                if rest_s > 0:
                    return max(rest_s, 0.01)
            values = {
                "holder": self._holder,
                "expire_time": now + self._ttl_s,
                "address": self._address,
            }
            epoch = 1 if row is None else int(row.epoch) + 1
            if row is None:
                connection.execute(LEASES.insert().values(name=LEADER_LEASE, epoch=1, **values))
            else:
                connection.execute(_this().values(epoch=epoch, **values))
        self._database.epoch = epoch
        return 0.0

    def _renew(self) -> None:
        with self._database.write() as connection:
            connection.execute(_this().values(expire_time=_now(connection) + self._ttl_s))


def leader_address(database: Database) -> str:
    """Returns the address of the leading controller; empty if none leads or it has none."""
    with database.read() as connection:
        query = sa.select(LEASES.c.address, LEASES.c.expire_time).where(
            LEASES.c.name == LEADER_LEASE
        )
        row = connection.execute(query).first()
        return row.address if row is not None and row.expire_time > _now(connection) else ""


def _this() -> sa.Update:
    return LEASES.update().where(LEASES.c.name == LEADER_LEASE)


def _now(connection: sa.Connection) -> float:
    """Returns seconds since the epoch on the database's clock."""
    if connection.dialect.name == "sqlite":
        query = "SELECT (julianday('now') - 2440587.5) * 86400.0"
    else:
        query = "SELECT extract(epoch FROM clock_timestamp())"
    return float(connection.execute(sa.text(query)).scalar_one())
