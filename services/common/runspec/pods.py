"""Pods of workers on Kubernetes, as far as the administrator lets a run choose them.

Bounds and templates are values of the chart (``workers.overrides``), which ``services/extras/kubernetes``
judges.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from services.common.runspec.base import SpecPart

_QUANTITY: Final = r"^[0-9]{1,15}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"


def _as_text(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Quantity = Annotated[str, BeforeValidator(_as_text), Field(pattern=_QUANTITY)]
"""Quantity of Kubernetes, such as ``16``, ``500m`` or ``64Gi``."""


class TolerationSpec(SpecPart):
    """A taint of nodes that a pod accepts."""

    key: str = Field(min_length=1, max_length=316)
    """Key of the taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """``Exists`` accepts every value."""
    value: str = Field("", max_length=63)
    """Value of the taint."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty accepts all effects."""


class PodSpec(SpecPart):
    """The pod of one worker of a kind; an installation may refuse each of its keys."""

    cpu: Quantity | None = None
    """Processors that the pod requests, such as ``16`` or ``500m``. null uses the installation's."""
    memory: Quantity | None = None
    """Memory that the pod requests, which is also its limit, such as ``128Gi``."""
    shared_memory: Quantity | None = None
    """Size of ``/dev/shm``, whose files count as memory."""
    ephemeral_storage: Quantity | None = None
    """Disk of the node that the pod requests."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that its node must have."""
    tolerations: tuple[TolerationSpec, ...] = ()
    """Further taints that its node may have."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pod."""
    priority_class: str = Field("", max_length=253)
    """Priority class of the pod; empty uses the installation's."""
    templates: tuple[str, ...] = ()
    """Names of parts that the administrator offers (``workers.overrides.templates``): volumes, init
    containers, sidecars, placement."""
