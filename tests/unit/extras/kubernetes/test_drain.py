"""Tests of which nodes are drained, which workers leave them, and when the transferqueue does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import FailedPreconditionError, NotFoundError
from services.controller.run.lifecycle.drains import DrainedHost
from services.extras.kubernetes import drain
from services.extras.kubernetes.drain import NodeDrains, PlacedPod, QueueDrain, save_runs
from services.extras.kubernetes.pod_api import Seen

AUTOSCALER = "ToBeDeletedByClusterAutoscaler"
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def taint(key: str, **fields: str) -> dict[str, str]:
    return {"key": key, "effect": "NoSchedule", **fields}


def node(name: str = "node-1", **spec: Any) -> Seen:
    return Seen(name=name, body={"metadata": {"name": name}, "spec": spec})


class Clock:
    now = 10.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@dataclass
class NotifiedRuns:
    """Runs that get notices of drained nodes."""

    pods: list[PlacedPod] = field(default_factory=list)
    drained: list[tuple[str, DrainedHost, frozenset[str]]] = field(default_factory=list)
    in_service: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    def watch(self) -> NodeDrains:
        return NodeDrains(
            [AUTOSCALER],
            pods=lambda: self.pods,
            on_drained=lambda *notice: self.drained.append(notice),
            on_in_service=self.in_service.append,
            clock=self.clock,
        )

    def add(self, *workers: str, run_id: str = "run_1", on: str = "node-1", **other: Any) -> None:
        pod = PlacedPod(
            run_id=run_id,
            node=on,
            workers=frozenset(workers),
            tolerations=other.get("tolerations", [GPU]),
        )
        self.pods.append(pod)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"unschedulable": True}, "cordoned"),
        ({"taints": [taint(AUTOSCALER)]}, f"taint {AUTOSCALER}"),
        ({"unschedulable": True, "taints": [taint(AUTOSCALER)]}, "cordoned"),
        ({"taints": [taint("nvidia.com/gpu")]}, ""),
        ({}, ""),
    ],
)
def test_a_cordon_and_the_named_taints_drain_a_node(spec: dict[str, Any], reason: str) -> None:
    runs = NotifiedRuns()
    runs.add("trainer-0", "rollout-0")
    runs.add("rollout-1")
    runs.add("rollout-2", on="node-2")
    runs.add("trainer-0", run_id="run_2")
    runs.watch().process(node(**spec))
    if not reason:
        assert runs.drained == []
        return
    host = DrainedHost(name="node-1", reason=reason, since=10.0)
    leaving = frozenset({"trainer-0", "rollout-0", "rollout-1"})
    assert runs.drained == [
        ("run_1", host, leaving),
        ("run_2", host, frozenset({"trainer-0"})),
    ]


def test_the_time_of_a_drain_is_that_of_its_first_sight() -> None:
    runs = NotifiedRuns()
    runs.add("trainer-0")
    drains = runs.watch()
    for runs.clock.now in (1.0, 2.0):
        drains.process(node(unschedulable=True))
    assert [host.since for _, host, _ in runs.drained] == [1.0, 1.0]


def test_a_pod_that_is_placed_on_a_drained_node_leaves_it() -> None:
    runs = NotifiedRuns()
    drains = runs.watch()
    drains.process(node(unschedulable=True))
    runs.add("rollout-0")
    drains.notify("node-1")
    drains.notify("node-2")
    assert [workers for _, _, workers in runs.drained] == [{"rollout-0"}]


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        ({"operator": "Exists"}, True),
        ({"key": AUTOSCALER, "operator": "Exists"}, True),
        ({"key": AUTOSCALER, "operator": "Exists", "tolerationSeconds": 30}, False),
        ({"key": AUTOSCALER, "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": AUTOSCALER, "value": "1"}, True),
        ({"key": AUTOSCALER, "value": "2"}, False),
    ],
)
def test_pods_that_tolerate_the_taint_stay(toleration: dict[str, Any], stays: bool) -> None:
    runs = NotifiedRuns()
    runs.add("rollout-0", tolerations=[GPU, toleration])
    runs.watch().process(node(taints=[taint(AUTOSCALER, value="1")]))
    assert (runs.drained == []) is stays


@pytest.mark.parametrize("after", [node(), Seen(name="node-1", body=None)])
def test_a_node_that_is_uncordoned_or_gone_is_not_drained_any_more(after: Seen) -> None:
    runs = NotifiedRuns()
    drains = runs.watch()
    drains.process(node())
    drains.process(node(unschedulable=True))
    assert (drains.is_drained("node-1"), runs.in_service) == (True, [])
    drains.process(after)
    assert (drains.is_drained("node-1"), runs.in_service) == (False, ["node-1"])


@dataclass
class FakeApi:
    """Fake API of the transferqueue's namespace; records what it is asked for, in order."""

    changes: "asyncio.Queue[Seen]" = field(default_factory=asyncio.Queue)
    calls: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: int = 0
    evicts: bool = False

    def record(self, call: str) -> None:
        self.calls.append(call)
        self.changed.set()

    async def save(self) -> None:
        self.record("save")

    async def allow_eviction(self, name: str) -> None:
        self.record(f"allow {name}")
        if self.refusals:
            self.refusals -= 1
            raise FailedPreconditionError("no right to patch pods")
        if name == "gone-0":
            raise NotFoundError("pod gone-0 does not exist")
        if self.evicts:
            self.changes.put_nowait(Seen(name=name, body=None))

    async def delete(self, name: str) -> bool:
        self.record(f"delete {name}")
        self.changes.put_nowait(Seen(name=name, body=None))
        return True

    def place(self, name: str, on: str, uid: str = "u1") -> None:
        body = {"metadata": {"name": name, "uid": uid}, "spec": {"nodeName": on}}
        self.changes.put_nowait(Seen(name=name, body=body))

    async def until(self, *calls: str) -> None:
        async with asyncio.timeout(5):
            while self.calls != [*calls]:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def leaving(api: FakeApi) -> AsyncIterator[NodeDrains]:
    drains = NotifiedRuns().watch()
    queue = QueueDrain(api, drains, save=api.save)  # type: ignore[arg-type]
    drains.on_changed = queue.notify
    watching = asyncio.ensure_future(queue.watch(api.changes))
    try:
        yield drains
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("evicts", [True, False])
async def test_the_transferqueue_leaves_after_runs_have_saved_checkpoints(
    monkeypatch: pytest.MonkeyPatch, evicts: bool
) -> None:
    monkeypatch.setattr(drain, "EVICTION_S", 0.01)
    api = FakeApi(evicts=evicts)
    async with leaving(api) as drains:
        api.place("queue-0", "node-1")
        api.place("shard-0", "node-2")
        drains.process(node(unschedulable=True))
        deleted = [] if evicts else ["delete queue-0"]
        await api.until("save", "allow queue-0", *deleted)
        # Its replacement is on another node, and the next listing shows both pods again.
        api.place("queue-0", "node-2", uid="u2")
        api.place("shard-0", "node-2")
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(api.calls) == 2 + len(deleted)


async def test_a_refused_release_is_tried_again_with_the_next_listing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "EVICTION_S", 0.01)
    api = FakeApi(refusals=1)
    async with leaving(api) as drains:
        api.place("queue-0", "node-1")
        drains.process(node(unschedulable=True))
        await api.until("save", "allow queue-0")
        api.place("queue-0", "node-1")
        await api.until("save", "allow queue-0", "save", "allow queue-0", "delete queue-0")


async def test_a_run_that_is_deleted_meanwhile_keeps_no_other_from_its_checkpoint() -> None:
    run_ids: list[str] = []

    async def get(run_id: str) -> SimpleNamespace:
        run_ids.append(run_id)
        if run_id == "run_1":
            raise NotFoundError("run 'run_1' does not exist")
        return SimpleNamespace(state="PAUSED", step=1)

    drivers = SimpleNamespace(driven_runs=lambda: ["run_1", "run_2"])
    manager: Any = SimpleNamespace(get=get, drivers=drivers)
    await save_runs(manager)
    assert run_ids == ["run_1", "run_2"]
