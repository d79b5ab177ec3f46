"""REST API of a run manager whose runs wait for workers that never register."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from services.common.security.confinement import CodePolicy
from services.controller.api.app import build_app
from services.controller.api.principals import Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.api.run_api import RunApi
from services.controller.launch.launcher import ExternalLauncher
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from services.controller.manager.runs import RunManager
from services.controller.membership import Membership
from services.controller.run.lifecycle.loop import Services
from services.controller.run.train.checkpoints import Checkpoint
from services.controller.settings import Limits
from services.controller.store.tables import CHECKPOINTS
from services.wire.transferqueue.types import Stats
from tests.helpers.specs import changed

SPEC = changed(name="one", rollout={"max_response_tokens": 8}, trainer={"steps": 3})


def named(number: int) -> dict[str, object]:
    """Returns a specification with a unique name."""
    return {**SPEC, "name": f"run-{number}"}


class EmptyQueue:
    """Fake client of a transferqueue without samples."""

    async def create_partition(self, partition_id, *, required_fields, quota_bytes=0):
        """Does nothing."""

    async def drop_partition(self, partition_id):
        return 0

    async def stats(self):
        return Stats(partitions=(), shards=())

    async def record_samples(self, run_id, *, max_bytes, max_steps, directory=""):
        """Does nothing."""

    async def delete_sample_records(self, run_id, *, directory=""):
        """Does nothing."""

    async def read_sample_records(self, run_id, query):
        for stretch in ():
            yield stretch


@asynccontextmanager
async def open_manager(
    database, *, max_active_runs=1, max_queued_runs=2, allowance=None, queue=None, **limits
) -> AsyncIterator[RunManager]:
    """Yields a manager; its runs are cancelled at the end."""
    async with asyncio.TaskGroup() as tasks:
        membership = Membership(time, 30.0)
        manager = RunManager(
            database=database,
            membership=membership,
            queue=queue or EmptyQueue(),
            tasks=tasks,
            defaults=Limits(
                max_active_runs=max_active_runs, max_queued_runs=max_queued_runs, **limits
            ),
            allowance=allowance or CodePolicy(),
        )
        manager.drivers.services = Services(
            membership=membership,
            launcher=ExternalLauncher(),
            queue=queue or EmptyQueue(),
            clock=time,
            heartbeat_timeout_s=30.0,
        )
        await manager.start()
        try:
            yield manager
        finally:
            await manager.close(leave=False)


class Developer:
    """Authenticates every caller as an admin."""

    def authenticate(self, authorization):
        return Principal(name="developer", project="default", role="admin")


def api_of(manager, database, tmp_path, users=None, fleets=None) -> RunApi:
    """Returns the run API over a manager."""
    logs, limits = RunLogs(tmp_path, manager.is_ended), RequestLimits(manager.limits)
    return RunApi(manager, RunAudit(database), logs, users or Developer(), limits, fleets)


def client_of(manager, database, tmp_path, users=None, token="", fleets=None) -> httpx.AsyncClient:
    """Returns an HTTP client of the application, without a socket."""
    app = build_app(api_of(manager, database, tmp_path, users, fleets))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


def save(database, run_id, *, step, path="", state="READY") -> str:
    """Inserts a checkpoint into the database as a run does; returns its id."""
    checkpoint = Checkpoint(
        checkpoint_id=f"ckpt_{run_id[-8:]}_{step}",
        run_id=run_id,
        step=step,
        weight_version=step,
        path=path,
        state=state,
        message="",
        create_time=float(step),
    )
    with database.write() as connection:
        values = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        connection.execute(CHECKPOINTS.insert().values(values))
    return checkpoint.checkpoint_id
