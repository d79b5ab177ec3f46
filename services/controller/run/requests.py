"""What users want of a live run: its specification as it is now, and what they ask of it."""

import asyncio

import sqlalchemy as sa

from services.common.ids import new_id
from services.common.spec.run import RunSpec
from services.controller.store.database import Database
from services.controller.store.requests import (
    Request,
    RequestKind,
    forget_requests,
    read_requests,
    write_request,
)
from services.controller.store.runs import Work


class CurrentSpec:
    """The specification of a live run.

    Its parts share it and read what they need when they need it, so a change holds for all of them at once.

    Args:
        now: As it is.
    """

    def __init__(self, now: RunSpec) -> None:
        self.now = now
        self.num_train_rows = 0
        """Rows of the training data; 0 until the rollouts have opened it."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.now.num_steps(self.num_train_rows)


class Mailbox:
    """What is asked of a run and not done yet: one request of a kind at most, the newest.

    A request counts once it is stored, and leaves in the transaction of the event that tells what came of it:
    no loop that is entered again and no other controller misses it.

    Args:
        run_id: The run.
        database: Where requests are stored.
    """

    def __init__(self, run_id: str, database: Database) -> None:
        self._run_id = run_id
        self._database = database
        self._waiting: dict[RequestKind, Request] = {}
        self.pausing = asyncio.Event()
        """Set once a pause is asked for."""

    async def open(self) -> None:
        """Take up what an earlier controller was asked for."""

        def read() -> list[Request]:
            with self._database.read() as connection:
                return read_requests(connection, self._run_id)

        for request in await self._database.run(read):
            self._waiting.setdefault(request.kind, request)
        if "pause" in self._waiting:
            self.pausing.set()

    async def put(self, kind: RequestKind, **options: bool) -> None:
        """Store a request."""
        request = Request(kind=kind, request_id=new_id("req"), options=options)

        def write() -> None:
            with self._database.write() as connection:
                write_request(connection, self._run_id, request)

        await self._database.run(write)
        self._waiting[kind] = request
        if kind == "pause":
            self.pausing.set()

    def get(self, kind: RequestKind) -> Request | None:
        """The request of a kind that waits."""
        return self._waiting.get(kind)

    def done(self, request: Request | None) -> Work:
        """The write by which a request leaves; for the transaction of the event that tells of its end."""

        def write(connection: sa.Connection) -> None:
            if request is not None:
                forget_requests(connection, self._run_id, request.kind, request.request_id)
                if self._waiting.get(request.kind) == request:
                    del self._waiting[request.kind]

        return write
