"""Data socket of a shard: decodes messages, executes them, answers, and counts rejected ones.

Writes are handled in order of arrival, before the commit that follows them. Reservations and
commits may wait, so each runs as its own task.
"""

import asyncio
import logging
import socket
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from services.common.admission import AdmissionProxy, private_socket
from services.common.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from services.common.fields import run_of
from services.common.task_group import TaskGroup, Waiters, unwrapped
from services.transferqueue import metrics
from services.transferqueue.settings import TransferQueueSettings
from services.transferqueue.storage.blobs import Arena, BlobStore, Grant
from services.wire.batch import KVBatchMeta
from services.wire.data.channels.arena_socket import LocalChannel, serve_arena
from services.wire.data.channels.sockets import MessageSocket, set_limits
from services.wire.data.encoding import codec
from services.wire.transferqueue.types import Shard


class Ownership:
    """Maps the blobs of one shard to the runs that own them."""

    def __init__(self) -> None:
        self._runs: dict[int, str] = {}

    def set_owner(self, blob_ids: Iterable[int], run_id: str) -> None:
        self._runs.update(dict.fromkeys(blob_ids, run_id))

    def remove(self, blob_ids: Iterable[int]) -> None:
        for blob_id in blob_ids:
            self._runs.pop(blob_id, None)

    def check_owner(self, run_id: str, blob_ids: Iterable[int]) -> None:
        """Checks that blobs belong to a run; deleted blobs have no owner and pass.

        Raises:
            PermissionDeniedError: If one belongs to another run.
        """
        for blob_id in blob_ids:
            check_run(run_id, self._runs.get(blob_id, run_id))


def check_run(run_id: str, owner: str) -> None:
    """Checks that the data a worker requests belongs to its run.

    Raises:
        PermissionDeniedError: If it does not.
    """
    if owner != run_id:
        raise PermissionDeniedError(f"a worker of {run_id} may only use data of its own run")


_ROOM = "room"
_BACKLOG = 1024
_MAX_UNKNOWN_BYTES = 8 << 10
"""Limit on what a connection sends before ZAP admits it; a CURVE handshake takes about 700 bytes."""


class Metadata(Protocol):
    """Interface of the index for a shard, in this process or in another."""

    async def reserve(
        self, put_id: str, partition_id: str, *, size_bytes: int, wait_s: float
    ) -> None:
        """Charges the run's quota."""

    def cancel(self, put_id: str) -> None:
        """Reverts the charge of a put, if there is one, at once or in the background."""

    async def commit(self, meta: KVBatchMeta, *, put_id: str) -> int:
        """Makes a put visible; a repeated call changes nothing."""


@dataclass(slots=True)
class _OpenPut:
    partition_id: str
    grant: Grant
    timer: asyncio.TimerHandle
    meta: KVBatchMeta | None = None


