"""Restores what a kubelet changes on the machine: kernel settings, mounts, control groups."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

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
"""Control groups of the pods of the first and of the second node."""
_SHARES = 8192


@contextmanager
def unchanged_machine(folder: Path) -> Iterator[None]:
    """Undoes the changes of kubelet and containerd, both of which have ended, when the block ends.

    Args:
        folder: Mounts under it are removed, and container shims that were started from it.
    """
    before = {path: path.read_text(encoding="ascii") for path in _SETTINGS}
    networks = _pod_networks()
    try:
        yield
    finally:
        for path, value in before.items():
            path.write_text(value, encoding="ascii")
        _kill_containers(folder)
        unmount_below(folder)
        for network in _pod_networks() - networks:
            subprocess.run(["ip", "netns", "delete", network], check=False)
        for name in _GROUPS:
            for group in Path("/sys/fs/cgroup").glob(f"*/{name}"):
                _remove_group(group)


def weigh_pods() -> None:
    """Gives the pods of each node the processor time of eight processes of this machine while it is short.

    The kubelet gives the pods of the first node that of one process per core, and containerd those of the
    second node that of one process, so pods that train would starve beside other work. The kubelet has set
    its weight when the node is ready. Control groups of version 2 keep their weights.
    """
    for name in _GROUPS:
        group = Path("/sys/fs/cgroup/cpu") / name
        if group.parent.is_dir():
            group.mkdir(exist_ok=True)
            (group / "cpu.shares").write_text(str(_SHARES), encoding="ascii")


def _kill_containers(folder: Path) -> None:
    """Kills the shims of this folder's containerd and their children, which outlive the kubelet."""
    processes = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(argument.startswith(f"{folder}/") for argument in process.info["cmdline"] or [])
    ]
    processes += [child for process in processes for child in process.children(recursive=True)]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def _pod_networks() -> set[str]:
    folder = Path("/run/netns")
    return {path.name for path in folder.glob("cni-*")} if folder.exists() else set()


def unmount_below(folder: Path) -> None:
    """Unmounts all mounts in a folder, deepest first."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for line in reversed(mounts):
        if line.split()[1].startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


def _remove_group(group: Path) -> None:
    """Removes a control group, deepest groups first because only empty ones can be removed."""
    for inner in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        inner.rmdir()
    group.rmdir()
