"""Protocol of launchers, which start and stop the workers of runs on one platform."""

import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from services.common.runspec.run import RunSpec
from services.controller.launch.failure_cause import first_cause, unfinished_user_code

_NUM_LAST_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """Exit of a worker that ended by itself."""

    run_id: str
    worker_id: str
    code: int | None
    """Exit status; negative for a signal; None if unknown."""
    last_lines: str
    """End of its log: enough lines to contain the tracebacks of all its processes."""
    log: str = ""
    """Path of its log; empty if the log is not a file of this host."""
    rank: int | None = None
    """Rank of the process that ended first; None if the worker has one process, or if unknown."""
    num_oom_kills: int = 0
    """Processes that the kernel killed while it ran, because memory was short; 0 if unknown."""
    are_kills_of_host: bool = False
    """True if these are processes of the whole host, False if of its control group."""

    def report(self) -> str:
        """Returns the exit, its first cause and the log in one line; without a cause also the last lines."""
        where = self.log or log_command(self.run_id, self.worker_id)
        lines = self.last_lines.strip().splitlines()[-_NUM_LAST_LINES:]
        first = "" if self.rank is None else f", rank {self.rank} first"
        reference = unfinished_user_code(self.last_lines)
        code = f" while it ran {reference!r}, which must not end the process" if reference else ""
        cause = self._cause() or (lines[0] if len(lines) == 1 and not code else "")
        head = f"{self.worker_id} exited {self._status}{first}{code}"
        if cause or code or self._may_lack_memory or not lines:
            return f"{head}{cause and ': '}{cause} (log: {where})"
        return "\n".join([f"{head} (log: {where}); last log lines:", *lines])

    def _cause(self) -> str:
        # SIGKILL comes from outside, so no earlier line is its cause.
        if self.code == -signal.SIGKILL:
            return ""
        return first_cause(self.last_lines, is_exit=self.code is not None)

    @property
    def _may_lack_memory(self) -> bool:
        """True if the kernel may have killed it; without the fork server its status is unknown."""
        return self.num_oom_kills > 0 and self.code in (None, -signal.SIGKILL)

    @property
    def _status(self) -> str:
        status = "an unknown status" if self.code is None else f"exit code {self.code}"
        if self.code is not None and self.code < 0:
            status = f"signal {-self.code}"
        of_group = "memory was short: the kernel killed processes of its control group"
        of_host = "memory may have been short: the kernel killed processes of this host"
        reason = f" ({of_host if self.are_kills_of_host else of_group})"
        return f"with {status}{reason if self._may_lack_memory else ''}"


def log_command(run_id: str, worker_id: str) -> str:
    """Returns the command that shows the log of a worker, wherever the worker runs."""
    return f"slipstream logs {run_id} {worker_id}"


class Launcher(Protocol):
    """Starts and stops workers."""

    def problems(self, spec: RunSpec) -> Iterable[str]:
        """Yields reasons why the launcher can never start a run, each with its key and a fix."""

    async def why_volatile(self, run_id: str, folder: str | None) -> str:
        """Returns why files in a folder of a run's trainer are lost with it; empty if they are not.

        Args:
            folder: Absolute path; None for the folder that the trainer uses by default.
        """

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Starts the workers of a run that are not running.

        Args:
            later: Workers that must not use their GPUs until a later call, which follows when the trainer
                has loaded and sleeps. They may start at once and wait for it.
        """

    def queued(self, run_id: str) -> Collection[str]:
        """Returns the workers that wait in a queue and without which the run can start."""

    async def admitted(self, run_id: str, worker_ids: Collection[str]) -> Collection[str]:
        """Waits until one of the workers is no longer in a queue; returns all that are in none.

        There is no time limit: a queue may hold workers back for any time.
        """

    async def end(self, run_id: str, worker_id: str) -> None:
        """Kills one worker because it does not answer; returns when it is gone."""

    async def release(self, run_id: str, worker_ids: Collection[str]) -> None:
        """Ends workers whose host is drained, within their grace period; returns when they are gone.

        The next :meth:`start` starts them on other hosts, and may wait for any time for one with room.
        """

    async def report_lost_hosts(self, run_id: str) -> None:
        """Reports the workers of hosts that do not answer, if the platform may take longer to notice.

        Called when a run has a failure of which no worker's exit was reported.
        """

    async def stop(self, run_id: str) -> None:
        """Stops all workers of a run; returns when they are gone."""

    def gpus_for(self, run_id: str) -> int | None:
        """Returns the number of GPUs that the run may use, including its own; None if unknown."""


ExitHandler = Callable[[WorkerExit], None]


class LauncherDefaults:
    """Answers of a launcher without rules and queues, whose files outlive its workers."""

    def problems(self, spec: RunSpec) -> Iterable[str]:
        """Returns nothing: any run may be started."""
        return ()

    async def why_volatile(self, run_id: str, folder: str | None) -> str:
        """Returns an empty text: files outlive workers."""
        return ""

    def queued(self, run_id: str) -> Collection[str]:
        """Returns nothing: no worker waits in a queue."""
        return ()

    async def admitted(self, run_id: str, worker_ids: Collection[str]) -> Collection[str]:
        """Returns all of the workers."""
        return worker_ids

    async def release(self, run_id: str, worker_ids: Collection[str]) -> None:
        """Does nothing: the platform reports no drained hosts."""

    async def report_lost_hosts(self, run_id: str) -> None:
        """Does nothing: the platform reports lost hosts itself."""


class ExternalLauncher(LauncherDefaults):
    """Launcher for workers that another system starts; it only waits for them."""

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        """Does nothing; the workers register by themselves."""

    async def end(self, run_id: str, worker_id: str) -> None:
        """Does nothing; the system that started the worker replaces it."""

    async def stop(self, run_id: str) -> None:
        """Does nothing; the workers are ordered to stop when their run closes."""

    def gpus_for(self, run_id: str) -> None:
        """Returns None, because only the system that starts the workers knows the GPUs."""
