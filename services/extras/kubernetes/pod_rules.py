"""Rules of the Kubernetes launcher: the GPUs of each pod of a run are those of one node.

The pod builder refuses what these rules refuse, so ``validate`` reports it before a pod is created.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Final

from services.common.launchers import PodTopology
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TaskGroupError
from services.common.runspec.worker_kinds import total_gpus
from services.common.runspec.workers import WORKERS, possible_kinds, scoring_ranks

_TOPOLOGY_FILE: Final = "topology"
_RANKS_KEYS: Final[Mapping[str, str]] = {"trainer": "trainer.world_size"}
"""Key that sets the ranks of a worker of a role, unless task groups do."""


def pod_topology(templates: Path) -> PodTopology:
    """Reads the topology of an installation from the folder of its worker templates.

    Raises:
        OSError: If the folder does not contain it.
    """
    text = (templates / _TOPOLOGY_FILE).read_text(encoding="utf-8").strip()
    return "bundled" if text == "bundled" else "separate"


def installed_pod_problems(templates: Path, spec: RunSpec) -> Iterator[str]:
    """Yields the problems of :func:`pod_problems` for the installation with these worker templates.

    If the folder cannot be read, the start of the run reports it.
    """
    with suppress(OSError):
        yield from pod_problems(spec, pod_topology(templates))


def pod_problems(spec: RunSpec, topology: PodTopology = "separate") -> Iterator[str]:
    """Yields reasons why no node of ``topology.gpus_per_node`` GPUs has room for a pod of the run.

    Also names entries of ``pods`` for workers that the run does not have.
    """
    try:
        spec.topology.gpus_of("train")
    except TaskGroupError:
        return  # another rule reports it
    yield from _kinds(spec)
    if topology == "bundled":
        yield from _bundle(spec)
        return
    for role, kind in possible_kinds(spec.topology).items():
        if not kind.num_workers(spec):
            continue
        num_ranks = kind.ranks(spec)
        num_nodes = nodes_of(num_ranks, spec)
        if num_nodes is None:
            yield _uneven(spec, role, num_ranks)
        elif kind.num_gpus(spec) // num_nodes > spec.topology.gpus_per_node:
            yield _wide(spec, role)
    yield from _turns(spec)


def nodes_of(num_ranks: int, spec: RunSpec) -> int | None:
    """Returns the number of nodes that the ranks of a worker fill; None if they do not fill the last one."""
    node_gpus = spec.topology.gpus_per_node
    if num_ranks > node_gpus and num_ranks % node_gpus:
        return None
    return max(1, num_ranks // node_gpus)


def _kinds(spec: RunSpec) -> Iterator[str]:
    """Yields the entries of ``pods`` for workers that the run does not have."""
    kinds = possible_kinds(spec.topology)
    present = [role for role, kind in kinds.items() if kind.num_workers(spec)]
    for kind in spec.pods:
        if kind not in present:
            yield (
                f"pods.{kind}: the run has no worker of that kind, only {', '.join(present)}; remove the "
                "entry"
            )


def _bundle(spec: RunSpec) -> Iterator[str]:
    num_gpus, node_gpus = total_gpus(spec), spec.topology.gpus_per_node
    if num_gpus > node_gpus:
        key = "topology.gpus" if spec.topology.task_groups else "trainer.world_size"
        yield (
            f"{key}: this installation runs all workers in one pod (workers.topology is bundled), of "
            f"{num_gpus} GPUs, but topology.gpus_per_node is {node_gpus}; lower trainer.world_size, "
            "rollout.replicas or topology.gpus, set topology.gpus_per_node to the GPUs of a node, or install "
            "with workers.topology separate"
        )


def _uneven(spec: RunSpec, role: str, num_ranks: int) -> str:
    node_gpus = spec.topology.gpus_per_node
    if WORKERS[role].ranks is scoring_ranks:
        key = "topology.scoring_ranks"
    elif spec.topology.task_groups:
        key = "topology.ratios"
    else:
        key = _RANKS_KEYS[role]
    counts = sorted({num_ranks // node_gpus * node_gpus, -(-num_ranks // node_gpus) * node_gpus})
    return (
        f"{key}: {role} has {num_ranks} ranks, which do not fill whole nodes of "
        f"topology.gpus_per_node ({node_gpus}) GPUs; give it {' or '.join(map(str, counts))}, or set "
        "topology.gpus_per_node to the GPUs of a node"
    )


def _wide(spec: RunSpec, role: str) -> str:
    engine, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    sizes = {name: arguments[name] for name in engine.gpu_arguments if name in arguments}
    keys = ", ".join(f"rollout.engine_arguments.{name}" for name, size in sizes.items() if size > 1)
    node_gpus, product = spec.topology.gpus_per_node, " * ".join(map(str, sizes.values()))
    factors = product if len(sizes) > 1 and prod(sizes.values()) == spec.engine_gpus else ""
    return (
        f"{keys or f'GPUs of {role}'}: one {role} needs {WORKERS[role].num_gpus(spec)} GPUs"
        f"{f' ({factors})' if factors else ''}, but an engine is one pod, and topology.gpus_per_node is "
        f"{node_gpus}; make their product at most {node_gpus} and raise rollout.replicas, or set "
        "topology.gpus_per_node to the GPUs of a node"
    )


def _turns(spec: RunSpec) -> Iterator[str]:
    num_ranks, node_gpus = spec.trainer.world_size, spec.topology.gpus_per_node
    if spec.topology.is_colocated and num_ranks > node_gpus:
        yield (
            f"topology.placement {spec.topology.placement!r} runs trainer and rollouts in one pod, so "
            f"trainer.world_size must be at most topology.gpus_per_node ({node_gpus}), got {num_ranks}; "
            "lower trainer.world_size, or set topology.placement to 'disaggregated'"
        )