class Writer:
    """Executes the puts of one shard: reservation, description, commit or abort."""

    def __init__(self, shard_id: str, storage: BlobStore, metadata: Metadata) -> None:
        self._shard_id = shard_id
        self._storage = storage
        self._metadata = metadata
        self._waiters = Waiters()
        self._open: dict[str, _OpenPut] = {}
        self._reserving: set[str] = set()
        self._given_up: set[str] = set()
        self._owners = Ownership()
        metrics.CAPACITY_BYTES.set(storage.capacity_bytes)

    def check_ownership(self, run_id: str, request: codec.Request) -> None:
        """Checks that a worker's request concerns data of its run.

        Raises:
            PermissionDeniedError: If it does not.
        """
        match request:
            case codec.Reserve() | codec.Store():
                check_run(run_id, run_of(request.partition_id))
            case codec.Describe() | codec.Commit() | codec.Abort():
                if (put := self._open.get(request.put_id)) is not None:
                    check_run(run_id, run_of(put.partition_id))
            case codec.Write():
                self._owners.check_owner(run_id, (request.blob_id,))
            case codec.Read():
                self._owners.check_owner(run_id, request.ranges[::3])

    async def reserve(self, request: codec.Reserve) -> codec.Granted:
        """Reserves space for a put; waits until there is enough.

        Raises:
            ResourceExhaustedError: If there was no space in time; the message names the limit.
            InvalidArgumentError: If the put can never fit.
        """
        started_at = time.monotonic()
        self._begin(request.put_id)
        try:
            await self._metadata.reserve(
                request.put_id,
                request.partition_id,
                size_bytes=sum(request.sizes),
                wait_s=request.wait_s,
            )
            grant = await self._find_room(request, started_at + request.wait_s)
        except Exception:
            # Also if the index did not answer: it may have charged the put.
            self._metadata.cancel(request.put_id)
            raise
        finally:
            self._reserving.discard(request.put_id)
            self._given_up.discard(request.put_id)
        waited_s = time.monotonic() - started_at
        metrics.BACKPRESSURE.labels(run_of(request.partition_id)).inc(waited_s)
        timer = asyncio.get_running_loop().call_later(codec.GRANT_S, self._drop, request.put_id)
        self._owners.set_owner(grant.blob_ids, run_of(request.partition_id))
        self._open[request.put_id] = _OpenPut(request.partition_id, grant, timer)
        metrics.STORED_BYTES.set(self._storage.used_bytes)
        return codec.Granted(grant.blob_ids, grant.positions)

    def describe(self, request: codec.Describe) -> None:
        """Records the description of a put whose space is reserved.

        Raises:
            InvalidArgumentError: If it is malformed or concerns another partition.
        """
        put = self._open.get(request.put_id)
        if put is None:
            # The put was aborted or timed out; its commit reports that.
            return
        meta = KVBatchMeta.from_bytes(request.meta)
        if meta.partition_id != put.partition_id or len(meta.blobs) != len(put.grant.blob_ids):
            raise InvalidArgumentError(
                f"put {request.put_id} reserved {len(put.grant.blob_ids)} blobs in "
                f"{put.partition_id}, got {len(meta.blobs)} blobs in {meta.partition_id}"
            )
        put.meta = meta

    async def commit(self, request: codec.Commit) -> codec.Committed:
        """Completes a put and makes it visible.

        Raises:
            ServiceError: If bytes are damaged or the put breaks a rule; nothing of it stays.
        """
        return codec.Committed(await self._finish(request.put_id, request.checksums))

    async def store(self, request: codec.Store, data: memoryview) -> codec.Stored:
        """Executes a small put that arrives in one message.

        Raises:
            ServiceError: As ``reserve`` and ``commit``.
        """
        if len(data) != sum(request.sizes) or len(data) > codec.STORE_BYTES:
            raise InvalidArgumentError(
                f"expected {sum(request.sizes)} bytes of blobs and at most {codec.STORE_BYTES}, got "
                f"{len(data)}"
            )
        granted = await self.reserve(
            codec.Reserve(request.put_id, request.partition_id, request.sizes, request.wait_s)
        )
        try:
            self.describe(codec.Describe(request.put_id, request.meta))
        except InvalidArgumentError:
            self._drop(request.put_id)
            raise
        begin = 0
        for blob_id, size in zip(granted.blob_ids, request.sizes, strict=True):
            self._storage.write(blob_id, 0, data[begin : begin + size])
            begin += size
        revision = await self._finish(request.put_id, request.checksums)
        return codec.Stored(granted.blob_ids, revision)

    async def abort(self, request: codec.Abort) -> codec.Committed:
        """Aborts a put that waits for space or holds it; has no effect on any other put."""
        if request.put_id in self._reserving:
            self._given_up.add(request.put_id)
            self._waiters.wake(_ROOM)
        self._drop(request.put_id)
        return codec.Committed(0)

    def free(self, blob_ids: Sequence[int]) -> None:
        """Deletes blobs and wakes puts that wait for space."""
        self._storage.free(blob_ids)
        self._owners.remove(blob_ids)
        metrics.STORED_BYTES.set(self._storage.used_bytes)
        self._waiters.wake(_ROOM)

    async def _finish(self, put_id: str, checksums: Sequence[int]) -> int:
        put = self._open.pop(put_id, None)
        if put is None:
            raise FailedPreconditionError(
                f"put {put_id} has no reservation: it was never reserved, was aborted, or took longer than "
                f"{codec.GRANT_S} s; reserve again",
                put_id=put_id,
            )
        put.timer.cancel()
        try:
            meta = self._complete(put, checksums)
            await self._storage.seal(meta.blobs)
            return await self._metadata.commit(meta, put_id=put_id)
        except (DeadlineExceededError, UnavailableError):
            # The put may be visible, so its bytes stay. The index is unreachable: later it either
            # gives this shard up or knows the put.
            raise
        except BaseException:
            self._undo(put_id, put)
            raise

    def _complete(self, put: _OpenPut, checksums: Sequence[int]) -> KVBatchMeta:
        if put.meta is None or len(checksums) != len(put.meta.blobs):
            raise InvalidArgumentError(
                f"a commit must follow the description of the put and have one checksum for each of its "
                f"{len(put.grant.blob_ids)} blobs, got {len(checksums)}"
            )
        blobs = [
            replace(blob, shard_id=self._shard_id, blob_id=blob_id, checksum=checksum)
            for blob, blob_id, checksum in zip(
                put.meta.blobs, put.grant.blob_ids, checksums, strict=True
            )
        ]
        return replace(put.meta, blobs=tuple(blobs))

    def _drop(self, put_id: str) -> None:
        put = self._open.pop(put_id, None)
        if put is not None:
            put.timer.cancel()
            self._undo(put_id, put)

    def _undo(self, put_id: str, put: _OpenPut) -> None:
        self.free(put.grant.blob_ids)
        self._metadata.cancel(put_id)

    def _begin(self, put_id: str) -> None:
        if put_id in self._open or put_id in self._reserving:
            raise AlreadyExistsError(f"put {put_id} already has a reservation", put_id=put_id)
        self._reserving.add(put_id)

    async def _find_room(self, request: codec.Reserve, deadline: float) -> Grant:
        while True:
            if request.put_id in self._given_up:
                raise AbortedError(f"put {request.put_id} was aborted", put_id=request.put_id)
            grant = self._storage.reserve(request.sizes)
            if grant is not None:
                return grant
            if await self._storage.spill(sum(request.sizes)):
                continue
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                used_bytes, capacity = self._storage.used_bytes, self._storage.capacity_bytes
                raise ResourceExhaustedError(
                    f"shard {self._shard_id}: {used_bytes} of {capacity} bytes are in use and "
                    f"{sum(request.sizes)} more did not fit within {request.wait_s} s; release "
                    "samples or add memory",
                    shard_id=self._shard_id,
                    used_bytes=used_bytes,
                    capacity_bytes=capacity,
                )
            await self._waiters.wait(_ROOM, timeout_s=rest_s)


