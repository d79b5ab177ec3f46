"""Controller process: wires its components, serves REST, gRPC and metrics, and ends at SIGTERM."""

import asyncio
import faulthandler
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any

from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.common.host import make_private_folder
from services.common.http.limits import raise_descriptor_limit
from services.common.http.server import serve_http
from services.common.launchers import LAUNCHERS
from services.common.lifetime import report_ready, wait_for_shutdown
from services.common.rpc.client import open_channel
from services.common.rpc.server import serve
from services.common.security.credentials import acting_as
from services.common.task_group import TaskGroup, unwrapped
from services.common.telemetry.logging import configure
from services.controller.api.app import Measured, build_app
from services.controller.api.membership import MembershipServicer, RendezvousServicer
from services.controller.api.principals import (
    DEFAULT_PROJECT,
    Authenticator,
    Authenticators,
    OidcProvider,
    TokenStore,
)
from services.controller.api.request_limits import RequestLimits
from services.controller.api.rpc import RUN_SERVICE, run_servicer, run_users
from services.controller.api.run_api import RunApi
from services.controller.api.run_page import PageLinks, add_page_links, with_run_page
from services.controller.fleets import Fleets
from services.controller.manager.audit import RunAudit
from services.controller.manager.launchers import LauncherArgs, open_launcher
from services.controller.manager.logs import RunLogs
from services.controller.manager.run_collector import RunCollector
from services.controller.manager.runs import RunManager
from services.controller.membership import Membership
from services.controller.run.lifecycle.loop import Services
from services.controller.run.train.checkpoints import relocate_checkpoints
from services.controller.settings import (
    DATABASE_FILE,
    EXTENSIONS,
    FLEET_FORMATS,
    ControllerSettings,
)
from services.controller.standby import Standby, shown_address
from services.controller.store.database import Database, DatabaseError, LeaseLostError
from services.controller.store.lease import Leadership, leader_address
from services.controller.store.runs import RunStore
from services.controller.store.usage import in_use
from services.wire.transferqueue.client import TransferQueueClient
from slipstream.controller.v1 import membership_pb2_grpc, run_pb2_grpc

# The largest requests are specifications, of up to 256 KiB; requests of workers are smaller.
_MAX_MESSAGE_BYTES = 4 << 20
# Number of newest runs that metrics describe.
_MAX_MEASURED = 200
# Max seconds from the loss of the lease to the end of this process; stopping the servers takes a few.
_END_S = 15.0
logger = logging.getLogger(__name__)


