"""Process pool that calls user code, with a hard deadline for each call."""

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from services.common.parent import module_command
from services.rollout.calls.outside import json_text
from services.rollout.failures import CallError
from services.rollout.settings import environment_of_user_code

_LOAD_TIMEOUT_S = 120.0
_LINE_BYTES = 64 << 20
_END_S = 5.0


@dataclass(slots=True, eq=False)
class _Worker:
    """Process and the functions that it has loaded."""

    process: Process
    loaded: set[str] = field(default_factory=set)


class CallPool:
    """Runs calls in at most ``size`` processes, started on demand; replaces one that hangs or dies.

    A process executes one call at a time, so the pool also bounds concurrency.
    """

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            await _kill(worker.process)

    async def check(self, name: str) -> None:
        """Loads a function in a process without calling it.

        Raises:
            CallError: If the function does not exist or cannot be loaded.
        """
        await self._with_worker({"name": name}, timeout_s=_LOAD_TIMEOUT_S)

    async def call(
        self,
        name: str,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
    ) -> Any:
        """Calls a function and returns its result, converted to JSON types.

        Args:
            name: ``module:function`` or ``file.py:function``.
            arguments: Positional arguments; JSON-like.
            keywords: Keyword arguments; JSON-like.
            timeout_s: Max seconds of the call itself, without waiting and loading. After them, the pool kills
                the process.

        Raises:
            CallError: ``timeout`` (also if the function raised ``TimeoutError``), ``exception``,
                ``invalid_value`` if the result is too large, or ``sandbox_killed`` if the process died.
        """
        request = {"name": name, "arguments": list(arguments), "keywords": dict(keywords or {})}
        return await self._with_worker(request, timeout_s=timeout_s)

    async def _with_worker(self, request: dict[str, Any], *, timeout_s: float) -> Any:
        name = request["name"]
        async with self._places:
            worker = await self._acquire_worker()
            is_well = False
            try:
                answer: dict[str, Any] = {}
                if name not in worker.loaded:
                    answer = await _ask(worker.process, {"name": name}, timeout_s=_LOAD_TIMEOUT_S)
                if "error" not in answer:
                    worker.loaded.add(name)
                    answer = await _ask(worker.process, request, timeout_s=timeout_s)
                is_well = True
            finally:
                self._busy.discard(worker)
                if is_well:
                    self._idle.append(worker)
                else:
                    await _kill(worker.process)
        if "error" in answer:
            raise CallError(answer["kind"], f"{name!r} raised {answer['error']}")
        return answer["value"]

    async def _acquire_worker(self) -> _Worker:
        """Takes an idle worker or starts one."""
        if self._idle:
            worker = self._idle.pop()
        else:
            worker = _Worker(
                await asyncio.create_subprocess_exec(
                    *module_command("services.rollout.calls.worker"),
                    env=environment_of_user_code(),
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=_LINE_BYTES,
                )
            )
        self._busy.add(worker)
        return worker


async def _ask(process: Process, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Sends a request to a worker and waits for its answer."""
    name = request["name"]
    try:
        text = json_text(request)
    except (ValueError, RecursionError) as error:
        raise CallError(
            "invalid_value", f"the arguments of {name!r} cannot be written as JSON: {error}"
        ) from error
    try:
        async with asyncio.timeout(timeout_s):
            line = await _exchange(process, text.encode() + b"\n")
    except TimeoutError as error:
        raise CallError(
            "timeout",
            f"{name!r} took longer than {timeout_s:g} s and was stopped; raise its timeout_s or "
            "make it faster",
        ) from error
    except ValueError as error:  # the line exceeds the read limit
        raise CallError(
            "invalid_value",
            f"{name!r} returned more than the limit of {_LINE_BYTES} bytes; return less",
        ) from error
    if not line:
        status = await process.wait()
        raise CallError(
            "sandbox_killed",
            f"the process that called {name!r} died (exit status {status})",
        )
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _exchange(process: Process, line: bytes) -> bytes:
    """Writes a line and reads one; returns no bytes if the process is dead."""
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
    assert process.stdout is not None
    # asyncio reports the end of a process only after its pipe has ended. Unread data keeps the pipe
    # open, and so may a child process.
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while await process.stdout.read(1 << 20):
                pass
            await process.wait()
