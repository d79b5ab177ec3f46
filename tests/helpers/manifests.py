"""Validation of Kubernetes manifests against the schemas of a Kubernetes version."""

import re
from functools import cache
from typing import Any

import jsonschema_rs
from kubernetes_validate.utils import all_versions, schema_contents


def validate_manifest(manifest: dict[str, Any], version: str) -> None:
    """Validates a manifest, in which no key may be unknown.

    ``kubernetes_validate.validate`` reads megabytes of schemas for each manifest.

    Args:
        version: For example ``1.35``; an installed one.

    Raises:
        jsonschema_rs.ValidationError: If the manifest does not fit its schema.
    """
    _validator(manifest["kind"], manifest["apiVersion"], version).validate(manifest)


@cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema_rs.Validator:
    # The name of a schema has the first label of the API group: `rbac-v1` of `rbac.authorization.k8s.io/v1`.
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{_folder(version)}/{kind.lower()}-{name}.json", version)
    return jsonschema_rs.validator_for(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> jsonschema_rs.Registry:
    contents = schema_contents(f"{_folder(version)}/_definitions.json", version)
    return jsonschema_rs.Registry([(contents["$id"], contents)])


def _folder(version: str) -> str:
    (release,) = {release for release in all_versions() if release.rpartition(".")[0] == version}
    return f"kubernetes-json-schema/v{release}-local-strict"
