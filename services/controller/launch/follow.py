"""Watches objects of a Kubernetes namespace in a thread, because the client blocks."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kubernetes import watch
from kubernetes.client import ApiClient, ApiException
from urllib3.exceptions import HTTPError

logger = logging.getLogger(__name__)

# Each period ends with a fresh list, which corrects changes that the stream missed.
_PERIOD_S = 60
_RETRY_S = 1.0
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Observed state of an object."""

    name: str
    body: Mapping[str, Any] | None
    """State of the object; None after its deletion."""
    last: Mapping[str, Any] | None = None
    """Last state of a deleted object; None if the deletion was not observed."""


@asynccontextmanager
async def follow(listing: Callable[..., Any]) -> AsyncIterator["asyncio.Queue[Seen]"]:
    """Puts every change of some objects into a queue until the block ends.

    Args:
        listing: List method of the client, with its arguments bound.
    """
    seen: asyncio.Queue[Seen] = asyncio.Queue()
    follower = _Follower(listing, seen, asyncio.get_running_loop())
    # A daemon, because it may be blocked in a read that only the API server ends.
    threading.Thread(target=follower.run, name="kubernetes-watch", daemon=True).start()
    try:
        yield seen
    finally:
        follower.stop()


class _Follower:
    def __init__(
        self,
        listing: Callable[..., Any],
        seen: "asyncio.Queue[Seen]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listing = listing
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
        """Reports all objects and the deletions that were missed; returns the version to watch from."""
        listed = self._listing(_request_timeout=_TIMEOUT_S)
        found = ApiClient().sanitize_for_serialization(listed)
        bodies = {body["metadata"]["name"]: body for body in found["items"]}
        for name in self._known - set(bodies):
            self._report(Seen(name=name, body=None))
        for name, body in bodies.items():
            self._report(Seen(name=name, body=body))
        self._known = set(bodies)
        return str(found["metadata"]["resourceVersion"])

    def _stream(self, version: str) -> None:
        events = watch.Watch().stream(
            self._listing,
            resource_version=version,
            timeout_seconds=_PERIOD_S,
            _request_timeout=(_TIMEOUT_S, _PERIOD_S + _TIMEOUT_S),
        )
        for event in events:
            if self._stopped.is_set():
                return
            body = event["raw_object"]
            name = body["metadata"]["name"]
            if event["type"] == "DELETED":
                self._known.discard(name)
                self._report(Seen(name=name, body=None, last=body))
            else:
                self._known.add(name)
                self._report(Seen(name=name, body=body))

    def _report(self, seen: Seen) -> None:
        if not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._seen.put_nowait, seen)
