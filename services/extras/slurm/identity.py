"""Token and certificate of each run, in files that only this user can read, on the shared file system."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from services.common.errors import ServiceError
from services.common.host import Clock
from services.common.security.credentials import current_identity

logger = logging.getLogger(__name__)
_RENEWAL_CHECK_S = 60.0
_FILES = {"TLS_CERTIFICATE": "tls.crt", "TLS_KEY": "tls.key", "TLS_AUTHORITY": "ca.crt"}


class RunIdentities:
    """Writes and renews the certificates of runs; workers reload a changed file.

    Args:
        state_directory: Its folder ``RUN/identity`` gets the files of a run.
    """

    def __init__(self, state_directory: Path, *, clock: Clock = time) -> None:
        self._state_directory = state_directory
        self._clock = clock
        self._renew_at: dict[str, float] = {}

    async def settings(self, run_id: str) -> Mapping[str, str]:
        """Writes the certificate of a run and returns the settings of its workers, without their prefix."""
        settings = {"RUN_TOKEN": current_identity().token_for(run_id)}
        if current_identity().issue is not None:
            if run_id not in self._renew_at:
                await asyncio.to_thread(self._write, run_id)
            folder = self._folder(run_id)
            settings |= {name: str(folder / file) for name, file in _FILES.items()}
        return settings

    def remove(self, run_id: str) -> None:
        """Deletes the files of a run that has stopped."""
        self._renew_at.pop(run_id, None)
        for file in _FILES.values():
            (self._folder(run_id) / file).unlink(missing_ok=True)

    async def keep_renewed(self) -> None:
        """Renews certificates that are due, until cancelled."""
        while True:
            await asyncio.sleep(_RENEWAL_CHECK_S)
            now = self._clock.time()
            for run_id in [name for name, due in self._renew_at.items() if due <= now]:
                try:
                    await asyncio.to_thread(self._write, run_id)
                except (ServiceError, OSError) as error:
                    why = {"run": run_id, "why": str(error)}
                    logger.warning("cannot renew the certificate of a run", extra=why)

    def _write(self, run_id: str) -> None:
        certificate = current_identity().certificate_for(run_id)
        assert certificate is not None
        contents = (certificate.chain, certificate.key, certificate.authority)
        for file, content in zip(_FILES.values(), contents, strict=True):
            write_private(self._folder(run_id) / file, content)
        self._renew_at[run_id] = certificate.renew_at

    def _folder(self, run_id: str) -> Path:
        return self._state_directory / run_id / "identity"


def write_private(file: Path, content: bytes) -> None:
    """Writes a file that only this user can read; readers see the old or the new content."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        output.write(content)
    unfinished.replace(file)
