"""Starts a colocated rollout in the trainer's pod after the trainer has loaded and sleeps.

    python -m services.extras.kubernetes.colocated /tmp/trainer-0.ready 0,1 600

waits up to 600 seconds for the file in which the trainer lists its GPUs, takes the first two of
them and replaces itself with ``python -m services.rollout``. Kubernetes assigns a GPU to one
container of a pod; the container runtime makes it visible to the others.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from services.common.parent import module_command

_LOOK_EVERY_S = 0.5


def wait_for_gpus(
    ready_file: Path,
    numbers: Sequence[int],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Waits for the trainer; returns the selected GPUs for ``CUDA_VISIBLE_DEVICES``, empty if it uses none.

    Args:
        ready_file: File that the trainer writes after it has loaded.
        numbers: Indices of the selected GPUs in the trainer's list.

    Raises:
        TimeoutError: If the file does not appear in time.
    """
    deadline = clock() + timeout_s
    while not ready_file.exists():
        if clock() > deadline:
            raise TimeoutError(
                f"the trainer of this pod did not load within {timeout_s:.0f} s; see its log, or raise "
                "limits.start_timeout_s"
            )
        pause(_LOOK_EVERY_S)
    gpus = json.loads(ready_file.read_text(encoding="utf-8"))["gpus"]
    names = gpus.split(",") if gpus else []
    return ",".join(names[number] for number in numbers) if names else ""


def main() -> NoReturn:
    """Entry point of ``python -m services.extras.kubernetes.colocated``."""
    # PID 1 of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    path, numbers, timeout_s = sys.argv[1:]
    numbers_needed = [int(number) for number in numbers.split(",")]
    names = wait_for_gpus(Path(path), numbers_needed, timeout_s=float(timeout_s))
    prefix = ["env", f"CUDA_VISIBLE_DEVICES={names}"] if names else []
    command = [*prefix, *module_command("services.common.start", "services.rollout")]
    os.execvp(command[0], command)  # noqa: S606 -- no part of it is user input


if __name__ == "__main__":
    main()
