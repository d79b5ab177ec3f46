"""Starts workers as forks of a process with their imports done (``services.common.fork_server``).

Imports take two to ten seconds of a worker's start. The forkserver of ``multiprocessing``
starts workers as fast (0.06 s), but its processes import the controller's ``__main__`` again, keep three
of its file descriptors, skip ``atexit``, and all show the same command line.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from services.common.parent import module_command
from services.common.task_group import TaskGroup
from services.controller.launch.worker_process import AdoptedProcess

logger = logging.getLogger(__name__)

# Imports of rollouts, of trainers, and of their model loading. Modules that register metrics of
# rollouts or of trainers are excluded: workers of the other kind would export these metrics, too.
PRELOADED = (
    "torch",
    "torch.nn.attention.varlen",
    "torch.utils.flop_counter",
    "services.common.models.loading",
    "transformers.models.qwen2.modeling_qwen2",
    "tokenizers.implementations",
    "services.common.rpc.server",
    "services.common.settings",
    "services.common.runspec.loader",
    "services.weightsync.server",
    "services.wire.controller",
    "services.wire.data.client",
    "httpx",
    "starlette.applications",
    "uvicorn.protocols.http.httptools_impl",
)

# Imports take ten seconds on an idle machine.
_START_TIMEOUT_S = 60.0
_STATUS_TIMEOUT_S = 5.0
# Two tries, because the loss of a server may be noticed only after a command was sent to it.
_TRIES = 2


class ForkedProcess:
    """Process that a fork server started."""

    def __init__(self, pid: int, server: "_Server") -> None:
        self.pid = pid
        self._process = AdoptedProcess(pid)
        self._server = server
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    async def wait(self) -> int | None:
        """Waits until it has ended; returns its exit status, or None if the server does not report it."""
        await self._process.wait()
        if self._answer is None:
            self._answer = self._server.request(ended=self.pid)
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                status: int | None = (await asyncio.shield(self._answer)).get("status")
        except TimeoutError:
            return None
        return status

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


class ForkServer:
    """Starts processes through a fork server; replaces a lost server.

    Args:
        tasks: Owner of the tasks that read the servers' answers.
        start_timeout_s: Seconds without an answer after which a server is killed.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str],
        *,
        tasks: TaskGroup,
        start_timeout_s: float,
    ) -> None:
        self._modules = modules
        self._environment = environment
        self._tasks = tasks
        self._start_timeout_s = start_timeout_s
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._is_disabled = False

    async def ensure_started(self) -> None:
        """Starts a server unless one is running; does not wait for its imports."""
        async with self._starting:
            if self._is_disabled or (self._server is not None and not self._server.is_gone):
                return
            try:
                process = _begun.pop() if _begun else _begin(self._environment, self._modules)
            except OSError as error:
                self._disable(str(error))
                return
            self._server = await _Server.connect(process)
            self._tasks.create_task(self._server.listen())

    async def start(
        self, module: str, environment: Mapping[str, str], log: Path
    ) -> ForkedProcess | None:
        """Starts the equivalent of ``python -m <module>`` in its own session.

        Args:
            environment: Complete environment of the process.

        Returns:
            The process; None if the fork server could not start it.
        """
        command = {"module": module, "environment": environment, "log": str(log)}
        for _ in range(_TRIES):
            await self.ensure_started()
            if self._is_disabled or (server := self._server) is None:
                return None
            answer = await self._ask(server, command)
            with suppress(ProcessLookupError):
                if "pid" in answer:
                    return ForkedProcess(answer["pid"], server)
            if not server.has_answered:
                self._disable(answer.get("error", "the fork server ended"))
            elif "error" in answer:
                logger.warning(
                    "cannot fork a worker; starting a process",
                    extra={"why": answer["error"]},
                )
                return None
        return None

    async def _ask(self, server: "_Server", command: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await server.request(**command)
        except TimeoutError:
            server.kill()
            return {"error": f"no answer within {self._start_timeout_s:.0f} s"}

    def close(self) -> None:
        """Ends the server; the processes that it started continue."""
        self._is_disabled = True
        if self._server is not None:
            self._server.kill()

    def _disable(self, reason: str) -> None:
        """Disables forking if it has never worked, so that it is not tried again for each worker."""
        if not self._is_disabled:
            logger.warning(
                "fork server unavailable; workers start as new processes", extra={"why": reason}
            )
        self._is_disabled = True


@asynccontextmanager
async def open_fork_server(
    environment: Mapping[str, str],
    modules: Sequence[str] = PRELOADED,
    *,
    start_timeout_s: float = _START_TIMEOUT_S,
) -> AsyncIterator[ForkServer]:
    """Opens a fork server, which begins its imports, until the block ends.

    Args:
        start_timeout_s: Seconds without an answer after which a server is killed.
    """
    async with TaskGroup() as tasks:
        forks = ForkServer(environment, modules, tasks=tasks, start_timeout_s=start_timeout_s)
        await forks.ensure_started()
        try:
            yield forks
        finally:
            forks.close()


def begin_imports(environment: Mapping[str, str], modules: Sequence[str] = PRELOADED) -> None:
    """Starts a fork server process in advance, which :func:`open_fork_server` then uses."""
    with suppress(OSError):  # open_fork_server tries again and reports the error
        _begun.append(_begin(environment, modules))


_begun: "list[subprocess.Popen[bytes]]" = []


def _begin(environment: Mapping[str, str], modules: Sequence[str]) -> "subprocess.Popen[bytes]":
    fixed = {
        # A second OpenMP thread would not survive a fork; a worker sets its own number of threads.
        "OMP_NUM_THREADS": "1",
        # Otherwise ``torch.cuda.is_available()`` initializes CUDA, which then works in no forked process.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    return subprocess.Popen(  # noqa: S603 -- a module of this project
        module_command("services.common.fork_server", *modules),
        env={**environment, **fixed},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


class _Server:
    """One fork server process, which answers in the order of the commands.

    Args:
        process: The process.
        commands: Its standard input.
        answers: Its standard output.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        commands: asyncio.WriteTransport,
        answers: asyncio.StreamReader,
    ) -> None:
        self._process = process
        self._commands = commands
        self._lines = answers
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        self.has_answered = False
        self.is_gone = False

    @classmethod
    async def connect(cls, process: "subprocess.Popen[bytes]") -> "_Server":
        """Connects to a process with pipes at standard input and output."""
        loop = asyncio.get_running_loop()
        answers = asyncio.StreamReader()
        commands, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), process.stdout)
        return cls(process, commands, answers)

    def request(self, **command: Any) -> asyncio.Future[dict[str, Any]]:
        """Sends a command; returns the future of its answer, which is empty if the process ends before."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.is_gone:
            answer.set_result({})
        else:
            self._answers.append(answer)
            self._commands.write(json.dumps(command).encode() + b"\n")
        return answer

    async def listen(self) -> None:
        """Forwards answers until the process ends."""
        async for line in self._lines:
            self.has_answered = True
            answer, content = self._answers.popleft(), json.loads(line)
            if not answer.done():
                answer.set_result(content)
            elif "pid" in content:
                # The caller was cancelled, so no other code would end this process.
                with suppress(ProcessLookupError):
                    os.kill(content["pid"], signal.SIGKILL)
                self.request(ended=content["pid"])
        self.is_gone = True
        for answer in self._answers:
            if not answer.done():
                answer.set_result({})
        self._commands.close()
        await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        self.is_gone = True
        with suppress(ProcessLookupError):
            self._process.kill()
