"""Follows the worker pods of a namespace: the Kubernetes client blocks, so it runs in a thread."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kubernetes import watch
from kubernetes.client import ApiException, CoreV1Api
from urllib3.exceptions import HTTPError

logger = logging.getLogger(__name__)

# Every period ends with a fresh list, which heals whatever the stream missed.
_PERIOD_S = 60
_RETRY_S = 1.0
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """A pod as the API server knows it; ``pod`` is None once it is gone."""

    name: str
    pod: Mapping[str, Any] | None


@asynccontextmanager
async def follow_pods(
    core: CoreV1Api, namespace: str, selector: str
) -> AsyncIterator["asyncio.Queue[PodSeen]"]:
    """Put every change of the selected pods into a queue until the block ends."""
    seen: asyncio.Queue[PodSeen] = asyncio.Queue()
    follower = _Follower(core, namespace, selector, seen, asyncio.get_running_loop())
    # A daemon, because it may be inside a read that only the API server ends.
    threading.Thread(target=follower.run, name="pod-watch", daemon=True).start()
    try:
        yield seen
    finally:
        follower.stop()


class _Follower:
    def __init__(
        self,
        core: CoreV1Api,
        namespace: str,
        selector: str,
        seen: "asyncio.Queue[PodSeen]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._core = core
        self._namespace = namespace
        self._selector = selector
        self._seen = seen
        self._loop = loop
        self._stopped = threading.Event()
        self._known: set[str] = set()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._stream(self._list())
            except (ApiException, HTTPError) as error:
                logger.warning("the Kubernetes API does not answer", extra={"error": str(error)})
                self._stopped.wait(_RETRY_S)

    def _list(self) -> str:
        """Report all pods, and those that went unseen; returns the version to watch from."""
        listed = self._core.list_namespaced_pod(
            self._namespace, label_selector=self._selector, _request_timeout=_TIMEOUT_S
        )
        found = self._core.api_client.sanitize_for_serialization(listed)
        pods = {pod["metadata"]["name"]: pod for pod in found["items"]}
        for name in self._known - set(pods):
            self._tell(name, None)
        for name, pod in pods.items():
            self._tell(name, pod)
        self._known = set(pods)
        return str(found["metadata"]["resourceVersion"])

    def _stream(self, version: str) -> None:
        events = watch.Watch().stream(
            self._core.list_namespaced_pod,
            self._namespace,
            label_selector=self._selector,
            resource_version=version,
            timeout_seconds=_PERIOD_S,
            _request_timeout=(_TIMEOUT_S, _PERIOD_S + _TIMEOUT_S),
        )
        for event in events:
            if self._stopped.is_set():
                return
            pod = event["raw_object"]
            name = pod["metadata"]["name"]
            is_gone = event["type"] == "DELETED"
            if is_gone:
                self._known.discard(name)
            else:
                self._known.add(name)
            self._tell(name, None if is_gone else pod)

    def _tell(self, name: str, pod: Mapping[str, Any] | None) -> None:
        if not self._stopped.is_set():
            seen = PodSeen(name=name, pod=pod)
            self._loop.call_soon_threadsafe(self._seen.put_nowait, seen)
