"""Creates files that other users of the host cannot read."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

PRIVATE_MODE: Final = 0o600


def make_private(path: Path) -> None:
    """Creates a file if it is missing, and takes the rights of other users, whatever the umask is.

    SQLite gives its journals the mode of the database.
    """
    with suppress(OSError):  # of another user, or read-only: whoever opens it reports the reason
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE))
        for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
            if file.exists() and file.stat().st_mode & 0o077:
                file.chmod(PRIVATE_MODE)
