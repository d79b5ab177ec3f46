"""Member of a weight group in a server's worker: receives versions from the trainer while the engine decodes.

It runs in threads of the worker's process. vLLM calls the worker only to start it, and to load a
version that it has received and verified.
"""

import asyncio
import itertools
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from services.extras.fleets.direct.messages import (
    ADD,
    DONE,
    FAILED,
    FORM,
    GET,
    RECEIVE,
    SET,
    VALUE,
    Message,
    decoded,
    encoded,
    read_plan,
)
from services.extras.fleets.hosts import shut_down
from services.weightsync.checksum import write_checksum
from services.weightsync.endpoints import on_device
from services.weightsync.group import RankAssignment, WeightGroup, form_group
from services.weightsync.modes.base import Receiver
from services.weightsync.modes.shadow import shadow_receiver
from services.weightsync.shared_buffers import gpu_of
from services.weightsync.transfer import Transferred, TransferRequest
from services.weightsync.weight_plan import BUCKET_ALIGNMENT, version_digest

logger = logging.getLogger(__name__)

_LOAD_WAIT_S: Final = 30.0
"""Longest time in which a load waits for a transfer, and the reverse."""


class ServerMember:
    """Receives versions into a second copy of the weights on the worker's device.

    Args:
        address: Listener of the server's middleware: a socket's path, or host and port.
        secret: Secret of the listener.
        number: Number of the worker in its server.
        device: Device of its weights.
        on_received: Receives the tensors of each version, in the stream in which it was received, before
            :meth:`held` gives them to the engine.
        on_dropped: Called before the memory of these tensors is freed: nothing may refer to them afterwards.
    """

    def __init__(
        self,
        address: str | Sequence[Any],
        secret: bytes,
        *,
        number: int,
        device: torch.device,
        on_received: Callable[[Mapping[str, Tensor]], None] = lambda tensors: None,
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = device
        self._on_received = on_received
        self._on_dropped = on_dropped
        self.phases_ms: dict[str, float] = {}
        """Durations of the last version's receipt and preparation."""
        path_or_port = address if isinstance(address, str) else (str(address[0]), int(address[1]))
        self._line = Client(path_or_port, authkey=secret)
        self._host = ""
        """Address of this host for the trainer, if it is not that of the server."""
        if not isinstance(address, str):
            with socket.socket(fileno=os.dup(self._line.fileno())) as end:
                self._host = str(end.getsockname()[0])
        self._writing = threading.Lock()
        self._requests = itertools.count()
        self._store = _RelayedStore(self._send, -1, self._requests)
        self._number = 0
        """Number of the newest group; a close ends all."""
        self._plan_hash = ""
        self._receiver: Receiver | None = None
        self._group: WeightGroup | None = None
        self._version: tuple[int, str] | None = None
        self._why = ""
        """Reason why the received version cannot be loaded; empty if it can."""
        self._tensors: Mapping[str, Tensor] = {}
        self._weights = threading.Lock()
        """Held while the second copy is written, and while the engine loads it."""
        self._stream: torch.cuda.Stream | None = None
        self._send({"number": number})
        threading.Thread(target=self._read, name="weights-member", daemon=True).start()

    @property
    def device_name(self) -> str:
        return "cpu" if self._device.type == "cpu" else gpu_of(self._device)

    @contextmanager
    def held(self, version: int, digest: str) -> Iterator[Mapping[str, Tensor]]:
        """Yields the tensors of a received version, which stay unchanged while the block runs.

        Raises:
            RuntimeError: If another version was received, one is being received, or the load could not be
                prepared.
        """
        if not self._weights.acquire(timeout=_LOAD_WAIT_S):
            raise RuntimeError(f"a transfer has been running for {_LOAD_WAIT_S:.0f} s")
        try:
            if self._version != (version, digest) or self._receiver is None:
                raise RuntimeError(
                    f"version {version} with digest {digest[:12]} was not received here, but "
                    f"{self._version}"
                )
            if self._why:
                raise RuntimeError(f"version {version} could not be prepared: {self._why}")
            yield self._tensors
        finally:
            self._weights.release()

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Keeps the tensors for :meth:`held`."""
        self._tensors = tensors
        return 0.0

    def close(self) -> None:
        """Ends the member; a transfer that runs fails."""
        shut_down(self._line)
        self._number += 1
        self._abort()
        self._store.fail("the server's session has ended")
        with self._weights:
            self._drop()

    def _send(self, message: Message) -> None:
        with self._writing:
            self._line.send_bytes(json.dumps(message).encode())

    def _read(self) -> None:
        """Reads messages until the middleware closes the connection."""
        with self._line, suppress(OSError, EOFError):
            while True:
                message: Message = json.loads(self._line.recv_bytes())
                if message["kind"] == VALUE:
                    self._store.answer(message)
                    continue
                if message["kind"] == FORM:
                    self._number += 1
                    self._abort()  # a transfer that runs must fail first
                    # A thread that still forms an earlier group must not use the store of this one.
                    self._store.fail("another group was formed meanwhile")
                    self._store = _RelayedStore(self._send, message["job"], self._requests)
                # A group that is never complete must not delay the next one.
                threading.Thread(
                    target=self._execute,
                    args=(message, self._number, self._store),
                    name="weights-job",
                    daemon=True,
                ).start()
        self.close()

    def _execute(self, message: Message, number: int, store: "_RelayedStore") -> None:
        answer: Message = {"kind": DONE, "job": message["job"]}
        try:
            if self._stream is None and self._device.type == "cuda":
                with on_device(self._device):
                    self._stream = torch.cuda.Stream(self._device, priority=-1)
            with on_device(self._device), torch.cuda.stream(self._stream):
                if message["kind"] == FORM:
                    self._form(message, number, store)
                elif message["kind"] == RECEIVE:
                    self._receive(message, answer)
                    return
        except Exception as error:  # the rollout decides what follows
            logger.exception("a job of the weight group failed")
            answer |= {"kind": FAILED, "why": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            self._send(answer)

    def _form(self, message: Message, number: int, store: "_RelayedStore") -> None:
        plan = read_plan(message["plan"])
        with self._weights:
            if plan.plan_hash != self._plan_hash:
                self._drop()  # its memory is free before the next one
                self._receiver = shadow_receiver(plan, (self._device,), self)  # type: ignore[arg-type]
                self._plan_hash = plan.plan_hash
        # Compiles the GPU kernel, which would otherwise delay the first transfer.
        write_checksum(
            torch.zeros(BUCKET_ALIGNMENT, dtype=torch.uint8, device=self._device),
            torch.zeros(2, dtype=torch.int64, device=self._device),
        )
        num_sources = len(plan.sources)
        group = form_group(
            message["backend"],
            store,
            RankAssignment(
                sources=range(num_sources),
                num_sources=num_sources,
                rank=message["rank"],
                num_receivers=message["workers"],
            ),
            host=self._host or message["host"],
            device=self._device,
            timeout_s=message["timeout_s"],
            folder=Path(tempfile.gettempdir()),
        )
        if number != self._number:
            group.abort()
            raise RuntimeError("another group was formed meanwhile")
        self._group = group

    def _receive(self, message: Message, answer: Message) -> None:
        """Receives a version, answers, and prepares its load, which waits for that."""
        request = TransferRequest(
            epoch=message["epoch"], version=message["version"], timeout_s=message["timeout_s"]
        )
        if not self._weights.acquire(timeout=request.timeout_s):
            raise RuntimeError(f"the engine has been loading for {request.timeout_s:.1f} s")
        try:
            began = time.perf_counter()
            transferred = self._received(request)
            digest = version_digest(transferred.digests)
            received = time.perf_counter()
            digests = list(transferred.digests)
            self._send({**answer, "version": request.version, "digest": digest, "digests": digests})
            self._prepare_load(request.version)
            self._version = (request.version, digest)
            ends = (received, time.perf_counter())
            self.phases_ms = {
                "receive": round(1e3 * (ends[0] - began), 1),
                "prepare": round(1e3 * (ends[1] - ends[0]), 1),
            }
        finally:
            self._weights.release()

    def _received(self, request: TransferRequest) -> Transferred:
        """Receives a version and verifies it."""
        group, receiver = self._group, self._receiver
        if group is None or receiver is None:
            raise RuntimeError("this worker is in no weight group")
        limit = threading.Timer(request.timeout_s, group.abort)
        limit.daemon = True
        try:
            self._version = None
            limit.start()
            return receiver.receive(group, request)
        except BaseException:
            self._abort()
            # Aborted work of Gloo may still write into the copy.
            asyncio.run(receiver.give_up())
            raise
        finally:
            limit.cancel()

    def _prepare_load(self, version: int) -> None:
        """Does before the engine pauses what does not need its pause."""
        assert self._receiver is not None
        self._why = ""
        try:
            # The receiver gives the tensors to its sink, this object.
            asyncio.run(self._receiver.adopt(version))
            self._on_received(self._tensors)
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as error:  # the load reports it
            logger.exception("a received version could not be prepared")
            self._why = f"{type(error).__name__}: {error}"

    def _drop(self) -> None:
        """Frees the second copy."""
        self._on_dropped()
        self._receiver = self._version = None
        self._tensors = {}

    def _abort(self) -> None:
        """Leaves the group; work that waits for its other members fails."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="weights-abort", daemon=True).start()


class _RelayedStore:
    """Store of the run's controller, which this process reaches through its server and the rollout.

    Args:
        send: Sends a message to the rollout.
        job: Number of the rollout's job in which the group forms; the rollout answers no other one.
        numbers: Numbers of questions, those of other groups as well.
    """

    def __init__(self, send: Callable[[Message], None], job: int, numbers: Iterator[int]) -> None:
        self._ask_rollout = send
        self._job = job
        self._numbers = numbers
        self._answers: dict[int, Future[bytes]] = {}
        self._why = ""

    def set(self, key: str, value: bytes) -> None:
        if not self._why:
            self._ask_rollout({"kind": SET, "job": self._job, "key": key, "value": encoded(value)})

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._ask({"kind": GET, "key": key}, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"kind": ADD, "key": key, "amount": amount}, _LOAD_WAIT_S))

    def answer(self, message: Message) -> None:
        future = self._answers.pop(message["request"], None)
        if future is not None:
            if "error" in message:
                future.set_exception(RuntimeError(message["error"]))
            else:
                future.set_result(decoded(message["value"]))

    def fail(self, why: str) -> None:
        """Fails all open questions and all later ones, which get no answer any more."""
        self._why = why
        while self._answers:
            _, future = self._answers.popitem()
            future.set_exception(RuntimeError(why))

    def _ask(self, question: Message, timeout_s: float) -> bytes:
        number = next(self._numbers)
        future = self._answers[number] = Future()
        try:
            if self._why:
                raise RuntimeError(self._why)
            self._ask_rollout({**question, "job": self._job, "request": number})
            return future.result(timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"{question['key']!r} was not set in {timeout_s:.0f} s") from error
        finally:
            self._answers.pop(number, None)
