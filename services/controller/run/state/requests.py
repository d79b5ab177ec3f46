"""Current specification of a run, and the requests of users to the run."""

import asyncio
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from services.common.fields import new_id
from services.common.runspec.loader import canonical_json, parse_spec, spec_digest
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import total_gpus
from services.controller.rules.mismatch import without_quantization
from services.controller.store.database import Database
from services.controller.store.records import RELEASE, Needs
from services.controller.store.rows import (
    Request,
    RequestKind,
    forget_requests,
    get_run,
    read_requests,
    update_run,
    write_request,
)
from services.controller.store.runs import Work


def resource_needs(spec: RunSpec) -> Needs:
    return Needs(
        gpus=total_gpus(spec),
        transferqueue_bytes=spec.transferqueue.quota_bytes,
    )


def spec_columns(spec: RunSpec) -> dict[str, Any]:
    """Returns the columns of a run's row that derive from its specification."""
    return {
        "spec_json": canonical_json(spec),
        "spec_digest": spec_digest(spec),
        "release": RELEASE,
        **asdict(resource_needs(spec)),
    }


def with_replicas(spec: RunSpec, count: int) -> RunSpec:
    """Returns a copy of a specification with another number of rollouts."""
    rollout = spec.rollout.model_copy(update={"replicas": count})
    return spec.model_copy(update={"rollout": rollout})


def restore_size(run_id: str, *, replicas: int, has: int) -> Work:
    """Returns a write that resets a run to its current size after a requested size failed.

    A size that was requested meanwhile stays.
    """

    def write(connection: sa.Connection) -> None:
        run = get_run(connection, run_id)
        spec = parse_spec(run.spec_json)
        if spec.rollout.replicas == replicas:
            columns = spec_columns(with_replicas(spec, has))
            update_run(connection, run, generation=run.generation + 1, **columns)

    return write


def end_quantization(run_id: str) -> Work:
    """Returns a write that stores the run's specification with rollouts in the trainer's precision."""

    def write(connection: sa.Connection) -> None:
        run = get_run(connection, run_id)
        columns = spec_columns(without_quantization(parse_spec(run.spec_json)))
        update_run(connection, run, generation=run.generation + 1, **columns)

    return write


class CurrentSpec:
    """Holds the current specification of a run, which may change while the run is driven.

    All parts of a run share it and read settings on each use, so a change takes effect everywhere at once.
    """

    def __init__(self, now: RunSpec) -> None:
        self.now = now
        self.num_train_rows = 0
        """Rows of the training data; 0 until the rollouts have opened it."""

    @property
    def now(self) -> RunSpec:
        """Current specification; ``text`` is its canonical JSON, and ``digest`` the SHA-256 of that."""
        return self._now

    @now.setter
    def now(self, spec: RunSpec) -> None:
        self._now, self.text, self.digest = spec, canonical_json(spec), spec_digest(spec)

    @property
    def num_steps(self) -> int:
        """Total number of steps of the run."""
        return self.now.num_steps(self.num_train_rows)


class RequestQueue:
    """Pending requests of users: at most one of each kind, the newest.

    A request counts once it is stored, and is deleted in the transaction of the event that reports
    its result. Later attempts and other controllers therefore find it.
    """

    def __init__(self, run_id: str, database: Database) -> None:
        self._run_id = run_id
        self._database = database
        self._waiting: dict[RequestKind, Request] = {}
        self.pausing = asyncio.Event()
        """Set once the steps are to end: a pause is requested, or workers must leave their hosts."""

    async def open(self) -> None:
        """Loads requests that an earlier controller did not complete."""

        def read() -> list[Request]:
            with self._database.read() as connection:
                return read_requests(connection, self._run_id)

        for request in await self._database.run(read):
            self._waiting.setdefault(request.kind, request)
        if "pause" in self._waiting:
            self.pausing.set()

    async def put(self, kind: RequestKind, **options: int) -> None:
        add = self.added(kind, **options)

        def write() -> None:
            with self._database.write() as connection:
                add(connection)

        await self._database.run(write)
        if kind == "pause":
            self.pausing.set()

    def resume_steps(self) -> None:
        """Lets steps begin again after workers have left their hosts, unless a pause is requested."""
        if "pause" not in self._waiting:
            self.pausing.clear()

    def added(self, kind: RequestKind, **options: int) -> Work:
        """Returns the write that stores a request, for the transaction of the event with its cause."""
        request = Request(kind=kind, request_id=new_id("req"), options=options)

        def write(connection: sa.Connection) -> None:
            write_request(connection, self._run_id, request)
            self._waiting[kind] = request

        return write

    def get(self, kind: RequestKind) -> Request | None:
        return self._waiting.get(kind)

    def done(self, request: Request | None) -> Work:
        """Returns the write that deletes a request, for the transaction of the event with its result."""

        def write(connection: sa.Connection) -> None:
            if request is not None:
                forget_requests(connection, self._run_id, request.kind, request.request_id)
                if self._waiting.get(request.kind) == request:
                    del self._waiting[request.kind]

        return write
