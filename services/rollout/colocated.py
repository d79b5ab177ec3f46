"""A rollout in the trainer's pod: it starts once the trainer has loaded and sleeps, on GPUs of the trainer.

    python -m services.rollout.colocated /tmp/trainer-0.ready 0,1 600

waits 600 seconds at most for the file in which the trainer names its GPUs, takes the first two of them, and
goes on as ``python -m services.rollout``. Kubernetes gives a GPU to one container of a pod; the runtime lets
the others see it too.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

_LOOK_EVERY_S = 0.5


def wait_for_gpus(
    ready_file: Path,
    numbers: Sequence[int],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Names of some of the trainer's GPUs, once it sleeps; empty where it has none.

    Args:
        ready_file: What the trainer writes.
        numbers: Which of its GPUs.
        timeout_s: How long it may take.
        clock: Seconds.
        pause: Sleeps.

    Raises:
        TimeoutError: If it has not loaded by then.
    """
    deadline = clock() + timeout_s
    while not ready_file.exists():
        if clock() > deadline:
            raise TimeoutError(
                f"the trainer of this pod has not loaded within {timeout_s:.0f} s; see its log, or raise "
                "limits.start_timeout_s"
            )
        pause(_LOOK_EVERY_S)
    found = json.loads(ready_file.read_text(encoding="utf-8"))["gpus"]
    names = found.split(",") if found else []
    return ",".join(names[number] for number in numbers) if names else ""


def main() -> NoReturn:
    """Entry point of ``python -m services.rollout.colocated``."""
    # The first process of a container ignores what it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    path, numbers, timeout_s = sys.argv[1:]
    wanted = [int(number) for number in numbers.split(",")]
    names = wait_for_gpus(Path(path), wanted, timeout_s=float(timeout_s))
    given = ["env", f"CUDA_VISIBLE_DEVICES={names}"] if names else []
    command = [*given, sys.executable, "-m", "services.rollout"]
    os.execvp(command[0], command)  # noqa: S606 -- nothing of it is a user's


if __name__ == "__main__":
    main()
