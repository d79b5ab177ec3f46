"""Command channel from rank 0 to the other ranks of a worker, and failure notification among all ranks.

Rank 0 broadcasts every command as a small header and its bytes, so that no rank enters a collective alone. A
rank that fails writes the cause to the store of the process group. A thread of every other rank waits on that
key and aborts the rank's process groups. Then all processes end, which also closes what cannot be aborted.
The kernel ends connections to a silent host. A rank that has not ended a minute later kills itself.

A rank that was killed, or whose host was lost, writes nothing: a connection to it fails on another rank,
which calls the roll. The threads of all others answer, and the cause names the ranks that do not.
"""

import asyncio
import faulthandler
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from traceback import walk_tb
from typing import Never

import torch
from torch import distributed

from services.common.errors import UnavailableError
from services.common.host import ip_of
from services.trainer.collectives import abort_processes
from services.trainer.engines.base import OomLimitError

SILENCE_S = 30
"""Seconds after which a connection to a host that does not answer fails."""
_IDLE_S = 10
_PROBES = 4
logger = logging.getLogger(__name__)
_HEADER = struct.Struct("<qqqq")
_MAX_TEXT_BYTES = 512
_END = "worker/end"
_ROLL_CALL = "worker/roll-call"
_PRESENT = "worker/present/"
"""Key of the store. Its value is :data:`_ENDED_NORMALLY`, or the cause of the first rank that failed."""
_ENDED_NORMALLY = "ended"
_HOST = "worker/host/"
"""Prefix of the store's keys of all ranks' addresses and host names, for messages."""
_OUTAGE = "worker/outage/"
"""Prefix of the store's keys under which ranks above 0 report outages; an empty value reports their end."""
_LISTEN = timedelta(days=365)
# Seconds in which a rank that runs answers a roll call, on a busy machine too.
_ANSWER_S = 3.0
_ASK_EVERY_S = 0.05
# Process groups connect when they are first used.
_WATCH_EVERY_S = 5.0
# Seconds for the other ranks to read how rank 0 ended, before the store ends with its process.
_JOIN_S = 5.0
# Seconds for a rank to end after a failure; meanwhile rank 0 reports the cause to the controller.
_END_S = 60.0


def watch_connections() -> None:
    """Lets the kernel end each TCP connection of this process whose peer's host is silent for 30 s.

    Without this, a wait for data of a lost peer never ends, and a wait for its acknowledgements ends after 15
    minutes. A slow link stays connected, because acknowledgements arrive. Call this function again for
    connections that are opened later. It does nothing where the socket options of Linux are missing.
    """
    for entry in Path("/proc/self/fd").iterdir() if hasattr(socket, "TCP_USER_TIMEOUT") else ():
        with suppress(OSError):  # closed meanwhile, or no connection
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                    _watch(copy)


