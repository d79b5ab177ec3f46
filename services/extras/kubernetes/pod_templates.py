"""Parts of worker pods that administrators add per kind of worker, and that runs choose within bounds.

The chart writes parts and bounds as annotations of the pod templates and as a file next to them::

    workers.kinds.KIND.pod           added to each pod of the kind
    workers.overrides.templates.T    added to the pods for which a run names it (``pods.KIND.templates``)
    workers.overrides                which other keys of ``pods.KIND`` a run may set, and how far

A run never names volumes, images, accounts or rights itself: only names of parts and values of listed keys.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import yaml
from kubernetes.utils.quantity import parse_quantity

from services.common.errors import FailedPreconditionError
from services.common.runspec.pods import PodSpec
from services.common.runspec.run import RunSpec

OVERRIDES_FILE: Final = "overrides.yaml"
_AMOUNTS: Final = {
    "cpu": "cpu",
    "memory": "memory",
    "shared_memory": "sharedMemory",
    "ephemeral_storage": "ephemeralStorage",
}
"""Keys of ``pods.KIND`` and of ``workers.overrides.max``."""
_RESERVED: Final = ("slipstream.dev/", "kueue.x-k8s.io/")
_SHARED_VOLUME: Final = "shm"
_REPLACED: Final = (
    "affinity", "priorityClassName", "serviceAccountName", "runtimeClassName", "topologySpreadConstraints",
)  # fmt: skip
"""Fields of a pod that a part replaces; it adds to the others."""

Pod = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Choices of an installation's runs for their pods; by default none."""

    max: Mapping[str, str] = field(default_factory=dict)
    """Largest amount of a pod by its key: ``cpu``, ``memory``, ``sharedMemory``, ``ephemeralStorage``."""
    node_selector: Sequence[str] = ()
    """Keys of labels."""
    tolerations: Sequence[str] = ()
    """Keys of taints."""
    annotations: Sequence[str] = ()
    """Keys of annotations; one that ends with ``/`` allows all keys with that prefix."""
    priority_classes: Sequence[str] = ()
    templates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parts of pods by name."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the overrides of an installation; without the file, runs may choose nothing.

        Raises:
            OSError: If the file cannot be read.
        """
        file = folder / OVERRIDES_FILE
        values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
        return cls(
            max={key: str(value) for key, value in values.get("max", {}).items() if value != ""},
            node_selector=values.get("nodeSelector", ()),
            tolerations=values.get("tolerations", ()),
            annotations=values.get("annotations", ()),
            priority_classes=values.get("priorityClasses", ()),
            templates=values.get("templates", {}),
        )

    def problems(self, spec: RunSpec) -> Iterator[str]:
        """Yields what a specification may not choose, each with its key and a fix."""
        for kind, pod in spec.pods.items():
            for problem in (*self._amounts(pod), *self._choices(pod)):
                yield f"pods.{kind}.{problem}"

    def _amounts(self, pod: PodSpec) -> Iterator[str]:
        for key, name in _AMOUNTS.items():
            amount = getattr(pod, key)
            if amount is None:
                continue
            bound = self.max.get(name)
            if parse_quantity(amount) <= 0:  # a limit of 0 is none, and a quota does not count it
                yield (
                    f"{key}: expected more than 0, got {amount}, which Kubernetes takes for no limit; "
                    "remove the key, or name an amount"
                )
            elif bound is None:
                yield (
                    f"{key}: this installation sets it for all runs; remove the key, or ask the "
                    f"administrator for a bound (workers.overrides.max.{name})"
                )
            elif parse_quantity(amount) > parse_quantity(bound):
                yield (
                    f"{key}: {amount} exceeds the {bound} that this installation allows a pod "
                    f"(workers.overrides.max.{name}); lower it"
                )

    def _choices(self, pod: PodSpec) -> Iterator[str]:
        tolerated = [toleration.key for toleration in pod.tolerations]
        priorities = [pod.priority_class] if pod.priority_class else []
        yield from _unlisted("node_selector", pod.node_selector, self.node_selector, "nodeSelector")
        yield from _unlisted("tolerations", tolerated, self.tolerations, "tolerations")
        for name in pod.annotations:
            if name.startswith(_RESERVED):
                yield f"annotations: {name!r} is one of the controller's; remove it"
        yield from _unlisted("annotations", pod.annotations, self.annotations, "annotations")
        yield from _unlisted("priority_class", priorities, self.priority_classes, "priorityClasses")
        yield from _unlisted("templates", pod.templates, [*self.templates], "templates")


def _unlisted(
    key: str, names: Iterable[str], allowed_names: Sequence[str], value: str
) -> Iterator[str]:
    """Yields the names that the administrator does not list under a value of the chart."""
    for name in names:
        is_listed = name in allowed_names or any(
            prefix.endswith("/") and name.startswith(prefix) for prefix in allowed_names
        )
        if not is_listed:
            allowed = f"it allows {', '.join(allowed_names)}" if allowed_names else "it allows none"
            yield (
                f"{key}: this installation does not allow {name!r} (workers.overrides.{value}; {allowed}); "
                "remove it, or ask the administrator to list it"
            )


def choose_pod(pod: Pod, settings: PodSpec, overrides: Overrides) -> None:
    """Applies the choices of a run, which :meth:`Overrides.problems` accepts, to a pod with one container."""
    for name in settings.templates:
        add_part(pod, overrides.templates[name], where=f"workers.overrides.templates.{name}")
    metadata = pod["metadata"]
    metadata["annotations"] = {**metadata.get("annotations", {}), **settings.annotations}
    tolerations = [
        {name: value for name, value in toleration.model_dump().items() if value}
        for toleration in settings.tolerations
    ]
    template: dict[str, Any] = {"nodeSelector": settings.node_selector, "tolerations": tolerations}
    if settings.priority_class:
        template["priorityClassName"] = settings.priority_class
    add_part(pod, template, where="pods")
    _set_amounts(pod, settings)


def _set_amounts(pod: Pod, settings: PodSpec) -> None:
    (container,) = pod["spec"]["containers"]
    requests = container.setdefault("resources", {}).setdefault("requests", {})
    limits = container["resources"].setdefault("limits", {})
    amounts = {
        "cpu": settings.cpu,
        "memory": settings.memory,
        "ephemeral-storage": settings.ephemeral_storage,
    }
    for name, amount in amounts.items():
        if amount is not None:
            requests[name] = amount
            if name in limits or name == "memory":
                limits[name] = amount
    for volume in pod["spec"]["volumes"]:
        if volume["name"] == _SHARED_VOLUME and settings.shared_memory is not None:
            volume["emptyDir"]["sizeLimit"] = settings.shared_memory


def add_part(pod: Pod, template: Mapping[str, Any], *, where: str) -> None:
    """Adds an administrator's part to a pod with one container.

    Args:
        where: Value of the chart that holds the part, for errors.

    Raises:
        FailedPreconditionError: If a volume or a container of the pod has the name of one of the part.
    """
    template = copy.deepcopy(dict(template))
    metadata, spec = pod["metadata"], pod["spec"]
    (container,) = spec["containers"]
    # What the controller itself writes wins.
    metadata["labels"] = {**template.get("labels", {}), **metadata.get("labels", {})}
    metadata["annotations"] = {**template.get("annotations", {}), **metadata.get("annotations", {})}
    if selector := template.get("nodeSelector"):
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **selector}
    if tolerations := template.get("tolerations"):
        spec["tolerations"] = [*spec.get("tolerations", ()), *tolerations]
    for name in _REPLACED:
        if name in template:
            spec[name] = template[name]
    _add_named(spec, "volumes", template.get("volumes", ()), where=where)
    for init in template.get("initContainers", ()):
        init.setdefault("securityContext", copy.deepcopy(container.get("securityContext", {})))
    _add_named(spec, "initContainers", template.get("initContainers", ()), where=where)
    if mounts := template.get("volumeMounts"):
        container["volumeMounts"] = [*container.get("volumeMounts", ()), *mounts]
    if variables := template.get("env"):
        container["env"] = [*variables, *container.get("env", ())]


def _add_named(
    spec: dict[str, Any], key: str, items: Sequence[Mapping[str, Any]], *, where: str
) -> None:
    if not items:
        return
    present = spec.setdefault(key, [])
    names = {item["name"] for item in present}
    for item in items:
        if item["name"] in names:
            raise FailedPreconditionError(
                f"{where}.{key}: the pod already has {item['name']!r}; give it another name in the chart's "
                "values"
            )
        names.add(item["name"])
        present.append(item)
