"""RolloutScale objects, through which autoscalers change the number of a run's rollouts.

run starts or is changed   -> RolloutScale shows how many rollouts it has
kubectl scale, HPA, KEDA   -> RolloutScale asks for another number -> the run is changed
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kubernetes.client import CustomObjectsApi

from services.common.errors import NotFoundError, ServiceError
from services.extras.kubernetes.pod_api import Seen, call_kubernetes, delete
from services.extras.kubernetes.worker_pods import RUN_LABEL, run_metadata

logger = logging.getLogger(__name__)

GROUP, VERSION, PLURAL = "slipstream.dev", "v1alpha1", "rolloutscales"
_MERGE = "application/merge-patch+json"

ScaleHandler = Callable[[str, int], Awaitable[None]]
"""Called with a run and the requested number of rollouts."""


class RolloutScales:
    """Maintains the RolloutScale of each driven run.

    A failed write is repeated with the run's next change: training does not wait for it.
    """

    def __init__(
        self,
        api: CustomObjectsApi,
        namespace: str,
        *,
        owner: Mapping[str, str],
        on_scale: ScaleHandler,
    ) -> None:
        self._api = api
        self._resource = (GROUP, VERSION, namespace, PLURAL)
        self._owner = owner
        self._on_scale = on_scale
        self._requested: dict[str, int] = {}

    async def write_replicas(self, run_id: str, replicas: int) -> None:
        """Writes a run's number of rollouts; a different number requested meanwhile is kept."""
        name = _name(run_id)
        selector = f"{RUN_LABEL}={run_id},app.kubernetes.io/component=rollout"
        status = {"status": {"replicas": replicas, "selector": selector}}
        try:
            if self._requested.get(run_id, replicas) == replicas:
                await self._write_spec(run_id, replicas)
            await self._patch(
                "status", self._api.patch_namespaced_custom_object_status, name, status
            )
        except ServiceError as error:
            logger.warning(
                "cannot update the RolloutScale", extra={"run": run_id, "error": str(error)}
            )

    async def remove(self, run_id: str) -> None:
        """Deletes the object of a run that has ended."""
        self._requested.pop(run_id, None)
        try:
            method, name = self._api.delete_namespaced_custom_object, _name(run_id)
            await delete(f"RolloutScale {name}", method, *self._resource, name)
        except ServiceError as error:
            logger.warning(
                "cannot delete the RolloutScale", extra={"run": run_id, "error": str(error)}
            )

    async def watch(self, changes: "asyncio.Queue[Seen]") -> None:
        """Processes requested numbers until cancelled."""
        while True:
            body = (await changes.get()).body
            if body is not None:
                await self._process_change(body)

    async def _process_change(self, body: Mapping[str, Any]) -> None:
        run_id, replicas = body["metadata"]["labels"][RUN_LABEL], body["spec"]["replicas"]
        if replicas == body.get("status", {}).get("replicas", replicas):
            self._requested.pop(run_id, None)
        elif self._requested.get(run_id) != replicas:
            self._requested[run_id] = replicas
            try:
                await self._on_scale(run_id, replicas)
            except (ServiceError, ValueError) as error:  # seen again with the next list
                del self._requested[run_id]
                why = {"run": run_id, "replicas": replicas, "error": str(error)}
                logger.warning("cannot scale the run", extra=why)

    async def _write_spec(self, run_id: str, replicas: int) -> None:
        spec = {"spec": {"replicas": replicas}}
        try:
            await self._patch("spec", self._api.patch_namespaced_custom_object, _name(run_id), spec)
        except NotFoundError:
            metadata = run_metadata(run_id, _name(run_id), owner=self._owner)
            body = {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "RolloutScale",
                "metadata": metadata,
                **spec,
            }
            await call_kubernetes(
                f"RolloutScale {_name(run_id)}",
                self._api.create_namespaced_custom_object,
                *self._resource,
                body,
            )

    async def _patch(
        self, section: str, method: Callable[..., Any], name: str, changes: Mapping[str, Any]
    ) -> None:
        subject = f"{section} of RolloutScale {name}"
        await call_kubernetes(subject, method, *self._resource, name, changes, _content_type=_MERGE)


def _name(run_id: str) -> str:
    return run_id.replace("_", "-")
