"""Rollouts in the trainer's pod, which use its GPUs by turns.

The trainer's container requests the GPUs. The other containers request none, see all GPUs of the
node, and use those that the trainer names after it goes to sleep.
"""

import json
from collections.abc import Mapping
from typing import Any

from services.common.errors import FailedPreconditionError
from services.common.runspec.run import RunSpec
from services.controller.launch.gpus import HostGpus
from services.controller.launch.launcher import gpu_hosts, gpu_needs, total_gpus, worker_names


def join(container: dict[str, Any], worker_id: str, spec: RunSpec, *, ready_file: str) -> None:
    """Changes the container of a rollout so that it starts after the trainer, on the trainer's GPUs.

    Raises:
        FailedPreconditionError: If the trainer spans several nodes.
    """
    ranks, room = spec.trainer.world_size, spec.topology.gpus_per_node
    if ranks > room:
        raise FailedPreconditionError(
            f"topology.placement is {spec.topology.placement!r} and a pod holds both sides, but "
            f"trainer.world_size ({ranks}) is more than one node has, topology.gpus_per_node ({room}); lower "
            "trainer.world_size, or set topology.placement to 'disaggregated'"
        )
    host = HostGpus([str(number) for number in range(total_gpus(spec))])
    gpus = host.assign("", gpu_needs(spec), hosts=gpu_hosts(spec))[worker_id]
    timeout_s = f"{spec.limits.start_timeout_s:.0f}"
    container["command"] = [
        *("python", "-m", "services.rollout.colocated", ready_file, ",".join(gpus), timeout_s)
    ]
    roles: Mapping[str, str] = {name: role for role, name in worker_names(spec)}
    neighbours = [roles[name] for name in host.neighbours("", worker_id)]
    container["env"] += [
        {"name": "SLIPSTREAM_ROLLOUT_GPU_NEIGHBOURS", "value": json.dumps(neighbours)},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
    ]
