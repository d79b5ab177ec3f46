"""Other names of keys, each said once; what comes out has the names of the specification alone."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

_STALENESS = "algorithm.max_staleness"
_TASK_GROUPS = "topology.task_groups"
_RATIOS = "topology.ratios"

_ALIASES = {
    "algorithm.generate_ahead_steps": _STALENESS,
    "trainer.generate_ahead_steps": _STALENESS,
    # dots.rl's, its misspelt ones included.
    **{
        f"{part}.{spelling}_node_{what}": key
        for part in ("topology", "trainer")
        for spelling in ("separated", "sperated")
        for what, key in (("tasks", _TASK_GROUPS), ("ratios", _RATIOS))
    },
}


@dataclass(slots=True)
class Renamed:
    """A specification without other names."""

    document: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """One for each other name that was used."""
    problems: list[str] = field(default_factory=list)
    """Keys that were given twice, with different values."""


def without_aliases(document: Mapping[str, Any]) -> Renamed:
    """Rename the keys that have another name; the document stays as it is."""
    result = Renamed(deepcopy(dict(document)))
    if isinstance(loss := result.document.get("algorithm"), str):
        result.document["algorithm"] = {"loss": loss}
        result.notes.append(f"algorithm: {loss} is short for algorithm.loss: {loss}")
    uses_task_groups = False
    for alias, key in _ALIASES.items():
        part, _, name = alias.partition(".")
        group = result.document.get(part)
        if isinstance(group, dict) and name in group:
            uses_task_groups |= part == "trainer" and key != _STALENESS
            _rename(result, alias, group.pop(name), key)
    if uses_task_groups:
        _count_gpus(result)
    return result


def _rename(result: Renamed, alias: str, value: Any, key: str) -> None:
    part, _, name = key.partition(".")
    target = result.document.setdefault(part, {})
    result.notes.append(f"{alias} is another name of {key}")
    if not isinstance(target, dict):
        return  # its type is reported
    if target.setdefault(name, value) != value:
        result.problems.append(
            f"{alias} is another name of {key}, but they differ ({value!r} and {target[name]!r}); keep one"
        )


def _count_gpus(result: Renamed) -> None:
    """Among the options of the trainer, dots.rl's task groups are told of nodes, not of GPUs."""
    trainer, topology = result.document["trainer"], result.document["topology"]
    nodes, per_node = trainer.pop("nnodes", 1), trainer.pop("n_gpus_per_node", None)
    if per_node is None or not isinstance(topology, dict):
        return
    if not (isinstance(nodes, int) and isinstance(per_node, int)):
        result.problems.append(
            "trainer.nnodes and trainer.n_gpus_per_node must be whole numbers, but are "
            f"{nodes!r} and {per_node!r}"
        )
        return
    topology.setdefault("gpus", nodes * per_node)
    topology.setdefault("gpus_per_node", per_node)
