"""Objects in a folder that trainer and rollouts share."""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final

from services.common.errors import NotFoundError, UnavailableError
from services.common.fields import new_id

_PIECE_BYTES: Final = 16 << 20
_UNFINISHED: Final = ".writing-"
_TRIES: Final = 5


class LocalFolder:
    """Implements :class:`services.common.stores.StoreFolder` for a path.

    Nothing is forced to the disk: after the loss of power, a file may lack bytes, which its digest shows.
    """

    def __init__(self, path: str) -> None:
        self.url = path
        self._root = Path(path)

    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes of each file by its path in the folder, unfinished ones included."""
        with _explained(self._root):
            return {
                file.relative_to(self._root).as_posix(): file.lstat().st_size
                for file in self._root.rglob("*")
                if not file.is_dir()
            }

    def read(self, name: str) -> bytes:
        with _explained(self._root / name):
            return (self._root / name).read_bytes()

    def read_into(self, name: str, target: memoryview) -> int:
        """Reads a file into memory; returns its size."""
        with _explained(self._root / name), (self._root / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            end, position = min(size, len(target)), 0
            while position < end:
                num_read = file.readinto(target[position : min(position + _PIECE_BYTES, end)])
                if not num_read:
                    raise OSError(errno.EIO, f"the file ends at {position} of {size} bytes")
                position += num_read
            return size

    def put(self, name: str, content: memoryview) -> None:
        """Writes a file under another name and renames it."""
        file = self._root / name
        unfinished = file.with_name(f"{_UNFINISHED}{new_id('file')}")
        with _explained(file):
            try:
                with _opened(unfinished) as output:
                    position = 0
                    while position < len(content):
                        position += output.write(content[position : position + _PIECE_BYTES])
                unfinished.replace(file)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def delete(self, names: Sequence[str]) -> None:
        """Deletes files, and folders that become empty."""
        for name in names:
            with _explained(self._root / name):
                (self._root / name).unlink(missing_ok=True)
        folders = {folder for name in names for folder in PurePosixPath(name).parents}
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            with _ignored_if_used():
                (self._root / folder).rmdir()


def _opened(file: Path) -> FileIO:
    """Creates a file and its folders, which another source may delete meanwhile because they are empty."""
    for _ in range(_TRIES - 1):
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return FileIO(file, "wb")
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileIO(file, "wb")


@contextmanager
def _ignored_if_used() -> Iterator[None]:
    try:
        yield
    except OSError:
        """Another file is there, or another process was faster."""


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises errors of the file system as errors of Slipstream."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", url=str(path)) from error
    except OSError as error:
        cause = f"{path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = size_free(path)
            cause += (
                f" ({free} bytes are free); free some, or use another weight_sync.storage.directory"
            )
        raise UnavailableError(cause, url=str(path)) from error


def size_free(path: Path) -> int:
    """Returns the free bytes of the file system of a path; 0 if it cannot be asked."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
