"""Time and memory measurements of a device."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def timed(work: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Returns the median seconds after one warm-up; without rounds, those of the warm-up."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:] or seconds)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
