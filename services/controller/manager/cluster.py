"""Connects the controller to the cluster that it runs in."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from kubernetes import config
from kubernetes.client import CoreV1Api, CustomObjectsApi

from services.common.task_group import TaskGroup
from services.controller.launch.kubernetes import KubernetesLauncher
from services.controller.launch.pod_api import PodApi, follow, service_reference
from services.controller.launch.pod_logs import PodLogs
from services.controller.launch.scale import GROUP, PLURAL, VERSION, RolloutScales
from services.controller.launch.worker_pods import RUN_LABEL, WORKER_LABEL
from services.controller.manager.rlruns import RLRuns
from services.controller.manager.runs import RunManager
from services.controller.models import RunPatch
from services.controller.settings import ControllerSettings
from services.controller.store.runs import StaleRevisionError


@asynccontextmanager
async def open_cluster_launcher(
    settings: ControllerSettings, address: str, *, manager: RunManager
) -> AsyncIterator[KubernetesLauncher]:
    """Opens a launcher that watches its pods until the block ends.

    The service account of the controller's pod authorizes it.
    """
    config.load_incluster_config()
    core, own = CoreV1Api(), CustomObjectsApi()
    namespace = settings.namespace
    owner = await service_reference(core, namespace, settings.workers_service)
    scales = (
        RolloutScales(own, namespace, owner=owner, on_scale=partial(_scale, manager))
        if settings.rollout_scales
        else None
    )
    launcher = KubernetesLauncher(
        PodApi(core, namespace, has_policies=settings.network_policies),
        settings.worker_templates,
        owner=owner,
        controller_address=address,
        on_exit=manager.drivers.worker_exited,
        on_pending=manager.drivers.worker_pending,
        pending_timeout_s=settings.pending_timeout_s,
        scales=scales,
    )
    selector = f"{WORKER_LABEL}=true,{RUN_LABEL}"
    pods = partial(core.list_namespaced_pod, namespace, label_selector=selector)
    warnings = partial(
        core.list_namespaced_event,
        namespace,
        field_selector="type=Warning,involvedObject.kind=Pod",
    )
    asked = partial(own.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL)
    async with AsyncExitStack() as stack:
        seen_pods = await stack.enter_async_context(follow(pods))
        seen_warnings = await stack.enter_async_context(follow(warnings))
        tasks = await stack.enter_async_context(TaskGroup())
        seen_logs = await stack.enter_async_context(follow(pods))
        logs = PodLogs(core, namespace, settings.state_directory)
        watches = [
            tasks.create_task(launcher.watch(seen_pods)),
            tasks.create_task(launcher.watch_warnings(seen_warnings)),
            tasks.create_task(logs.watch(seen_logs)),
            tasks.create_task(launcher.secrets.keep_renewed()),
        ]
        if scales is not None:
            seen_scales = await stack.enter_async_context(follow(asked))
            watches.append(tasks.create_task(scales.watch(seen_scales)))
        try:
            yield launcher
        finally:
            for watch in watches:
                watch.cancel()


@asynccontextmanager
async def serve_rlruns(settings: ControllerSettings, manager: RunManager) -> AsyncIterator[None]:
    """Mirrors the RLRun objects of the settings' namespaces until the block ends."""
    config.load_incluster_config()
    async with TaskGroup() as tasks:
        serving = [
            tasks.create_task(RLRuns(manager, CustomObjectsApi(), CoreV1Api(), namespace).serve())
            for namespace in settings.rlrun_namespaces
        ]
        try:
            yield
        finally:
            for each in serving:
                each.cancel()


async def _scale(manager: RunManager, run_id: str, replicas: int) -> None:
    """Changes the number of a run's rollouts, unless it already has that many."""
    while True:
        run = await manager.get(run_id)
        if json.loads(run.spec_json)["rollout"]["replicas"] == replicas:
            return
        patch = RunPatch(rollout_replicas=replicas)
        # On a revision conflict, for example after a step, the loop reads the run again.
        with suppress(StaleRevisionError):
            await manager.patch(run_id, patch, revision=run.revision, actor="autoscaler")
