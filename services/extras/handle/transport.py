"""Transport between processes on one device: the source exports a shared buffer of the device's memory.

    source      copies a chunk into one half of the buffer, notifies the receivers, and waits until
                all have copied it before it reuses that half
    receiver    copies the chunk to its target and notifies the source

A tensor that is itself part of an exported buffer, such as a sender's arena, is not copied into this one:
the source sends handle and position, and receivers copy from there. While other processes compute, a GPU
serves each process in turns of milliseconds, so every exchange of notifications takes some of these turns.
Without a copy into the shared buffer, a whole version takes one exchange.

Bytes move from the trainer's memory to the engine's on the device itself; only the notifications
pass through the host. The buffer is small for any model size. Correctness does not depend on its
content: if a member leaves during a transfer, the transfer ends at once, and received bytes are
verified as with any transport.
"""

import json
import os
import secrets
import selectors
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.errors import FailedPreconditionError
from services.common.host import short_path
from services.weightsync.group import RankAssignment, Work
from services.weightsync.shared_buffers import (
    SharedBuffer,
    SharedBufferError,
    export_buffer,
    exported_part,
    open_buffer,
)

_CHUNK_BYTES = 128 << 20
_HALVES = 2
_KEY, _VERDICT, _NOTHING = "buffer", "verdict", "nothing"
_MESSAGE = struct.Struct("<qq")
"""Number of a chunk, and its size in bytes."""
_PART = struct.Struct("<4sqq")
"""Announces a part of another exported buffer: ``_PART_MAGIC``, first byte and size; the handle follows."""
_PART_MAGIC = b"part"
_MAX_MESSAGE = 4096
_MAX_PARTS = 64
"""Max announced parts whose copies the source has not seen: a socket holds the notices of some 200."""
_COPIED = -1
"""Number in a notification, in place of that of a chunk, which reports the copy of an announced part."""
_SECRET_BYTES = 16
_PEER = struct.Struct("3i")
"""Process, user and group of a peer (struct ucred)."""
_MAX_SILENT = 16
"""Max connections that have not sent the secret; beyond it, the oldest is closed."""

# Exported buffers that no group uses any more: allocating CUDA memory is slow, and receivers that
# were killed may still have it open.
_FREE: dict[str, list[SharedBuffer]] = {}


def open_handle(
    store: Any,
    assignment: RankAssignment,
    *,
    host: str,
    timeout_s: float,
    device: torch.device,
    folder: Path,
) -> "SharedBufferGroup":
    """Opens a channel between processes that share a device.

    Args:
        store: Store in which the members meet.
        device: Device of the transferred tensors, the same for all members.
        folder: Folder of the source's socket, on a file system that the receivers see, too.

    Raises:
        FailedPreconditionError: If the buffer cannot be exported, or a member cannot open it.
    """
    opened = _exported if assignment.rank == 0 else _opened
    with opened(store, device, folder) as met:
        if why := _first_reason(store, assignment, met.why):
            raise FailedPreconditionError(
                f"weights cannot be transferred by handle: {why}; set weight_sync.backend to auto"
            )
        # A last-resort deadline: a member that waits for others is aborted earlier.
        met.line.settimeout(timeout_s)
        is_source = assignment.rank == 0
        lines = (
            _accepted(met, assignment.num_receivers, timeout_s) if is_source else [met.line.dup()]
        )
    backend = SharedBufferGroup(lines, met.buffer.memory, is_source=is_source)
    if is_source:
        weakref.finalize(backend, _FREE.setdefault(str(device), []).append, met.buffer)
    return backend


@dataclass(frozen=True, slots=True)
class _MemberBuffer:
    """Buffer and socket of a member before the members agree to use them."""

    buffer: SharedBuffer
    line: socket.socket
    """Socket that is connected to the source; on the source, the listening socket."""
    secret: bytes
    """Secret that receivers send first."""
    why: str
    """Reason why buffer or socket cannot be used; empty if they can."""


@contextmanager
def _exported(store: Any, device: torch.device, folder: Path) -> Iterator[_MemberBuffer]:
    """Exports a buffer and listens on a socket; records the reason if either fails."""
    free, buffer, why = _FREE.setdefault(str(device), []), SharedBuffer(torch.empty(0), ""), ""
    secret, path = secrets.token_bytes(_SECRET_BYTES), Path()
    with ExitStack() as stack:
        line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # This folder has mode 0700: the socket is never open to other users, regardless of the
            # process's umask.
            socket_folder = tempfile.TemporaryDirectory(prefix="weights-", dir=folder)
            path = Path(stack.enter_context(socket_folder)).resolve() / "socket"
            with short_path(path) as short:
                line.bind(short)
            path.chmod(0o600)
            line.listen()
            buffer = free.pop() if free else export_buffer(_HALVES * _CHUNK_BYTES, device)
        except (SharedBufferError, OSError) as error:
            why = str(error)
        store.set(_KEY, json.dumps([buffer.handle, str(path), secret.hex()]))
        yield _MemberBuffer(buffer, line, secret, why)


