"""Connects the controller to the cluster that it runs in, and copies the logs of its pods."""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes import config
from kubernetes.client import ApiException, CoreV1Api, CustomObjectsApi
from urllib3.exceptions import HTTPError

from services.common.errors import NotFoundError
from services.common.task_group import TaskGroup
from services.controller.launch.launcher import WorkerExit
from services.controller.launch.worker_process import (
    MAX_LOG_BYTES,
    REPORTED_LINES,
    empty_log,
    last_lines,
    log_size,
)
from services.controller.manager.launchers import LauncherArgs
from services.controller.manager.runs import RunManager
from services.controller.schemas import RunPatch
from services.controller.store.runs import StaleRevisionError
from services.extras.kubernetes.drain import NodeDrains, QueueDrain, save_runs
from services.extras.kubernetes.job_set import place_of
from services.extras.kubernetes.launcher import KubernetesLauncher
from services.extras.kubernetes.namespaces import NamespaceLaunchers
from services.extras.kubernetes.pod_api import (
    PodApi,
    Seen,
    follow,
    reason_of,
    service_reference,
)
from services.extras.kubernetes.scale import GROUP, PLURAL, VERSION, RolloutScales
from services.extras.kubernetes.worker_pods import (
    RUN_LABEL,
    WORKER_LABEL,
    accounting_labels,
    load_templates,
    project_namespaces,
)

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
# A log that is silent for longer is requested again, because its connection may be dead.
_SILENCE_S = 300.0
# Text that the node sends in place of further lines if the container is removed while its log is
# followed.
_NOT_FOUND = re.compile(rb"^rpc error: code = NotFound desc = .*find container.*\n?", re.MULTILINE)


