"""Links to services of this host that tests cut and freeze: relays of TCP connections."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

_READ_BYTES = 1 << 16


class Link:
    """Relay from a free port to another port of this host.

    Args:
        target_port: Port of the service, which need not be there.

    Attributes:
        address: Address at which clients reach the service.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = False
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self) -> None:
        """Relays connections until it is cancelled."""
        server = await asyncio.start_server(self._accept, sock=self._listener)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        """Resets all connections, and each new one, until :meth:`restore`."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Holds all bytes back until :meth:`restore`; clients can still connect."""
        self._passes.clear()

    def restore(self) -> None:
        """Relays again; bytes that were held back arrive now."""
        self._is_cut = False
        self._passes.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            inner_reader, inner = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, inner}
        relays = {
            asyncio.ensure_future(self._relay(reader, inner)),
            asyncio.ensure_future(self._relay(inner_reader, writer)),
        }
        try:
            await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for relay in relays:
                relay.cancel()
            self._writers -= {writer, inner}
            for end in (writer, inner):
                end.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()


class ThreadedLinks:
    """Links that are served by a thread, for tests that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # The loop itself has weak references only.
        self._serving: list[Future[None]] = []

    def add(self, target_port: int) -> Link:
        """Returns a new link."""

        async def make() -> Link:
            return Link(target_port)

        link = asyncio.run_coroutine_threadsafe(make(), self._loop).result()
        self._serving.append(asyncio.run_coroutine_threadsafe(link.serve(), self._loop))
        return link

    def change(self, operation: Callable[[], None]) -> None:
        """Calls a method of a link."""
        self._loop.call_soon_threadsafe(operation)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serves the links while the block runs."""
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
