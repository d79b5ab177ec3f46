"""Replaces aliases of keys by canonical names and removes keys that an override contradicts."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TaskGroupError, TopologySpec
from services.common.runspec.workers import kinds_with_own_gpus

_STALENESS = "algorithm.max_staleness"
_TASK_GROUPS = "topology.task_groups"
_RATIOS = "topology.ratios"

_GRANULARITY = "topology.granularity"
_SAVE_EVERY, _SAVE_EVERY_S = "trainer.checkpoint.every", "trainer.checkpoint.every_s"


@dataclass(frozen=True, slots=True)
class _Alias:
    """Key of another system with the key that it stands for."""

    key: str
    values: Callable[[str, Any], Mapping[str, Any]] = lambda key, value: {key: value}
    """Returns the keys to set, from the canonical key and the value."""
    note: str = ""
    """Text of the note about the value, with ``{value}``."""


def _bytes(key: str, megabytes: Any) -> Mapping[str, Any]:
    if isinstance(megabytes, bool):
        return {key: megabytes}
    with suppress(TypeError, ValueError, OverflowError):  # reported with its key
        return {key: round(float(megabytes) * 2**20)}
    return {key: megabytes}


def _never_unless_positive(key: str, value: Any) -> Mapping[str, Any]:
    """Returns 0 for a frequency that is not positive, by which verl means never."""
    is_never = type(value) is int and value <= 0
    if is_never and key == _SAVE_EVERY:
        return {key: 0, _SAVE_EVERY_S: 0}
    return {key: 0 if is_never else value}


_AHEAD: Final = _Alias(
    _STALENESS,
    note=(
        ": tokens are trained at most {value} weight versions after they were sampled (0 is on-policy, 1 one "
        "step off); dots.rl's code counts like this, one of its texts calls 2 one step off"
    ),
)
_ALIASES: Final[Mapping[str, _Alias]] = {
    "algorithm.generate_ahead_steps": _AHEAD,
    "trainer.generate_ahead_steps": _AHEAD,
    # Names of dots.rl, including its misspelled ones.
    **{
        f"{section}.{spelling}_node_{what}": _Alias(key)
        for section in ("topology", "trainer")
        for spelling in ("separated", "sperated")
        for what, key in (("tasks", _TASK_GROUPS), ("ratios", _RATIOS))
    },
    **{
        f"{section}.param_update_{side}_bucket_size_mb": _Alias(key, _bytes)
        for section in ("rollout", "weight_sync")
        for side, key in (
            ("preduce", "weight_sync.bucket_bytes"),
            ("consume", "weight_sync.staging_bytes"),
        )
    },
    "weight_sync.transport": _Alias("weight_sync.backend"),
    # Names of verl.
    "trainer.test_freq": _Alias("validation.every", _never_unless_positive),
    "trainer.val_before_train": _Alias("validation.before_train"),
    "trainer.val_only": _Alias("validation.only"),
    "trainer.save_freq": _Alias(_SAVE_EVERY, _never_unless_positive),
    "trainer.max_actor_ckpt_to_keep": _Alias("trainer.checkpoint.keep"),
    "trainer.default_local_dir": _Alias("trainer.checkpoint.directory"),
    "trainer.resume_from_path": _Alias("trainer.checkpoint.start_from"),
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
    _resume_mode(result)
    split_aliases = set[str]()
    for name, alias in _ALIASES.items():
        group_name, _, leaf = name.partition(".")
        group = result.document.get(group_name)
        if isinstance(group, dict) and leaf in group:
            _rename(result, name, group.pop(leaf), alias)
            if alias.key in (_TASK_GROUPS, _RATIOS):
                split_aliases.add(group_name)
    if "trainer" in split_aliases:
        _count_gpus(result)
    if split_aliases:
        _split_nodes(result)
        _merge_unused_groups(result)
    return result


def canonical_key(key: str) -> str:
    return _ALIASES[key].key if key in _ALIASES else key


def prepare_override(document: dict[str, Any], key: str) -> None:
    """Prepares a document for an override: removes aliases of the key and expands a short form above it."""
    main = canonical_key(key)
    for name in {main, *(name for name, alias in _ALIASES.items() if alias.key == main)} - {key}:
        _remove(document, name)
    loss = document.get("algorithm")
    if isinstance(loss, str) and key.startswith("algorithm."):
        document["algorithm"] = {"loss": loss}


def remove_contradictions(document: dict[str, Any], set_keys: Collection[str]) -> None:
    """Removes keys that contradict those that a user has just set.

    Args:
        document: A specification without aliases, with the new values already set; modified in
            place.
        set_keys: Dotted names of the keys, or groups of keys, that were set.
    """
    if any(_is_set(key, document, set_keys) for key in _LENGTHS):
        for key in _LENGTHS:
            if not _is_set(key, document, set_keys):
                _remove(document, key)
    topology = document.get("topology")
    if not isinstance(topology, dict) or not topology.get("task_groups"):
        return
    if any(_is_set(f"topology.{name}", document, set_keys) for name in _SPLIT):
        for key in _COUNTS:
            if not _is_set(key, document, set_keys):
                _remove(document, key)
    elif any(_is_set(key, document, set_keys) for key in _COUNTS):
        _count_without_groups(document, set_keys)


def _count_without_groups(document: dict[str, Any], set_keys: Collection[str]) -> None:
    """Replaces a split into two groups by process counts, after a user has set one of these counts.

    Process counts cannot express a group of ``logp``, ``ref_logp`` or ``critic``; the rules then
    report the contradiction.
    """
    trainer, rollout = document.get("trainer"), document.get("rollout")
    if not (isinstance(trainer, dict) and isinstance(rollout, dict)):
        return
    try:
        topology = TopologySpec.model_validate(document["topology"])
        placement = topology.place()
        engine = engine_kind(rollout.get("engine", "torch"))
        engine_gpus = engine.num_gpus(rollout.get("engine_arguments", {}))
    except (ValueError, KeyError, AttributeError):
        return  # it is reported with its key
    if len(placement.groups) != len(_COUNTS):
        return
    for name in _SPLIT:
        document["topology"].pop(name, None)
    if not _is_set("trainer.world_size", document, set_keys):
        trainer["world_size"] = topology.gpus_of("train")
    if not _is_set("rollout.replicas", document, set_keys):
        rollout["replicas"] = max(1, topology.gpus_of("generate") // engine_gpus)


def _is_set(key: str, document: Mapping[str, Any], set_keys: Collection[str]) -> bool:
    """Returns True if a key has a value that a user has just set."""
    group_name, _, name = key.partition(".")
    group = document.get(group_name)
    has_value = isinstance(group, Mapping) and group.get(name) is not None
    return has_value and any(f"{key}.".startswith(f"{set_key}.") for set_key in set_keys)


def _remove(document: dict[str, Any], key: str) -> None:
    *parents, name = key.split(".")
    group: Any = document
    for parent in parents:
        group = group.get(parent) if isinstance(group, dict) else None
    if isinstance(group, dict):
        group.pop(name, None)


def _rename(result: Renamed, name: str, value: Any, alias: _Alias) -> None:
    note = alias.note.format(value=value)
    result.notes.append(f"{name} is an alias of {alias.key}{note}")
    for key, meant in alias.values(alias.key, value).items():
        *parents, leaf = key.split(".")
        target: Any = result.document
        for parent in parents:
            target = target.setdefault(parent, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            continue  # its type is reported
        if target.setdefault(leaf, meant) != meant and key == alias.key:
            result.problems.append(
                f"{name} is an alias of {key}, but their values differ ({meant!r} and {target[leaf]!r}); "
                "remove one"
            )


def _resume_mode(result: Renamed) -> None:
    """Removes verl's ``trainer.resume_mode``, which ``start_from`` and the automatic resume replace."""
    trainer = result.document.get("trainer")
    if not isinstance(trainer, dict) or "resume_mode" not in trainer:
        return
    mode = trainer.pop("resume_mode")
    if mode != "resume_path":  # verl ignores the path
        trainer.pop("resume_from_path", None)
    result.notes.append(
        f"trainer.resume_mode {mode!r} has no key of its own: an interrupted run resumes by itself, a new "
        "run starts at step 0, and trainer.checkpoint.start_from names a checkpoint to start from"
    )


