"""Collective group for weight transfers: outside torch's default group, a new one per epoch.

A group has a channel for each source: the source and all receivers. Channels are separate
communicators, so that several trainer ranks send at once, each over its own links. Members meet in
a key-value store that the controller serves over gRPC, so no rendezvous port is open to other
processes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.callables import load_callable
from services.common.runspec.weight_modes import TRANSPORTS
from services.weightsync.plan import WeightPlan

# This module waits and aborts by its own deadlines; this one only keeps torch's watchdog from
# interfering.
_NCCL_TIMEOUT = timedelta(hours=1)
# Max. thread blocks of all channels of a receiver with several: with NCCL's default per channel,
# they slow decoding down too much (docs/weight-sync.md).
_NCCL_BLOCKS = 40
# Gloo cannot be aborted from outside, so each of its collectives has a deadline: this long, plus
# the time of a bucket over a slow wire in bytes per second. A stopped peer is detected by then.
_GLOO_TIMEOUT_S = 1.0
_GLOO_RATE = 100e6


class KeyValueStore(Protocol):
    """Blocking key-value store for the members of one group; thread-safe."""

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns a value; waits for it at most ``timeout_s`` seconds."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""


class Work(Protocol):
    """A started collective."""

    def wait(self) -> bool:
        """Waits for the collective: on a CPU until it is done, on a GPU only in the current stream."""


class RendezvousStore(dist.Store):  # type: ignore[name-defined,misc]
    """Adapts a :class:`KeyValueStore` to torch's store interface."""

    def __init__(self, values: KeyValueStore, timeout_s: float) -> None:
        super().__init__()
        self._values = values
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Stores a value."""
        self._values.set(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Returns a value; waits for it until the deadline."""
        return self._values.get(key, self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        return self._values.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Returns False: NCCL's monitor asks for torch's own flags, which no member sets."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self._values.get(key, timeout_s)


class Channel:
    """Communicator of one source and all receivers; the source is rank 0."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._started: list[Work] = []

    def broadcast(self, tensor: Tensor) -> Work:
        """Starts to send (rank 0) or receive (others) a tensor in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work: Work = self._backend.broadcast([tensor], options)
        if not tensor.is_cuda:
            self._started.append(work)
        return work

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the deadline of collectives that start from now on (Gloo)."""
        self._started.clear()
        self._backend._set_default_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001  no public name

    def abort(self) -> None:
        """Ends the channel; pending and later collectives fail. Returns when none is pending."""
        self._backend.abort()
        # Gloo's collectives continue to their deadline, and destroying the backend would wait for
        # them.
        for work in self._started:
            with suppress(RuntimeError):
                work.wait()


class WeightGroup:
    """A formed weight group.

    Attributes:
        channels: The channels that this member belongs to, by source.
        device: Device of the transferred tensors.
    """

    def __init__(
        self,
        channels: dict[int, Channel],
        device: torch.device,
        store: RendezvousStore,
        *,
        ends_at_abort: bool,
    ) -> None:
        self.channels = channels
        self.device = device
        self._ends_at_abort = ends_at_abort
        # NCCL's monitor calls the store as long as the group lives, through a pointer that does not
        # keep it alive.
        self._store = store

    def bound(self, plan: WeightPlan) -> None:
        """Sets a deadline for each collective of the next transfer, if aborting does not end them."""
        if not self._ends_at_abort:
            longest = max(
                bucket.stop - bucket.start for source in plan.sources for bucket in source.buckets
            )
            for channel in self.channels.values():
                channel.set_timeout(_GLOO_TIMEOUT_S + longest / _GLOO_RATE)

    def settle(self) -> None:
        """Waits until all started collectives are done, or the group is aborted."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """Ends the group; pending and later collectives fail."""
        for channel in self.channels.values():
            channel.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """A member's rank and channels in a weight group."""

    sources: Sequence[int]
    """Channels that the member joins: its own for a source, all of them, in order, for a receiver."""
    num_sources: int
    """Number of channels of the group."""
    rank: int
    """Rank in each of its channels: 0 for a source, from 1 for receivers."""
    num_receivers: int
    """Number of receivers in the group."""


def form_group(
    backend: str,
    values: KeyValueStore,
    seat: RankAssignment,
    *,
    host: str,
    device: torch.device,
    timeout_s: float,
    folder: Path,
) -> WeightGroup:
    """Forms a group. All members call this at the same time; it blocks until all have joined.

    Args:
        backend: One of ``TRANSPORTS``.
        values: Store in which the members meet; a new one for each epoch.
        seat: This member's rank and channels.
        host: Address of this host, as the other members reach it.
        device: Device of the transferred tensors.
        timeout_s: Deadline of this call.
        folder: Folder for the files of a source.

    Raises:
        ValueError: If the backend is unknown.
        RuntimeError: If not all members joined in time.
        FailedPreconditionError: If the backend cannot connect the members.
    """
    if backend not in TRANSPORTS:
        raise ValueError(
            f"weight_sync.backend must be one of {', '.join(TRANSPORTS)}, got {backend!r}"
        )
    opened = load_callable(TRANSPORTS[backend].opener)
    store = RendezvousStore(values, timeout_s)
    channels = {
        source: Channel(
            opened(
                dist.PrefixStore(f"source{source}", store),  # type: ignore[attr-defined]
                seat,
                host=host,
                timeout_s=timeout_s,
                device=device,
                folder=folder,
            )
        )
        for source in seat.sources
    }
    ends_at_abort = TRANSPORTS[backend].ends_at_abort
    group = WeightGroup(channels, device, store, ends_at_abort=ends_at_abort)
    # The first collective connects the members, so a broken path fails here and not in a transfer.
    probe = torch.zeros(1, device=device)
    for channel in channels.values():
        channel.broadcast(probe).wait()
        group.settle()
    return group


def open_gloo(
    store: Any,
    seat: RankAssignment,
    *,
    host: str,
    timeout_s: float,
    device: torch.device,
    folder: Path,
) -> Any:
    """Creates a channel's Gloo process group, between the memories of hosts."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    return dist.ProcessGroupGloo(store, seat.rank, seat.num_receivers + 1, options)


def open_nccl(
    store: Any,
    seat: RankAssignment,
    *,
    host: str,
    timeout_s: float,
    device: torch.device,
    folder: Path,
) -> Any:
    """Creates a channel's NCCL process group, between GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT  # noqa: SLF001
    # Queued after the kernels of a training step, a transfer would take as long as the step.
    options.is_high_priority_stream = True
    if seat.num_sources > 1:
        options.config.max_ctas = max(1, _NCCL_BLOCKS // seat.num_sources)
    return dist.ProcessGroupNCCL(store, seat.rank, seat.num_receivers + 1, options)
