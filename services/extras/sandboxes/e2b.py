"""Sandboxes hosted by E2B, with its SDK. If this process is killed, they end after ``LIFETIME_S`` at most."""

import base64
import shlex
import time
from typing import Final

from e2b import AsyncSandbox
from e2b.exceptions import (
    AuthenticationException,
    RateLimitException,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import CommandExitException

from services.common.runspec.rollout import SandboxSpec
from services.extras.sandboxes.exec_sandbox import ExecSandbox
from services.rollout.sandbox.base import (
    ANSWER_GRACE_S,
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    SandboxError,
    SandboxHosts,
)

LIFETIME_S: Final = 3600
"""Seconds until E2B ends a sandbox whose lifetime is not renewed; the max for a free account."""


class E2B:
    """Starts sandboxes from templates, with the account of ``rollout.sandbox.arguments.api_key``.

    Args:
        hosts: Has the domain, which gets the installation's key and therefore is no part of a specification.
    """

    def __init__(self, spec: SandboxSpec, hosts: SandboxHosts) -> None:
        self._spec = spec
        domain = {"domain": hosts.domain} if hosts.domain else {}
        self._account = {"api_key": spec.arguments["api_key"], **domain}

    @property
    def max_starts(self) -> int:
        """Max simultaneous starts; E2B does the work."""
        return self._spec.max_running

    async def prepare(self) -> None:
        """Checks the key. Raises SandboxError."""
        try:
            await AsyncSandbox.list(limit=1, **self._account).next_items()
        except AuthenticationException as error:
            raise SandboxError(
                f"E2B refused rollout.sandbox.arguments.api_key: {error}; set it to {{secret: NAME}}, a key "
                "of your account"
            ) from error
        except Exception as error:
            raise SandboxError(f"E2B did not answer: {error!r}") from error

    async def start(self, image: str) -> "HostedSandbox":
        """Starts a sandbox from a template; an empty name is E2B's default. Raises SandboxError."""
        try:
            inner = await AsyncSandbox.create(
                image or None,
                timeout=LIFETIME_S,
                allow_internet_access=False,
                request_timeout=START_TIMEOUT_S,
                **self._account,
            )
        except RateLimitException as error:
            raise SandboxError(
                f"E2B has no room for another sandbox: {error}; lower rollout.sandbox.max_running"
            ) from error
        except Exception as error:
            raise SandboxError(f"E2B did not start template {image!r}: {error!r}") from error
        return HostedSandbox(inner)

    async def close(self) -> None:
        """Does nothing: every sandbox has ended."""


class HostedSandbox(ExecSandbox):
    """One sandbox; commands run in the home folder of the template's user."""

    # Linux limits the size of one argument of a program.
    max_command_bytes = 64 << 10

    def __init__(self, inner: AsyncSandbox) -> None:
        super().__init__()
        self._inner = inner
        self._renewed_at = time.monotonic()

    async def _run(
        self, command: str, *, stdin: bytes, timeout_s: float, output_bytes: int
    ) -> tuple[int, bytes, bool]:
        in_file = ""
        try:
            await self._renew(timeout_s)
            if stdin:
                in_file = f"/tmp/.stdin-{time.monotonic_ns()}"  # noqa: S108 -- in the sandbox
                await self._inner.files.write(in_file, stdin)
            status, output = await self._run_script(
                # The SDK buffers all output and decodes it as text, so the script cuts and encodes it.
                f"timeout -s KILL {timeout_s:g} sh -c {shlex.quote(command)} < {in_file or '/dev/null'} 2>&1 "
                f"| {{ head -c {output_bytes + 1}; cat > /dev/null; }} | base64 -w 0; "
                f"status=${{PIPESTATUS[0]}}; rm -f {in_file}; exit $status",
                timeout_s + ANSWER_GRACE_S,
            )
        except TimeoutException as error:
            raise TimeoutError(str(error)) from error
        except Exception as error:
            raise SandboxError(f"E2B did not run the command: {error!r}") from error
        return status, output[:output_bytes], len(output) > output_bytes

    async def _end(self) -> None:
        try:
            await self._inner.kill(request_timeout=END_TIMEOUT_S)
        except Exception as error:
            raise SandboxError(f"E2B did not end the sandbox: {error!r}") from error

    async def _renew(self, timeout_s: float) -> None:
        """Prolongs the lifetime if a command might outlast it."""
        now = time.monotonic()
        if now + timeout_s - self._renewed_at > LIFETIME_S / 2:
            await self._inner.set_timeout(LIFETIME_S)
            self._renewed_at = now

    async def _run_script(self, script: str, timeout_s: float) -> tuple[int, bytes]:
        try:
            result = await self._inner.commands.run(script, timeout=timeout_s)
        except CommandExitException as error:
            return error.exit_code, base64.b64decode(error.stdout)
        return result.exit_code, base64.b64decode(result.stdout)
