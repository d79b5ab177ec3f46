"""Plan of a worker: a file from which each of its tasks reads its settings, its node's part and its rank."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from services.common.runspec.workers import WORKERS
from services.extras.slurm.placement import Node, NodeShare, Placement


def worker_plan(
    role: str,
    placement: Placement,
    *,
    settings: Mapping[str, str],
    neighbours: Collection[str],
    num_ranks_on: Mapping[str, int],
    port: int,
) -> dict[str, Any]:
    """Returns the plan of a worker; only this user may read it, because it has the run's token.

    Args:
        settings: Settings of all of the worker's processes, without their prefix.
        neighbours: Roles of the run's other workers on the same GPUs.
        num_ranks_on: Number of processes of all workers on each node.
        port: Port of the first node at which the ranks meet.
    """
    kind = WORKERS[role]
    prefix = kind.settings_prefix
    environment = {f"{prefix}{name}": value for name, value in settings.items()}
    if neighbours:
        environment[f"{prefix}GPU_NEIGHBOURS"] = json.dumps([*neighbours])
    return {
        "module": kind.module,
        "prefix": prefix,
        "environment": environment,
        "ranks": placement.ranks,
        "master": placement.shares[0].node.address,
        "port": port,
        "nodes": {
            share.node.name: {
                "address": share.node.address,
                "gpus": list(share.gpus),
                "threads": max(1, share.node.processors // max(1, num_ranks_on[share.node.name])),
            }
            for share in placement.shares
        },
    }


def placement_of(file: Path, nodes: Mapping[str, Node]) -> Placement:
    """Returns the placement in the plan of a running worker."""
    plan = json.loads(file.read_text(encoding="utf-8"))
    shares = [
        NodeShare(nodes[name], tuple(node_plan["gpus"]))
        for name, node_plan in plan["nodes"].items()
    ]
    return Placement(plan["ranks"], tuple(shares))
