"""Channel whose source writes parts of a version to a store, from which receivers read them later.

::

    source     begin -> part 0 .. n-1, several at a time -> commit: the manifest, once all parts are there
    receiver   begin: the manifest, whose digest the source reported -> part 0 .. n-1, each compared with its
               digest before the mode sees it

Parts of tensors on a GPU pass through host memory, a few at a time.
"""

import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from services.common.errors import NotFoundError, ServiceError
from services.common.stores import StoreFolder
from services.extras.stored_weights.folders import check_writable, open_versions
from services.extras.stored_weights.layout import (
    Part,
    digest_of,
    manifest_content,
    manifest_digest,
    manifest_name,
    outdated,
    parse_manifest,
    part_name,
)
from services.weightsync.group import RankAssignment, Work
from services.weightsync.transfer import TransferError

_T = TypeVar("_T")

_THREADS: Final = 4
"""Parts that are written or read at a time."""
_BUFFERS: Final = 2 * _THREADS
"""Parts of a GPU's tensors in host memory at a time."""


def open_storage(
    store: Any,
    assignment: RankAssignment,
    *,
    host: str,
    timeout_s: float,
    device: torch.device,
    folder: Path,
    url: str,
    source: int,
) -> "StoredSource | StoredReceiver":
    """Returns the channel of one source: the source's side for rank 0, else that of a receiver.

    A source finds out at once whether it may write: it writes, reads and deletes a small object.

    Raises:
        ServiceError: If it may not, with the store's cause.
    """
    versions = open_versions(url)
    if assignment.rank > 0:
        return StoredReceiver(versions, source)
    check_writable(versions)
    return StoredSource(versions, source)


class AbortedError(RuntimeError):
    """The channel was aborted."""


class _Threads:
    """Runs blocking requests in daemon threads: one that hangs keeps no process from ending."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._aborted: Future[None] = Future()
        self._threads = [
            threading.Thread(target=self._run, name="weight-store", daemon=True)
            for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_aborted(self) -> bool:
        return self._aborted.done()

    def submit(self, work: Callable[[], _T]) -> "Future[_T]":
        future: Future[_T] = Future()

        def attempt() -> None:
            try:
                self.check()
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
                future.set_exception(error)

        self._tasks.put(attempt)
        return future

    def result(self, future: "Future[_T]") -> _T:
        """Waits for a result, or for the end of the channel.

        Raises:
            AbortedError: If the channel is aborted.
        """
        futures: tuple[Future[Any], Future[Any]] = (future, self._aborted)
        wait(futures, return_when=FIRST_COMPLETED)
        self.check()
        return future.result()

    def check(self) -> None:
        if self._aborted.done():
            raise AbortedError("the channel to the weight store was aborted")

    def abort(self) -> None:
        if not self._aborted.done():
            self._aborted.set_result(None)
            for _ in self._threads:
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class _Started:
    """A part that is being written or read."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        self._finish()
        return True


class _Side:
    """Base of both sides of a channel."""

    def __init__(self, folder: StoreFolder, source: int) -> None:
        self._folder = folder
        self._source = source
        self._threads = _Threads()
        self._buffers = threading.Semaphore(_BUFFERS)
        self._version = ""

    def abort(self) -> None:
        """Ends pending and later operations; a request that the store has may still be executed."""
        self._threads.abort()
        self._buffers.release(_BUFFERS)

    def _take_buffer(self) -> None:
        self._buffers.acquire()
        self._threads.check()