logger = logging.getLogger(__name__)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ALL_RUNS = "*"
"""Identity of a client without a run: a service, or any client if authentication is off."""
_CURVE_READY = b"\x05READY"
"""Command with which ZeroMQ ends the handshake of an admitted client (CurveZMQ, RFC 26)."""
_KEY_BYTES = 32
_HANDSHAKE_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

_RECEIVE_QUEUE = 16
_MAX_DETAIL = 1024
_PACK_BELOW_BYTES = 64 << 10


class Reply(Protocol):
    """Sends the frames of an answer to the peer that sent the request."""

    def __call__(self, frames: Sequence[bytes | memoryview], *, copy: bool = True) -> None:
        """Sends frames; without ``copy`` they must not change until the peer has answered."""


class Admission(Protocol):
    """Interface that identifies clients by their CURVE keys."""

    async def admitted_as(self, public_key: str) -> str | None:
        """Returns the run of the client with this key or ``ALL_RUNS``; None to refuse it."""


class DataPlane:
    """Serves the blobs of one shard over ZeroMQ and local sockets.

    Args:
        clients: Decides who may connect if the socket is encrypted.
    """

    def __init__(self, storage: BlobStore, puts: Writer, clients: Admission) -> None:
        self._storage = storage
        self._puts = puts
        self._clients = clients
        self._knows_peers = False
        self._running: set[asyncio.Task[None]] = set()
        self._locals: set[LocalChannel] = set()

    @asynccontextmanager
    async def serve(self, bind: str, *, secret_key: bytes | None) -> AsyncIterator[int]:
        """Serves until the block ends.

        Args:
            bind: ``host:port``; port 0 chooses a free one.
            secret_key: CURVE key; None serves without encryption.

        Yields:
            The port.
        """
        context = zmq.Context()
        try:
            with unwrapped():
                async with TaskGroup() as self._tasks:
                    gate = self._open_gate(context)
                    router = context.socket(zmq.ROUTER)
                    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                    set_limits(router, receive_queue=_RECEIVE_QUEUE)
                    self._knows_peers = secret_key is not None
                    events = router.get_monitor_socket(_HANDSHAKE_FAILED)
                    events.rcvhwm = 0  # a full queue would block ZeroMQ's thread
                    failures = MessageSocket(events, _count_stranger)
                    async with _bound(router, bind, secret_key) as port:
                        self._socket = MessageSocket(router, self._on_network)
                        yield port
                    router.disable_monitor()
                    failures.close()
                    self._socket.close()
                    gate.close()
                    for task in self._running:
                        task.cancel()
        finally:
            context.destroy(linger=0)

    @contextmanager
    def serve_local(self, path: Path, *, instance_id: str, fd: int) -> Iterator[None]:
        """Serves processes of this host until the block ends; see ``serve_arena``."""

        def accept_client(peer: socket.socket) -> None:
            self._spawn(self._open_local(peer))

        with serve_arena(path, instance_id=instance_id, fd=fd, accept_client=accept_client):
            yield
        for channel in list(self._locals):
            channel.close()

    async def _open_local(self, peer: socket.socket) -> None:
        def receive(frames: list[memoryview]) -> None:
            self._on_message(channel.send, frames, None)

        def end(is_refused: bool) -> None:
            self._locals.discard(channel)
            if is_refused:
                metrics.REJECTED.labels("data", "malformed").inc()

        channel = LocalChannel(receive, end)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, peer)
        self._locals.add(channel)

    def _open_gate(self, context: zmq.Context[zmq.Socket[bytes]]) -> MessageSocket:
        router = context.socket(zmq.ROUTER)
        router.bind(_ZAP_ENDPOINT)

        async def admit(frames: list[zmq.Frame]) -> None:
            request = [frame.bytes for frame in frames]
            gate.send(await _answer_zap(request, self._clients.admitted_as))

        gate = MessageSocket(router, lambda frames: self._spawn(admit(frames)))
        return gate

    def _on_network(self, frames: list[zmq.Frame]) -> None:
        peer, *message = frames
        run_id = _run_of_peer(message[0]) if message and self._knows_peers else None
        reply = partial(self._send, peer.bytes)
        self._on_message(reply, [frame.buffer for frame in message], run_id)

    def _on_message(self, reply: Reply, frames: list[memoryview], run_id: str | None) -> None:
        request_id = 0
        try:
            message, request_id = codec.decode(frames[0] if frames else b"")
            if run_id is not None and isinstance(message, codec.Request):
                self._puts.check_ownership(run_id, message)
            self._dispatch(reply, request_id, message, frames[1:])
        except ValueError as error:
            _refuse(reply, request_id, InvalidArgumentError(str(error)))
        except (InvalidArgumentError, PermissionDeniedError) as error:
            _refuse(reply, request_id, error)

    def _dispatch(
        self, reply: Reply, request_id: int, message: codec.Message, payload: list[memoryview]
    ) -> None:
        if len(payload) != isinstance(message, codec.Write | codec.Store):
            raise InvalidArgumentError(
                f"Write and Store need one payload frame, got {len(payload)}"
            )
        match message:
            case codec.Write():
                self._storage.write(message.blob_id, message.offset, payload[0])
                metrics.BYTES_IN.inc(len(payload[0]))
            case codec.Describe():
                self._puts.describe(message)
            case codec.Unpin():
                self._storage.unpin(message.pin_id)
            case codec.Reserve() | codec.Commit() | codec.Abort() | codec.Store() | codec.Read():
                self._spawn(self._answer(reply, request_id, message, payload))
            case _:
                raise InvalidArgumentError(f"expected a request, got {type(message).__name__}")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(
        self, reply: Reply, request_id: int, message: codec.Message, payloads: list[memoryview]
    ) -> None:
        started_at = time.monotonic()
        op = type(message).__name__.lower()
        payload: list[bytes | memoryview] = []
        try:
            answer = await self._run(message, payloads, payload)
        except ServiceError as error:
            answer = _failed(error)
        except Exception as error:
            logger.exception("data request failed", extra={"op": op})
            answer = _failed(InternalError(f"{op}: {type(error).__name__}: {error}"))
        is_pinned = isinstance(answer, codec.Data) and answer.pin_id > 0
        early = codec.encode(codec.Data(0, False, 0), request_id)
        for frame in payload[:-1]:
            reply([early, frame], copy=not is_pinned)
        reply([codec.encode(answer, request_id), *payload[-1:]], copy=not is_pinned)
        code = answer.reason if isinstance(answer, codec.Failed) else "OK"
        metrics.OPS.labels(op, code).inc()
        metrics.OP_DURATION.labels(op).observe(time.monotonic() - started_at)

    async def _run(
        self,
        message: codec.Message,
        payloads: list[memoryview],
        payload: list[bytes | memoryview],
    ) -> codec.Response:
        match message:
            case codec.Reserve():
                return await self._puts.reserve(message)
            case codec.Commit():
                return await self._puts.commit(message)
            case codec.Abort():
                return await self._puts.abort(message)
            case codec.Store():
                metrics.BYTES_IN.inc(len(payloads[0]))
                return await self._puts.store(message, payloads[0])
            case codec.Read():
                return await self._read(message, payload)
        raise AssertionError(message)

    async def _read(self, message: codec.Read, payload: list[bytes | memoryview]) -> codec.Response:
        numbers = message.ranges
        ranges = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        size = sum(numbers[2::3])
        metrics.BYTES_OUT.inc(size)
        positions = self._storage.positions(ranges) if message.in_arena else None
        if message.in_arena and positions is None:
            return codec.Located(0, ())
        if positions is not None:
            return codec.Located(self._pin(ranges), positions)
        if size > codec.MAX_READ_BYTES:
            raise InvalidArgumentError(
                f"a read of {size} bytes exceeds the limit of {codec.MAX_READ_BYTES}; split it"
            )
        # Small ranges are copied into the answer, so the blobs need no pin.
        pin_id = self._pin(ranges) if size >= _PACK_BELOW_BYTES else 0
        payload += _frames(await self._storage.views(ranges))
        checksum = codec.checksum_of(payload) if message.with_checksum else 0
        return codec.Data(pin_id, True, checksum)

    def _pin(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        pin_id = self._storage.pin(ranges)
        asyncio.get_running_loop().call_later(codec.PIN_S, self._storage.unpin, pin_id)
        return pin_id

    def _send(
        self, peer: bytes, frames: Sequence[bytes | memoryview], *, copy: bool = True
    ) -> None:
        try:
            self._socket.send([peer, *frames], copy=copy)
        except zmq.ZMQError as error:
            # The peer has disconnected or does not read; its own deadline ends its call.
            logger.warning("sending a response failed", extra={"error": str(error)})
            metrics.REJECTED.labels("data", "peer_gone").inc()


@asynccontextmanager
async def _bound(
    router: zmq.Socket[bytes], bind: str, secret_key: bytes | None
) -> AsyncIterator[int]:
    """Binds a socket until the block ends; yields the port.

    With a key, connections have limits until ZAP admits their client.
    """
    if secret_key is None:
        router.bind(f"tcp://{bind}")
        yield int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return
    _encrypt_socket(router, secret_key)

    def listen_at(path: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(_BACKLOG)
        router.setsockopt(zmq.USE_FD, listener.detach())
        router.bind("ipc://data")  # the name is not used

    proxy = AdmissionProxy(_MAX_UNKNOWN_BYTES, admitting=_CURVE_READY)
    with private_socket(listen_at) as target:
        async with proxy.serve(bind, target) as port:
            yield port


def _refuse(reply: Reply, request_id: int, error: ServiceError) -> None:
    is_foreign = isinstance(error, PermissionDeniedError)
    metrics.REJECTED.labels("data", "foreign" if is_foreign else "malformed").inc()
    reply([codec.encode(_failed(error), request_id)])


def _failed(error: ServiceError) -> codec.Failed:
    details = tuple(text[:_MAX_DETAIL] for pair in error.metadata.items() for text in pair)
    return codec.Failed(error.reason, error.message[:4096], details)


def _frames(views: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Splits large ranges into frames and joins small ones."""
    frames: list[bytes | memoryview] = []
    small: list[memoryview] = []
    num_small = 0
    for view in views:
        if len(view) < _PACK_BELOW_BYTES:
            small.append(view)
            num_small += len(view)
            if num_small < codec.FRAME_BYTES:
                continue
        if small:
            frames.append(b"".join(small))
            small, num_small = [], 0
        if len(view) >= _PACK_BELOW_BYTES:
            frames += [
                view[i : i + codec.FRAME_BYTES] for i in range(0, len(view), codec.FRAME_BYTES)
            ]
    if small:
        frames.append(b"".join(small))
    return frames


@asynccontextmanager
async def storage_shard(
    settings: TransferQueueSettings, index: Metadata, clients: Admission, *, instance_id: str
) -> AsyncIterator[tuple[Shard, BlobStore, Writer]]:
    """Serves the bytes of one shard until the block ends.

    Args:
        instance_id: Identifies this lifetime of the process.

    Yields:
        The shard's address, its blobs, and the writer of its puts.
    """
    public_key, secret_key = zmq.curve_keypair() if settings.use_curve else (b"", None)
    shard = Shard(
        shard_id=settings.shard_id,
        endpoint="",
        public_key=public_key.decode(),
        instance_id=instance_id,
    )
    async with AsyncExitStack() as stack:
        arena = Arena(settings.capacity_bytes, is_populated=settings.allocate_at_start)
        storage = _storage(settings, shard, arena)
        puts = Writer(settings.shard_id, storage, index)
        plane = DataPlane(storage, puts, clients)
        port = await stack.enter_async_context(
            plane.serve(settings.data_bind, secret_key=secret_key)
        )
        shard = replace(shard, endpoint=f"tcp://{settings.advertise_host}:{port}")
        if settings.arena_folder is not None:
            path = settings.arena_folder / f"slipstream-{shard.instance_id}.sock"
            stack.enter_context(plane.serve_local(path, instance_id=shard.instance_id, fd=arena.fd))
            shard = replace(shard, arena_socket=str(path))
        yield shard, storage, puts


def _storage(settings: TransferQueueSettings, shard: Shard, arena: Arena) -> BlobStore:
    spill = None
    if settings.spill_bytes:
        spill = Arena(settings.spill_bytes, settings.spill_folder / f"{shard.instance_id}.spill")
    # Greater than any id of an earlier lifetime of this shard that stored fewer than 16 M blobs/s.
    first_blob_id = int(time.time()) << 24
    return BlobStore(arena, first_blob_id=first_blob_id, spill=spill)


async def _answer_zap(
    frames: list[bytes], admitted_as: Callable[[str], Awaitable[str | None]]
) -> list[bytes]:
    """Answers one request of ZAP, ZeroMQ's authentication protocol (RFC 27), for the encrypted socket.

    Args:
        frames: Request as a ROUTER receives it: route, empty, version, request id, domain, address,
            identity, mechanism, credentials.
        admitted_as: Returns the run of a public key in Z85; None if it is not admitted.
    """
    route, request_id, mechanism, credentials = frames[0], frames[3], frames[7], frames[8:]
    run_id: str | None = None
    if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == _KEY_BYTES:
        try:
            run_id = await admitted_as(z85.encode(credentials[0]).decode())
        except ServiceError as error:
            logger.warning("checking a client's token failed", extra={"error": str(error)})
    if run_id is None:
        metrics.REJECTED.labels("data", "unauthenticated").inc()
        return [route, b"", b"1.0", request_id, b"400", b"not admitted", b"", b""]
    return [route, b"", b"1.0", request_id, b"200", b"OK", run_id.encode(), b""]


def _count_stranger(frames: list[zmq.Frame]) -> None:
    """Counts a client without CURVE. ZAP is not asked about it; one with an earlier key connects again."""
    event = parse_monitor_message([frame.bytes for frame in frames])
    if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        metrics.REJECTED.labels("data", "unauthenticated").inc()


def _run_of_peer(frame: zmq.Frame) -> str | None:
    """Returns the run of the client that sent a frame to an encrypted socket; None if it may use all."""
    run_id = str(frame.get("User-Id"))
    return None if run_id == ALL_RUNS else run_id


def _encrypt_socket(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """Restricts a socket to CURVE connections of clients that ZAP admits; call it before ``bind``."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"slipstream")
