"""Collective group for weight transfers: outside torch's default group, a new one per epoch.

A group has a channel for each source: the source and all receivers. Channels are separate
communicators, so that several trainer ranks send at once, each over its own links. Members meet in a
key-value store that the controller serves over gRPC, so no rendezvous port is open to other processes.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.callables import load_callable
from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from services.common.runspec.weight_modes import TRANSPORTS, Transport
from services.weightsync.checksum import write_checksum
from services.weightsync.endpoints import OwnThread, on_device
from services.weightsync.weight_plan import BUCKET_ALIGNMENT, WeightPlan

# This module waits and aborts by its own deadlines. This timeout only keeps torch's watchdog from
# interfering.
_NCCL_TIMEOUT = timedelta(hours=1)
# Max thread blocks of all channels together, if a receiver has several channels: with NCCL's
# default for each channel, they slow decoding down too much (docs/weight-sync.md).
_NCCL_BLOCKS = 40
# Gloo cannot be aborted from outside, so each of its collectives has a deadline: these seconds, plus
# the time of a bucket at the rate of a slow link in bytes per second. A stopped peer is detected by
# then.
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


class StoredBackend(Protocol):
    """Backend of a channel whose source leaves versions in a store, where receivers load them later.

    Methods block, except ``broadcast`` and ``abort``. Each may raise a ServiceError with the store's cause.
    """

    def begin(self, name: str, manifest: str) -> None:
        """Starts to write (a source) or to read (a receiver) a version.

        Args:
            name: Name of the version in the store.
            manifest: Digest that a receiver's manifest must have.
        """

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """Starts to write the next part of the version, or to read it and compare its digest."""

    def commit(self) -> str:
        """Writes the manifest of a source's version, after all its parts; returns the manifest's digest."""

    def retain(self, names: Collection[str]) -> None:
        """Deletes all versions but some."""

    def abort(self) -> None:
        """Ends pending and later operations."""


class RendezvousStore(dist.Store):  # type: ignore[name-defined,misc]
    """Adapts a :class:`KeyValueStore` to torch's store interface."""

    def __init__(self, values: KeyValueStore, timeout_s: float) -> None:
        super().__init__()
        self._values = values
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._values.set(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Returns a value; waits for it until the deadline."""
        return self._values.get(key, self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Returns False: NCCL's monitor asks for torch's own flags, which no member sets."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
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

    def begin(self, name: str, manifest: str) -> None:
        """Starts a version of a stored channel; see :meth:`StoredBackend.begin`."""
        self._started.clear()
        self._backend.begin(name, manifest)

    def commit(self) -> str:
        """Completes the version that a source has written to a store; returns the digest of its manifest."""
        digest: str = self._backend.commit()
        return digest

    def retain(self, names: Collection[str]) -> None:
        """Deletes all versions but some from a store."""
        self._backend.retain(names)

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
        transport: Transport,
    ) -> None:
        self.channels = channels
        self.device = device
        self._is_stored = transport.is_stored
        self._ends_at_abort = transport.ends_at_abort
        # NCCL's monitor calls the store as long as the group lives, through a pointer that does not
        # keep it alive.
        self._store = store

    def begin(self, stored_version: str, manifests: Sequence[str]) -> None:
        """Starts a transfer through a store; does nothing for members that meet.

        Args:
            stored_version: Name of the version in the store.
            manifests: For a receiver, the digest of each source's manifest; empty for a source.
        """
        if self._is_stored:
            for source, channel in self.channels.items():
                channel.begin(stored_version, manifests[source] if manifests else "")

    def commit(self) -> str:
        """Ends a source's transfer; returns the digest of its manifest in a store, or an empty text."""
        if not self._is_stored:
            return ""
        (channel,) = self.channels.values()
        return channel.commit()

    def retain(self, names: Collection[str]) -> None:
        """Deletes all versions but some from the store of a source; members that meet have none."""
        if self._is_stored:
            (channel,) = self.channels.values()
            channel.retain(names)

    def bound(self, plan: WeightPlan, timeout_s: float) -> None:
        """Sets a deadline for each collective of the next transfer, if aborting does not end them.

        Args:
            timeout_s: Deadline of the whole transfer in seconds; a bucket of each source has its
                share of it.
        """
        if not self._ends_at_abort:
            longest = max(
                bucket.stop - bucket.start for source in plan.sources for bucket in source.buckets
            )
            share_s = timeout_s * min(longest * len(plan.sources) / plan.num_bytes, 1.0)
            for channel in self.channels.values():
                channel.set_timeout(max(_GLOO_TIMEOUT_S + longest / _GLOO_RATE, share_s))

    def synchronize(self) -> None:
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
    assignment: RankAssignment,
    *,
    host: str,
    device: torch.device,
    timeout_s: float,
    folder: Path,
    url: str = "",
) -> WeightGroup:
    """Forms a group. All members call this at the same time; it blocks until all have joined.

    Members of a stored transport do not meet.

    Args:
        backend: One of ``TRANSPORTS``.
        values: Store in which the members meet; a new one for each epoch.
        host: Address of this host, as the other members reach it.
        device: Device of the transferred tensors.
        folder: Folder for the files of a source.
        url: Folder of the run's stored versions, or its URL.

    Raises:
        ValueError: If the backend is unknown.
        RuntimeError: If not all members joined in time.
        FailedPreconditionError: If the backend cannot connect the members.
    """
    if backend not in TRANSPORTS:
        raise ValueError(
            f"weight_sync.backend must be one of {', '.join(TRANSPORTS)}, got {backend!r}"
        )
    transport = TRANSPORTS[backend]
    opened = load_callable(transport.opener)
    store = RendezvousStore(values, timeout_s)
    channels = {
        source: Channel(
            opened(
                dist.PrefixStore(f"source{source}", store),  # type: ignore[attr-defined]
                assignment,
                host=host,
                timeout_s=timeout_s,
                device=device,
                folder=folder,
                **({"url": url, "source": source} if transport.is_stored else {}),
            )
        )
        for source in assignment.sources
    }
    group = WeightGroup(channels, device, store, transport)
    if transport.is_stored:
        return group
    # The first collective connects the members, so a broken path fails here and not in a transfer.
    probe = torch.zeros(1, device=device)
    for channel in channels.values():
        channel.broadcast(probe).wait()
        group.synchronize()
    return group


