"""How many processors a process may use: torch counts those of the host, whatever its container may take."""

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def usable_processors(groups: Path = _GROUPS) -> int:
    """Processors that the scheduler and the container's limit leave to this process, at least 1.

    Threads beyond a limit of cgroups do not run beside the others: all of them stand still for the rest of
    each period of 100 ms, and whoever waits for the last one with them.

    Args:
        groups: Where control groups are, of version 1 or 2.
    """
    allowed = len(os.sched_getaffinity(0))
    limit = _limit(groups)
    return allowed if limit is None else max(1, min(allowed, limit))


def _limit(groups: Path) -> int | None:
    """Processors' worth of time in a period, rounded down; None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            texts = [(groups / file).read_text(encoding="ascii") for file in files]
        except OSError:
            continue
        quota, period = " ".join(texts).split()
        return None if quota in {"max", "-1"} else int(quota) // int(period)
    return None
