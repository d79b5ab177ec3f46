"""Child processes of the test cluster, with their logs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Processes:
    """Started programs; ``stop`` ends them, last started first."""

    logs: Path
    path: str
    """``PATH`` of the programs and their child processes."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str | Path) -> None:
        """Starts a program; its output goes to ``logs/name.log``."""
        with (self.logs / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [str(argument) for argument in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": self.path, "HOME": str(self.logs)},
            )

    def stop(self, *names: str, grace_s: float = 5.0) -> None:
        """Terminates some or all processes; kills those that do not end, with their children."""
        deadline = time.monotonic() + grace_s
        ending = [self.running.pop(name) for name in names or list(self.running)]
        for process in reversed(ending):
            process.terminate()
        for process in reversed(ending):
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Waits until a condition holds; raises an error with logs if a program ends or time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.running.items():
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{name} ended with {process.returncode}:\n{self.tail(name)}"
                    )
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {name}\n{self.tail(name, 8)}" for name in self.running)
                raise TimeoutError(f"{what} did not happen within {timeout_s:.0f} s\n{tails}")
            time.sleep(0.2)

    def tail(self, name: str, lines: int = 25) -> str:
        """Returns the last lines of a program's log."""
        text = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])
