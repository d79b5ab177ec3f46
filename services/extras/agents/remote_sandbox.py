"""Client of an episode's sandbox, for agents and environments; ``service.py`` has the requests.

Each process of an agent or an environment imports this module when it starts, so it imports little.
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from services.rollout.sandbox.base import CommandResult, SandboxError

if TYPE_CHECKING:
    import httpx

# Longer than any command may run; the service enforces the deadlines of commands.
_TIMEOUT_S = 4000.0


class RemoteSandbox:
    """Client of one episode's sandbox, with the methods of ``EpisodeSandbox``.

    Args:
        access: ``url`` and ``key``.
    """

    def __init__(self, access: Mapping[str, str]) -> None:
        self._url = access["url"]
        self._headers = {"Authorization": f"Bearer {access['key']}"}

    async def run(
        self, command: str, *, timeout_s: float | None = None, stdin: str = ""
    ) -> CommandResult:
        """Runs a shell command. Raises SandboxError if the sandbox has died."""
        body = {"command": command, "timeout_s": timeout_s, "stdin": stdin}
        answer = json.loads(await self._send("POST", "/run", json=body))
        return CommandResult(**{**answer, "output": answer["output"].encode()})

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Raises SandboxError."""
        return await self._send("GET", "/file", params={"path": path})

    async def write(self, path: str, content: bytes | str) -> None:
        """Writes a file and creates its folders. Raises SandboxError."""
        data = content.encode() if isinstance(content, str) else content
        await self._send("PUT", "/file", params={"path": path}, content=data)

    async def snapshot(self) -> str:
        """Saves the working folder and returns the snapshot's name. Raises SandboxError."""
        return str(json.loads(await self._send("POST", "/snapshot", json={}))["snapshot"])

    async def restore(self, snapshot: str) -> None:
        """Replaces the content of the working folder by that of a snapshot. Raises SandboxError."""
        await self._send("POST", "/restore", json={"snapshot": snapshot})

    async def _send(self, method: str, path: str, **content: Any) -> bytes:
        response = await _client_of(asyncio.get_running_loop()).request(
            method, self._url + path, headers=self._headers, **content
        )
        if not response.is_success:
            raise SandboxError(response.json()["error"])
        return response.content


class BlockingSandbox:
    """:class:`RemoteSandbox` for code in a thread: its methods return results, not awaitables."""

    def __init__(self, sandbox: RemoteSandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox = sandbox
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._sandbox, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            running = asyncio.run_coroutine_threadsafe(method(*arguments, **keywords), self._loop)
            return running.result()

        return call


def sandbox_argument(access: Mapping[str, str], function: Callable[..., Any]) -> Any:
    """Returns the sandbox for a user's function: asynchronous for a coroutine, else blocking."""
    sandbox = RemoteSandbox(access)
    if inspect.iscoroutinefunction(function):
        return sandbox
    return BlockingSandbox(sandbox, asyncio.get_running_loop())


@functools.lru_cache(1)
def _client_of(loop: asyncio.AbstractEventLoop) -> "httpx.AsyncClient":
    """Returns the process's client, which keeps connections: a new client per episode would cost 20 ms."""
    # These imports take as long as the rest of an agent's start, and most runs have no sandbox.
    import httpx

    from services.common.http.connections import ReusedConnections

    del loop
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, transport=ReusedConnections())
