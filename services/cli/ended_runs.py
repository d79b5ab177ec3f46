"""Read-only API over the database of a folder whose controller has ended."""

import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from sqlalchemy.exc import SQLAlchemyError

from services.cli.api import NO_CONTROLLER, ApiError
from services.common.security.confinement import CodePolicy
from services.common.task_group import TaskGroup
from services.controller.api.app import build_app
from services.controller.api.principals import DEFAULT_PROJECT, Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.api.run_api import RunApi
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from services.controller.manager.runs import RunManager
from services.controller.membership import Membership
from services.controller.run.train.checkpoints import relocate_checkpoints
from services.controller.settings import DATABASE_FILE, Limits
from services.controller.store.database import Database, DatabaseError

URL = "http://ended.runs"
"""Base address of the API, which is not on any network."""


@asynccontextmanager
async def ended_runs(state_directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yields an HTTP client of an API in this process over a folder's database; it runs no training.

    Raises:
        ApiError: If the database cannot be read.
    """
    try:
        with _writable(state_directory) as file:
            async with _api_of(file, state_directory) as http:
                yield http
    except PermissionError as error:
        raise ApiError(
            f"{error.filename} cannot be read ({error.strerror}); its owner can"
        ) from error
    except (DatabaseError, SQLAlchemyError) as error:
        raise ApiError(
            f"{state_directory / DATABASE_FILE} cannot be read ({getattr(error, 'orig', error)}); if it is "
            "damaged, 'slipstream restore' replaces it by a backup"
        ) from error


@contextmanager
def _writable(state_directory: Path) -> Iterator[Path]:
    """Yields a folder's database, or a copy of it if this user may only read: SQLite needs to write."""
    if os.access(state_directory, os.W_OK):
        yield state_directory / DATABASE_FILE
        return
    with TemporaryDirectory() as copy:
        for file in state_directory.glob(f"{DATABASE_FILE}*"):
            shutil.copy(file, copy)
        yield Path(copy) / DATABASE_FILE


@asynccontextmanager
async def _api_of(file: Path, state_directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    database = Database(f"sqlite:///{file}")
    relocate_checkpoints(database, state_directory)
    limits = Limits(max_active_runs=1, max_queued_runs=1)
    try:
        async with TaskGroup() as tasks:
            manager = RunManager(
                database=database,
                membership=Membership(time, 1.0),
                queue=_NoTransferQueue(),  # type: ignore[arg-type]
                tasks=tasks,
                defaults=limits,
                allowance=CodePolicy(),
            )
            logs = RunLogs(state_directory, manager.is_ended)
            api = RunApi(
                manager, RunAudit(database), logs, _AnyCaller(), RequestLimits(manager.limits)
            )
            yield httpx.AsyncClient(transport=_Reading(httpx.ASGITransport(app=build_app(api))))
    finally:
        database.close()


class _Reading(httpx.AsyncBaseTransport):
    """Passes only GET requests whose responses are no streams; raises ApiError (503) for all others."""

    def __init__(self, inner: httpx.ASGITransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "GET" or request.url.path.endswith("/stream"):
            raise ApiError(
                f"this needs a controller, and none runs in this folder; {NO_CONTROLLER}",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            )
        return await self._inner.handle_async_request(request)


class _AnyCaller:
    """Authenticates every caller: a user who can read the file may read its contents."""

    def authenticate(self, authorization: str) -> Principal:
        return Principal(name="owner", project=DEFAULT_PROJECT, role="viewer")


class _NoTransferQueue:
    """Replaces the transferqueue; it contains no samples."""

    async def read_sample_records(self, run_id: str, query: Any) -> AsyncIterator[bytes]:
        return
        yield b""
