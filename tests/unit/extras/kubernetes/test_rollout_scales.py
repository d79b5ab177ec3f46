"""RolloutScale objects: status, and requested sizes."""

import asyncio
from typing import Any

from kubernetes.client import ApiException

from services.common.errors import AbortedError
from services.extras.kubernetes.pod_api import Seen
from services.extras.kubernetes.scale import RolloutScales

RUN, NAME = "run_01", "run-01"


class FakeApi:
    """Fake Kubernetes API for objects with the status subresource."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.error: ApiException | None = None

    def create_namespaced_custom_object(self, *path: Any, **_: Any) -> None:
        self._check()
        body = dict(path[-1])
        self.objects[body["metadata"]["name"]] = body

    def patch_namespaced_custom_object(self, *path: Any, **_: Any) -> None:
        self._change("spec", *path[-2:])

    def patch_namespaced_custom_object_status(self, *path: Any, **_: Any) -> None:
        self._change("status", *path[-2:])

    def delete_namespaced_custom_object(self, *path: Any, **_: Any) -> None:
        self._check()
        if self.objects.pop(path[-1], None) is None:
            raise ApiException(status=404)

    def _change(self, section: str, name: str, changes: dict[str, Any]) -> None:
        self._check()
        if name not in self.objects:
            raise ApiException(status=404)
        self.objects[name][section] = {**self.objects[name].get(section, {}), **changes[section]}

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


class Harness:
    """RolloutScales on a fake API, with a record of the sizes that they requested from runs."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.api, self.requests = FakeApi(), list[tuple[str, int]]()
        self.refuses = refuses
        self.scales = RolloutScales(
            self.api,  # type: ignore[arg-type]
            "train",
            owner={"uid": "u1"},
            on_scale=self._take,
        )

    async def _take(self, run_id: str, replicas: int) -> None:
        self.requests.append((run_id, replicas))
        if self.refuses:
            raise AbortedError("the run has changed meanwhile")

    async def see(self) -> None:
        """Waits until the watch has processed the current objects."""
        queue: asyncio.Queue[Seen] = asyncio.Queue()
        for name, body in self.api.objects.items():
            queue.put_nowait(Seen(name=name, body=body))
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.scales.watch(queue))
            for _ in range(queue.qsize() + 3):
                await asyncio.sleep(0)
            watching.cancel()

    def replicas(self) -> tuple[int, int]:
        """Returns the requested and the reported number of replicas."""
        scale = self.api.objects[NAME]
        return scale["spec"]["replicas"], scale["status"]["replicas"]


async def test_a_run_shows_its_rollouts_and_how_to_find_their_pods() -> None:
    harness = Harness()
    await harness.scales.write_replicas(RUN, 2)
    await harness.see()
    scale = harness.api.objects[NAME]
    assert harness.replicas() == (2, 2)
    assert scale["metadata"]["ownerReferences"] == [{"uid": "u1"}]
    assert scale["status"]["selector"] == (
        "slipstream.dev/run=run_01,app.kubernetes.io/component=rollout"
    )
    assert harness.requests == []
    await harness.scales.remove(RUN)
    await harness.scales.remove(RUN)
    assert harness.api.objects == {}


async def test_what_an_autoscaler_asks_for_reaches_the_run_once() -> None:
    harness = Harness()
    await harness.scales.write_replicas(RUN, 2)
    harness.api.objects[NAME]["spec"]["replicas"] = 4
    await harness.see()
    await harness.see()
    assert harness.requests == [(RUN, 4)]
    await harness.scales.write_replicas(RUN, 4)
    await harness.see()
    assert harness.replicas() == (4, 4)
    assert harness.requests == [(RUN, 4)]


async def test_a_later_wish_outlasts_the_change_under_way() -> None:
    harness = Harness()
    await harness.scales.write_replicas(RUN, 2)
    for wish in (4, 6):
        harness.api.objects[NAME]["spec"]["replicas"] = wish
        await harness.see()
    await harness.scales.write_replicas(RUN, 4)
    assert harness.replicas() == (6, 4)
    assert harness.requests == [(RUN, 4), (RUN, 6)]


async def test_a_refused_wish_is_tried_again() -> None:
    harness = Harness(refuses=True)
    await harness.scales.write_replicas(RUN, 2)
    harness.api.objects[NAME]["spec"]["replicas"] = 4
    await harness.see()
    await harness.see()
    assert harness.requests == [(RUN, 4), (RUN, 4)]


async def test_a_change_of_the_run_itself_is_shown_and_not_undone() -> None:
    harness = Harness()
    await harness.scales.write_replicas(RUN, 2)
    await harness.scales.write_replicas(RUN, 3)
    await harness.see()
    assert harness.replicas() == (3, 3)
    assert harness.requests == []


async def test_training_does_not_wait_for_an_api_in_trouble() -> None:
    harness = Harness()
    harness.api.error = ApiException(status=503)
    await harness.scales.write_replicas(RUN, 2)
    await harness.scales.remove(RUN)
    assert harness.api.objects == {}
