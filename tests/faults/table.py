"""Every kind of fault in a training run of real processes, with checks of the run's end and of its ledger.

The run ends SUCCEEDED; or PAUSED, and the same command resumes it; or FAILED with the true cause.
"""

import re
import sqlite3
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from services.extras.backup import copies
from tests.faults.small_disk import NoNamespacesError, small_disk
from tests.faults.training import Training, until
from tests.helpers.ledger_check import check_run
from tests.helpers.plumbing import write_plumbing

# Longer than the time after which a silent worker counts as lost.
STOPPED_S = 40.0
_BEGINS = 5
"""Step at which faults begin."""
_DISK_MB = 64
_SETTINGS = ("trainer.checkpoint.every=3", "rollout.replicas=2", "limits.max_restarts=20")
_DESCRIPTORS = ("sh", "-c", 'ulimit -n "$0" && exec "$@"')


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and its expected outcome."""

    happen: Callable[[Training], None]
    """Injects the fault at the step ``begins``; may restart the command."""
    begins: int = _BEGINS
    """Step at which the fault happens; 0 means before the workers have loaded."""
    ends: Literal["SUCCEEDED", "PAUSED", "FAILED"] = "SUCCEEDED"
    says: str = ""
    """Pattern that the command's output must match."""
    goes_on: bool = False
    """True if the command is started again and must then succeed."""
    most_losses: int = 99
    """Max number of losses of workers."""
    steps: int = 40
    settings: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    disk: str = ""
    """Folder that is a small disk: ``state`` or ``checkpoints``."""


def suffer(folder: Path, fault: Fault) -> dict[str, Any]:
    """Trains, injects a fault, and checks the outcome.

    Args:
        folder: Folder for the run's state.
        fault: The fault and its expected outcome.

    Returns:
        The run's end, its duration in seconds, and counts of its events.

    Raises:
        AssertionError: If the run ends in another state or for another reason, or its ledger does not close.
    """
    begin, state = time.monotonic(), folder / "state"
    settings = (f"trainer.steps={fault.steps}", *_SETTINGS, *fault.settings)
    with ExitStack() as stack:
        disk = None
        if fault.disk:
            disk = stack.enter_context(small_disk(folder / fault.disk, _DISK_MB))
        if fault.disk == "checkpoints":
            settings += (f"trainer.checkpoint.directory={folder / fault.disk}",)
        spec = write_plumbing(folder)
        training = Training(spec, state, *settings, prefix=fault.prefix, disk=disk)
        stack.callback(training.close)
        training.start()
        training.until_step(fault.begins)
        fault.happen(training)
        ended = _end(training.wait())
        output = training.output
        assert ended == fault.ends, f"{ended} instead of {fault.ends}:\n{output[-4000:]}"
        assert re.search(fault.says, output), f"no {fault.says!r} in:\n{output[-4000:]}"
        if fault.goes_on:
            if disk is not None:
                disk.free()
            training.start()
            assert training.wait() == 0, training.output[-4000:]
            assert "resuming it" in training.output
        facts = {}
        if ended == "SUCCEEDED" or fault.goes_on:
            facts = check_run(training.database_copy(folder / "checked"))
            assert facts["losses"] <= fault.most_losses, facts
    return {"ended": ended, "seconds": round(time.monotonic() - begin, 1), **facts}


def _end(code: int) -> str:
    return {0: "SUCCEEDED", 130: "PAUSED"}.get(code, "FAILED")


def _killed(*names: str) -> Fault:
    return Fault(happen=lambda training: training.kill(*names))


def _stopped(name: str, **more: Any) -> Fault:
    return Fault(happen=lambda training: training.stop(name, STOPPED_S), **more)


def _fill(training: Training) -> None:
    training.disk.fill()
    time.sleep(STOPPED_S / 2)
    training.disk.free()


def _fill_and_kill(training: Training) -> None:
    training.disk.fill()
    training.kill("trainer-0")
    time.sleep(STOPPED_S / 2)
    training.disk.free()


def _kill_the_transferqueue_of_loading_workers(training: Training) -> None:
    training.find("trainer-0")
    training.kill("transferqueue")


def _kill_the_command(training: Training) -> None:
    children = psutil.Process(training.process.pid).children(recursive=True)
    training.process.kill()
    training.wait()
    until(lambda: not any(child.is_running() for child in children), "the end of its processes")
    training.start()