class PodLogs:
    """Copies the output of worker pods into log files, like those of worker processes, for the API.

    The files outlive the pods. Reading a log blocks until its container ends, so each container has a
    thread.

    Args:
        state_directory: Root of the logs: each run's go to ``<state_directory>/<run_id>/logs``.
    """

    def __init__(self, core: CoreV1Api, namespace: str, state_directory: Path) -> None:
        self._core = core
        self._namespace = namespace
        self._state_directory = state_directory
        self._followed: set[tuple[str, str]] = set()
        self._pods: dict[str, str] = {}
        """UID of the newest observed pod of each name."""
        self._begins: dict[Path, int] = {}
        """Offset of the lines of the newest pod, by log."""

    async def watch(self, changes: "asyncio.Queue[Seen]") -> None:
        """Follows the containers of all observed pods until cancelled."""
        while True:
            change = await changes.get()
            if change.body is None:
                self._followed = {key for key in self._followed if key[0] != change.name}
                self._pods.pop(change.name, None)
            else:
                self._note_begin(change.name, change.body)
                self._follow(change.name, change.body)

    def with_copied_log(self, exit_: WorkerExit) -> WorkerExit:
        """Adds the copied log of a pod to its exit, because Kubernetes reports at most 2 KiB of it."""
        log = self._log(exit_.run_id, exit_.worker_id)
        lines = [last_lines(log, REPORTED_LINES, begin=self._begins.get(log, 0)), exit_.last_lines]
        return replace(exit_, last_lines="\n".join(filter(None, lines)))

    def _note_begin(self, name: str, pod: Mapping[str, Any]) -> None:
        """Notes where the lines of a pod that has not started yet will begin.

        Lines of the worker's earlier pods explain neither its failure nor why it did not start.
        """
        if self._pods.get(name) == (uid := pod["metadata"].get("uid")):
            return
        self._pods[name] = uid
        if not any(_started(pod)):
            for container in pod["spec"]["containers"]:
                log = self._log_of(pod, container["name"])
                self._begins[log] = log_size(log)

    def _log_of(self, pod: Mapping[str, Any], container: str) -> Path:
        run_id = pod["metadata"]["labels"][RUN_LABEL]
        return self._log(run_id, _component(run_id, place_of(pod), container))

    def _log(self, run_id: str, component: str) -> Path:
        return self._state_directory / run_id / "logs" / f"{component}.log"

    def _follow(self, name: str, pod: Mapping[str, Any]) -> None:
        """Follows started containers that are not followed yet.

        Pods are listed again every minute, which reopens failed log streams.
        """
        for container in _started(pod):
            key = (name, container)
            if key not in self._followed:
                self._followed.add(key)
                file = self._log_of(pod, container)
                # A daemon, because it may be blocked in a read that only the API server ends.
                threading.Thread(
                    target=self._copy, args=(key, file), name=f"log of {name}", daemon=True
                ).start()

    def _copy(self, key: tuple[str, str], file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._append(*key, file)
        except (ApiException, HTTPError, OSError) as error:
            logger.info(
                "log stream of a pod ended; reopening it", extra={"pod": key[0], "why": str(error)}
            )
            self._followed.discard(key)

    def _append(self, name: str, container: str, file: Path) -> None:
        """Appends new log lines to the file; after a reconnection, up to a second of lines may repeat."""
        window: dict[str, Any] = {}
        if file.exists():
            window = {"since_seconds": max(int(time.time() - file.stat().st_mtime) + 1, 1)}
        answer: Any = self._core.read_namespaced_pod_log(
            name,
            self._namespace,
            container=container,
            follow=True,
            _preload_content=False,
            _request_timeout=(_CONNECT_S, _SILENCE_S),
            **window,
        )
        with file.open("ab") as output:
            for data in answer.stream():
                if output.tell() > MAX_LOG_BYTES:
                    empty_log(file)
                output.write(_NOT_FOUND.sub(b"", data))
                output.flush()


def _started(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yields the containers that may have written output."""
    for status in pod["status"].get("containerStatuses", []):
        if "waiting" not in status["state"]:
            yield status["name"]


def _component(run_id: str, pod_name: str, container: str) -> str:
    """Returns the worker's name, with the node if the worker has several."""
    component = pod_name.removeprefix(f"{run_id.replace('_', '-')}-")
    return component if component.startswith(container) else container


async def _labels_of(manager: RunManager, run_id: str) -> Mapping[str, str]:
    """Returns the labels that assign a run's pods to its project and user."""
    run = await manager.get(run_id)
    return accounting_labels(project=run.project, user=run.created_by)


async def _project_of(manager: RunManager, run_id: str) -> str:
    """Returns the project of a run; empty for one that the database lost."""
    try:
        return (await manager.get(run_id)).project
    except NotFoundError:
        return ""


async def _namespace_of(args: LauncherArgs, run_id: str) -> str:
    """Returns the namespace of a run's pods, by the templates of its project."""
    project = await _project_of(args.manager, run_id)
    folder = args.settings.worker_templates
    return (await asyncio.to_thread(load_templates, folder, project)).namespace


@asynccontextmanager
async def open_pods(args: LauncherArgs) -> AsyncIterator[KubernetesLauncher | NamespaceLaunchers]:
    """Opens the launcher ``kubernetes``, which watches its pods until the block ends.

    The service account of the controller's pod authorizes it.
    """
    config.load_incluster_config()
    core, settings = CoreV1Api(), args.settings
    further = await asyncio.to_thread(project_namespaces, settings.worker_templates)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(TaskGroup())
        launchers, watches = {}, []
        for namespace in (settings.namespace, *sorted(further)):
            try:
                owner = await service_reference(core, namespace, settings.workers_service)
            except ApiException as error:
                if namespace == settings.namespace or error.status not in (403, 404):
                    raise
                # The runs of one project wait, and those of the others go on.
                why = {"namespace": namespace, "error": reason_of(error)}
                logger.error("cannot use the namespace of a project", extra=why)  # noqa: TRY400
                continue
            launchers[namespace], new_watches = await _open_namespace(
                stack, tasks, core, args, namespace, owner
            )
            watches += new_watches
        for namespace, launcher in launchers.items():
            launcher.neighbours = [
                _pod_api(core, args, name) for name in launchers.keys() - {namespace}
            ]
        launcher = launchers[settings.namespace]
        everywhere: KubernetesLauncher | NamespaceLaunchers = launcher
        if further:
            everywhere = NamespaceLaunchers(launchers, partial(_namespace_of, args))
        if settings.watch_nodes:
            drains = NodeDrains(
                settings.drain_taints,
                pods=everywhere.placed_pods,
                on_drained=args.manager.drivers.host_drained,
                on_in_service=args.manager.drivers.host_in_service,
            )
            for launcher in launchers.values():
                launcher.on_placed = drains.notify
            watches += await _watch_nodes(stack, tasks, core, args, drains)
        try:
            yield everywhere
        finally:
            for watch in watches:
                watch.cancel()


def _pod_api(core: CoreV1Api, args: LauncherArgs, namespace: str) -> PodApi:
    return PodApi(core, namespace, has_policies=args.settings.network_policies)


async def _open_namespace(
    stack: AsyncExitStack,
    tasks: TaskGroup,
    core: CoreV1Api,
    args: LauncherArgs,
    namespace: str,
    owner: Mapping[str, str],
) -> tuple[KubernetesLauncher, list["asyncio.Task[None]"]]:
    """Opens the launcher of a namespace; returns it with the tasks that watch the namespace."""
    settings, manager, objects_api = args.settings, args.manager, CustomObjectsApi()
    scales = (
        RolloutScales(objects_api, namespace, owner=owner, on_scale=partial(_scale, manager))
        if settings.rollout_scales
        else None
    )
    logs = PodLogs(core, namespace, settings.state_directory)
    launcher = KubernetesLauncher(
        _pod_api(core, args, namespace),
        settings.worker_templates,
        owner=owner,
        controller_address=args.address,
        on_exit=lambda exit_: manager.drivers.worker_exited(logs.with_copied_log(exit_)),
        on_pending=manager.drivers.worker_pending,
        pending_timeout_s=settings.pending_timeout_s,
        scales=scales,
    )
    launcher.labels_of = partial(_labels_of, manager)
    launcher.project_of = partial(_project_of, manager)
    selector = f"{WORKER_LABEL}=true,{RUN_LABEL}"
    pods = partial(core.list_namespaced_pod, namespace, label_selector=selector)
    warnings = partial(
        core.list_namespaced_event,
        namespace,
        field_selector="type=Warning,involvedObject.kind=Pod",
    )
    list_scales = partial(
        objects_api.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL
    )
    watches = [
        tasks.create_task(launcher.watch(await stack.enter_async_context(follow(pods)))),
        tasks.create_task(
            launcher.watch_warnings(await stack.enter_async_context(follow(warnings)))
        ),
        tasks.create_task(logs.watch(await stack.enter_async_context(follow(pods)))),
        tasks.create_task(launcher.secrets.keep_renewed()),
    ]
    if scales is not None:
        seen_scales = await stack.enter_async_context(follow(list_scales))
        watches.append(tasks.create_task(scales.watch(seen_scales)))
    return launcher, watches


async def _watch_nodes(
    stack: AsyncExitStack,
    tasks: TaskGroup,
    core: CoreV1Api,
    args: LauncherArgs,
    drains: NodeDrains,
) -> list["asyncio.Task[None]"]:
    """Starts to move workers, and the transferqueue, away from drained nodes; returns the tasks."""
    settings = args.settings
    seen_nodes = await stack.enter_async_context(follow(core.list_node, "nodes"))
    watches = [tasks.create_task(drains.watch(seen_nodes))]
    if settings.transferqueue_namespace:
        queue = QueueDrain(
            PodApi(core, settings.transferqueue_namespace),
            drains,
            save=partial(save_runs, args.manager),
        )
        drains.on_changed = queue.notify
        listing = partial(
            core.list_namespaced_pod,
            settings.transferqueue_namespace,
            label_selector=settings.transferqueue_selector,
        )
        seen_pods = await stack.enter_async_context(follow(listing))
        watches.append(tasks.create_task(queue.watch(seen_pods)))
    return watches


async def _scale(manager: RunManager, run_id: str, replicas: int) -> None:
    """Changes the number of a run's rollouts, unless it already has that many."""
    while True:
        run = await manager.get(run_id)
        if json.loads(run.spec_json)["rollout"]["replicas"] == replicas:
            return
        patch = RunPatch(rollout_replicas=replicas)
        # On a revision conflict, for example after a change by a user, the loop reads the run again.
        with suppress(StaleRevisionError):
            await manager.patch(run_id, patch, revision=run.revision, actor="autoscaler")
