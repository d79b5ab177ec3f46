"""Opens the launcher that the controller's settings name.

A launcher of another package is an entry point in the group ``slipstream.launchers``: a
:class:`~services.common.launchers.LauncherKind`, whose opener takes :class:`LauncherArgs` and yields a
:class:`~services.controller.launch.launcher.Launcher`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.common.callables import load_callable
from services.common.launchers import LAUNCHERS
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import ExternalLauncher, Launcher
from services.controller.launch.process import ProcessLauncher, gpus_and_forks
from services.controller.manager.runs import RunManager
from services.controller.settings import ControllerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherArgs:
    """Arguments of the function that opens a launcher."""

    settings: ControllerSettings
    address: str
    """``host:port`` of the controller's gRPC server, as workers reach it."""
    manager: RunManager
    """Its ``drivers.worker_exited`` and ``drivers.worker_pending`` receive what workers do by themselves."""
    tasks: TaskGroup
    """Group for tasks that live as long as the controller."""


@asynccontextmanager
async def open_launcher(args: LauncherArgs) -> AsyncIterator[Launcher]:
    """Opens the launcher that the settings name, until the block ends.

    Only this launcher is imported: the Kubernetes client takes a second.
    """
    opener = load_callable(LAUNCHERS[args.settings.launcher].opener)
    async with opener(args) as launcher:
        yield launcher


@asynccontextmanager
async def open_processes(args: LauncherArgs) -> AsyncIterator[Launcher]:
    """Opens the launcher ``process``."""
    settings = args.settings
    async with gpus_and_forks() as (gpus, forks):
        yield ProcessLauncher(
            controller_address=args.address,
            state_directory=settings.state_directory,
            on_exit=args.manager.drivers.worker_exited,
            tasks=args.tasks,
            allowance=settings.allowance,
            gpus=gpus,
            forks=forks,
            metric_targets=settings.metric_targets,
        )


@asynccontextmanager
async def open_none(args: LauncherArgs) -> AsyncIterator[Launcher]:
    """Opens the launcher ``none``: another system starts the workers."""
    yield ExternalLauncher()
