"""Pod groups of gang schedulers, which place all pods of a run together or none.

The chart knows the schedulers: its templates have the pod group, and what refers to it from a pod.
Two placeholders in them are filled in for each run.
"""

from collections.abc import Mapping
from typing import Any, Final

_GROUP: Final = "$(GROUP)"
"""Placeholder for the name of the run's group."""
_NUM_PODS: Final = "$(PODS)"
"""Placeholder for the number of pods that must be placed together."""
PLURAL: Final = "podgroups"

Json = Mapping[str, Any]


def group_name(run_id: str) -> str:
    return run_id.replace("_", "-")


def build_pod_group(template: Json, run_id: str, *, num_pods: int, owner: Json) -> dict[str, Any]:
    """Builds the pod group of a run; it is deleted with the owner."""
    group: dict[str, Any] = filled(template, run_id, num_pods=num_pods)
    group["metadata"] |= {"name": group_name(run_id), "ownerReferences": [dict(owner)]}
    return group


def filled(node: Any, run_id: str, *, num_pods: int) -> Any:
    """Returns a manifest with the values of a run in the place of the placeholders."""
    if isinstance(node, Mapping):
        return {key: filled(value, run_id, num_pods=num_pods) for key, value in node.items()}
    if isinstance(node, list):
        return [filled(value, run_id, num_pods=num_pods) for value in node]
    values = {_GROUP: group_name(run_id), _NUM_PODS: num_pods}
    return values.get(node, node) if isinstance(node, str) else node
