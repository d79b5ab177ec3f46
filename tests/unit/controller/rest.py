"""A REST API over a manager whose runs wait for workers that never come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from services.common.clock import SystemClock
from services.controller.api.app import build_app
from services.controller.api.request_limits import RequestLimits
from services.controller.audit import RunAudit
from services.controller.launch.launcher import ExternalLauncher
from services.controller.logs import RunLogs
from services.controller.membership import Membership
from services.controller.quotas import Limits
from services.controller.run.driver import Services
from services.controller.runs import RunManager
from services.transferqueue.facts import Stats

SPEC = {
    "name": "one",
    "model": {"path": "tiny:qwen2-0.4m"},
    "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
    "rollout": {"max_response_tokens": 8, "rewards": [{"name": "exact_match"}]},
    "trainer": {"steps": 3, "prompts_per_step": 4},
}


def named(number: int) -> dict[str, object]:
    """A specification with a name of its own."""
    return {**SPEC, "name": f"run-{number}"}


class EmptyQueue:
    """A transferqueue in which nothing is stored."""

    async def create_partition(self, partition_id, *, required_fields, quota_bytes=0):
        """Nothing is kept."""

    async def drop_partition(self, partition_id):
        return 0

    async def stats(self):
        return Stats(partitions=(), shards=())


@asynccontextmanager
async def open_manager(
    database, *, max_active_runs=1, max_queued_runs=2, allowed_roots=(), queue=None, **limits
) -> AsyncIterator[RunManager]:
    """A manager; its runs are cancelled at the end."""
    async with asyncio.TaskGroup() as tasks:
        membership = Membership(SystemClock(), 30.0)
        manager = RunManager(
            database=database,
            membership=membership,
            queue=queue or EmptyQueue(),
            tasks=tasks,
            defaults=Limits(
                max_active_runs=max_active_runs, max_queued_runs=max_queued_runs, **limits
            ),
            allowed_roots=allowed_roots,
        )
        manager.drivers.services = Services(
            membership=membership,
            launcher=ExternalLauncher(),
            queue=queue or EmptyQueue(),
            clock=SystemClock(),
            heartbeat_timeout_s=30.0,
        )
        await manager.start()
        yield manager
        await manager.close(leave=False)


def client_of(manager, database, tmp_path, users=None, token="") -> httpx.AsyncClient:
    """A client of the application, without a socket."""
    logs = RunLogs(tmp_path, manager.is_ended)
    app = build_app(manager, RunAudit(database), logs, users, RequestLimits(manager.limits))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)