def _split_nodes(result: Renamed) -> None:
    """Sets the granularity that dots.rl's task groups have: whole nodes, if there is one for each group."""
    topology = result.document["topology"]
    if not isinstance(topology, dict) or "granularity" in topology:
        return
    gpus, node_gpus = topology.get("gpus"), topology.get("gpus_per_node", 8)
    groups = topology.get("task_groups")
    if not (
        isinstance(gpus, int) and isinstance(node_gpus, int) and isinstance(groups, list | tuple)
    ):
        return  # reported with its key
    has_nodes = node_gpus > 0 and gpus % node_gpus == 0 and gpus // node_gpus >= len(groups)
    topology["granularity"] = "node" if has_nodes else "gpu"
    why = "" if has_nodes else ", because there are fewer whole nodes than groups"
    result.notes.append(f"{_GRANULARITY} is {topology['granularity']}, from the node ratios{why}")


def _merge_unused_groups(result: Renamed) -> None:
    """Merges groups of dots.rl's task groups that would have nothing to do into the group of ``train``."""
    try:
        spec = RunSpec.model_validate(result.document)
        roles = kinds_with_own_gpus(spec.topology)
    except (ValidationError, TaskGroupError):
        return  # reported with its key
    is_used = {
        "logp": spec.needs_proximal,
        "ref_logp": spec.needs_reference,
        "critic": spec.algorithm.advantage_kind.needs_critic,
    }
    unused = [kind.task for role, kind in roles.items() if not is_used.get(role, True)]
    groups, ratios = spec.topology.task_groups, spec.topology.ratios
    if not unused:
        return
    share, merged = 0.0, list[tuple[list[str], float]]()
    for group, ratio in zip(groups, ratios, strict=True):
        working = [task for task in group if task not in unused]
        if working:
            merged.append((working, ratio))
        else:
            share += ratio
    for working, _ in merged:
        if "train" in working:
            working.extend(unused)
    topology = result.document["topology"]
    topology["task_groups"] = [group for group, _ in merged]
    topology["ratios"] = [ratio + share * ("train" in group) for group, ratio in merged]
    result.notes.append(
        f"{_TASK_GROUPS}: {' and '.join(unused)} would have GPUs and no work, so train has them "
        f"({share:g} of all GPUs); logp works with trainer.updates_per_step above 1, ref_logp with "
        "algorithm.kl.coefficient above 0, critic with algorithm.advantage 'gae'"
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
