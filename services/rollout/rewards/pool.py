"""Worker processes that evaluate rewards, each with a hard deadline."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from services.rollout.failures import RewardError

_LOAD_TIMEOUT_S = 120.0
_LINE_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class _Worker:
    """A process and the rewards that it has loaded."""

    process: Process
    loaded: set[str] = field(default_factory=set)


class RewardPool:
    """At most ``size`` processes, started when needed; one that hangs or dies is replaced.

    A worker evaluates one response at a time, so the pool also bounds the concurrency.
    """

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill all workers."""
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            await _kill(worker.process)

    async def check(self, name: str) -> None:
        """Load a reward in a worker without calling it.

        Raises:
            RewardError: If there is no such reward.
        """
        await self._with_worker({"name": name}, timeout_s=_LOAD_TIMEOUT_S)

    async def evaluate(self, request: dict[str, Any], *, timeout_s: float) -> Any:
        """Evaluate one reward and return what it returned.

        Args:
            request: Name, arguments, prompt, response, answer and row; JSON-like.
            timeout_s: Deadline of the evaluation itself, without waiting and loading; then the worker
                is killed.

        Raises:
            RewardError: ``timeout``, ``exception`` or, if the worker died, ``sandbox_killed``.
        """
        return await self._with_worker(request, timeout_s=timeout_s)

    async def _with_worker(self, request: dict[str, Any], *, timeout_s: float) -> Any:
        name = request["name"]
        async with self._places:
            worker = await self._take()
            try:
                if name not in worker.loaded:
                    await _ask(worker.process, {"name": name}, timeout_s=_LOAD_TIMEOUT_S)
                    worker.loaded.add(name)
                answer = await _ask(worker.process, request, timeout_s=timeout_s)
                self._idle.append(worker)
            finally:
                self._busy.discard(worker)
                if worker not in self._idle:
                    await _kill(worker.process)
        if "error" in answer:
            raise RewardError("exception", f"reward {name!r} raised {answer['error']}")
        return answer["value"]

    async def _take(self) -> _Worker:
        """Take an idle worker or start one."""
        if self._idle:
            worker = self._idle.pop()
        else:
            worker = _Worker(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "services.rollout.rewards.worker",
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=_LINE_BYTES,
                )
            )
        self._busy.add(worker)
        return worker


async def _ask(process: Process, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Send a request to a worker and wait for its answer."""
    name = request["name"]
    try:
        async with asyncio.timeout(timeout_s):
            line = await _exchange(process, json.dumps(request, default=str).encode() + b"\n")
    except TimeoutError as error:
        raise RewardError(
            "timeout",
            f"reward {name!r} took longer than {timeout_s:g} s and was stopped; raise its timeout_s or "
            "make it faster",
        ) from error
    if not line:
        status = await process.wait()
        raise RewardError(
            "sandbox_killed",
            f"the process that evaluated reward {name!r} died (exit status {status})",
        )
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _exchange(process: Process, line: bytes) -> bytes:
    """Write a line and read one; nothing comes back from a dead process."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        await process.stdin.drain()
        return await process.stdout.readline()
    except ConnectionError:
        return b""


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