def _corrupt_a_checkpoint(training: Training) -> None:
    """Damages the middle of the newest checkpoint's largest file while the run is paused."""
    training.hang_up()
    training.wait()
    folders = sorted(
        training.state.glob("run_*/checkpoints/step-*"), key=lambda path: path.stat().st_mtime
    )
    files = [path for path in folders[-1].rglob("*") if path.is_file()]
    with max(files, key=lambda path: path.stat().st_size).open("r+b") as file:
        file.seek(max(file.seek(0, 2) // 2 - 64, 0))
        file.write(b"\xff" * 128)
    training.start()


def _truncate_the_database(training: Training) -> None:
    training.cut_off()
    database = training.state / "slipstream.db"
    with closing(sqlite3.connect(database)) as connection:  # moves the whole database into one file
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with database.open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    training.start()


def _put_an_older_database(training: Training) -> None:
    """Restores an older database, as restoring a disk image does, while workers run without a controller."""
    database = training.state / "slipstream.db"
    older = training.state.parent / "older.db"
    copies.backup(database, older)
    training.until_step(_BEGINS + 5)
    with training.suspended():  # the command would restart the controller at once
        training.kill("controller")
        for suffix in ("-wal", "-shm"):
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        older.replace(database)


def _stop_the_controller_and_kill(training: Training) -> None:
    training.stop("controller", STOPPED_S, meanwhile=lambda: training.kill("rollout-0"))


def _stop_the_trainer_and_hang_up(training: Training) -> None:
    training.stop("trainer-0", STOPPED_S, meanwhile=training.hang_up)


FAULTS: dict[str, Fault] = {
    "controller killed": _killed("controller"),
    "transferqueue killed": _killed("transferqueue"),
    "transferqueue killed while workers load": Fault(
        happen=_kill_the_transferqueue_of_loading_workers, begins=0, steps=4
    ),
    "rollout killed": _killed("rollout-0"),
    "trainer killed": _killed("trainer-0"),
    # A stopped controller must not count its workers as lost.
    "controller stopped": _stopped("controller", most_losses=0),
    "transferqueue stopped": _stopped("transferqueue"),
    # Many steps, so that the other rollout still works when this one continues.
    "rollout stopped": _stopped("rollout-0", steps=300, most_losses=2),
    "trainer stopped": _stopped("trainer-0"),
    "disk full for a while": Fault(happen=_fill, disk="state"),
    "disk full for good": Fault(
        happen=lambda training: training.disk.fill(),
        disk="state",
        settings=("limits.max_restarts=2",),
        ends="FAILED",
        says="the disk of .* is full",
        goes_on=True,
    ),
    "disk of the checkpoints full": Fault(
        happen=lambda training: training.disk.fill(),
        disk="checkpoints",
        says="No space left on device",
    ),
    "checkpoint corrupted": Fault(happen=_corrupt_a_checkpoint),
    "database truncated": Fault(
        happen=_truncate_the_database, ends="FAILED", says="slipstream.db is damaged"
    ),
    "database went back": Fault(
        happen=_put_an_older_database, ends="FAILED", says="the database is an older copy"
    ),
    # Without a terminal, the next start reports the pause.
    "terminal lost": Fault(
        happen=lambda training: training.hang_up(), ends="PAUSED", goes_on=True, steps=80
    ),
    "command killed": Fault(happen=_kill_the_command, says="resuming it"),
    "few descriptors": Fault(happen=lambda training: None, prefix=(*_DESCRIPTORS, "128")),
    "controller and trainer killed": _killed("controller", "trainer-0"),
    "transferqueue and rollout killed": _killed("transferqueue", "rollout-0"),
    "both rollouts killed": _killed("rollout-0", "rollout-1"),
    "controller stopped, rollout killed": Fault(
        happen=_stop_the_controller_and_kill, most_losses=1
    ),
    "trainer stopped, terminal lost": Fault(
        happen=_stop_the_trainer_and_hang_up, ends="PAUSED", goes_on=True
    ),
    "disk full, trainer killed": Fault(happen=_fill_and_kill, disk="state"),
}


def suffered(folder: Path, name: str) -> dict[str, Any]:
    """Injects one fault; returns its result, also if it is a failure."""
    try:
        return suffer(folder, FAULTS[name])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        # The cause is at the end of the output.
        return {"failure": f"{why[:300]} ... {why[-1000:]}" if len(why) > 1300 else why}
    except NoNamespacesError as error:
        return {"skipped": str(error)}
