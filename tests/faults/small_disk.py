"""Disk of a few megabytes that can be filled: a tmpfs in a new mount namespace, which needs no privileges."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_MOUNT = 'mount -t tmpfs -o size="$1" none "$0" && echo mounted && exec sleep infinity'
_PIECE = 1 << 16


class NoNamespacesError(RuntimeError):
    """This machine cannot mount a small disk."""


@dataclass(frozen=True)
class SmallDisk:
    """A small file system in a mount namespace."""

    folder: Path
    """Mount point, as processes in the namespace see it."""
    prefix: tuple[str, ...]
    """Command prefix that starts a process in the mount namespace."""
    root: Path
    """Root of the namespace's files, as this process sees it."""

    def outside(self, path: Path) -> Path:
        """Returns a path of the namespace as this process sees it."""
        return self.root / path.relative_to("/")

    def fill(self) -> None:
        """Fills the disk."""
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(_PIECE))

    def free(self) -> None:
        """Frees the space that :meth:`fill` used."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        return self.outside(self.folder) / "filler"


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mounts a small disk on a folder, in a mount namespace.

    Raises:
        NoNamespacesError: If this machine allows no namespaces.
    """
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            _MOUNT,
            str(folder),
            f"{megabytes}m",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            raise NoNamespacesError(
                "this machine allows no mount namespaces, which a full disk needs"
            )
        inside = (
            "nsenter",
            "--target",
            str(holder.pid),
            "--user",
            "--preserve-credentials",
            "--mount",
        )
        yield SmallDisk(folder, inside, Path(f"/proc/{holder.pid}/root"))
    finally:
        holder.kill()
        holder.communicate()
