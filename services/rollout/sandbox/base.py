"""Protocol of sandboxes, and the code that all kinds share.

A kind starts sandboxes from images, and a sandbox runs shell commands until it ends. Reading and writing
files and saving the working folder are commands, so a new kind is two small classes.
"""

import base64
import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

WORK_FOLDER: Final = "/sandbox"
"""Folder in which commands run, unless the image has another one."""
START_TIMEOUT_S: Final = 120.0
"""Deadline in seconds for the start of a sandbox, image included."""
END_TIMEOUT_S: Final = 30.0
"""Deadline in seconds for the end of a sandbox."""
ANSWER_GRACE_S: Final = 30.0
"""Max seconds between the time limit of a command and its answer, on a busy host."""
_STARTS_PER_CORE = 2
_FILE_TIMEOUT_S = 120.0
_MAX_FILE_BYTES = 64 << 20

Limit = Literal["", "time", "memory", "processes", "files"]


class SandboxError(RuntimeError):
    """Reports that a sandbox did not start, has died, or refuses a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command."""

    exit_status: int
    """Exit status; 128 plus the number of the signal that killed it."""
    output: bytes
    """Standard output and standard error as they were written, up to ``output_bytes``."""
    is_truncated: bool = False
    """True if there was more output."""
    limit: Limit = ""
    """Limit that the command exceeded, so that it was killed; empty if it ended by itself."""

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class Sandbox(Protocol):
    """One running sandbox."""

    async def execute(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> CommandResult:
        """Runs a shell command in the working folder.

        Args:
            command: Text for ``sh -c``.
            timeout_s: Wall time in seconds after which the command is killed.
            output_bytes: Max size of the output; the rest is dropped.

        Raises:
            SandboxError: If the sandbox has died.
        """

    async def end(self) -> None:
        """Ends the sandbox with all its processes and files; does nothing if it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxHosts:
    """Addresses and credentials of what runs sandboxes elsewhere, as the installation sets them."""

    domain: str = ""
    """Domain of an installation of E2B; empty for E2B's own."""

    namespace: str = ""
    """Namespace of the pods; empty if the installation has none."""
    runtime_class: str = ""
    """Runtime class of the pods; empty for the cluster's default."""
    url: str = "https://kubernetes.default.svc"
    """Address of the Kubernetes API."""
    credentials: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder with ``token`` and ``ca.crt``."""


class SandboxKind(Protocol):
    """Starts sandboxes."""

    @property
    def max_starts(self) -> int:
        """Max simultaneous starts: more would finish no sooner, and each would take longer."""

    async def prepare(self) -> None:
        """Checks that sandboxes can start here, and removes those that a killed rollout has left.

        Raises:
            SandboxError: If sandboxes cannot start; the message has the key and the fix.
        """

    async def start(self, image: str) -> Sandbox:
        """Starts a sandbox from an image; an empty name is the kind's default.

        Raises:
            SandboxError: If that fails.
        """

    async def close(self) -> None:
        """Releases connections."""


def starts_on_this_host() -> int:
    """Returns the max simultaneous starts of sandboxes that share this host's processors."""
    return _STARTS_PER_CORE * (os.cpu_count() or 1)


async def read_file(sandbox: Sandbox, path: str) -> bytes:
    """Returns the content of a file. Raises SandboxError if it cannot be read or has more than 64 MiB."""
    return await _encoded_output(sandbox, f"base64 < {shlex.quote(path)}", path)


async def write_file(sandbox: Sandbox, path: str, content: bytes) -> None:
    """Writes a file and creates its folders. Raises SandboxError if that fails."""
    target = shlex.quote(path)
    command = f'mkdir -p "$(dirname {target})" && cat > {target}'
    await _checked(sandbox, command, content, f"writing {path!r}")


async def command_from_file(sandbox: Sandbox, command: str) -> str:
    """Writes a long command to a file; returns a short one that runs it. Raises SandboxError."""
    path = f"/tmp/.command-{secrets.token_hex(8)}"  # noqa: S108 -- in the sandbox
    await write_file(sandbox, path, command.encode(errors="surrogateescape"))
    # The shell strips line breaks at the end of a command substitution; the dot protects them.
    return f'c=$(cat {path}; echo .); rm {path}; eval "${{c%.}}"'


async def save(sandbox: Sandbox) -> bytes:
    """Returns the working folder as a tar archive. Raises SandboxError."""
    return await _encoded_output(sandbox, "tar -cf - . | base64", "the working folder")


async def restore(sandbox: Sandbox, archive: bytes) -> None:
    """Replaces the content of the working folder by that of an archive. Raises SandboxError."""
    command = "rm -rf -- ..?* .[!.]* * && tar -xof -"
    await _checked(sandbox, command, archive, "unpacking the image or snapshot")


async def _encoded_output(sandbox: Sandbox, command: str, subject: str) -> bytes:
    """Returns output that is encoded in base64, which every kind transports unchanged."""
    # Base64 has four characters for three bytes, and line breaks.
    limit = _MAX_FILE_BYTES * 3 // 2
    result = await sandbox.execute(
        command, stdin=b"", timeout_s=_FILE_TIMEOUT_S, output_bytes=limit
    )
    if result.is_truncated:
        raise SandboxError(f"{subject} has more than {_MAX_FILE_BYTES} bytes")
    if result.exit_status != 0:
        raise SandboxError(f"reading {subject} failed: {_shown(result)}")
    try:
        return base64.b64decode(result.output)
    except ValueError as error:
        raise SandboxError(f"reading {subject} failed: {_shown(result)}") from error


async def _checked(sandbox: Sandbox, command: str, stdin: bytes, subject: str) -> None:
    result = await sandbox.execute(
        command, stdin=stdin, timeout_s=_FILE_TIMEOUT_S, output_bytes=1 << 12
    )
    if result.exit_status != 0:
        raise SandboxError(f"{subject} failed: {_shown(result)}")


def _shown(result: CommandResult) -> str:
    text = result.output[:500].decode(errors="replace").strip()
    return f"{text or 'no output'} (status {result.exit_status})"
