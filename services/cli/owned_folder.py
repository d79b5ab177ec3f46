"""A temporary folder that goes with its process, at the latest when the next one starts."""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.process_identity import is_gone, own_identity

_PREFIX = "slipstream-"
_OWNER = "owner"


@contextmanager
def owned_folder() -> Iterator[Path]:
    """A folder for secrets, until the block ends; those of processes that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_left_behind(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        (folder / _OWNER).write_text(json.dumps(own_identity()), encoding="utf-8")
        yield folder


def _is_left_behind(folder: Path) -> bool:
    """Whether it is a folder of this user whose process is known to have ended."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        return is_gone(json.loads((folder / _OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return False
