"""Client of Mooncake Store with one registered buffer.

Registering memory costs more than copying it, so all bytes pass through a buffer that is registered
once. The methods block; call them in a thread.
"""

import ctypes
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from services.common.errors import InternalError, NotFoundError, ResourceExhaustedError
from services.wire.data.encoding.codec import ALIGNMENT, aligned
from services.wire.transferqueue.types import ObjectStoreAddress

T = TypeVar("T")
Range = tuple[str, int, int]
"""Key of an object, offset, size."""

PLACE_BITS = 34
"""Bits of a blob's id for its position in the object, in units of ALIGNMENT: up to 1 TiB."""
_FULL = -200
_TRANSFER_FAILED = -800
_FAILOVER_S = 20.0
"""The master needs about 10 s to detect a dead process, and afterwards lists only the other copies."""
_RETRY_S = 0.25
_CONNECT_S = 20.0
"""Deadline for the first contact with the master, which takes about a second."""
_CONNECT = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, local_bytes, protocol, master = sys.argv[1:]
store = MooncakeDistributedStore()
code = store.setup(host, "P2PHANDSHAKE", 0, int(local_bytes), protocol, "", master)
os._exit(code != 0)
"""
_STAGING_BYTES = 32 << 20
_LOCAL_BYTES = 16 << 20


class ObjectStore:
    """Client of Mooncake Store.

    Args:
        address: The master, its protocol, and the number of copies.
        host: Name under which other clients reach this process.
        segment_bytes: Memory that this process contributes to the store; 0 for mere clients.

    Raises:
        InternalError: If the store cannot be reached.
    """

    def __init__(self, address: ObjectStoreAddress, *, host: str, segment_bytes: int) -> None:
        _check_master(address, host)
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            host,
            "P2PHANDSHAKE",
            segment_bytes,
            _LOCAL_BYTES,
            address.protocol,
            "",
            address.master,
        )
        if code != 0:
            raise _out_of_reach(address, f"code {code}")
        self._config = ReplicateConfig()
        self._config.replica_num = address.num_replicas
        # Samples must not be evicted before they are released.
        self._config.with_hard_pin = True
        self._lock = threading.Lock()
        self._staging = self._register(_STAGING_BYTES)

    def close(self) -> None:
        """Disconnects from the store; the memory that this process contributed is lost."""
        self._store.close()

    def write(self, key: str, sizes: Sequence[int], fill: Callable[[Sequence[memoryview]], T]) -> T:
        """Stores an object of several aligned parts.

        Args:
            key: Key of the object.
            sizes: Sizes of the parts.
            fill: Receives memory for each part and fills it.

        Returns:
            The result of ``fill``.

        Raises:
            ResourceExhaustedError: If the store is full.
        """
        with self._lock:
            starts = list(accumulate(map(aligned, sizes), initial=0))
            self._grow(starts[-1])
            memory = memoryview(self._staging)
            result = fill(
                [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
            )
            (code,) = self._store.batch_put_from([key], [self._base], [starts[-1]], self._config)
        if code == _FULL:
            raise ResourceExhaustedError("Mooncake Store is full; release samples or add memory")
        if code != 0:
            raise InternalError(f"Mooncake Store rejected {key} with code {code}")
        return result

    def read(self, ranges: Sequence[Range], target: memoryview) -> None:
        """Fetches ranges of objects, concatenated into ``target``.

        Raises:
            NotFoundError: If an object is gone.
        """
        with self._lock:
            done = 0
            for batch in _batches(ranges):
                sizes = [size for _, _, size in batch]
                self._read_batch(batch, sizes)
                total = sum(sizes)
                target[done : done + total] = memoryview(self._staging)[:total]
                done += total

    def remove(self, keys: Sequence[str]) -> None:
        """Deletes objects; ignores missing ones."""
        self._store.batch_remove(list(keys), True)

    def _read_batch(self, batch: Sequence[Range], sizes: Sequence[int]) -> None:
        deadline = time.monotonic() + (_FAILOVER_S if self._config.replica_num > 1 else 0.0)
        while True:
            codes = self._codes_of_read(batch, sizes)
            if _TRANSFER_FAILED not in codes or time.monotonic() > deadline:
                break
            time.sleep(_RETRY_S)
        for (key, _, size), got in zip(batch, codes, strict=True):
            if got != size:
                raise NotFoundError(
                    f"{key} is not in Mooncake Store (code {got}); its samples were released or "
                    "the process that stored them has ended",
                    key=key,
                )

    def _codes_of_read(self, batch: Sequence[Range], sizes: Sequence[int]) -> list[int]:
        """Returns the number of bytes read for each range, or an error code."""
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        ((answers),) = self._store.get_into_ranges(
            [self._base],
            [[key for key, _, _ in batch]],
            [[[start] for start in starts]],
            [[[offset] for _, offset, _ in batch]],
            [[[size] for size in sizes]],
        )
        return [got for (got,) in answers]

    def _grow(self, size_bytes: int) -> None:
        if size_bytes > len(self._staging):
            self._store.unregister_buffer(self._base)
            self._staging = self._register(size_bytes)

    def _register(self, size_bytes: int) -> mmap.mmap:
        staging = mmap.mmap(
            -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        )
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        code = self._store.register_buffer(self._base, size_bytes)
        if code != 0:
            raise InternalError(f"Mooncake Store cannot register {size_bytes} bytes (code {code})")
        return staging


def _check_master(address: ObjectStoreAddress, host: str) -> None:
    """Checks that a master answers, in a subprocess that can be killed.

    If there is no master, the library tries for minutes and holds the GIL meanwhile.

    Raises:
        InternalError: If no master answers.
    """
    command = [
        sys.executable, "-c", _CONNECT, host, str(_LOCAL_BYTES), address.protocol, address.master,
    ]  # fmt: skip
    try:
        ended = subprocess.run(  # noqa: S603  our own interpreter and script
            command, capture_output=True, timeout=_CONNECT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _out_of_reach(address, f"no response within {_CONNECT_S} s") from error
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        raise _out_of_reach(address, said[-1] if said else "refused")


def _out_of_reach(address: ObjectStoreAddress, reason: str) -> InternalError:
    return InternalError(
        f"Mooncake Store at {address.master} cannot be used ({reason}); check that the pinned version of "
        "mooncake_master runs there and that the setting mooncake_master has its address",
        master=address.master,
    )


def _batches(ranges: Sequence[Range]) -> list[list[Range]]:
    """Splits ranges into batches that fit the buffer."""
    batches: list[list[Range]] = [[]]
    room = _STAGING_BYTES
    for key, offset, size in ranges:
        done = 0
        while done < size:
            if room == 0:
                batches.append([])
                room = _STAGING_BYTES
            step = min(size - done, room)
            batches[-1].append((key, offset + done, step))
            done += step
            room -= step
    return [batch for batch in batches if batch]


def object_place(instance_id: str, blob_id: int) -> tuple[str, int]:
    """Returns the key of the object that holds a blob, and the blob's byte offset in it."""
    number, place = divmod(blob_id, 1 << PLACE_BITS)
    return f"{instance_id}/{number}", place * ALIGNMENT


def object_range(instance_id: str, blob_id: int, offset: int, size: int) -> Range:
    """Converts a range of a blob to a range of its object."""
    key, begin = object_place(instance_id, blob_id)
    return key, begin + offset, size
