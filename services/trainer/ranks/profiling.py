"""Profiles of chosen steps, for Chrome's and Perfetto's viewers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepProfiler:
    """Writes what a process does in some of the steps."""

    folder: Path
    """Where profiles go; made when there is one."""
    rank: int = 0
    """This process among all of the worker."""
    steps: frozenset[int] = frozenset()
    """Steps that are profiled."""

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Around a step: its operations and, on a GPU, its kernels become ``step-S-rank-R.json.gz``."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{step}-rank-{self.rank}.json.gz"
        profiler.export_chrome_trace(str(file))
        logger.info("profile written", extra={"step": step, "file": str(file)})


NO_PROFILES = StepProfiler(Path("profiles"))
