"""Opens the launcher that the settings select."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.task_group import TaskGroup
from services.controller.launch.launcher import ExternalLauncher, Launcher
from services.controller.launch.process import open_process_launcher
from services.controller.manager.runs import RunManager
from services.controller.settings import ControllerSettings


@asynccontextmanager
async def open_launcher(
    settings: ControllerSettings, address: str, *, manager: RunManager, tasks: TaskGroup
) -> AsyncIterator[Launcher]:
    """Opens a launcher until the block ends.

    Args:
        settings: Kind of the launcher and its settings.
        address: ``host:port`` of the controller's gRPC server.
        manager: Receives workers that end or cannot start.
        tasks: Owner of the tasks that watch processes.
    """
    if settings.launcher == "process":
        async with open_process_launcher(
            controller_address=address,
            state_directory=settings.state_directory,
            on_exit=manager.drivers.worker_exited,
            tasks=tasks,
            allowance=settings.allowance,
            metric_targets=settings.metric_targets,
        ) as processes:
            yield processes
    elif settings.launcher == "kubernetes":
        # Imported here: the client takes a second to import, and only a cluster needs it.
        from services.controller.manager.cluster import open_cluster_launcher

        async with open_cluster_launcher(settings, address, manager=manager) as launcher:
            yield launcher
    else:
        yield ExternalLauncher()
