"""Runs workers as pods, through the Kubernetes API.

start   builds pods from the chart's templates   -> API server
watch   sees them pend, run, end and vanish      -> conditions and exits of the run
stop    deletes them and waits until they are gone
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.spec.run import RunSpec
from services.controller import pod_state
from services.controller.launcher import ExitHandler, WorkerExit
from services.controller.pod_api import PodApi
from services.controller.pod_watch import PodSeen
from services.controller.worker_pods import (
    RUN_LABEL,
    build_pods,
    load_templates,
)

logger = logging.getLogger(__name__)

_STOP_MARGIN_S = 30.0

PendingHandler = Callable[[str, str, str], None]
"""Called with run, reason and message when a pod of the run cannot start."""


@dataclass(slots=True)
class _RunPods:
    pods: dict[str, list[str]] = field(default_factory=dict)
    """Workers by pod, for pods that are not gone."""
    reported: set[str] = field(default_factory=set)
    """Workers whose end was told."""
    obstacles: dict[str, pod_state.Obstacle] = field(default_factory=dict)
    """Why a pod does not run, by pod."""
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    """When a pod that does not run is given up, by pod."""
    grace_s: float = 30.0
    """Longest time that its pods take to end."""


class KubernetesLauncher:
    """Starts each run's workers as pods.

    Args:
        api: Creates and deletes pods.
        templates: Folder of the mounted worker templates, read whenever a run starts.
        owner: Owner reference of the pods.
        controller_address: ``host:port`` at which pods reach the controller.
        on_exit: Hears of workers that ended by themselves.
        on_pending: Hears of pods that cannot start.
        pending_timeout_s: A pod that cannot start for this long ends its workers.
    """

    def __init__(
        self,
        api: PodApi,
        templates: Path,
        *,
        owner: Mapping[str, str],
        controller_address: str,
        on_exit: ExitHandler,
        on_pending: PendingHandler,
        pending_timeout_s: float,
    ) -> None:
        self._api = api
        self._templates = templates
        self._owner = owner
        self._controller_address = controller_address
        self._on_exit = on_exit
        self._on_pending = on_pending
        self._pending_timeout_s = pending_timeout_s
        self._runs: dict[str, _RunPods] = {}
        self._changed = asyncio.Condition()

    async def start(self, run_id: str, spec: RunSpec) -> None:
        """Create those pods of a run that do not exist.

        Raises:
            FailedPreconditionError: If Kubernetes refuses one, with its explanation.
        """
        templates = await asyncio.to_thread(load_templates, self._templates)
        pods = build_pods(
            templates,
            run_id,
            spec,
            controller_address=self._controller_address,
            owner=self._owner,
        )
        run = self._runs.setdefault(run_id, _RunPods())
        run.grace_s = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods)
        loop = asyncio.get_running_loop()
        for pod in pods:
            name = pod["metadata"]["name"]
            if name in run.pods:
                continue
            run.reported.difference_update(pod_state.workers(pod))
            run.pods[name] = pod_state.workers(pod)
            run.timers[name] = loop.call_later(self._pending_timeout_s, self._give_up, run_id, name)
            await self._api.create(pod)

    async def end(self, run_id: str, worker_id: str) -> None:
        """Delete a worker's pod at once; returns when it is gone."""
        run = self._runs.get(run_id, _RunPods())
        ended = [name for name, workers in run.pods.items() if worker_id in workers]
        for name in ended:
            run.reported.update(run.pods[name])
            await self._delete(name, grace_s=0)
        async with asyncio.timeout(_STOP_MARGIN_S), self._changed:
            await self._changed.wait_for(lambda: not run.pods.keys() & set(ended))

    async def stop(self, run_id: str) -> None:
        """Delete all pods of a run and wait until they are gone; kill those that outlast their grace."""
        run = self._runs.get(run_id)
        if run is None:
            return
        for timer in run.timers.values():
            timer.cancel()
        run.reported.update(*run.pods.values())
        for name in list(run.pods):
            await self._delete(name)
        try:
            await self._until_gone(run, run.grace_s + _STOP_MARGIN_S)
        except TimeoutError:
            for name in list(run.pods):
                logger.warning("pod did not end and is killed", extra={"pod": name})
                await self._delete(name, grace_s=0)
            await self._until_gone(run, _STOP_MARGIN_S)
        finally:
            del self._runs[run_id]

    async def watch(self, seen: "asyncio.Queue[PodSeen]") -> None:
        """Take in what is seen of the pods until cancelled."""
        while True:
            await self._take_in(await seen.get())

    async def _take_in(self, seen: PodSeen) -> None:
        run_id = self._run_of(seen)
        run = self._runs.get(run_id) if run_id else None
        if run_id is None or run is None:
            await self._sweep(seen)
        elif seen.pod is None:
            await self._vanished(run_id, run, seen.name)
        elif seen.name in run.pods:
            self._note_start(run_id, run, seen.name, seen.pod)
            for end in pod_state.ended(seen.pod):
                self._report(run_id, run, end.worker_id, end.code, end.message)

    def _run_of(self, seen: PodSeen) -> str | None:
        """The run of a pod; one that is gone is known by its name only."""
        if seen.pod is not None:
            run_id: str = seen.pod["metadata"]["labels"][RUN_LABEL]
            return run_id
        return next((run_id for run_id, run in self._runs.items() if seen.name in run.pods), None)

    async def _sweep(self, seen: PodSeen) -> None:
        """Remove an ended pod of a run that an earlier controller process drove."""
        if seen.pod is None or seen.pod["status"].get("phase") not in ("Succeeded", "Failed"):
            return
        owners = seen.pod["metadata"].get("ownerReferences", [])
        if any(owner["uid"] == self._owner["uid"] for owner in owners):
            await self._delete(seen.name)

    async def _vanished(self, run_id: str, run: _RunPods, name: str) -> None:
        for worker_id in run.pods.pop(name):
            self._report(run_id, run, worker_id, -9, "its pod was deleted")
        run.obstacles.pop(name, None)
        if timer := run.timers.pop(name, None):
            timer.cancel()
        async with self._changed:
            self._changed.notify_all()

    def _note_start(self, run_id: str, run: _RunPods, name: str, pod: Mapping[str, Any]) -> None:
        """Keep what hinders a pod; tell it once per reason."""
        if pod_state.is_running(pod):
            run.obstacles.pop(name, None)
            if timer := run.timers.pop(name, None):
                timer.cancel()
            return
        found = pod_state.obstacle(pod)
        if found is None:
            return
        before = run.obstacles.get(name)
        run.obstacles[name] = found
        if before is None or before.reason != found.reason:
            self._on_pending(run_id, found.reason, f"pod {name}: {found.message}")
        if found.reason in pod_state.HOPELESS:
            self._give_up(run_id, name)

    def _give_up(self, run_id: str, name: str) -> None:
        run = self._runs.get(run_id)
        if run is None or name not in run.pods:
            return
        found = run.obstacles.get(name)
        why = f"{found.reason}: {found.message}" if found else "Kubernetes gave no reason"
        for worker_id in run.pods[name]:
            self._report(run_id, run, worker_id, 1, f"pod {name} could not start: {why}")

    def _report(self, run_id: str, run: _RunPods, worker_id: str, code: int, message: str) -> None:
        if worker_id not in run.reported:
            run.reported.add(worker_id)
            self._on_exit(
                WorkerExit(run_id=run_id, worker_id=worker_id, code=code, last_lines=message)
            )

    async def _until_gone(self, run: _RunPods, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: not run.pods)

    async def _delete(self, name: str, *, grace_s: int | None = None) -> None:
        if not await self._api.delete(name, grace_s=grace_s):
            for run in self._runs.values():
                run.pods.pop(name, None)
