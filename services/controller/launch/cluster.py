"""Ties the controller to the cluster that it runs in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kubernetes import config
from kubernetes.client import CoreV1Api

from services.controller.launch.kubernetes import KubernetesLauncher
from services.controller.launch.pod_api import PodApi, deployment_reference
from services.controller.launch.pod_watch import follow_pods
from services.controller.launch.worker_pods import RUN_LABEL, WORKER_LABEL
from services.controller.runs import RunManager
from services.controller.settings import ControllerSettings


@asynccontextmanager
async def open_cluster_launcher(
    settings: ControllerSettings, address: str, *, manager: RunManager
) -> AsyncIterator[KubernetesLauncher]:
    """A launcher that watches its pods until the block ends; the pod's own account authorizes it."""
    config.load_incluster_config()
    core = CoreV1Api()
    launcher = KubernetesLauncher(
        PodApi(core, settings.namespace),
        settings.worker_templates,
        owner=await deployment_reference(core, settings.namespace, settings.deployment),
        controller_address=address,
        on_exit=manager.worker_exited,
        on_pending=manager.worker_pending,
        pending_timeout_s=settings.pending_timeout_s,
    )
    selector = f"{WORKER_LABEL}=true,{RUN_LABEL}"
    async with (
        follow_pods(core, settings.namespace, selector) as seen,
        asyncio.TaskGroup() as tasks,
    ):
        watching = tasks.create_task(launcher.watch(seen))
        try:
            yield launcher
        finally:
            watching.cancel()