@contextmanager
def _opened(store: Any, device: torch.device, folder: Path) -> Iterator[_MemberBuffer]:
    """Opens the source's buffer and connects to its socket; records the reason if either fails."""
    handle, path, secret = json.loads(store.get(_KEY))
    buffer, why = SharedBuffer(torch.empty(0), handle), ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        try:
            buffer = SharedBuffer(open_buffer(handle, device), handle)
            with short_path(Path(path)) as short:
                line.connect(short)
            line.send(bytes.fromhex(secret))
        except (SharedBufferError, OSError) as error:
            why = str(error)
        yield _MemberBuffer(buffer, line, b"", why)


def _accepted(met: _MemberBuffer, count: int, timeout_s: float) -> list[socket.socket]:
    """Returns sockets to the receivers: processes of this user that send the secret. Ignores all others.

    Raises:
        TimeoutError: If they do not all connect in time.
    """
    lines: list[socket.socket] = []
    silent: deque[socket.socket] = deque()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:

        def drop(peer: socket.socket) -> None:
            silent.remove(peer)
            selector.unregister(peer)

        met.line.setblocking(False)
        selector.register(met.line, selectors.EVENT_READ)
        try:
            while len(lines) < count:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{len(lines)} of {count} receivers connected within {timeout_s:.0f} s"
                    )
                for key, _ in events:
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if peer is met.line:
                        _accept(met.line, silent, selector)
                        while len(silent) > _MAX_SILENT:
                            oldest = silent[0]
                            drop(oldest)
                            oldest.close()
                    else:
                        drop(peer)
                        if _knows(peer, met.secret):
                            peer.settimeout(timeout_s)
                            lines.append(peer)
                        else:
                            peer.close()
        finally:
            for peer in silent:
                peer.close()
    return lines


def _accept(
    line: socket.socket, silent: deque[socket.socket], selector: selectors.BaseSelector
) -> None:
    """Accepts a connection if its other end belongs to this user."""
    with suppress(OSError):  # the peer has already disconnected
        peer, _ = line.accept()
        _, user, _ = _PEER.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        )
        if user != os.geteuid():
            peer.close()
            return
        peer.setblocking(False)
        silent.append(peer)
        selector.register(peer, selectors.EVENT_READ)


def _knows(peer: socket.socket, secret: bytes) -> bool:
    """Returns True if the other end sent the secret."""
    try:
        return secrets.compare_digest(peer.recv(_SECRET_BYTES), secret)
    except OSError:
        return False


def _first_reason(store: Any, assignment: RankAssignment, why: str) -> str:
    """Returns the first reason why a member cannot use the buffer; empty if all members can use it.

    All members get the same result, so none of them waits for a member that gives up.
    """
    if assignment.rank > 0:
        store.set(f"report/{assignment.rank}", why or _NOTHING)
        verdict = store.get(_VERDICT).decode()
    else:
        reports = [
            store.get(f"report/{rank + 1}").decode() for rank in range(assignment.num_receivers)
        ]
        verdict = next(
            (reason for reason in (why, *reports) if reason not in ("", _NOTHING)), _NOTHING
        )
        store.set(_VERDICT, verdict)
    return "" if verdict == _NOTHING else verdict


