"""Opens the launcher that the settings name."""

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
    """A launcher that works until the block ends.

    Args:
        settings: Which one, and where it works.
        address: ``host:port`` of the controller's gRPC server.
        manager: Hears of workers that end or cannot start.
        tasks: Owns the tasks that watch processes.
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
        # Only a cluster needs the client, which takes a second to import.
        from services.controller.manager.cluster import open_cluster_launcher

        async with open_cluster_launcher(settings, address, manager=manager) as launcher:
            yield launcher
    else:
        yield ExternalLauncher()
