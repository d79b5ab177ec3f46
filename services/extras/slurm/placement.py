"""Placement of workers on the nodes of an allocation.

trainer, scoring    the first component whose nodes have GPUs (the first one if none has)
rollouts            the later components, if there are any
ranks of a worker   the fewest nodes that take equal numbers of them
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import gpu_hosts, worker_names
from services.common.runspec.workers import WORKERS


class PlacementError(RuntimeError):
    """Reports that no nodes have room for a worker; the message has the key and a fix."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the allocation."""

    name: str
    component: int
    """Index of its component; 0 for a job that is not heterogeneous."""
    address: str
    gpus: tuple[str, ...]
    """Names as ``CUDA_VISIBLE_DEVICES`` takes them."""
    tasks: int
    """Tasks that Slurm allocated on it: its places for workers if it has no GPU."""
    processors: int = 1
    ports: tuple[int, ...] = ()
    """Ports that no process of the node used at the start."""
    daemon: tuple[str, int] = ("", 0)
    """Address and port of its slurmd."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Part of a worker on one node."""

    node: Node
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes of a worker, in Slurm's order; each has the same number of its ranks."""

    ranks: int
    shares: tuple[NodeShare, ...]

    @property
    def nodes(self) -> list[str]:
        return [share.node.name for share in self.shares]

    @property
    def component(self) -> int:
        return self.shares[0].node.component


@dataclass(frozen=True, slots=True)
class _Need:
    """Resources that a worker needs."""

    worker_id: str
    role: str
    ranks: int
    gpus: int
    host: str = ""
    """Worker whose GPUs it shares; empty if it has its own."""


def needs(spec: RunSpec) -> Iterator[_Need]:
    """Yields what each worker needs, in the order of placement."""
    hosts = gpu_hosts(spec)
    for role, worker_id in worker_names(spec):
        kind = WORKERS[role]
        yield _Need(
            worker_id, role, kind.ranks(spec), kind.num_gpus(spec), hosts.get(worker_id, "")
        )


