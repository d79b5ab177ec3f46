"""Sandboxes in containers, started with the command-line program of Docker or Podman.

The first process of a container waits for the end of its standard input, a pipe from this process. So a
container ends, and is removed, when this process ends, however it ends.
"""

import asyncio
import secrets
import shutil
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from services.common.runspec.rollout import IMAGE, SandboxSpec
from services.extras.sandboxes.exec_sandbox import ExecSandbox
from services.rollout.sandbox.base import (
    ANSWER_GRACE_S,
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    WORK_FOLDER,
    SandboxError,
    starts_on_this_host,
)

LABEL = "slipstream-sandbox"
"""Label of the containers."""
_READ_BYTES = 1 << 16
_CHECK_TIMEOUT_S = 30.0

_FIRST_PROCESS = f'[ "$PWD" = / ] && cd {WORK_FOLDER}; pwd; cat > /dev/null; :'
"""Script of a container's first process: prints the working folder and waits for the end of its input."""


class Containers:
    """Starts containers; the image needs ``sh``, ``timeout``, ``base64``, ``find`` and ``tar``."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._program = spec.kind

    @property
    def max_starts(self) -> int:
        """Max simultaneous starts."""
        return starts_on_this_host()

    async def prepare(self) -> None:
        """Checks that the program is there and works. Raises SandboxError."""
        if shutil.which(self._program) is None:
            raise SandboxError(
                f"rollout.sandbox.kind {self._program!r} needs the program {self._program!r} on the "
                "rollout's host; install it, or use another kind"
            )
        process = await asyncio.create_subprocess_exec(
            self._program, "info", stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )
        async with _killed_after(process, _CHECK_TIMEOUT_S):
            output, _ = await process.communicate()
        if process.returncode != 0:
            raise SandboxError(
                f"rollout.sandbox.kind {self._program!r} does not work on the rollout's host: "
                f"{_shown(output)}"
            )

    async def start(self, image: str) -> "Container":
        """Starts a container. Raises SandboxError."""
        if IMAGE.fullmatch(image) is None:
            raise SandboxError(f"expected the name of an image, got {image!r:.200}")
        spec, name = self._spec, f"{LABEL}-{secrets.token_hex(8)}"
        process = await asyncio.create_subprocess_exec(
            *(self._program, "run", "--interactive", "--rm", "--name", name, "--label", LABEL),
            *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--memory", str(spec.memory_bytes), "--memory-swap", str(spec.memory_bytes)),
            *("--cpus", f"{spec.cpus:g}", "--pids-limit", str(spec.max_processes)),
            *("--ulimit", f"fsize={spec.disk_bytes}:{spec.disk_bytes}", "--ulimit", "core=0:0"),
            *("--ulimit", "nofile=1024:1024"),
            *("--tmpfs", f"{WORK_FOLDER}:rw,exec,mode=1777,size={spec.disk_bytes}"),
            *("--entrypoint", "/bin/sh", image, "-c", _FIRST_PROCESS),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        container = Container(self._program, name, process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await container.wait_ready()
        except TimeoutError as error:
            await container.end()
            raise SandboxError(
                f"image {image!r} did not start within {START_TIMEOUT_S:g} s"
            ) from error
        except BaseException:
            await container.end()
            raise
        return container

    async def close(self) -> None:
        """Does nothing: every container has ended by itself."""


class Container(ExecSandbox):
    """One container.

    Args:
        program: ``docker`` or ``podman``.
    """

    def __init__(self, program: str, name: str, process: Process) -> None:
        super().__init__()
        self._folder = ""
        self._program = program
        self._name = name
        self._process = process

    async def wait_ready(self) -> None:
        """Waits until commands can run. Raises SandboxError."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._folder = (await self._process.stdout.readline()).decode().strip()
        if not self._folder:
            message = _shown(await self._process.stderr.read())
            raise SandboxError(f"{self._program} cannot start the sandbox's image: {message}")

    async def _run(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> tuple[int, bytes, bool]:
        if self._process.returncode is not None:
            raise SandboxError("the sandbox has ended")
        process = await asyncio.create_subprocess_exec(
            *(self._program, "exec", "--interactive", "--workdir", self._folder, self._name),
            *("timeout", "-s", "KILL", f"{timeout_s:g}", "sh", "-c", command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
        )
        try:
            async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
                (output, is_truncated), _ = await asyncio.gather(
                    _read(process, output_bytes), _write(process, stdin)
                )
                return await process.wait(), output, is_truncated
        finally:
            if process.returncode is None:
                process.kill()

    async def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        removal = await asyncio.create_subprocess_exec(
            *(self._program, "rm", "--force", "--volumes", self._name),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        async with (
            _killed_after(removal, END_TIMEOUT_S),
            _killed_after(self._process, END_TIMEOUT_S),
        ):
            await removal.wait()
            # The output ends with the container, and asyncio reports the end of a process only after that.
            await self._process.communicate()


@asynccontextmanager
async def _killed_after(process: Process, seconds: float) -> AsyncIterator[None]:
    """Kills a process if the block does not end in time. Raises SandboxError then."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SandboxError(f"a container's command did not end within {seconds:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()


async def _read(process: Process, max_bytes: int) -> tuple[bytes, bool]:
    """Reads all output; returns its first bytes, and True if there were more."""
    assert process.stdout is not None
    output, is_truncated = bytearray(), False
    while chunk := await process.stdout.read(_READ_BYTES):
        room = max_bytes - len(output)
        is_truncated |= len(chunk) > room
        output += chunk[:room]
    return bytes(output), is_truncated


async def _write(process: Process, content: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the command does not read its input
        process.stdin.write(content)
        await process.stdin.drain()
    process.stdin.close()


def _shown(output: bytes) -> str:
    return output[-500:].decode(errors="replace").strip() or "no message"