async def run_controller(settings: ControllerSettings) -> None:
    """Acquires leadership and serves until shutdown."""
    make_private_folder(settings.state_directory)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(settings.serving_metrics())
        database = stack.enter_context(_opened_database(settings))
        standby = await stack.enter_async_context(_forwarding(settings, database))
        leadership = Leadership(
            database,
            holder=settings.holder,
            ttl_s=settings.lease_ttl_s,
            address=_address(settings, standby),
        )
        await leadership.acquire()
        stack.push_async_callback(leadership.release)
        if standby is not None:
            standby.lead()
        if LAUNCHERS[settings.launcher].shares_files:
            relocate_checkpoints(database, settings.state_directory)
        channel = await stack.enter_async_context(
            open_channel(settings.transferqueue_address, "transferqueue")
        )
        tokens = TokenStore(database)
        users = _open_users(settings, tokens)
        membership = Membership(time, settings.heartbeat_timeout_s)
        stack.enter_context(_measured_runs(database, membership))
        tasks = await stack.enter_async_context(TaskGroup())
        queue = TransferQueueClient(channel)
        manager = RunManager(
            database=database,
            membership=membership,
            queue=queue,
            tasks=tasks,
            defaults=settings.limits(),
            allowance=settings.allowance,
        )
        logs = RunLogs(settings.state_directory, manager.is_ended)
        limits = RequestLimits(manager.limits)
        fleets = open_fleets(settings)
        api = RunApi(manager, RunAudit(database), logs, users, limits, fleets)
        await manager.recover()
        members = MembershipServicer(manager, membership, settings, time)
        rendezvous = RendezvousServicer(membership.rendezvous)
        if standby is not None and settings.bind.endswith(":0"):
            # Others know the port on which this controller has waited.
            settings = settings.model_copy(
                update={"bind": f"{settings.bind.removesuffix('0')}{standby.grpc_port}"}
            )
        address = await stack.enter_async_context(_serve_grpc(api, members, rendezvous, settings))
        manager.drivers.services = Services(
            membership=membership,
            launcher=await stack.enter_async_context(
                open_launcher(
                    LauncherArgs(settings=settings, address=address, manager=manager, tasks=tasks)
                )
            ),
            queue=queue,
            clock=time,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        stack.push_async_callback(manager.close, leave=settings.leave_runs)
        await manager.start()
        await open_extensions(stack, settings, manager)
        rest_url = await stack.enter_async_context(_serve_rest(api, tokens, settings, standby))
        report_ready(settings.ready_file, {"grpc": address, "rest": rest_url})
        keeping = tasks.create_task(_keep_leading(leadership))
        await wait_for_shutdown(stop_on_stdin_eof=settings.stop_on_stdin_eof)
        keeping.cancel()


@asynccontextmanager
async def _forwarding(
    settings: ControllerSettings, database: Database
) -> AsyncIterator[Standby | None]:
    """Listens on the ports of a controller that may have to wait; yields None if others do not forward."""
    if not (settings.peer_host and settings.database_url):
        yield None
        return

    async def leader() -> str:
        with suppress(DatabaseError):
            return await database.query(leader_address, database)
        return ""

    opened = Standby.opened(
        leader, host=settings.peer_host, rest_bind=settings.rest_bind, grpc_bind=settings.bind
    )
    async with opened as standby:
        yield standby


def _address(settings: ControllerSettings, standby: Standby | None) -> str:
    if standby is None:
        return ""
    return shown_address(settings.peer_host, rest=standby.rest_port, grpc=standby.grpc_port)


async def _keep_leading(leadership: Leadership) -> None:
    """Renews the lease; if it is lost, this process ends within ``_END_S`` seconds.

    Raises:
        LeaseLostError: If the lease is lost.
    """
    try:
        await leadership.keep_renewed()
    except LeaseLostError as error:
        logger.error("this controller ends", extra={"cause": str(error)})  # noqa: TRY400
        # Without this, threads that wait for a database that does not answer would keep this process alive.
        faulthandler.dump_traceback_later(_END_S, exit=True)
        raise


@contextmanager
def _opened_database(settings: ControllerSettings) -> Iterator[Database]:
    """Opens the database until the block ends; an SQLite file is locked against replacement."""
    file = settings.state_directory / DATABASE_FILE
    lock = nullcontext() if settings.database_url else in_use(file)
    with lock, closing(Database(settings.database)) as database:
        yield database


@contextmanager
def _measured_runs(database: Database, membership: Membership) -> Iterator[None]:
    """Registers the metrics of the newest runs until the block ends."""
    runs = RunCollector(
        lambda: RunStore(database).list_runs(limit=_MAX_MEASURED, has_specs=True),
        membership.workers,
    )
    REGISTRY.register(runs)
    try:
        yield
    finally:
        REGISTRY.unregister(runs)


@asynccontextmanager
async def _serve_grpc(
    api: RunApi,
    members: MembershipServicer,
    rendezvous: RendezvousServicer,
    settings: ControllerSettings,
) -> AsyncIterator[str]:
    """Serves gRPC for workers and API clients until the block ends; yields its address."""

    def register(server: Any) -> None:
        run_pb2_grpc.add_RunServiceServicer_to_server(run_servicer(api), server)
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(members, server)
        membership_pb2_grpc.add_RendezvousServiceServicer_to_server(rendezvous, server)
        if settings.grpc_reflection:
            reflection.enable_server_reflection((RUN_SERVICE, reflection.SERVICE_NAME), server)

    serving = serve(
        settings.bind, register, users=run_users(api), max_message_bytes=_MAX_MESSAGE_BYTES
    )
    async with serving as port:
        yield f"{settings.advertise_host}:{port}"


@asynccontextmanager
async def _serve_rest(
    api: RunApi, tokens: TokenStore, settings: ControllerSettings, standby: Standby | None
) -> AsyncIterator[str]:
    """Serves the REST API and the run page until the block ends; yields their address.

    A controller that waited keeps the socket on which it listened, so that no connection is refused.
    """
    app = build_app(api, hosts=settings.hosts)
    add_page_links(app, api, PageLinks(tokens, api.check_valid))
    with_run_page(app)
    serving = serve_http(
        settings.rest_bind,
        Measured(app),
        listener=None if standby is None else standby.take_rest_listener(),
        certificate=settings.rest_tls_certificate,
        key=settings.rest_tls_key,
        # The other half of the descriptors is left for gRPC, the database and other files.
        connections_per_peer=min(settings.rest_connections_per_peer, raise_descriptor_limit() // 2),
    )
    async with serving as port:
        scheme = "https" if settings.rest_tls_certificate else "http"
        yield f"{scheme}://{settings.advertise_host}:{port}"


async def open_extensions(
    stack: AsyncExitStack, settings: ControllerSettings, manager: RunManager
) -> None:
    """Opens the extensions that the settings name or need.

    Raises:
        DoorError: If one of them cannot be loaded.
    """
    for name in extensions_of(settings):
        await stack.enter_async_context(EXTENSIONS.load(name)(settings, manager))


def extensions_of(settings: ControllerSettings) -> list[str]:
    """Returns the names of the extensions that serve next to the API."""
    serves_rlruns = settings.launcher == "kubernetes" and settings.rlrun_namespaces
    return list(dict.fromkeys([*settings.extensions, *(["rlruns"] if serves_rlruns else [])]))


def open_fleets(settings: ControllerSettings) -> Fleets | None:
    """Opens the fleets that the installation configures, if it has any."""
    if settings.fleets_file is None:
        return None
    fleets: Fleets = FLEET_FORMATS.load(settings.fleets_format)(settings.fleets_file)
    return fleets


def _open_users(settings: ControllerSettings, tokens: TokenStore) -> Authenticator:
    authenticators: list[Authenticator] = [tokens]
    if settings.admin_token_file is not None:
        # The first token comes from a file, because creating it through the API would need a token.
        token = settings.admin_token_file.read_text(encoding="utf-8").strip()
        tokens.accept(token, name="admin", project=DEFAULT_PROJECT, role="admin")
    if settings.oidc_issuer:
        authenticators.append(
            OidcProvider(
                settings.oidc_issuer,
                audience=settings.oidc_audience,
                roles_claim=settings.oidc_roles_claim,
                name_claim=settings.oidc_name_claim,
            )
        )
    return Authenticators(authenticators)


def main() -> None:
    """Runs the controller; command-line options override the environment."""
    # For example: --rest-bind 127.0.0.1:8700.
    settings = ControllerSettings(
        _cli_parse_args=True, _cli_kebab_case=True, _cli_implicit_flags=True
    )
    configure(level=settings.log_level, log_format=settings.log_format, service="controller")
    # Imported modules stay for the life of the process, and a run creates few reference cycles.
    # With the defaults, full collections would run every few seconds and stop everything for 0.2 s
    # each.
    gc.freeze()
    gc.collect()  # else the frozen objects would count as survivors, and delay the first full collection
    gc.set_threshold(10_000, 10, 30)
    try:
        settings.check_users()
        with acting_as(settings.identity()), settings.tracing("controller"), unwrapped():
            asyncio.run(run_controller(settings))
    except (InvalidArgumentError, FailedPreconditionError, LeaseLostError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