class Placements:
    """Nodes of the workers of all runs.

    A GPU has one worker; colocated workers share those of the trainer. Nodes without GPUs have a rank per
    task of Slurm; if there are fewer tasks, ranks share them.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)
        self._runs: dict[str, dict[str, Placement]] = {}

    @property
    def num_gpus(self) -> int:
        return sum(len(node.gpus) for node in self._nodes)

    def available_gpus(self, run_id: str) -> int:
        """Returns the number of GPUs that no other run uses."""
        other_runs = {name: placements for name, placements in self._runs.items() if name != run_id}
        return self.num_gpus - len(_used_gpus(other_runs))

    def assign(
        self,
        run_id: str,
        spec: RunSpec,
        *,
        lost_nodes: Collection[str] = (),
        running: Collection[str] = (),
    ) -> tuple[Mapping[str, Placement], Mapping[str, str]]:
        """Places the workers of a run that have no place or whose node is lost; others keep theirs.

        Args:
            lost_nodes: Nodes that get no worker.
            running: Workers that keep their GPUs on a lost node too, because they still use them.

        Returns:
            The placements by worker, and the reason for each rollout without one: another node had its GPUs.

        Raises:
            PlacementError: If a worker that the run needs has no place.
        """
        placements = self._runs.setdefault(run_id, {})
        needs_of_run = list(needs(spec))
        for worker_id in [*placements]:
            if worker_id not in running and set(placements[worker_id].nodes) & set(lost_nodes):
                del placements[worker_id]
        for worker_id in placements.keys() - {need.worker_id for need in needs_of_run}:
            del placements[worker_id]
        absent: dict[str, str] = {}
        for need in needs_of_run:
            if need.worker_id in placements:
                continue
            try:
                placements[need.worker_id] = self._place(need, placements, lost_nodes)
            except PlacementError as error:
                if need.role != "rollout" or not lost_nodes:
                    raise
                absent[need.worker_id] = str(error)
        if absent and not any(
            need.worker_id in placements for need in needs_of_run if need.role == "rollout"
        ):
            raise PlacementError(next(iter(absent.values())))
        return dict(placements), absent

    def restore(self, run_id: str, worker_id: str, placement: Placement) -> None:
        """Records where a worker runs that an earlier process placed."""
        self._runs.setdefault(run_id, {})[worker_id] = placement

    def find(self, run_id: str, worker_id: str) -> Placement | None:
        """Returns where a worker is placed; None if it has no nodes."""
        return self._runs.get(run_id, {}).get(worker_id)

    def workers_sharing(self, run_id: str, worker_id: str) -> list[str]:
        """Returns the workers of the same run that share GPUs with a worker."""
        run = self._runs[run_id]
        gpus = _used_gpus({run_id: {worker_id: run[worker_id]}})
        return [
            name
            for name, placement in run.items()
            if name != worker_id and gpus & _used_gpus({run_id: {name: placement}})
        ]

    def release(self, run_id: str) -> None:
        """Frees what the workers of a run had."""
        self._runs.pop(run_id, None)

    def _place(
        self, need: _Need, placements: Mapping[str, Placement], lost_nodes: Collection[str]
    ) -> Placement:
        if need.host:
            return _beside(need, placements)
        nodes = [node for node in self._nodes_of(need.role) if node.name not in lost_nodes]
        used_gpus, workers = _used_gpus(self._runs), self.num_ranks()
        gpus_per_rank = need.gpus // need.ranks
        if gpus_per_rank and any(node.gpus for node in self._nodes_of(need.role)):
            free = {node.name: _free_gpus(node, used_gpus) for node in nodes}
            room = {name: len(gpus) // gpus_per_rank for name, gpus in free.items()}
            chosen_nodes = _equal(nodes, room, need.ranks)
            if not chosen_nodes:
                raise PlacementError(_no_gpus(need, free, lost_nodes))
            count = need.gpus // len(chosen_nodes)
            shares = [NodeShare(node, free[node.name][:count]) for node in chosen_nodes]
        else:
            room = {node.name: node.tasks - workers[node.name] for node in nodes}
            chosen_nodes = _equal(nodes, room, need.ranks)
            if not chosen_nodes and not nodes:
                raise PlacementError(_no_nodes(need, lost_nodes))
            least_used = sorted(nodes, key=lambda node: -room[node.name])[:1]
            shares = [NodeShare(node, ()) for node in chosen_nodes or least_used]
        return Placement(need.ranks, tuple(shares))

    def _nodes_of(self, role: str) -> list[Node]:
        """Returns the nodes on which workers of a role run."""
        components = sorted({node.component for node in self._nodes})
        with_gpus = [node.component for node in self._nodes if node.gpus]
        first = min(with_gpus, default=components[0])
        later = [component for component in components if component > first]
        wanted_components = later if role == "rollout" and later else [first]
        return [node for node in self._nodes if node.component in wanted_components]

    def num_ranks(self) -> Counter[str]:
        """Returns the number of processes on each node."""
        counts: Counter[str] = Counter()
        for run in self._runs.values():
            for placement in run.values():
                for name in placement.nodes:
                    counts[name] += placement.ranks // len(placement.shares)
        return counts


def _used_gpus(runs: Mapping[str, Mapping[str, Placement]]) -> Counter[tuple[str, str]]:
    """Returns the number of workers of each GPU, by node and name."""
    return Counter(
        (share.node.name, gpu)
        for run in runs.values()
        for placement in run.values()
        for share in placement.shares
        for gpu in share.gpus
    )


def _free_gpus(node: Node, used_gpus: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    return tuple(gpu for gpu in node.gpus if (node.name, gpu) not in used_gpus)


def _equal(nodes: Sequence[Node], room: Mapping[str, int], ranks: int) -> list[Node]:
    """Returns the fewest nodes that have room for equal numbers of ranks; empty if there are none."""
    for count in range(1, min(ranks, len(nodes)) + 1):
        fitting = [node for node in nodes if room[node.name] >= ranks // count]
        if ranks % count == 0 and len(fitting) >= count:
            # A step is on nodes of one component.
            component = fitting[0].component
            fellows = [node for node in fitting if node.component == component]
            if len(fellows) >= count:
                return fellows[:count]
    return []


def _beside(need: _Need, placements: Mapping[str, Placement]) -> Placement:
    """Places a worker on the least used GPUs of the worker that it is colocated with."""
    host = placements[need.host]
    share = host.shares[0]
    if len(host.shares) > 1 or need.gpus > max(1, len(share.gpus)):
        raise PlacementError(
            f"topology.placement: {need.worker_id} shares the GPUs of {need.host}, which must be on one "
            f"node, but they are on {', '.join(host.nodes)}; lower trainer.world_size to the GPUs of a "
            "node, or set topology.placement to 'disaggregated'"
        )
    uses = Counter(
        gpu
        for name, placement in placements.items()
        if name != need.host
        for gpu in _own(placement, share)
    )
    gpus = sorted(share.gpus, key=lambda gpu: uses[gpu])[: need.gpus]
    return Placement(need.ranks, (NodeShare(share.node, tuple(gpus)),))


def _own(placement: Placement, share: NodeShare) -> Iterator[str]:
    for other_share in placement.shares:
        if other_share.node.name == share.node.name:
            yield from other_share.gpus


_KEYS: Mapping[str, str] = {
    "trainer": "trainer.world_size",
    "rollout": "rollout.replicas",
    "critic": "topology.ratios",
}


def _key(need: _Need) -> str:
    return _KEYS.get(need.role, "topology.scoring_ranks")


def _no_gpus(need: _Need, free: Mapping[str, Sequence[str]], lost_nodes: Collection[str]) -> str:
    counts = ", ".join(f"{name} {len(gpus)}" for name, gpus in free.items()) or "none"
    ranks = (
        f" for {need.ranks} ranks on equal shares of nodes" if need.ranks > 1 else " of one node"
    )
    lost_note = f"; lost nodes: {', '.join(sorted(lost_nodes))}" if lost_nodes else ""
    return (
        f"{_key(need)}: {need.worker_id} needs {need.gpus} GPUs{ranks}, but the free GPUs of the "
        f"allocation's nodes for it are: {counts}{lost_note}; lower it, or allocate "
        "more (sbatch --nodes, --gpus-per-node)"
    )


def _no_nodes(need: _Need, lost_nodes: Collection[str]) -> str:
    return (
        f"{_key(need)}: {need.worker_id} has no node, because all nodes for it are lost: "
        f"{', '.join(sorted(lost_nodes))}; requeue the job (scontrol requeue)"
    )
