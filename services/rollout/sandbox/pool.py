"""Sandboxes of a replica's episodes: limits their number, measures them, ends them with their episodes."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from services.common.callables import load_callable
from services.common.runspec.rollout import SANDBOXES, SandboxSpec
from services.rollout import metrics
from services.rollout.failures import CallError
from services.rollout.sandbox import base
from services.rollout.sandbox.base import (
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxHosts,
    SandboxKind,
)

logger = logging.getLogger(__name__)

_MAX_SNAPSHOTS = 16


class EpisodeSandbox:
    """Sandbox of one episode, with the limits of the specification.

    Attributes:
        access: URL and key by which another process uses the sandbox; see
            :mod:`services.rollout.sandbox.service`.
    """

    def __init__(self, sandbox: Sandbox, spec: SandboxSpec) -> None:
        self.access: Mapping[str, str] = {}
        self._sandbox = sandbox
        self._spec = spec
        self._snapshots: dict[str, bytes] = {}
        self._numbers = itertools.count(1)
        self._num_commands = 0
        self._seconds = 0.0

    @property
    def measured(self) -> dict[str, float]:
        """Number of commands so far, and their seconds."""
        return {"sandbox_commands": float(self._num_commands), "sandbox_seconds": self._seconds}

    async def run(
        self, command: str, *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> CommandResult:
        """Runs a shell command in the working folder.

        Args:
            timeout_s: Max seconds, at most ``rollout.sandbox.command_timeout_s``, which is the default.

        Raises:
            SandboxError: If the sandbox has died.
        """
        max_s = self._spec.command_timeout_s
        begin = time.perf_counter()
        with _measured("command"):
            result = await self._sandbox.execute(
                command,
                stdin=stdin,
                timeout_s=max_s if timeout_s is None else min(timeout_s, max_s),
                output_bytes=self._spec.output_bytes,
            )
        self._num_commands += 1
        self._seconds += time.perf_counter() - begin
        if result.limit:
            metrics.SANDBOX_LIMITS.labels(limit=result.limit).inc()
        return result

    async def read(self, path: str) -> bytes:
        """Returns a file's content; a relative path begins in the working folder. Raises SandboxError."""
        return await base.read_file(self._sandbox, path)

    async def write(self, path: str, content: bytes) -> None:
        """Writes a file and creates its folders. Raises SandboxError."""
        await base.write_file(self._sandbox, path, content)

    async def snapshot(self) -> str:
        """Saves the working folder; returns a name for :meth:`restore`. Raises SandboxError."""
        if len(self._snapshots) >= _MAX_SNAPSHOTS:
            raise SandboxError(
                f"an episode may have {_MAX_SNAPSHOTS} snapshots; use one of {[*self._snapshots]}"
            )
        archive = await base.save(self._sandbox)
        name = f"snapshot-{next(self._numbers)}"
        self._snapshots[name] = archive
        return name

    async def restore(self, snapshot: str) -> None:
        """Replaces the content of the working folder by that of a snapshot. Raises SandboxError."""
        if snapshot not in self._snapshots:
            raise SandboxError(
                f"this episode has no snapshot {snapshot!r}; its snapshots are {[*self._snapshots]}"
            )
        await base.restore(self._sandbox, self._snapshots[snapshot])


class SandboxPool:
    """Starts a sandbox for each episode, at most ``max_running`` at once.

    Args:
        kind: Starts the sandboxes; by default, the kind that the specification names.
        hosts: Addresses for ``kubernetes`` and ``e2b``.

    Raises:
        ValueError: If a package that the kind needs is not installed; the message has the fix.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        kind: SandboxKind | None = None,
        *,
        hosts: SandboxHosts | None = None,
    ) -> None:
        self._spec = spec
        self._kind: SandboxKind = kind or _made(spec, hosts or SandboxHosts())
        self._slots = asyncio.Semaphore(spec.max_running)
        self._starts = asyncio.Semaphore(self._kind.max_starts)

    async def prepare(self) -> None:
        """Checks that sandboxes can start here. Raises ValueError naming the key."""
        try:
            await self._kind.prepare()
        except SandboxError as error:
            raise ValueError(str(error)) from error

    async def close(self) -> None:
        await self._kind.close()

    @asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[EpisodeSandbox]:
        """Runs a sandbox while the block runs.

        Raises:
            CallError: If it does not start.
        """
        waiting = metrics.SANDBOXES.labels(state="waiting")
        waiting.inc()
        begin = time.perf_counter()
        try:
            await self._slots.acquire()
        finally:
            waiting.dec()
        try:
            sandbox = await self._start(row, begin)
            with metrics.SANDBOXES.labels(state="running").track_inprogress():
                try:
                    yield EpisodeSandbox(sandbox, self._spec)
                finally:
                    await self._end(sandbox)
        finally:
            self._slots.release()

    async def _start(self, row: Mapping[str, Any], begin: float) -> Sandbox:
        async with self._starts:
            waited_s = time.perf_counter() - begin
            metrics.SANDBOX_SECONDS.labels(operation="wait").observe(waited_s)
            try:
                with _measured("start"):
                    return await self._kind.start(self._image(row))
            except SandboxError as error:
                message = f"the episode's sandbox did not start: {error}"
                raise CallError("exception", message) from error

    def _image(self, row: Mapping[str, Any]) -> str:
        column = self._spec.image_column
        if column is None:
            return self._spec.image
        image = row.get(column)
        if not isinstance(image, str) or not image:
            raise SandboxError(
                f"rollout.sandbox.image_column is {column!r}, but the row has {image!r:.80} there; expected "
                "the name of an image"
            )
        return image

    async def _end(self, sandbox: Sandbox) -> None:
        """Ends a sandbox; logs a failure, which does not fail the episode."""
        try:
            with _measured("end"):
                async with asyncio.timeout(base.END_TIMEOUT_S):
                    await sandbox.end()
        except (SandboxError, TimeoutError, OSError) as error:
            logger.error("a sandbox did not end", extra={"why": repr(error)})  # noqa: TRY400


def _made(spec: SandboxSpec, hosts: SandboxHosts) -> SandboxKind:
    try:
        make_kind: Any = load_callable(SANDBOXES[spec.kind])
    except ImportError as error:
        raise ValueError(
            f"rollout.sandbox.kind {spec.kind!r} needs a package that is not installed ({error.name}): pip "
            f"install 'slipstream[{spec.kind}]' where rollouts run"
        ) from error
    kind: SandboxKind = (
        make_kind(spec, hosts) if spec.kind in ("kubernetes", "e2b") else make_kind(spec)
    )
    return kind


@contextmanager
def _measured(operation: str) -> Iterator[None]:
    """Measures an operation of a sandbox and counts its failure."""
    with metrics.SANDBOX_SECONDS.labels(operation=operation).time():
        try:
            yield
        except Exception:
            metrics.SANDBOX_FAILURES.labels(operation=operation).inc()
            raise
