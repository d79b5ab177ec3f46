"""Calls to the Kubernetes API, each off the event loop, with a deadline and readable refusals."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from kubernetes.client import ApiException, AppsV1Api, CoreV1Api, V1Pod, V1Secret
from urllib3.exceptions import HTTPError

from services.common.errors import FailedPreconditionError, UnavailableError

_TIMEOUT_S = 10


class PodApi:
    """Creates, lists and deletes pods of one namespace, and writes the secrets that they need.

    Args:
        core: Client of the core API.
        namespace: Where the pods live.
    """

    def __init__(self, core: CoreV1Api, namespace: str) -> None:
        self._core = core
        self._namespace = namespace

    async def create(self, pod: Mapping[str, Any]) -> None:
        """Create a pod.

        Raises:
            FailedPreconditionError: If Kubernetes refuses it, with its explanation.
            UnavailableError: If the API server does not answer.
        """
        name = pod["metadata"]["name"]
        try:
            await asyncio.to_thread(
                self._core.create_namespaced_pod,
                self._namespace,
                cast("V1Pod", dict(pod)),
                _request_timeout=_TIMEOUT_S,
            )
        except ApiException as error:
            raise FailedPreconditionError(
                f"Kubernetes refused pod {name}: {_explanation(error)}", pod=name
            ) from error
        except HTTPError as error:
            raise UnavailableError(f"the Kubernetes API does not answer: {error}") from error

    async def list(self, selector: str) -> list[dict[str, Any]]:
        """Pods with certain labels.

        Raises:
            UnavailableError: If the API server does not answer.
        """
        try:
            listed = await asyncio.to_thread(
                self._core.list_namespaced_pod,
                self._namespace,
                label_selector=selector,
                _request_timeout=_TIMEOUT_S,
            )
        except (ApiException, HTTPError) as error:
            raise UnavailableError(f"Kubernetes did not list pods: {error}") from error
        pods: list[dict[str, Any]] = self._core.api_client.sanitize_for_serialization(listed)[
            "items"
        ]
        return pods

    async def delete(self, name: str, *, grace_s: int | None = None) -> bool:
        """Delete a pod; returns whether it was there.

        Raises:
            UnavailableError: If Kubernetes did not do it.
        """
        try:
            await asyncio.to_thread(
                self._core.delete_namespaced_pod,
                name,
                self._namespace,
                _request_timeout=_TIMEOUT_S,
                grace_period_seconds=grace_s,
            )
        except ApiException as error:
            if error.status == 404:
                return False
            raise UnavailableError(
                f"Kubernetes did not delete pod {name}: {_explanation(error)}", pod=name
            ) from error
        except HTTPError as error:
            raise UnavailableError(f"the Kubernetes API does not answer: {error}") from error
        return True

    async def put_secret(self, secret: Mapping[str, Any]) -> None:
        """Write a secret in place of any of its name.

        Raises:
            FailedPreconditionError: If Kubernetes refuses it, with its explanation.
            UnavailableError: If the API server does not answer.
        """
        name = secret["metadata"]["name"]
        # Deleting first needs no right to read or change secrets.
        await self.delete_secret(name)
        try:
            await asyncio.to_thread(
                self._core.create_namespaced_secret,
                self._namespace,
                cast("V1Secret", dict(secret)),
                _request_timeout=_TIMEOUT_S,
            )
        except ApiException as error:
            raise FailedPreconditionError(
                f"Kubernetes refused secret {name}: {_explanation(error)}", secret=name
            ) from error
        except HTTPError as error:
            raise UnavailableError(f"the Kubernetes API does not answer: {error}") from error

    async def delete_secret(self, name: str) -> None:
        """Delete a secret, if it is there.

        Raises:
            UnavailableError: If Kubernetes did not do it.
        """
        try:
            await asyncio.to_thread(
                self._core.delete_namespaced_secret,
                name,
                self._namespace,
                _request_timeout=_TIMEOUT_S,
            )
        except (ApiException, HTTPError) as error:
            if not (isinstance(error, ApiException) and error.status == 404):
                raise UnavailableError(
                    f"Kubernetes did not delete secret {name}: {error}", secret=name
                ) from error


async def deployment_reference(core: CoreV1Api, namespace: str, name: str) -> dict[str, str]:
    """An owner reference to a Deployment."""
    deployment = await asyncio.to_thread(
        AppsV1Api(core.api_client).read_namespaced_deployment,
        name,
        namespace,
        _request_timeout=_TIMEOUT_S,
    )
    assert deployment.metadata is not None
    uid = str(deployment.metadata.uid)
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}


def _explanation(error: ApiException) -> str:
    """What the API server says, without its headers."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
