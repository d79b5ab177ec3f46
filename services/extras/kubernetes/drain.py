"""Nodes that are drained: workers and the transferqueue leave them before they are evicted.

::

    a node is cordoned, or a taint   -> the runs with pods there get a notice each minute; they call
    announces its end                   ``release``
    a pod has nothing to lose        -> its label lets evictions through; the launcher deletes what no client
                                        evicts
    a pod of the transferqueue is    -> each run that trains saves a checkpoint before it leaves
    on such a node
    the node is in service again     -> workers that have not left stay

The chart's disruption budgets cover each pod without that label, so ``kubectl drain`` waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from services.common.errors import NotFoundError, ServiceError
from services.common.host import Clock
from services.common.task_group import TaskGroup
from services.controller.manager.runs import RunManager
from services.controller.rules.run_state import RunState
from services.controller.run.lifecycle.drains import DrainedHost
from services.controller.store.runs import InvalidTransitionError
from services.extras.kubernetes.pod_api import PodApi, Seen

logger = logging.getLogger(__name__)

EVICTION_S: Final = 8.0
"""Seconds for which a released pod waits for its eviction: ``kubectl drain`` repeats it every 5 s."""
_SAVE_S: Final = 120.0
"""Max seconds that the transferqueue's pod waits for checkpoints."""
_CORDON: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_NEWEST: Final = 1 << 62
_SETTLED: Final = frozenset({"CheckpointSaved", "CheckpointFailed", "StateChanged"})

Json = Mapping[str, Any]

DrainHandler = Callable[[str, DrainedHost, frozenset[str]], None]
"""Called with a run, a drained node, and the run's workers that have a pod there."""


