"""Test processes, forked from a server that has imported torch, because the import takes seconds."""

from collections.abc import Callable
from typing import Any

from torch.multiprocessing import start_processes

from tests.helpers.forks import preload

preload("tests.helpers.batches", "tests.helpers.weight_member")


def run_ranks(work: Callable[..., None], *arguments: Any, count: int) -> None:
    """Calls ``work(rank, *arguments)`` in ``count`` processes; raises the error of the first that fails."""
    start_processes(work, args=arguments, nprocs=count, start_method="forkserver")  # type: ignore[no-untyped-call]
