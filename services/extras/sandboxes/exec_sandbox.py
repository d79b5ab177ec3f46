"""Sandboxes that run each command with ``timeout``, as those of containers, pods and E2B do."""

import time
from abc import ABC, abstractmethod
from typing import Final

from services.rollout.sandbox.base import CommandResult, SandboxError, command_from_file

_KILLED_STATUS: Final = 128 + 9
"""Exit status of a command that SIGKILL ended."""


class ExecSandbox(ABC):
    """Sandbox that runs each command with ``timeout -s KILL``, in a container or on another host.

    Attributes:
        max_command_bytes: Longer commands are written to a file in the sandbox first; None for no limit.
    """

    max_command_bytes: int | None = None

    def __init__(self) -> None:
        self._has_ended = False

    @abstractmethod
    async def _run(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> tuple[int, bytes, bool]:
        """Runs a command; returns its exit status, its output, and True if there was more output.

        Raises:
            TimeoutError: If there is no answer in time, although ``timeout`` should have killed the command.
            SandboxError: If the sandbox has died.
        """

    @abstractmethod
    async def _end(self) -> None:
        """Ends the sandbox. Raises SandboxError if that fails."""

    async def execute(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> CommandResult:
        """Runs a shell command in the working folder; see :class:`~services.rollout.sandbox.base.Sandbox`."""
        if self._has_ended:
            raise SandboxError("the sandbox has ended")
        if "\0" in command:
            return CommandResult(exit_status=126, output=b"the command has a zero byte\n")
        limit = self.max_command_bytes
        if limit is not None and len(command.encode(errors="surrogateescape")) > limit:
            command = await command_from_file(self, command)
        begin = time.monotonic()
        try:
            status, output, is_truncated = await self._run(
                command, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes
            )
        except TimeoutError:
            status, output, is_truncated = _KILLED_STATUS, b"", False
        # A command that was killed before its time limit was not killed by `timeout`.
        is_late = status == _KILLED_STATUS and time.monotonic() - begin >= timeout_s
        return CommandResult(
            exit_status=status,
            output=output,
            is_truncated=is_truncated,
            limit="time" if is_late else "",
        )

    async def end(self) -> None:
        """Ends the sandbox; does nothing if it has ended. Raises SandboxError if that fails."""
        if not self._has_ended:
            self._has_ended = True
            await self._end()
