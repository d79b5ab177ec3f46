"""What may change in a run that exists: labels, priority, limits, how often it is saved, its rollouts."""

import json
from typing import Any

from services.common.spec.loader import SpecError, parse_spec
from services.common.spec.run import RunSpec
from services.controller.models import RunPatch
from services.controller.run.requests import spec_columns
from services.controller.store.records import Run
from services.controller.store.rows import queue_deadline


def merged(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A document with changes: mappings are merged, a null takes a key away (RFC 7396)."""
    result = dict(document)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            known = result.get(key)
            result[key] = merged(known if isinstance(known, dict) else {}, value)
        else:
            result[key] = value
    return result


def patched_spec(run: Run, patch: RunPatch) -> RunSpec | None:
    """The specification with a patch applied; None if the patch leaves it as it is.

    Raises:
        SpecError: If it would break a rule.
    """
    changes: dict[str, Any] = {}
    if patch.limits is not None:
        changes["limits"] = patch.limits
    if patch.validation_every is not None:
        changes["validation"] = {"every": patch.validation_every}
    if patch.checkpoint_every is not None:
        changes["trainer"] = {"checkpoint": {"every": patch.checkpoint_every}}
    if patch.rollout_replicas is not None:
        changes["rollout"] = {"replicas": patch.rollout_replicas}
    if not changes:
        return None
    spec = parse_spec(merged(json.loads(run.spec_json), changes))
    if patch.rollout_replicas is not None and spec.topology.placement == "colocated":
        raise SpecError(
            [
                "rollout_replicas: with topology.placement 'colocated' rollouts are on the trainer's GPUs, "
                "and their number stays; submit another run, or fork this one"
            ]
        )
    return spec


def columns_of(patch: RunPatch, spec: RunSpec | None) -> dict[str, Any]:
    """What a patch writes."""
    values: dict[str, Any] = {}
    if patch.labels is not None:
        values["labels_json"] = json.dumps(patch.labels)
    if patch.priority is not None:
        values["priority"] = patch.priority
    if spec is not None:
        values |= spec_columns(spec)
        if "queue_timeout_s" in (patch.limits or {}):
            values["queue_deadline"] = queue_deadline(values["spec_json"])
    return values
