"""Runs the user's agent: a function in separate processes, or a service."""

import asyncio
import itertools
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import httpx

from services.common.parent import module_command
from services.common.task_group import TaskGroup
from services.rollout.calls.outside import AddressPolicy, ExternalService, json_text
from services.rollout.failures import BusyError, CallError
from services.rollout.settings import environment_of_user_code

_LOAD_TIMEOUT_S = 120.0
_LINE_BYTES = 1 << 20
_Pending = dict[int | None, asyncio.Future[Any]]
"""Futures of running episodes by number; None stands for the loading of the function."""


class AgentRunner(Protocol):
    """Runs episodes of an agent."""

    async def run(self, keywords: Mapping[str, Any]) -> Any:
        """Runs one episode and returns the agent's result. Raises CallError if it fails."""


class AgentProcess:
    """Process that runs many episodes of a function concurrently; restarted if it dies."""

    def __init__(self, reference: str, tasks: TaskGroup) -> None:
        self._reference = reference
        self._tasks = tasks
        self._numbers = itertools.count()
        self._pending: _Pending = {}
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    @property
    def num_running(self) -> int:
        """Number of episodes that it runs."""
        return len(self._pending)

    async def start(self) -> None:
        """Starts the process, if it is not running, and loads the function.

        Raises:
            CallError: If that fails.
        """
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            process = self._process = await asyncio.create_subprocess_exec(
                *module_command("services.extras.agents.process", self._reference),
                env=environment_of_user_code(),
                stdin=PIPE,
                stdout=PIPE,
                limit=_LINE_BYTES,
            )
            loaded: asyncio.Future[None] = asyncio.Future()
            # Futures of this process only: the reader of a dead process must not change them.
            self._pending = {None: loaded}
            self._reader = self._tasks.create_task(self._read(process, self._pending))
            try:
                async with asyncio.timeout(_LOAD_TIMEOUT_S):
                    await loaded
            except TimeoutError as error:
                process.kill()
                raise CallError(
                    "timeout", f"{self._reference!r} was not loaded within {_LOAD_TIMEOUT_S:g} s"
                ) from error

    async def run(self, keywords: Mapping[str, Any]) -> Any:
        """Runs one episode; cancelling this coroutine cancels the agent."""
        await self.start()
        number, pending = next(self._numbers), self._pending
        result: asyncio.Future[Any] = asyncio.Future()
        pending[number] = result
        self._send({"id": number, "keywords": dict(keywords)})
        try:
            return await result
        finally:
            if pending.pop(number, None) is not None:
                self._send({"cancel": number})

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _read(self, process: Process, pending: _Pending) -> None:
        """Reads answers until the process ends; its remaining episodes then fail."""
        assert process.stdout is not None
        async for line in process.stdout:
            answer = json.loads(line)
            future = pending.pop(answer["id"], None)
            if future is None or future.done():
                continue
            if "error" in answer:
                future.set_exception(
                    CallError("exception", f"{self._reference!r} raised {answer['error']}")
                )
            else:
                future.set_result(answer.get("value"))
        status = await process.wait()
        for future in pending.values():
            if not future.done():
                message = f"the process of {self._reference!r} died (exit status {status})"
                future.set_exception(CallError("sandbox_killed", message))
        pending.clear()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json_text(message).encode() + b"\n")


class AgentProcesses:
    """Distributes episodes over several processes; the one with the fewest gets the next."""

    def __init__(self, processes: list[AgentProcess]) -> None:
        self._processes = processes

    async def run(self, keywords: Mapping[str, Any]) -> Any:
        return await min(self._processes, key=lambda process: process.num_running).run(keywords)


class AgentService:
    """Agent at a URL: receives the keywords as JSON and answers when it has finished."""

    def __init__(self, url: str, service: ExternalService) -> None:
        self._url = url
        self._service = service

    async def run(self, keywords: Mapping[str, Any]) -> Any:
        """Runs one episode; returns None if the answer is not JSON."""
        try:
            response = await self._service.post(dict(keywords))
        except (httpx.TransportError, BusyError) as error:
            raise CallError("exception", f"{self._url} does not respond: {error!r}") from error
        if not response.is_success:
            raise CallError(
                "exception",
                f"{self._url} returned status {response.status_code}: {response.text[:200]}",
            )
        try:
            return response.json()
        except (ValueError, RecursionError):  # it returns no reward
            return None


@asynccontextmanager
async def agent_runner(
    agent: str, processes: int, reach: AddressPolicy, *, token: str = ""
) -> AsyncIterator[AgentRunner]:
    """Opens the runner of an agent.

    Args:
        agent: Reference to a function, or URL of a service.

    Raises:
        ValueError: If the function does not exist or cannot be loaded.
    """
    if agent.startswith(("http://", "https://")):
        service = ExternalService(agent, reach=reach, token=token)
        try:
            yield AgentService(agent, service)
        finally:
            await service.close()
        return
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(TaskGroup())
        hosts = [AgentProcess(agent, tasks) for _ in range(processes)]
        for host in hosts:
            stack.push_async_callback(host.stop)
        try:
            await hosts[0].start()
        except CallError as error:
            problem = error.message
        else:
            yield AgentProcesses(hosts)
            return
    raise ValueError(f"rollout.workflow_arguments.agent: {problem}")
