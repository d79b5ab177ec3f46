"""Puts back what a kubelet changes on the machine: kernel settings, mounts, control groups."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SETTINGS = [
    Path("/proc/sys") / name
    for name in (
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
    )
]
_GROUPS = ("kubepods", "k8s.io")


@contextmanager
def unchanged_machine(folder: Path) -> Iterator[None]:
    """Undo, when the block ends, what the kubelet did.

    Args:
        folder: Mounts under it are removed.
    """
    before = {path: path.read_text(encoding="ascii") for path in _SETTINGS}
    try:
        yield
    finally:
        for path, value in before.items():
            path.write_text(value, encoding="ascii")
        _unmount(folder)
        for name in _GROUPS:
            for group in Path("/sys/fs/cgroup").glob(f"*/{name}"):
                _remove_group(group)


def _unmount(folder: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for line in reversed(mounts):
        if line.split()[1].startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


def _remove_group(group: Path) -> None:
    """Control groups go only when empty, deepest first."""
    for inner in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        inner.rmdir()
    group.rmdir()
