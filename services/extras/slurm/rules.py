"""Rules of the launcher that need no allocation, for ``slipstream validate --launcher slurm``."""

from collections.abc import Iterator

from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TaskGroupError


def problems(spec: RunSpec) -> Iterator[str]:
    """Yields reasons why no nodes of ``topology.gpus_per_node`` GPUs can run a specification."""
    try:
        spec.topology.gpus_of("train")
    except TaskGroupError:
        return  # another rule reports it
    node_gpus = spec.topology.gpus_per_node
    if spec.has_engine and spec.engine_gpus > node_gpus:
        arguments = spec.rollout.engine_arguments
        names = [
            name for name in engine_kind(spec.rollout.engine).gpu_arguments if name in arguments
        ]
        keys = ", ".join(f"rollout.engine_arguments.{name}" for name in names) or "rollout.engine"
        yield (
            f"{keys}: one rollout needs {spec.engine_gpus} GPUs, but the engine of a rollout runs on one "
            f"node, and topology.gpus_per_node is {node_gpus}; make their product at most {node_gpus} and "
            "raise rollout.replicas, or set topology.gpus_per_node to the GPUs of a node"
        )
    world_size = spec.trainer.world_size
    if spec.topology.is_colocated and world_size > node_gpus:
        yield (
            f"topology.placement {spec.topology.placement!r} runs trainer and rollouts on the same GPUs of "
            f"one node, so trainer.world_size must be at most topology.gpus_per_node ({node_gpus}), got "
            f"{world_size}; lower trainer.world_size, or set topology.placement to 'disaggregated'"
        )
