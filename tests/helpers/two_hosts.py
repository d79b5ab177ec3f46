"""Servers of engines over two hosts: processes of this machine that share no memory.

The second host has separate namespaces, in which the files of received weights do not exist, and its own
address.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil
import pytest

from services.extras.fleets.local import LocalServer

FURTHER_ADDRESS = "127.0.0.2"
_ISOLATED = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"),
    *("--mount-proc", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"),
)
"""Runs a command that sees no process and no shared memory of the others."""


def require_namespaces() -> None:
    """Skips the test on a machine on which one host cannot stand for two."""
    if subprocess.run([*_ISOLATED, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets no user make namespaces, with which one host stands for two")


class OverTwoHosts(LocalServer):
    """A server whose second tensor-parallel rank is on another host."""

    _further: subprocess.Popen[bytes] | None = None

    def start_ranks(
        self, first: Sequence[str], further: Sequence[str], changes: Mapping[str, str]
    ) -> None:
        """Starts both hosts.

        Args:
            first: Options of the first host, which has the server's interface.
            further: Options of the second one.
            changes: Environment variables of the second one.
        """
        options = self._options
        self._options = (*options, *first)
        super().start()
        self._options = options
        command = self.command(self._model, [*options, *further])
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log.with_suffix(".further.log").open("ab") as log:
            self._further = subprocess.Popen(
                [*_ISOLATED, *command],
                env={**self.environment, **changes, **paths},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        super().kill()
        self.kill_further_host()

    @contextmanager
    def frozen_further_host(self) -> Iterator[None]:
        """Stops all processes of the second host while the block runs."""
        assert self._further is not None, "the server was not started"
        first = psutil.Process(self._further.pid)
        processes = [*first.children(recursive=True), first]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def kill_further_host(self) -> None:
        """Kills all processes of the second host."""
        further, self._further = self._further, None
        if further is not None:
            with suppress(ProcessLookupError):
                os.killpg(further.pid, signal.SIGKILL)
            further.wait()
