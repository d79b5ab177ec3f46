"""Replaces aliases of keys by canonical names and removes keys that an override contradicts."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from services.common.runspec.engines import engine_kind
from services.common.runspec.topology import TopologySpec

_STALENESS = "algorithm.max_staleness"
_TASK_GROUPS = "topology.task_groups"
_RATIOS = "topology.ratios"

_ALIASES = {
    "algorithm.generate_ahead_steps": _STALENESS,
    "trainer.generate_ahead_steps": _STALENESS,
    # Names of dots.rl, including its misspelled ones.
    **{
        f"{part}.{spelling}_node_{what}": key
        for part in ("topology", "trainer")
        for spelling in ("separated", "sperated")
        for what, key in (("tasks", _TASK_GROUPS), ("ratios", _RATIOS))
    },
}

# Keys for the length of a run; exactly one of them is set.
_LENGTHS = ("trainer.steps", "data.epochs")
# Process counts, which follow from task groups.
_COUNTS = ("trainer.world_size", "rollout.replicas")
_SPLIT = ("task_groups", "ratios", "gpus")


@dataclass(slots=True)
class Renamed:
    """A specification without aliases."""

    document: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """One note for each alias that was used."""
    problems: list[str] = field(default_factory=list)
    """Keys that were set twice with different values."""


def without_aliases(document: Mapping[str, Any]) -> Renamed:
    """Returns a copy of a document with aliases replaced by canonical names."""
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


def canonical_key(key: str) -> str:
    return _ALIASES.get(key, key)


def prepare_override(document: dict[str, Any], key: str) -> None:
    """Prepares a document for an override: removes aliases of the key and expands a short form above it."""
    own = canonical_key(key)
    for name in {own, *(alias for alias, meant in _ALIASES.items() if meant == own)} - {key}:
        _remove(document, name)
    loss = document.get("algorithm")
    if isinstance(loss, str) and key.startswith("algorithm."):
        document["algorithm"] = {"loss": loss}


def remove_contradictions(document: dict[str, Any], given: Collection[str]) -> None:
    """Removes keys that contradict those that a user has just set.

    Args:
        document: A specification without aliases, with the new values already set; modified in
            place.
        given: Dotted names of the keys, or groups of keys, that were set.
    """
    if any(_is_set(key, document, given) for key in _LENGTHS):
        for key in _LENGTHS:
            if not _is_set(key, document, given):
                _remove(document, key)
    topology = document.get("topology")
    if not isinstance(topology, dict) or not topology.get("task_groups"):
        return
    if any(_is_set(f"topology.{name}", document, given) for name in _SPLIT):
        for key in _COUNTS:
            if not _is_set(key, document, given):
                _remove(document, key)
    elif any(_is_set(key, document, given) for key in _COUNTS):
        _count_without_groups(document, given)


def _count_without_groups(document: dict[str, Any], given: Collection[str]) -> None:
    """Replaces a split into two groups by process counts, after a user has set one of these counts.

    Process counts cannot express a group of ``logp``, ``ref_logp`` or ``critic``; the rules then
    report the contradiction.
    """
    trainer, rollout = document.get("trainer"), document.get("rollout")
    if not (isinstance(trainer, dict) and isinstance(rollout, dict)):
        return
    try:
        topology = TopologySpec.model_validate(document["topology"])
        placed = topology.place()
        engine = engine_kind(rollout.get("engine", "torch"))
        engine_gpus = engine.num_gpus(rollout.get("engine_arguments", {}))
    except (ValueError, KeyError, AttributeError):
        return  # it is reported with its key
    if len(placed.groups) != len(_COUNTS):
        return
    for name in _SPLIT:
        document["topology"].pop(name, None)
    if not _is_set("trainer.world_size", document, given):
        trainer["world_size"] = topology.gpus_of("train")
    if not _is_set("rollout.replicas", document, given):
        rollout["replicas"] = topology.gpus_of("generate") // engine_gpus


def _is_set(key: str, document: Mapping[str, Any], given: Collection[str]) -> bool:
    """Returns True if a key has a value that a user has just set."""
    part, _, name = key.partition(".")
    group = document.get(part)
    has_value = isinstance(group, Mapping) and group.get(name) is not None
    return has_value and any(f"{key}.".startswith(f"{each}.") for each in given)


def _remove(document: dict[str, Any], key: str) -> None:
    part, _, name = key.partition(".")
    group = document.get(part)
    if isinstance(group, dict):
        group.pop(name, None)


def _rename(result: Renamed, alias: str, value: Any, key: str) -> None:
    part, _, name = key.partition(".")
    target = result.document.setdefault(part, {})
    result.notes.append(f"{alias} is an alias of {key}")
    if not isinstance(target, dict):
        return  # its type is reported
    if target.setdefault(name, value) != value:
        result.problems.append(
            f"{alias} is an alias of {key}, but their values differ ({value!r} and {target[name]!r}); remove "
            "one"
        )


def _count_gpus(result: Renamed) -> None:
    """Converts node counts to GPU counts: dots.rl's task groups under ``trainer`` count nodes."""
    trainer, topology = result.document["trainer"], result.document["topology"]
    nodes, per_node = trainer.pop("nnodes", 1), trainer.pop("n_gpus_per_node", None)
    if per_node is None or not isinstance(topology, dict):
        return
    if not (isinstance(nodes, int) and isinstance(per_node, int)):
        result.problems.append(
            "trainer.nnodes and trainer.n_gpus_per_node must be integers, got "
            f"{nodes!r} and {per_node!r}"
        )
        return
    topology.setdefault("gpus", nodes * per_node)
    topology.setdefault("gpus_per_node", per_node)