class StoredSource(_Side):
    """Writes versions; implements :class:`services.weightsync.group.StoredBackend`."""

    def __init__(self, folder: StoreFolder, source: int) -> None:
        super().__init__(folder, source)
        self._parts: list[Future[Part]] = []

    def begin(self, name: str, manifest: str) -> None:
        self._version, self._parts = name, []

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """Starts to write a tensor as the next part."""
        (tensor,) = tensors
        name = part_name(self._version, self._source, len(self._parts))
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        if flat.is_cuda:
            self._take_buffer()
            flat = _host_buffer(flat.numel()).copy_(flat)
            future = self._threads.submit(lambda: self._written_buffer(name, flat))
        else:
            future = self._threads.submit(lambda: self._written(name, flat))
        self._parts.append(future)
        return _Started(lambda: _ignored(self._threads.result(future)))

    def commit(self) -> str:
        """Writes the manifest; returns its digest.

        Raises:
            ServiceError: If a part or the manifest could not be written.
        """
        written_parts = [self._threads.result(future) for future in self._parts]
        content = manifest_content(self._version, self._source, written_parts)
        name = manifest_name(self._version, self._source)
        writing = self._threads.submit(lambda: self._folder.put(name, memoryview(content)))
        self._threads.result(writing)
        return manifest_digest(content)

    def retain(self, names: Collection[str]) -> None:
        """Deletes the versions of all sources but some, their manifests first, and remainders of probes."""
        deleting = self._threads.submit(lambda: self._delete_outdated(names))
        self._threads.result(deleting)

    def _delete_outdated(self, names: Collection[str]) -> None:
        try:
            manifests, other_names = outdated(self._folder.sizes(), names)
        except NotFoundError:  # nothing was written yet
            return
        self._folder.delete(manifests)
        self._folder.delete(other_names)

    def _written_buffer(self, name: str, buffer: Tensor) -> Part:
        try:
            return self._written(name, buffer)
        finally:
            self._buffers.release()

    def _written(self, name: str, flat: Tensor) -> Part:
        content = _bytes_of(flat)
        part = Part(name, len(content), digest_of(content))
        self._folder.put(name, content)
        return part


class StoredReceiver(_Side):
    """Reads versions; implements :class:`services.weightsync.group.StoredBackend`."""

    def __init__(self, folder: StoreFolder, source: int) -> None:
        super().__init__(folder, source)
        self._manifest: Future[tuple[Part, ...]] = Future()
        self._num_started = 0

    def begin(self, name: str, manifest: str) -> None:
        """Reads the manifest; a version that was not finished has none."""
        self._version, self._num_started = name, 0
        self._manifest = self._threads.submit(lambda: self._read_manifest(name, manifest))
        self._threads.result(self._manifest)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """Starts to read the next part into a tensor; its digest is compared before ``wait`` returns."""
        (tensor,) = tensors
        index, self._num_started = self._num_started, self._num_started + 1
        if not tensor.is_cuda:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            reading = self._threads.submit(lambda: self._read(index, flat))
            return _Started(lambda: _ignored(self._threads.result(reading)))
        buffering = self._threads.submit(lambda: self._read_buffer(index, tensor.nbytes))

        def copy() -> None:
            buffer = self._threads.result(buffering)
            tensor.detach().reshape(-1).view(torch.uint8).copy_(buffer)
            self._buffers.release()

        return _Started(copy)

    def commit(self) -> str:
        raise AssertionError("a receiver writes nothing")

    def retain(self, names: Collection[str]) -> None:
        raise AssertionError("a receiver deletes nothing")

    def _read_manifest(self, version: str, digest: str) -> tuple[Part, ...]:
        name = manifest_name(version, self._source)
        where = f"{self._folder.url}/{name}"
        try:
            content = self._folder.read(name)
        except NotFoundError as error:
            raise _gone(error) from error
        return parse_manifest(content, digest, where)

    def _read_buffer(self, index: int, num_bytes: int) -> Tensor:
        self._take_buffer()
        buffer = _host_buffer(num_bytes)
        self._read(index, buffer)
        return buffer

    def _read(self, index: int, flat: Tensor) -> None:
        parts = self._manifest.result()
        if index >= len(parts):
            raise TransferError(
                f"version {self._version} has {len(parts)} parts, but its part {index} is needed; it is "
                "rejected"
            )
        part_of_bucket, target = parts[index], _bytes_of(flat)
        where = f"{self._folder.url}/{part_of_bucket.name}"
        try:
            size = self._folder.read_into(part_of_bucket.name, target)
        except NotFoundError as error:
            raise _gone(error) from error
        if not size == part_of_bucket.size == len(target):
            raise TransferError(
                f"{where} has {size} bytes, its manifest states {part_of_bucket.size}, and {len(target)} are "
                "needed; the version is rejected"
            )
        if digest_of(target) != part_of_bucket.digest:
            raise TransferError(
                f"{where} is damaged: its digest is not that of its manifest; the version is rejected"
            )


def _host_buffer(num_bytes: int) -> Tensor:
    """Returns ``[num_bytes]`` uint8 in pinned memory, which a GPU copies several times faster.

    torch's allocator uses the memory of earlier buffers again.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _gone(error: ServiceError) -> TransferError:
    return TransferError(f"{error.message}; the version is incomplete, and rejected")


def _ignored(result: object) -> None:
    """Drops a result."""


def _bytes_of(flat: Tensor) -> memoryview:
    """Returns the memory of a tensor of bytes in host memory: ``[n]`` uint8."""
    array: Any = flat.numpy()
    return memoryview(array)
