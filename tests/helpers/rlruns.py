"""Fake API server with RLRun objects in memory: lists, watches, patches and deletes them like Kubernetes."""

import copy
import itertools
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

from kubernetes.client import ApiException


class _Stream:
    """Response of a watch; stays open until ``close`` is called."""

    def __init__(self, events: "queue.Queue[dict[str, Any] | None]") -> None:
        self._events = events

    def stream(self, **_: Any) -> Iterator[bytes]:
        while (event := self._events.get()) is not None:
            yield json.dumps(event).encode() + b"\n"

    def close(self) -> None:
        self._events.put(None)

    release_conn = close


class FakeRLRuns:
    """Implements the methods of ``CustomObjectsApi`` and ``CoreV1Api`` that RLRuns need."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []
        """Object, reason and message of each event."""
        self.warnings: list[str] = []
        """Reasons of the events of type Warning."""
        self.status_writes: dict[str, int] = {}
        self.error: ApiException | None = None
        """Error that every call raises, if set."""
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._versions = itertools.count(1)
        self._watches: list[tuple[str, queue.Queue[dict[str, Any] | None]]] = []

    # Calls of users.

    def apply(self, namespace: str, name: str, spec: dict[str, Any]) -> None:
        """Creates an object or replaces its spec."""
        with self._lock:
            existing = self._objects.get((namespace, name))
            if existing is None:
                number = next(self._versions)
                metadata = {
                    "namespace": namespace,
                    "name": name,
                    "uid": f"00000000-0000-0000-0000-{number:012}",
                    "generation": 1,
                }
                self._store({"metadata": metadata, "spec": copy.deepcopy(spec)}, "ADDED")
            elif existing["spec"] != spec:
                existing["spec"] = copy.deepcopy(spec)
                existing["metadata"]["generation"] += 1
                self._store(existing, "MODIFIED")

    def delete(self, namespace: str, name: str) -> None:
        """Deletes an object, at once unless it has finalizers."""
        with self._lock:
            body = self._objects[namespace, name]
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            body["metadata"]["generation"] += 1
            self._store(body, "MODIFIED")
            self._collect(body)

    def get(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns a copy of an object; None if it does not exist."""
        with self._lock:
            return copy.deepcopy(self._objects.get((namespace, name)))

    def drop_status(self, namespace: str, name: str) -> None:
        """Removes the status, as a restored backup of the cluster does."""
        with self._lock:
            self._objects[namespace, name].pop("status", None)

    # Calls of the controller.

    def list_namespaced_custom_object(
        self, _group: str, _version: str, namespace: str, _plural: str, **options: Any
    ) -> Any:
        """Lists or watches objects.

        :return: object
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            if options.get("watch"):
                events: queue.Queue[dict[str, Any] | None] = queue.Queue()
                self._watches.append((namespace, events))
                # A watch begins with all objects, so that each change since the list arrives at least once.
                for (where, _), body in self._objects.items():
                    if where == namespace:
                        events.put({"type": "MODIFIED", "object": copy.deepcopy(body)})
                return _Stream(events)
            bodies = [body for (where, _), body in self._objects.items() if where == namespace]
            version = str(next(self._versions))
            return {"items": copy.deepcopy(bodies), "metadata": {"resourceVersion": version}}

    def patch_namespaced_custom_object(self, *path: Any, **_: Any) -> dict[str, Any]:
        _, _, namespace, _, name, patch = path
        with self._lock:
            body = self._find(namespace, name)
            metadata = dict(patch["metadata"])
            if metadata.pop("resourceVersion") != body["metadata"]["resourceVersion"]:
                raise ApiException(status=409, reason="Conflict")
            body["metadata"] |= metadata
            self._store(body, "MODIFIED")
            self._collect(body)
            return copy.deepcopy(body)

    def patch_namespaced_custom_object_status(self, *path: Any, **_: Any) -> None:
        _, _, namespace, _, name, patch = path
        with self._lock:
            body = self._find(namespace, name)
            merged = {**body.get("status", {}), **patch["status"]}
            body["status"] = {key: value for key, value in merged.items() if value is not None}
            self.status_writes[name] = self.status_writes.get(name, 0) + 1
            self._store(body, "MODIFIED")

    def delete_namespaced_custom_object(self, *path: Any, body: Any, **_: Any) -> None:
        _, _, namespace, _, name = path
        assert body["preconditions"]["uid"] == self._find(namespace, name)["metadata"]["uid"]
        self.delete(namespace, name)

    def annotate(self, namespace: str, name: str, key: str, value: str) -> None:
        """Sets an annotation, as a user does."""
        with self._lock:
            body = self._objects[namespace, name]
            body["metadata"].setdefault("annotations", {})[key] = value
            self._store(body, "MODIFIED")

    def create_namespaced_event(self, _namespace: str, body: dict[str, Any], **_: Any) -> None:
        with self._lock:
            self.events.append((body["involvedObject"]["name"], body["reason"], body["message"]))
            if body["type"] == "Warning":
                self.warnings.append(body["reason"])

    def _find(self, namespace: str, name: str) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if (namespace, name) not in self._objects:
            raise ApiException(status=404)
        return self._objects[namespace, name]

    def _store(self, body: dict[str, Any], kind: str) -> None:
        metadata = body["metadata"]
        metadata["resourceVersion"] = str(next(self._versions))
        self._objects[metadata["namespace"], metadata["name"]] = body
        self._notify(kind, body)

    def _collect(self, body: dict[str, Any]) -> None:
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            del self._objects[metadata["namespace"], metadata["name"]]
            self._notify("DELETED", body)

    def _notify(self, kind: str, body: dict[str, Any]) -> None:
        for namespace, events in self._watches:
            if namespace == body["metadata"]["namespace"]:
                events.put({"type": kind, "object": copy.deepcopy(body)})
