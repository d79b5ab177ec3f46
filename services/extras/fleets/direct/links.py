"""Connections of a server's middleware to the members of weight groups in its engine's workers."""

import asyncio
import json
import logging
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Final

from services.extras.fleets.answers import RefusedError
from services.extras.fleets.direct.messages import JOIN_METHOD, Message
from services.extras.fleets.hosts import (
    accepted,
    host_address,
    listener_for_hosts,
    number_of_hosts,
    shut_down,
    wake_listener,
)

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S: Final = 60.0
_LONGEST_WAIT_S: Final = 5.0
_MAX_MESSAGES: Final = 1000
_SMALL_BYTES: Final = 4096
"""Bytes of a message that a socket takes at once, so that no thread has to wait for it."""
_SOCKET: Final = "members"


class WorkerLinks:
    """Passes messages between a rollout's requests and the engine's workers, for one session."""

    def __init__(self) -> None:
        self._lines: dict[int, Connection] = {}
        self._received: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._ended: set[int] = set()
        """Workers whose connection has ended; an empty message is the last one."""
        self._joined = asyncio.Event()
        self._listener: Listener | None = None
        self._folder = ""
        self._loop = asyncio.get_running_loop()
        self._devices: list[str] = []
        self._exchanging = asyncio.Lock()

    async def open(self, engine: Any) -> list[str]:
        """Starts a member in each worker; returns their devices. Does nothing the second time.

        Raises:
            RefusedError: If the workers have no such members, or do not connect in time.
        """
        if self._devices:
            return self._devices
        secret = secrets.token_bytes(32)
        self._listener = self._listen(is_local=number_of_hosts(engine.vllm_config) == 1)
        address = self._listener.address
        threading.Thread(target=self._accept, args=(self._listener, secret), daemon=True).start()
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                described: list[dict[str, Any]] = await engine.collective_rpc(
                    JOIN_METHOD, args=(json.dumps({"address": address, "secret": secret.hex()}),)
                )
                while len(self._lines) < len(described):
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError as error:
            raise RefusedError(
                500, f"the engine's workers did not connect within {_JOIN_TIMEOUT_S:.0f} s"
            ) from error
        except Exception as error:
            logger.exception("the workers joined no weight group")
            raise RefusedError(
                422,
                f"the engine's workers cannot receive weights from the trainer: {error}; start vLLM with "
                "--worker-extension-cls services.extras.fleets.worker.FleetWorker, or set weight_sync.mode "
                "to cpu_async",
            ) from error
        by_number = {int(worker["number"]): str(worker["device"]) for worker in described}
        self._devices = [by_number[number] for number in sorted(by_number)]
        return self._devices

    async def exchange(
        self, messages: Sequence[Any], *, wait_s: float
    ) -> list[tuple[int, Message]]:
        """Sends messages to workers; returns theirs, as soon as there is one.

        Args:
            messages: Pairs of a worker's number and its message.
            wait_s: Longest time to wait for a message.

        Raises:
            RefusedError: If there is no such worker, or it has ended.
        """
        async with self._exchanging:
            for number, message in messages:
                line = self._lines.get(number)
                if line is None:
                    raise RefusedError(412, f"worker {number} has joined no weight group")
                content = json.dumps(message).encode()
                try:
                    if len(content) > _SMALL_BYTES:
                        await asyncio.to_thread(line.send_bytes, content)
                    else:
                        line.send_bytes(content)
                except OSError as error:
                    raise RefusedError(412, f"worker {number} has ended: {error}") from error
            answers: list[tuple[int, Message]] = []
            if not self._ended or not self._received.empty():
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_s, _LONGEST_WAIT_S)):
                        answers.append(await self._received.get())
            while len(answers) < _MAX_MESSAGES and not self._received.empty():
                answers.append(self._received.get_nowait())
            answers = [(number, message) for number, message in answers if message]
            if self._ended and not answers:
                raise RefusedError(412, f"the members of workers {sorted(self._ended)} have ended")
            return answers

    def close(self) -> None:
        """Ends the members: their transfers fail, and their memory is freed."""
        for line in self._lines.values():
            shut_down(line)
        self._lines.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            wake_listener(listener)

    def _listen(self, *, is_local: bool) -> Listener:
        """Returns a listener that all workers reach: those of one host in a folder that only they can enter.

        Raises:
            RefusedError: If this host has no address for the others.
        """
        if is_local:
            self._folder = tempfile.mkdtemp(prefix="slipstream-")  # of mode 0700
            return Listener(str(Path(self._folder, _SOCKET)), family="AF_UNIX")
        return listener_for_hosts(host_address)

    def _accept(self, listener: Listener, secret: bytes) -> None:
        while self._listener is listener:
            with suppress(AuthenticationError, EOFError, OSError, LookupError, ValueError):
                line, introduction = accepted(listener, secret)
                number = int(introduction["number"])
                threading.Thread(target=self._read, args=(line, number), daemon=True).start()
        listener.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, line: Connection, number: int) -> None:
        with line, suppress(OSError, EOFError, RuntimeError):
            self._loop.call_soon_threadsafe(self._add, number, line)
            while True:
                message = json.loads(line.recv_bytes())
                self._loop.call_soon_threadsafe(self._received.put_nowait, (number, message))
        with suppress(RuntimeError):  # the server's loop has ended
            self._loop.call_soon_threadsafe(self._end, number, line)

    def _add(self, number: int, line: Connection) -> None:
        self._lines[number] = line
        self._joined.set()

    def _end(self, number: int, line: Connection) -> None:
        """Wakes the exchange that waits for a worker whose connection has ended."""
        if self._lines.get(number) is line:  # the worker has no newer member
            self._ended.add(number)
            self._received.put_nowait((number, {}))
