"""The collective group that weights travel in: outside torch's default group, one per epoch.

Members find each other through a key-value store that the controller serves over gRPC, so no rendezvous
port is open to strangers. Gloo on CPUs and NCCL on GPUs take the same store.
"""

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class KeyValueStore(Protocol):
    """Blocking key-value access for the members of one group; safe to call from any thread."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return a value, waiting for it at most ``timeout_s`` seconds."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""


class Work(Protocol):
    """A started collective."""

    def wait(self) -> bool:
        """Block until it is done; raises RuntimeError if it failed."""


class RendezvousStore(dist.Store):  # type: ignore[name-defined,misc]
    """A torch store over a :class:`KeyValueStore`."""

    def __init__(self, values: KeyValueStore, timeout_s: float) -> None:
        super().__init__()
        self._values = values
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._values.set(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it until the deadline."""
        return self._values.get(key, self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._values.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self._values.get(key, timeout_s)


class WeightGroup:
    """A formed group; rank 0 sends."""

    def __init__(self, backend: Any, *, rank: int, timeout_s: float) -> None:
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self.rank = rank

    def broadcast(self, tensor: Tensor) -> Work:
        """Start sending (rank 0) or receiving (others) a tensor in place; ``wait()`` on the result."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        work: Work = self._backend.broadcast([tensor], options)
        return work

    def abort(self) -> None:
        """End the group; pending and later collectives fail."""
        self._backend.abort()


def form_group(
    backend: str, values: KeyValueStore, *, rank: int, world_size: int, host: str, timeout_s: float
) -> WeightGroup:
    """Build a group. All members call this at once; it blocks until all are there.

    Args:
        backend: ``gloo`` or ``nccl``.
        values: Where the members meet; fresh for each epoch.
        rank: Of this member; 0 sends.
        world_size: Number of members.
        host: Address of this host, as the other members reach it.
        timeout_s: Deadline of this call and of each collective.

    Raises:
        ValueError: If the backend is unknown.
        RuntimeError: If not all members came in time.
    """
    store = RendezvousStore(values, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  no public name
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        probe = torch.zeros(1)
    elif backend == "nccl":
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout  # noqa: SLF001
        group = dist.ProcessGroupNCCL(store, rank, world_size, nccl_options)
        probe = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
    else:
        raise ValueError(f"weight_sync.backend must be 'gloo' or 'nccl', but is {backend!r}")
    formed = WeightGroup(group, rank=rank, timeout_s=timeout_s)
    # The first collective connects the members, so that a broken path fails here and not in a transfer.
    formed.broadcast(probe).wait()
    return formed
