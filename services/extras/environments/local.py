"""Environments in child processes, started on first use and restarted after they die."""

import asyncio
import itertools
import json
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.http.connections import ReusedConnections
from services.common.parent import module_command
from services.extras.environments.client import HttpEnvironment, HttpSession
from services.extras.environments.protocol import MAX_ANSWER_BYTES, Message, Observation
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.failures import CallError
from services.rollout.settings import environment_of_user_code

_LOAD_TIMEOUT_S = 120.0
_HERE = "127.0.0.1"


class LocalEnvironment:
    """One child process that runs many episodes of a user's class.

    Args:
        reference: ``module:Class`` or ``file.py:Class``.
        folder: Folder for the process's socket, accessible to this user only.
        wait_s: Max time to retry while the environment is busy.
    """

    def __init__(
        self,
        reference: str,
        arguments: Mapping[str, Any],
        *,
        folder: Path,
        timeout_s: float,
        wait_s: float,
    ) -> None:
        self.num_running = 0
        self._reference = reference
        self._arguments = json.dumps(dict(arguments))
        self._folder = folder
        self._numbers = itertools.count(1)
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._service: ExternalService | None = None
        self._environment: HttpEnvironment | None = None

    async def check(self) -> None:
        """Starts the process. Raises CallError if the class cannot be loaded."""
        environment, _ = await self._started()
        await environment.check()

    async def begin(
        self, task: Mapping[str, Any], *, seed: int, sandbox: Mapping[str, str] | None = None
    ) -> tuple["LocalSession", Observation]:
        """Starts an episode. Raises CallError naming the environment."""
        self.num_running += 1
        try:
            environment, process = await self._started()
            beginning = environment.begin(task, seed=seed, sandbox=sandbox)
            session, first = await self.while_alive(process, beginning)
        except BaseException:
            self.num_running -= 1
            raise
        return LocalSession(self, session, process), first

    async def while_alive(self, process: Process, call: Any) -> Any:
        """Returns the result of a call; raises CallError if the process dies first."""
        calling, dying = asyncio.ensure_future(call), asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((calling, dying), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                status = dying.result()
                raise CallError(
                    "sandbox_killed",
                    f"the process of environment {self._reference!r} died (exit status {status})",
                )
            return calling.result()
        finally:
            calling.cancel()
            dying.cancel()

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _started(self) -> tuple[HttpEnvironment, Process]:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self.stop()
                await self._start()
            assert self._environment is not None
            assert self._process is not None
            return self._environment, self._process

    async def _start(self) -> None:
        path = self._folder / f"{next(self._numbers)}.sock"
        self._process = await asyncio.create_subprocess_exec(
            *module_command("services.extras.environments.host"),
            *("--child", "--bind", f"unix:{path}"),
            # The forms with "=" and "--" keep values that start with a dash from being parsed as options.
            *(f"--arguments={self._arguments}", "--", self._reference),
            env=environment_of_user_code(),
            stdin=PIPE,
            stdout=PIPE,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            await self.stop()
            raise CallError(
                "timeout",
                f"environment {self._reference!r} was not loaded within {_LOAD_TIMEOUT_S:g} s",
            ) from error
        answer = json.loads(line) if line else {"error": "its process died"}
        if "error" in answer:
            await self.stop()
            raise CallError(
                "exception", f"environment {self._reference!r} cannot be loaded: {answer['error']}"
            )
        self._service = ExternalService(
            f"http://{_HERE}",
            reach=AddressPolicy((_HERE,)),
            max_answer_bytes=MAX_ANSWER_BYTES,
            transport=ReusedConnections(uds=str(path)),
        )
        self._environment = HttpEnvironment(
            self._reference, self._service, timeout_s=self._timeout_s, wait_s=self._wait_s
        )


class LocalSession:
    """One episode in a child process; it ends with the process."""

    def __init__(self, owner: LocalEnvironment, inner: HttpSession, process: Process) -> None:
        self._owner = owner
        self._inner = inner
        self._process = process

    async def step(self, message: Message) -> Observation:
        answer: Observation = await self._owner.while_alive(
            self._process, self._inner.step(message)
        )
        return answer

    async def close(self) -> Observation:
        """Ends the episode; returns its last reward and metrics. Raises CallError."""
        self._owner.num_running -= 1
        answer: Observation = await self._owner.while_alive(self._process, self._inner.close())
        return answer


class LocalEnvironments:
    """Distributes episodes over several processes; each goes to the process with the fewest episodes."""

    def __init__(self, environments: Sequence[LocalEnvironment]) -> None:
        self._environments = environments

    async def check(self) -> None:
        """Starts the first process. Raises CallError if the class cannot be loaded."""
        await self._environments[0].check()

    async def begin(
        self, task: Mapping[str, Any], *, seed: int, sandbox: Mapping[str, str] | None = None
    ) -> tuple[LocalSession, Observation]:
        """Starts an episode. Raises CallError naming the environment."""
        least = min(self._environments, key=lambda environment: environment.num_running)
        return await least.begin(task, seed=seed, sandbox=sandbox)


@asynccontextmanager
async def local_environments(
    reference: str,
    arguments: Mapping[str, Any],
    *,
    processes: int,
    timeout_s: float,
    wait_s: float,
) -> AsyncIterator[LocalEnvironments]:
    """Provides child processes of a user's class and stops them when the block ends."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-env-"))
        environments = []
        for number in range(processes):
            (subfolder := Path(folder, str(number))).mkdir(mode=0o700)
            environment = LocalEnvironment(
                reference, arguments, folder=subfolder, timeout_s=timeout_s, wait_s=wait_s
            )
            stack.push_async_callback(environment.stop)
            environments.append(environment)
        yield LocalEnvironments(environments)