@dataclass(frozen=True, slots=True)
class _Drain:
    host: DrainedHost
    taints: Sequence[Json]
    """Taints that announce the end of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPod:
    """Pod of a run on a node."""

    run_id: str
    node: str
    workers: frozenset[str]
    """Workers that end with the pod."""
    tolerations: Sequence[Json]


class NodeDrains:
    """Notifies runs of their workers on drained nodes.

    Args:
        taints: Keys of taints that announce the end of a node, besides a cordon.
        pods: Returns the pods of all runs that are on nodes.
        on_drained: Called for each run with pods on a drained node; repeated with each change of the
            node or of such a pod, and with each listing of them.
        on_in_service: Called with a node that is not drained any more.
    """

    def __init__(
        self,
        taints: Iterable[str],
        *,
        pods: Callable[[], Iterable[PlacedPod]],
        on_drained: DrainHandler,
        on_in_service: Callable[[str], None],
        clock: Clock = time,
    ) -> None:
        self._keys = frozenset(taints)
        self._pods = pods
        self._on_drained = on_drained
        self._on_in_service = on_in_service
        self._clock = clock
        self._drains: dict[str, _Drain] = {}
        self.on_changed: Callable[[], None] = lambda: None
        """Called after each change of a node."""

    def is_drained(self, node: str) -> bool:
        return node in self._drains

    async def watch(self, changes: "asyncio.Queue[Seen]") -> None:
        """Processes changes of nodes until cancelled."""
        while True:
            self.process(await changes.get())

    def process(self, change: Seen) -> None:
        """Processes one change of a node."""
        taints = [] if change.body is None else self._ending_taints(change.body)
        if taints:
            earlier = self._drains.get(change.name)
            since = self._clock.time() if earlier is None else earlier.host.since
            reason = "cordoned" if taints[0] is _CORDON else f"taint {taints[0]['key']}"
            host = DrainedHost(name=change.name, reason=reason, since=since)
            self._drains[change.name] = _Drain(host, taints)
            self.notify(change.name)
        elif self._drains.pop(change.name, None) is not None:
            self._on_in_service(change.name)
        self.on_changed()

    def notify(self, node: str) -> None:
        """Notifies each run with pods on a node, if the node is drained."""
        drain = self._drains.get(node)
        if drain is None:
            return
        leaving: dict[str, frozenset[str]] = {}
        for pod in self._pods():
            if pod.node == node and not _stays(pod, drain.taints):
                leaving[pod.run_id] = leaving.get(pod.run_id, frozenset()) | pod.workers
        for run_id, worker_ids in leaving.items():
            self._on_drained(run_id, drain.host, worker_ids)

    def _ending_taints(self, node: Json) -> list[Json]:
        spec = node.get("spec", {})
        taints = [taint for taint in spec.get("taints") or () if taint["key"] in self._keys]
        return [_CORDON, *taints] if spec.get("unschedulable") else taints


def _stays(pod: PlacedPod, taints: Sequence[Json]) -> bool:
    """Returns True if a pod tolerates the end of its node, as pods of a daemon do."""
    return all(
        any(_tolerates(toleration, taint) for toleration in pod.tolerations) for taint in taints
    )


def _tolerates(toleration: Json, taint: Json) -> bool:
    """Returns True if a toleration matches a taint, by the rules of the scheduler.

    Tolerations of a limited time do not count, because their pods are evicted afterwards.
    """
    if toleration.get("tolerationSeconds") is not None:
        return False
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    is_equal = toleration.get("value", "") == taint.get("value", "")
    return is_equal and bool(toleration.get("key") == taint["key"])


class QueueDrain:
    """Lets pods of the transferqueue leave drained nodes; their StatefulSets create them elsewhere.

    Samples that no snapshot holds are generated again, so each run that trains saves a checkpoint, with a
    snapshot, before.

    Args:
        api: Of the transferqueue's namespace.
        save: Saves a checkpoint of each run that trains.
    """

    def __init__(
        self, api: PodApi, drains: NodeDrains, *, save: Callable[[], Awaitable[None]]
    ) -> None:
        self._api = api
        self._drains = drains
        self._save = save
        self._nodes: dict[str, tuple[str, str]] = {}
        self._leaving: set[str] = set()
        """Unique ids of pods that leave."""
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes the watch after a node has changed."""
        self._changed.set()

    async def watch(self, changes: "asyncio.Queue[Seen]") -> None:
        """Follows the pods until cancelled."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._follow(changes))
            tasks.create_task(self._release_drained())

    async def _follow(self, changes: "asyncio.Queue[Seen]") -> None:
        while True:
            change = await changes.get()
            if change.body is None:
                self._nodes.pop(change.name, None)
            else:
                node = change.body["spec"].get("nodeName", "")
                self._nodes[change.name] = (change.body["metadata"]["uid"], node)
            self._changed.set()

    async def _release_drained(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            drained = {
                name: uid
                for name, (uid, node) in self._nodes.items()
                if self._drains.is_drained(node) and uid not in self._leaving
            }
            if not drained:
                continue
            self._leaving |= set(drained.values())
            logger.info("the transferqueue leaves drained nodes", extra={"pods": sorted(drained)})
            await self._save()
            try:
                for name, uid in sorted(drained.items()):
                    await self._release(name, uid)
                self._changed.set()  # others may have been drained meanwhile
            except ServiceError as error:  # tried again after the next change, or listing of pods
                self._leaving -= set(drained.values())
                why = {"pods": sorted(drained), "error": str(error)}
                logger.warning("the transferqueue cannot leave drained nodes", extra=why)

    async def _release(self, name: str, uid: str) -> None:
        def is_there() -> bool:
            return self._nodes.get(name, ("", ""))[0] == uid

        with suppress(NotFoundError):
            await self._api.allow_eviction(name)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVICTION_S):
                    while is_there():
                        self._changed.clear()
                        await self._changed.wait()
            if is_there():
                await self._api.delete(name)


async def save_runs(manager: RunManager, *, timeout_s: float = _SAVE_S) -> None:
    """Saves a checkpoint of each run that trains; returns after the deadline at the latest."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), TaskGroup() as tasks:
            for run_id in manager.drivers.driven_runs():
                tasks.create_task(_save_run(manager, run_id))


async def _save_run(manager: RunManager, run_id: str) -> None:
    with suppress(InvalidTransitionError, NotFoundError):  # it has ended, or is deleted, meanwhile
        run = await manager.get(run_id)
        if run.state is not RunState.RUNNING or run.step == 0:
            return
        events = manager.feed.watch(run_id, _NEWEST)
        await anext(events)  # from here on, it delivers every event
        await manager.drivers.running(run).save()
        async for batch in events:
            if any(event.type in _SETTLED for event in batch):
                return