def open_gloo(
    store: Any,
    assignment: RankAssignment,
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
    return dist.ProcessGroupGloo(store, assignment.rank, assignment.num_receivers + 1, options)


def open_nccl(
    store: Any,
    assignment: RankAssignment,
    *,
    host: str,
    timeout_s: float,
    device: torch.device,
    folder: Path,
) -> Any:
    """Creates a channel's NCCL process group, between GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT  # noqa: SLF001
    # At normal priority, a transfer's kernels would wait for those of a training step, and the transfer
    # would take as long as the step.
    options.is_high_priority_stream = True
    if assignment.num_sources > 1:
        options.config.max_ctas = max(1, _NCCL_BLOCKS // assignment.num_sources)
    return dist.ProcessGroupNCCL(store, assignment.rank, assignment.num_receivers + 1, options)


logger = logging.getLogger(__name__)


class Epochs:
    """Joins and leaves the successive weight groups of a member.

    Args:
        host: Address of this host, as the other members reach it.
        rendezvous: Returns the store of a scope, in which members meet.
        folder: Folder for the files of a source.
    """

    def __init__(
        self,
        device: torch.device,
        host: str,
        rendezvous: Callable[[str], KeyValueStore],
        folder: Path,
    ) -> None:
        self._device = device
        self._host = host
        self._rendezvous = rendezvous
        self._folder = folder
        self._group: WeightGroup | None = None
        self._epoch = 0
        self.thread = OwnThread()
        """Thread for work that may block with the group; replaced after each group."""

    def group(self, epoch: int) -> WeightGroup:
        """Returns the group of an epoch.

        Raises:
            FailedPreconditionError: If this member is in no group of that epoch.
        """
        if epoch != self._epoch or self._group is None:
            raise FailedPreconditionError(
                f"this member has no weight group of epoch {epoch} (its epoch is "
                f"{self._epoch}); form the group first",
                epoch=epoch,
                current=self._epoch,
            )
        return self._group

    def holds(self, group: WeightGroup) -> bool:
        """Returns True if a group is still the current one."""
        return self._group is group

    async def join_group(
        self,
        epoch: int,
        assignment: RankAssignment,
        *,
        backend: str,
        device: torch.device,
        scope: str,
        timeout_s: float,
        url: str = "",
    ) -> None:
        """Joins the group of an epoch; the caller has already left an older one.

        Args:
            epoch: Number of the group; higher than any before.
            backend: One of ``TRANSPORTS``.
            scope: Scope of the store in which the members meet.
            url: Folder of the run's stored versions, or its URL.

        Raises:
            FailedPreconditionError: If a group of this or a newer epoch was formed or aborted
                before, or the backend cannot connect the members.
            DeadlineExceededError: If not all members joined in time.
            UnavailableError: If a member was lost meanwhile.
        """
        if epoch <= self._epoch:
            raise FailedPreconditionError(
                f"epoch must be greater than {self._epoch}, got {epoch}",
                epoch=epoch,
                current=self._epoch,
            )
        self._epoch = epoch
        values = self._rendezvous(scope)

        def join() -> WeightGroup:
            with on_device(self._device):
                # Compiles the GPU kernel, which would otherwise delay the first transfer.
                write_checksum(
                    torch.zeros(BUCKET_ALIGNMENT, dtype=torch.uint8, device=device),
                    torch.zeros(2, dtype=torch.int64, device=device),
                )
                return form_group(
                    backend,
                    values,
                    assignment,
                    host=self._host,
                    device=device,
                    timeout_s=timeout_s,
                    folder=self._folder,
                    url=url,
                )

        try:
            async with asyncio.timeout(timeout_s):
                group = await self.thread.run(join)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"weight group of epoch {epoch} was not formed within {timeout_s} s", epoch=epoch
            ) from error
        except RuntimeError as error:
            raise UnavailableError(
                f"weight group of epoch {epoch} was not formed: {error}", epoch=epoch
            ) from error
        if epoch != self._epoch:
            _end(group)
            raise FailedPreconditionError(
                f"epoch {epoch} was aborted while the group was formed", epoch=epoch
            )
        self._group = group
        logger.info(
            "weight group formed",
            extra={"epoch": epoch, "receivers": assignment.num_receivers, "backend": backend},
        )

    def leave_group(self, epoch: int | None = None) -> bool:
        """Ends the current group; returns True if there was one.

        NCCL takes half a second to end and Gloo up to a deadline, so ending continues in a thread.

        Args:
            epoch: Does nothing if the current epoch is newer than this one; otherwise, later groups must
                have a higher epoch. None ends the group in any case.
        """
        if epoch is not None:
            if epoch < self._epoch:
                return False
            self._epoch = epoch
        self.thread.close()
        self.thread = OwnThread()
        group, self._group = self._group, None
        if group is None:
            return False
        _end(group)
        return True


def _end(group: WeightGroup) -> None:
    threading.Thread(target=group.abort, name="weights-abort", daemon=True).start()