def _watch(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = (SILENCE_S - _IDLE_S) // _PROBES
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class CommandKind(IntEnum):
    """Kind of a command."""

    START = 1
    """Load the run whose specification is in the payload."""
    TRAIN = 2
    """Train a step; the payload is its batch."""
    GATHER = 3
    """Gather the weights that rank 0 sends, or the rows that every rank sends."""
    SAVE = 4
    """Save a checkpoint of a step."""
    STOP = 5
    """End the process."""
    SCORE = 6
    """Score a text with all ranks: the canary, or the tokens in the payload."""
    ADD_FIELD = 7
    """Add this worker's field to the samples in the payload."""
    ADOPT = 8
    """Adopt the weights that rank 0 received."""
    ACCUMULATE = 9
    """Accumulate gradients of groups of the next step; the payload has the groups."""
    SLEEP = 10
    """Move the training state to host memory."""
    WAKE = 11
    """Move the training state back to the GPU."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command from rank 0 to all ranks."""

    kind: CommandKind
    step: int = 0
    """Step that the command is for (SAVE)."""
    weight_version: int = 0
    """Version of the weights that a step starts from (ACCUMULATE) or that score (ADD_FIELD)."""
    payload: bytes = b""
    """A serialized ``StepCommand`` (TRAIN) or ``KVBatchMeta`` (ACCUMULATE, ADD_FIELD), or JSON."""


class RankFailedError(UnavailableError):
    """A rank of this worker failed. All ranks end and are restarted together."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"a rank failed, and all ranks restart: {cause}")


class CommandGroup:
    """All processes of a worker. With one process, sending does nothing.

    Args:
        size: Number of processes.
        host: Address or name under which other hosts reach this process.
    """

    def __init__(self, size: int, *, host: str = "127.0.0.1") -> None:
        self._size = size
        self._host = host
        self._lock = threading.Lock()
        self._cause: Future[str] = Future()

    @property
    def has_failed(self) -> bool:
        return self._cause.done()

    def share_outage(self, cause: str) -> None:
        """Reports to rank 0 why this rank cannot reach the transferqueue; an empty text ends the outage."""
        with suppress(RuntimeError, ValueError):  # after a failure the store is gone
            _default_store().set(f"{_OUTAGE}{distributed.get_rank()}", cause)

    def outage(self) -> str:
        """Returns the outage that a rank above 0 reports; empty if there is none. Rank 0 calls it."""
        if self._size == 1:
            return ""
        with suppress(RuntimeError, ValueError):
            store = _default_store()
            for rank in range(1, self._size):
                key = f"{_OUTAGE}{rank}"
                if store.check([key]) and (cause := store.get(key).decode()):
                    return f"rank {rank}: {cause}"
        return ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens for failures of other ranks, and watches the connections to them, until the worker ends.

        Each rank enters it after the process group is initialized.
        """
        if self._size == 1:
            yield
            return
        # The thread has its own connection: a waiting call blocks all others on the same connection.
        rank, default_store = distributed.get_rank(), _default_store()
        store = default_store.clone()
        where = f"{ip_of(self._host)} {socket.gethostname()}"
        store.set(f"{_HOST}{rank}", where)
        listener = threading.Thread(
            target=self._listen, args=(store,), name="rank-failures", daemon=True
        )
        listener.start()
        watches = {"rank-connections": _watch_connections, "rank-end": self._end_late}
        for name, target in watches.items():
            threading.Thread(target=target, name=name, daemon=True).start()
        try:
            yield
        finally:
            # The listener may destroy the process group at any moment, but not the store.
            if distributed.is_initialized() and rank == 0:
                default_store.compare_set(_END, "", _ENDED_NORMALLY)
                default_store.set(_ROLL_CALL, "")
            listener.join(_JOIN_S)

    def _listen(self, store: distributed.Store) -> None:  # type: ignore[name-defined]
        # If the store's process is gone, no cause can be read; the launcher ends the other ranks.
        with suppress(RuntimeError):
            store.wait([_ROLL_CALL], _LISTEN)
            store.set(f"{_PRESENT}{distributed.get_rank()}", "")
            store.wait([_END], _LISTEN)
            if (end := store.get(_END).decode()) != _ENDED_NORMALLY:
                self._abort(end)

    def fail(self, cause: str, *, blames_others: bool = False) -> "RankFailedError":
        """Ends this worker by aborting the process groups of all ranks; returns the error to raise.

        Args:
            cause: Reason why this rank cannot continue. If a rank failed before, its cause is used instead.
            blames_others: True if the cause is a failed collective, which other ranks or hosts caused.
        """
        # Another rank's failure may abort the groups at any moment; if rank 0 has ended, the store is gone.
        with suppress(RuntimeError, ValueError):
            if not self.has_failed:
                cause = f"rank {distributed.get_rank()}: {cause}"
                store = _default_store()
                if blames_others:
                    cause = self._blame(store, cause)
                cause = store.compare_set(_END, "", cause).decode()
                # Threads wait for it before they read how the worker ended.
                store.set(_ROLL_CALL, "")
        self._abort(cause)
        return RankFailedError(self._cause.result())

    def _blame(self, store: distributed.Store, cause: str) -> str:  # type: ignore[name-defined]
        """Returns the cause of a failed collective with the ranks, and their hosts, to which it points.

        These are the ranks that do not answer a roll call; if all do, those at an address in the cause.
        """
        if store.check([_END]):  # a rank that failed by itself has written why
            return cause
        # Rank 0 has the store, which answers.
        hosts = {
            rank: store.get(f"{_HOST}{rank}").decode().split()
            for rank in range(1, self._size)
            if store.check([f"{_HOST}{rank}"])
        }
        names = {rank: f"rank {rank} on {where[-1]} ({where[0]})" for rank, where in hosts.items()}
        store.set(_ROLL_CALL, "")
        end = time.monotonic() + _ANSWER_S
        silent = {rank for rank in hosts if rank != distributed.get_rank()}
        while silent and time.monotonic() < end:
            silent = {rank for rank in silent if not store.check([f"{_PRESENT}{rank}"])}
            time.sleep(_ASK_EVERY_S)
        if silent:
            verb = "does" if len(silent) == 1 else "do"
            return f"{', '.join(names[rank] for rank in sorted(silent))} {verb} not answer; {cause}"
        lost_hosts = [names[rank] for rank, where in hosts.items() if f"[{where[0]}]" in cause]
        return f"lost a connection to {' or '.join(lost_hosts)}; {cause}" if lost_hosts else cause

    async def failed(self) -> Never:
        """Waits until a rank fails.

        Raises:
            RankFailedError: Always.
        """
        # Threads share the future, so cancelling the waiting task must not cancel it.
        raise RankFailedError(await asyncio.shield(asyncio.wrap_future(self._cause)))

    def _abort(self, cause: str) -> None:
        with self._lock:
            if self._cause.done():
                return
            self._cause.set_result(cause)
            logger.error("a rank failed; this rank ends too", extra={"cause": cause})
            abort_processes()

    def _end_late(self) -> None:
        """Kills this process if it goes on after a failure: a wait for a lost rank may never end."""
        cause = self._cause.result()
        time.sleep(_END_S)
        logger.error("this rank did not end and is killed", extra={"cause": cause})
        faulthandler.dump_traceback()
        os._exit(1)  # noqa: TID251 -- other threads hold the process up

    def broadcast(self, command: Command) -> None:
        """Broadcasts a command from rank 0 to the others, unless a rank has failed."""
        if self._size == 1 or self.has_failed:
            return
        numbers = (command.kind, command.step, command.weight_version)
        _broadcast(bytearray(_HEADER.pack(*numbers, len(command.payload))))
        if command.payload:
            _broadcast(bytearray(command.payload))

    @contextmanager
    def guard(self, *, ends: bool = False) -> Iterator[None]:
        """Guards work of all ranks: raises the failure of any rank as an outage, which the run waits out.

        Args:
            ends: True if any error ends this rank; else only errors that leave other ranks waiting do.

        Raises:
            RankFailedError: If this rank or another one failed. All ranks are restarted together.
        """
        if self._size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            is_collective = _is_collective_error(error)
            leaves_others = isinstance(error, OomLimitError) or is_collective
            if ends and not (leaves_others or self.has_failed):
                logger.exception("this rank failed")
            if ends or leaves_others or self.has_failed:
                # After an abort every operation fails in some way; only the first cause matters.
                raise self.fail(str(error), blames_others=is_collective) from error
            raise
        if self.has_failed:
            raise RankFailedError(self._cause.result())

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in rank order. All ranks must call it."""
        if self._size == 1:
            return [text]
        buffer = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        messages = [torch.zeros_like(buffer) for _ in range(self._size)]
        distributed.all_gather(messages, buffer)
        return [bytes(message.tolist()).rstrip(b"\0").decode() for message in messages]

    def receive(self) -> Command:
        """Waits for the next command of rank 0."""
        header = _broadcast(bytearray(_HEADER.size))
        kind, step, weight_version, size = _HEADER.unpack(header)
        payload = bytes(_broadcast(bytearray(size))) if size else b""
        return Command(CommandKind(kind), step, weight_version, payload)


def _watch_connections() -> None:
    while True:
        watch_connections()
        time.sleep(_WATCH_EVERY_S)


def _is_collective_error(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    # NCCL failures have their own class. Gloo failures do not, and FSDP calls Gloo: the module that made
    # the failing call identifies them.
    callers = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
    caller = next(name for name in reversed(callers) if name != "torch._ops")
    return isinstance(error, distributed.DistError) or (
        caller.startswith("torch.distributed.") and not isinstance(error, torch.OutOfMemoryError)
    )


def _default_store() -> distributed.Store:  # type: ignore[name-defined]
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001 -- there is no public name


def _broadcast(data: bytearray) -> bytearray:
    distributed.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0)
    return data
