"""Calls to the Kubernetes API, off the event loop, with a deadline and readable errors."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from kubernetes import watch
from kubernetes.client import (
    ApiClient,
    ApiException,
    CoreV1Api,
    CustomObjectsApi,
    NetworkingV1Api,
    V1NetworkPolicy,
    V1Pod,
    V1Secret,
)
from urllib3.exceptions import HTTPError

from services.common.errors import FailedPreconditionError, NotFoundError, UnavailableError
from services.extras.kubernetes import gang, job_set

_TIMEOUT_S = 10
# A deleted JobSet disappears only after its pods, which have ended before.
_GONE_S = 20
_PERIOD_S = 0.5

_MERGE = "application/merge-patch+json"
EVICTABLE_LABEL = "slipstream.dev/evictable"
"""Label of pods that the chart's disruption budgets do not cover, because they have nothing to lose."""
_EVICTABLE = {"metadata": {"labels": {EVICTABLE_LABEL: "true"}}}
_JOB_SETS = {"group": job_set.GROUP, "version": job_set.VERSION, "plural": job_set.PLURAL}


class PodApi:
    """Creates, lists and deletes a namespace's pods, JobSets, secrets and NetworkPolicies.

    All methods raise the errors of :func:`call_kubernetes`.

    Args:
        has_policies: True if NetworkPolicies isolate pods; otherwise none is written.
    """

    def __init__(self, core: CoreV1Api, namespace: str, *, has_policies: bool = False) -> None:
        self._core = core
        self._custom = CustomObjectsApi(core.api_client)
        self._has_policies = has_policies
        self._networking = NetworkingV1Api(core.api_client)
        self._namespace = namespace

    async def create(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Creates a pod; returns it as Kubernetes and its webhooks completed it."""
        created = await call_kubernetes(
            f"pod {pod['metadata']['name']}",
            self._core.create_namespaced_pod,
            self._namespace,
            cast("V1Pod", dict(pod)),
        )
        body: dict[str, Any] = self._core.api_client.sanitize_for_serialization(created)
        return body

    async def list(self, selector: str) -> list[dict[str, Any]]:
        response = await call_kubernetes(
            "list of pods",
            self._core.list_namespaced_pod,
            self._namespace,
            label_selector=selector,
        )
        pods: list[dict[str, Any]] = self._core.api_client.sanitize_for_serialization(response)[
            "items"
        ]
        return pods

    async def delete(
        self, name: str, *, grace_s: int | None = None, is_queued: bool = False
    ) -> bool:
        """Deletes a pod; returns True if it existed.

        Args:
            grace_s: Grace period in seconds; None means the pod's own.
            is_queued: True if a queue would keep the pod.
        """
        is_there = await delete(
            f"pod {name}",
            self._core.delete_namespaced_pod,
            name,
            self._namespace,
            grace_period_seconds=grace_s,
        )
        if is_there and is_queued:
            with suppress(NotFoundError):
                await call_kubernetes(
                    f"removal of pod {name} from its queue",
                    self._core.patch_namespaced_pod,
                    name,
                    self._namespace,
                    gang.KUEUE_LEAVE,
                )
        return is_there

    async def allow_eviction(self, name: str) -> None:
        """Lets evictions of a pod through, which disruption budgets refused."""
        patch = self._core.patch_namespaced_pod
        await call_kubernetes(f"label of pod {name}", patch, name, self._namespace, _EVICTABLE)

    async def create_job_set(self, body: Mapping[str, Any]) -> None:
        """Creates a JobSet and replaces one of the same name.

        Raises:
            FailedPreconditionError: Also if the cluster does not support JobSets.
            UnavailableError: Also if the former one does not disappear.
        """
        name = body["metadata"]["name"]
        try:
            async with asyncio.timeout(_GONE_S):
                while await self.delete_job_set(name):  # noqa: ASYNC110  only Kubernetes could tell
                    await asyncio.sleep(_PERIOD_S)
        except TimeoutError as error:
            message = f"JobSet {name} still exists {_GONE_S} s after its deletion"
            raise UnavailableError(message) from error
        try:
            await call_kubernetes(
                f"JobSet {name}",
                self._custom.create_namespaced_custom_object,
                **_JOB_SETS,
                namespace=self._namespace,
                body=dict(body),
            )
        except NotFoundError as error:
            raise FailedPreconditionError(
                "the cluster does not support JobSets; install their controller "
                "(https://jobset.sigs.k8s.io), or set workers.jobSet.enabled=false to use plain pods"
            ) from error

    async def delete_job_set(self, name: str) -> bool:
        """Deletes a JobSet, which disappears after its pods; returns True if it existed."""
        return await delete(
            f"JobSet {name}",
            self._custom.delete_namespaced_custom_object,
            **_JOB_SETS,
            namespace=self._namespace,
            name=name,
            propagation_policy="Foreground",
        )

    async def put_policy(self, policy: Mapping[str, Any]) -> None:
        """Writes a NetworkPolicy and replaces one of the same name."""
        if not self._has_policies:
            return
        name = policy["metadata"]["name"]
        await self.delete_policy(name)
        await call_kubernetes(
            f"NetworkPolicy {name}",
            self._networking.create_namespaced_network_policy,
            self._namespace,
            cast("V1NetworkPolicy", dict(policy)),
        )

    async def put_pod_group(self, body: Mapping[str, Any]) -> None:
        """Creates a pod group, or changes the one of the same name.

        Raises:
            FailedPreconditionError: Also if the cluster has no such pod groups.
        """
        name, location = body["metadata"]["name"], self._pod_groups(body)
        subject = f"{body['apiVersion']} PodGroup {name}"
        patch, create = (
            self._custom.patch_namespaced_custom_object,
            self._custom.create_namespaced_custom_object,
        )
        try:
            change = {"spec": body["spec"]}
            await call_kubernetes(subject, patch, *location, name, change, _content_type=_MERGE)
        except NotFoundError:
            try:
                await call_kubernetes(subject, create, *location, dict(body))
            except NotFoundError as error:
                raise FailedPreconditionError(
                    f"the cluster has no pod groups of {body['apiVersion']}, which workers.gang.scheduler "
                    "needs; install the scheduler, or set workers.gang.scheduler to ''"
                ) from error

    async def delete_pod_group(self, body: Mapping[str, Any]) -> None:
        """Deletes the pod group with the name and the kind of a manifest, if it exists."""
        method, name = self._custom.delete_namespaced_custom_object, body["metadata"]["name"]
        await delete(f"PodGroup {name}", method, *self._pod_groups(body), name)

    def _pod_groups(self, body: Mapping[str, Any]) -> tuple[str, str, str, str]:
        group, _, version = body["apiVersion"].partition("/")
        return group, version, self._namespace, gang.PLURAL

    async def delete_policy(self, name: str) -> None:
        if self._has_policies:
            method = self._networking.delete_namespaced_network_policy
            await delete(f"NetworkPolicy {name}", method, name, self._namespace)

    async def put_secret(self, secret: Mapping[str, Any]) -> None:
        """Writes a secret and replaces one of the same name."""
        name = secret["metadata"]["name"]
        # Deletes the former one first, because replacing it would need permission to change secrets.
        await self.delete_secret(name)
        await call_kubernetes(
            f"secret {name}",
            self._core.create_namespaced_secret,
            self._namespace,
            cast("V1Secret", dict(secret)),
        )

    async def delete_secret(self, name: str) -> None:
        method = self._core.delete_namespaced_secret
        await delete(f"secret {name}", method, name, self._namespace)


async def call_kubernetes(
    subject: str, method: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Calls a method of the Kubernetes client off the event loop.

    Raises:
        NotFoundError: If the object does not exist.
        FailedPreconditionError: If Kubernetes refuses; the message has its explanation.
        UnavailableError: If it does not answer, or answers with status 429 or 5xx.
    """
    try:
        return await asyncio.to_thread(method, *arguments, _request_timeout=_TIMEOUT_S, **options)
    except ApiException as error:
        if error.status == 404:
            raise NotFoundError(f"{subject} does not exist") from error
        message = f"Kubernetes refused {subject}: {_explanation(error)}"
        if error.status == 429 or (error.status or 0) >= 500:
            raise UnavailableError(message) from error
        raise FailedPreconditionError(message) from error
    except HTTPError as error:
        raise UnavailableError(f"the Kubernetes API does not answer: {error}") from error


async def delete(subject: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    """Deletes an object; returns True if it existed. Raises the other errors of :func:`call_kubernetes`."""
    try:
        await call_kubernetes(f"deletion of {subject}", method, *arguments, **options)
    except NotFoundError:
        return False
    return True


async def service_reference(core: CoreV1Api, namespace: str, name: str) -> dict[str, str]:
    service = await asyncio.to_thread(
        core.read_namespaced_service, name, namespace, _request_timeout=_TIMEOUT_S
    )
    assert service.metadata is not None
    return {"apiVersion": "v1", "kind": "Service", "name": name, "uid": str(service.metadata.uid)}


def _explanation(error: ApiException) -> str:
    """Returns the API server's explanation, without headers."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def reason_of(error: ApiException | HTTPError) -> str:
    """Returns the reason of a failed list or watch; it is equal for repeated failures."""
    if isinstance(error, ApiException):
        return _explanation(error)
    return type(error).__name__


logger = logging.getLogger(__name__)

# After each period the objects are listed again, which reports changes that the watch missed.
_WATCH_PERIOD_S = 60
_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Observed state of an object."""

    name: str
    body: Mapping[str, Any] | None
    """State of the object; None after its deletion."""
    last: Mapping[str, Any] | None = None
    """Last state of a deleted object; None if the deletion was not observed."""


@asynccontextmanager
async def follow(
    listing: Callable[..., Any], subject: str = "pods"
) -> AsyncIterator["asyncio.Queue[Seen]"]:
    """Watches objects and puts every change into the yielded queue until the block ends.

    If the API server refuses or does not answer, retries without limit, at growing intervals of up to
    ``_MAX_RETRY_S``. Logs the reason again only when it changes.

    Args:
        listing: List method of the client, with its arguments bound.
        subject: Name of the objects, for the log.
    """
    changes: asyncio.Queue[Seen] = asyncio.Queue()
    follower = _Follower(listing, subject, changes, asyncio.get_running_loop())
    # A daemon, because it may be blocked in a read that only the API server ends.
    threading.Thread(target=follower.run, name="kubernetes-watch", daemon=True).start()
    try:
        yield changes
    finally:
        follower.stop()


class _Follower:
    def __init__(
        self,
        listing: Callable[..., Any],
        subject: str,
        changes: "asyncio.Queue[Seen]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listing = listing
        self._what = subject
        self._changes = changes
        self._loop = loop
        self._stopped = threading.Event()
        self._names: set[str] = set()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        logged, retry_s = "", _RETRY_S
        while not self._stopped.is_set():
            try:
                version = self._list()
                retry_s = _RETRY_S
                self._stream(version)
                logged = ""
            except (ApiException, HTTPError) as error:
                reason = reason_of(error)
                if reason != logged:
                    logged = reason
                    logger.warning(
                        "cannot watch objects in Kubernetes; trying again",
                        extra={"objects": self._what, "error": reason},
                    )
                self._stopped.wait(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _list(self) -> str:
        """Reports all objects and the deletions that were missed; returns the version to watch from."""
        response = self._listing(_request_timeout=_TIMEOUT_S)
        page = ApiClient().sanitize_for_serialization(response)
        bodies = {body["metadata"]["name"]: body for body in page["items"]}
        for name in self._names - set(bodies):
            self._report(Seen(name=name, body=None))
        for name, body in bodies.items():
            self._report(Seen(name=name, body=body))
        self._names = set(bodies)
        return str(page["metadata"]["resourceVersion"])

    def _stream(self, version: str) -> None:
        events = watch.Watch().stream(
            self._listing,
            resource_version=version,
            timeout_seconds=_WATCH_PERIOD_S,
            _request_timeout=(_TIMEOUT_S, _WATCH_PERIOD_S + _TIMEOUT_S),
        )
        for event in events:
            if self._stopped.is_set():
                return
            body = event["raw_object"]
            name = body["metadata"]["name"]
            if event["type"] == "DELETED":
                self._names.discard(name)
                self._report(Seen(name=name, body=None, last=body))
            else:
                self._names.add(name)
                self._report(Seen(name=name, body=body))

    def _report(self, change: Seen) -> None:
        if not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._changes.put_nowait, change)
