"""Training command with methods that inject faults into its processes and files."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.faults.small_disk import SmallDisk
from tests.helpers.cli import REPOSITORY, command, environment
from tests.helpers.processes import below

# Far above the duration of any wait on a busy machine.
PATIENCE_S = 400.0


def processes_of(root: psutil.Process) -> dict[str, psutil.Process]:
    """Returns a command's services and workers by name; rollouts and trainers are named like their logs."""
    result: dict[str, psutil.Process] = {}
    for child, arguments in below(root):
        service = next((a for a in arguments if a.startswith("services.")), "")
        name = service.removeprefix("services.")
        with suppress(FileNotFoundError):  # the process has ended
            if name in ("rollout", "trainer"):
                name = (Path("/proc") / str(child.pid) / "fd" / "1").readlink().stem
            result.setdefault(name, child)
    return result


def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits until a condition holds.

    Raises:
        AssertionError: If the condition does not hold in time.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


class Training:
    """Runs ``slipstream run``, once or repeatedly, on one specification and one state directory.

    Args:
        spec: The specification.
        state: The state directory.
        settings: Overrides of the specification.
        prefix: Program and arguments that start the command.
        disk: Small disk that the command sees.
    """

    def __init__(
        self,
        spec: Path,
        state: Path,
        *settings: str,
        prefix: tuple[str, ...] = (),
        disk: SmallDisk | None = None,
    ) -> None:
        self.state = state if disk is None else disk.outside(state)
        """State directory, as this process sees it."""
        overrides = [argument for setting in settings for argument in ("--set", setting)]
        self._command = [
            *(disk.prefix if disk else ()),
            *prefix,
            *command("run", spec, "--state-directory", state, *overrides),
        ]
        self._disk = disk
        self._outputs: list[Path] = []
        self._folder = spec.parent
        self.process: subprocess.Popen[bytes]

    @property
    def disk(self) -> SmallDisk:
        """The small disk."""
        assert self._disk is not None
        return self._disk

    def start(self) -> None:
        """Starts the command, or starts it again after it has ended."""
        output = self._folder / f"output-{len(self._outputs)}.txt"
        self._outputs.append(output)
        with output.open("w") as file:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env=environment(),
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Output since the last start of the command."""
        return self._outputs[-1].read_text(errors="replace")

    def step(self) -> int:
        """Returns the newest step in the output since the last start."""
        steps = re.findall(r"step +(\d+)/", self.output)
        return int(steps[-1]) if steps else 0

    def until_step(self, step: int) -> None:
        """Waits for a step.

        Raises:
            AssertionError: If the command ends earlier.
        """

        def is_there() -> bool:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output[-3000:]}"
            return self.step() >= step

        until(is_there, f"step {step}")

    def find(self, name: str) -> psutil.Process:
        """Waits for a process of the command and returns it."""
        root = psutil.Process(self.process.pid)
        until(lambda: name in processes_of(root), name)
        return processes_of(root)[name]

    def kill(self, *names: str) -> None:
        """Kills processes at the same time."""
        for victim in [self.find(name) for name in names]:
            victim.kill()

    def stop(self, name: str, seconds: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Stops a process for a time."""
        victim = self.find(name)
        victim.suspend()
        try:
            if meanwhile is not None:
                meanwhile()
            time.sleep(seconds)
        finally:
            with suppress(psutil.NoSuchProcess):  # the process was replaced as lost
                victim.resume()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stops the command, but not its services, until the block ends."""
        root = psutil.Process(self.process.pid)
        root.suspend()
        try:
            yield
        finally:
            root.resume()

    def hang_up(self) -> None:
        """Sends SIGHUP to the command, as a closed terminal does."""
        self.process.send_signal(signal.SIGHUP)

    def cut_off(self) -> None:
        """Kills the command and all its descendants at once, as a power failure does."""
        root = psutil.Process(self.process.pid)
        root.suspend()
        for child in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        root.kill()
        self.process.wait(PATIENCE_S)

    def wait(self) -> int:
        """Waits for the command to end; returns its exit status."""
        return self.process.wait(PATIENCE_S)

    def database_copy(self, folder: Path) -> Path:
        """Copies the database of a command that has ended; returns the folder.

        SQLite resolves paths, and a path in another mount namespace resolves to another file here.
        """
        folder.mkdir()
        for file in self.state.glob("slipstream.db*"):
            shutil.copyfile(file, folder / file.name)
        return folder

    def close(self) -> None:
        """Kills all remaining processes."""
        if self.process.poll() is None:
            self.cut_off()
