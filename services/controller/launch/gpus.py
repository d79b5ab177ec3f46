"""Assignment of this host's GPUs to worker processes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from services.common.errors import FailedPreconditionError

_DEVICES = Path("/dev")
_NOBODY: Mapping[str, str] = {}


def host_gpus(visible: str | None, devices: Path = _DEVICES) -> tuple[str, ...]:
    """Returns the GPUs that this process may give to its children.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES`` of this process; None if it is not set.
        devices: Folder of the device files.

    Returns:
        Names as ``CUDA_VISIBLE_DEVICES`` takes them; empty on a host without NVIDIA devices. CUDA
        numbers the devices of a container from 0, regardless of their file names.
    """
    if visible is not None:
        return tuple(name for name in visible.split(",") if name)
    return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))


class HostGpus:
    """Assigns the least used GPUs to each worker, so that workers share GPUs only when none are free."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._runs: dict[str, dict[str, tuple[str, ...]]] = {}

    @property
    def count(self) -> int:
        return len(self._gpus)

    def available_to(self, run_id: str) -> int:
        """Returns the number of GPUs that no other run uses."""
        exclusive_gpus = {
            gpu
            for owner, run in self._runs.items()
            if owner != run_id
            for ids in run.values()
            for gpu in ids
        }
        return len(set(self._gpus) - exclusive_gpus)

    def assign(
        self, run_id: str, needs: Mapping[str, int], *, hosts: Mapping[str, str] = _NOBODY
    ) -> Mapping[str, tuple[str, ...]]:
        """Assigns GPUs to each worker of a run; a restarted worker keeps its GPUs.

        Args:
            needs: Number of GPUs that each worker needs, in the order of assignment.
            hosts: Maps each colocated worker to the worker whose GPUs it shares, which must come earlier
                in ``needs``. No other worker gets these GPUs.

        Returns:
            The GPUs of each worker; empty on a host without GPUs.

        Raises:
            FailedPreconditionError: If one worker needs more than are available.
        """
        assigned = self._runs.setdefault(run_id, {})
        users = Counter(gpu for run in self._runs.values() for ids in run.values() for gpu in ids)
        for worker_id, count in needs.items():
            if worker_id in assigned:
                continue
            in_use = {gpu for host in hosts.values() for gpu in assigned.get(host, ())}
            free = [gpu for gpu in self._gpus if gpu not in in_use]
            if worker_id in hosts:
                free = [*assigned[hosts[worker_id]]]
            if self._gpus and count > len(free):
                beside = f" in addition to {len(in_use)} colocated ones" if in_use else ""
                raise FailedPreconditionError(
                    f"{worker_id} needs {count} GPUs, but this host has {len(free)}{beside}; reduce its "
                    "number of processes, or use a larger host"
                )
            assigned[worker_id] = tuple(sorted(free, key=users.__getitem__)[:count])
            users.update(assigned[worker_id])
        return assigned

    def unassigned_workers(self, run_id: str, needs: Mapping[str, int]) -> set[str]:
        """Returns the workers without GPUs in a run whose other workers have GPUs."""
        assigned = self._runs.get(run_id, {})
        return set(needs.keys() - assigned.keys()) if assigned else set()

    def release_unstarted(self, run_id: str, workers: Iterable[str]) -> None:
        """Releases the GPUs of workers that are not started."""
        for worker_id in workers:
            self._runs[run_id].pop(worker_id, None)

    def workers_sharing(self, run_id: str, worker_id: str) -> Sequence[str]:
        """Returns the workers of the same run that share GPUs with this one."""
        run = self._runs[run_id]
        ids = set(run[worker_id])
        return [worker for worker, gpus in run.items() if worker != worker_id and ids & set(gpus)]

    def release(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