class SharedBufferGroup:
    """Shared buffer with the process-group methods that :class:`~services.weightsync.group.Channel` uses.

    Broadcasts are executed in the order in which they were started, and only when the caller waits for one
    of them. A source then executes all of them, a receiver all up to the awaited one.

    Args:
        lines: Sockets to all receivers; for a receiver, to the source.
    """

    def __init__(self, lines: Sequence[socket.socket], buffer: Tensor, *, is_source: bool) -> None:
        self._lines = lines
        self._is_source = is_source
        self._halves = buffer.chunk(_HALVES)
        self._pending: deque[Tensor] = deque()
        self._num_started = self._num_done = 0
        self._doing = threading.Lock()
        self._parts: deque[int] = deque()
        """Sizes in bytes of the announced parts whose copies have not been reported yet."""
        self._opened: dict[str, Tensor] = {}
        """The source's other buffers by handle."""

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        """Starts to send (rank 0) or receive (others) a tensor."""
        (tensor,) = tensors
        self._pending.append(tensor.detach().reshape(-1).view(torch.uint8))
        self._num_started += 1
        return _Pending(self, self._num_started)

    def abort(self) -> None:
        """Makes running work fail at once, here and at the other ends."""
        for line in self._lines:
            with suppress(OSError):  # the other end closed it
                line.shutdown(socket.SHUT_RDWR)

    def finish(self, count: int) -> None:
        """Executes at least the first ``count`` of the started broadcasts.

        Raises:
            RuntimeError: If a member was lost or the group aborted.
        """
        with self._doing:
            try:
                while self._num_done < (self._num_started if self._is_source else count):
                    (self._send if self._is_source else self._receive)(self._pending.popleft())
                    self._num_done += 1
                if self._is_source:
                    self._await_copies()
                elif self._num_done == self._num_started:
                    self._notify_copies()
            except (OSError, IndexError) as error:
                raise RuntimeError(f"the other members of the group are gone: {error}") from error

    def _send(self, flat: Tensor) -> None:
        if (shared_handle := exported_part(flat)) is not None:
            handle, begin = shared_handle
            if len(self._parts) == _MAX_PARTS:
                # If neither end reads, both wait for space in their sockets.
                self._await_copies()
            self._send_message(_PART.pack(_PART_MAGIC, begin, len(flat)) + handle.encode())
            self._parts.append(len(flat))
            return
        chunks = flat.split(len(self._halves[0]))
        for number, chunk in enumerate(chunks):
            if number >= _HALVES:
                self._await_notice(number - _HALVES, chunks[number - _HALVES])
            self._half(number, chunk).copy_(chunk, non_blocking=True)
            _settle(chunk)
            self._notify(number, chunk)
        for number in range(max(0, len(chunks) - _HALVES), len(chunks)):
            self._await_notice(number, chunks[number])

    def _receive(self, flat: Tensor) -> None:
        (line,) = self._lines
        for number, chunk in enumerate(flat.split(len(self._halves[0]))):
            if self._parts and not _is_readable(line):
                # The source may wait for these copies before it sends more.
                self._notify_copies()
            message = line.recv(_MAX_MESSAGE)
            if number == 0 and message.startswith(_PART_MAGIC):
                self._copy_part(message, flat)
                return
            _check_message(message, number, len(chunk))
            chunk.copy_(self._half(number, chunk), non_blocking=True)
            _settle(chunk)
            self._notify_copies()
            self._notify(number, chunk)

    def _copy_part(self, message: bytes, flat: Tensor) -> None:
        """Starts to copy an announced part; the source is notified later."""
        _, begin, size = _PART.unpack_from(message)
        handle = message[_PART.size :].decode()
        if handle not in self._opened:
            # A source sends from one buffer at a time.
            self._opened = {handle: open_buffer(handle, flat.device)}
        if size != len(flat):
            raise RuntimeError(f"expected {len(flat)} bytes, but the source announced {size}")
        flat.copy_(self._opened[handle][begin : begin + size], non_blocking=True)
        self._parts.append(size)

    def _notify_copies(self) -> None:
        """Notifies the source of all copied parts, after the copies are done."""
        if self._parts:
            _settle(self._halves[0])
        while self._parts:
            self._send_message(_MESSAGE.pack(_COPIED, self._parts.popleft()))

    def _await_copies(self) -> None:
        """Waits until all other ends have copied all announced parts."""
        while self._parts:
            size = self._parts.popleft()
            for line in self._lines:
                _check_message(line.recv(_MESSAGE.size), _COPIED, size)

    def _half(self, number: int, chunk: Tensor) -> Tensor:
        return self._halves[number % _HALVES][: len(chunk)]

    def _notify(self, number: int, chunk: Tensor) -> None:
        """Notifies the other ends: a source wrote the chunk to the buffer; a receiver has copied it."""
        self._send_message(_MESSAGE.pack(number, len(chunk)))

    def _send_message(self, message: bytes) -> None:
        for line in self._lines:
            line.sendall(message)

    def _await_notice(self, number: int, chunk: Tensor) -> None:
        """Waits until all other ends have sent the notification of a chunk."""
        self._await_copies()
        for line in self._lines:
            _check_message(line.recv(_MESSAGE.size), number, len(chunk))


def _check_message(message: bytes, number: int, size: int) -> None:
    """Raises RuntimeError unless a message notifies of this chunk, or of a copied part."""
    if message != _MESSAGE.pack(number, size):
        raise RuntimeError(
            f"expected a notice of chunk {number} of {size} bytes, "
            + (f"got {message.hex()}" if message else "but the connection was closed")
        )


def _is_readable(line: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        return bool(selector.select(0))


class _Pending:
    """A started broadcast."""

    def __init__(self, buffer: SharedBufferGroup, number: int) -> None:
        self._buffer = buffer
        self._number = number

    def wait(self) -> bool:
        """Waits until the tensor may be used or changed."""
        self._buffer.finish(self._number)
        return True


def _settle(chunk: Tensor) -> None:
    """Waits until the copy is done and other processes see it."""
    if chunk.is_cuda:
        torch.cuda.current_stream(chunk.device).synchronize()
