"""The controller process: wires its parts, serves REST, gRPC and metrics, ends at SIGTERM."""

import asyncio
import gc
import logging
from contextlib import AsyncExitStack
from typing import Any

from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY

from services.common.clock import SystemClock
from services.common.credentials import acting_as
from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.common.grpc_client import open_channel
from services.common.grpc_server import serve
from services.common.http_server import serve_http
from services.common.lifetime import announce, until_told_to_stop
from services.common.logging import configure
from services.common.metrics import serve_metrics
from services.common.task_group import TaskGroup
from services.controller.api.app import build_app
from services.controller.api.measured import Measured
from services.controller.api.oidc import OidcProvider
from services.controller.api.principals import (
    DEFAULT_PROJECT,
    Authenticator,
    Authenticators,
    TokenStore,
)
from services.controller.api.request_limits import RequestLimits
from services.controller.api.rpc import RunServicer
from services.controller.api.run_page import with_run_page
from services.controller.audit import RunAudit
from services.controller.launch.choice import open_launcher
from services.controller.logs import RunLogs
from services.controller.membership import Membership
from services.controller.rendezvous import RendezvousStore
from services.controller.rendezvous_server import RendezvousServicer
from services.controller.run.driver import Services
from services.controller.run_collector import RunCollector
from services.controller.runs import RunManager
from services.controller.server import MembershipServicer
from services.controller.settings import ControllerSettings
from services.controller.store.database import Database
from services.controller.store.lease import Leadership
from services.controller.store.runs import RunStore
from services.transferqueue.client import TransferQueueClient
from slipstream.controller.v1 import membership_pb2_grpc, run_pb2_grpc

logger = logging.getLogger(__name__)

# Its callers are users, who have API tokens.
_RUN_SERVICE = "slipstream.controller.v1.RunService"
# Newest runs that metrics describe.
_MEASURED = 200


async def run_controller(settings: ControllerSettings) -> None:
    """Lead, and serve until told to stop."""
    settings.state_directory.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(settings.metrics_port))
        database = Database(settings.database)
        stack.callback(database.close)
        leadership = Leadership(database, holder=settings.holder, ttl_s=settings.lease_ttl_s)
        await leadership.acquire()
        channel = await stack.enter_async_context(
            open_channel(settings.transferqueue_address, "transferqueue")
        )
        users = _open_users(settings, database)
        audit = RunAudit(database)
        membership = Membership(clock, settings.heartbeat_timeout_s)
        runs = RunCollector(
            lambda: RunStore(database).list_runs(limit=_MEASURED), membership.workers
        )
        REGISTRY.register(runs)
        stack.callback(REGISTRY.unregister, runs)
        rendezvous = RendezvousStore()
        tasks = await stack.enter_async_context(TaskGroup())
        queue = TransferQueueClient(channel)
        manager = RunManager(
            database=database,
            membership=membership,
            queue=queue,
            tasks=tasks,
            defaults=settings.limits(),
            allowed_roots=settings.allowed_roots,
        )
        logs = RunLogs(settings.state_directory, manager.is_ended)
        limits = RequestLimits(manager.limits)
        await manager.recover()

        def register(server: Any) -> None:
            run_pb2_grpc.add_RunServiceServicer_to_server(
                RunServicer(manager, audit, logs, users, limits), server
            )
            membership_pb2_grpc.add_MembershipServiceServicer_to_server(
                MembershipServicer(manager, membership, settings, clock), server
            )
            membership_pb2_grpc.add_RendezvousServiceServicer_to_server(
                RendezvousServicer(rendezvous), server
            )
            if settings.grpc_reflection or settings.insecure_dev:
                reflection.enable_server_reflection((_RUN_SERVICE, reflection.SERVICE_NAME), server)

        port = await stack.enter_async_context(
            serve(settings.bind, register, open_service=_RUN_SERVICE)
        )
        address = f"{settings.advertise_host}:{port}"
        manager.drivers.services = Services(
            membership=membership,
            launcher=await stack.enter_async_context(
                open_launcher(settings, address, manager=manager, tasks=tasks)
            ),
            queue=queue,
            clock=clock,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        stack.push_async_callback(manager.close, leave=settings.leave_runs)
        await manager.start()
        rest_port = await stack.enter_async_context(
            serve_http(
                settings.rest_bind,
                Measured(with_run_page(build_app(manager, audit, logs, users, limits))),
                certificate=settings.rest_tls_certificate,
                key=settings.rest_tls_key,
            )
        )
        scheme = "https" if settings.rest_tls_certificate else "http"
        announce(
            settings.ready_file,
            {"grpc": address, "rest": f"{scheme}://{settings.advertise_host}:{rest_port}"},
        )
        keeping = tasks.create_task(leadership.keep())
        await until_told_to_stop(stop_on_stdin_eof=settings.stop_on_stdin_eof)
        keeping.cancel()


def _open_users(settings: ControllerSettings, database: Database) -> Authenticator | None:
    """Those who may use the API; None if it is open to this host."""
    ways: list[Authenticator] = []
    if settings.admin_token_file is not None or settings.oidc_issuer:
        ways.append(tokens := TokenStore(database))
    if settings.admin_token_file is not None:
        # The first token comes from a file, so it needs no other.
        token = settings.admin_token_file.read_text(encoding="utf-8").strip()
        tokens.remember(token, name="admin", project=DEFAULT_PROJECT, role="admin")
    if settings.oidc_issuer:
        ways.append(
            OidcProvider(
                settings.oidc_issuer,
                audience=settings.oidc_audience,
                roles_claim=settings.oidc_roles_claim,
                name_claim=settings.oidc_name_claim,
            )
        )
    return Authenticators(ways) if ways else None


def main() -> None:
    """Entry point."""
    # The command line overrides the environment: --insecure-dev, --rest-bind 127.0.0.1:8700 and so on.
    settings = ControllerSettings(
        _cli_parse_args=True, _cli_kebab_case=True, _cli_implicit_flags=True
    )
    configure(level=settings.log_level, log_format=settings.log_format, service="controller")
    # Modules stay, and little of what a run makes is a cycle: by default everything would be looked through
    # every few seconds, which holds everybody up for a fifth of a second.
    gc.freeze()
    gc.set_threshold(10_000, 10, 30)
    try:
        settings.check_exposure()
        with acting_as(settings.identity()), settings.tracing("controller"):
            asyncio.run(run_controller(settings))
    except (InvalidArgumentError, FailedPreconditionError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
