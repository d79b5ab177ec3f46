"""Processors, memory and disk of a worker's pod: those of its kind, and more for each of its GPUs.

The chart writes them as annotations of the pod template, because only the run knows the GPUs of a pod.
"""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from kubernetes.utils.quantity import parse_quantity

PER_GPU_ANNOTATION: Final = "slipstream.dev/resources-per-gpu"
KINDS_ANNOTATION: Final = "slipstream.dev/resources-of-kinds"
_SHARED_MEMORY: Final = "sharedMemory"
_SHARED_VOLUME: Final = "shm"

Pod = dict[str, Any]


def size_pod(pod: Pod, *, role: str, gpus: int) -> None:
    """Sets the resources of a pod with one container, other than GPUs.

    Args:
        role: Kind of the worker, such as ``ref_logp``, which may have its own resources.
        gpus: GPUs of the pod.
    """
    annotations = pod["metadata"]["annotations"]
    kinds = json.loads(annotations.pop(KINDS_ANNOTATION, "{}"))
    per_gpu = json.loads(annotations.pop(PER_GPU_ANNOTATION, "{}"))
    (container,) = pod["spec"]["containers"]
    kind = kinds.get(role, {})
    per_gpu = kind.get("perGpu", per_gpu)
    for kind_of_amount in ("requests", "limits"):
        replaced, added_amounts = (
            kind.get("resources", {}).get(kind_of_amount, {}),
            per_gpu.get(kind_of_amount, {}),
        )
        if not (replaced or added_amounts):
            continue
        amounts = container.setdefault("resources", {}).setdefault(kind_of_amount, {})
        amounts |= replaced
        amounts |= {
            name: more(amounts.get(name, "0"), quantity, times=gpus)
            for name, quantity in added_amounts.items()
        }
    if quantity := per_gpu.get(_SHARED_MEMORY):
        for volume in pod["spec"]["volumes"]:
            if volume["name"] == _SHARED_VOLUME:
                volume["emptyDir"]["sizeLimit"] = more(
                    volume["emptyDir"]["sizeLimit"], quantity, times=gpus
                )


def more(quantity: str, addition: str, *, times: int) -> str:
    """Returns a quantity of Kubernetes plus some multiple of another one.

    Processors are in whole cores or thousandths, bytes in the largest unit that divides them: ``16Gi`` and 8
    times ``64Gi`` are ``528Gi``.
    """
    total = parse_quantity(quantity) + times * parse_quantity(addition)
    for unit, size in _UNITS.items():
        if total >= size and total % size == 0:
            return f"{int(total / size)}{unit}"
    if total == int(total):
        return str(int(total))
    return f"{int(total * 1000)}m"


_UNITS: Final[Mapping[str, Decimal]] = {
    unit: Decimal(2) ** (10 * power) for unit, power in (("Ti", 4), ("Gi", 3), ("Mi", 2))
}
