"""Defines custom resources of other projects on the test's API server, without schemas and controllers."""

from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes.client import ApiException, ApiextensionsV1Api, CoreV1Api, CustomObjectsApi

from tests.cluster.release import eventually


@contextmanager
def defined(core: CoreV1Api, kind: str, *, group: str, version: str, plural: str) -> Iterator[None]:
    """Defines a kind until the block ends; the API server serves it when the block begins."""
    name = f"{plural}.{group}"
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": free},
    }
    spec = {
        "group": group,
        "scope": "Namespaced",
        "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
        "versions": [served],
    }
    definitions = ApiextensionsV1Api(core.api_client)
    definitions.create_custom_resource_definition(
        {
            "metadata": {
                "name": name,
                # For API groups of Kubernetes itself, the API server requires a reference to their review.
                "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in of tests"},
            },
            "spec": spec,
        }
    )

    def is_served() -> bool:
        try:
            CustomObjectsApi(core.api_client).list_namespaced_custom_object(
                group, version, "default", plural
            )
        except ApiException:
            return False
        return True

    eventually(is_served, timeout_s=30)
    try:
        yield
    finally:
        definitions.delete_custom_resource_definition(name)
