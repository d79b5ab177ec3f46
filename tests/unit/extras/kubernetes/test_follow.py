"""Watches of Kubernetes objects that are added, changed and deleted."""

import asyncio
import json
from typing import Any

from kubernetes.client import V1ListMeta, V1ObjectMeta, V1Pod, V1PodList

from services.extras.kubernetes.pod_api import Seen, follow


class Answer:
    """Fake watch response that yields the given events."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self._events = events

    def stream(self, **options: Any) -> Any:
        for event in self._events:
            yield json.dumps(event).encode() + b"\n"

    def close(self) -> None:
        """Does nothing."""

    release_conn = close


def pod(phase: str) -> dict[str, Any]:
    return {"metadata": {"name": "rollout-0", "resourceVersion": "2"}, "status": {"phase": phase}}


async def test_what_is_gone_is_shown_as_it_was_in_the_end() -> None:
    def listing(*, watch: bool = False, **options: Any) -> Any:
        if watch:
            return Answer(
                {"type": "MODIFIED", "object": pod("Running")},
                {"type": "DELETED", "object": pod("Succeeded")},
            )
        pods = [V1Pod(metadata=V1ObjectMeta(name="rollout-0"))]
        return V1PodList(items=pods, metadata=V1ListMeta(resource_version="1"))

    listing.__doc__ = ":return: V1PodList"
    async with follow(listing) as changes, asyncio.timeout(10):
        assert (await changes.get()).body is not None
        assert await changes.get() == Seen(name="rollout-0", body=pod("Running"))
        assert await changes.get() == Seen(name="rollout-0", body=None, last=pod("Succeeded"))
